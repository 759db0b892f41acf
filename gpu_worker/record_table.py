"""The records of one worker as its threads and the keeper use them: loads, claims, locks, ends.

Rules
- One lock, held for a few lines around the records; never while anything waits, and never while a
  module is built, moved or destroyed.
- One load per key at a time: the others wait for it and share its module, or go on by themselves
  if it fails.
- A handle has its claim before anyone could take the record away: lookup and claim are one step.
- What a call leaves half done, by whatever exception, its handle's finalizer ends. That only
  enqueues.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpu_worker import registry
from gpu_worker.callbacks import Callbacks, Evicted
from gpu_worker.client import Client
from gpu_worker.counts import Counts
from gpu_worker.flights import Flight, Flights
from gpu_worker.keeper import Keeper
from gpu_worker.leases import Seen
from gpu_worker.load_lock import load_lock
from gpu_worker.loaded import Loaded
from gpu_worker.records import ClaimId, Held, LockId, Origin, Record, Records
from gpu_worker.reentry import free_after_fork, owned, refuse_reentry
from gpu_worker.refusal import name_holders
from gpu_worker.request import Ask, Charge, Progress
from gpu_worker.residence import Residence, Resident
from gpu_worker.resident_record import ResidentRecord
from gpu_worker.waits import refuse_fork
from shm_store.errors import BudgetExceeded, CallerError, WorkerClosed, listed
from shm_store.keys import GenerationId, Key
from shm_store.report import ModelReport
from shm_store.wire import RAM

if TYPE_CHECKING:
    import torch

    from gpu_worker.device import Device
    from gpu_worker.mapping import Buffer
    from gpu_worker.module import Assembled

logger = logging.getLogger("gpu_worker")

IDLE_STEP_S = 0.02
"""The least between two looks for what was unused for `idle_timeout`."""

"""The pool that private weights are charged to."""


class _Caller(threading.local):
    """The calling thread, looked up once: that costs as much as a bare lock."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()


_caller = _Caller()


@dataclass(frozen=True, slots=True)
class Wish:
    """What a load is to make."""

    ask: Ask
    origin: Origin
    skeleton: Callable[[], torch.nn.Module]
    train: bool
    progress: Progress | None
    private: bool
    device: Device
    keep_host: bool = True
    share_vram: bool = False


class RecordTable:
    """What one worker keeps for its keys. Thread-safe; a `Holder` of its session.

    Sole owner of the records: everything here that lets go of some destroys their modules and tells
    of it, with no lock held.
    """

    def __init__(
        self,
        path: str,
        name: str,
        device: Device,
        callbacks: Callbacks,
        idle_s: float | None,
        patience_s: float,
    ) -> None:
        """Share the connection to the coordinator on `path`.

        Args:
            idle_s: evict what was unused for so long. None keeps it.
            patience_s: how long calls wait while no coordinator answers.
        """
        self._lock = threading.RLock()
        self._records: Records[Loaded] = Records()
        self._flights = Flights(self._lock)
        self.ids: Iterator[Any] = itertools.count(1)
        """Of claims and locks; to name their types would be a call at each lock."""
        self._handles: dict[ClaimId, weakref.ref[object]] = {}
        self._callbacks = callbacks
        self._idle_s = idle_s
        self._moves = device.pool is not None
        self._counts = Counts()
        # Last: from here on the coordinator's requests arrive.
        self.client: Client = registry.share(path, name, device.name, self, patience_s)
        if idle_s is not None:
            self.client.keeper.put_at(time.monotonic() + idle_s, _expiring(self))

    # --- for the worker -------------------------------------------------------------------------

    def check_caller(self, *, waits: bool = False) -> None:
        """Refuse a caller that could only hang, or that this worker does not belong to."""
        if waits:
            self.client.check_caller()
        else:
            refuse_fork(self.client.pid)
        if owned(self._lock) or (waits and registry.held_up()):
            refuse_reentry()

    def refuse_closed(self) -> None:
        """Raise WorkerClosed after `close`."""
        if self._records.closed:
            raise WorkerClosed("the worker was shut down")

    def refuse_in_skeleton(self, key: Key) -> None:
        """Raise CallerError if this thread builds a module: it is not to wait for `key` then."""
        with self._lock:
            self._flights.refuse_in_skeleton(key)

    def claim(self, claim: ClaimId, wish: Wish, timeout_s: float | None) -> Record[Loaded]:
        """Put `claim` on the record of a key, made by this thread or by one that is at it."""
        key, whose = wish.ask.key, _caller.thread
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        mine = Flight(key)
        record: Record[Loaded] | None = None
        try:
            while True:
                with self._lock:
                    self.refuse_closed()
                    record = self._records.claim(key, wish.origin, claim, whose)
                    if record is not None and not record.module.revive():
                        self._records.lose(record, claim)
                        record = None
                    if record is None:
                        self._flights.refuse_in_skeleton(key)
                        load_lock.refuse_owned()
                        flight = self._flights.board(mine)
                    else:
                        self._counts.of(key, wish.device.name).hits += 1
                if record is not None:
                    self.client.leases.count_later()
                    self._callbacks.hit(key, record.generation)
                    return record
                left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
                if flight is mine:
                    return self._load(claim, wish, left_s, mine)
                self._flights.wait(flight, left_s, wish.progress)
        finally:
            mine.over = True  # first, see the note in `flights`
            self._flights.land(mine)

    def outdate(self, key: Key, newer: GenerationId) -> None:
        """Let go of the record of `key` if it is older than `newer`, which was just granted."""
        with self._lock:
            gone = self._records.outdate(key, newer)
        self._let_go(gone)

    def evict(self, key: Key) -> bool:
        """Let go of the record of `key`, and say whether it was idle, and so is gone."""
        for claim, handle in list(self._handles.items()):
            if handle() is None:
                self.end_claim(claim)  # the keeper would, in a moment
        with self._lock:
            gone = self._records.evict(key)
        evicted = bool(gone)
        self._let_go(gone)
        return evicted

    def invalidate_private(self, key: Key) -> None:
        """Let go of the record of `key` if it is private. Raises WorkerClosed after `close`."""
        with self._lock:
            self.refuse_closed()
            gone = self._records.evict_private(key)
        self._let_go(gone)

    def close(self) -> None:
        """Let go of everything, and make no record that is not stale."""
        with self._lock:
            gone = self._records.close()
        self._let_go(gone)

    def held(self) -> tuple[Held, ...]:
        """Return what is in use, and the loads under way."""
        with self._lock:
            held = self._records.held()
            used = {(one.key, thread) for one in held for thread in one.threads}
            loading = self._flights.held()
        # One that has its record is still about to land.
        return (*held, *(one for one in loading if (one.key, *one.threads) not in used))

    def counted(self) -> list[ModelReport]:
        """Return what was done with each model so far."""
        with self._lock:
            return list(self._counts.reports())

    # --- devices --------------------------------------------------------------------------------

    def residences(self) -> dict[Key, Residence | None]:
        """Return where the module of each key is that is handed out; None if it never moves."""
        with self._lock:
            return {record.key: record.module.residence for record in self._records.current()}

    def resident(self) -> tuple[Resident, ...]:
        """Return what is on the device, stale modules that are in use included."""
        with self._lock:
            there = [record.module.residence for record in self._records.every()]
            return tuple(one.resident() for one in there if one is not None and one.size_bytes)

    # --- for handles ----------------------------------------------------------------------------

    def watch(self, handle: object, claim: ClaimId) -> None:
        """Have `claim` ended when `handle` is gone, by the keeper.

        As for mappings, nothing but `put` runs where the last reference is dropped: an interrupt
        that comes into Python code there would be lost, and the claim with it.
        """
        end = functools.partial(_end_claim, weakref.ref(self), claim)
        told = functools.partial(self.client.keeper.queue.put, end)
        self._handles[claim] = weakref.ref(handle, told)

    def lock(self, claim: ClaimId, lock: LockId, timeout_s: float | None) -> torch.nn.Module:
        """Lock the module that `claim` is on, and return it, on its device.

        Raises:
            WorkerClosed: the claim has ended.
            WeightCacheError: as `Residence.bring`. The lock is there all the same.
        """
        if owned(self._lock):
            refuse_reentry()
        with self._lock:
            loaded = self._records.lock(claim, lock, _caller.thread)
            module, residence = loaded.module, loaded.residence
        assert module is not None  # what is claimed is kept
        if residence is not None and not (residence.here and residence.room_bytes is None):
            self.check_caller(waits=True)
            try:
                residence.bring(module, timeout_s)
            except BudgetExceeded as error:
                name_holders(error)
                raise
        return module

    def unlock(self, lock: LockId) -> None:
        """End a lock, if it is one."""
        self._settle(functools.partial(self._unlock, lock, time.monotonic()))

    def _unlock(self, lock: LockId, now_s: float) -> list[Record[Loaded]]:
        record = self._records.of_lock(lock)
        gone = self._records.unlock(lock, now_s)
        if record is not None:
            self._rest(record)
        return gone

    def _rest(self, record: Record[Loaded]) -> None:
        """A lock of a record has ended: it leaves its device if it is to. The lock is held."""
        residence = record.module.residence
        if residence is not None:
            residence.rest()

    def unlock_last(self, claim: ClaimId, chosen: list[LockId]) -> None:
        """End the newest lock made through `claim`. Raises CallerError if there is none.

        `chosen` is empty, and gets that lock; called again with it, this ends no other one.
        As `_settle`, but spelt out: this and `lock` are in the user's hot path.
        """
        if owned(self._lock):
            self.client.keeper.put(functools.partial(self.unlock_last, claim, chosen))
            return
        with self._lock:
            if not chosen:
                lock = self._records.last_lock(claim)
                if lock is None:
                    raise CallerError(
                        "the handle is left more often than it was entered",
                        remedy="enter it by `with handle as module:`, which also leaves it",
                    )
                chosen.append(lock)
            record = self._records.of_lock(chosen[0]) if self._moves else None
            gone = self._records.unlock(chosen[0], time.monotonic())
            if record is not None:
                self._rest(record)
        if gone:
            self._let_go(gone)

    def end_claim(self, claim: ClaimId) -> None:
        """End a claim, if it is one."""
        self._settle(functools.partial(self._records.end_claim, claim, time.monotonic()))
        self._handles.pop(claim, None)

    # --- for the keeper -------------------------------------------------------------------------

    def retire(self, gen: GenerationId) -> None:
        """Hand a generation out no more."""
        with self._lock:
            gone = self._records.retire(gen)
        self._let_go(gone, later=True)

    def look(self, gen: GenerationId) -> Seen | None:
        """Say what this worker has of a generation."""
        with self._lock:
            seen = self._records.look(gen)
            if seen is None:
                return None
            record, used = seen
            loaded = record.module
            elsewhere = loaded.elsewhere
            record.watched = used or elsewhere
            return Seen(id(record), loaded.weights, used, elsewhere, loaded.garbage)

    def make_room(self, gen: GenerationId) -> None:
        """Let go of a generation as soon as it is idle."""
        with self._lock:
            gone = self._records.make_room(gen)
        self._let_go(gone, later=True)

    def keep(self, gen: GenerationId) -> None:
        """Let a generation stay that was to make room, if it is still there."""
        with self._lock:
            record = self._records.keep(gen)
            if record is not None:
                record.module.revive()

    def after_fork(self, keeper: Keeper) -> None:
        """In a forked child: have these records as its own, claims and locks included."""
        free_after_fork(self._lock)
        self._flights.after_fork()
        for record in self._records.unasked():
            record.module.revive()
        for record in self._records.every():
            if record.module.residence is not None:
                record.module.residence.after_fork()
        for claim, known in list(self._handles.items()):
            handle = known()
            if handle is not None:
                self.watch(handle, claim)
        if self._idle_s is not None:
            keeper.put_at(time.monotonic() + self._idle_s, _expiring(self))

    def _expire(self) -> None:
        """Evict what was unused for `idle_timeout`, and come again when more could be."""
        assert self._idle_s is not None
        now_s = time.monotonic()
        with self._lock:
            gone = self._records.expire(now_s - self._idle_s)
            since_s = self._records.unused_since_s()
            closed = self._records.closed
        if not closed:
            next_s = (now_s if since_s is None else since_s) + self._idle_s
            self.client.keeper.put_at(max(next_s, now_s + IDLE_STEP_S), _expiring(self))
        self._let_go(gone, later=True)

    # --- loading --------------------------------------------------------------------------------

    def _load(
        self, claim: ClaimId, wish: Wish, timeout_s: float | None, flight: Flight
    ) -> Record[Loaded]:
        """Ask the coordinator, and make the record unless there is one of that generation."""
        key, whose, pid = wish.ask.key, _caller.thread, os.getpid()
        with self._lock:
            count = self._counts.of(key, wish.device.name)
            count.misses += 1
        self.client.leases.count_later()
        self._callbacks.miss(key)
        from gpu_worker import module

        weights: Buffer | None = None
        if wish.private:
            gen, assembled = self._load_private(wish, timeout_s)
        else:
            granted = self.client.acquire(wish.ask, timeout_s, flight.telling(wish.progress))
            gen, weights = granted.gen, granted.buffer
            with self._lock:
                record = self._records.adopt(key, gen, wish.origin, claim, whose)
                if record is not None and not record.module.revive():
                    self._records.lose(record, claim)
                    record = None
            if record is not None:
                return record
            if wish.device.pool is None:
                granted.buffer.fault_in()  # elsewhere most of it is never read through the map
            flight.in_skeleton = True
            assembled = module.assemble(
                key, wish.skeleton, granted.buffer, wish.train, granted.left_s
            )
        refuse_fork(pid)
        if assembled.unexpected:
            logger.info(
                "weight-cache: %r: the weights have %d tensor(s) that the skeleton does not use: "
                "%s",
                key,
                len(assembled.unexpected),
                listed(assembled.unexpected),
            )
        loaded = Loaded(assembled.module, wish.train, assembled.unexpected, weights)
        del assembled  # it has the module, too
        loaded.count_itself()
        record = Record(key, gen, wish.origin, loaded)
        if wish.device.pool is not None:
            about = ResidentRecord(self._records, record, self.client, wish.ask, wish.keep_host)
            shares = wish.share_vram and not wish.private and not wish.train
            loaded.residence = Residence(
                about, wish.device, self.client, self._lock, count, shares=shares
            )
        with self._lock:
            # What the coordinator asks from now on finds the record.
            gone = self._records.admit(record, claim, self.client.leases.asked(gen), whose)
        self._let_go(gone)
        return record

    def _load_private(self, wish: Wish, timeout_s: float | None) -> tuple[GenerationId, Assembled]:
        """Build the weights in this process alone, and have their memory counted."""
        from gpu_worker import module

        key = wish.ask.key
        assert wish.ask.build is not None
        assembled = module.private(wish.ask.build, wish.train)
        size_bytes = max(1, module.held_bytes(assembled.module))
        charge = Charge()
        # Its tensors go with it, unless somebody keeps one, which nobody could count.
        end = weakref.finalize(assembled.module, self.client.leases.discharge, charge)
        end.atexit = False
        self.client.charge(charge, key, RAM, size_bytes, timeout_s)
        return charge.gen, assembled

    # --- letting go -----------------------------------------------------------------------------

    def _settle(self, end: Callable[[], list[Record[Loaded]]]) -> None:
        """End a use of a record. What is let go of is destroyed after the lock is free."""
        if owned(self._lock):
            # Inside another call of this thread, as by a finalizer: the keeper does it after that.
            self.client.keeper.put(functools.partial(self._settle, end))
            return
        with self._lock:
            gone = end()
        self._let_go(gone)

    def _let_go(self, gone: list[Record[Loaded]], *, later: bool = False) -> None:
        """Destroy what was evicted, then tell of it. Runs other people's code: no lock is held.

        Of what is idle, and watched, only the client is told.

        Args:
            later: tell in the keeper, behind the unmapping and the RELEASE.
        """
        if not gone:
            return
        for weak in [record for record in gone if record.going == "room"]:
            self._weaken(weak)
        told = [
            (record.key, record.generation, record.going)
            for record in gone
            if record.going not in (None, "room") and self._tells(record)
        ]
        idle = [(record.generation, id(record)) for record in gone]
        gone.clear()
        for gen, which in idle:
            self.client.leases.idle(gen, which)
        if later:
            self.client.keeper.put(functools.partial(self._callbacks.evicted, told))
        elif told:
            self._callbacks.evicted(told)

    def _weaken(self, record: Record[Loaded]) -> None:
        """Keep a record that is to make room weakly, unless it was claimed again."""
        gone = functools.partial(self.client.keeper.queue.put, _ending(self, record))
        kept: tuple[object, ...] = ()
        with self._lock:
            if self._records.is_idle(record) and record.going == "room":
                kept = record.module.weaken(gone)
        del kept

    def _end(self, record: Record[Loaded]) -> None:
        """The module of a record that was kept weakly is gone. In the keeper."""
        with self._lock:
            if record.module.revive():
                return  # somebody took it before that was so
            self._records.lose(record)
            tells = self._tells(record)
        self.client.leases.idle(record.generation, id(record))
        if tells:
            told: list[Evicted] = [(record.key, record.generation, "room")]
            self.client.keeper.put(functools.partial(self._callbacks.evicted, told))

    def _tells(self, record: Record[Loaded]) -> bool:
        """Say whether an eviction is still to be told. Once."""
        told, record.module.told = record.module.told, True
        return not told


def _ending(table: RecordTable, record: Record[Loaded]) -> Callable[[], None]:
    """Return a task that ends `record`, if `table` is still there.

    Records of `table` have it, and are not to keep a worker that was dropped.
    """
    known = weakref.ref(table)

    def end() -> None:
        alive = known()
        if alive is not None:
            alive._end(record)

    return end


def _end_claim(table: weakref.ref[RecordTable], claim: ClaimId) -> None:
    """End the claim of a handle that was dropped. A table that is gone has no records."""
    alive = table()
    if alive is not None:
        alive.end_claim(claim)


def _expiring(table: RecordTable) -> Callable[[], None]:
    """Return a task that expires what `table` keeps, if it is still there."""
    known = weakref.ref(table)

    def expire() -> None:
        alive = known()
        if alive is not None:
            alive._expire()

    return expire
