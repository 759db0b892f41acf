"""The pages of a private map: which are this process's own, and having all of them mapped.

Note on asking the kernel
fact: a page that was written to in a private map is present or swapped, and of no file
consequence: the segment's file no longer has what the process sees there
choice: PAGEMAP_SCAN, which passes over what was never touched; before Linux 6.7 there is
/proc/self/pagemap, 8 bytes to read for each page, 4 ms per 512 MiB
cost: a system call before each upload

Note on first reads
fact: of a memfd in 4 KiB pages each fault maps 16. The first read of 2 GB takes 30,000 faults and
160 ms, where MADV_POPULATE_READ (Linux 5.14 and newer) maps all in 40. In pages of 2 MiB it takes
1,000 faults and 1 ms
consequence: in small pages whoever reads all of it is faster if they are mapped at once; in huge
ones nothing gets faster, and an attach slower
choice: look at one page, and if it is small map all, in the calling thread and in bounded steps,
before anybody has a tensor. A thread beside the reader helped less: both want the same page table
cost: 20 ms per GB for whoever reads little of it, and 2 MB per GB of page tables at once
"""

from __future__ import annotations

import ctypes
import mmap
import os

from shm_store.layout import HUGE_PAGE_BYTES

try:
    import resource
except ImportError:
    pass  # Importing this package works where there is none.

STEP_BYTES = 64 * 1024 * 1024
"""Mapped in one call, for about 1 ms, in which no other thread can map or unmap anything."""

_MADV_POPULATE_READ = 22

_PAGEMAP_SCAN = 0xC0606610
"""_IOWR('f', 16, struct pm_scan_arg), from <linux/fs.h>, and the categories below."""
_IS_FILE = 1 << 2
_IS_PRESENT = 1 << 3
_IS_SWAPPED = 1 << 4

_ENTRY_BYTES = 8
_READ_BYTES = 1 << 20
_OWN = bytes(byte for byte in range(256) if byte & 0xC0 and not byte & 0x20)
"""The last byte of an entry: there or swapped (bits 63, 62), and of no file (bit 61)."""


class _Region(ctypes.Structure):
    _fields_ = (
        ("start", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("categories", ctypes.c_uint64),
    )


class _Scan(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            "size",
            "flags",
            "start",
            "end",
            "walk_end",
            "vec",
            "vec_len",
            "max_pages",
            "category_inverted",
            "category_mask",
            "category_anyof_mask",
            "return_mask",
        )
    )


def fault_in(address: int, size_bytes: int) -> None:
    """Map all pages of a private map that has small ones, so that reading them takes no faults.

    Nothing is copied. Where the kernel does not do it, nothing happens.

    Args:
        address: whole pages, as `size_bytes`.
    """
    middle = address + size_bytes // 2 // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if middle + HUGE_PAGE_BYTES <= address + size_bytes and _is_huge(middle):
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start in range(0, size_bytes, STEP_BYTES):
        step_bytes = min(STEP_BYTES, size_bytes - start)
        if madvise(address + start, step_bytes, _MADV_POPULATE_READ):
            return


def _is_huge(start: int) -> bool:
    """Say whether 2 MiB of a map, from a boundary of such on, are one page.

    Then one fault maps all of it. A small page that is not mapped yet takes one of its own; of what
    is around it the kernel maps less than half a MiB beside it.
    """
    return any(_is_mapped(start + part * (HUGE_PAGE_BYTES // 4)) for part in (0, 1, 2))


def _is_mapped(address: int) -> bool:
    """Say whether a byte can be read without a fault; afterwards it can."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    ctypes.c_ubyte.from_address(address).value  # noqa: B018
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt == before


def any_own(address: int, size_bytes: int) -> bool:
    """Say whether this process has written to a page of a private map of a file.

    Args:
        address: whole pages, as `size_bytes`.
    """
    fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            return _scan(fd, address, size_bytes, _IS_PRESENT | _IS_SWAPPED, but=_IS_FILE)
        except OSError:
            return _read(fd, address, size_bytes)
    finally:
        os.close(fd)


def _scan(fd: int, address: int, size_bytes: int, any_of: int, but: int = 0) -> bool:
    import fcntl  # importing this package works where there is none

    region = _Region()
    scan = _Scan(
        size=ctypes.sizeof(_Scan),
        start=address,
        end=address + size_bytes,
        vec=ctypes.addressof(region),
        vec_len=1,
        max_pages=1,
        category_inverted=but,
        category_mask=but,
        category_anyof_mask=any_of,
    )
    return bool(fcntl.ioctl(fd, _PAGEMAP_SCAN, scan) > 0)


def _read(fd: int, address: int, size_bytes: int) -> bool:
    at = address // mmap.PAGESIZE * _ENTRY_BYTES
    end = (address + size_bytes) // mmap.PAGESIZE * _ENTRY_BYTES
    while at < end:
        entries = os.pread(fd, min(_READ_BYTES, end - at), at)
        if not entries or set(entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES]).intersection(_OWN):
            return True  # what cannot be read may be anything
        at += len(entries)
    return False
