"""Files and the page cache: the floor of a fill, the best that a disk gives, and what is cached."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time

BLOCK_BYTES = 8 << 20
SECTOR_BYTES = 4096
"""What O_DIRECT wants offsets, sizes and memory aligned to, at most."""
PAGE_BYTES = mmap.PAGESIZE


def floor_s(path: str) -> tuple[float, float]:
    """Return the seconds of backing a memfd, and of one thread's `sendfile` of the file into it."""
    source = os.open(path, os.O_RDONLY)
    memory = os.memfd_create("benchmark")
    try:
        size_bytes = os.fstat(source).st_size
        started_s = time.perf_counter()
        os.posix_fallocate(memory, 0, size_bytes)
        backed_s = time.perf_counter()
        done = 0
        while done < size_bytes:
            done += os.sendfile(memory, source, done, size_bytes - done)
        return backed_s - started_s, time.perf_counter() - backed_s
    finally:
        os.close(memory)
        os.close(source)


def timed_read(path: str, threads: int, direct: bool, made: bool) -> float:
    """Return the seconds in which so many threads read a file into memory.

    Args:
        direct: without the page cache.
        made: making the memory counts, too. Else it is there, every page of it.
    """
    source = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    size_bytes = os.fstat(source).st_size
    started_s = time.perf_counter()
    # One page more: the last read of O_DIRECT is of whole sectors.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    memory = memoryview(mmap.mmap(-1, size_bytes + SECTOR_BYTES, flags=flags))
    if not made:
        started_s = time.perf_counter()
    blocks = iter(range(0, size_bytes, BLOCK_BYTES))
    lock = threading.Lock()
    faults: list[OSError] = []

    def read() -> None:
        try:
            while True:
                with lock:
                    offset = next(blocks, size_bytes)
                end = min(size_bytes, offset + BLOCK_BYTES)
                if offset == end:
                    return
                while offset < end:
                    room = memory[offset : -(-end // SECTOR_BYTES) * SECTOR_BYTES]
                    offset += os.preadv(source, [room], offset)
        except OSError as error:
            faults.append(error)

    helpers = [threading.Thread(target=read) for _ in range(threads)]
    for helper in helpers:
        helper.start()
    for helper in helpers:
        helper.join()
    if faults:
        raise faults[0]
    os.close(source)
    return time.perf_counter() - started_s


def drop(path: str) -> float:
    """Have the kernel forget the pages of a file; return which part of them it has all the same."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return cached(fd)
    finally:
        os.close(fd)


def cached(fd: int) -> float:
    """Return which part of a file's pages is in the page cache."""
    size_bytes = os.fstat(fd).st_size
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    pages = -(-size_bytes // PAGE_BYTES)
    found = ctypes.create_string_buffer(pages)
    try:
        if libc.mincore(address, size_bytes, found):
            raise OSError(ctypes.get_errno(), "mincore")
    finally:
        libc.munmap(address, size_bytes)
    return sum(byte & 1 for byte in found.raw) / pages
