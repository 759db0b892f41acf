"""The generated checkpoint: a large `.safetensors` file that is written fast. Needs no torch.

Every layer holds the same block of random numbers: their values do not matter to the demo, and a
repeated block is written at the speed of the disk.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass

_ITEM_BYTES = 4
_SEED = 20
# The top byte of a float32 has its sign and most of its exponent: these two give values of either
# sign between 0.008 and 0.031, with which a 4096 wide layer keeps the scale of its input.
_TOP_BYTES = bytes(0x3C if byte & 1 else 0xBC for byte in range(256))


@dataclass(frozen=True, slots=True)
class Shape:
    """A stack of square float32 layers."""

    width: int
    layers: int

    @property
    def block_bytes(self) -> int:
        return self.width * self.width * _ITEM_BYTES

    @property
    def size_bytes(self) -> int:
        return self.layers * self.block_bytes


def shape_of(size_mib: int) -> Shape:
    """Return a stack of about `size_mib`: wide layers for a large one, narrow for a small one."""
    width = 4096 if size_mib >= 256 else 1024
    return Shape(width, max(1, size_mib * 1024 * 1024 // Shape(width, 1).block_bytes))


def write(path: str, shape: Shape) -> None:
    """Write the checkpoint to `path`.

    Raises:
        OSError: there is no room for it.
    """
    header = {
        f"layers.{layer}.weight": {
            "dtype": "F32",
            "shape": [shape.width, shape.width],
            "data_offsets": [layer * shape.block_bytes, (layer + 1) * shape.block_bytes],
        }
        for layer in range(shape.layers)
    }
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    block = _block(shape.block_bytes)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(shape.layers):
            file.write(block)


def read_once(path: str) -> int:
    """Read all of a file, so that the page cache has it; return its size."""
    step = bytearray(1024 * 1024)
    total = 0
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(step):
            total += count
    return total


def room_bytes(folder: str) -> int:
    """Return how many bytes this user can still write in `folder`."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _block(size_bytes: int) -> bytes:
    """Return random float32 numbers, always the same."""
    block = bytearray(random.Random(_SEED).randbytes(size_bytes))
    block[3::4] = block[3::4].translate(_TOP_BYTES)
    return bytes(block)
