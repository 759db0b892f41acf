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
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpu_worker.load_lock import load_lock
from gpu_worker.request import Charge
from gpu_worker.residency import passes
from gpu_worker.waits import steps
from shm_store.errors import BudgetExceeded, CoordinatorLost, LoadTimeout, SegmentRefused
from shm_store.keys import GenerationId, Key
from shm_store.report import size_text

if TYPE_CHECKING:
    import torch

    from gpu_worker.block import Block
    from gpu_worker.client import Client
    from gpu_worker.counts import Count
    from gpu_worker.device import Device, DeviceSegment
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
        is_to_share: its weights are to lie in memory there that other processes have, too.
        left: called once it has left, by whosever wish, with no lock held.
    """

    def __init__(
        self,
        record: ResidentRecord,
        device: Device,
        client: Client,
        lock: threading.RLock,
        count: Count,
        *,
        shares: bool,
    ) -> None:
        """Begin on the host.

        Args:
            lock: the table's.
            count: where uploads are counted.
            shares: have its weights in memory there that other processes have, too.
        """
        self.here = False
        self.room_bytes: int | None = None
        self.size_bytes = 0
        self.left: Callable[[], object] | None = None
        self.device = device
        self._record = record
        self._client = client
        self._lock = lock
        self._count = count
        self._move = _Move(over=True)
        # Of its one module, and only as long as that is there: it has the tensors.
        self._placements: weakref.WeakKeyDictionary[torch.nn.Module, Placement]
        self._placements = weakref.WeakKeyDictionary()
        self._charges: list[Charge] = []
        """For what is there of it, or about to be."""
        self.is_to_share = shares
        self._shares = shares and can_share(device)
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
        if self._shares and self._bring_shared(module, end_s, started_s):
            return
        placement, room_bytes = Placement(module, self.device), None
        size_bytes = self.device.charged_bytes(placement.size_bytes)
        if placement.size_bytes:
            try:
                block = self._allocate(size_bytes, _left(end_s))
            except BudgetExceeded as refusal:
                room_bytes = refusal.possible_bytes
                if not 0 < room_bytes < size_bytes:
                    raise
            if room_bytes is not None:
                placement = self._part(module, room_bytes)
                size_bytes = self.device.charged_bytes(placement.size_bytes)
                block = self._allocate(size_bytes, _left(end_s))
            self._placements[module] = placement
            room_s = time.monotonic()
            self._upload(placement, block, end_s)
            self._counted(placement.moved_bytes, started_s, room_s)
            if placement.partial and not self._told:
                self._told = True
                logger.warning(
                    "weight-cache: %r is on %s in part: %s of it stay there, the rest comes for "
                    "each call, which is slow",
                    self._record.key,
                    self.device.name,
                    size_text(placement.moved_bytes),
                )
        self._is_here(placement, size_bytes if placement.size_bytes else 0, room_bytes)

    def _part(self, module: torch.nn.Module, room_bytes: int) -> Placement:
        from gpu_worker.placement import Placement

        try:
            return Placement(module, self.device, room_bytes)
        except BudgetExceeded as too_small:
            too_small.message = f"{self._record.key!r}: {too_small.message}"
            raise

    def _bring_shared(self, module: torch.nn.Module, end_s: float | None, started_s: float) -> bool:
        """Have the module lie in memory that all processes on the device share, what is shared.

        Returns:
            False if that cannot be: it was edited, or the device has never room for all of it.
        """
        from gpu_worker.leases import Segment
        from gpu_worker.placement import Placement
        from gpu_worker.read_only import Guard
        from gpu_worker.tensors import data_range

        with self._lock:
            weights = self._record.weights
        data = range(0) if weights is None else data_range(weights)
        with self._segment() as whole:
            if whole is None or not data:
                return False
            segment = Segment(whole.fd, whole.address + data.start, len(data))
            guard = Guard(self._record.key, self.device.name)
            placement = Placement(module, self.device, shared=segment, guard=guard)
            try:
                shared, uploaded_bytes, move_s = self._share(segment, data.start, end_s)
            except BudgetExceeded as refusal:
                if 0 < refusal.possible_bytes < refusal.needed_bytes:
                    return False
                raise
            if shared is None:
                return False
        self._placements[module] = placement
        room_s, block, size_bytes = time.monotonic() - move_s, None, 0
        if placement.size_bytes:
            size_bytes = self.device.charged_bytes(placement.size_bytes)
            block = self._allocate(size_bytes, _left(end_s))
            room_s = time.monotonic() - move_s
            self._fill(placement, block, end_s)
        with load_lock.read(_left(end_s)):
            placement.point_there(block, shared)
        self._counted(placement.moved_bytes + uploaded_bytes, started_s, room_s)
        self._is_here(placement, size_bytes + shared.size_bytes, None)
        return True

    def _share(
        self, segment: Segment, offset_bytes: int, end_s: float | None
    ) -> tuple[Block | None, int, float]:
        """Return memory that has the bytes of a segment; how many were moved for that, how long.

        None if another module of this process has it, or what others have made is no such memory.

        Args:
            segment: a part of a file, from `offset_bytes` of it on.
        """
        pool = self.device.pool
        assert pool is not None
        size_bytes = self.device.segment_bytes(segment.size_bytes)
        uploaded_bytes, move_s = 0, 0.0

        from gpu_worker.block import Piece

        def make(gen: GenerationId) -> DeviceSegment:
            nonlocal uploaded_bytes, move_s
            began_s = time.monotonic()
            made = self.device.make_segment(size_bytes, gen)
            try:
                for batch in passes([segment.size_bytes]):
                    for _, begin, part_bytes in batch:
                        source = Piece(None, segment.fd, offset_bytes + begin, part_bytes)
                        made.fill(begin, source)
                made.finish()
            except BaseException:
                made.close()
                raise
            uploaded_bytes, move_s = segment.size_bytes, time.monotonic() - began_s
            return made

        charge = Charge(residence=weakref.ref(self), forks=self.device.forks)
        charge.copy_of = self._record.generation
        self._charges.append(charge)
        block: Block | None = None
        try:
            key, left_s = self._record.key, _left(end_s)
            if not self._client.share(charge, key, pool, size_bytes, make, left_s):
                self._charges.remove(charge)
                return None, 0, 0.0
            try:
                block = self.device.open_segment(charge.fd, size_bytes)
            except SegmentRefused as refused:
                logger.warning(
                    "weight-cache: %r: what processes share on %s is not used, and this one has a "
                    "copy of its own: %s",
                    key,
                    self.device.name,
                    refused.message,
                )
                self._charges.remove(charge)
                self._client.leases.give_back(charge)
                return None, 0, 0.0
            self._client.leases.watch_block(charge, block, self.device)
        except BaseException:
            if charge.memory is None or not charge.memory.watched:
                if block is not None:
                    block.free()
                self.device.release_cached()
                self._client.leases.discharge(charge)
            raise
        return block, uploaded_bytes, move_s

    def _counted(self, moved_bytes: int, started_s: float, room_s: float) -> None:
        self._count.waited_s += room_s - started_s
        self._count.moved_s += time.monotonic() - room_s
        self._count.moved_bytes += moved_bytes
        self._client.leases.count_later()

    def _is_here(self, placement: Placement, size_bytes: int, room_bytes: int | None) -> None:
        with self._lock:
            self.size_bytes = size_bytes
            self.room_bytes = room_bytes
            self.here = True
        if not self._record.keeps_host and size_bytes and not placement.partial:
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
        charge = Charge(residence=weakref.ref(self), forks=self.device.forks)
        self._charges.append(charge)
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
        self._fill(placement, block, end_s)
        with load_lock.read(_left(end_s)):
            placement.point_there(block)

    def _fill(self, placement: Placement, block: Block, end_s: float | None) -> None:
        with self._segment() as segment:
            todo = placement.steps(block, segment)
            while True:
                with load_lock.read(_left(end_s)):
                    if next(todo, _DONE) is _DONE:
                        break
            block.finish()

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
            self.here, self.size_bytes, self.room_bytes, self._charges = False, 0, None, []

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
        return any(own is charge for own in self._charges)

    def rest(self) -> None:
        """A lock of it has ended. If that was the last, it leaves if it is to. The lock is held.

        Whoever locks it next then has to ask for room, behind those who wait.
        """
        if self._record.locks:
            return
        for charge in self._charges:
            if charge.asked in ("room", "stale"):
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
                left_bytes = self.size_bytes
                self._move = mine
            try:
                with load_lock.read(left_s):
                    self._withdraw()
            except LoadTimeout:
                with self._lock:
                    self.here = was_here
                raise
            if left_bytes and self.left is not None:
                self.left()
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
        self._charges = []


def can_share(device: Device) -> bool:
    """Say whether the memory of a device can be shared; if not, the log says so, once."""
    if not device.shares and device.name not in _told:
        _told.add(device.name)
        logger.warning(
            "weight-cache: %s cannot share its memory, so each process has a copy of its own: %s",
            device.name,
            device.why_private,
        )
    return device.shares


_told: set[str] = set()
_DONE = object()

_the_parents: list[object] = []
"""Tensors in memory that a forked child must not even free."""


def _left(end_s: float | None) -> float | None:
    return None if end_s is None else max(0.0, end_s - time.monotonic())
