"""A thread of a modelled worker: it runs a small program, one step at a time.

Between its steps it waits in a phase: to start an op, for the flight of another thread, for an
answer, or with what it was granted on its way to a record. Its worker's reader moves it on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpu_worker.records import ClaimId, Origin, Record
from shm_store.keys import GenerationId
from shm_store.wire import (
    Acquire,
    Charge,
    Commit,
    Evict,
    Invalidate,
    Limit,
    Pin,
    Receive,
    Release,
    Reserve,
    Unpin,
)
from tests.exploration.parts import FOREVER_S, QUEUE, Mapping, Op, Parcel, Program, Resident

if TYPE_CHECKING:
    from tests.exploration.worker import Worker


@dataclass(slots=True, eq=False)
class Thread:
    """Where a thread is in its program, and what it has.

    Attributes:
        rid, gen, mapping: of the load that it is at; parcel: of what it is receiving.
        claims: by key; `kept` are tensors of its own, and `charges` private memory; `residents` by
            key what it has on a device.
    """

    worker: Worker
    index: int
    pc: int = 0
    phase: str = "start"
    rid: int = 0
    gen: GenerationId | None = None
    mapping: Mapping | None = None
    parcel: Parcel | None = None
    claims: dict[str, int] = field(default_factory=dict)
    kept: dict[str, Mapping] = field(default_factory=dict)
    charges: list[tuple[GenerationId, int]] = field(default_factory=list)
    residents: dict[str, Resident] = field(default_factory=dict)

    @property
    def program(self) -> Program:
        return self.worker.host.world.programs[self.worker.session][self.index]

    @property
    def op(self) -> Op:
        """What it is at."""
        ops = self.program.ops
        return ops[self.pc % len(ops)]

    def can_go_on(self) -> bool:
        worker = self.worker
        if self.phase in ("asked", "done", "over"):
            return False
        if self.phase == "start" and (len(worker.keeper) >= QUEUE or len(worker.out) >= QUEUE):
            return False
        op = self.op
        if self.phase == "flight" and op.key in worker.flights:
            return False
        if self.phase == "start" and op.what == "receive" and self._arrived(op) is None:
            return False
        if self.phase in ("start", "flight") and op.what in ("use", "hold", "state", "receive"):
            return worker.may_ask(op)
        return True

    @property
    def copy_of(self) -> GenerationId | None:
        """Return the generation whose bytes it brings to a device that all processes share."""
        if not self.op.shared or self.op.key not in self.claims:
            return None
        return self.worker.records._claims[ClaimId(self.claims[self.op.key])][0].generation

    def ask_again(self) -> None:
        """Ask for what it waits for over another connection."""
        if self.op.what in ("use", "hold", "state"):
            self.gen = None
            self.worker.ask(self._acquire(self.op), self)
        elif self.parcel is not None:
            self.worker.ask(Receive(self.worker.next_rid(), self.parcel.gen), self)
        else:
            self._start(self.op)

    def next(self) -> None:
        """Come to the next op, or to the end of the program."""
        program = self.program
        if self.parcel is not None:
            self.worker.host.parcels.remove(self.parcel)
            self.parcel = None
        self.pc += 1
        self.phase, self.gen, self.mapping, self.rid = "start", None, None, 0
        if self.pc == len(program.ops):
            self.pc = 0
            if not program.loops:
                self.phase = "over"

    def end(self) -> None:
        """Its process has died."""
        self.phase, self.mapping, self.gen, self.parcel = "over", None, None, None
        self.claims, self.kept, self.charges, self.residents = {}, {}, [], {}

    def land(self) -> None:
        """Let others go on that wait for its load, if it is at one."""
        flights, key = self.worker.flights, self.op.key
        if flights.get(key) == self.index:
            del flights[key]

    # --- steps ------------------------------------------------------------------------------------

    def step(self) -> None:
        """Take the next step."""
        worker, op = self.worker, self.op
        match self.phase:
            case "start" | "flight":
                self._start(op)
            case "build":
                worker.requests[self.rid].reserved = True
                size = op.size if op.shared else worker.host.world.sizes[op.key]
                worker.send(Reserve(self.gen, size))
                self.phase = "asked"
            case "fill":
                worker.host.bytes_from[self.gen] = self.copy_of or op.fingerprint
                worker.send(Commit(self.gen))
                self.phase = "asked"
            case "granted":
                self._has_bytes(op)
            case "assembled":
                record = Record(op.key, self.mapping.gen, self._origin(op), self.mapping)
                worker.records.admit(record, self._claim(op), self.mapping.asked)
                self.land()
                self._claimed(op)
            case "claimed":
                worker.told(worker.records.end_claim(ClaimId(self.claims.pop(op.key))))
                self.next()
            case phase:
                raise AssertionError(phase)

    def _start(self, op: Op) -> None:
        worker = self.worker
        match op.what:
            case "use" | "hold":
                self._start_load(op)
            case "state":
                worker.ask(self._acquire(op), self)
            case "send":
                self._send(op)
            case "receive":
                self._receive(op)
            case "prefetch":
                worker.ask(self._acquire(op), None)
                self.next()
            case "charge":
                rid = worker.next_rid()
                worker.ask(Charge(rid, op.pool, op.key or "p", op.size, FOREVER_S), self)
            case "lock":
                self._lock(op)
            case "unlock":
                resident = self.residents.get(op.key)
                if resident is not None:
                    resident.locked = False
                    if resident.wanted:
                        self.offload(resident)
                self.next()
            case "invalidate":
                worker.ask(Invalidate(worker.next_rid(), op.key, FOREVER_S), self)
            case "limit":
                worker.ask(Limit(worker.next_rid(), op.pool, op.size), self)
            case "pin":
                worker.ask(Pin(worker.next_rid(), op.key), self)
            case "unpin":
                worker.ask(Unpin(worker.next_rid(), op.key), self)
            case "evict_all":
                worker.ask(Evict(worker.next_rid(), None), self)
            case "end":
                claim = self.claims.pop(op.key, None)
                if claim is not None:
                    worker.told(worker.records.end_claim(ClaimId(claim)))
                self.next()
            case "drop":
                self.kept.pop(op.key, None)
                self.next()
            case "uncharge":
                for gen, lease in self.charges:
                    worker.send(Release(gen, lease))
                self.charges = []
                self.next()
            case "evict":
                worker.records.evict(op.key)
                self.next()
            case "shutdown":
                worker.records.close()
                self.next()
            case what:
                raise AssertionError(what)

    def _send(self, op: Op) -> None:
        """Send tensors of its own, if it has them. They are kept until they are received."""
        mapping = self.kept.get(op.key)
        if mapping is not None:
            parcel = Parcel(mapping.gen, op.key, self.worker.session, mapping)
            self.worker.host.parcels.append(parcel)
        self.next()

    def _arrived(self, op: Op) -> Parcel | None:
        parcels = self.worker.host.parcels
        return next((one for one in parcels if one.key == op.key and not one.taken), None)

    def _receive(self, op: Op) -> None:
        """Have what was sent: by the map that is here, or by a lease on its generation."""
        worker, parcel = self.worker, self._arrived(op)
        assert parcel is not None
        self.parcel, parcel.taken = parcel, True
        mapping = worker.table.get(parcel.gen)
        if mapping is not None and worker._lives(mapping):
            self.kept[op.key] = mapping
            self.next()
        else:
            worker.ask(Receive(worker.next_rid(), parcel.gen), self)

    def _lock(self, op: Op) -> None:
        resident, copy_of = self.residents.get(op.key), self.copy_of
        if op.shared and copy_of is None:
            self.next()  # there is nothing to be locked: its load has failed
            return
        if resident is not None and resident.copy_of == copy_of:
            resident.locked = True
            self.next()
            return
        if resident is not None:
            self.offload(resident)
        rid = self.worker.next_rid()
        if copy_of is None or self.worker.shares(copy_of):
            self.worker.ask(Charge(rid, op.pool, op.key, op.size, FOREVER_S), self)
        else:
            self.worker.ask(Acquire(rid, op.key, None, copy_of, FOREVER_S, pool=op.pool), self)

    def offload(self, resident: Resident) -> None:
        """Take a module from its device, and give the room back."""
        key = next(key for key, found in self.residents.items() if found is resident)
        del self.residents[key]
        self.worker.send(Release(resident.gen, resident.lease))

    def _start_load(self, op: Op) -> None:
        worker = self.worker
        if worker.records.closed:
            self.next()
            return
        claim = self._claim(op)
        if worker.records.claim(op.key, self._origin(op), ClaimId(claim)) is not None:
            self._claimed(op)
            return
        del self.claims[op.key]
        if op.key in worker.flights:
            self.phase = "flight"
            return
        worker.flights[op.key] = self.index
        worker.ask(self._acquire(op), self)

    def _acquire(self, op: Op) -> Acquire:
        files = self.worker.host.files
        source = None if op.build else files.get(op.key, op.fingerprint or f"{op.key}/1")
        version = op.fingerprint if op.build else ""
        prefetch = op.prefetch or op.what == "prefetch"
        return Acquire(self.worker.next_rid(), op.key, source, version, FOREVER_S, prefetch)

    def _has_bytes(self, op: Op) -> None:
        records, mapping = self.worker.records, self.mapping
        if op.what == "receive":
            self.kept[op.key] = mapping
            self.next()
            return
        if op.what == "state":
            records.outdate(op.key, mapping.gen)
            self.kept[op.key] = mapping
            self.next()
            return
        claim = self._claim(op)
        if records.adopt(op.key, mapping.gen, self._origin(op), ClaimId(claim)) is not None:
            self.land()
            self._claimed(op)
            return
        del self.claims[op.key]
        self.phase = "assembled"

    def _claimed(self, op: Op) -> None:
        if op.what == "hold":
            self.next()
        else:
            self.phase, self.mapping = "claimed", None

    def _claim(self, op: Op) -> int:
        self.worker.ids += 1
        self.claims[op.key] = self.worker.ids
        return self.worker.ids

    def _origin(self, op: Op) -> Origin:
        return Origin("build" if op.build else "source", op.fingerprint)
