"""Where one module is: on the host, and on its device while it is resident there.

A module becomes resident when it is locked, and stays so until it is asked for: by its user, or by
the coordinator for somebody who lacks room on that device. Nothing of that happens while it is
locked.

Rules
- One thread at a time moves it; who needs it there meanwhile waits.
- Its bytes on the device are charged before they are allocated, and the charge ends when the device
  has them back: after the last tensor over them, whoever keeps that.
- `here` is set last and taken back first. Whatever a move leaves half done, by whatever exception,
  the next one puts right before it begins.
- It never waits with the table's lock. The load lock comes before that, and is held for one pass.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import traceback
import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpu_worker.load_lock import load_lock
from gpu_worker.request import Charge
from gpu_worker.waits import steps
from shm_store.errors import BudgetExceeded, CoordinatorLost, LoadTimeout
from shm_store.keys import GenerationId, Key
from shm_store.report import size_text

if TYPE_CHECKING:
    import torch

    from gpu_worker.block import Block
    from gpu_worker.client import Client
    from gpu_worker.counts import Count
    from gpu_worker.device import Device
    from gpu_worker.leases import Segment
    from gpu_worker.placement import Placement
    from gpu_worker.resident_record import ResidentRecord


logger = logging.getLogger("gpu_worker")


@dataclass(slots=True, eq=False)
class _Move:
    """One thread's move. Its owner sets `over` by a plain store, which nothing keeps from it."""

    over: bool = False
    ended: threading.Event = field(default_factory=threading.Event)
    thread: int = field(default_factory=threading.get_ident)


@dataclass(frozen=True, slots=True)
class Resident:
    """A module that is on a device: the bytes it takes there, and whether it is in use."""

    key: Key
    generation: GenerationId
    device: str
    size_bytes: int
    locked: bool


class Residence:
    """Where one module of a worker is. Thread-safe: guarded by its table's lock.

    Attributes:
        here: it is on its device, and nobody is about to take it from there.
        room_bytes: what it had to do with there, too little for all of it; None if it has all.
        size_bytes: what it takes there, 0 while it is on the host.
    """

    def __init__(
        self,
        record: ResidentRecord,
        device: Device,
        client: Client,
        lock: threading.RLock,
        count: Count,
    ) -> None:
        """Begin on the host.

        Args:
            lock: the table's.
            count: where uploads are counted.
        """
        self.here = False
        self.room_bytes: int | None = None
        self.size_bytes = 0
        self.device = device
        self._record = record
        self._client = client
        self._lock = lock
        self._count = count
        self._move = _Move(over=True)
        # Of its one module, and only as long as that is there: it has the tensors.
        self._placements: weakref.WeakKeyDictionary[torch.nn.Module, Placement]
        self._placements = weakref.WeakKeyDictionary()
        self._charge: Charge | None = None
        self._told = False
        """That it is there in part was said."""

    def resident(self) -> Resident:
        """Describe what is there. The caller has the lock."""
        about = self._record
        locked = about.locks > 0
        return Resident(about.key, about.generation, self.device.name, self.size_bytes, locked)

    # --- for those who lock it ------------------------------------------------------------------

    def bring(self, module: torch.nn.Module, left_s: float | None) -> None:
        """Return once the module is on its device. Its caller has locked it.

        Raises:
            BudgetExceeded: there was no room in time.
            DeviceOutOfMemory: the device has less than it should.
            LoadTimeout: another thread builds, or moves this module, for longer than `left_s`.
            ReentryRefused: this thread builds a module.
            ArgumentRefused: it cannot be moved. In all cases it is on the host, and usable there.
        """
        load_lock.refuse_owned()  # before it waits for somebody who may wait for that
        end_s = None if left_s is None else time.monotonic() + left_s
        started_s = time.monotonic()
        mine = _Move()
        try:
            was_here = self._begin(mine, end_s)
            if was_here is None:
                return
            if not (was_here and self._has_right_size()):
                self._bring(module, end_s, started_s)
        except BaseException as error:
            if self._move is mine:
                # Without the load lock: that may be what was waited for in vain.
                self._withdraw()
                # Whoever keeps the error is not to keep the memory on the device.
                traceback.clear_frames(error.__traceback__)
            raise
        finally:
            mine.over = True
            mine.ended.set()

    def _begin(self, mine: _Move, end_s: float | None) -> bool | None:
        """Be who moves it, and say whether it is there, in part; None if it is there to be used."""
        while True:
            with self._lock:
                if self.here and (self.room_bytes is None or self._record.locks > 1):
                    return None
                other = self._move
                if other.over:
                    self._move = mine
                    was_here, self.here = self.here, False
                    return was_here
            left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
            for step_s in steps(left_s, os.getpid()):
                if other.over or other.ended.wait(step_s):
                    break
            else:
                key = self._record.key
                raise LoadTimeout(f"{key!r} was not there in time: another thread moves it")

    def _has_right_size(self) -> bool:
        """Say whether the part that is there is all that there is room for. It is used then."""
        assert self.device.pool is not None
        try:
            possible_bytes = self._client.possible_bytes(self.device.pool)
        except CoordinatorLost:
            possible_bytes = self.room_bytes or 0  # who computes does not wait for that
        with self._lock:
            self.here = possible_bytes == self.room_bytes
        return self.here

    def _bring(self, module: torch.nn.Module, end_s: float | None, started_s: float) -> None:
        from gpu_worker.placement import Placement

        self._withdraw()  # a part that is too small or too large, or what a move has left
        self._fetch(_left(end_s))
        placement, room_bytes = Placement(module, self.device), None
        size_bytes = self.device.charged_bytes(placement.size_bytes)
        if placement.size_bytes:
            try:
                block = self._allocate(size_bytes, _left(end_s))
            except BudgetExceeded as refusal:
                room_bytes = refusal.possible_bytes
                if not 0 < room_bytes < size_bytes:
                    raise
                placement = Placement(module, self.device, room_bytes)
                size_bytes = self.device.charged_bytes(placement.size_bytes)
                block = self._allocate(size_bytes, _left(end_s))
            self._placements[module] = placement
            room_s = time.monotonic()
            self._upload(placement, block, end_s)
            self._count.waited_s += room_s - started_s
            self._count.moved_s += time.monotonic() - room_s
            self._count.moved_bytes += placement.moved_bytes
            self._client.leases.count_later()
            if placement.partial and not self._told:
                self._told = True
                logger.warning(
                    "weight-cache: %r is on %s in part: %s of it stay there, the rest comes for "
                    "each call, which is slow",
                    self._record.key,
                    self.device.name,
                    size_text(placement.moved_bytes),
                )
        with self._lock:
            self.size_bytes = size_bytes if placement.size_bytes else 0
            self.room_bytes = room_bytes
            self.here = True
        if not self._record.keeps_host and placement.size_bytes and not placement.partial:
            with self._lock:
                weights = self._record.give_up()
            if weights is not None:
                placement.give_up(weights)

    def _fetch(self, left_s: float | None) -> None:
        """Have the weights on the host again that were given up. Waits without any lock."""
        for placement in list(self._placements.values()):
            if placement.given_up:
                gen, weights = self._record.fetch(left_s)
                with load_lock.read(left_s):
                    placement.take_back(weights)
                with self._lock:
                    self._record.keep(gen, weights)
        self._placements.clear()

    def _allocate(self, size_bytes: int, left_s: float | None) -> Block:
        """Return memory on the device, which is charged until the device has it back."""
        pool = self.device.pool
        assert pool is not None
        charge = self._charge = Charge(residence=weakref.ref(self), forks=self.device.forks)
        if not self._record.keeps_host:
            charge.copy_of = self._record.generation
        block: Block | None = None
        try:
            self._client.charge(charge, self._record.key, pool, size_bytes, left_s)
            block = self.device.allocate(size_bytes, charge.gen)
            self._client.leases.watch_block(charge, block, self.device)
        except BaseException:
            if charge.memory is None or not charge.memory.watched:
                if block is not None:
                    block.free()
                self.device.release_cached()
                self._client.leases.discharge(charge)
            raise
        return block

    def _upload(self, placement: Placement, block: Block, end_s: float | None) -> None:
        with self._segment() as segment:
            todo = placement.steps(block, segment)
            while True:
                with load_lock.read(_left(end_s)):
                    if next(todo, _DONE) is _DONE:
                        break
            block.finish()
        with load_lock.read(_left(end_s)):
            placement.point_there(block)

    def after_fork(self) -> None:
        """In a forked child: what another thread was at is over, and CUDA cannot be used any more.

        What it was half through with the next move puts right. Device memory that cannot be used is
        the parent's; it is not to be freed here either.
        """
        if self._move.thread != threading.get_ident():
            self._move.over = True
        if not self.device.forks:
            for placement in list(self._placements.values()):
                _the_parents.append(placement.abandon())
            self._placements.clear()
            self.here, self.size_bytes, self.room_bytes, self._charge = False, 0, None, None

    def _segment(self) -> AbstractContextManager[Segment | None]:
        """Return what the weights are to be read from instead of their map, if anything."""
        with self._lock:
            weights, gen = self._record.weights, self._record.generation
        if weights is None:
            return contextlib.nullcontext()
        return self._client.leases.segment(gen, weights)

    # --- for those who need its room ------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether it could leave now."""
        with self._lock:
            return self._move.over and not self._record.locks

    def has(self, charge: Charge) -> bool:
        """Whether it is on its device by this charge, or about to be."""
        return self._charge is charge

    def rest(self) -> None:
        """A lock of it has ended. If that was the last, it leaves if it is to. The lock is held.

        Whoever locks it next then has to ask for room, behind those who wait.
        """
        charge = self._charge
        if charge is not None and charge.asked in ("room", "stale") and not self._record.locks:
            self.here = False
            self._client.leases.rested(charge)

    def leave(self, left_s: float | None = None) -> bool:
        """Have the module on the host again, unless it is locked; say whether it is there.

        Raises:
            LoadTimeout: another thread builds for longer than `left_s`. It stays where it was.
            ReentryRefused: this thread does.
        """
        load_lock.refuse_owned()
        mine = _Move()
        try:
            with self._lock:
                if not self._move.over or self._record.locks:
                    return False
                was_here, self.here = self.here, False
                self._move = mine
            try:
                with load_lock.read(left_s):
                    self._withdraw()
            except LoadTimeout:
                with self._lock:
                    self.here = was_here
                raise
            return True
        finally:
            mine.over = True
            mine.ended.set()

    def _withdraw(self) -> None:
        """Have every tensor on the host, and let go of what is on the device. May be repeated."""
        for placement in list(self._placements.values()):
            placement.point_home()
        self.here = False
        if not any(placement.given_up for placement in self._placements.values()):
            self._placements.clear()
        self.size_bytes = 0
        self.room_bytes = None
        self._charge = None


_DONE = object()

_the_parents: list[object] = []
"""Tensors in memory that a forked child must not even free."""


def _left(end_s: float | None) -> float | None:
    return None if end_s is None else max(0.0, end_s - time.monotonic())
