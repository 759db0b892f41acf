"""What the kernel says about processes and their memory. Believes nobody else.

Memory is counted as PSS: a page that N processes map counts as 1/N in each, so that sums over
processes are true. Counted is what holds data: anonymous memory, segments and mapped checkpoints;
not the code of Python and torch, which is the same whatever is loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

SEGMENT = "/memfd:weight-cache:"
"""How the kernel names what maps, or has open, a segment; then come its generation and a note."""

CHECKPOINT = ".safetensors"

_AREA = re.compile(rb"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ (?P<inode>\d+) *(?P<path>.*)")


@dataclass(frozen=True, slots=True)
class Memory:
    """One process's data in memory. Counts are bytes.

    Attributes:
        private_bytes: pages that no other process maps.
        shared_bytes: this process's share of pages that others map too.
        segment_private_bytes: the part of `private_bytes` that is in segments.
        segment_shared_bytes: the part of `shared_bytes` that is in segments.
    """

    private_bytes: int = 0
    shared_bytes: int = 0
    segment_private_bytes: int = 0
    segment_shared_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.private_bytes + self.shared_bytes

    @property
    def segment_bytes(self) -> int:
        return self.segment_private_bytes + self.segment_shared_bytes

    def since(self, before: Memory) -> Memory:
        """Return what has been added since `before`."""
        return Memory(
            self.private_bytes - before.private_bytes,
            self.shared_bytes - before.shared_bytes,
            self.segment_private_bytes - before.segment_private_bytes,
            self.segment_shared_bytes - before.segment_shared_bytes,
        )


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment as one process has it, open or mapped."""

    generation: str
    inode: int


def data_memory(pid: int) -> Memory:
    """Return what a process has in memory that is not code."""
    private = shared = segment_private = segment_shared = 0
    for path, own_bytes, pss_bytes in _areas(pid):
        if not _holds_data(path):
            continue
        private += own_bytes
        shared += pss_bytes - own_bytes
        if path.startswith(SEGMENT):
            segment_private += own_bytes
            segment_shared += pss_bytes - own_bytes
    return Memory(private, shared, segment_private, segment_shared)


def open_segments(pid: int) -> dict[Segment, int]:
    """Return the segments that a process has open, each with the bytes it really takes."""
    found = {}
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        path = f"{folder}/{name}"
        try:
            target = os.readlink(path)
            if target.startswith(SEGMENT):
                status = os.stat(path)
                found[Segment(_generation(target), status.st_ino)] = status.st_blocks * 512
        except FileNotFoundError:
            pass  # closed meanwhile
    return found


def mapped_segments(pid: int) -> set[Segment]:
    """Return the segments that a process maps."""
    found = set()
    with open(f"/proc/{pid}/maps", "rb") as file:
        for line in file:
            area = _AREA.match(line)
            if area is not None and area["path"].startswith(SEGMENT.encode()):
                path = area["path"].decode(errors="replace")
                found.add(Segment(_generation(path), int(area["inode"])))
    return found


def holders(generations: set[str]) -> list[int]:
    """Return every process on this host that has one of these generations open or mapped."""
    pids = []
    for pid in _processes():
        try:
            held = {segment.generation for segment in open_segments(pid)}
            held |= {segment.generation for segment in mapped_segments(pid)}
        except OSError:
            continue  # it has ended, or is another user's, who cannot have them
        if held & generations:
            pids.append(pid)
    return pids


def _processes() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def _generation(path: str) -> str:
    return path.removeprefix(SEGMENT).split(" ", 1)[0]


def _holds_data(path: str) -> bool:
    return not path.startswith("/") or path.startswith(SEGMENT) or path.endswith(CHECKPOINT)


def _areas(pid: int) -> Iterator[tuple[str, int, int]]:
    """Give each area of a process's memory: its path, its private bytes and its PSS."""
    path, own_kib, pss_kib = "", 0, 0
    with open(f"/proc/{pid}/smaps", "rb") as file:
        for line in file:
            name, _, rest = line.partition(b":")
            if name == b"Pss":
                pss_kib = int(rest.split()[0])
            elif name in (b"Private_Clean", b"Private_Dirty"):
                own_kib += int(rest.split()[0])
            elif area := _AREA.match(line):
                yield path, own_kib * 1024, pss_kib * 1024
                path, own_kib, pss_kib = area["path"].decode(errors="replace"), 0, 0
    yield path, own_kib * 1024, pss_kib * 1024
