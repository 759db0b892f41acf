"""What one worker keeps for its keys: records, and who may use them. Pure.

No I/O, no clock, no torch, no threads: the worker holds its one lock around every call. A record's
module is opaque here. Methods that let go of modules return them, so that the worker drops them
after its lock is free: dropping one runs destructors.

Rules
- Lookup and claim are one step: `claim` and `adopt` find the record and put the claim on it.
- Claims and locks have ids of their own, chosen by who asks and never used twice. Ending one that
  never came to be, or has ended, changes nothing. So a caller may end what it cannot know to exist.
- Everything is matched by identity. A key only leads to the record that is handed out at present.
- A stale record is one that no key leads to any more. It is never handed out again, and evicted,
  once, when its last claim and its last lock have ended; an idle one at once.
- Each change is one dict operation, so that an exception from outside (KeyboardInterrupt) finds
  every record whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Literal, NewType, TypeVar

from shm_store.errors import WorkerClosed
from shm_store.keys import GenerationId, Key

ClaimId = NewType("ClaimId", int)
LockId = NewType("LockId", int)

Module = TypeVar("Module")


@dataclass(frozen=True, slots=True)
class Origin:
    """What was asked for: the absolute path of a source, or the version of what is built."""

    kind: Literal["source", "build"]
    name: str


@dataclass(frozen=True, slots=True)
class Held:
    """A record that is still in use: how many claims and locks keep it."""

    key: Key
    generation: GenerationId
    claims: int
    locks: int


@dataclass(slots=True, eq=False)
class Record(Generic[Module]):
    """The module of one generation in this worker."""

    key: Key
    generation: GenerationId
    origin: Origin
    module: Module


class Records(Generic[Module]):
    """Every record of one worker: the current one of each key, and those that are in use."""

    def __init__(self) -> None:
        self.closed = False
        self._current: dict[Key, Record[Module]] = {}
        self._claims: dict[ClaimId, Record[Module]] = {}
        self._locks: dict[LockId, tuple[ClaimId, Record[Module]]] = {}

    # --- claims ---------------------------------------------------------------------------------

    def claim(self, key: Key, origin: Origin, claim: ClaimId) -> Record[Module] | None:
        """Put `claim` on the record of `key` if it was made from `origin`; None if none was."""
        record = self._current.get(key)
        if record is None or record.origin != origin:
            return None
        self._claims[claim] = record
        return record

    def adopt(
        self, key: Key, generation: GenerationId, origin: Origin, claim: ClaimId
    ) -> Record[Module] | None:
        """Put `claim` on the record of `key` if it is of `generation`, whatever was asked before.

        The same bytes can be asked for by two names; the last one is then the record's origin.
        """
        record = self._current.get(key)
        if record is None or record.generation != generation:
            return None
        record.origin = origin
        self._claims[claim] = record
        return record

    def admit(self, record: Record[Module], claim: ClaimId) -> list[Module]:
        """Take in a new record that `claim` is on from the start. An older one becomes stale.

        After `close` it arrives stale: usable through its claim, and evicted with it.

        Returns:
            The modules let go.
        """
        self._claims[claim] = record
        dropped = self.evict(record.key)
        if not self.closed:
            self._current[record.key] = record
        return dropped

    def end_claim(self, claim: ClaimId) -> list[Module]:
        """End a claim. Locks made through it go on. Returns the modules let go."""
        return self._settle(self._claims.pop(claim, None))

    # --- locks ----------------------------------------------------------------------------------

    def lock(self, claim: ClaimId, lock: LockId) -> Module:
        """Lock the record that `claim` is on, stale or not. Locks nest: each has its own id.

        Raises:
            WorkerClosed: the claim has ended. Nothing is locked.
        """
        record = self._claims.get(claim)
        if record is None:
            raise WorkerClosed("this handle was closed")
        self._locks[lock] = claim, record
        return record.module

    def last_lock(self, claim: ClaimId) -> LockId | None:
        """Return the newest lock made through `claim` that has not ended."""
        for lock in reversed(self._locks):
            if self._locks[lock][0] == claim:
                return lock
        return None

    def unlock(self, lock: LockId) -> list[Module]:
        """End a lock. Returns the modules let go."""
        _, record = self._locks.pop(lock, (None, None))
        return self._settle(record)

    # --- ends -----------------------------------------------------------------------------------

    def evict(self, key: Key) -> list[Module]:
        """Make the record of `key` stale. Returns its module if it was idle, and so is gone."""
        return self._settle(self._current.pop(key, None))

    def outdate(self, key: Key, newer: GenerationId) -> list[Module]:
        """Make the record of `key` stale if it is older than `newer`, which exists."""
        record = self._current.get(key)
        if record is None or record.generation >= newer:
            return []
        return self.evict(key)

    def close(self) -> list[Module]:
        """Make every record stale, now and in future. Returns the modules of the idle ones."""
        self.closed = True
        return [module for key in list(self._current) for module in self.evict(key)]

    def held(self) -> tuple[Held, ...]:
        """Return the records that claims or locks keep, each once."""
        used = {id(record): record for record in (*self._claims.values(), *self._locked())}
        return tuple(
            Held(record.key, record.generation, *self._uses(record)) for record in used.values()
        )

    def _settle(self, record: Record[Module] | None) -> list[Module]:
        """Return the module of a record that has just become stale and idle."""
        if record is None or self._current.get(record.key) is record:
            return []
        return [] if any(self._uses(record)) else [record.module]

    def _uses(self, record: Record[Module]) -> tuple[int, int]:
        """Return how many claims and locks are on `record`."""
        claims = sum(claimed is record for claimed in self._claims.values())
        return claims, sum(locked is record for locked in self._locked())

    def _locked(self) -> Iterator[Record[Module]]:
        return (record for _, record in self._locks.values())

    # --- invariants -----------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError if these records contradict themselves. For tests."""
        assert not (self.closed and self._current), "closed, and still handing out"
        for key, record in self._current.items():
            assert record.key == key, f"{key!r} leads to a record of {record.key!r}"
