"""What tests of workers against a real coordinator share."""

from __future__ import annotations

import os
import threading
import time

import torch
from safetensors.torch import save_file

from tests.processes import Peer

WAIT_S = 20.0


def write(path, value: float) -> str:
    """Write weights for `skeleton` beside `path`, then rename: all are `value`."""
    save_file({"weight": torch.full((2, 3), value), "bias": torch.full((2,), value)}, f"{path}.new")
    os.rename(f"{path}.new", path)
    return str(path)


def skeleton() -> torch.nn.Linear:
    return torch.nn.Linear(3, 2)


def leases(operator: Peer, key: str) -> int:
    """How many sessions lease the one generation of `key`."""
    generation = operator.generation(key)
    return len(generation.leases) if generation else 0


def wait_until(condition) -> None:
    """Wait for what the other process does by itself; nothing here can be awaited for it."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.005)
