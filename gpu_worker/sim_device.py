"""A simulated device: a GPU that every machine has, to run and test on.

Its memory is memfds of its own, which the kernel can be asked about (`shm_store.memfds`); it is
really allocated, and weights are really copied there. It has a size, runs out of it, and can be
told to fail, to be slow and to be fragmented.

Rules:

- What `allocated_bytes` says is never under what the kernel says: counted before it is there, until
  it is gone.
- The limit is this process's, as with a real device that knows nobody: between processes it is the
  coordinator's pool that keeps it.
- A forked child has the blocks too, as memory it shares with its parent: what it writes there is
  written for both. It counts them as its own, and what other threads were just allocating.

    Note on filling
    fact: the first write to a page through a map is a fault, and the kernel clears the page for
    it; a write to the memfd does neither
    consequence: copying into the map costs twice as much as writing the same bytes to the file
    choice: `fill` writes (`copy_file_range` from a segment, `pwrite` from a tensor), and then has
    the kernel put all the pages into the map at once, so that no first use pays for them
    cost: that, which is a tenth of the copy
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import weakref
from dataclasses import dataclass, field

import torch

from gpu_worker import mapping
from gpu_worker.block import Block, Memory, Piece, ended
from gpu_worker.mapping import Buffer
from gpu_worker.reentry import free_after_fork
from shm_store import segment
from shm_store.errors import (
    DeviceOutOfMemory,
    DeviceUnavailable,
    DeviceUnknown,
    PlatformUnsupported,
    ResourceError,
    SegmentRefused,
)
from shm_store.layout import PAGE_BYTES, round_up
from shm_store.memfds import PREFIX, memfd_name
from shm_store.report import size_text
from shm_store.sizes import parse_size

SIZE_VARIABLE = "WEIGHT_CACHE_SIM_BYTES"
DEFAULT_SIZE = "1GiB"
STEP_BYTES = 64 * 1024 * 1024
"""Backed at once; a signal makes the kernel begin a step again."""

COPY_BYTES = 1024 * 1024
_NAME_LIMIT_BYTES = 249
"""The kernel refuses a longer name for a memfd."""
_MADV_POPULATE_READ = 22


@dataclass(frozen=True, slots=True)
class Faults:
    """What a simulated device does wrong, from when it is told on.

    Attributes:
        fail_fill: this fill from now on fails, and only this; 1 is the next. 0: none.
        fail_finish, fail_free: the same for waiting for copies, and for giving memory back.
        largest_block_bytes: a larger block is refused, however much is free: it is fragmented.
        slow_s: how long every fill takes, unless `go_on` is set.
        begun: set by each fill that is slow, when it begins to be.
        go_on: ends the wait of all fills.
    """

    fail_fill: int = 0
    fail_finish: int = 0
    fail_free: int = 0
    largest_block_bytes: int | None = None
    slow_s: float = 0.0
    begun: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)


class SimDevice:
    """One simulated device in this process; see `gpu_worker.device.Device`."""

    torch_device = torch.device("cpu")
    forks = True
    shares = True
    why_private = ""

    def __init__(self, index: int, size_bytes: int | None = None) -> None:
        """Make the device of that index, in general by `device_named`.

        Args:
            size_bytes: of its memory; None is what WEIGHT_CACHE_SIM_BYTES says.

        Raises:
            ArgumentRefused: it says no size.
        """
        self.name = f"sim:{index}"
        self.pool = f"vram:sim-{index}"
        if size_bytes is None:
            size_bytes = parse_size(os.environ.get(SIZE_VARIABLE) or DEFAULT_SIZE)
        self._size_bytes = size_bytes
        self._lock = threading.RLock()
        """Guards admission, and the counts of what it was told to do wrong."""
        self._memories: set[Memory] = set()
        self._coming: set[_Pages] = set()
        """Admitted, and not in `_memories` yet."""
        self._faults = Faults()
        self._until: dict[str, int] = {}
        _made.add(self)

    def total_bytes(self) -> int:
        return self._size_bytes

    def capacity_bytes(self) -> int:
        return self._size_bytes

    def charged_bytes(self, size_bytes: int) -> int:
        return max(round_up(size_bytes, PAGE_BYTES), PAGE_BYTES)

    def segment_bytes(self, size_bytes: int) -> int:
        return self.charged_bytes(size_bytes)

    def allocated_bytes(self) -> int:
        """Return how much of its memory this process has, or is just getting."""
        with self._lock:
            coming_bytes = sum(pages.size_bytes for pages in list(self._coming))
            return coming_bytes + sum(memory.size_bytes for memory in list(self._memories))

    def allocate(self, size_bytes: int, owner: str) -> Block:
        block_bytes = self.charged_bytes(size_bytes)
        self.release_cached()
        pages = _Pages(self, block_bytes)
        memory: Memory | None = None
        try:
            with self._lock:
                self._admit(block_bytes)
                self._coming.add(pages)
            buffer = pages.make(owner)
            with self._lock:
                self._coming.discard(pages)
                memory = Memory(block_bytes, buffer, pages.give_back, self._memories)
            return SimBlock(pages, memory, buffer)
        except BaseException:
            if memory is None:
                pages.unmake()
            self._coming.discard(pages)
            raise

    def make_segment(self, size_bytes: int, owner: str) -> SimSegment:
        block_bytes = self.charged_bytes(size_bytes)
        self.release_cached()
        pages = _Pages(self, block_bytes)
        try:
            with self._lock:
                self._admit(block_bytes)
                self._coming.add(pages)
            pages.make_unmapped(owner)
            made = SimSegment(pages)
            pages.filled_as = weakref.ref(made)
            return made
        except BaseException:
            self.drop(pages)
            raise

    def open_segment(self, fd: int, size_bytes: int) -> Block:
        name = memfd_name(fd) or ""
        if not name.startswith(f"{PREFIX}{self.name}:") or os.fstat(fd).st_size != size_bytes:
            raise SegmentRefused(f"{name or 'no memfd'}: no {size_bytes} bytes of {self.name}")
        self.release_cached()
        pages = _Pages(self, size_bytes)
        memory: Memory | None = None
        try:
            with self._lock:
                self._admit(size_bytes)
                self._coming.add(pages)
            buffer = pages.open(fd)
            with self._lock:
                self._coming.discard(pages)
                memory = Memory(size_bytes, buffer, pages.give_back, self._memories)
            return SimBlock(pages, memory, buffer)
        except BaseException:
            if memory is None:
                self.drop(pages)
            raise

    def drop(self, pages: _Pages) -> None:
        """Give back pages that nobody uses."""
        pages.unmake()
        self._coming.discard(pages)

    def release_cached(self) -> None:
        """Free the blocks that were dropped and that nobody watched, and what nobody fills."""
        with self._lock:
            for pages in list(self._coming):
                if pages.filled_as is not None and pages.filled_as() is None:
                    self.drop(pages)
            for memory in list(self._memories):
                if memory.abandoned:
                    memory.free()

    def synchronize(self) -> None:
        pass

    def tell(self, faults: Faults) -> None:
        """Do what `faults` says from now on, and nothing of what was told before."""
        with self._lock:
            self._faults = faults
            self._until = {
                "copy": faults.fail_fill,
                "finish": faults.fail_finish,
                "free": faults.fail_free,
            }

    def delay(self) -> None:
        """Take as long as a pass does on a device that was told to be slow."""
        faults = self._faults
        if faults.slow_s > 0:
            faults.begun.set()
            faults.go_on.wait(min(faults.slow_s, threading.TIMEOUT_MAX))

    def fail(self, what: str) -> None:
        """Raise if it was told to fail this time it does `what`."""
        with self._lock:
            left = self._until.get(what, 0)
            self._until[what] = left - 1
        if left == 1:
            raise DeviceUnavailable(f"{self.name} failed to {what}, as it was told to", remedy="")

    def after_fork(self) -> None:
        free_after_fork(self._lock)

    def _admit(self, block_bytes: int) -> None:
        free_bytes = self._size_bytes - self.allocated_bytes()
        largest = self._faults.largest_block_bytes
        if block_bytes > free_bytes:
            why = f"{size_text(max(free_bytes, 0))} of {size_text(self._size_bytes)} are free"
        elif largest is not None and block_bytes > largest:
            why = f"{size_text(free_bytes)} are free, but in pieces of {size_text(largest)}"
        else:
            return
        raise DeviceOutOfMemory(
            f"{self.name} has no block of {size_text(block_bytes)}: {why}",
            needed_bytes=block_bytes,
            free_bytes=max(free_bytes, 0),
        )


_made: weakref.WeakSet[SimDevice] = weakref.WeakSet()


class _Pages:
    """Where the pages of a block are: what is left of it to give back."""

    __slots__ = ("address", "device", "fd", "filled_as", "size_bytes", "unmapped")

    def __init__(self, device: SimDevice, size_bytes: int) -> None:
        self.device = device
        self.fd = -1
        """-1 once they are given back."""
        self.address = 0
        self.size_bytes = size_bytes
        self.unmapped = False
        self.filled_as: weakref.ref[SimSegment] | None = None
        """What is to be closed, where there is no block."""

    def make(self, owner: str) -> Buffer:
        """Have the pages, and return their map. Whatever it raises, `unmake` is to be called."""
        self.make_unmapped(owner)
        # Known before there is memory in it: an interrupt may come into the mapping.
        self.address = mapping.reserve_range(self.size_bytes)
        return mapping.map_shared(self.fd, self.size_bytes, address=self.address)

    def make_unmapped(self, owner: str) -> None:
        """Have the pages. Whatever it raises, `unmake` is to be called."""
        self.fd = _memfd(self.device.name, owner)
        _back(self.fd, self.size_bytes, self.device.name)
        segment.fix_size(self.fd)

    def open(self, fd: int) -> Buffer:
        """Have the pages that another has made, and return their map. As `make`."""
        self.fd = os.dup(fd)
        self.address = mapping.reserve_range(self.size_bytes)
        return mapping.map_sealed(self.fd, self.size_bytes, self.address)

    def unmake(self) -> None:
        """Give back what there is of pages that nobody uses yet. `give_back` has no more to do."""
        if self.address:
            self._unmap()
        self._close()

    def give_back(self) -> None:
        """Unmap and close, as `MappingTable.unmap` does; see its notes."""
        self.device.fail("free")
        self._unmap()
        self._close()

    def _unmap(self) -> None:
        if not self.unmapped:
            mapping.discard(self.address, self.size_bytes)
            self.unmapped = True
            mapping.unmap_range(self.address, self.size_bytes)

    def _close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def write(self, offset_bytes: int, source: Piece) -> None:
        """Copy the bytes of `source` there."""
        self.device.delay()
        self.device.fail("copy")
        if source.fd is None:
            segment.write_at(self.fd, source.bytes(), offset_bytes)
        else:
            self._copy(source.fd, source.fd_offset_bytes, offset_bytes, source.size_bytes)

    def _copy(self, fd: int, start: int, offset_bytes: int, size_bytes: int) -> None:
        copied_bytes = 0
        while copied_bytes < size_bytes:
            at, left_bytes = start + copied_bytes, size_bytes - copied_bytes
            to = offset_bytes + copied_bytes
            try:
                step_bytes = os.copy_file_range(fd, self.fd, left_bytes, at, to)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EINVAL):
                    raise
                # Between file systems newer kernels do not. A segment is always in the same one.
                data = os.pread(fd, min(left_bytes, COPY_BYTES), at)
                segment.write_at(self.fd, data, to)
                step_bytes = len(data)
            if not step_bytes:
                raise ended(at)
            copied_bytes += step_bytes

    def populate(self, offset_bytes: int, size_bytes: int) -> None:
        """Have the pages of a range in the map, so that its first use is no fault."""
        start = self.address + offset_bytes // PAGE_BYTES * PAGE_BYTES
        end = self.address + round_up(offset_bytes + size_bytes, PAGE_BYTES)
        # An old kernel has no such advice. Then they come with the first use.
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_POPULATE_READ)


class SimSegment:
    """A memfd of a simulated device that others are to map: it has no map that could be written to.

    Else the coordinator could not seal it.
    """

    def __init__(self, pages: _Pages) -> None:
        self._pages = pages

    @property
    def fd(self) -> int:
        return self._pages.fd

    def fill(self, offset_bytes: int, source: Piece) -> None:
        self._pages.write(offset_bytes, source)

    def finish(self) -> None:
        self._pages.device.fail("finish")

    def close(self) -> None:
        self._pages.device.drop(self._pages)


class SimBlock(Block):
    """A memfd of a simulated device, and its map."""

    def __init__(self, pages: _Pages, memory: Memory, buffer: Buffer) -> None:
        super().__init__(memory, buffer)
        self._pages = pages

    def finish(self) -> None:
        self._hold()
        self._pages.device.fail("finish")

    def _device(self) -> torch.device:
        return self._pages.device.torch_device

    def _view(self, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        return torch.frombuffer(
            self._hold(), dtype=torch.uint8, count=size_bytes, offset=offset_bytes
        )

    def _fill(self, offset_bytes: int, source: Piece) -> None:
        self._pages.write(offset_bytes, source)
        self._pages.populate(offset_bytes, source.size_bytes)


def tell(name: str, faults: Faults) -> None:
    """Have a simulated device of this process do wrong what `faults` says; `Faults()` is nothing.

    Raises:
        DeviceUnknown: this is the name of no simulated device.
    """
    from gpu_worker.device import device_named

    device = device_named(name)
    if not isinstance(device, SimDevice):
        raise DeviceUnknown(f"{name!r} is no simulated device", remedy='use "sim:N"')
    device.tell(faults)


def _memfd(name: str, owner: str) -> int:
    if not hasattr(os, "memfd_create"):
        raise PlatformUnsupported("this system has no memfd_create")
    whole = os.fsencode(f"{PREFIX}{name}:{owner}")[:_NAME_LIMIT_BYTES]
    return os.memfd_create(os.fsdecode(whole), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _back(fd: int, size_bytes: int, name: str) -> None:
    """Really allocate, or the first touch may be a SIGBUS; see the note in `shm_store.segment`."""
    try:
        for start in range(0, size_bytes, STEP_BYTES):
            os.posix_fallocate(fd, start, min(STEP_BYTES, size_bytes - start))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise ResourceError(f"memory of {name}: {error}") from error
        raise DeviceOutOfMemory(
            f"the host has no memory for a block of {size_text(size_bytes)} of {name}",
            needed_bytes=size_bytes,
            remedy=f"simulate a smaller device: {SIZE_VARIABLE}",
        ) from error


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _after_fork() -> None:
    for device in list(_made):
        device.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
