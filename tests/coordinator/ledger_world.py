"""A ledger with a scripted outside: every event is followed by a check of every invariant."""

from __future__ import annotations

from coordinator.ledger import apply, new_ledger, status_report
from coordinator.ledger.events import (
    Attached,
    Back,
    Backed,
    BackingRefused,
    Disconnected,
    Effect,
    Event,
    Forget,
    Free,
    Freed,
    LoaderEnded,
    LoaderSaid,
    Said,
    Seal,
    Sealed,
    SealRefused,
    Send,
    SendSpace,
    SessionEnded,
    StartLoader,
    TimePassed,
)
from coordinator.ledger.invariants import violations
from coordinator.ledger.state import Generation, State
from shm_store.keys import GenerationId
from shm_store.report import PoolReport
from shm_store.wire import (
    RAM,
    Abort,
    Acquire,
    Cancel,
    Commit,
    Fail,
    Grant,
    Release,
    Reserve,
    Ticket,
)


class World:
    """Drives a ledger by hand. `log` keeps every effect, `now_s` is whatever the test says."""

    def __init__(self, limit_bytes: int = 1000, start_ns: int = 1) -> None:
        self.ledger = new_ledger(start_ns, {RAM: limit_bytes})
        self.now_s = 0.0
        self.log: list[Effect] = []
        self.rids: dict[int, int] = {}

    def event(self, event: Event) -> list[Effect]:
        effects = apply(self.ledger, event, self.now_s)
        self.log += effects
        broken = violations(self.ledger)
        assert not broken, f"{broken} after {event}"
        return effects

    # --- sessions ---

    def attach(self, *sessions: int, role: str = "worker") -> None:
        for session in sessions:
            self.rids.setdefault(session, 0)
            self.event(Attached(session, 1000 + session, f"w{session}", "cpu", role))

    def disconnect(self, session: int) -> list[Effect]:
        return self.event(Disconnected(session))

    def end(self, session: int) -> list[Effect]:
        return self.event(SessionEnded(session))

    # --- what sessions say ---

    def rid(self, session: int) -> int:
        self.rids[session] += 1
        return self.rids[session]

    def say(self, session: int, message, fingerprint: str = "") -> list[Effect]:
        return self.event(Said(session, message, fingerprint))

    def load(self, session: int, key: str, file: str = "f1", timeout_s: float = 300.0) -> int:
        """ACQUIRE with a source; `file` stands for its fingerprint. Returns the rid."""
        rid = self.rid(session)
        self.say(session, Acquire(rid, key, f"/{key}", "", timeout_s), f"file:{file}")
        return rid

    def build(self, session: int, key: str, version: str = "", timeout_s: float = 300.0) -> int:
        """ACQUIRE without a source. Returns the rid."""
        rid = self.rid(session)
        self.say(session, Acquire(rid, key, None, version, timeout_s))
        return rid

    def release(self, session: int, gen: GenerationId, lease: int) -> list[Effect]:
        return self.say(session, Release(gen, lease))

    def cancel(self, session: int, rid: int) -> list[Effect]:
        return self.say(session, Cancel(rid))

    # --- what owners and the executor say ---

    def by_owner(self, gen: GenerationId, session: int | None, message) -> list[Effect]:
        if session is None:
            return self.event(LoaderSaid(gen, message))
        return self.say(session, message)

    def reserve(self, gen: GenerationId, size: int, session: int | None = None) -> list[Effect]:
        return self.by_owner(gen, session, Reserve(gen, size))

    def commit(self, gen: GenerationId, session: int | None = None) -> list[Effect]:
        return self.by_owner(gen, session, Commit(gen))

    def abort(self, gen: GenerationId, session: int | None = None, cause=None) -> list[Effect]:
        return self.by_owner(gen, session, Abort(gen, cause))

    def backed(self, gen: GenerationId) -> list[Effect]:
        return self.event(Backed(gen))

    def backing_refused(self, gen: GenerationId, reason: str = "no memory") -> list[Effect]:
        return self.event(BackingRefused(gen, reason))

    def sealed(self, gen: GenerationId) -> list[Effect]:
        return self.event(Sealed(gen))

    def seal_refused(self, gen: GenerationId, reason: str = "busy") -> list[Effect]:
        return self.event(SealRefused(gen, reason))

    def loader_ended(self, gen: GenerationId, reason: str = "was ended") -> list[Effect]:
        return self.event(LoaderEnded(gen, reason))

    def freed(self, gen: GenerationId) -> list[Effect]:
        return self.event(Freed(gen))

    def wait_until(self, now_s: float) -> list[Effect]:
        self.now_s = now_s
        return self.event(TimePassed())

    def begin_fill(
        self, gen: GenerationId, size: int = 100, session: int | None = None
    ) -> list[Effect]:
        """From OPEN to FILLING, in a pool that has the room. Returns what the backing led to."""
        self.reserve(gen, size, session)
        effects = self.backed(gen)
        assert self.state(gen) is State.FILLING
        return effects

    def fill(self, gen: GenerationId, size: int = 100, session: int | None = None) -> None:
        """From OPEN to READY (or RETIRED)."""
        self.begin_fill(gen, size, session)
        self.commit(gen, session)
        self.sealed(gen)
        if session is None:
            self.loader_ended(gen, "ended with exit code 0")

    def have(self, session: int, key: str, size: int = 100, file: str = "f1") -> tuple[str, int]:
        """Load `key` into a lease of `session`. Returns its generation and lease."""
        rid = self.load(session, key, file)
        gen = self.newest()
        self.fill(gen, size)
        assert self.answer(session, rid) == Grant(rid, gen)
        return gen, rid

    def retain(self, session: int, key: str, size: int = 100) -> str:
        """Load `key` and let it go again: it stays retained."""
        gen, lease = self.have(session, key, size)
        self.release(session, gen, lease)
        return gen

    # --- questions ---

    def newest(self) -> GenerationId:
        return max(self.ledger.generations)

    def generation(self, gen: GenerationId) -> Generation:
        return self.ledger.generations[gen]

    def state(self, gen: GenerationId) -> State | None:
        known = self.ledger.generations.get(gen)
        return known.state if known else None

    def answers(self, session: int, rid: int) -> list[Grant | Fail]:
        """Every final answer that was sent to a request."""
        return [
            effect.message
            for effect in self.log
            if isinstance(effect, Send)
            and effect.session == session
            and isinstance(effect.message, Grant | Fail)
            and effect.message.rid == rid
        ]

    def answer(self, session: int, rid: int) -> Grant | Fail | None:
        """The one final answer of a request, or None so far."""
        found = self.answers(session, rid)
        assert len(found) <= 1, f"request {rid} of {session} was answered {len(found)} times"
        return found[0] if found else None

    def failure(self, session: int, rid: int) -> str | None:
        answer = self.answer(session, rid)
        return answer.cause.code if isinstance(answer, Fail) else None

    def messages(self, session: int, kind: type) -> list:
        """Every message of one kind that was sent to a session."""
        return [
            effect.message
            for effect in self.log
            if isinstance(effect, Send)
            and effect.session == session
            and isinstance(effect.message, kind)
        ]

    def ticket(self, session: int, rid: int) -> GenerationId | None:
        """The generation of the ticket that request got."""
        for effect in self.log:
            if (
                isinstance(effect, Send)
                and effect.session == session
                and isinstance(effect.message, Ticket)
                and effect.message.rid == rid
            ):
                return effect.message.gen
        return None

    def leases(self, gen: GenerationId) -> dict[int, int]:
        """Session to lease id."""
        return {session: lease.id for session, lease in self.generation(gen).leases.items()}

    def ram(self) -> PoolReport:
        report = status_report(self.ledger, self.now_s)
        return next(pool for pool in report.pools if pool.name == RAM)

    def done(self, kind: type) -> list:
        """Every effect of one kind so far."""
        return [effect for effect in self.log if isinstance(effect, kind)]


__all__ = [
    "Back",
    "Forget",
    "Free",
    "Seal",
    "SendSpace",
    "StartLoader",
    "World",
]
