"""What tests of devices share: bytes that cannot be mistaken, in a file or a tensor; ends."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import torch

from gpu_worker.block import Piece

PAGE = 4096


def some_bytes(size_bytes: int, seed: int = 0) -> torch.Tensor:
    """Return bytes that are nowhere like those some bytes further on."""
    whole = torch.arange(size_bytes, dtype=torch.int64)
    return ((whole * 2654435761 + seed * 97) >> 7).to(torch.uint8)


def from_tensor(tensor: torch.Tensor) -> Piece:
    return Piece(tensor, None, 0, tensor.nbytes)


@contextmanager
def memfd(tensor: torch.Tensor) -> Iterator[int]:
    """Give a memfd with the bytes of `tensor`."""
    fd = os.memfd_create("weights-of-a-test")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(bytes(tensor.tolist()))
        yield fd
    finally:
        os.close(fd)


def told(ended: SimpleQueue[str]) -> list[str]:
    """Return what was enqueued so far."""
    found = []
    while not ended.empty():
        found.append(ended.get())
    return found


def script(text: str) -> str:
    """Run a script of its own process, which must end well; return what it has said."""
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=45, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
