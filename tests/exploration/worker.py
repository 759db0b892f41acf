"""A worker of a modelled host: its reader, its keeper, its maps and its real records.

What cannot be pure in the product is modelled in the few lines that matter: a connection is two
queues, a map lives as long as something refers to it, and the keeper does one thing at a time.
What its threads do is in `thread`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from coordinator.ledger.events import Attached, Disconnected, Offer, Resumed
from coordinator.ledger.recovery import cannot_be
from coordinator.ledger.state import State
from gpu_worker.records import Record, Records
from shm_store.keys import GenerationId, version_fingerprint
from shm_store.wire import (
    Abort,
    Ack,
    Cancel,
    Charge,
    Commit,
    Done,
    Fail,
    Grant,
    HeldCharge,
    Release,
    Revoke,
    Space,
    Ticket,
)
from tests.exploration.parts import Action, Mapping, Op, Request, Resident, Violation

if TYPE_CHECKING:
    from tests.exploration.host import Host
    from tests.exploration.thread import Thread


@dataclass(slots=True, eq=False)
class Worker:
    """One process: what its client, keeper and records know, and its threads.

    Attributes:
        to, out: what is on its way to it, and from it.
        said: delivered ACQUIREs, which a fault may replay.
        table: the map of each generation that takes its grants; `mappings` are all that exist.
        flights: which thread loads a key.
    """

    host: Host
    session: int
    threads: list[Thread] = field(default_factory=list)
    to: list[Any] = field(default_factory=list)
    out: list[Any] = field(default_factory=list)
    said: list[Any] = field(default_factory=list)
    requests: dict[int, Request] = field(default_factory=dict)
    table: dict[GenerationId, Mapping] = field(default_factory=dict)
    mappings: list[Mapping] = field(default_factory=list)
    keeper: list[tuple[Any, ...]] = field(default_factory=list)
    flights: dict[str, int] = field(default_factory=dict)
    records: Records[Mapping] = field(default_factory=Records)
    ids: int = 0
    rids: int = 0
    alive: bool = True
    connected: bool = True

    def actions(self) -> Iterator[Action]:
        """Yield what its reader, its keeper and its threads can do next."""
        if not self.connected and self.host.world.resumes and self._may_come_back():
            yield ("reconnect", self.session)
        if self.to:
            yield ("reader", self.session)
        if self.keeper:
            yield ("keeper", self.session)
        for thread in self.threads:
            if thread.can_go_on():
                yield ("thread", self.session, thread.index)

    def _may_come_back(self) -> bool:
        """Say whether nothing is being freed that it has: else the server has it come again."""
        table = self.host.ledger.generations
        stated = (table.get(mapping.gen) for mapping in self.mappings)
        return not any(known and known.state is State.FREEING for known in stated)

    # --- for its threads --------------------------------------------------------------------------

    def may_ask(self, op: Op) -> bool:
        """Say whether a load may begin: its process has let go of what it was asked for before.

        Else its new lease overtakes the RELEASE of the old one, and a head that waits for that
        waits for ever.
        """
        hit = op.what != "state" and op.key in self.records._current
        return hit or not any(
            mapping.key == op.key and mapping.asked == "room" for _, mapping, *_ in self.keeper
        )

    def shares(self, copy_of: GenerationId) -> bool:
        """Say whether a thread has memory on the device that is a copy of this, or waits for it."""
        there = any(resident.copy_of == copy_of for _, resident in self._residents())
        return there or any(
            thread.phase != "start" and thread.op.what == "lock" and thread.copy_of == copy_of
            for thread in self.threads
        )

    def next_rid(self) -> int:
        self.rids += 1
        return self.rids

    def ask(self, message: Any, thread: Thread | None) -> None:
        """Send a request that `thread` waits for, if any does."""
        request = Request(message.rid, None if thread is None else thread.index)
        request.private = isinstance(message, Charge)
        if thread is not None:
            thread.phase, thread.rid = "asked", message.rid
        if not self.connected:
            self._answered(request, None)
            return
        self.requests[message.rid] = request
        self.send(message)

    def send(self, message: Any) -> None:
        if self.connected:
            self.out.append(message)

    def told(self, ended: list[Record[Mapping]]) -> None:
        """What was watched is looked at again by the keeper."""
        self._make_room(ended)
        for record in ended:
            self.keeper.append(("rested", record.module))

    def _make_room(self, idle: list[Record[Mapping]]) -> None:
        """What is to make room and idle is gone: nobody has its module."""
        for record in idle:
            if record.going == "room":
                self._evicts(record.generation)
                self.records.lose(record)

    def do_thread(self, index: int) -> None:
        """A thread takes its next step."""
        self.threads[index].step()
        self.records.check()

    # --- the reader -------------------------------------------------------------------------------

    def do_reader(self) -> None:
        """The reader takes one message."""
        message = self.to.pop(0)
        match message:
            case Ticket(rid, gen):
                request = self.requests.get(rid)
                if request is None:
                    return
                request.gen = gen
                if request.thread is not None:
                    thread = self.threads[request.thread]
                    thread.phase, thread.gen = "build", gen
            case Space(gen):
                for request in self.requests.values():
                    if request.gen == gen and request.thread is not None:
                        request.space = True
                        self.threads[request.thread].phase = "fill"
                        return
                self.send(Abort(gen))
            case Grant(rid, gen):
                self._granted(self._expected(rid), gen)
            case Fail(rid):
                self._answered(self._expected(rid), message)
            case Done(rid):
                self._answered(self._expected(rid), message)
            case Revoke(gen, lease, asked):
                asked = "" if asked == "keep" else asked
                mapping = self.table.get(gen)
                if mapping is not None and mapping.lease == lease:
                    mapping.asked = asked
                    self.keeper.append(("revoke", mapping, lease, asked))
                self._revoke_charge(gen, lease, asked)

    def _expected(self, rid: int) -> Request:
        request = self.requests.get(rid)
        if request is None:
            raise Violation(f"request {rid} of {self.session} was answered twice, or never asked")
        return request

    def _granted(self, request: Request, gen: GenerationId) -> None:
        thread = None if request.thread is None else self.threads[request.thread]
        if thread is not None and thread.op.what == "charge":
            thread.charges.append((gen, request.rid))
            self._answered(request, "charged")
            return
        if thread is not None and thread.op.what == "lock":
            copy_of = None if request.private else thread.copy_of
            resident = Resident(gen, request.rid, thread.op.size, copy_of)
            thread.residents[thread.op.key] = resident
            self._answered(request, "charged")
            return
        mapping = self.table.get(gen)
        if mapping is not None and mapping in self.mappings and self._lives(mapping):
            self._take_over(mapping, request.rid)
        elif thread is not None or mapping is not None:
            mapping = Mapping(gen, thread.op.key if thread else mapping.key, request.rid)
            self.mappings.append(mapping)
            self.table[gen] = mapping
        if mapping is None:
            self._give_back(gen, request.rid)
        self._answered(request, mapping)

    def _give_back(self, gen: GenerationId, lease: int) -> None:
        """Rule 5: a grant that nobody wants any more is released."""
        self.send(Release(gen, lease))

    def _take_over(self, mapping: Mapping, lease: int) -> None:
        """Rule 3: the map that is there takes the new lease. What was asked of the old is void."""
        mapping.lease = lease
        mapping.asked = ""

    def _answered(self, request: Request, reply: Any) -> None:
        """Close a request, and wake who waits for it."""
        self.requests.pop(request.rid, None)
        if isinstance(reply, Fail) and request.space:
            self.send(Abort(request.gen))  # what could not be sealed
        if request.thread is None:
            return
        thread = self.threads[request.thread]
        if isinstance(reply, Mapping):
            thread.phase, thread.mapping = "granted", reply
            return
        if isinstance(reply, Done) and thread.op.what == "invalidate":
            for worker in self.host.workers:
                worker.check_invalidated(thread.op.key, request.retires)
        thread.land()
        thread.next()

    def _revoke_charge(self, gen: GenerationId, lease: int, asked: str) -> None:
        """A charge is held by its thread until that is done with it; on a device, while locked."""
        for thread, resident in self._residents():
            if (resident.gen, resident.lease) == (gen, lease):
                resident.wanted = asked if asked != "idle" else ""
                if resident.wanted and not resident.locked:
                    thread.offload(resident)
                elif asked:
                    self.send(Ack(gen, lease, asked, asked == "idle" and not resident.locked))
                return
        if asked and any((gen, lease) in thread.charges for thread in self.threads):
            self.send(Ack(gen, lease, asked))

    def _residents(self) -> list[tuple[Thread, Resident]]:
        return [(thread, one) for thread in self.threads for one in thread.residents.values()]

    # --- the keeper -------------------------------------------------------------------------------

    def do_keeper(self) -> None:
        """The keeper does the next thing in its queue."""
        match self.keeper.pop(0):
            case ("unmap", mapping):
                self.mappings.remove(mapping)
                if self.table.get(mapping.gen) is mapping:
                    del self.table[mapping.gen]
                self.send(Release(mapping.gen, mapping.lease))
            case ("revoke", mapping, lease, asked):
                self._revoked(mapping, lease, asked)
            case ("look" | "rested" as why, mapping):
                if self._lives(mapping) and mapping.asked in ("idle", "room"):
                    self._serve(mapping, rested=why == "rested")
            case ("settled", mapping, lease, asked):
                if mapping.lease == lease and self._lives(mapping):
                    self.send(Ack(mapping.gen, lease, asked))

    def _revoked(self, mapping: Mapping, lease: int, asked: str) -> None:
        if not self._lives(mapping) or (mapping.lease, mapping.asked) != (lease, asked):
            return
        if not asked:
            self.records.keep(mapping.gen)
        elif asked == "stale":
            self.records.retire(mapping.gen)
            # Behind what that lets go of.
            self.collect()
            self.keeper.append(("settled", mapping, lease, asked))
        elif not self._serve(mapping, rested=False):
            self.send(Ack(mapping.gen, lease, asked))

    def _serve(self, mapping: Mapping, *, rested: bool) -> bool:
        """Let go, or say that nothing uses it, as was asked; say whether that was possible.

        `rested` says that its record was idle a moment ago.
        """
        seen = self.records.look(mapping.gen)
        mapping.watched = self._others_use(mapping)
        if mapping.watched:
            return False
        if mapping.asked == "idle" and (rested or seen is None or not seen[1]):
            self.send(Ack(mapping.gen, mapping.lease, "idle", idle=True))
            mapping.asked = ""
            return True
        if mapping.asked == "idle":
            return False
        self._make_room(self.records.make_room(mapping.gen))
        self.collect()
        self.keeper.append(("settled", mapping, mapping.lease, "room"))
        return True

    def collect(self) -> None:
        """What nothing refers to any more goes to the keeper, as finalizers have it."""
        queued = [item[1] for item in self.keeper if item[0] == "unmap"]
        for mapping in self.mappings:
            if mapping.watched and not self._others_use(mapping):
                mapping.watched = False
                self.keeper.append(("look", mapping))
            if mapping not in queued and not self._lives(mapping):
                self.keeper.append(("unmap", mapping))

    # --- who uses a map ---------------------------------------------------------------------------

    def _lives(self, mapping: Mapping) -> bool:
        """Say whether anything refers to a map."""
        records = self.records
        held = [*records._current.values(), *records.used()]
        return any(record.module is mapping for record in held) or self._is_handed_out(mapping)

    def _others_use(self, mapping: Mapping) -> bool:
        """Say whether anything but the current record uses a map."""
        current = self.records._current.values()
        return self._is_handed_out(mapping) or any(
            record.module is mapping and all(record is not other for other in current)
            for record in self.records.used()
        )

    def _is_handed_out(self, mapping: Mapping) -> bool:
        """Say whether a thread has it: as tensors of its own, or for a record it is to make."""
        under_way = any(parcel.mapping is mapping for parcel in self.host.parcels)
        return under_way or any(
            thread.mapping is mapping or any(kept is mapping for kept in thread.kept.values())
            for thread in self.threads
        )

    # --- faults -----------------------------------------------------------------------------------

    def can_die(self) -> Iterator[Action]:
        if self.alive:
            yield ("die", self.session)

    def do_die(self) -> None:
        self.alive = False
        self.host.draining |= self.on_device()
        self.to, self.keeper = [], []
        self.table, self.mappings, self.records = {}, [], Records()
        self.requests, self.flights, self.said = {}, {}, []
        for thread in self.threads:
            thread.end()
        for parcel in self.host.parcels:
            if parcel.sender == self.session:
                parcel.mapping = None

    def on_device(self) -> dict[GenerationId, int]:
        """Return the bytes of every generation that it has on the device, or fills there."""
        there = {resident.gen: resident.size for _, resident in self._residents()}
        for request in self.requests.values():
            thread = None if request.thread is None else self.threads[request.thread]
            if request.space and request.gen and thread is not None and thread.op.shared:
                there[request.gen] = thread.op.size
        return there

    def can_disconnect(self) -> Iterator[Action]:
        if self.alive and self.connected:
            yield ("disconnect", self.session)

    def do_disconnect(self) -> None:
        """The worker cannot ask or release any more; what it has mapped stays."""
        self.lose()
        self.host.feed(Disconnected(self.session))

    def lose(self) -> None:
        """There is no connection any more. Who does not come back tells those who wait."""
        self.connected = False
        self.to, self.out, self.said = [], [], []
        if not self.host.world.resumes:
            for request in list(self.requests.values()):
                self._answered(request, None)

    def do_reconnect(self) -> None:
        """It comes back, states what it has, and asks anew for what it waits for."""
        if self.session not in self.host.ledger.sessions:
            pid = 1000 + self.session
            self.host.feed(Attached(self.session, pid, f"w{self.session}", "cpu", "worker"))
        self.connected = True
        waiting = list(self.requests.values())
        self.requests = {}
        fills, committed = [], []
        for request in waiting:
            thread = None if request.thread is None else self.threads[request.thread]
            if thread is not None and request.space and not thread.op.shared:
                request.rid = thread.rid = self.next_rid()
                self.requests[request.rid] = request
                fills.append(self._stated_fill(request, thread))
                committed += [request.gen] if thread.phase == "asked" else []
        maps, charges = tuple(self._stated_maps()), tuple(self._stated_charges())
        lie = cannot_be(self.host.ledger, self.session, maps, fills, charges)
        if lie is not None:
            raise Violation(f"{self.session} is not believed: {lie}")
        name = f"w{self.session}"
        self.host.feed(Resumed(self.session, name, "cpu", maps, tuple(fills), charges))
        for gen in committed:
            self.send(Commit(gen))
        for request in waiting:
            if request.thread is not None and request not in self.requests.values():
                self.threads[request.thread].ask_again()

    def _stated_maps(self) -> Iterator[Offer]:
        for gen in dict.fromkeys(mapping.gen for mapping in self.mappings):
            mapping = self.table.get(gen) or next(m for m in self.mappings if m.gen == gen)
            stale = mapping.asked == "stale"
            yield replace(self.host.sealed[gen], lease=mapping.lease, stale=stale)
        for _, one in self._residents():
            if one.copy_of is not None:
                stale = one.wanted == "stale"
                yield replace(self.host.sealed[one.gen], lease=one.lease, stale=stale)

    def _stated_fill(self, request: Request, thread: Thread) -> Offer:
        op, gen = thread.op, request.gen
        size = self.host.world.sizes[op.key]
        fingerprint = version_fingerprint(op.fingerprint)
        return Offer(gen, request.rid, op.key, fingerprint, size, gen in self.host.sealed)

    def _stated_charges(self) -> Iterator[HeldCharge]:
        for thread in self.threads:
            for gen, lease in thread.charges:
                begun = thread.program.ops[: thread.pc + 1]
                op = next(op for op in reversed(begun) if op.what == "charge")
                yield HeldCharge(gen, lease, op.pool, op.key or "p", op.size)

        for thread in self.threads:
            for key, resident in thread.residents.items():
                if resident.copy_of is None:
                    yield HeldCharge(resident.gen, resident.lease, "vram", key, resident.size)
                if resident.wanted == "room":
                    resident.wanted = ""

    def can_unmapped(self) -> Iterator[Action]:
        if self.alive and self.to and isinstance(self.to[0], Grant):
            mapping = self.table.get(self.to[0].gen)
            if mapping is None or not self._lives(mapping):
                yield ("unmapped", self.session)

    def do_unmapped(self) -> None:
        """What was granted cannot be mapped: the worker gives it back, and its asker hears why."""
        grant = self.to.pop(0)
        request = self._expected(grant.rid)
        mapping = self.table.get(grant.gen)
        if mapping is None:
            self._give_back(grant.gen, grant.rid)
        else:
            mapping.lease = grant.rid  # the old map is still there: its end is the lease's
        self._answered(request, None)

    def can_cancel(self) -> Iterator[Action]:
        for thread in self.threads:
            if self.alive and thread.phase in ("asked", "build", "fill"):
                yield ("cancel", self.session, thread.index)

    def do_cancel(self, index: int) -> None:
        """A thread gives its request up, as by an exception from outside."""
        thread = self.threads[index]
        request = self.requests[thread.rid]
        request.thread = None
        if request.gen is not None and (request.space or not request.reserved):
            self.send(Abort(request.gen))
        else:
            self.send(Cancel(request.rid))
        thread.land()
        thread.next()

    def can_fork(self) -> Iterator[Action]:
        if self.alive and self.mappings:
            yield ("fork", self.session)

    def do_fork(self) -> None:
        """A child has what is mapped here, until nothing of it uses that; then it says so.

        It is a session of its own, whose maps nobody counts before it has stated them.
        """
        child = Worker(self.host, len(self.host.workers), rids=self.rids, connected=False)
        for mapping in self.mappings:
            copy = replace(mapping, lease=child.next_rid(), watched=False)
            child.mappings.append(copy)
            child.table[copy.gen] = copy
        self.host.workers.append(child)

    # --- what must hold ---------------------------------------------------------------------------

    def _evicts(self, gen: GenerationId) -> None:
        """No eviction frees nothing: nobody makes room with what another holds for ever.

        That is said of holders who were never idle: a use may begin right after its process said
        that there was none.
        """
        for other in self.host.world.keeps - {self.session}:
            worker = self.host.workers[other]
            if worker.alive and any(record.generation == gen for record in worker.records.used()):
                raise Violation(f"{self.session} lets go of {gen}, and {other} never will")

    def check_invalidated(self, key: str, retired: tuple[GenerationId, ...]) -> None:
        """Rule 9: once INVALIDATE is answered, no process hands the retired generations out."""
        for _, resident in self._residents():
            told = any(isinstance(m, Revoke) and m.gen == resident.gen for m in self.to)
            if resident.gen in retired and not (resident.locked or told) and self.connected:
                raise Violation(f"{self.session} still has {resident.gen} of {key!r} at hand")
        record = self.records._current.get(key)
        if self.connected and record is not None and record.generation in retired:
            # Who was granted it meanwhile hears of it right behind the GRANT; who comes back after
            # nobody was waited for any more, and was not known of, behind his statement.
            unknown = self.host.lives > 1 and not self.host.world.store
            heard = [item[1] for item in self.keeper if item[0] == "revoke"]
            late = (unknown and record.module in heard) or any(
                isinstance(m, Grant | Revoke) and m.gen == record.generation for m in self.to
            )
            if not late:
                raise Violation(f"{self.session} still hands out {record.generation} of {key!r}")
