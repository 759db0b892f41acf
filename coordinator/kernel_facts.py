"""What the kernel says of segments and devices: who has what of them. Reads /proc, decides nothing.

A process may move while it is looked at, and end.

    Note on copied pages
    fact: in smaps, `Private_Dirty` counts a page of the segment that no other process has read
    yet, and `Anonymous` leaves out a copied page that was swapped out
    consequence: the first charges for reading, the second forgets
    choice: /proc/PID/pagemap, where a copied page is one that is there or swapped, and of no file
    cost: 8 bytes to read for each page of a map, 4 ms per 512 MiB; smaps costs twice that
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from shm_store import memfds
from shm_store.errors import PeerForbidden, PlatformUnsupported
from shm_store.keys import GenerationId

READ_BYTES = 1 << 20
_ENTRY_BYTES = 8


@dataclass(slots=True)
class Use:
    """What one process has of one segment: maps of it, fds, pages copied from it."""

    pid: int
    gen: GenerationId
    mapped_bytes: int = 0
    holds: bool = False
    copied_bytes: int = 0


Sight = Literal["read", "ending", "unread", "foreign"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What the kernel says.

    Attributes:
        segments: what the coordinator has an fd of, and the memory it takes.
        uses: by all other processes; also of segments that the coordinator has freed.
        processes: every process but the coordinator: looked into; without any memory of its own,
            as one that is ending; of the coordinator's user but not to be looked into; of another
            user and not to be looked into.
        names: of the processes in `uses`, and of those not to be looked into.
        children: those that the coordinator started.
        manager: the one that started the coordinator, and may store what it has.
        blocks: memory of simulated devices, by the charge that it is for, whoever has it.
    """

    segments: dict[GenerationId, int] = field(default_factory=dict)
    uses: tuple[Use, ...] = ()
    processes: dict[int, Sight] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    children: frozenset[int] = frozenset()
    manager: int = 0
    blocks: dict[GenerationId, int] = field(default_factory=dict)


_NAME = "/memfd:weight-cache:"
WORDS = "words"
"""What the coordinator calls what it has to remember; see `store`."""
ABOUT = "about"
"""What it calls what it says of memory on a device; see there."""
_MAP = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ (\S+) (\d+) +/memfd:weight-cache:(\S+)", re.MULTILINE
)

_Inode = tuple[str, int]
"""Device, as /proc writes it, and number. memfds have no other identity."""


@dataclass(slots=True)
class _Segments:
    """Which generation's segment an inode is: what the coordinator has, and by name what it had."""

    start: str
    gens: dict[_Inode, GenerationId] = field(default_factory=dict)
    sizes: dict[GenerationId, int] = field(default_factory=dict)

    def which(self, inode: _Inode, name: str) -> GenerationId | None:
        if inode in self.gens:
            return self.gens[inode]
        ours = self.start and name.startswith(f"{self.start}-") and name not in self.sizes
        return GenerationId(name) if ours else None


def collect(coordinator: int, start: str) -> Facts:
    """Look at every process there is.

    Args:
        coordinator: its pid.
        start: what the ids of its generations begin with.

    Raises:
        PeerForbidden, PlatformUnsupported: as `audit`.
    """
    segments = _segments(coordinator, start)
    about_coordinator = _status(coordinator)
    uid = about_coordinator.get("Uid")
    uses: list[Use] = []
    processes: dict[int, Sight] = {}
    about: dict[int, dict[str, str]] = {}
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        if pid == coordinator:
            continue
        try:
            found = _look_into(pid, segments)
        except FileNotFoundError:
            continue  # it has ended
        except ProcessLookupError:
            processes[pid] = "ending"
        except PermissionError:
            about[pid] = _status(pid)
            processes[pid] = "unread" if about[pid].get("Uid") == uid else "foreign"
        else:
            processes[pid] = "read"
            if found:
                uses += found
                about[pid] = _status(pid)
    return Facts(
        segments=segments.sizes,
        uses=tuple(uses),
        processes=processes,
        names={pid: status.get("Name", "") for pid, status in about.items()},
        children=frozenset(
            pid for pid, status in about.items() if status.get("PPid") == str(coordinator)
        ),
        manager=int(about_coordinator.get("PPid", "0")) if _is_managed(coordinator) else 0,
        blocks={GenerationId(owner): size_bytes for owner, size_bytes in memfds.by_owner().items()},
    )


def _is_managed(coordinator: int) -> bool:
    """Say whether who started it stores what it has; see `coordinator.notify`."""
    try:
        with open(f"/proc/{coordinator}/environ", "rb") as file:
            return any(line.startswith(b"NOTIFY_SOCKET=") for line in file.read().split(b"\0"))
    except (FileNotFoundError, PermissionError):
        return False


def _segments(coordinator: int, start: str) -> _Segments:
    segments = _Segments(start)
    if not os.path.exists("/proc/self/pagemap"):
        raise PlatformUnsupported("this system has no /proc, or no pagemap in it")
    try:
        if os.readlink(f"/proc/{coordinator}/ns/pid") != os.readlink("/proc/self/ns/pid"):
            raise FileNotFoundError
        for inode, name, size_bytes in _segment_fds(coordinator):
            if name in (WORDS, ABOUT):
                continue  # on its way to whoever stores it
            # On a simulated device the name says which first.
            segments.gens[inode] = gen = GenerationId(name.rpartition(":")[2])
            segments.sizes[gen] = size_bytes
    except FileNotFoundError:
        raise PlatformUnsupported(
            "the coordinator is not in this pid namespace, or it has ended",
            remedy="run the audit where the coordinator runs",
        ) from None
    except PermissionError as error:
        raise PeerForbidden("this user may not look into the coordinator's process") from error
    return segments


def _look_into(pid: int, segments: _Segments) -> list[Use]:
    """Return what a process has of segments.

    Raises:
        ProcessLookupError: it has no memory (any more).
        FileNotFoundError: it has ended.
        PermissionError: it may not be looked into.
    """
    with open(f"/proc/{pid}/maps", "rb") as file:
        maps = file.read()
    if not maps:
        raise ProcessLookupError
    found: dict[GenerationId, Use] = {}
    # The plain search first: most processes have none, and it is far the faster one.
    for first, end, device, number, name in _MAP.findall(maps) if _NAME.encode() in maps else ():
        gen = segments.which((device.decode(), int(number)), name.decode())
        if gen is not None:
            use = found.setdefault(gen, Use(pid, gen))
            start_byte, end_byte = int(first, 16), int(end, 16)
            use.mapped_bytes += end_byte - start_byte
            use.copied_bytes += _copied_bytes(pid, start_byte, end_byte)
    for inode, held, _ in _segment_fds(pid):
        gen = segments.which(inode, held)
        if gen is not None:
            found.setdefault(gen, Use(pid, gen)).holds = True
    return list(found.values())


def segments_of(coordinator: int) -> Iterator[tuple[GenerationId, int]]:
    """Give each host segment that a coordinator has, and an fd of it, the caller's to close."""
    folder = f"/proc/{coordinator}/fd"
    for number in os.listdir(folder):
        try:
            target = os.readlink(f"{folder}/{number}")
            name = target.removeprefix(_NAME).partition(" ")[0]
            if not target.startswith(_NAME) or name in (WORDS, ABOUT) or ":" in name:
                continue
            fd = os.open(f"{folder}/{number}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # closed while we looked
        yield GenerationId(name), fd


def _segment_fds(pid: int) -> Iterator[tuple[_Inode, str, int]]:
    """Give the inode, the name and the memory of each segment that a process has an fd of."""
    folder = f"/proc/{pid}/fd"
    for fd in os.listdir(folder):
        try:
            target = os.readlink(f"{folder}/{fd}")
            if not target.startswith(_NAME):
                continue
            stat = os.stat(f"{folder}/{fd}")
        except FileNotFoundError:
            continue  # closed while we looked
        device = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}"
        name = target.removeprefix(_NAME).partition(" ")[0]
        yield (device, stat.st_ino), name, stat.st_blocks * 512


_NOT_COPIED = bytes(flags for flags in range(256) if not flags & 0xC0 or flags & 0x20)
"""Upper bytes of a pagemap entry: neither there (bit 63) nor swapped (62), or of a file (61)."""


def _copied_bytes(pid: int, start: int, end: int) -> int:
    """Return how much of a range of its addresses a process has copied: see the note above."""
    copies = 0
    with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pagemap:
        pagemap.seek(start // mmap.PAGESIZE * _ENTRY_BYTES)
        left_bytes = (end - start) // mmap.PAGESIZE * _ENTRY_BYTES
        while left_bytes:
            entries = pagemap.read(min(left_bytes, READ_BYTES))
            if not entries:
                break  # it is ending
            copies += len(entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES].translate(None, _NOT_COPIED))
            left_bytes -= len(entries)
    return copies * mmap.PAGESIZE


def _status(pid: int) -> dict[str, str]:
    """Return the lines of /proc/PID/status, which everybody may read. Nothing if it has ended."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            pairs = (line.partition(":") for line in file)
            return {name: value.strip() for name, _, value in pairs}
    except (FileNotFoundError, ProcessLookupError):
        return {}
