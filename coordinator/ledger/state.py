"""What the ledger knows. Values and questions; nothing here changes anything.

`Ledger.generations`, `sessions` and `requests` are the truth. `by_home`, `running` and a
generation's `askers` are indexes over them, kept so that a hit costs the same with ten thousand
keys; the invariants check that they say nothing else. `parked` are the READY ones that are to make
room and have askers.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from shm_store.keys import Fingerprint, GenerationId, Key, LeaseId, RequestId, SessionId
from shm_store.pace import Pace
from shm_store.report import ModelReport
from shm_store.wire import NO_GENERATION, RAM, Asked, Declare

VRAM = "vram:"
"""What the pools of devices are named, before the device's uuid."""

Home = tuple[str, Key]
"""Where weights are one: a pool, and their key in it. On a device they are a copy of the host's."""


class State(enum.Enum):
    """Where a generation is in its life. FREED is not a state: it has left the table."""

    OPEN = "open"
    RESERVED = "reserved"
    FILLING = "filling"
    READY = "ready"
    RETIRED = "retired"
    FREEING = "freeing"


TRANSITIONS: dict[State, dict[State, str]] = {
    State.OPEN: {
        State.RESERVED: "RESERVE admitted",
        State.READY: "CHARGE admitted",
    },
    State.RESERVED: {
        State.FILLING: "backed: SPACE goes to the owner",
        State.FREEING: "backing refused, owner lost or ended, a source nobody waits for",
    },
    State.FILLING: {
        State.READY: "COMMIT, sealed: whoever asked gets a lease",
        State.RETIRED: "the same, if doomed",
        State.FREEING: "ABORT, owner ended, seal of a loader's refused",
    },
    State.READY: {
        State.RETIRED: "successor sealed, invalidated or draining, while leased",
        State.FREEING: "the same without a lease; room needed, evicted; a device's, holder ended",
    },
    State.RETIRED: {State.FREEING: "last lease ended"},
    State.FREEING: {
        State.READY: "a device's, and a forked child states it",
        State.RETIRED: "the same, and there is a newer one by now",
    },
}
"""Every move there is, and what causes it. scripts/diagrams draws the docs from this."""

LEAVING: dict[State, str] = {
    State.OPEN: "ABORT, CANCEL, owner lost or ended, never fits, a source nobody waits for",
    State.READY: "private, and its lease ended",
    State.FREEING: "the kernel has the bytes back",
}
"""From where a generation leaves the table, and why."""

RUNNING = (State.OPEN, State.RESERVED, State.FILLING)
LEASABLE = (State.READY, State.RETIRED)

LOADER: Literal["loader"] = "loader"

OTHERS = SessionId(-1)
"""Among the sessions that are awaited: any number more, of whom nobody knows."""


@dataclass(slots=True)
class Session:
    """One attached process. `leases` mirrors those of the generations, for its end.

    Attributes:
        silent: it was attached to the coordinator before this one, and has not resumed.
        devices: what it has said of each pool's limit, which counts as long as it is here.
    """

    id: SessionId
    pid: int
    name: str
    device: str
    role: Literal["worker", "operator"]
    connected: bool = True
    silent: bool = False
    last_rid: RequestId = RequestId(0)
    leases: dict[GenerationId, Lease] = field(default_factory=dict)
    models: tuple[ModelReport, ...] = ()
    devices: dict[str, Declare] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Lease:
    """One process may have the bytes of one generation mapped.

    Attributes:
        asked: what its holder was sent a REVOKE for; "" if none.
        asked_s: when.
        answer: that something uses it, or none in time; or, asked for that, that nothing does.
        answered_s: when that was so.
        copied_bytes: pages of the map that the process has written to, by the last audit.
    """

    id: LeaseId
    since_s: float
    asked: Asked | Literal[""] = ""
    asked_s: float = 0.0
    answer: Literal["", "idle", "kept", "overdue"] = ""
    answered_s: float = 0.0
    copied_bytes: int = 0

    @property
    def going(self) -> bool:
        """Its holder was asked to let go, and has not said that it cannot."""
        return self.asked in ("room", "stale") and not self.answer


@dataclass(slots=True, eq=False)
class Request:
    """An open ACQUIRE or CHARGE. It belongs to one generation and gets its one answer from it."""

    session: SessionId
    rid: RequestId
    key: Key
    fingerprint: Fingerprint
    source: str | None
    timeout_s: float
    since_s: float
    prefetch: bool = False
    pool: str = RAM
    gen: GenerationId | None = None

    @property
    def home(self) -> Home:
        return self.pool, self.key

    @property
    def id(self) -> tuple[SessionId, RequestId]:
        return self.session, self.rid


@dataclass(slots=True, eq=False)
class Generation:
    """One life of a key's weights, on the host or on a device.

    Attributes:
        fingerprint: what they are; on a device, of which generation they are the copy.
        private: a CHARGE: memory of one process, never matched by key, with no segment.
        fixed: nobody asks for it: its process keeps it until it wants it no more.
        copy_of: the generation whose bytes are in it, if it has any.
        owner: who has the ticket: the request of a worker that builds, the loader, or nobody.
        doomed: will be RETIRED, not READY, when it is committed; takes no new asker.
        sealing: COMMIT came and the executor is at it, so the owner may end.
        held: its owner has not been told to begin: a session that is awaited may offer it.
        deaths: how many owners of this fill died, this generation's predecessors included.
        size_bytes: 0 until RESERVE; charged from RESERVED on.
        queued_s: since when its RESERVE waits for room.
        filled_bytes, total_bytes: how far the fill is, as its owner says, and of how much; before
            RESERVE, what its loader fetches to know the size.
        progressed_s: when the fill last came further; 0 until it has begun.
        pace: how fast it does. Of one that another coordinator began, since it was heard of.
        idle_s: since when nobody leases it.
        died_pid: the last of those who ended without giving it back; 0 if nobody has.
    """

    id: GenerationId
    key: Key
    fingerprint: Fingerprint
    pool: str
    owner: Request | Literal["loader"] | None
    private: bool = False
    fixed: bool = False
    copy_of: GenerationId = NO_GENERATION
    state: State = State.OPEN
    doomed: bool = False
    sealing: bool = False
    held: bool = False
    deaths: int = 0
    size_bytes: int = 0
    filled_bytes: int = 0
    total_bytes: int = 0
    queued_s: float | None = None
    progressed_s: float = 0.0
    pace: Pace | None = None
    idle_s: float = 0.0
    died_pid: int = 0
    leases: dict[SessionId, Lease] = field(default_factory=dict)
    askers: dict[tuple[SessionId, RequestId], Request] = field(default_factory=dict)

    @property
    def home(self) -> Home:
        return self.pool, self.key

    @property
    def charged_bytes(self) -> int:
        return 0 if self.state is State.OPEN else self.size_bytes

    @property
    def retained(self) -> bool:
        """Ready, and kept warm for nobody in particular."""
        return self.state is State.READY and not self.leases

    @property
    def prefetch(self) -> bool:
        """Nobody waits for it but prefetches."""
        return bool(self.askers) and all(asker.prefetch for asker in self.askers.values())

    @property
    def coming(self) -> bool:
        """Its bytes are on their way back: all who have them were asked, and none has refused."""
        if self.state is State.FREEING:
            return True
        return bool(self.leases) and all(lease.going for lease in self.leases.values())

    @property
    def refused(self) -> bool:
        """Somebody who was asked uses it, or does not answer."""
        return self.refused_s is not None

    @property
    def refused_s(self) -> float | None:
        """Since when the first of them does."""
        times = [
            lease.answered_s
            for lease in self.leases.values()
            if lease.answer in ("kept", "overdue")
        ]
        return min(times, default=None)

    @property
    def gives_way(self) -> bool:
        """Somebody was asked to let it go, to make room, or whether he could."""
        return self.state is State.READY and any(
            lease.asked in ("room", "idle") for lease in self.leases.values()
        )

    @property
    def unasked_fill(self) -> bool:
        """A loader fills it and everybody who asked has gone."""
        return (
            self.state is State.FILLING
            and self.owner == LOADER
            and not self.askers
            and not self.sealing
        )


@dataclass(slots=True)
class Pool:
    """A budget, and the generations that wait for room in it, first come first.

    `in_use_bytes` is charged from RESERVED until freed, shared bytes once, and is the sum over the
    table; `turn` keeps it, the invariants compare. `given_up`: somebody waits for room no more.
    `said_by` is whose word the limit is: see `Declare`. `found_bytes` is the most that a session
    found on the device, now or before: later ones find there less what we have.
    """

    name: str
    limit_bytes: int
    in_use_bytes: int = 0
    given_up: bool = False
    said_by: Literal["sessions", "operator"] = "operator"
    found_bytes: int = 0
    queue: list[Generation] = field(default_factory=list)

    @property
    def free_bytes(self) -> int:
        return max(0, self.limit_bytes - self.in_use_bytes)

    @property
    def short(self) -> bool:
        """Somebody waits for room, or the limit was lowered below what is in use."""
        return bool(self.queue) or self.in_use_bytes > self.limit_bytes

    def waiting(self) -> list[Generation]:
        """Return those who wait, loads before prefetches, each first come first."""
        return sorted(self.queue, key=lambda generation: generation.prefetch)


@dataclass(slots=True)
class Flushing:
    """A FLUSH that waits until these generations are freed."""

    session: SessionId
    rid: RequestId
    freeing: list[GenerationId]


@dataclass(slots=True)
class Invalidating:
    """An INVALIDATE that waits until the holders of these generations have heard of it.

    `known` says whether there was anything to retire.
    """

    session: SessionId
    rid: RequestId
    key: Key
    known: bool
    retired: list[GenerationId]
    deadline_s: float


@dataclass(slots=True)
class Draining:
    """A DRAIN that waits until nothing is held."""

    session: SessionId
    rid: RequestId
    deadline_s: float


@dataclass(slots=True)
class Ledger:
    """Everything the coordinator knows about who holds what."""

    start_ns: int
    pools: dict[str, Pool]
    counter: int = 0
    generations: dict[GenerationId, Generation] = field(default_factory=dict)
    sessions: dict[SessionId, Session] = field(default_factory=dict)
    requests: dict[tuple[SessionId, RequestId], Request] = field(default_factory=dict)
    by_home: dict[Home, list[Generation]] = field(default_factory=dict)
    running: dict[GenerationId, Generation] = field(default_factory=dict)
    pins: dict[Key, None] = field(default_factory=dict)
    parked: dict[GenerationId, Generation] = field(default_factory=dict)
    flushes: list[Flushing] = field(default_factory=list)
    invalidations: list[Invalidating] = field(default_factory=list)
    drains: list[Draining] = field(default_factory=list)
    draining: bool = False
    awaited: dict[SessionId, None] = field(default_factory=dict)
    """Sessions that may have what nobody leases; see `recovery`."""
    awaited_until_s: float | None = None

    def ready(self, home: Home) -> Generation | None:
        """Return the one READY generation there."""
        for generation in self.by_home.get(home, ()):
            if generation.state is State.READY:
                return generation
        return None

    def filling(self, home: Home) -> Generation | None:
        """Return the one running generation there that still takes askers."""
        for generation in self.by_home.get(home, ()):
            if generation.state in RUNNING and not generation.doomed:
                return generation
        return None

    def of_key(self, key: Key) -> list[Generation]:
        """Return every generation of `key` that is not private, on the host and on devices."""
        return [found for pool in self.pools for found in self.by_home.get((pool, key), ())]

    def in_pool(self, pool: str) -> Iterator[Generation]:
        """Return every charged generation of `pool`."""
        return (
            generation
            for generation in self.generations.values()
            if generation.pool == pool and generation.state is not State.OPEN
        )

    def pinned(self, generation: Generation) -> bool:
        """Say whether no eviction may take `generation`: the READY weights of a pinned key.

        On devices, where they come back from the host, nothing is pinned.
        """
        return (
            generation.state is State.READY
            and generation.pool == RAM
            and not generation.private
            and generation.key in self.pins
        )

    def copies(self, key: Key) -> list[Generation]:
        """Return what is leased of `key` as a copy, on devices."""
        if len(self.pools) == 1:
            return []
        return [
            generation
            for generation in self.generations.values()
            if generation.copy_of and generation.key == key and generation.state is State.READY
        ]

    def fixed_bytes(self, generation: Generation) -> int:
        """Return the bytes of its pool that those keep who wait for `generation`, and go on to.

        On devices: nobody reserves memory of the host.
        """
        if generation.pool == RAM:
            return 0
        sessions = {asker.session for asker in generation.askers.values()}
        return sum(
            kept.size_bytes
            for kept in self.in_pool(generation.pool)
            if kept.fixed and any(session in kept.leases for session in sessions)
        )

    def pinned_bytes(self, pool: str) -> int:
        """Return the bytes of `pool` that no eviction may ever take."""
        return sum(
            generation.size_bytes for generation in self.in_pool(pool) if self.pinned(generation)
        )

    def open_requests(self, session: SessionId, *, prefetch: bool) -> int:
        """Return how many prefetches, or other requests, of `session` have no final answer yet."""
        return sum(
            request.session == session and request.prefetch is prefetch
            for request in self.requests.values()
        )

    def owner_pid(self, generation: Generation) -> int | None:
        """Return the pid of the worker that fills `generation`; None if that is no worker."""
        owner = generation.owner
        session = self.sessions.get(owner.session) if isinstance(owner, Request) else None
        return None if session is None else session.pid

    def owned_by(self, session: SessionId) -> list[Generation]:
        """Return the running generations whose ticket `session` has."""
        return [
            generation
            for generation in self.running.values()
            if isinstance(generation.owner, Request) and generation.owner.session == session
        ]


def new_ledger(start_ns: int, limits_bytes: dict[str, int]) -> Ledger:
    """Return the ledger of a coordinator that has just started.

    Args:
        start_ns: nanoseconds on the boot clock; the first half of every generation id.
        limits_bytes: the budget of each pool; `ram` is one.
    """
    pools = {name: Pool(name, limit_bytes) for name, limit_bytes in limits_bytes.items()}
    return Ledger(start_ns=start_ns, pools=pools)
