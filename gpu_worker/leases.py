"""What this process leases, what the coordinator asks of it, and how it ends.

Maps of segments, and charges for private memory. A REVOKE is noted by the reader at once; what it
asks is done by the keeper, which runs destructors.

Rules
- A generation is let go of by the whole process or not at all: while anything in it uses the bytes,
  evicting an idle module would free nothing. What is in use is watched, and looked at again when
  one of its uses ends.
- RELEASE comes after the unmapping, with the id that the lease has then.
- That a name is gone which was bound to a module tells nobody. So what was asked and could not be
  done is looked at now and then until it can, ever more rarely: others wait for the room.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from gpu_worker.keeper import Keeper
from gpu_worker.pages import any_own
from gpu_worker.records import Asked
from gpu_worker.request import Charge
from shm_store import wire
from shm_store.errors import DeviceUnavailable, LoadTimeout, WeightCacheError
from shm_store.keys import GenerationId, Key, LeaseId
from shm_store.layout import PAGE_BYTES, round_up
from shm_store.report import ModelReport
from shm_store.wire import Ack, Counts, Declare, Held, HeldCharge, HeldOnDevice, Release, Revoke

if TYPE_CHECKING:
    from gpu_worker.block import Block, Memory
    from gpu_worker.connection import Connection
    from gpu_worker.device import Device
    from gpu_worker.mapping import Buffer, Mapping, MappingTable
    from gpu_worker.residence import Residence

FIRST_LOOK_S = 0.1
FREE_AGAIN_S = 1.0
"""How long after a device has failed to take memory back it is asked again."""

COUNT_S = 1.0
"""How often the coordinator is told what was counted."""

LEAVE_STEP_S = 0.02
"""How long after a failed attempt to take a module from its device the next one comes."""

LOOK_SHARE = 8
"""How long after a REVOKE it is looked at again, and then after which part of the time since."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker's record of a generation. If it is in use, `Leases.idle` hears when it is not.

    Attributes:
        record: which it is.
        weights: the bytes it keeps; None if they are private.
        elsewhere: somebody has its module, and keeps that when the record lets go.
        garbage: the record has let go of it, and so has everybody, but a cycle keeps it.
    """

    record: int
    weights: object
    used: bool
    elsewhere: bool
    garbage: bool


class Segment(NamedTuple):
    """The file behind a map: `fd` has the bytes that are at `address`."""

    fd: int
    address: int
    size_bytes: int


class Holder(Protocol):
    """Whoever keeps records of generations for a worker. The keeper calls all of it."""

    def look(self, gen: GenerationId) -> Seen | None:
        """Say what it hands out of a generation."""

    def make_room(self, gen: GenerationId) -> None:
        """Let go of a generation as soon as it is idle. Runs destructors."""

    def keep(self, gen: GenerationId) -> None:
        """Let a generation stay that was to make room."""

    def retire(self, gen: GenerationId) -> None:
        """Hand a generation out no more. Runs destructors."""

    def counted(self) -> list[ModelReport]:
        """Say what was done with each model so far."""

    def after_fork(self, keeper: Keeper) -> None:
        """In a forked child: have its records as its own, without the threads that used them."""


class Leases:
    """Every lease of one session. The connection's lock guards the charges."""

    def __init__(
        self,
        connection: Connection,
        workers: weakref.WeakSet[Holder],
        unused: Callable[[], object],
    ) -> None:
        """Start without any, and without torch.

        Args:
            workers: those who share the session.
            unused: called whenever a lease has ended.
        """
        self.keeper = Keeper(self._end)
        self._connection = connection
        self._lock = connection.lock
        self._workers = workers
        self._unused = unused
        self._mappings: MappingTable | None = None
        self._charges: dict[GenerationId, Charge] = {}
        self._devices: dict[str, Declare] = {}
        self._shared: list[Charge] = []
        self._counting = False
        self._revoked_s: dict[GenerationId, float] = {}
        """When the last REVOKE came of what is still looked at. The keeper's own."""

    def start(self) -> None:
        """Begin to take grants. Imports torch, which no load with a timeout is to wait for.

        And whatever else a load needs: a child that is forked while another thread imports a module
        would wait for ever for its lock.
        """
        import gpu_worker.module
        import gpu_worker.placement
        import gpu_worker.publish
        import gpu_worker.tensors  # noqa: F401
        from gpu_worker import sending
        from gpu_worker.mapping import MappingTable

        sending.register()
        self._mappings = MappingTable(self.keeper.queue)
        self.keeper.start()

    def after_fork(self, new_lease: Callable[[], LeaseId]) -> None:
        """In a forked child: have all of it as its own.

        Private memory, too: the kernel shares it with the parent until one of them writes, so it is
        counted once, until both have given it back.
        """
        assert self._mappings is not None
        self._mappings.after_fork(new_lease, self.keeper.queue)
        for charge in self._charges.values():
            if not charge.forks and charge.fd >= 0:
                # Of memory that is of no use here, and that would stay as long as this process.
                fd, charge.fd = charge.fd, -1
                os.close(fd)
        self._charges = {gen: charge for gen, charge in self._charges.items() if charge.forks}
        for charge in self._charges.values():
            charge.lease, charge.asked, charge.letting_go = new_lease(), "", False
            if charge.memory is not None:
                self._watch(charge)
        self._revoked_s, self._counting = {}, False
        self.keeper.go_on()

    @property
    def any(self) -> bool:
        """Whether anything is leased, or still to be given back."""
        return bool(self._charges) or (self._mappings is not None and len(self._mappings) > 0)

    @property
    def held_up(self) -> bool:
        """Whether the calling thread is in a call here, which a GRANT would have to wait for."""
        return self._mappings is not None and self._mappings.held_up

    # --- for workers ----------------------------------------------------------------------------

    def asked(self, gen: GenerationId) -> Asked:
        """Return what the coordinator has asked of the lease on a generation."""
        charge = self._charges.get(gen)
        if charge is not None:
            return charge.asked
        return "" if self._mappings is None else self._mappings.asked(gen)

    def idle(self, gen: GenerationId, record: int) -> None:
        """Hear that the last use of a record, which is watched, has ended. Only enqueues."""
        self.keeper.put(functools.partial(self._look_again, gen, record))

    def hand_out(self, gen: GenerationId) -> Buffer | None:
        """Return the bytes of a generation that is mapped here, for one more user; else None."""
        return None if self._mappings is None else self._mappings.hand_out(gen)

    def around(self, address: int, size_bytes: int) -> tuple[Mapping, Buffer] | None:
        """Return the mapping that these bytes are in, and itself for one more user; else None."""
        return None if self._mappings is None else self._mappings.around(address, size_bytes)

    def dup_fd(self, gen: GenerationId) -> int | None:
        """Return an fd of the segment of a generation, the caller's to close; None without one."""
        return None if self._mappings is None else self._mappings.dup_fd(gen)

    def leaving(self, key: Key) -> bool:
        """Say whether weights of `key` are on their way out to make room."""
        return self._mappings is not None and self._mappings.leaving(key)

    def share(self, charge: Charge) -> bool:
        """Begin to have memory of a device that others have, too; say whether that can be.

        A process has one lease on it, so only one can have it. The caller has the lock.
        """
        if self.shares(charge):
            return False
        charge.shared = True
        self._shared.append(charge)
        return True

    def shares(self, charge: Charge) -> bool:
        """Say whether something here has memory like this, or is about to, or has not left it."""
        return any(
            (one.pool, one.copy_of) == (charge.pool, charge.copy_of) for one in list(self._shared)
        )

    def discharge(self, charge: Charge) -> None:
        """Give private memory back, which is free by now. Safe in a finalizer: only enqueues.

        By hand `give_back` is better: what the caller asks for next finds it done.
        """
        self.keeper.queue.put(functools.partial(self.give_back, charge))

    def declare(self, device: Declare) -> None:
        """Say that this process can use a device, now and on each connection to come.

        Its newest budget counts, also if another of its workers has none.
        """
        with self._lock:
            before = self._devices.get(device.pool)
            if before != device and (device.budgeted or before is None or not before.budgeted):
                self._devices[device.pool] = device
                self._connection.post(device)

    def count_later(self) -> None:
        """Hear that something was counted: the coordinator is told within COUNT_S."""
        if not self._counting:
            self._counting = True
            self.keeper.put_at(time.monotonic() + COUNT_S, self.count)

    def count(self) -> None:
        """Tell the coordinator what was counted so far. What it was told before is void."""
        self._counting = False
        models = [model for worker in list(self._workers) for model in worker.counted()]
        if models:
            with self._lock:
                self._connection.post(Counts(tuple(models[-wire.MODELS_LIMIT :])))

    @contextlib.contextmanager
    def segment(self, gen: GenerationId, weights: Buffer) -> Iterator[Segment | None]:
        """Give the segment that `weights` are a map of, to be read in the block.

        None where it is not what this process sees: pages of the map were written to.
        """
        assert self._mappings is not None
        address, size_bytes = ctypes.addressof(weights), len(weights)
        edited = any_own(address, round_up(size_bytes, PAGE_BYTES))
        fd = None if edited else self._mappings.dup_fd(gen)
        try:
            yield None if fd is None else Segment(fd, address, size_bytes)
        finally:
            if fd is not None:
                os.close(fd)

    def watch_block(self, charge: Charge, block: Block, device: Device) -> None:
        """Have a charge end when the device has its block back: after the last tensor over it."""
        charge.block_end = functools.partial(self._end_block, charge, block.memory, device)
        charge.memory = block.memory
        self._watch(charge)

    def _watch(self, charge: Charge) -> None:
        assert charge.memory is not None and charge.block_end is not None
        if not charge.memory.watch(functools.partial(self.keeper.queue.put, charge.block_end)):
            self.keeper.put(charge.block_end)

    def rested(self, charge: Charge) -> None:
        """Hear that what is on a device, and asked for, is not in use any more. Only enqueues."""
        self.keeper.put(functools.partial(self._revoked, charge.gen, charge.lease, "room"))

    def release(self, gen: GenerationId, lease: LeaseId) -> None:
        """Give back a lease on what is not mapped."""
        with self._lock:
            self._connection.post(Release(gen, lease))

    # --- the reader's ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def held(self) -> Iterator[list[tuple[Held, tuple[int, ...]]]]:
        """Give all of it, each with its segment, which is open in the block. The lock is held."""
        assert self._mappings is not None
        with self._mappings.held() as maps:
            yield [
                *((held, (fd,)) for held, fd in maps),
                *(_stated(charge) for charge in self._charges.values()),
                *((device, ()) for device in self._devices.values()),
            ]

    def take_grant(self, gen: GenerationId, lease: LeaseId, fd: int, wanted: bool) -> Buffer | None:
        """Map what was granted, or give it back. Consumes `fd`, also when it raises.

        Returns:
            The bytes. None if nobody here wants them.

        Raises:
            SegmentRefused, ResourceError: it cannot be mapped, and is given back.
        """
        assert self._mappings is not None
        refused: WeightCacheError | None = None
        buffer: Buffer | None = None
        try:
            buffer = self._mappings.granted(gen, lease, fd, wanted)
        except WeightCacheError as error:
            refused = error
        if buffer is None and not self._mappings.pending(gen, lease):
            self.release(gen, lease)
        if refused is not None:
            raise refused
        return buffer

    def take_charge(self, charge: Charge, gen: GenerationId, lease: LeaseId, fd: int = -1) -> None:
        """Count a charge as this process's, or give it back. The caller has the lock.

        Args:
            fd: of the memory that it is a lease on, if it is. Taken over.
        """
        charge.gen, charge.lease = gen, lease
        if charge.over:
            if fd >= 0:
                os.close(fd)
            self._connection.post(Release(gen, lease))
        else:
            charge.fd = fd
            self._charges[gen] = charge

    def take_revoke(self, message: Revoke) -> None:
        """Note it at once, so that no record is made without; the keeper does the rest."""
        assert self._mappings is not None
        gen, lease = message.gen, message.lease
        asked: Asked = "" if message.asked == "keep" else message.asked
        charge = self._charges.get(gen)
        if charge is not None and charge.lease == lease:
            charge.asked, charge.collected = asked, False
        elif not self._mappings.revoked(gen, lease, asked):
            return
        self.keeper.put(functools.partial(self._revoked, gen, lease, asked))

    # --- the keeper's ---------------------------------------------------------------------------

    def _end(self, ended: Mapping) -> None:
        """Unmap what no tensor uses any more, then give its lease back."""
        assert self._mappings is not None
        self._mappings.unmap(ended)
        with self._lock:
            self._connection.post(Release(ended.gen, self._mappings.forget(ended)))
        self._unused()

    def _end_block(self, charge: Charge, memory: Memory, device: Device) -> None:
        """Give memory back to a device that no tensor uses any more, then the charge for it."""
        try:
            memory.free()
            device.release_cached()
        except DeviceUnavailable:
            assert charge.block_end is not None
            self.keeper.put_at(time.monotonic() + FREE_AGAIN_S, charge.block_end)
            raise
        self.give_back(charge)

    def give_back(self, charge: Charge) -> None:
        """Give private memory back, which is free by now, before anything that is asked later."""
        with self._lock:
            charge.over = True
            if charge.shared:
                fd, charge.fd = charge.fd, -1
                if fd >= 0:
                    os.close(fd)  # before it is said that it is free
                self._shared = [one for one in self._shared if one is not charge]
            if charge.gen in self._charges:
                # Said first: an interrupt has it said again, and a doubled one changes nothing.
                self._connection.post(Release(charge.gen, charge.lease))
                self._charges.pop(charge.gen, None)
        self._unused()

    def _revoked(self, gen: GenerationId, lease: LeaseId, asked: Asked) -> None:
        """Do what was asked of a lease, and say so if it goes on all the same."""
        held = self._held(gen)
        if held is None or (held.lease, held.asked) != (lease, asked):
            return  # it has ended, or something newer came
        if isinstance(held, Charge) and held.residence is not None:
            if asked:
                self._revoked_there(held, held.residence(), asked)
        elif not asked:
            for worker in list(self._workers):
                self._attempt(worker.keep, gen)
        elif asked == "stale":
            for worker in list(self._workers):
                self._attempt(worker.retire, gen)
            self.keeper.call_settled(functools.partial(self._acknowledge, gen, lease, asked))
        else:
            served = self._serve(gen, held, rested=None)
            if not served and self._collect_once(held):
                served = self._serve(gen, held, rested=None)
            if not served:
                self._acknowledge(gen, lease, asked)
            self._revoked_s[gen] = now_s = time.monotonic()
            self._look_later(gen, now_s)

    def _revoked_there(
        self, charge: Charge, residence: Residence | None, asked: wire.Asked
    ) -> None:
        """Let go of memory on a device, unless the module there is in use.

        A thread that builds has the load lock, and is not waited for here.
        """
        gone = False
        if residence is not None and not residence.has(charge):
            residence = None  # it has left this memory, and somebody keeps a tensor of it
        if asked == "stale" and charge.copy_of:
            for worker in list(self._workers):
                self._attempt(worker.retire, charge.copy_of)
        if asked in ("room", "stale") and residence is not None:
            try:
                gone = residence.leave(0.0)
            except LoadTimeout:
                again = functools.partial(self._revoked, charge.gen, charge.lease, asked)
                self.keeper.put_at(time.monotonic() + LEAVE_STEP_S, again)
                return
        if asked != "stale" and residence is None and _is_used(charge):
            gone = self._collect_once(charge)
            self._revoked_s[charge.gen] = now_s = time.monotonic()
            self._look_there_later(charge, asked, now_s)
        idle = asked == "idle" and residence is not None and residence.idle
        answer = functools.partial(self._acknowledge, charge.gen, charge.lease, asked, idle=idle)
        if gone:
            self.keeper.call_settled(answer)  # somebody may keep a tensor of it
        else:
            answer()

    def _look_there_later(self, charge: Charge, asked: wire.Asked, revoked_s: float) -> None:
        """Look at memory on a device that no record has any more once more, after a while.

        Somebody keeps a tensor over it, and a cycle may when that one lets go.
        """
        now_s = time.monotonic()
        pause_s = max(FIRST_LOOK_S, now_s - revoked_s)
        look = functools.partial(self._look_there, charge, asked, revoked_s)
        self.keeper.put_at(now_s + pause_s, look)

    def _look_there(self, charge: Charge, asked: wire.Asked, revoked_s: float) -> None:
        if self._revoked_s.get(charge.gen) != revoked_s:
            return  # a newer REVOKE is looked after instead
        if self._held(charge.gen) is charge and charge.asked == asked:
            charge.collected = False
            self._collect_once(charge)
            self._look_there_later(charge, asked, revoked_s)
        else:
            del self._revoked_s[charge.gen]

    def _look_later(self, gen: GenerationId, revoked_s: float) -> None:
        """Look at what was asked once more, after a while."""
        now_s = time.monotonic()
        pause_s = max(FIRST_LOOK_S, (now_s - revoked_s) / LOOK_SHARE)
        self.keeper.put_at(now_s + pause_s, functools.partial(self._look_on, gen, revoked_s))

    def _look_on(self, gen: GenerationId, revoked_s: float) -> None:
        """See whether a name is gone that was the last to have a module, but for a cycle."""
        if self._revoked_s.get(gen) != revoked_s:
            return  # a newer REVOKE is looked after instead
        held = self._held(gen)
        if held is not None and held.asked == "idle":
            self._serve(gen, held, rested=None)
            self._look_later(gen, revoked_s)
        elif held is not None and held.asked == "room":
            if any(found.garbage for found in self._seen(gen).values()):
                gc.collect()
                del self._revoked_s[gen]  # no use in more, if that was none
            else:
                self._look_later(gen, revoked_s)
        else:
            del self._revoked_s[gen]

    def _look_again(self, gen: GenerationId, rested: int | None = None) -> None:
        """A use has ended: what was asked meanwhile may be possible now."""
        held = self._held(gen)
        if held is None or not held.asked:
            return
        if held.asked != "stale":
            self._serve(gen, held, rested)
        kept = [found.record for found in self._seen(gen).values()]
        if rested is not None and rested not in kept:
            # Its module may be garbage now; or soon, if a name is about to go that it is bound to.
            held.collected = False
            soon_s = time.monotonic() + FIRST_LOOK_S
            self.keeper.put_at(soon_s, functools.partial(self._collect_once, held))

    def _serve(self, gen: GenerationId, held: Mapping | Charge, rested: int | None) -> bool:
        """Let go, or say that nothing uses the bytes, as was asked; say whether that was possible.

        Args:
            rested: a record that was idle a moment ago. It may be in use again, and could be each
                time that somebody looks.
        """
        seen = self._seen(gen)
        used = [worker for worker, found in seen.items() if found.used]
        if self._others_use(gen, held, [found.weights for found in seen.values()]):
            return False
        idle = all(seen[worker].record == rested for worker in used)
        if held.asked == "idle" and idle and not any(one.elsewhere for one in seen.values()):
            # In this order: the next REVOKE may be here before that ACK is sent.
            if self._answered(held):
                self._acknowledge(gen, held.lease, "idle", idle=True)
            return True
        if held.asked == "room" and len(used) <= 1:
            # Who is at work lets go with the last use, and hears of it; then the others do.
            held.letting_go = not used
            for worker in used or seen:
                self._attempt(worker.make_room, gen)
            if not used:
                self.keeper.call_settled(functools.partial(self._collect_once, held))
            self.keeper.call_settled(functools.partial(self._acknowledge, gen, held.lease, "room"))
            return True
        return False

    def _seen(self, gen: GenerationId) -> dict[Holder, Seen]:
        return {worker: found for worker in list(self._workers) if (found := worker.look(gen))}

    def _held(self, gen: GenerationId) -> Mapping | Charge | None:
        """Return what this process has of a generation, if something still keeps it."""
        assert self._mappings is not None
        return self._charges.get(gen) or self._mappings.alive(gen)

    def _others_use(
        self, gen: GenerationId, held: Mapping | Charge, known: Sequence[object]
    ) -> bool:
        """Say whether anything but these records uses the bytes. The end of that is told."""
        if isinstance(held, Charge):
            return not known
        assert self._mappings is not None
        told = functools.partial(self._look_again, gen)
        return self._mappings.others_use(held, known, told)

    def _answered(self, held: Mapping | Charge) -> bool:
        """Say whether it is still asked whether nothing uses it. From now on it is not."""
        if isinstance(held, Charge):
            with self._lock:
                asked, held.asked = held.asked, "" if held.asked == "idle" else held.asked
            return asked == "idle"
        assert self._mappings is not None
        return self._mappings.answered(held)

    def _attempt(self, do: Callable[[GenerationId], object], gen: GenerationId) -> None:
        """Have a worker do it, whatever its callbacks raise."""
        self.keeper.attempt(functools.partial(do, gen))

    def _acknowledge(
        self, gen: GenerationId, lease: LeaseId, asked: wire.Asked, *, idle: bool = False
    ) -> None:
        """Say that a lease goes on; if it does not, its RELEASE has been sent."""
        held = self._held(gen)
        with self._lock:
            if held is not None and held.lease == lease:
                held.letting_go = False
                self._connection.post(Ack(gen, lease, asked, idle))

    def _collect_once(self, held: Mapping | Charge) -> bool:
        """Collect garbage if what nobody uses is still there: a cycle may keep it. Say whether.

        An idle process collects nothing by itself, and others wait for the room. Once for each
        REVOKE, and for each module that may have become garbage since: it takes 100 ms.
        """
        if held.collected or self._held(held.gen) is not held:
            return False
        if any(found.used for found in self._seen(held.gen).values()):
            return False
        held.collected = True
        gc.collect()
        return True


def _is_used(charge: Charge) -> bool:
    """Say whether something still uses the memory on a device that it is for."""
    return charge.memory is not None and charge.memory.in_use


def _stated(charge: Charge) -> tuple[HeldCharge | HeldOnDevice, tuple[int, ...]]:
    """Return what is said of a charge on a new connection, and the fd that goes with it."""
    facts = (charge.gen, charge.lease, charge.pool, charge.key)
    if charge.shared:
        stale = charge.asked == "stale"
        held = HeldOnDevice(*facts, charge.copy_of, charge.size_bytes, stale)
        return held, (charge.fd,)
    return HeldCharge(*facts, charge.size_bytes, charge.fixed, charge.copy_of), ()
