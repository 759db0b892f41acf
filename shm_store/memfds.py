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


def kernel_bytes(name: str, pid: int | None = None) -> int:
    """Return how much memory the blocks of a simulated device take, each once, by whoever has it.

    Args:
        name: the device's, such as "sim:0".
        pid: only what this process maps or has an fd of. None: every process that this user may
            look into.

    Raises:
        PermissionError: that process is not to be looked into.
    """
    start = f"/memfd:{PREFIX}{name}:"
    sizes: dict[_Inode, int] = {}
    mapped: dict[_Inode, int] = {}
    pids = map(int, filter(str.isdecimal, os.listdir("/proc"))) if pid is None else (pid,)
    for one in pids:
        try:
            sizes.update(_fds(one, start))
            for inode, size_bytes in _maps(one, start):
                mapped[inode] = max(mapped.get(inode, 0), size_bytes)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        except PermissionError:
            if pid is not None:
                raise
    # Of what is only mapped the map is the size: blocks are backed whole, and mapped whole.
    return sum((mapped | sizes).values())


def _fds(pid: int, start: str) -> Iterator[tuple[_Inode, int]]:
    folder = f"/proc/{pid}/fd"
    for fd in os.listdir(folder):
        try:
            if not os.readlink(f"{folder}/{fd}").startswith(start):
                continue
            stat = os.stat(f"{folder}/{fd}")
        except FileNotFoundError:
            continue  # closed while we looked
        device = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}"
        yield (device, stat.st_ino), stat.st_blocks * 512


def _maps(pid: int, start: str) -> list[tuple[_Inode, int]]:
    line = re.compile(
        rb"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ (\S+) (\d+) +" + re.escape(os.fsencode(start)),
        re.MULTILINE,
    )
    with open(f"/proc/{pid}/maps", "rb") as file:
        found = line.findall(file.read())
    sizes: dict[_Inode, int] = {}
    for first, end, device, number in found:
        inode = (device.decode(), int(number))
        sizes[inode] = sizes.get(inode, 0) + int(end, 16) - int(first, 16)
    return list(sizes.items())
