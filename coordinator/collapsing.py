"""The collapsing child: gives a sealed segment pages of 2 MiB in place of its 4 KiB ones.

    python -I -S collapsing.py FD SIZE_BYTES PARENT_PID

FD is the segment, inherited. The child says one line on standard output, `HUGE_BYTES WHY`: what
is in huge pages now, and why the rest is not; WHY is empty if there is no rest. That it got nothing
is no failure. The exit codes are those of `backing`, and it is run in the same way: a script that
imports little.

    Note on collapsing
    fact: MADV_COLLAPSE moves a memfd's pages into huge ones while others have it mapped, sealed or
    not, whatever `shmem_enabled` says (Linux 6.1 and newer). Maps that were made before have the
    huge pages from their next fault on, unless a page around was edited in that map
    consequence: no worker has to do anything but map at a 2 MiB boundary
    choice: one child does it for all, when nobody can change the bytes any more
    cost: each byte is copied once, in the background, with 2 MiB to spare

    Note on who pays
    fact: the new pages are charged to the memory cgroup of whoever collapses. Where it is full the
    call says EBUSY, and nobody is killed; a page that somebody has pinned gives EAGAIN, and its
    2 MiB stay as they are
    consequence: another process's cgroup could end up with the weights
    choice: a child in the coordinator's own, like the one that backed them; it looks at the
    headroom before every step all the same, as the host may have less
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # run as a script, it finds nothing of ours by itself
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from coordinator import backing
from coordinator.huge_map import HUGE_PAGE_BYTES, collapse, map_file, mapped_huge_bytes

STEP_BYTES = 16 * 1024 * 1024
"""So much is collapsed between two looks at parent and headroom, and before a kill counts."""

NICE = 5
"""Behind those who compute, but not so far that who waits for a page in its hands waits long."""

# These numbers are Linux's on every machine.
_EAGAIN, _ENOMEM, _EBUSY, _EINVAL = 11, 12, 16, 22


def command(fd: int, size_bytes: int) -> list[str]:
    """Return the command line that collapses the inherited `fd`, for a child of this process."""
    script = os.path.abspath(__file__)
    return [sys.executable, "-I", "-S", script, str(fd), str(size_bytes), str(os.getpid())]


def said(line: str) -> tuple[int, str] | None:
    """Return what a child has said: bytes in huge pages, and why the rest is not. None: nothing."""
    huge, _, why = line.strip().partition(" ")
    return (int(huge), why[:200]) if huge.isdecimal() else None


def main(arguments: list[str]) -> int:
    """Run as the child; return the exit code."""
    try:
        fd, size_bytes, parent_pid = (int(argument) for argument in arguments[1:])
    except ValueError:
        print("usage: collapsing.py FD SIZE_BYTES PARENT_PID", file=sys.stderr)
        return backing.EXIT_USAGE
    backing.volunteer()
    os.nice(NICE)
    whole_bytes = size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    try:
        address = map_file(fd, whole_bytes)
        why = collapse_all(address, whole_bytes, parent_pid)
        huge_bytes = mapped_huge_bytes(address, whole_bytes)
    except OSError as error:
        why, huge_bytes = f"the kernel refused: {error.strerror}", 0
    if os.getppid() != parent_pid:
        return backing.EXIT_PARENT_GONE
    if huge_bytes < whole_bytes:
        why = why or "the kernel says so"
    elif whole_bytes < size_bytes:
        why = "its last part is less than 2 MiB"
    else:
        why = ""
    print(huge_bytes, why)
    return backing.EXIT_BACKED


def collapse_all(address: int, size_bytes: int, parent_pid: int) -> str:
    """Collapse a map at a 2 MiB boundary, step by step; return why not all of it, or nothing."""
    pinned: list[int] = []
    for start in range(0, size_bytes, STEP_BYTES):
        why, code = _step(address, start, size_bytes, parent_pid)
        if code == _EAGAIN:
            pinned.append(start)
        elif why:
            return why
    # A page may have been in somebody's hands for that moment only.
    left = ""
    for start in pinned:
        why, _ = _step(address, start, size_bytes, parent_pid)
        left = left or why
    return left


def _step(address: int, start: int, size_bytes: int, parent_pid: int) -> tuple[str, int]:
    """Collapse one step; return why not, and the errno."""
    step_bytes = min(STEP_BYTES, size_bytes - start)
    if os.getppid() != parent_pid:
        return "the coordinator is gone", 0
    lack = backing.shortage(step_bytes)
    if lack:
        return lack, 0
    code = collapse(address + start, step_bytes)
    if not code:
        return "", 0
    reasons = {
        _EAGAIN: "pages are pinned",
        _EBUSY: "this memory cgroup is full",
        _ENOMEM: "there are no free huge pages",
        _EINVAL: "this kernel cannot",
    }
    return reasons.get(code, os.strerror(code)), code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
