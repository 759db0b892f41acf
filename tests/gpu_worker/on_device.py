"""What tests of modules on a simulated device share."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import torch

from shm_store.memfds import kernel_bytes
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
