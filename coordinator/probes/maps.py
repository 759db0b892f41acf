"""Memory maps where the probes need them: at a boundary of 2 MiB, or larger than any memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from collections.abc import Iterator

from shm_store import segment
from shm_store.keys import GenerationId
from shm_store.layout import HUGE_PAGE_BYTES, PAGE_BYTES

MADV_COLLAPSE = 25
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value


def fits(size_bytes: int) -> bool:
    """Say whether so much of a segment can be mapped as workers do it: private and writable.

    No memory is needed for that, not even a segment of that size.
    """
    fd = segment.create(GenerationId("doctor"))
    try:
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
        address = _mmap(0, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd)
    except OSError:
        return False
    finally:
        os.close(fd)
    _libc().munmap(address, size_bytes)
    return True


def taken_by_one_page() -> int:
    """Return how much memory the kernel takes for a segment of one page.

    Raises:
        OSError: it gives none.
    """
    fd = segment.create(GenerationId("doctor"))
    try:
        os.posix_fallocate(fd, 0, PAGE_BYTES)
        return segment.backed_bytes(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def sealed_map(size_bytes: int) -> Iterator[int]:
    """Back and seal a memfd as a segment is, map it shared and readable, and give the address.

    That is at a boundary of 2 MiB, or no huge page could be there. Everything is gone afterwards.

    Raises:
        OSError: the kernel refuses one of these.
    """
    fd = segment.create(GenerationId("doctor"))
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        segment.freeze(fd, "a memfd")
        # Before Linux 6.7 a sealed memfd is not mapped shared by an fd that could write.
        readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(fd)
    try:
        whole = size_bytes + HUGE_PAGE_BYTES
        free = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        reserved = _mmap(0, whole, _PROT_NONE, free, -1)
        try:
            address = -(-reserved // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            _mmap(address, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, readable)
            yield address
        finally:
            _libc().munmap(reserved, whole)
    finally:
        os.close(readable)


def touch(address: int, size_bytes: int) -> None:
    """Read a byte of each page."""
    for offset in range(0, size_bytes, PAGE_BYTES):
        ctypes.string_at(address + offset, 1)


def collapse(address: int, size_bytes: int) -> None:
    """Have the kernel put small pages together to huge ones, now.

    Raises:
        OSError: it does not.
    """
    _checked(_libc().madvise(address, size_bytes, MADV_COLLAPSE))


def lock(address: int, size_bytes: int) -> None:
    """Keep pages in memory, and let them go again.

    Raises:
        OSError: this process may not.
    """
    _checked(_libc().mlock(address, size_bytes))
    _libc().munlock(address, size_bytes)


def huge_bytes(address: int) -> int | None:
    """Return how much of the map at `address` is mapped by huge pages; None if nobody says."""
    begins = f"{address:x}-"
    inside = False
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as lines:
        for line in lines:
            if line.startswith(begins):
                inside = True
            elif inside and line.startswith("ShmemPmdMapped:"):
                return int(line.split()[1]) * 1024
    return None


def _mmap(address: int, size_bytes: int, protection: int, flags: int, fd: int) -> int:
    mapped = _libc().mmap(address, size_bytes, protection, flags, fd, 0)
    if mapped in (None, _FAILED):
        raise _os_error()
    assert isinstance(mapped, int)
    return mapped


def _checked(result: int) -> None:
    if result:
        raise _os_error()


def _os_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


@functools.cache
def _libc() -> ctypes.CDLL:
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
    for name in ("munmap", "mlock", "munlock"):
        getattr(libc, name).argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
