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

    Note on the kind of map
    fact: kernels before 6.7 refuse a shared map of what is sealed, as it could be made writable
    consequence: a child that maps it so gets nothing there
    choice: a private map that cannot be written to, of which nothing is ever copied
    cost: none; it is collapsed in the same way
"""

from __future__ import annotations

import ctypes
import os
import sys

if __name__ == "__main__":  # run as a script, it finds nothing of ours by itself
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from coordinator import backing

STEP_BYTES = 16 * 1024 * 1024
"""So much is collapsed between two looks at parent and headroom, and before a kill counts."""

NICE = 5
"""Behind those who compute, but not so far that who waits for a page in its hands waits long."""

HUGE_PAGE_BYTES = 2 * 1024 * 1024
"""As in `shm_store.layout`, which this imports nothing of."""

# From <linux/mman.h>.
_PROT_NONE, _PROT_READ = 0x0, 0x1
_MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x02, 0x10, 0x20, 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_COLLAPSE = 25

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
        address = _map(fd, whole_bytes)
        why = collapse(address, whole_bytes, parent_pid)
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


def collapse(address: int, size_bytes: int, parent_pid: int) -> str:
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
    if not _libc.madvise(address + start, step_bytes, _MADV_COLLAPSE):
        return "", 0
    code = ctypes.get_errno()
    reasons = {
        _EAGAIN: "pages are pinned",
        _EBUSY: "this memory cgroup is full",
        _ENOMEM: "there are no free huge pages",
        _EINVAL: "this kernel cannot",
    }
    return reasons.get(code, os.strerror(code)), code


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


def _map(fd: int, size_bytes: int) -> int:
    """Map the segment at a 2 MiB boundary, to be read, and return the address.

    Raises:
        OSError: it cannot be.
    """
    reserve = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
    reserved = _mmap(None, size_bytes + HUGE_PAGE_BYTES, _PROT_NONE, reserve, -1)
    address = -(-reserved // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    fixed = _MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
    return _mmap(address, size_bytes, _PROT_READ, fixed, fd)


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
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


if __name__ == "__main__":
    sys.exit(main(sys.argv))
