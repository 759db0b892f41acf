"""What one worker keeps for its keys: records, and who may use them. Pure.

No I/O, no clock, no torch, no threads: the worker holds its one lock around every call. A record's
module is opaque here. Methods that let go of records return them, so that the worker drops their
modules, and tells of it, after its lock is free: both run other people's code.

Rules
- Lookup and claim are one step: `claim` and `adopt` find the record and put the claim on it.
- Claims and locks have ids of their own, chosen by who asks and never used twice. Ending one that
  never came to be, or has ended, changes nothing. So a caller may end what it cannot know to exist.
- Everything is matched by identity. A key only leads to the record that is handed out at present.
- A stale record is one that no key leads to any more. It is never handed out again.
- A record that is to go has a cause. It is evicted, once, when its last claim and its last lock
  have ended; an idle one at once. One that is to make room is handed out until it is gone, which
  its owner says by `lose`: somebody else may still have its module.
- The end of a watched record's last use is told, once, so that its process can be looked at again.
- Each change is one dict operation, so that an exception from outside (KeyboardInterrupt) finds
  every record whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Literal, NewType, Protocol, TypeVar

from shm_store.errors import WorkerClosed
from shm_store.keys import GenerationId, Key
from shm_store.reading import AS_IT_IS, Reading

ClaimId = NewType("ClaimId", int)
LockId = NewType("LockId", int)

Module = TypeVar("Module")

EvictCause = Literal["evicted", "replaced", "invalidated", "room", "unused", "shutdown"]
"""Why a record goes: `evict`, newer weights of its key granted to this worker, retired everywhere,
asked for by the coordinator, `idle_timeout`, or `shutdown`. `attach` explains them to users."""

Asked = Literal["", "idle", "room", "stale"]
"""What the coordinator has asked of a generation, if anything."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What was asked for: where a source is, and how it is read; or the version of what is built.

    `private` is built for this process alone.
    """

    kind: Literal["source", "build", "private"]
    name: str
    version: str = ""
    reading: Reading = AS_IT_IS


@dataclass(frozen=True, slots=True)
class Held:
    """A record that is still in use: how many claims and locks keep it, and whose they are.

    `threads` are the names of those that made them.
    """

    key: Key
    generation: GenerationId
    claims: int
    locks: int
    threads: tuple[str, ...] = ()


class Thread(Protocol):
    """Who claims or locks: a `threading.Thread`, which may get another name, or end."""

    @property
    def name(self) -> str: ...


@dataclass(frozen=True, slots=True)
class _Nobody:
    name: str = ""


NOBODY = _Nobody()


@dataclass(slots=True, eq=False, weakref_slot=True)
class Record(Generic[Module]):
    """The module of one generation in this worker.

    Attributes:
        going: why it is evicted once it is idle; None while it is to stay.
        watched: the end of its last use is to be told.
        used_s: when its last use ended, on the clock of the caller.
    """

    key: Key
    generation: GenerationId
    origin: Origin
    module: Module
    going: EvictCause | None = None
    watched: bool = False
    used_s: float = 0.0


class Records(Generic[Module]):
    """Every record of one worker: the current one of each key, and those that are in use."""

    def __init__(self) -> None:
        self.closed = False
        self._current: dict[Key, Record[Module]] = {}
        self._claims: dict[ClaimId, tuple[Record[Module], Thread]] = {}
        self._locks: dict[LockId, tuple[ClaimId, Record[Module], Thread]] = {}

    # --- claims ---------------------------------------------------------------------------------

    def claim(
        self, key: Key, origin: Origin, claim: ClaimId, whose: Thread = NOBODY
    ) -> Record[Module] | None:
        """Put `claim` on the record of `key` if it was made from `origin`; None if none was."""
        record = self._current.get(key)
        if record is None or record.origin != origin:
            return None
        self._claims[claim] = record, whose
        return record

    def adopt(
        self,
        key: Key,
        generation: GenerationId,
        origin: Origin,
        claim: ClaimId,
        whose: Thread = NOBODY,
    ) -> Record[Module] | None:
        """Put `claim` on the record of `key` if it is of `generation`, whatever was asked before.

        The same bytes can be asked for by two names; the last one is then the record's origin. It
        was granted anew, so what was asked of the lease before is void.
        """
        record = self._current.get(key)
        if record is None or record.generation != generation:
            return None
        record.origin = origin
        record.going = None
        self._claims[claim] = record, whose
        return record

    def admit(
        self, record: Record[Module], claim: ClaimId, asked: Asked = "", whose: Thread = NOBODY
    ) -> list[Record[Module]]:
        """Take in a new record that `claim` is on from the start. An older one becomes stale.

        After `close`, or if its generation is retired by now, it arrives stale: usable through its
        claim, and evicted with it.

        Args:
            asked: what the coordinator has asked of its generation so far.

        Returns:
            The records evicted.
        """
        self._claims[claim] = record, whose
        if self.closed:
            record.going = "shutdown"
            return []
        if asked == "stale":
            record.going = "invalidated"
            return []
        record.watched = asked != ""
        evicted = self.evict(record.key, "replaced")
        self._current[record.key] = record
        return evicted

    def end_claim(self, claim: ClaimId, now_s: float = 0.0) -> list[Record[Module]]:
        """End a claim. Locks made through it go on.

        Returns:
            The records evicted, and those that are idle now and watched, or to make room.
        """
        ended = self._claims.pop(claim, None)
        return self._overdue() if ended is None else self._settle(ended[0], now_s)

    # --- locks ----------------------------------------------------------------------------------

    def lock(self, claim: ClaimId, lock: LockId, whose: Thread = NOBODY) -> Module:
        """Lock the record that `claim` is on, stale or not. Locks nest: each has its own id.

        Raises:
            WorkerClosed: the claim has ended. Nothing is locked.
        """
        claimed = self._claims.get(claim)
        if claimed is None:
            raise WorkerClosed("this handle was closed", remedy="load again, for a new one")
        record = claimed[0]
        self._locks[lock] = claim, record, whose
        return record.module

    def last_lock(self, claim: ClaimId) -> LockId | None:
        """Return the newest lock made through `claim` that has not ended."""
        for lock, (user, _, _) in reversed(self._locks.items()):
            if user == claim:
                return lock
        return None

    def unlock(self, lock: LockId, now_s: float = 0.0) -> list[Record[Module]]:
        """End a lock. Returns what `end_claim` does."""
        ended = self._locks.pop(lock, None)
        if ended is None:
            return self._overdue()
        if ended[0] in self._claims:
            return []  # the claim it was made through keeps the record
        return self._settle(ended[1], now_s)

    # --- ends -----------------------------------------------------------------------------------

    def evict(self, key: Key, cause: EvictCause = "evicted") -> list[Record[Module]]:
        """Make the record of `key` stale. Returns it if it was idle, and so is gone."""
        record = self._current.get(key)
        if record is None:
            return []
        record.going = cause
        del self._current[key]
        return self._settle(record)

    def evict_private(self, key: Key) -> list[Record[Module]]:
        """Make the record of `key` stale if it is private: nobody else could say so."""
        record = self._current.get(key)
        if record is None or record.origin.kind != "private":
            return []
        return self.evict(key, "invalidated")

    def outdate(self, key: Key, newer: GenerationId) -> list[Record[Module]]:
        """Make the record of `key` stale if it is older than `newer`, which was just granted."""
        record = self._current.get(key)
        if record is None or record.generation > newer:
            return []
        if record.generation == newer:
            record.going = None  # as in `adopt`
            return []
        return self.evict(key, "replaced")

    def retire(self, generation: GenerationId) -> list[Record[Module]]:
        """Make the record of `generation` stale. Returns it if it was idle, and so is gone."""
        record = self._record_of(generation)
        return [] if record is None else self.evict(record.key, "invalidated")

    def look(self, generation: GenerationId) -> tuple[Record[Module], bool] | None:
        """Return the record of `generation`, and whether it is in use, and so is watched now."""
        record = self._record_of(generation)
        if record is None:
            return None
        record.watched = any(self._uses(record))
        return record, record.watched

    def make_room(self, generation: GenerationId) -> list[Record[Module]]:
        """Have the record of `generation` make room once it is idle. Returns it if that is now."""
        record = self._record_of(generation)
        if record is None:
            return []
        record.going = "room"
        return self._settle(record, record.used_s)

    def keep(self, generation: GenerationId) -> Record[Module] | None:
        """Return the record of `generation` if it was to make room, which it is no more."""
        record = self._record_of(generation)
        if record is None or record.going != "room":
            return None
        record.going = None
        return record

    def unasked(self) -> list[Record[Module]]:
        """Return the records that were to make room: nobody asks for that any more."""
        asked = [record for record in self._current.values() if record.going == "room"]
        for record in asked:
            record.going = None
        return asked

    def lose(self, record: Record[Module], claim: ClaimId | None = None) -> None:
        """Hand a record out no more whose module is gone, and end a claim that came too late."""
        if claim is not None:
            self._claims.pop(claim, None)
        if self._current.get(record.key) is record:
            del self._current[record.key]

    def locks_on(self, record: Record[Module]) -> int:
        return sum(locked is record for _, locked, _ in self._locks.values())

    def of_lock(self, lock: LockId) -> Record[Module] | None:
        """Return the record that a lock is on, if it has not ended."""
        locked = self._locks.get(lock)
        return None if locked is None else locked[1]

    def current(self) -> list[Record[Module]]:
        """Return the records that are handed out at present."""
        return list(self._current.values())

    def every(self) -> list[Record[Module]]:
        """Return all records, those that are stale and in use included."""
        return list({id(one): one for one in (*self._current.values(), *self.used())}.values())

    def is_idle(self, record: Record[Module]) -> bool:
        return not any(self._uses(record))

    def _record_of(self, generation: GenerationId) -> Record[Module] | None:
        for record in self._current.values():
            if record.generation == generation:
                return record
        return None

    def unused_since_s(self) -> float | None:
        """Return when the idle record that has been unused longest was used last."""
        idle = [record for record in self._current.values() if not any(self._uses(record))]
        return min((record.used_s for record in idle), default=None)

    def expire(self, before_s: float) -> list[Record[Module]]:
        """Evict every record whose last use ended at `before_s` or earlier."""
        unused = [
            record
            for record in self._current.values()
            if record.used_s <= before_s and not any(self._uses(record))
        ]
        return [gone for record in unused for gone in self.evict(record.key, "unused")]

    def close(self) -> list[Record[Module]]:
        """Make every record stale, now and in future. Returns the idle ones, which are gone."""
        self.closed = True
        return [gone for key in list(self._current) for gone in self.evict(key, "shutdown")]

    def held(self) -> tuple[Held, ...]:
        """Return the records that claims or locks keep, each once."""
        uses = [(record, whose) for record, whose in self._claims.values()]
        uses += [(record, whose) for _, record, whose in self._locks.values()]
        used = {id(record): record for record, _ in uses}
        return tuple(
            Held(
                record.key,
                record.generation,
                *self._uses(record),
                threads=tuple(dict.fromkeys(whose.name for user, whose in uses if user is record)),
            )
            for record in used.values()
        )

    def _overdue(self) -> list[Record[Module]]:
        """Evict, or tell of, what should have been with a use that an exception cut short.

        Whoever ends that use once more, as handles do, comes here.
        """
        due = [record for record in self._current.values() if record.going or record.watched]
        return [idle for record in due for idle in self._settle(record, record.used_s)]

    def _settle(self, record: Record[Module] | None, now_s: float = 0.0) -> list[Record[Module]]:
        """Return the record if it has just become idle, and is to go or watched.

        It is evicted then, unless it is to make room.
        """
        if record is None:
            return []
        record.used_s = now_s
        if (record.going is None and not record.watched) or any(self._uses(record)):
            return []
        record.watched = False
        if record.going not in (None, "room"):
            self.lose(record)
        return [record]

    def _uses(self, record: Record[Module]) -> tuple[int, int]:
        """Return how many claims and locks are on `record`."""
        claims = sum(claimed is record for claimed, _ in self._claims.values())
        return claims, sum(locked is record for _, locked, _ in self._locks.values())

    def used(self) -> Iterator[Record[Module]]:
        """Return the record of every claim and of every lock."""
        yield from (record for record, _ in self._claims.values())
        yield from (record for _, record, _ in self._locks.values())

    # --- invariants -----------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError if these records contradict themselves. For tests."""
        assert not (self.closed and self._current), "closed, and still handing out"
        for key, record in self._current.items():
            assert record.key == key, f"{key!r} leads to a record of {record.key!r}"
            assert record.going in (None, "room"), f"{key!r} is stale and still handed out"
        for record in self.used():
            current = self._current.get(record.key) is record
            assert current or record.going, f"{record.key!r} is stale and would never go"
