"""What the ledger knows. Values and questions; nothing here changes anything.

`Ledger.generations`, `sessions` and `requests` are the truth. `by_key`, `running` and a
generation's `askers` are indexes over them, kept so that a hit costs the same with ten thousand
keys; the invariants check that they say nothing else.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from shm_store.keys import Fingerprint, GenerationId, Key, LeaseId, RequestId, SessionId

RAM = "ram"


class State(enum.Enum):
    """Where a generation is in its life. FREED is not a state: it has left the table."""

    OPEN = "open"
    RESERVED = "reserved"
    FILLING = "filling"
    READY = "ready"
    RETIRED = "retired"
    FREEING = "freeing"


TRANSITIONS: dict[State, tuple[State, ...]] = {
    State.OPEN: (State.RESERVED,),
    State.RESERVED: (State.FILLING, State.FREEING),
    State.FILLING: (State.READY, State.RETIRED, State.FREEING),
    State.READY: (State.RETIRED, State.FREEING),
    State.RETIRED: (State.FREEING,),
    State.FREEING: (),
}
"""Every move there is. OPEN and FREEING may also leave the table."""

RUNNING = (State.OPEN, State.RESERVED, State.FILLING)
LEASABLE = (State.READY, State.RETIRED)

LOADER: Literal["loader"] = "loader"


@dataclass(slots=True)
class Session:
    """One attached process. `leases` mirrors those of the generations, for its end."""

    id: SessionId
    pid: int
    name: str
    device: str
    role: Literal["worker", "operator"]
    connected: bool = True
    last_rid: RequestId = RequestId(0)
    leases: dict[GenerationId, Lease] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lease:
    """One process may have the bytes of one generation mapped."""

    id: LeaseId
    since_s: float


@dataclass(slots=True, eq=False)
class Request:
    """An open ACQUIRE. It belongs to one generation and gets its one answer from it."""

    session: SessionId
    rid: RequestId
    key: Key
    fingerprint: Fingerprint
    source: str | None
    timeout_s: float
    since_s: float
    gen: GenerationId | None = None

    @property
    def id(self) -> tuple[SessionId, RequestId]:
        return self.session, self.rid


@dataclass(slots=True, eq=False)
class Generation:
    """One life of a key's weights.

    Attributes:
        owner: who has the ticket: the request of a worker that builds, the loader, or nobody.
        doomed: will be RETIRED, not READY, when it is committed; takes no new asker.
        sealing: COMMIT came and the executor is at it, so the owner may end.
        deaths: how many owners of this fill died, this generation's predecessors included.
        size_bytes: 0 until RESERVE; charged from RESERVED on.
        queued_s: since when its RESERVE waits for room.
        progressed_s: when the fill last came further.
        idle_s: since when nobody leases it.
    """

    id: GenerationId
    key: Key
    fingerprint: Fingerprint
    pool: str
    owner: Request | Literal["loader"] | None
    state: State = State.OPEN
    doomed: bool = False
    sealing: bool = False
    deaths: int = 0
    size_bytes: int = 0
    filled_bytes: int = 0
    queued_s: float | None = None
    progressed_s: float = 0.0
    idle_s: float = 0.0
    leases: dict[SessionId, Lease] = field(default_factory=dict)
    askers: dict[tuple[SessionId, RequestId], Request] = field(default_factory=dict)

    @property
    def charged_bytes(self) -> int:
        return 0 if self.state is State.OPEN else self.size_bytes

    @property
    def retained(self) -> bool:
        """Ready, and kept warm for nobody in particular."""
        return self.state is State.READY and not self.leases

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
    """A budget, and the generations whose RESERVE waits for room in it, first come first."""

    name: str
    limit_bytes: int
    queue: list[Generation] = field(default_factory=list)


@dataclass(slots=True)
class Flushing:
    """A FLUSH that waits until these generations are freed."""

    session: SessionId
    rid: RequestId
    freeing: list[GenerationId]


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
    by_key: dict[Key, list[Generation]] = field(default_factory=dict)
    running: dict[GenerationId, Generation] = field(default_factory=dict)
    pins: dict[Key, None] = field(default_factory=dict)
    flushes: list[Flushing] = field(default_factory=list)
    drains: list[Draining] = field(default_factory=list)
    draining: bool = False

    def ready(self, key: Key) -> Generation | None:
        """Return the one READY generation of `key`."""
        for generation in self.by_key.get(key, ()):
            if generation.state is State.READY:
                return generation
        return None

    def filling(self, key: Key) -> Generation | None:
        """Return the one running generation of `key` that still takes askers."""
        for generation in self.by_key.get(key, ()):
            if generation.state in RUNNING and not generation.doomed:
                return generation
        return None

    def in_pool(self, pool: str) -> Iterator[Generation]:
        """Return every charged generation of `pool`."""
        return (
            generation
            for generation in self.generations.values()
            if generation.pool == pool and generation.state is not State.OPEN
        )

    def in_use_bytes(self, pool: str) -> int:
        """Return the bytes charged to `pool`: from RESERVED until freed, shared ones once."""
        return sum(generation.size_bytes for generation in self.in_pool(pool))

    def pinned_bytes(self, pool: str) -> int:
        """Return the bytes of `pool` that no eviction may ever take."""
        return sum(
            generation.size_bytes
            for generation in self.in_pool(pool)
            if generation.state is State.READY and generation.key in self.pins
        )

    def open_requests(self, session: SessionId) -> int:
        """Return how many requests of `session` have no final answer yet."""
        return sum(asker == session for asker, _ in self.requests)

    def owned_by(self, session: SessionId) -> list[Generation]:
        """Return the running generations whose ticket `session` has."""
        return [
            generation
            for generation in self.running.values()
            if isinstance(generation.owner, Request) and generation.owner.session == session
        ]


def new_ledger(start_ns: int, ram_limit_bytes: int) -> Ledger:
    """Return the ledger of a coordinator that has just started.

    Args:
        start_ns: nanoseconds on the boot clock; the first half of every generation id.
        ram_limit_bytes: the budget of the pool `ram`.
    """
    return Ledger(start_ns=start_ns, pools={RAM: Pool(RAM, ram_limit_bytes)})
