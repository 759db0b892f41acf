"""What a modelled host is made of: programs of threads, processes, maps and requests. Values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gpu_worker.records import Records
from shm_store.keys import GenerationId

FOREVER_S = 300.0

Action = tuple[Any, ...]
"""Who acts, then what: ("thread", session, index), ("reader", session), ("die", session) ..."""

FAULTS = frozenset(
    {
        "die",
        "disconnect",
        "cancel",
        "deadline",
        "overdue",
        "replay",
        "kill",
        "change",
        "clock",
        "nomem",
        "unsealed",
        "unmapped",
    }
)
"""Actions that nobody has to take: progress must not depend on them."""


QUEUE = 2
"""A thread begins nothing new while this much of its process's waits, or no world were finite."""


class Violation(AssertionError):
    """Something came to be that must not."""


@dataclass(frozen=True)
class Op:
    """One step of a thread's program.

    what: use (claim a module and end that), hold and end (the same in two steps), state and drop
    (tensors of its own), charge and uncharge, evict, invalidate, limit, pin, unpin, shutdown.
    """

    what: str
    key: str = ""
    fingerprint: str = ""
    build: bool = False
    prefetch: bool = False
    pool: str = "ram"
    size: int = 0


@dataclass(frozen=True)
class Program:
    ops: tuple[Op, ...]
    loops: bool = False


@dataclass(frozen=True)
class World:
    """Everything that a system starts from.

    Attributes:
        sizes: bytes of each key's weights.
        slow: jobs whose outcome comes later: "back", "seal", "free", "load". Others are at once.
        faults: how often each may happen.
        stuck: threads that may wait for ever, by their users' fault. All others must get on if
            nobody stops for ever.
        keeps: processes that hold from the start what they never let go of.
    """

    name: str
    programs: tuple[tuple[Program, ...], ...]
    sizes: dict[str, int]
    limits: dict[str, int] = field(default_factory=lambda: {"ram": 100})
    slow: frozenset[str] = frozenset()
    faults: dict[str, int] = field(default_factory=dict)
    stuck: frozenset[tuple[int, int]] = frozenset()
    keeps: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class Mapping:
    """One map of a segment in one process: unmapped once nothing refers to it."""

    gen: GenerationId
    key: str
    lease: int
    asked: str = ""
    watched: bool = False
    """Tensors that a thread has for itself: their end is told."""


@dataclass(slots=True, eq=False)
class Request:
    """A request in its worker. `thread` is who waits for it, if anybody still does.

    `retires` are the generations of the key at the moment an INVALIDATE arrived.
    """

    rid: int
    thread: int | None
    gen: GenerationId | None = None
    reserved: bool = False
    space: bool = False
    retires: tuple[GenerationId, ...] = ()


@dataclass(slots=True, eq=False)
class Thread:
    pc: int = 0
    phase: str = "start"
    rid: int = 0
    gen: GenerationId | None = None
    mapping: Mapping | None = None
    claims: dict[str, int] = field(default_factory=dict)
    kept: dict[str, Mapping] = field(default_factory=dict)
    charges: list[tuple[GenerationId, int]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Worker:
    """One process: what its client, keeper and records know, and its threads."""

    threads: list[Thread]
    to: list[Any] = field(default_factory=list)
    out: list[Any] = field(default_factory=list)
    said: list[Any] = field(default_factory=list)
    """Delivered ACQUIREs, which a fault may replay."""
    requests: dict[int, Request] = field(default_factory=dict)
    table: dict[GenerationId, Mapping] = field(default_factory=dict)
    mappings: list[Mapping] = field(default_factory=list)
    keeper: list[tuple[Any, ...]] = field(default_factory=list)
    flights: dict[str, int] = field(default_factory=dict)
    records: Records[Mapping] = field(default_factory=Records)
    ids: int = 0
    rids: int = 0
    alive: bool = True
    connected: bool = True


WAITING = ("asked", "flight", "done")
"""Phases in which a thread can only be moved by others."""
