"""The devices that modules run on: their names, and what a worker wants of any of them. The seam.

Rules:

- A device has one name and one object in a process: who compares devices compares names, index
  and all. `cuda:1` is not `cuda:0`.
- Nothing here charges: a block is allocated after its bytes were, and its charge ends after `free`.
- Only `cuda_*` files know CUDA, and only `sim_device` knows how a device is simulated.

| name | is | its memory |
| --- | --- | --- |
| `cpu` | the host | none: modules run on the shared pages, nothing is moved |
| `cuda:N` | a GPU of CUDA or ROCm | blocks of torch's allocator |
| `sim:N` | a simulated device: a GPU that every machine has | memfds, on which the CPU computes |
"""

from __future__ import annotations

import os
import re
import threading
from typing import TYPE_CHECKING, Protocol

from gpu_worker.reentry import free_after_fork
from shm_store.errors import ArgumentRefused, DeviceUnknown

if TYPE_CHECKING:
    import torch

    from gpu_worker.block import Block, Piece

_NAME = re.compile(r"(cpu|sim|cuda)(?::(0|[1-9][0-9]{0,2}))?")


class DeviceSegment(Protocol):
    """Memory on a device that is to be shared, while it is filled. It has no tensors.

    Attributes:
        fd: what other processes know it by.
    """

    @property
    def fd(self) -> int: ...

    def fill(self, offset_bytes: int, source: Piece) -> None:
        """Copy bytes there. As `Block.fill`."""

    def finish(self) -> None:
        """Wait until all of it is there. As `Block.finish`."""

    def close(self) -> None:
        """Have it no more. What was given away stays others'. May be called again."""


class Device(Protocol):
    """What a worker wants of a device. Thread-safe.

    All may raise DeviceUnavailable: it is gone, or was the parent's before a fork.
    """

    @property
    def name(self) -> str:
        """Return "cpu", "cuda:1", "sim:0". Equal names are one device."""

    @property
    def forks(self) -> bool:
        """Whether a forked child can use it, and what is on it."""

    @property
    def shares(self) -> bool:
        """Whether its memory can be given to other processes, as an fd: by `make_segment`.

        It may be tried with the first call, which never raises.
        """

    @property
    def why_private(self) -> str:
        """Return why it does not share, for people; "" if it does."""

    @property
    def torch_device(self) -> torch.device:
        """Return where torch sees its tensors: "cpu" for `sim`."""

    @property
    def pool(self) -> str | None:
        """Return the budget its memory is charged to, which all processes call the same.

        It is "vram:" and the GPU's uuid, or "sim-N"; None where modules run on shared pages.
        """

    def total_bytes(self) -> int:
        """Return what one may budget: what others did not use at this process's first call."""

    def capacity_bytes(self) -> int:
        """Return how much memory it has in all, whoever uses it."""

    def charged_bytes(self, size_bytes: int) -> int:
        """Return what a block of `size_bytes` really takes."""

    def allocate(self, size_bytes: int, owner: str) -> Block:
        """Return a block of at least `size_bytes`, whose content is anything.

        Args:
            owner: the generation it is for, by its id. The kernel shows it where it can.

        Returns:
            The caller's, who sees to it that its memory is freed: see `Block`.

        Raises:
            DeviceOutOfMemory: there is no such block. Nothing was taken.
        """

    def segment_bytes(self, size_bytes: int) -> int:
        """Return what a segment of `size_bytes` really takes. It has that size exactly."""

    def make_segment(self, size_bytes: int, owner: str) -> DeviceSegment:
        """Return memory that other processes can use, to be filled. As `allocate`.

        Returns:
            The caller's, to be closed when it was given away, or is of no use.
        """

    def open_segment(self, fd: int, size_bytes: int) -> Block:
        """Return memory that a process has made so, as its readers have it: nobody may write to it.

        Args:
            fd: of it. Stays the caller's.

        Raises:
            SegmentRefused: it is no memory of this device, or has another size.
            DeviceOutOfMemory: as `allocate`.
        """

    def release_cached(self) -> None:
        """Give memory that this process keeps and nothing uses back to the device."""

    def synchronize(self) -> None:
        """Wait until the device has done what it was asked to."""


class _Cpu:
    """The host: nothing is moved there, so it has no memory of its own, and no budget."""

    name = "cpu"
    forks = True
    shares = False
    why_private = "its memory is the host's, which is shared as it is"
    pool = None

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device("cpu")

    def total_bytes(self) -> int:
        return 0

    def capacity_bytes(self) -> int:
        return 0

    def charged_bytes(self, size_bytes: int) -> int:
        return 0

    def allocate(self, size_bytes: int, owner: str) -> Block:
        raise ArgumentRefused("modules run on the shared pages of the host, in no memory of theirs")

    def segment_bytes(self, size_bytes: int) -> int:
        return 0

    def make_segment(self, size_bytes: int, owner: str) -> DeviceSegment:
        raise ArgumentRefused("the host's memory is shared as it is")

    def open_segment(self, fd: int, size_bytes: int) -> Block:
        raise ArgumentRefused("the host's memory is shared as it is")

    def release_cached(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


_lock = threading.RLock()
_devices: dict[str, Device] = {}
"""By name. `_lock` guards it."""


def device_named(name: str | torch.device) -> Device:
    """Return the device of that name; always the same object in one process.

    "cuda" is the calling thread's current one, "sim" is "sim:0".

    Raises:
        DeviceUnknown: there is no such name, or no device of this index.
        DeviceUnavailable: it has no driver that works, or this is a child that was forked after
            its parent had used it.
        ArgumentRefused: WEIGHT_CACHE_SIM_BYTES, or WEIGHT_CACHE_PINNED_BYTES, is no size.
    """
    # A torch.device, without torch: who attaches hears first whether there is a coordinator.
    text = str(name) if type(name).__name__ == "device" else name
    match = _NAME.fullmatch(text) if isinstance(text, str) else None
    if match is None or (match[1] == "cpu" and match[2] not in (None, "0")):
        shown = repr(text)
        raise DeviceUnknown(f"{shown[:60]} is no device that modules can be on")
    kind, index = match[1], match[2]
    if kind == "cuda":
        from gpu_worker import cuda_device

        index = str(cuda_device.usable_index(None if index is None else int(index)))
    known = kind if kind == "cpu" else f"{kind}:{index or 0}"
    with _lock:
        if known not in _devices:
            _devices[known] = _made(kind, int(index or 0))
        return _devices[known]


def _made(kind: str, index: int) -> Device:
    match kind:
        case "cuda":
            from gpu_worker.cuda_device import CudaDevice

            return CudaDevice(index)
        case "sim":
            from gpu_worker.sim_device import SimDevice

            return SimDevice(index)
        case _:
            return _Cpu()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: free_after_fork(_lock))
