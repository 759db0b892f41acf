"""What a modelled host starts from and deals in: worlds and programs, maps and requests. Values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
        "crash",
        "impatient",
        "nomem",
        "unsealed",
        "unmapped",
        "fork",
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
    (tensors of its own), send and receive (such tensors, to whoever is first), charge and uncharge,
    lock and unlock (bring a module to a device, where it stays until it is asked for), evict,
    invalidate, limit, pin, unpin, shutdown.
    shared: what is locked lies there in memory that all processes have, and was claimed before.
    """

    what: str
    key: str = ""
    fingerprint: str = ""
    build: bool = False
    prefetch: bool = False
    pool: str = "ram"
    size: int = 0
    shared: bool = False


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
        resumes: who loses the connection comes back, and goes on.
        store: what is READY outlives the coordinator, and who is attached.
    """

    name: str
    programs: tuple[tuple[Program, ...], ...]
    sizes: dict[str, int]
    limits: dict[str, int] = field(default_factory=lambda: {"ram": 100})
    slow: frozenset[str] = frozenset()
    faults: dict[str, int] = field(default_factory=dict)
    stuck: frozenset[tuple[int, int]] = frozenset()
    keeps: frozenset[int] = frozenset()
    resumes: bool = False
    store: bool = True


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
class Parcel:
    """Tensors on their way from one process to another.

    Attributes:
        mapping: the sender's, which keeps it until this is received; None once that is dead.
        taken: somebody is receiving it.
    """

    gen: GenerationId
    key: str
    sender: int
    mapping: Mapping | None
    taken: bool = False


@dataclass(slots=True, eq=False)
class Resident:
    """A module of one thread on a device, by a charge, or by a lease on a copy of `copy_of`.

    Attributes:
        wanted: it leaves once it is unlocked; "stale" if there are newer weights.
    """

    gen: GenerationId
    lease: int
    size: int
    copy_of: GenerationId | None = None
    locked: bool = True
    wanted: str = ""


@dataclass(slots=True, eq=False)
class Request:
    """A request in its worker. `thread` is who waits for it, if anybody still does.

    `retires` are the generations of the key at the moment an INVALIDATE arrived; `private` that it
    is a CHARGE.
    """

    rid: int
    thread: int | None
    gen: GenerationId | None = None
    reserved: bool = False
    space: bool = False
    retires: tuple[GenerationId, ...] = ()
    private: bool = False


WAITING = ("asked", "flight", "done")
"""Phases in which a thread can only be moved by others."""
