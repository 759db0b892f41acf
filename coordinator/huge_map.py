"""Maps of a memfd at a boundary of huge pages; through one the kernel makes its pages huge.

For children that are scripts: it imports nothing of ours. `ctypes` takes 2 ms, so who may do
without imports this late.

    Note on the kind of map
    fact: kernels before 6.7 refuse a shared map of what is sealed, as it could be made writable;
    and where there is a shared map nothing can be sealed, though its process may be ending
    consequence: who maps it so gets nothing there, or is in the way
    choice: a private map that cannot be written to, of which nothing is ever copied
    cost: none; it is collapsed in the same way
"""

from __future__ import annotations

import ctypes
import os

HUGE_PAGE_BYTES = 2 * 1024 * 1024
"""As in `shm_store.layout`."""

# From <linux/mman.h>.
_PROT_NONE, _PROT_READ, _PROT_WRITE = 0x0, 0x1, 0x2
_MAP_SHARED, _MAP_PRIVATE = 0x01, 0x02
_MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x10, 0x20, 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_COLLAPSE = 25


def map_file(fd: int, size_bytes: int, write: bool = False) -> int:
    """Map a memfd at a 2 MiB boundary, to be read, or to be written to, and return the address.

    The map may be larger than the file, which may grow into it. It is there until `unmap`.

    Args:
        size_bytes: whole pages.

    Raises:
        OSError: it cannot be mapped.
    """
    reserve = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
    reserved = _mmap(None, size_bytes + HUGE_PAGE_BYTES, _PROT_NONE, reserve, -1)
    address = -(-reserved // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        if write:
            _mmap(address, size_bytes, _PROT_READ | _PROT_WRITE, _MAP_SHARED | _MAP_FIXED, fd)
        else:
            fixed = _MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
            _mmap(address, size_bytes, _PROT_READ, fixed, fd)
    except OSError:
        unmap(reserved, size_bytes + HUGE_PAGE_BYTES)
        raise
    unmap(reserved, address - reserved)
    unmap(address + size_bytes, reserved + HUGE_PAGE_BYTES - address)
    return address


def unmap(address: int, size_bytes: int) -> None:
    """Give a map back, or a part of it."""
    if size_bytes:
        _libc.munmap(address, size_bytes)


def collapse(address: int, size_bytes: int) -> int:
    """Have a part of a map, of whole 2 MiB, in huge pages; return 0 if all is, or the errno."""
    return ctypes.get_errno() if _libc.madvise(address, size_bytes, _MADV_COLLAPSE) else 0


def mapped_huge_bytes(address: int, size_bytes: int) -> int:
    """Return how much of a map is in huge pages, by the kernel's word.

    Raises:
        OSError: this kernel does not say.
    """
    for start in range(address, address + size_bytes, HUGE_PAGE_BYTES):
        # A page that is not mapped is not counted. One that is huge is mapped by one touch.
        ctypes.c_ubyte.from_address(start).value  # noqa: B018
    huge_bytes, inside = 0, False
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if "-" in name:
                first, _, _ = line.partition("-")
                inside = address <= int(first, 16) < address + size_bytes
            elif inside and name in ("ShmemPmdMapped", "FilePmdMapped"):
                huge_bytes += int(rest.split()[0]) * 1024
    return huge_bytes


def _mmap(address: int | None, size_bytes: int, protection: int, flags: int, fd: int) -> int:
    mapped = _libc.mmap(address, size_bytes, protection, flags, fd, 0)
    if mapped == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(mapped)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
