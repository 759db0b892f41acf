"""How bytes come to a GPU: through a few pinned buffers, or from the pages that they are in.

Weights go from the segment to the device: nobody maps them, and no more memory is pinned than that.

    Note on registration
    fact: a host's pages can be pinned where they are, but the driver pins for writing, and a
    private writable map that is pinned is copied, page by page; without a copy it takes a shared
    map and a flag that few drivers support
    consequence: most systems have only the buffers, and a failed attempt may leave an error behind
    that the next kernel launch is blamed for
    choice: ask the driver, by its own interface, which keeps no error; then measure both ways once
    cost: the first upload goes three ways
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpu_worker import mapping
from gpu_worker.block import Piece
from gpu_worker.cuda_driver import first_line
from gpu_worker.pinned_ring import Copy, PinnedRing
from shm_store.layout import PAGE_BYTES, round_up
from shm_store.report import size_text

logger = logging.getLogger("gpu_worker")

BUFFERS = 8
"""That share the pinned bytes of a device; see the note on several readers."""
READERS = 6

PROBE_BYTES = 16 * 1024 * 1024
"""What is smaller says nothing about which way is faster."""
CLEARLY = 0.9
_READ_ONLY_SUPPORTED = 113
"""CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED"""
_REGISTER_READ_ONLY = 0x08
"""CU_MEMHOSTREGISTER_READ_ONLY"""

Target = Callable[[int, int], torch.Tensor]
"""Makes a tensor over where bytes are to be: from an offset on, so many. Keeps none of it alive."""


class CopyStream:
    """A stream of the device's, for copies to it only; see the note on streams."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Have the copies that are started from now on wait for `event`."""
        self._stream.wait_event(event)

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """Start to copy the bytes of `source`, on the host, to `target`, on the device."""
        # Blocking: who waits for it sleeps, and others read.
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            copied.record(self._stream)
        return copied

    def finish(self) -> None:
        """Wait for all copies that were started."""
        self._stream.synchronize()


class Uploads:
    """The way to one device: through pinned buffers, or from registered pages, if that is faster.

    Thread-safe.
    """

    def __init__(
        self,
        stream: CopyStream,
        buffers: list[torch.Tensor],
        registration: Registration | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Use `buffers`, all of one size, and `registration` where it can be had."""
        self.stream = stream
        self._buffers = buffers
        readers = max(1, min(READERS, len(os.sched_getaffinity(0)) - 1))
        self._ring = PinnedRing([_memory(buffer) for buffer in buffers], readers)
        self._registration = registration
        """None where it cannot be, or was not faster."""
        self._clock = clock
        self._measured = registration is None
        self._measuring = threading.Lock()

    def send(self, target: Target, source: Piece) -> None:
        """Start to copy the bytes of `source` to `target`, which has room for them.

        When this returns the source has been read.
        """
        if not self._measured and source.fd is not None and source.size_bytes >= PROBE_BYTES:
            with self._measuring:
                if not self._measured:
                    self._measure(target, source)
                    self._measured = True
                    return
        registration = self._registration if self._measured else None
        if registration is None or not self._registered(registration, target, source):
            self._through_buffers(target, source)

    def _through_buffers(self, target: Target, source: Piece) -> None:
        def start(number: int, offset: int, length: int) -> Copy:
            part = self._buffers[number][:length]
            return self.stream.start(target(offset, length), part)

        self._ring.send(source.size_bytes, source.read, start)

    def _registered(self, registration: Registration, target: Target, source: Piece) -> bool:
        """Copy from the segment's own pages, which are pinned meanwhile; False if they cannot be.

        So a pass is pinned beside the buffers.
        """
        if source.fd is None:
            return False
        start = source.fd_offset_bytes // PAGE_BYTES * PAGE_BYTES
        lead_bytes = source.fd_offset_bytes - start
        length = round_up(lead_bytes + source.size_bytes, PAGE_BYTES)
        pages = mapping.map_shared(source.fd, length, start, write=False)
        address = ctypes.addressof(pages)
        try:
            with registration.pinned(address, length) as pinned:
                if pinned:
                    whole = torch.frombuffer(
                        pages, dtype=torch.uint8, count=source.size_bytes, offset=lead_bytes
                    )
                    self.stream.start(target(0, source.size_bytes), whole).synchronize()
                return pinned
        finally:
            mapping.unmap_range(address, length)

    def _measure(self, target: Target, source: Piece) -> None:
        """Copy the bytes both ways, and keep registration only if it is clearly faster."""
        registration = self._registration
        assert registration is not None
        self._through_buffers(target, source)  # who comes first touches what the others find
        self.stream.finish()
        start_s = self._clock()
        self._through_buffers(target, source)
        self.stream.finish()
        between_s = self._clock()
        done = self._registered(registration, target, source)
        if not done or self._clock() - between_s > CLEARLY * (between_s - start_s):
            self._registration = None


class Registration:
    """Pins pages of the host for reading by the device, where they are."""

    def __init__(self, driver: Any) -> None:
        """Use the driver's own library, which keeps no error for others to stumble over."""
        self._driver = driver

    @contextlib.contextmanager
    def pinned(self, address: int, size_bytes: int) -> Iterator[bool]:
        """Have whole pages pinned in the block, or say that they could not be."""
        place = ctypes.c_void_p(address)
        flags = ctypes.c_uint(_REGISTER_READ_ONLY)
        if self._driver.cuMemHostRegister_v2(place, ctypes.c_size_t(size_bytes), flags):
            yield False
            return
        try:
            yield True
        finally:
            self._driver.cuMemHostUnregister(place)


def registration(index: int, driver: Any = None) -> Registration | None:
    """Return what pins pages for that device; None if it can only be had by copying them.

    Args:
        driver: libcuda, already in use. None: the one of this process.
    """
    if torch.version.hip is not None:
        return None
    device, supported = ctypes.c_int(), ctypes.c_int()
    try:
        driver = driver or ctypes.CDLL("libcuda.so.1")
        failed = driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceGetAttribute(
            ctypes.byref(supported), _READ_ONLY_SUPPORTED, device
        )
    except (OSError, AttributeError):
        return None
    return Registration(driver) if supported.value and not failed else None


_warned = False


def buffers(name: str, count: int, size_bytes: int, pin: bool = True) -> list[torch.Tensor]:
    """Return `count` buffers of the host, pinned. Where they cannot be, they are not: slower.

    The first time that happens in a process it is logged.
    """
    global _warned
    try:
        return [
            torch.empty_strided(
                (size_bytes,), (1,), dtype=torch.uint8, device="cpu", pin_memory=pin
            )
            for _ in range(count)
        ]
    except RuntimeError as error:
        if not pin:
            raise
        if not _warned:
            _warned = True
            logger.warning(
                "%s of memory cannot be pinned for uploads to %s, which are slower so: %s",
                size_text(count * size_bytes),
                name,
                first_line(error),
            )
        return buffers(name, count, size_bytes, pin=False)


def _memory(buffer: torch.Tensor) -> memoryview:
    """Return the bytes of a buffer, which has to be kept meanwhile."""
    whole = (ctypes.c_ubyte * buffer.nbytes).from_address(buffer.data_ptr())
    return memoryview(whole).cast("B")
