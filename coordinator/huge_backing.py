"""Backing by pages of 2 MiB, before there are others. For `coordinator.backing`, a script.

Note on huge pages from the start
fact: MADV_COLLAPSE makes one page of 2 MiB of what a memfd has there and what is missing,
whatever `shmem_enabled` says (Linux 6.1 and newer). With one page there it is allocated and
cleared, not copied together, and that takes two thirds of what 512 small ones take. On a
fragmented host the kernel may have to move others' pages first; a full memory cgroup says EBUSY
consequence: it is worth a try, but nobody can say how long a try takes
choice: as long as it is quick and works. The rest is of 4 KiB, as all of it is elsewhere, and
`coordinator.collapsing` tries once more when nobody waits any more
cost: where it is slow, READY comes later by 0.25 s and a second for each GiB, at most

Note on the page that is there
fact: the huge page comes from the node of memory of that page; under `numactl --interleave`
the page's number in the memfd chooses the node
consequence: with the first of each 512, all would come from one node of two
choice: every 515th page
cost: none
"""

from __future__ import annotations

import os
from time import monotonic

from coordinator.huge_map import HUGE_PAGE_BYTES, collapse, map_file

STEP_BYTES = 16 * 1024 * 1024
"""So much is collapsed between two looks at the clock, and before a kill counts."""

GRACE_S = 0.25
S_PER_BYTE = 1.0 / (1 << 30)
"""It may take so long and no longer. In memory that the host of a virtual machine has still to
give, half of that is usual; it is time that the filling takes otherwise."""

FAILURES = 3
"""After so many steps without, the rest is not tried: a page may have been in others' hands."""

_PAGE_BYTES = 4096


class HugePages:
    """Pages of 2 MiB for a memfd that has none: as many as are quick to be had."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Begin with a memfd that is to be so large.

        Raises:
            OSError: it cannot be mapped.
        """
        self.backed_bytes = 0
        """So much has them."""
        self._fd = fd
        self._end = size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        self._address = map_file(fd, self._end)
        self._failures = 0
        self._spent_s = 0.0

    def back(self, start: int, end: int) -> None:
        """Give a part its pages, if that is still worth a try. Nothing it meets is an error.

        Who calls it sees to it that each page is there.
        """
        end = min(end, self._end)
        for at in range(start, end, STEP_BYTES):
            allowed_s = GRACE_S + at * S_PER_BYTE
            if self._failures >= FAILURES or self._spent_s > allowed_s:
                return
            step_bytes = min(STEP_BYTES, end - at)
            began_s = monotonic()
            if self._step(at, step_bytes):
                self.backed_bytes += step_bytes
            else:
                self._failures += 1
            self._spent_s += monotonic() - began_s

    def _step(self, start: int, size_bytes: int) -> bool:
        """Have a part of whole 2 MiB in huge pages; say whether all of it is."""
        pages = HUGE_PAGE_BYTES // _PAGE_BYTES
        try:
            for at in range(start, start + size_bytes, HUGE_PAGE_BYTES):
                page = at // HUGE_PAGE_BYTES * 3 % pages
                os.posix_fallocate(self._fd, at + page * _PAGE_BYTES, _PAGE_BYTES)
        except OSError:
            return False  # the call for all of them will say why
        return not collapse(self._address + start, size_bytes)
