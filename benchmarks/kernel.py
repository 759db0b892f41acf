"""What the kernel says of a process: its maps, fds, memory and context switches."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_HEAD = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+\s*(.*)$")

SEGMENT_MARK = "/memfd:weight-cache:"


@dataclass(slots=True)
class Map:
    """One map of a process, from /proc/PID/smaps.

    Attributes:
        path: the file, or "" for private memory.
        sizes: bytes by the kernel's names: `Pss`, `Rss`, `Private_Dirty`, ...
        flags: the kernel's VmFlags; `ac` says that its size is charged to Committed_AS.
    """

    path: str
    sizes: dict[str, int] = field(default_factory=dict)
    flags: frozenset[str] = frozenset()


def maps(pid: int) -> Iterator[Map]:
    """Return the maps of a process."""
    current: Map | None = None
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        head = _HEAD.match(line)
        if head is not None:
            if current is not None:
                yield current
            current = Map(head[1])
            continue
        assert current is not None
        name, _, value = line.partition(":")
        if name == "VmFlags":
            current.flags = frozenset(value.split())
        elif value.endswith(" kB"):
            current.sizes[name] = int(value[:-3]) * 1024
    if current is not None:
        yield current


def is_segment(path: str) -> bool:
    """Say whether a map's path is one of our segments."""
    return path.startswith(SEGMENT_MARK)


def private_bytes(pid: int) -> int:
    """Return the memory of a process that no file is behind and no other process has.

    Not its Pss_Anon: what forked processes still share, that one divides by their number.
    """
    return sum(
        entry.sizes["Private_Clean"] + entry.sizes["Private_Dirty"]
        for entry in maps(pid)
        if not entry.path or entry.path.startswith("[")
    )


def resident_bytes(pid: int) -> int:
    """Return the resident set of a process, shared pages counted in full."""
    return _field(Path(f"/proc/{pid}/status"), "VmRSS") * 1024


def committed_bytes() -> int:
    """Return what the kernel has promised to all processes: Committed_AS."""
    return _field(Path("/proc/meminfo"), "Committed_AS") * 1024


def voluntary_switches(pid: int) -> int:
    """Return how often the threads of a process went to sleep of their own accord."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(_field(task / "status", "voluntary_ctxt_switches") for task in tasks)


def fd_count(pid: int) -> int:
    """Return how many fds a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd")) - (pid == os.getpid())


def segment_bytes(pid: int, gen: str) -> int:
    """Return the memory of a generation's segment, of which process `pid` has an fd."""
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        if os.readlink(fd).startswith(SEGMENT_MARK + gen):
            return os.stat(fd).st_blocks * 512
    raise LookupError(f"process {pid} has no fd of generation {gen}")


def _field(path: Path, name: str) -> int:
    """Return the number behind `name:` in a file of /proc."""
    for line in path.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise LookupError(f"{path} has no {name}")
