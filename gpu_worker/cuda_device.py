"""GPUs of CUDA, and of ROCm, whose builds of torch call theirs so. Only `cuda_*` files know them.

Rules:

- One block of torch's allocator holds one model, so that it ends as a whole.
- What processes share is not of that allocator: see `cuda_memory`.
- What the driver raises becomes one of our errors, with the driver's as its cause.

    Note on views
    fact: a slice of the block shares its storage; a tensor over a pointer, made through
    `__cuda_array_interface__`, has a storage of its own, and keeps the Python object it came from
    consequence: only the latter make an alias group that can be saved or resized by itself, and
    tell by that object's end when the last of them is gone
    choice: those, all of whose objects keep the block's hold; torch takes none that says that it is
    read-only, so shared memory says that it is not: its map refuses what writes there
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

    Note on fork
    fact: CUDA cannot be used in a child that was forked after its parent had used it
    consequence: nothing here can go on in such a child
    choice: it gets an error with that in it; memory that it is to free is left to its parent
    cost: such a child needs another device, or to be started afresh
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Iterator

import torch

from gpu_worker.block import Block, Memory, Piece
from gpu_worker.cuda_driver import first_line
from gpu_worker.cuda_memory import SharedMemory, Sharing, sharing
from gpu_worker.cuda_uploads import (
    BUFFERS,
    CopyStream,
    Uploads,
    buffers,
    registration,
)
from gpu_worker.device import DeviceSegment
from shm_store.errors import (
    ArgumentRefused,
    DeviceOutOfMemory,
    DeviceUnavailable,
    DeviceUnknown,
    SegmentRefused,
)
from shm_store.layout import PAGE_BYTES, round_up
from shm_store.report import size_text
from shm_store.sizes import parse_size

logger = logging.getLogger("gpu_worker")

ROUND_BYTES = 2 * 1024 * 1024
LEAST_BYTES = 10 * 1024 * 1024
"""See the note on what a block takes."""

PINNED_VARIABLE = "WEIGHT_CACHE_PINNED_BYTES"
DEFAULT_PINNED = "64MiB"


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

    def __init__(self, index: int) -> None:
        """Use the device of that index, which `usable_index` has returned.

        Raises:
            DeviceUnavailable: it cannot be used.
            ArgumentRefused: WEIGHT_CACHE_PINNED_BYTES is no size.
        """
        self.name = f"cuda:{index}"
        self.torch_device = torch.device("cuda", index)
        self._index = index
        self._pinned_bytes = parse_size(os.environ.get(PINNED_VARIABLE) or DEFAULT_PINNED)
        with _driver(self.name):
            self.pool = f"vram:{torch.cuda.get_device_properties(index).uuid}"
        self._pid = os.getpid()
        self._lock = threading.RLock()
        """Guards what is made once."""
        self._total_bytes: int | None = None
        self._uploads: Uploads | None = None
        self._memories: set[Memory] = set()
        self._sharing: Sharing | None = None
        self._why_private: str | None = None
        """None until it was tried."""

    @property
    def shares(self) -> bool:
        return not self.why_private

    @property
    def why_private(self) -> str:
        if os.getpid() != self._pid:
            return str(_forked())
        with self._lock:
            if self._why_private is None:
                self._why_private = self._try_sharing()
            return self._why_private

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

    def segment_bytes(self, size_bytes: int) -> int:
        return self._shared().taken_bytes(size_bytes)

    def make_segment(self, size_bytes: int, owner: str) -> DeviceSegment:
        self._free_abandoned()
        shared = self._shared()
        with self._using():
            uploads = self.uploads()
        pages = SharedMemory(shared, shared.taken_bytes(size_bytes))
        segment = CudaSegment(self, uploads, pages)
        give_back = functools.partial(self._unshare, pages)
        segment.memory = Memory(pages.size_bytes, segment, give_back, self._memories)
        try:
            self._make(pages)
        except BaseException:
            segment.close()
            raise
        return segment

    def open_segment(self, fd: int, size_bytes: int) -> Block:
        self._free_abandoned()
        shared = self._shared()
        if size_bytes != shared.taken_bytes(size_bytes):
            raise SegmentRefused(f"{self.name} has no memory of {size_bytes} bytes, exactly")
        pages, hold = SharedMemory(shared, size_bytes), _Hold()
        give_back = functools.partial(self._unshare, pages)
        memory = Memory(size_bytes, hold, give_back, self._memories)
        try:
            with self._using():
                pages.open(fd)
        except BaseException:
            del hold
            memory.free()
            raise
        hold.address = pages.address
        return SharedBlock(self, memory, hold)

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
                registered = registration(self._index)
                self._uploads = Uploads(CopyStream(self.torch_device), pinned, registered)
            return self._uploads

    @contextlib.contextmanager
    def _using(self, needed_bytes: int = 0) -> Iterator[None]:
        if torch.cuda._is_in_bad_fork():
            raise _forked()
        with _driver(self.name, needed_bytes):
            yield

    def _try_sharing(self) -> str:
        """Return why memory of this device cannot be shared; "" if it can."""
        if torch.version.hip is not None:
            return "ROCm's driver is not asked for that"
        try:
            with self._using():
                self._sharing = sharing(self._index, self.name)
        except DeviceUnavailable as error:
            return str(error)
        return ""

    def _shared(self) -> Sharing:
        if why := self.why_private:
            raise DeviceUnavailable(f"{self.name} cannot share its memory: {why}", remedy="")
        assert self._sharing is not None
        return self._sharing

    def _make(self, pages: SharedMemory) -> None:
        """Have memory to be shared, if need be what torch keeps unused."""
        with self._using():
            try:
                pages.make()
            except DeviceOutOfMemory:
                torch.cuda.empty_cache()
                pages.make()

    def _unshare(self, pages: SharedMemory) -> None:
        """Give back what this process has of shared memory; see the note on streams."""
        if os.getpid() == self._pid:
            with _driver(self.name):
                torch.cuda.synchronize(self.torch_device)
        pages.give_back()

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
    """What a block and its views keep, with the memory as torch's allocator knows it, if it does.

    Attributes:
        address: where it is.
    """

    __slots__ = ("__weakref__", "address", "memory")

    def __init__(self, memory: torch.Tensor | None = None) -> None:
        self.memory = memory
        self.address = 0 if memory is None else memory.data_ptr()


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


class _Viewed(Block):
    """Memory of a GPU at an address, as torch makes tensors of it."""

    def __init__(self, device: CudaDevice, memory: Memory, hold: _Hold) -> None:
        super().__init__(memory, hold)
        self._on = device

    def _device(self) -> torch.device:
        return self._on.torch_device

    def _view(self, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        with self._on._using():
            device = self._on.torch_device
            return _over(device, self._address(), offset_bytes, size_bytes, self._hold())

    def _address(self) -> int:
        hold = self._hold()
        assert isinstance(hold, _Hold)
        return hold.address


class CudaBlock(_Viewed):
    """A block of torch's allocator, and the order of what happens to it."""

    def __init__(
        self,
        device: CudaDevice,
        uploads: Uploads,
        memory: Memory,
        hold: _Hold,
        ready: torch.cuda.Event,
    ) -> None:
        super().__init__(device, memory, hold)
        self._uploads = uploads
        self._ready: torch.cuda.Event | None = ready
        """What copies have to wait for, until the first has."""

    def finish(self) -> None:
        self._hold()
        with self._on._using():
            self._uploads.stream.finish()

    def _fill(self, offset_bytes: int, source: Piece) -> None:
        with self._on._using():
            if self._ready is not None:
                self._uploads.stream.wait_for(self._ready)
                self._ready = None
            _send(self._uploads, self._on.torch_device, self._address() + offset_bytes, source)


class SharedBlock(_Viewed):
    """Memory that other processes have, too. It is there, and a kernel that writes to it faults."""

    def finish(self) -> None:
        self._hold()

    def _fill(self, offset_bytes: int, source: Piece) -> None:
        raise ArgumentRefused(f"shared memory of {self._on.name} is only read")


class CudaSegment:
    """Memory that other processes are to have, while it is filled.

    Attributes:
        memory: the device frees it with the next, if this is dropped or could not be closed.
    """

    memory: Memory

    def __init__(self, device: CudaDevice, uploads: Uploads, pages: SharedMemory) -> None:
        self._on = device
        self._uploads = uploads
        self._pages = pages

    @property
    def fd(self) -> int:
        return self._pages.fd

    def fill(self, offset_bytes: int, source: Piece) -> None:
        if offset_bytes < 0 or offset_bytes + source.size_bytes > self._pages.size_bytes:
            raise ArgumentRefused(
                f"{source.size_bytes} bytes at {offset_bytes} reach out of a segment of "
                f"{self._pages.size_bytes}"
            )
        if source.size_bytes:
            with self._on._using():
                address = self._pages.address + offset_bytes
                _send(self._uploads, self._on.torch_device, address, source)

    def finish(self) -> None:
        with self._on._using():
            self._uploads.stream.finish()

    def close(self) -> None:
        if self.memory in self._on._memories:
            try:
                self._on._unshare(self._pages)
            except DeviceUnavailable as error:
                # Whoever closes has an error of his own, or needs none: others have the memory.
                # The text of it: whoever keeps the error keeps this segment.
                logger.warning("weight-cache: memory is not given back yet: %s", str(error))
                return
            self._on._memories.discard(self.memory)


def _send(uploads: Uploads, device: torch.device, address: int, source: Piece) -> None:
    """Start to copy bytes to an address. By address: a traceback is not to keep the memory."""
    uploads.send(functools.partial(_over, device, address), source)


def _over(
    device: torch.device, address: int, offset: int, length: int, hold: object = None
) -> torch.Tensor:
    """Return a tensor over bytes of the device, which keeps `hold` and nothing else."""
    made = torch.as_tensor(_Range(hold, address + offset, length), device=device)
    if made.data_ptr() != address + offset:
        raise RuntimeError(f"torch has copied what is to be used where it is, on {device}")
    return made


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
        raise DeviceUnavailable(f"{name}: {first_line(error)}") from error


def _forked() -> DeviceUnavailable:
    return DeviceUnavailable(
        "CUDA was used before this process was forked, and cannot be used in the child",
        remedy='fork before the first use, start children with "spawn", or use "cpu" in them',
    )
