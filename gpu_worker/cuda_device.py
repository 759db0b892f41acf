"""GPUs of CUDA, and of ROCm, whose builds of torch call theirs so. The only file that knows them.

Rules:

- One block of torch's allocator holds one model, so that it ends as a whole.
- Weights go from the segment to the device through a few pinned buffers: nobody maps them, and no
  more memory is pinned than that.
- What the driver raises becomes one of our errors, with the driver's as its cause.

    Note on views
    fact: a slice of the block shares its storage; a tensor over a pointer, made through
    `__cuda_array_interface__`, has a storage of its own, and keeps the Python object it came from
    consequence: only the latter make an alias group that can be saved or resized by itself, and
    tell by that object's end when the last of them is gone
    choice: those, all of whose objects keep the block's hold
    cost: torch needs numpy for it, which accelerate brings

    Note on streams
    fact: the allocator hands memory out whose last user's kernels are still running, and takes it
    back in the belief that only the stream it was allocated on has used it; of kernels that read
    through a pointer it knows nothing, and `record_stream` on our views does nothing
    consequence: a copy could overtake an old kernel, and an old kernel read what a new owner writes
    choice: copies have a stream of their own, which waits for the allocating one; `finish` waits
    for that stream, so that all streams may use the views afterwards; and before a block goes back
    to the allocator, its end waits for everything that the device was asked to do
    cost: the keeper waits for kernels of other models

    Note on what a block takes
    fact: the allocator rounds to 2 MiB, but takes 20 MiB at once for 1 to 10 MiB, and packs smaller
    ones together: such a segment goes back to the device only when all in it is gone
    consequence: a small block would take more than is charged, and its end would free nothing
    choice: no block is smaller than 10 MiB, the least that has a segment of exactly its size
    cost: memory, for very small models

    Note on registration
    fact: a host's pages can be pinned where they are, but the driver pins for writing, and a
    private writable map that is pinned is copied, page by page; without a copy it takes a shared
    map and a flag that few drivers support
    consequence: most systems have only the buffers, and a failed attempt may leave an error behind
    that the next kernel launch is blamed for
    choice: ask the driver, by its own interface, which keeps no error; then measure both ways once
    cost: the first upload goes three ways

    Note on fork
    fact: CUDA cannot be used in a child that was forked after its parent had used it
    consequence: nothing here can go on in such a child
    choice: it gets an error with that in it; memory that it is to free is left to its parent
    cost: such a child needs another device, or to be started afresh
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpu_worker import mapping
from gpu_worker.block import Block, Memory, Piece
from gpu_worker.device import DeviceSegment
from gpu_worker.pinned_ring import Copy, PinnedRing
from shm_store.errors import DeviceOutOfMemory, DeviceUnavailable, DeviceUnknown
from shm_store.layout import PAGE_BYTES, round_up
from shm_store.report import size_text
from shm_store.sizes import parse_size

logger = logging.getLogger("gpu_worker")

ROUND_BYTES = 2 * 1024 * 1024
LEAST_BYTES = 10 * 1024 * 1024
"""See the note on what a block takes."""

PINNED_VARIABLE = "WEIGHT_CACHE_PINNED_BYTES"
DEFAULT_PINNED = "64MiB"
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


def usable_index(index: int | None) -> int:
    """Return the index of a device that is there and can be used; None is the current one.

    Raises:
        DeviceUnknown: there are fewer devices.
        DeviceUnavailable: no driver, no device, or a forked child.
    """
    if torch.cuda._is_in_bad_fork():
        raise _forked()
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = "no driver, or no device" if built else "this torch is built without it"
        raise DeviceUnavailable(
            f"no CUDA device can be used here: {why}",
            remedy='install a torch build for your GPU, see `nvidia-smi`, or use "cpu" or "sim:N"',
        )
    with _driver("cuda"):
        if index is None:
            return torch.cuda.current_device()
        count = torch.cuda.device_count()
    if index >= count:
        raise DeviceUnknown(f"there is no cuda:{index}: this process sees {count} device(s)")
    return index


def charged_bytes(size_bytes: int) -> int:
    """Return what a block takes of any such device."""
    return max(round_up(size_bytes, ROUND_BYTES), LEAST_BYTES)


class CudaDevice:
    """One GPU, as this process sees it; see `gpu_worker.device.Device`."""

    forks = False
    shares = False

    def __init__(self, index: int) -> None:
        """Use the device of that index, which `usable_index` has returned.

        Raises:
            DeviceUnavailable: it cannot be used.
            ArgumentRefused: WEIGHT_CACHE_PINNED_BYTES is no size.
        """
        self.name = f"cuda:{index}"
        self.torch_device = torch.device("cuda", index)
        self._pinned_bytes = parse_size(os.environ.get(PINNED_VARIABLE) or DEFAULT_PINNED)
        with _driver(self.name):
            self.pool = f"vram:{torch.cuda.get_device_properties(index).uuid}"
        self._pid = os.getpid()
        self._lock = threading.RLock()
        """Guards what is made once."""
        self._total_bytes: int | None = None
        self._uploads: Uploads | None = None
        self._memories: set[Memory] = set()

    def total_bytes(self) -> int:
        with self._using(), self._lock:
            if self._total_bytes is None:
                free_bytes, _ = torch.cuda.mem_get_info(self.torch_device)
                self._total_bytes = free_bytes + torch.cuda.memory_reserved(self.torch_device)
            return self._total_bytes

    def capacity_bytes(self) -> int:
        with self._using():
            _, whole_bytes = torch.cuda.mem_get_info(self.torch_device)
            return int(whole_bytes)

    def charged_bytes(self, size_bytes: int) -> int:
        return charged_bytes(size_bytes)

    def allocate(self, size_bytes: int, owner: str) -> Block:
        self._free_abandoned()
        block_bytes = charged_bytes(size_bytes)
        with self._using(block_bytes), torch.inference_mode(False):
            # Not `empty`, which accelerate patches in some versions.
            memory = torch.empty_strided(
                (block_bytes,), (1,), dtype=torch.uint8, device=self.torch_device
            )
            ready = torch.cuda.current_stream(self.torch_device).record_event()
            uploads = self.uploads()
        hold = _Hold(memory)
        give_back = functools.partial(self._give_back, [memory])
        whole = Memory(block_bytes, hold, give_back, self._memories)
        return CudaBlock(self, uploads, whole, hold, ready)

    def make_segment(self, size_bytes: int, owner: str) -> DeviceSegment:
        raise DeviceUnavailable(f"{self.name} cannot share its memory")

    def open_segment(self, fd: int, size_bytes: int) -> Block:
        raise DeviceUnavailable(f"{self.name} cannot share its memory")

    def release_cached(self) -> None:
        self._free_abandoned()
        with self._using():
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        with self._using():
            torch.cuda.synchronize(self.torch_device)

    def uploads(self) -> Uploads:
        """Return what brings bytes to this device. Its buffers are pinned by the first call."""
        with self._lock:
            if self._uploads is None:
                size_bytes = max(self._pinned_bytes // BUFFERS // PAGE_BYTES, 1) * PAGE_BYTES
                pinned = buffers(self.name, BUFFERS, size_bytes)
                registered = registration(self.torch_device.index)
                self._uploads = Uploads(CopyStream(self.torch_device), pinned, registered)
            return self._uploads

    @contextlib.contextmanager
    def _using(self, needed_bytes: int = 0) -> Iterator[None]:
        if torch.cuda._is_in_bad_fork():
            raise _forked()
        with _driver(self.name, needed_bytes):
            yield

    def _free_abandoned(self) -> None:
        with self._lock:
            for memory in list(self._memories):
                if memory.abandoned:
                    memory.free()

    def _give_back(self, memory: list[torch.Tensor]) -> None:
        """See the note on streams."""
        if os.getpid() != self._pid:
            return  # it is the parent's
        with _driver(self.name):
            torch.cuda.synchronize(self.torch_device)
            memory.clear()
            torch.cuda.empty_cache()


class _Hold:
    """What a block and its views keep, with the memory as torch's allocator knows it."""

    __slots__ = ("__weakref__", "memory")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory


class _Range:
    """A range of a block, as torch makes a tensor of it that keeps this object."""

    __slots__ = ("__cuda_array_interface__", "_hold")

    def __init__(self, hold: object, address: int, size_bytes: int) -> None:
        self._hold = hold
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class CudaBlock(Block):
    """A block of torch's allocator, and the order of what happens to it."""

    def __init__(
        self,
        device: CudaDevice,
        uploads: Uploads,
        memory: Memory,
        hold: _Hold,
        ready: torch.cuda.Event,
    ) -> None:
        super().__init__(memory, hold)
        self._on = device
        self._uploads = uploads
        self._ready: torch.cuda.Event | None = ready
        """What copies have to wait for, until the first has."""

    def finish(self) -> None:
        self._hold()
        with self._on._using():
            self._uploads.stream.finish()

    def _device(self) -> torch.device:
        return self._on.torch_device

    def _view(self, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        with self._on._using():
            device = self._on.torch_device
            return _over(device, self._address(), offset_bytes, size_bytes, self._hold())

    def _fill(self, offset_bytes: int, source: Piece) -> None:
        with self._on._using():
            if self._ready is not None:
                self._uploads.stream.wait_for(self._ready)
                self._ready = None
            # By address, or the traceback of a failure would keep the memory.
            target = functools.partial(_over, self._on.torch_device, self._address() + offset_bytes)
            self._uploads.send(target, source)

    def _address(self) -> int:
        hold = self._hold()
        assert isinstance(hold, _Hold)
        return hold.memory.data_ptr()


def _over(
    device: torch.device, address: int, offset: int, length: int, hold: object = None
) -> torch.Tensor:
    """Return a tensor over bytes of the device, which keeps `hold` and nothing else."""
    return torch.as_tensor(_Range(hold, address + offset, length), device=device)


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
                _first_line(error),
            )
        return buffers(name, count, size_bytes, pin=False)


def _memory(buffer: torch.Tensor) -> memoryview:
    """Return the bytes of a buffer, which has to be kept meanwhile."""
    whole = (ctypes.c_ubyte * buffer.nbytes).from_address(buffer.data_ptr())
    return memoryview(whole).cast("B")


@contextlib.contextmanager
def _driver(name: str, needed_bytes: int = 0) -> Iterator[None]:
    """Make our errors of what the driver, or torch's allocator, raises in the block."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        free_bytes = 0
        with contextlib.suppress(RuntimeError, AssertionError):  # where torch knows no CUDA
            free_bytes, _ = torch.cuda.mem_get_info(name)
        raise DeviceOutOfMemory(
            f"{name} has no block of {size_text(needed_bytes)}: {size_text(free_bytes)} are free",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
        ) from error
    except (RuntimeError, torch.cuda.DeferredCudaCallError) as error:
        raise DeviceUnavailable(f"{name}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _forked() -> DeviceUnavailable:
    return DeviceUnavailable(
        "CUDA was used before this process was forked, and cannot be used in the child",
        remedy='fork before the first use, start children with "spawn", or use "cpu" in them',
    )
