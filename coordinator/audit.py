"""Compares the ledger with the kernel: what segments take, and who really has them.

`audit` looks: it asks for the ledger, reads /proc, and compares. `compare` is pure. Rules:

- A process may move while it is looked at, so a difference is what several looks in a row find.
- What may rightly differ for a while is a *window*: it has a name, and is no difference.
- It changes one thing: pages that a process has written to in its map are charged to it.

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

import msgspec
from msgspec.structs import replace

from coordinator.operator import Operator
from shm_store.errors import PeerForbidden, PlatformUnsupported
from shm_store.keys import GenerationId, SessionId
from shm_store.report import GenerationReport, LeaseReport, StatusReport
from shm_store.wire import CopiedPages

LOOKS = 3
"""What all of them find is a difference. A look takes milliseconds, a grant or release less."""

READ_BYTES = 1 << 20
_ENTRY_BYTES = 8


Kind = Literal[
    "unleased_mapping",
    "unmapped_lease",
    "fd_held",
    "wrong_size",
    "missing_segment",
    "unknown_segment",
    "wrong_copied",
    "wrong_total",
    "reserved",
    "freeing",
    "ending",
    "loading",
    "copied_pages",
    "unread",
]


class Finding(msgspec.Struct, frozen=True):
    """One thing that an audit found. Fields that say nothing about it are empty.

    Differences:

    - `unleased_mapping`: a process maps so much of a segment and does not lease it (any more).
      Where the ledger has freed it, this is memory that nobody is charged for.
    - `unmapped_lease`: the holder of a lease maps nothing of it, or is gone.
    - `fd_held`: a process keeps an fd of a segment that it neither leases and maps, nor fills, nor,
      as the coordinator's manager, stores because it is READY.
    - `wrong_size`: a segment takes other memory than is charged for it.
    - `missing_segment`: charged, but the coordinator has no segment of it.
    - `unknown_segment`: the coordinator has a segment that is not charged.
    - `wrong_copied`: the charge for copied pages did not follow what was found.
    - `wrong_total`: the use of pool `key` is not the sum of what is in it.

    Windows:

    - `reserved`, `freeing`: a segment is getting its pages, or giving them back.
    - `ending`: a holder that is giving its memory back; its leases end after that.
    - `loading`: a lease of `weight-cache load`, which maps nothing and ends at once.

    Others:

    - `copied_pages`: a holder has written to its map, and is charged for that from now on.
    - `unread`: a process of the coordinator's user, or a holder, that may not be looked into.
    """

    kind: Kind
    generation: str = ""
    key: str = ""
    pid: int | None = None
    process: str = ""
    session: int | None = None
    books_bytes: int | None = None
    kernel_bytes: int | None = None


class AuditReport(msgspec.Struct, frozen=True):
    """What an audit found. The figures are the ledger's. Fields are stable; more may be added."""

    agree: bool
    generations: int
    leases: int
    in_use_bytes: int
    differences: tuple[Finding, ...]
    windows: tuple[Finding, ...]
    copied: tuple[Finding, ...]
    unread: tuple[Finding, ...]


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
    """

    segments: dict[GenerationId, int] = field(default_factory=dict)
    uses: tuple[Use, ...] = ()
    processes: dict[int, Sight] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    children: frozenset[int] = frozenset()
    manager: int = 0


def audit(operator: Operator) -> AuditReport:
    """Compare the ledger with the kernel, charge copied pages, and return what was found.

    Raises:
        PeerForbidden: this user may not look into the coordinator.
        PlatformUnsupported: the coordinator is in another pid namespace.
        CoordinatorLost: it does not answer.
    """
    coordinator = operator.coordinator_pid()
    charged: dict[tuple[str, int | None], Finding] = {}
    lasting: dict[tuple[object, ...], Finding] | None = None
    for _ in range(LOOKS):
        books = operator.status()
        facts = collect(coordinator, books.start)
        if copies := copied(books, facts):
            operator.copied([_pages(copy) for copy in copies])
            charged.update({(copy.generation, copy.session): copy for copy in copies})
            books = operator.status()
        found = compare(books, facts)
        seen = {_identity(difference): difference for difference in found.differences}
        before = seen if lasting is None else lasting
        lasting = {what: difference for what, difference in seen.items() if what in before}
        if not lasting:
            break
    assert lasting is not None
    return replace(
        found,
        agree=not lasting,
        differences=tuple(lasting.values()),
        copied=tuple(charged.values()),
    )


def _pages(copy: Finding) -> CopiedPages:
    assert copy.session is not None and copy.kernel_bytes is not None
    return CopiedPages(SessionId(copy.session), GenerationId(copy.generation), copy.kernel_bytes)


def _identity(difference: Finding) -> tuple[object, ...]:
    return difference.kind, difference.generation, difference.key, difference.pid


# --- comparing: pure ----------------------------------------------------------------------------


def compare(books: StatusReport, facts: Facts) -> AuditReport:
    """Return in what the ledger and the kernel differ at one look."""
    known = {GenerationId(g.generation): g for g in books.generations if _has_segment(g)}
    differences = [
        Finding("unknown_segment", gen, kernel_bytes=size_bytes)
        for gen, size_bytes in facts.segments.items()
        if gen not in known
    ]
    windows: list[Finding] = []
    for generation in known.values():
        if kind := _under_way(generation):
            windows.append(Finding(kind, generation.generation, generation.key))
            continue
        differences += _size(generation, facts)
        for lack in _unmapped(generation, books, facts):
            (differences if lack.kind == "unmapped_lease" else windows).append(lack)
    for use in facts.uses:
        differences += _unleased(use, known.get(use.gen), facts)
    differences += [replace(copy, kind="wrong_copied") for copy in copied(books, facts)]
    if not differences and not windows:
        differences += _totals(books, facts)
    holders = {lease.pid for generation in books.generations for lease in generation.leases}
    return AuditReport(
        agree=not differences,
        generations=sum(generation.state != "open" for generation in books.generations),
        leases=sum(len(generation.leases) for generation in books.generations),
        in_use_bytes=sum(pool.in_use_bytes for pool in books.pools),
        differences=tuple(differences),
        windows=tuple(windows),
        copied=(),
        unread=tuple(
            Finding("unread", pid=pid, process=facts.names.get(pid, ""))
            for pid, sight in sorted(facts.processes.items())
            if sight == "unread" or (sight == "foreign" and pid in holders)
        ),
    )


def copied(books: StatusReport, facts: Facts) -> list[Finding]:
    """Return whose copied pages are other than what is charged for them.

    The maps of a process are those of all its sessions: the first that leases a generation pays.
    """
    found = []
    for generation in filter(_has_segment, books.generations):
        left = {use.pid: use.copied_bytes for use in facts.uses if use.gen == generation.generation}
        for lease in generation.leases:
            if facts.processes.get(lease.pid) != "read":
                continue  # nothing new is known of it
            kernel_bytes = left.pop(lease.pid, 0)
            if kernel_bytes != lease.copied_bytes:
                copy = _of_holder("copied_pages", generation, lease, facts)
                sizes = {"books_bytes": lease.copied_bytes, "kernel_bytes": kernel_bytes}
                found.append(replace(copy, **sizes))
    return found


def _has_segment(generation: GenerationReport) -> bool:
    return generation.state != "open" and not generation.private


def _under_way(generation: GenerationReport) -> Literal["reserved", "freeing", ""]:
    match generation.state:
        case "reserved" | "freeing" as state:
            return state
        case _:
            return ""


def _of_holder(
    kind: Kind, generation: GenerationReport, lease: LeaseReport, facts: Facts
) -> Finding:
    process = facts.names.get(lease.pid, "")
    return Finding(kind, generation.generation, generation.key, lease.pid, process, lease.session)


def _size(generation: GenerationReport, facts: Facts) -> Iterator[Finding]:
    """Give the difference between what is charged for a segment and what it takes."""
    charged_bytes = generation.size_bytes
    taken_bytes = facts.segments.get(GenerationId(generation.generation))
    if taken_bytes != charged_bytes:
        yield Finding(
            "missing_segment" if taken_bytes is None else "wrong_size",
            generation.generation,
            generation.key,
            books_bytes=charged_bytes,
            kernel_bytes=taken_bytes,
        )


def _unmapped(generation: GenerationReport, books: StatusReport, facts: Facts) -> Iterator[Finding]:
    """Give the leases of those who map nothing of it: differences, and windows."""
    mapping = {
        use.pid for use in facts.uses if use.mapped_bytes and use.gen == generation.generation
    }
    workers = {session.session for session in books.sessions}
    for lease in generation.leases:
        sight = facts.processes.get(lease.pid)
        if lease.pid in mapping or sight in ("unread", "foreign"):
            continue
        if sight == "ending":
            yield _of_holder("ending", generation, lease, facts)
        elif lease.session not in workers:
            yield _of_holder("loading", generation, lease, facts)
        else:
            yield _of_holder("unmapped_lease", generation, lease, facts)


def _unleased(use: Use, generation: GenerationReport | None, facts: Facts) -> Iterator[Finding]:
    """Give what a process has and should not have. No `generation`: the ledger has freed it."""
    holders, key, stored = [], "", False
    if generation is not None:
        fillers = facts.children | {generation.filled_by}
        if _under_way(generation) or (generation.state == "filling" and use.pid in fillers):
            return
        holders, key = [lease.pid for lease in generation.leases], generation.key
        stored = generation.state == "ready" and use.pid == facts.manager
    about = Finding("fd_held", use.gen, key, use.pid, facts.names.get(use.pid, ""))
    if use.mapped_bytes and use.pid not in holders:
        yield replace(about, kind="unleased_mapping", kernel_bytes=use.mapped_bytes)
    if use.holds and not stored and not (use.mapped_bytes and use.pid in holders):
        yield about


def _totals(books: StatusReport, facts: Facts) -> Iterator[Finding]:
    """Give the pools that are not the sum of their segments, copied pages and private memory."""
    for pool in books.pools:
        sum_bytes = 0
        for generation in books.generations:
            if generation.pool == pool.name and generation.state != "open":
                gen = GenerationId(generation.generation)
                sum_bytes += facts.segments.get(gen, generation.size_bytes)
                sum_bytes += sum(lease.copied_bytes for lease in generation.leases)
        if sum_bytes != pool.in_use_bytes:
            yield Finding(
                "wrong_total",
                key=pool.name,
                books_bytes=pool.in_use_bytes,
                kernel_bytes=sum_bytes,
            )


# --- looking ------------------------------------------------------------------------------------

_NAME = "/memfd:weight-cache:"
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
    )


def _is_managed(coordinator: int) -> bool:
    """Say whether who started it stores what it has; see `coordinator.notify`."""
    with open(f"/proc/{coordinator}/environ", "rb") as file:
        return any(line.startswith(b"NOTIFY_SOCKET=/") for line in file.read().split(b"\0"))


def _segments(coordinator: int, start: str) -> _Segments:
    segments = _Segments(start)
    if not os.path.exists("/proc/self/pagemap"):
        raise PlatformUnsupported("this system has no /proc, or no pagemap in it")
    try:
        if os.readlink(f"/proc/{coordinator}/ns/pid") != os.readlink("/proc/self/ns/pid"):
            raise FileNotFoundError
        for inode, name, size_bytes in _segment_fds(coordinator):
            segments.gens[inode] = gen = GenerationId(name)
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
