"""A map of a segment for whoever fills it, where that is the faster way.

    Note on maps
    fact: into a map of pages of 4 KiB a file is read at a third of the speed of `pwrite`, a fault
    for each page; into one of 2 MiB pages at twice that speed, for there is one copy less, and no
    lock of the inode, on which several writers wait for each other (1 GiB on two processors: 36 ms,
    `sendfile` 95 ms, `pwrite` by four threads 86 ms)
    consequence: which way is better depends on the pages, and a segment may have both kinds
    choice: each stretch is looked at: several reads in one 2 MiB are one fault if it is a huge page
    cost: three faults for a stretch of small pages

The map has to be gone before COMMIT, or the segment could not be sealed.
"""

from __future__ import annotations

import ctypes
import os
import resource
from types import TracebackType
from typing import Self

from coordinator.huge_map import map_file, unmap
from shm_store.layout import HUGE_PAGE_BYTES

PART_BYTES = 4 * 1024 * 1024
"""Read into the map at once: between two looks at whether somebody has failed."""


class Window:
    """The bytes of a segment, mapped to be written to. A context manager.

    No part of it may be used once it is over: other bytes may be there by then, or none.
    """

    def __init__(self, segment_fd: int) -> None:
        """Map all of it; none of one without 2 MiB pages, nor where there are no addresses."""
        self._bytes = memoryview(b"")
        self._address = 0
        size_bytes = os.fstat(segment_fd).st_size
        if size_bytes > HUGE_PAGE_BYTES:
            try:
                self._address = map_file(segment_fd, size_bytes, write=True)
            except OSError:
                return
            whole = (ctypes.c_ubyte * size_bytes).from_address(self._address)
            self._bytes = memoryview(whole).cast("B")

    def is_huge(self, offset_bytes: int) -> bool:
        """Say whether the bytes around an offset are in a page of 2 MiB, and so is the map."""
        start = offset_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if start + HUGE_PAGE_BYTES > len(self._bytes):
            return False
        # Further apart than what the kernel maps around one fault. Something else may fault now and
        # then, but a small page that is not mapped yet always does.
        return any(self._is_mapped(start + part * (HUGE_PAGE_BYTES // 4)) for part in (0, 1, 2))

    def _is_mapped(self, offset_bytes: int) -> bool:
        """Say whether a byte can be read without a fault; afterwards it can."""
        before = _faults()
        _ = self._bytes[offset_bytes]
        return _faults() == before

    def part(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """Return a part of the bytes, which must not be kept."""
        return self._bytes[offset_bytes : offset_bytes + size_bytes]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        address, size_bytes = self._address, len(self._bytes)
        self._address, self._bytes = 0, memoryview(b"")
        if address:
            unmap(address, size_bytes)


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
