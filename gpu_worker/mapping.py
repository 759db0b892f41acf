"""This process's maps of segments, and how they end.

Rules:

- One mapping per generation and process. A grant for a generation whose tensors still live hands
  the new lease id to that mapping (rule 3 of the protocol).
- A map is private and writable: an edit in place stays in this process, as copied pages.
- A map ends in one order: the last tensor dies, its finalizer *enqueues* the mapping, the keeper
  thread unmaps it, and only then may its lease be released, with the id read then.
- One fd is kept for each map, as long as it is there: a coordinator that was started anew gets the
  segment from those who have it.

`MappingTable` is used by a reader thread that must never run torch, so nothing here knows torch:
tensors over a map are made in `tensors`.

    Note on finalizers
    fact: a finalizer runs in whatever thread dropped the last reference, inside any lock, and even
    inside another call of this module, if a garbage collection starts there
    consequence: it may take no lock and call nothing that could wait
    choice: it is `SimpleQueue.put`, which is reentrant, and nothing else, called by the reference
    itself: in the Python code of `weakref.finalize` an interrupt could come first, and lose it
    cost: a keeper thread has to be there

    Note on fork
    fact: a forked child inherits mappings, table and queue, and the keeper may be in the middle of
    an unmapping: the kernel has done a step, and nobody has noted it
    consequence: the child cannot know what is still mapped, and munmap of what is not could hit
    what another thread has put there since
    choice: nothing goes back to the kernel step by step: each step is replaced by a reservation,
    which may be done twice, and that goes as a whole. Its child does all of it again
    cost: the child keeps addresses reserved, but no memory, if the fork fell into that last call
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

from gpu_worker.pages import fault_in
from gpu_worker.records import Asked
from gpu_worker.reentry import free_after_fork, owned
from shm_store import segment
from shm_store.errors import (
    PlatformUnsupported,
    ResourceError,
    SegmentRefused,
    WeightCacheError,
)
from shm_store.keys import GenerationId, Key, LeaseId
from shm_store.layout import HUGE_PAGE_BYTES, PAGE_BYTES, round_up
from shm_store.manifest import Manifest
from shm_store.wire import HeldMap

UNMAP_STEP_BYTES = 64 * 1024 * 1024
"""One munmap of 2 GB stalls the process's other threads for 100 ms; this much, for about 3 ms."""

# From <linux/mman.h>, spelled out so that importing works on systems without them.
_PROT_NONE = 0
_PROT_READ = 0x1
_PROT_READ_WRITE = 0x1 | 0x2
_MAP_SHARED = 0x01
_MAP_PRIVATE = 0x02
_MAP_FIXED = 0x10
_MAP_ANONYMOUS = 0x20
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value


class Buffer(ctypes.Array[ctypes.c_ubyte]):
    """The bytes of one mapped segment. Every tensor over them keeps it alive.

    Instances belong to subclasses with a length, see `map_segment`; they can be weakly referenced.
    """

    _type_ = ctypes.c_ubyte
    _length_ = 0
    __slots__ = ("__weakref__", "_content", "_faulted_in", "_whole")
    __hash__ = object.__hash__  # ctypes takes it away; each is itself

    _content: tuple[Manifest, int]
    _faulted_in: bool
    _whole: Buffer

    def hand_out(self) -> Buffer:
        """Return the same bytes as an object of its own: who was given it can be told apart."""
        handed = type(self).from_buffer(self)
        handed._whole = self
        return handed

    def fault_in(self) -> None:
        """Have all of it be read soon: see `pages.fault_in`. Done once for each map."""
        whole = getattr(self, "_whole", self)
        if not hasattr(whole, "_faulted_in"):
            whole._faulted_in = True
            fault_in(ctypes.addressof(whole), round_up(len(whole), PAGE_BYTES))

    def content(self) -> tuple[Manifest, int]:
        """Return the manifest, and where tensor bytes begin. Decoded once, kept with the buffer.

        Raises:
            SegmentRefused: the manifest cannot be read.
        """
        with contextlib.suppress(AttributeError):
            return self._whole.content()
        try:
            return self._content
        except AttributeError:
            self._content = segment.read_manifest(memoryview(self))
            return self._content


class Mapping:
    """One map of a segment: what it is, where it is, and the lease that pays for it."""

    __slots__ = (
        "address",
        "asked",
        "buffer",
        "collected",
        "fd",
        "gen",
        "handed_out",
        "key",
        "lease",
        "letting_go",
        "size_bytes",
        "unmapped",
        "watched",
    )

    def __init__(
        self,
        gen: GenerationId,
        key: Key,
        lease: LeaseId,
        buffer: Buffer,
        ended: SimpleQueue[Mapping],
        fd: int,
    ) -> None:
        """Describe the map that `buffer` is made over, without keeping it alive.

        Whoever makes it keeps it for as long as `buffer` lives; then it goes into `ended`. `fd` is
        the segment's, and is the mapping's from now on.
        """
        self.gen = gen
        self.key = key
        self.lease = lease
        """The id to release once the bytes are unmapped. A later grant replaces it."""
        self.asked: Asked = ""
        """What the coordinator has asked of the lease. A later grant voids it."""
        self.letting_go = False
        """It asked to let go, and that is being done."""
        self.collected = False
        """Garbage was, because of what it asked."""
        self.handed_out: list[weakref.ref[Buffer]] = []
        """One for each GRANT, as long as something uses what it was for."""
        self.watched: list[weakref.ref[Buffer]] = []
        """To those of them whose end is to be told."""
        self.address = ctypes.addressof(buffer)
        self.size_bytes = len(buffer)
        self.fd = fd
        """-1 once it is unmapped."""
        self.unmapped = False
        """Nothing of it is mapped, though its addresses may be reserved."""
        self.tell(ended, buffer)

    def tell(self, ended: SimpleQueue[Mapping], buffer: Buffer) -> None:
        """Have the end of `buffer` put this mapping into `ended`, and into no other queue."""
        # `put` ignores its second argument, which is the reference here.
        self.buffer = weakref.ref(buffer, functools.partial(ended.put, self))

    def hand_out(self, buffer: Buffer) -> Buffer:
        """Return the bytes for one more user."""
        handed = buffer.hand_out()
        alive = [known for known in self.handed_out if known() is not None]
        self.handed_out = [*alive, weakref.ref(handed)]
        return handed


class MappingTable:
    """The mappings of this process, one per generation. Thread-safe.

    `ended` is the keeper's queue. It gets each mapping whose last tensor is gone, to `unmap`, and
    tasks.
    """

    def __init__(self, ended: SimpleQueue[Any]) -> None:
        self._ended = ended
        self._lock = threading.RLock()
        self._mappings: dict[GenerationId, Mapping] = {}
        self._there: set[Mapping] = set()
        """Those not forgotten yet: the newest of each generation, and older ones on their way out.
        """

    @property
    def held_up(self) -> bool:
        """Whether the calling thread is in a call here, which a GRANT would have to wait for."""
        return owned(self._lock)

    def __len__(self) -> int:
        """Return how many mappings are not forgotten yet, with or without live tensors."""
        return len(self._there)

    def granted(self, gen: GenerationId, lease: LeaseId, fd: int, wanted: bool) -> Buffer | None:
        """Take note of a grant, and return the bytes it is for. Call it in the order of frames.

        Consumes `fd`, also when it raises: a new map keeps it. Never touches torch.

        Args:
            lease: the grant's request id.
            fd: the segment that came with the grant.
            wanted: whether somebody still waits for it.

        Returns:
            The buffer. Dropping it gives the lease back, whether it was wanted or not. None when
            this process has no map of the generation and none is wanted: the caller then releases
            `lease`.

        Raises:
            SegmentRefused: the fd is not that generation's sealed segment.
            ResourceError: there is no address space for it.
            In both cases the caller releases `lease`, unless it is `pending`.
        """
        mapping: Mapping | None = None
        kept = False
        try:
            with self._lock:
                mapping = self._mappings.get(gen)
                buffer = None if mapping is None else mapping.buffer()
                if mapping is not None and buffer is not None:
                    mapping.lease, mapping.asked = lease, ""
                    return mapping.hand_out(buffer)
                # A mapping whose tensors are gone but whose bytes are still mapped: the lease must
                # outlive them. A new mapping is unmapped, and so released, after the old one.
                if wanted or mapping is not None:
                    buffer = self._map(gen, lease, fd)
                    kept = True
                return buffer
        except WeightCacheError:
            if mapping is None:
                raise
            # The old map is still there, and its end is now this lease's.
            mapping.lease = lease
            raise
        finally:
            if not kept:
                os.close(fd)

    def pending(self, gen: GenerationId, lease: LeaseId) -> bool:
        """Say whether the end of a map that is still there will release `lease`."""
        with self._lock:
            mapping = self._mappings.get(gen)
            return mapping is not None and mapping.lease == lease

    def revoked(self, gen: GenerationId, lease: LeaseId, asked: Asked) -> bool:
        """Note what the coordinator asks of a lease, unless it is over, or another is there."""
        with self._lock:
            mapping = self._mappings.get(gen)
            if mapping is None or mapping.lease != lease:
                return False
            mapping.asked, mapping.letting_go, mapping.collected = asked, asked != "idle", False
            return True

    def answered(self, mapping: Mapping) -> bool:
        """Take back what was asked of a mapping if that is still "idle", and say whether it was."""
        with self._lock:
            asked, mapping.asked = mapping.asked, "" if mapping.asked == "idle" else mapping.asked
            return asked == "idle"

    def others_use(
        self, mapping: Mapping, known: Sequence[object], told: Callable[[], object]
    ) -> bool:
        """Say whether something uses a mapping beside the `known` of those it was handed out to.

        Args:
            told: a task, put into the queue of what has ended when one of the others ends.
        """
        with self._lock:
            alive = [handed for one in mapping.handed_out if (handed := one()) is not None]
            others = [handed for handed in alive if not any(handed is one for one in known)]
            # As for the whole: nothing but `put` runs where the last reference is dropped.
            told_of = functools.partial(self._ended.put, told)
            mapping.watched = [weakref.ref(handed, told_of) for handed in others]
            return bool(others)

    def alive(self, gen: GenerationId) -> Mapping | None:
        """Return the mapping of a generation, if something keeps its bytes."""
        mapping = self._mappings.get(gen)
        return mapping if mapping is not None and mapping.buffer() is not None else None

    def hand_out(self, gen: GenerationId) -> Buffer | None:
        """Return the bytes of a generation for one more user, if something keeps them."""
        with self._lock:
            mapping = self._mappings.get(gen)
            buffer = None if mapping is None else mapping.buffer()
            return None if mapping is None or buffer is None else mapping.hand_out(buffer)

    def around(self, address: int, size_bytes: int) -> tuple[Mapping, Buffer] | None:
        """Return the mapping that these bytes are in, and itself for one more user of it."""
        with self._lock:
            for mapping in self._mappings.values():
                offset = address - mapping.address
                if 0 <= offset <= mapping.size_bytes - size_bytes:
                    buffer = mapping.buffer()
                    return None if buffer is None else (mapping, mapping.hand_out(buffer))
        return None

    def asked(self, gen: GenerationId) -> Asked:
        """Return what the coordinator has asked of the lease on a generation."""
        mapping = self._mappings.get(gen)
        return "" if mapping is None else mapping.asked

    def leaving(self, key: Key) -> bool:
        """Say whether weights of `key` are on their way out to make room, and not yet unmapped."""
        with self._lock:
            return any(
                mapping.key == key
                and mapping.asked == "room"
                and (mapping.letting_go or mapping.buffer() is None)
                for mapping in self._mappings.values()
            )

    @contextlib.contextmanager
    def held(self) -> Iterator[list[tuple[HeldMap, int]]]:
        """Give every generation whose bytes are mapped, and its fd, which is open in the block."""
        with self._lock:
            yield [
                (HeldMap(mapping.gen, mapping.lease, mapping.asked == "stale"), mapping.fd)
                for mapping in self._mappings.values()
                if mapping.fd >= 0
            ]

    def dup_fd(self, gen: GenerationId) -> int | None:
        """Return an fd of the segment of a generation, the caller's to close; None without one."""
        fd = None
        try:
            with self._lock:
                mapping = self._mappings.get(gen)
                if mapping is not None and mapping.fd >= 0:
                    fd = os.dup(mapping.fd)
        except BaseException:
            if fd is not None:
                os.close(fd)
            raise
        return fd

    def unmap(self, mapping: Mapping) -> None:
        """Unmap bytes that no tensor uses any more. Only the keeper calls this, once per mapping.

        In a forked child again, if the parent's keeper was at it; see the note on fork.
        """
        assert mapping.buffer() is None, "unmapping under a live tensor ends the process"
        if not mapping.unmapped:
            whole_bytes = round_up(mapping.size_bytes, PAGE_BYTES)
            discard(mapping.address, whole_bytes)
            mapping.unmapped = True
            unmap_range(mapping.address, whole_bytes)
        with self._lock:
            fd, mapping.fd = mapping.fd, -1
        if fd >= 0:
            os.close(fd)  # before the RELEASE, or the memory would stay when it is called free

    def forget(self, mapping: Mapping) -> LeaseId:
        """Count a mapping that was unmapped no longer, and return the lease to release for it.

        A step of its own: who counts mappings to know whether it may close the connection must not
        find none while that release is still to be sent.
        """
        with self._lock:
            self._there.discard(mapping)
            if self._mappings.get(mapping.gen) is mapping:
                del self._mappings[mapping.gen]
            return mapping.lease

    def after_fork(self, new_lease: Callable[[], LeaseId], ended: SimpleQueue[Any]) -> None:
        """In a forked child: have all of it as its own, under leases that nobody knows yet."""
        free_after_fork(self._lock)
        self._ended = ended
        self._there.update(self._mappings.values())  # another thread may have been between the two
        for mapping in self._there:
            buffer = mapping.buffer()
            if buffer is not None:
                mapping.tell(ended, buffer)
            mapping.lease, mapping.letting_go, mapping.watched = new_lease(), False, []
            if mapping.asked != "stale":
                mapping.asked = ""

    def _map(self, gen: GenerationId, lease: LeaseId, fd: int) -> Buffer:
        try:
            preamble = segment.read_preamble(fd)
            size_bytes = os.fstat(fd).st_size
        except OSError as error:
            raise SegmentRefused(f"the fd granted for generation {gen}: {error}") from error
        if preamble.gen != gen:
            raise SegmentRefused(
                f"the segment granted as generation {gen} says it is {preamble.gen}"
            )
        buffer = map_segment(fd, size_bytes)
        mapping = Mapping(gen, preamble.key, lease, buffer, self._ended, fd)
        self._mappings[gen] = mapping
        self._there.add(mapping)
        return mapping.hand_out(buffer)


def map_segment(fd: int, size_bytes: int) -> Buffer:
    """Map a sealed segment at a 2 MiB boundary, so that huge pages can back it.

    The map is private, writable, and charged to nobody until it is written to.

    Args:
        fd: the segment; may be closed afterwards.
        size_bytes: its whole size.

    Returns:
        The bytes. Their map outlives the buffer and is the caller's to unmap.

    Raises:
        SegmentRefused: not sealed, of another size, or not readable.
        ResourceError: there is no address space for it.
    """
    try:
        sealed, actual_bytes = segment.is_sealed(fd), os.fstat(fd).st_size
    except OSError as error:
        raise SegmentRefused(f"this fd is no segment: {error}") from error
    if not sealed:
        # Whoever could shrink it could end this process with SIGBUS.
        raise SegmentRefused("the segment is not sealed")
    if actual_bytes != size_bytes or not size_bytes:
        raise SegmentRefused(f"a segment of {size_bytes} bytes has {actual_bytes}")
    mapped_bytes = round_up(size_bytes, PAGE_BYTES)
    reserved_bytes = mapped_bytes + HUGE_PAGE_BYTES
    reserved = _reserve(0, reserved_bytes)
    address = round_up(reserved, HUGE_PAGE_BYTES)
    try:
        _map(address, mapped_bytes, _PROT_READ_WRITE, _MAP_PRIVATE | _MAP_FIXED, fd)
    except (SegmentRefused, ResourceError):
        unmap_range(reserved, reserved_bytes)
        raise
    unmap_range(reserved, address - reserved)
    unmap_range(address + mapped_bytes, reserved + reserved_bytes - address - mapped_bytes)
    return _sized(size_bytes).from_address(address)


def map_shared(
    fd: int, size_bytes: int, offset_bytes: int = 0, write: bool = True, address: int = 0
) -> Buffer:
    """Map the pages of a memfd themselves: none is ever copied.

    Args:
        fd: has these bytes, backed. May be closed afterwards.
        size_bytes, offset_bytes: whole pages.
        write: the fd can be written to, and the bytes too. Otherwise a write ends the process.
        address: where, in place of what `reserve_range` gave; 0 is anywhere.

    Returns:
        The bytes. Their map outlives the buffer and is the caller's to unmap.

    Raises:
        ResourceError: there is no address space for it.
        SegmentRefused: it cannot be mapped so.
    """
    access = _PROT_READ_WRITE if write else _PROT_READ
    flags = _MAP_SHARED | (_MAP_FIXED if address else 0)
    return _sized(size_bytes).from_address(
        _map(address, size_bytes, access, flags, fd, offset_bytes)
    )


def map_sealed(fd: int, size_bytes: int, address: int) -> Buffer:
    """Map a sealed memfd to be read: a write ends the process. Otherwise as `map_shared`.

    Older kernels take any shared map of what is sealed for one that could be written to, so it is a
    private one; as it is not writable, nothing of it is ever copied either.
    """
    flags = _MAP_PRIVATE | _MAP_FIXED
    return _sized(size_bytes).from_address(_map(address, size_bytes, _PROT_READ, flags, fd))


def discard(address: int, size_bytes: int) -> None:
    """Unmap in bounded steps, and leave the addresses reserved. May be done twice; see on fork."""
    end = address + size_bytes
    for start in range(address, end, UNMAP_STEP_BYTES):
        _reserve(start, min(UNMAP_STEP_BYTES, end - start))


@functools.lru_cache(maxsize=64)
def _sized(size_bytes: int) -> type[Buffer]:
    return type("Buffer", (Buffer,), {"__slots__": (), "_length_": size_bytes})


def _map(
    address: int, size_bytes: int, protection: int, flags: int, fd: int, offset_bytes: int = 0
) -> int:
    flags |= _MAP_NORESERVE
    mapped = _libc().mmap(address, size_bytes, protection, flags, fd, offset_bytes)
    if mapped == _MAP_FAILED:
        code = ctypes.get_errno()
        if code == errno.ENOMEM:
            raise ResourceError(
                f"no address space for a map of {size_bytes} bytes",
                remedy="raise `ulimit -v`, or vm.max_map_count, or unload other weights",
            )
        raise SegmentRefused(f"the segment cannot be mapped: {os.strerror(code)}")
    return int(mapped)


def _reserve(address: int, size_bytes: int) -> int:
    """Reserve addresses, instead of what is mapped there; at 0, anywhere. Returns where."""
    flags = _MAP_PRIVATE | _MAP_ANONYMOUS | (_MAP_FIXED if address else 0)
    return _map(address, size_bytes, _PROT_NONE, flags, -1)


def reserve_range(size_bytes: int) -> int:
    """Return addresses that nothing else will have, until `unmap_range`. They take no memory."""
    return _reserve(0, size_bytes)


def unmap_range(address: int, size_bytes: int) -> None:
    """Give addresses back, and what is mapped there."""
    if size_bytes and _libc().munmap(address, size_bytes):
        code = ctypes.get_errno()
        raise OSError(code, f"munmap of {size_bytes} bytes: {os.strerror(code)}")


@functools.cache
def _libc() -> ctypes.CDLL:
    if not hasattr(os, "memfd_create"):
        raise PlatformUnsupported("this system has no memfd_create")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc
