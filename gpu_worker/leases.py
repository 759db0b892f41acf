"""What this process leases, what the coordinator asks of it, and how it ends.

Maps of segments, and charges for private memory. A REVOKE is noted by the reader at once; what it
asks is done by the keeper, which runs destructors.

Rules
- A generation is let go of by the whole process or not at all: while anything in it uses the bytes,
  evicting an idle module would free nothing. What is in use is watched, and looked at again when
  one of its uses ends.
- RELEASE comes after the unmapping, with the id that the lease has then.

    Note on names
    fact: a module that its record keeps, and that somebody else has by a name, tells nobody when
    that name is gone
    consequence: who was asked whether nothing uses the bytes, while a name was bound, would never
    say so unless the module was used again; and who waits for the room would wait to his deadline
    choice: look again, for as long as that is asked and a name is all that is in the way
    cost: a look every 0.1 s meanwhile; the answer comes that much later
"""

from __future__ import annotations

import contextlib
import functools
import gc
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gpu_worker.keeper import Keeper
from gpu_worker.records import Asked
from gpu_worker.request import Charge
from shm_store import wire
from shm_store.errors import WeightCacheError
from shm_store.keys import GenerationId, Key, LeaseId
from shm_store.wire import Ack, HeldCharge, HeldMap, Release, Revoke

if TYPE_CHECKING:
    from gpu_worker.connection import Connection
    from gpu_worker.mapping import Buffer, Mapping, MappingTable


NAMED_LOOK_S = 0.1
"""Between two looks whether a name is gone; see the note."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker's record of a generation. If it is in use, `Leases.idle` hears when it is not.

    Attributes:
        record: which it is.
        weights: the bytes it keeps; None if they are private.
        elsewhere: somebody may have its module, and keep that when the record lets go.
    """

    record: int
    weights: object
    used: bool
    elsewhere: bool


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
        self._named: set[GenerationId] = set()
        """Which are to be looked at again because of a name. The keeper's own."""

    def start(self) -> None:
        """Begin to take grants. Imports torch, which no load with a timeout is to wait for."""
        import gpu_worker.tensors  # noqa: F401
        from gpu_worker.mapping import MappingTable

        self._mappings = MappingTable(self.keeper.queue)
        self.keeper.start()

    @property
    def any(self) -> bool:
        """Whether anything is leased, or still to be given back."""
        return bool(self._charges) or (self._mappings is not None and len(self._mappings) > 0)

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

    def leaving(self, key: Key) -> bool:
        """Say whether weights of `key` are on their way out to make room."""
        return self._mappings is not None and self._mappings.leaving(key)

    def discharge(self, charge: Charge) -> None:
        """Give private memory back, which is free by now. Safe in a finalizer: only enqueues."""
        self.keeper.queue.put(functools.partial(self._discharge, charge))

    def release(self, gen: GenerationId, lease: LeaseId) -> None:
        """Give back a lease on what is not mapped."""
        with self._lock:
            self._connection.post(Release(gen, lease))

    # --- the reader's ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def held(self) -> Iterator[list[tuple[HeldMap | HeldCharge, tuple[int, ...]]]]:
        """Give all of it, each with its segment, which is open in the block. The lock is held."""
        assert self._mappings is not None
        with self._mappings.held() as maps:
            yield [
                *((held, (fd,)) for held, fd in maps),
                *((_stated(charge), ()) for charge in self._charges.values()),
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

    def take_charge(self, charge: Charge, gen: GenerationId, lease: LeaseId) -> None:
        """Count a charge as this process's, or give it back. The caller has the lock."""
        charge.gen, charge.lease = gen, lease
        if charge.over:
            self._connection.post(Release(gen, lease))
        else:
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

    def _discharge(self, charge: Charge) -> None:
        with self._lock:
            charge.over = True
            if self._charges.pop(charge.gen, None) is not None:
                self._connection.post(Release(charge.gen, charge.lease))
        self._unused()

    def _revoked(self, gen: GenerationId, lease: LeaseId, asked: Asked) -> None:
        """Do what was asked of a lease, and say so if it goes on all the same."""
        held = self._held(gen)
        if held is None or (held.lease, held.asked) != (lease, asked):
            return  # it has ended, or something newer came
        if not asked:
            for worker in list(self._workers):
                self._attempt(worker.keep, gen)
        elif asked == "stale":
            for worker in list(self._workers):
                self._attempt(worker.retire, gen)
            self.keeper.call_settled(functools.partial(self._acknowledge, gen, lease, asked))
        elif not self._serve(gen, held, rested=None):
            self._acknowledge(gen, lease, asked)

    def _look_again(self, gen: GenerationId, rested: int | None = None) -> None:
        """A use has ended: what was asked meanwhile may be possible now."""
        held = self._held(gen)
        if held is not None and held.asked in ("idle", "room"):
            self._serve(gen, held, rested)

    def _look_later(self, gen: GenerationId) -> None:
        """Have a look after a while: see the note on names."""

        def look() -> None:
            self._named.discard(gen)
            self._look_again(gen)

        if gen not in self._named:
            self._named.add(gen)
            self.keeper.put_at(time.monotonic() + NAMED_LOOK_S, look)

    def _serve(self, gen: GenerationId, held: Mapping | Charge, rested: int | None) -> bool:
        """Let go, or say that nothing uses the bytes, as was asked; say whether that was possible.

        Args:
            rested: a record that was idle a moment ago. It may be in use again, and could be each
                time that somebody looks.
        """
        seen = {worker: found for worker in list(self._workers) if (found := worker.look(gen))}
        used = [worker for worker, found in seen.items() if found.used]
        if self._others_use(gen, held, [found.weights for found in seen.values()]):
            return False
        idle = all(seen[worker].record == rested for worker in used)
        if held.asked == "idle" and idle:
            if any(one.elsewhere for one in seen.values()):
                self._look_later(gen)
                return False
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
        assert self._mappings is not None
        return not isinstance(held, Charge) and self._mappings.answered(held)

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

    def _collect_once(self, held: Mapping | Charge) -> None:
        """Collect garbage if what was let go of is still there: a cycle may keep it.

        An idle process collects nothing by itself, and others wait for the room. Once for each
        REVOKE: it takes 100 ms.
        """
        if not held.collected and self._held(held.gen) is held:
            held.collected = True
            gc.collect()


def _stated(charge: Charge) -> HeldCharge:
    return HeldCharge(charge.gen, charge.lease, charge.pool, charge.key, charge.size_bytes)
