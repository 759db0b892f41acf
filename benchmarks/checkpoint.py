"""The generated checkpoint that everybody loads, and the first read of what was loaded.

Its tensors have the shapes of a language model without biases: per layer two vectors and seven
matrices, all fp16 (a dtype that numpy, and so Ray, has too) unless told otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

Tensors = dict[str, torch.Tensor]

PAGE_BYTES = 4096

# Rows and columns in units of the model's width; 0 is a vector.
_LAYER = {
    "input_norm": (1, 0),
    "attention.q": (1, 1),
    "attention.k": (0.25, 1),
    "attention.v": (0.25, 1),
    "attention.o": (1, 1),
    "post_norm": (1, 0),
    "mlp.gate": (2.75, 1),
    "mlp.up": (2.75, 1),
    "mlp.down": (1, 2.75),
}


def generate(size_bytes: int, tensor_count: int, dtype: torch.dtype = torch.float16) -> Tensors:
    """Return `tensor_count` tensors of about `size_bytes` together."""
    units = [shape for _, shape in zip(range(tensor_count), _names_forever(), strict=False)]
    area = sum(rows * columns for _, (rows, columns) in units)
    width = max(8, round((size_bytes / dtype.itemsize / area) ** 0.5 / 4) * 4)
    tensors = {}
    for number, (name, (rows, columns)) in enumerate(units):
        shape = [round(rows * width)] + ([round(columns * width)] if columns else [])
        # Any pattern that is not zeros will do: nobody computes with it.
        tensors[name] = torch.full(shape, number % 97 + 1, dtype=dtype)
    return tensors


def _names_forever():
    layer = 0
    while True:
        for name, shape in _LAYER.items():
            yield f"model.layers.{layer}.{name}.weight", shape
        layer += 1


def write_safetensors(tensors: Mapping[str, torch.Tensor], path: Path) -> Path:
    """Write a `.safetensors` file, and see that nothing of it is still on its way to the disk."""
    from safetensors.torch import save_file

    save_file(dict(tensors), path)
    _sync(path)
    return path


def write_pickled(tensors: Mapping[str, torch.Tensor], path: Path) -> Path:
    """Write a `.pt` file for `torch.load`, likewise."""
    torch.save(dict(tensors), path)
    _sync(path)
    return path


def _sync(path: Path) -> None:
    with open(path, "rb") as written:
        os.fsync(written.fileno())


def total_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes of all tensors together."""
    return sum(tensor.nbytes for tensor in tensors.values())


def read_every_page(tensors: Mapping[str, torch.Tensor]) -> int:
    """Read a byte of every page of every tensor; return their sum, so that all must be read."""
    total = 0
    for tensor in tensors.values():
        flat = tensor.view(-1).view(torch.uint8).numpy()
        total += int(flat[::PAGE_BYTES].sum()) + int(flat[-1])
    return total
