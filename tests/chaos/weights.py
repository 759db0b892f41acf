"""The weights of a chaos run: which there are, and what each version of them must give, to the bit.

Every number is small and whole, so sums are exact and an inference has one right answer. A version
is part of the weights, so whoever has them knows which they are.
"""

from __future__ import annotations

import functools
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Weights:
    """What one key stands for: two matrices of `width` by `width`."""

    key: str
    width: int


SOURCES = tuple(Weights(f"source-{width}", width) for width in (64, 128, 320, 512, 896))
"""Read from files."""
BUILDS = tuple(Weights(f"build-{width}", width) for width in (64, 192, 448))
"""Made by `build=`."""
PRIVATE = Weights("private-96", 96)
STEADY = Weights("steady-128", 128)
"""A file that never changes: each worker infers with it for all of its life."""

KEPT = 2
"""Of `SOURCES`, so many are small enough for a worker to keep while it loads others."""

BUDGET_BYTES = 11 * MIB
"""The largest takes 8; all take 17 and more: there is always somebody who has to go."""


DEVICE = "sim:0"
PRIVATE_VARIABLE = "WEIGHT_CACHE_CHAOS_PRIVATE"
"""Set to anything, each worker has copies of its own there."""
DEVICE_BYTES = 8 * MIB
"""The largest takes 6.2 there, and each worker keeps STEADY on it."""


class Net(torch.nn.Module):
    """The model of all weights."""

    version: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(width, width, bias=False)
        self.second = torch.nn.Linear(width, width, bias=False)
        self.register_buffer("version", torch.zeros(1, dtype=torch.int64))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return infer(given, self.first.weight, self.second.weight)


def infer(given: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return torch.relu(given @ first.T) @ second.T


@functools.lru_cache(maxsize=6)
def expected(weights: Weights, version: int) -> dict[str, torch.Tensor]:
    """Return the state that a version must have. Made here, in memory of this process."""
    lots = torch.Generator().manual_seed(zlib.crc32(f"{weights.key} {version}".encode()))
    shape = (weights.width, weights.width)
    first, second = (torch.randint(-3, 4, shape, generator=lots).float() for _ in range(2))
    return {
        "first.weight": first,
        "second.weight": second,
        "version": torch.tensor([version]),
    }


def given(weights: Weights) -> torch.Tensor:
    """Return what every inference is asked."""
    return torch.arange(weights.width, dtype=torch.float32).remainder(5).reshape(1, -1)


@functools.lru_cache(maxsize=32)
def answer(weights: Weights, version: int) -> torch.Tensor:
    """Return what a version must say."""
    state = expected(weights, version)
    return infer(given(weights), state["first.weight"], state["second.weight"])


# --- versions -------------------------------------------------------------------------------------


def source_path(folder: str, weights: Weights) -> str:
    return os.path.join(folder, f"{weights.key}.safetensors")


def write_source(folder: str, weights: Weights, version: int) -> None:
    """Put a version in the place of the one before, in one step."""
    path = source_path(folder, weights)
    state = dict(expected(weights, version))
    save_file(state, f"{path}.new", {"version": str(version)})
    os.rename(f"{path}.new", path)


def source_version(folder: str, weights: Weights) -> int:
    """Return the version that is in the file just now."""
    with open(source_path(folder, weights), "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return int(json.loads(file.read(length))["__metadata__"]["version"])


def build_path(folder: str, weights: Weights) -> Path:
    return Path(folder, f"{weights.key}.version")


def write_build(folder: str, weights: Weights, version: int) -> None:
    path = build_path(folder, weights)
    new = path.with_suffix(".new")
    new.write_text(str(version))
    new.rename(path)


def build_version(folder: str, weights: Weights) -> int:
    return int(build_path(folder, weights).read_text())
