"""The device that is checked, a worker on it, and who is asked about it: the books, and the driver.

Note on the driver's words
fact: what torch has reserved is this process's alone, to the byte; what is free on the device
is everybody's, and a kernel that is loaded with its first use takes some of it for good
consequence: the first can be held against the books exactly, the second only nearly
choice: both, each from where it was before, the second with SLACK_BYTES
cost: a leak of less than that in another process is not seen
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import torch

import gpu_worker
from benchmarks.device_check.checks import Missed
from benchmarks.device_check.models import Make, layers, numbers
from coordinator.operator import Operator
from gpu_worker.device import Device, device_named
from shm_store.errors import ArgumentRefused
from shm_store.keys import Key
from shm_store.memfds import by_owner, kernel_bytes
from shm_store.report import GenerationReport

MIB = 1 << 20
SLACK_BYTES = 16 * MIB
UNLIMITED_BYTES = 1 << 50

_numbers = itertools.count(1)
"""Of the keys of this process."""


class Place:
    """One device in this process, used through one worker. A context manager that shuts it down.

    Attributes:
        size_bytes: of a large model.
        rounds: how often each way of uploading is measured.
    """

    def __init__(self, socket: str, device: str, size_bytes: int, rounds: int) -> None:
        """Attach.

        Raises:
            WeightCacheError: there is no such device, or it cannot be used.
        """
        self.socket = socket
        self.size_bytes = size_bytes
        self.rounds = rounds
        self.device: Device = device_named(device)
        self.worker = gpu_worker.attach(socket, device=device, name="device-check")
        self.operator = Operator.connect(socket, "device-check")
        self._handles: list[gpu_worker.ModelHandle] = []
        self._shared: list[str] = []
        """The keys of those whose memory on the device outlives its processes."""

    @property
    def simulated(self) -> bool:
        return self.device.name.startswith("sim:")

    @property
    def pool(self) -> str:
        assert self.device.pool is not None
        return self.device.pool

    # --- models ---------------------------------------------------------------------------------

    def load(
        self, make: Make, *, private: bool = False, shares: bool = False
    ) -> gpu_worker.ModelHandle:
        """Load what `make` makes under a key of its own, until `tidy`.

        Args:
            shares: on the device it is to be memory that other processes have, too.
        """
        key = f"device-check/{next(_numbers)}"
        self._handles.append(
            self.worker.load(key, skeleton=make, build=make, private=private, share_vram=shares)
        )
        if shares:
            self._shared.append(key)
        return self._handles[-1]

    def forget(self, handle: gpu_worker.ModelHandle) -> None:
        """Let go of a model, and have it free for everybody. Nobody may use it any more."""
        key = handle.key
        self._handles.remove(handle)
        handle.close()
        self.worker.evict(key)
        self.settle()
        self.evict(key)

    def evict(self, key: str) -> None:
        """Have what nobody uses of a shared model free, on the host, too, if it is there."""
        with contextlib.suppress(ArgumentRefused):
            self.operator.evict(Key(key))
        self.operator.flush()

    def moved_bytes(self) -> int:
        """Return how many bytes this process has moved to the device."""
        return sum(model.moved_bytes for model in self.worker._table.counted())

    def warm_up(self) -> None:
        """Have everything loaded and pinned that the first use of the device brings with it."""
        x = numbers(2, 1024).to(self.device.torch_device)
        with self.load(lambda: layers(4, 1024)) as module, torch.no_grad():
            module(x)
        self.device.synchronize()
        del x, module
        self.tidy()

    def tidy(self) -> None:
        """Have nothing on the device, and no limit.

        Raises:
            Missed: something stays charged.
        """
        keys = [handle.key for handle in self._handles]
        while self._handles:
            self._handles.pop().close()
        for key in keys:
            self.worker.evict(key)
        self.settle()
        while self._shared:
            self.evict(self._shared.pop())
        self.limit(UNLIMITED_BYTES)
        self.settle()
        left = [report.key for report in self.on_device()]
        if left:
            raise Missed(f"still charged afterwards: {', '.join(left)}")

    def settle(self) -> None:
        """Return once everything that was let go of is gone, by the coordinator's word."""
        gc.collect()
        self.worker.flush()
        self.device.release_cached()

    # --- what is said of it ---------------------------------------------------------------------

    def limit(self, size_bytes: int) -> None:
        """Let models take so much of the device, in all."""
        self.operator.limit(self.pool, size_bytes)

    def on_device(self) -> list[GenerationReport]:
        """Return what is on the device by the books."""
        return [one for one in self.operator.status().generations if one.pool == self.pool]

    def charged_bytes(self) -> int:
        """Return what is taken of the device by the books."""
        return sum(
            pool.in_use_bytes for pool in self.operator.status().pools if pool.name == self.pool
        )

    def own_bytes(self) -> int:
        """Return what this process has there: by torch, or by the kernel where it is simulated."""
        if self.simulated:
            return kernel_bytes(self.device.name, os.getpid())
        return torch.cuda.memory_reserved(self.device.torch_device)

    def used_bytes(self) -> int:
        """Return what all processes have there: by the driver, or the kernel.

        A simulated device is one of each coordinator: other runs on this host have theirs.
        """
        if self.simulated:
            start = self.operator.status().start
            return sum(size for gen, size in by_owner().items() if gen.startswith(f"{start}-"))
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.device.torch_device)
        return total_bytes - free_bytes

    @property
    def slack_bytes(self) -> int:
        """How far `used_bytes` may be off; see the note above."""
        return 0 if self.simulated else SLACK_BYTES

    # --- ends -----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with contextlib.suppress(Exception):  # the checks have said what is wrong
            self.tidy()
        self.operator.__exit__(None, None, None)
        self.worker.shutdown()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor as bytes on the host, in their order."""
    whole = tensor.detach().cpu().contiguous().reshape(-1)
    return whole.view(torch.uint8)


def named(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and buffer under each of its names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
