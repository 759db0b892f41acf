"""What tests of modules on a simulated device share."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import torch

from gpu_worker import Worker
from shm_store.memfds import by_owner, kernel_bytes
from shm_store.report import GenerationReport
from tests.processes import Peer

MIB = 1 << 20

_indexes = itertools.count(500)
"""From where no test names one itself."""


def new_device() -> str:
    """Return the name of a simulated device that no other test of this process has."""
    return f"sim:{next(_indexes)}"


def matrix(side: int = 256, value: float = 1.0) -> Callable[[], torch.nn.Module]:
    """Return a build of a module of `side` x `side` floats, and a bias."""

    def build() -> torch.nn.Module:
        module = torch.nn.Linear(side, side)
        torch.nn.init.constant_(module.weight, value)
        torch.nn.init.constant_(module.bias, value)
        return module

    return build


def skeleton(side: int = 256) -> Callable[[], torch.nn.Module]:
    return lambda: torch.nn.Linear(side, side)


def charged(operator: Peer, device: str) -> int:
    """Return what is in use of a device by the books."""
    name = f"vram:sim-{device.partition(':')[2]}"
    return next((pool.in_use_bytes for pool in operator.status().pools if pool.name == name), 0)


def taken(device: str) -> int:
    """Return what this process has there by the kernel."""
    return kernel_bytes(device, os.getpid())


def there(operator: Peer, device: str) -> list[GenerationReport]:
    """Return what is on the device by the books; the kernel says the same of each."""
    pool = f"vram:sim-{device.partition(':')[2]}"
    found = [g for g in operator.status().generations if g.pool == pool and g.state == "ready"]
    taken = by_owner()
    for generation in found:
        assert taken[generation.generation] == generation.size_bytes
    return found


def moved(worker: Worker) -> int:
    """Return how many bytes were brought to the device for a worker so far."""
    return sum(model.moved_bytes for model in worker._table.counted())
