"""Compares the ledger with the kernel: what segments take, and who really has them.

`audit` looks: it asks for the ledger, reads /proc, and compares. `compare` is pure. Rules:

- A process may move while it is looked at, so a difference is what several looks in a row find.
- What may rightly differ for a while is a *window*: it has a name, and is no difference.
- It changes one thing: pages that a process has written to in its map are charged to it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Literal

import msgspec
from msgspec.structs import replace

from coordinator import digests
from coordinator.device_memory import SIMULATED
from coordinator.kernel_facts import Facts, Use, collect, segments_of
from coordinator.operator import Operator
from shm_store.keys import GenerationId, SessionId
from shm_store.report import GenerationReport, LeaseReport, StatusReport
from shm_store.wire import RAM, CopiedPages

LOOKS = 3
"""What all of them find is a difference. A look takes milliseconds, a grant or release less."""

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
    "uncharged_block",
    "wrong_block",
    "changed_bytes",
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
    - `wrong_block`: memory of a simulated device takes other bytes than are charged for it.
    - `uncharged_block`: there is some that nobody is charged for.
    - `changed_bytes`: `tensor` is not any more what was written when it was filled.

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
    tensor: str = ""


class AuditReport(msgspec.Struct, frozen=True):
    """What an audit found. The figures are the ledger's. Fields are stable; more may be added.

    `digested` is of how many generations the bytes were looked at; None if that was not asked for.
    """

    agree: bool
    generations: int
    leases: int
    in_use_bytes: int
    differences: tuple[Finding, ...]
    windows: tuple[Finding, ...]
    copied: tuple[Finding, ...]
    unread: tuple[Finding, ...]
    digested: int | None = None


def audit(operator: Operator, with_bytes: bool = False) -> AuditReport:
    """Compare the ledger with the kernel, charge copied pages, and return what was found.

    Args:
        with_bytes: look at the bytes of what has digests, too. Reads all of it once.

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
    changed, digested = _changed(coordinator, books) if with_bytes else ([], None)
    return replace(
        found,
        agree=not lasting and not changed,
        differences=(*lasting.values(), *changed),
        copied=tuple(charged.values()),
        digested=digested,
    )


def _changed(coordinator: int, books: StatusReport) -> tuple[list[Finding], int]:
    """Return what is not any more what was written, and how many generations could say so."""
    key_of = {one.generation: one.key for one in books.generations if one.state == "ready"}
    found, digested = [], 0
    for gen, fd in segments_of(coordinator):
        try:
            names = digests.changed(fd) if gen in key_of else None
        finally:
            os.close(fd)
        digested += names is not None
        found += [Finding("changed_bytes", gen, key_of[gen], tensor=name) for name in names or ()]
    return found, digested


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
    differences += _blocks(books, facts)
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
    """Say whether the coordinator has an fd of it that the kernel says the name and size of."""
    if generation.private or generation.state == "open":
        return False
    there = generation.pool.startswith(SIMULATED) and generation.state in ("ready", "retired")
    return generation.pool == RAM or there


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
        if use.pid == generation.collapsed_by:
            return  # a child of the coordinator, which FREE ends
        holders, key = [lease.pid for lease in generation.leases], generation.key
        stored = generation.state == "ready" and use.pid == facts.manager
    about = Finding("fd_held", use.gen, key, use.pid, facts.names.get(use.pid, ""))
    if use.mapped_bytes and use.pid not in holders:
        yield replace(about, kind="unleased_mapping", kernel_bytes=use.mapped_bytes)
    if use.holds and not stored and not (use.mapped_bytes and use.pid in holders):
        yield about


def _blocks(books: StatusReport, facts: Facts) -> Iterator[Finding]:
    """Give what is on simulated devices and not charged as it is. Of GPUs nobody can say."""
    left = {gen: size for gen, size in facts.blocks.items() if gen.startswith(f"{books.start}-")}
    for generation in books.generations:
        if not generation.pool.startswith(SIMULATED) or generation.state == "open":
            continue
        gen = GenerationId(generation.generation)
        left.pop(gen, None)
        taken_bytes = facts.blocks.get(gen, 0)
        if generation.fixed or taken_bytes == generation.size_bytes or _under_way(generation):
            continue
        if generation.state == "filling" and not taken_bytes:
            continue  # its owner is about to allocate it
        yield Finding(
            "wrong_block",
            gen,
            generation.key,
            books_bytes=generation.size_bytes,
            kernel_bytes=taken_bytes,
        )
    for gen, taken_bytes in left.items():
        if taken_bytes:  # else it was made and got no memory
            yield Finding("uncharged_block", gen, kernel_bytes=taken_bytes)


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
