"""What the kernel says of memory that has a name of ours: memfds, as /proc shows them. No torch.

Blocks of a simulated device are called `weight-cache:sim:0:OWNER`. A host segment's name is
`weight-cache:GENERATION`, and about those the coordinator's audit asks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

PREFIX = "weight-cache:"
"""What the names of all our memfds begin with."""

_Inode = tuple[str, int]
"""Device, as /proc writes it, and number. memfds have no other identity."""

_Block = tuple[_Inode, str]
"""And the name of a memfd, as /proc writes it."""

_DELETED = " (deleted)"


def kernel_bytes(name: str, pid: int | None = None) -> int:
    """Return how much memory the blocks of a simulated device take, each once, by whoever has it.

    Args:
        name: the device's, such as "sim:0".
        pid: only what this process maps or has an fd of. None: every process that this user may
            look into.

    Raises:
        PermissionError: that process is not to be looked into.
    """
    return sum(size_bytes for size_bytes in _blocks(f"{name}:", pid).values())


def by_owner() -> dict[str, int]:
    """Return what the blocks of all simulated devices take, by whom they are for: a generation."""
    sizes: dict[str, int] = {}
    for (_, name), size_bytes in _blocks("sim:", None).items():
        owner = name.rpartition(":")[2]
        sizes[owner] = sizes.get(owner, 0) + size_bytes
    return sizes


def has_block(owner: str) -> bool:
    """Say whether a process has memory of any simulated device that is for `owner`.

    A file that was made for it, and has no memory yet, is none.
    """
    return by_owner().get(owner, 0) > 0


def memfd_name(fd: int) -> str | None:
    """Return what a memfd of this process was called when it was made; None if it is no memfd."""
    target = os.readlink(f"/proc/self/fd/{fd}")
    if not target.startswith("/memfd:"):
        return None
    return target.removeprefix("/memfd:").removesuffix(_DELETED)


def _blocks(start: str, pid: int | None) -> dict[_Block, int]:
    """Return the size of every block of a device whose name begins with `start`."""
    start = f"/memfd:{PREFIX}{start}"
    sizes: dict[_Block, int] = {}
    mapped: dict[_Block, int] = {}
    pids = map(int, filter(str.isdecimal, os.listdir("/proc"))) if pid is None else (pid,)
    for one in pids:
        try:
            sizes.update(_fds(one, start))
            for block, size_bytes in _maps(one, start):
                mapped[block] = max(mapped.get(block, 0), size_bytes)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        except PermissionError:
            if pid is not None:
                raise
    # Of what is only mapped the map is the size: blocks are backed whole, and mapped whole.
    return mapped | sizes


def _fds(pid: int, start: str) -> Iterator[tuple[_Block, int]]:
    folder = f"/proc/{pid}/fd"
    for fd in os.listdir(folder):
        try:
            name = os.readlink(f"{folder}/{fd}")
            if not name.startswith(start):
                continue
            stat = os.stat(f"{folder}/{fd}")
        except FileNotFoundError:
            continue  # closed while we looked
        device = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}"
        yield ((device, stat.st_ino), name.removesuffix(_DELETED)), stat.st_blocks * 512


def _maps(pid: int, start: str) -> list[tuple[_Block, int]]:
    line = re.compile(
        rb"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ (\S+) (\d+) +("
        + re.escape(os.fsencode(start))
        + rb"[^\n]*)",
        re.MULTILINE,
    )
    with open(f"/proc/{pid}/maps", "rb") as file:
        found = line.findall(file.read())
    sizes: dict[_Block, int] = {}
    for first, end, device, number, name in found:
        block = ((device.decode(), int(number)), os.fsdecode(name).removesuffix(_DELETED))
        sizes[block] = sizes.get(block, 0) + int(end, 16) - int(first, 16)
    return list(sizes.items())
