"""A whole host as one value: the ledger, its executor, loaders, and workers with their threads.

The ledger and the worker's records are the real ones. What cannot be pure in the product (sockets,
maps, garbage collection, the keeper's queue) is modelled here in the few lines that matter: two
queues per connection, maps that live as long as something refers to them, a keeper that does one
thing at a time. `System.actions` lists everything that can happen next, `System.perform` does it.

A world's threads run small programs (`Op`s), looped or once. Faults have budgets.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

from coordinator.ledger import apply, deadlines, eviction, new_ledger
from coordinator.ledger.events import (
    Attached,
    Back,
    Backed,
    BackingRefused,
    Disconnected,
    Effect,
    Event,
    Exit,
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
from coordinator.ledger.state import RUNNING, State
from gpu_worker.records import ClaimId, Origin, Record, Records
from shm_store.errors import SourceChanged
from shm_store.keys import GenerationId
from shm_store.wire import (
    Abort,
    Ack,
    Acquire,
    Cancel,
    Cause,
    Charge,
    Commit,
    Done,
    Evict,
    Fail,
    Filling,
    Grant,
    Invalidate,
    Limit,
    Pin,
    Release,
    Reserve,
    Revoke,
    Space,
    Ticket,
    Unpin,
)
from tests.exploration.parts import (
    FAULTS,
    FOREVER_S,
    QUEUE,
    WAITING,
    Action,
    Mapping,
    Op,
    Request,
    Thread,
    Violation,
    Worker,
    World,
)


class System:
    """The state of a world, and what can become of it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ledger = new_ledger(1, dict(world.limits))
        self.workers = [Worker([Thread() for _ in programs]) for programs in world.programs]
        self.jobs: list[tuple[str, Any]] = []
        self.loaders: dict[GenerationId, list[str]] = {}
        self.files: dict[str, str] = {}
        self.bytes_from: dict[GenerationId, str] = {}
        self.last_asked: dict[str, str] = {}
        """The fingerprint of the last ACQUIRE that was not a repetition, by key."""
        self.faults = dict(world.faults)
        self.now_s = 0.0
        for session in range(len(self.workers)):
            self._feed(Attached(session, 1000 + session, f"w{session}", "cpu", "worker"))

    def image(self) -> bytes:
        """Return this state as bytes, from which `of` makes copies."""
        world, self.world = self.world, None
        try:
            return pickle.dumps(self, pickle.HIGHEST_PROTOCOL)
        finally:
            self.world = world

    @staticmethod
    def of(image: bytes, world: World) -> System:
        """Return the system of an image."""
        system = pickle.loads(image)
        assert isinstance(system, System)
        system.world = world
        return system

    # --- what can happen --------------------------------------------------------------------------

    def actions(self) -> list[Action]:
        """Return everything that can happen next. Faults are last."""
        found: list[Action] = []
        for session, worker in enumerate(self.workers):
            if worker.out and (worker.connected or not worker.alive):
                found.append(("channel", session))
            if not worker.alive:
                if not worker.out and session in self.ledger.sessions:
                    found.append(("pidfd", session))
                continue
            if worker.to:
                found.append(("reader", session))
            if worker.keeper:
                found.append(("keeper", session))
            for index, thread in enumerate(worker.threads):
                if self._can_go_on(session, worker, index, thread):
                    found.append(("thread", session, index))
        found += [("job", *job) for job in self.jobs]
        found += [("loader", gen) for gen, steps in self.loaders.items() if steps[0] != "waits"]
        return found + list(self._faults())

    def _can_go_on(self, session: int, worker: Worker, index: int, thread: Thread) -> bool:
        if thread.phase in ("asked", "done", "over"):
            return False
        if thread.phase == "start" and (len(worker.keeper) >= QUEUE or len(worker.out) >= QUEUE):
            return False
        op = self._op(session, index)
        if thread.phase == "flight" and op.key in worker.flights:
            return False
        if thread.phase in ("start", "flight") and op.what in ("use", "hold", "state"):
            return self._may_ask(worker, op)
        return True

    def _may_ask(self, worker: Worker, op: Op) -> bool:
        """Say whether a load may begin: its process has let go of what it was asked for before.

        Else its new lease overtakes the RELEASE of the old one, and a head that waits for that
        waits for ever.
        """
        hit = op.what != "state" and op.key in worker.records._current
        return hit or not any(
            mapping.key == op.key and mapping.asked == "room" for _, mapping, *_ in worker.keeper
        )

    def _faults(self) -> Iterator[Action]:
        for name, left in self.faults.items():
            if left > 0:
                yield from getattr(self, f"_can_{name}")()

    def _can_die(self) -> Iterator[Action]:
        return (("die", s) for s, worker in enumerate(self.workers) if worker.alive)

    def _can_disconnect(self) -> Iterator[Action]:
        return (("disconnect", s) for s, w in enumerate(self.workers) if w.alive and w.connected)

    def _can_cancel(self) -> Iterator[Action]:
        for session, worker in enumerate(self.workers):
            for index, thread in enumerate(worker.threads):
                if worker.alive and thread.phase in ("asked", "build", "fill"):
                    yield ("cancel", session, index)

    def _can_deadline(self) -> Iterator[Action]:
        for session, rid in self.ledger.requests:
            request = self.ledger.requests[session, rid]
            if deadlines._deadline_s(self.ledger, request) is not None:
                yield ("deadline", session, rid)
        yield from (("deadline", w.session, w.rid) for w in self.ledger.invalidations)

    def _can_overdue(self) -> Iterator[Action]:
        if deadlines._unanswered(self.ledger):
            yield ("overdue",)

    def _can_replay(self) -> Iterator[Action]:
        for session, worker in enumerate(self.workers):
            if worker.alive and worker.connected:
                yield from (("replay", session, index) for index in range(len(worker.said)))

    def _can_kill(self) -> Iterator[Action]:
        return (("kill", gen) for gen in self.loaders)

    def _can_clock(self) -> Iterator[Action]:
        yield ("clock",)

    def _can_nomem(self) -> Iterator[Action]:
        return (("nomem", gen) for kind, gen in self.jobs if kind == "back")

    def _can_unsealed(self) -> Iterator[Action]:
        return (("unsealed", gen) for kind, gen in self.jobs if kind == "seal")

    def _can_unmapped(self) -> Iterator[Action]:
        for session, worker in enumerate(self.workers):
            if worker.alive and worker.to and isinstance(worker.to[0], Grant):
                mapping = worker.table.get(worker.to[0].gen)
                if mapping is None or not self._alive(worker, mapping):
                    yield ("unmapped", session)

    def _can_change(self) -> Iterator[Action]:
        return (("change", key) for key in self.world.sizes)

    # --- doing it ---------------------------------------------------------------------------------

    def perform(self, action: Action) -> None:
        """Do one thing, and everything that follows from it at once.

        Raises:
            Violation: something came to be that must not.
        """
        name, *arguments = action
        if name in FAULTS:
            self.faults[name] -= 1
        getattr(self, f"_do_{name}")(*arguments)
        for session, worker in enumerate(self.workers):
            if worker.alive:
                self._collect(session, worker)

    def _do_channel(self, session: int) -> None:
        """The coordinator reads one message."""
        worker = self.workers[session]
        message = worker.out.pop(0)
        if isinstance(message, Acquire) and "replay" in self.world.faults:
            worker.said.append(message)
        self._said(session, message)

    def _said(self, session: int, message: Any) -> None:
        fingerprint = ""
        if isinstance(message, Acquire) and message.source is not None:
            # The name of the source stands for the state of the file as the asker opened it.
            fingerprint = message.source
        known = self.ledger.sessions.get(session)
        if isinstance(message, Acquire) and known is not None and message.rid > known.last_rid:
            self.last_asked[message.key] = fingerprint or f"build:{message.version}"
        asked = self.workers[session].requests.get(getattr(message, "rid", 0))
        if isinstance(message, Invalidate) and asked is not None:
            asked.retires = tuple(g.id for g in self.ledger.by_key.get(message.key, ()))
        self._feed(Said(session, message, fingerprint))

    def _do_pidfd(self, session: int) -> None:
        self._feed(SessionEnded(session))

    def _do_job(self, kind: str, gen: GenerationId) -> None:
        self.jobs.remove((kind, gen))
        match kind:
            case "back":
                self._feed(Backed(gen))
            case "seal":
                self._feed(Sealed(gen))
            case _:
                self._feed(Freed(gen))

    def _do_loader(self, gen: GenerationId) -> None:
        """A loader takes its next step."""
        steps = self.loaders[gen]
        step = steps[0]
        key, fingerprint = steps[1], steps[2]
        if step == "starts":
            steps[0] = "waits"
            self._feed(LoaderSaid(gen, Reserve(gen, self.world.sizes[key])))
        elif step == "fills":
            # It says what it has read only if the file is still the one that was asked for.
            changed = key in self.files and self.files[key] != fingerprint
            del self.loaders[gen]
            self.bytes_from[gen] = self.files.get(key, fingerprint)
            if changed and self._loader_compares():
                cause = Cause.of(SourceChanged("changed", source=key))
                self._feed(LoaderSaid(gen, Abort(gen, cause)))
            else:
                self._feed(LoaderSaid(gen, Commit(gen)))
            self._feed(LoaderEnded(gen, "ended"))

    def _loader_compares(self) -> bool:
        """Rule 8. A mutant says no."""
        return True

    def _do_kill(self, gen: GenerationId) -> None:
        del self.loaders[gen]
        self._feed(LoaderEnded(gen, "was killed"))

    def _do_clock(self) -> None:
        """The host was asleep, past every deadline."""
        self.now_s += 2 * FOREVER_S
        self._feed(TimePassed())

    def _do_nomem(self, gen: GenerationId) -> None:
        """The kernel has no memory for a segment, or the coordinator no fd."""
        self.jobs.remove(("back", gen))
        self._feed(BackingRefused(gen, "no memory"))

    def _do_unsealed(self, gen: GenerationId) -> None:
        self.jobs.remove(("seal", gen))
        self._feed(SealRefused(gen, "busy"))

    def _do_unmapped(self, session: int) -> None:
        """What was granted cannot be mapped: the worker gives it back, and its asker hears why."""
        worker = self.workers[session]
        grant = worker.to.pop(0)
        request = self._expected(session, grant.rid)
        mapping = worker.table.get(grant.gen)
        if mapping is None:
            self._give_back(worker, grant.gen, grant.rid)
        else:
            mapping.lease = grant.rid  # the old map is still there: its end is the lease's
        self._answered(session, request, None)

    def _do_change(self, key: str) -> None:
        self.files[key] = f"{key}/changed"

    def _do_die(self, session: int) -> None:
        worker = self.workers[session]
        worker.alive = False
        worker.to, worker.keeper = [], []
        worker.table, worker.mappings, worker.records = {}, [], Records()
        worker.requests, worker.flights, worker.said = {}, {}, []
        for thread in worker.threads:
            self._over(thread)

    def _do_disconnect(self, session: int) -> None:
        """The worker cannot ask or release any more; what it has mapped stays."""
        worker = self.workers[session]
        worker.connected = False
        worker.to, worker.out, worker.said = [], [], []
        for request in list(worker.requests.values()):
            self._answered(session, request, None)
        self._feed(Disconnected(session))

    def _do_deadline(self, session: int, rid: int) -> None:
        request = self.ledger.requests.get((session, rid))
        if request is not None:
            request.timeout_s = -1e6
        for invalidating in self.ledger.invalidations:
            if (invalidating.session, invalidating.rid) == (session, rid):
                invalidating.deadline_s = self.now_s - 1.0
        self._feed(TimePassed())

    def _do_overdue(self) -> None:
        for lease in deadlines._unanswered(self.ledger):
            lease.asked_s = self.now_s - 2 * eviction.REVOKE_PATIENCE_S
        self._feed(TimePassed())

    def _do_replay(self, session: int, index: int) -> None:
        self._said(session, self.workers[session].said[index])

    # --- the coordinator's executor ---------------------------------------------------------------

    def _feed(self, event: Event) -> None:
        before = {name: pool.in_use_bytes for name, pool in self.ledger.pools.items()}
        ready = {key: self.ledger.ready(key) for key in self.world.sizes}
        wanted = [
            generation for generation in self.ledger.running.values() if not generation.doomed
        ]
        for effect in apply(self.ledger, event, self.now_s):
            self._effect(effect)
        for name, pool in self.ledger.pools.items():
            if pool.in_use_bytes > max(pool.limit_bytes, before[name]):
                raise Violation(f"{name!r} went from {before[name]} to {pool.in_use_bytes}")
        invalidates = isinstance(event, Said) and isinstance(event.message, Invalidate)
        may_doom = invalidates or isinstance(event, SealRefused | Disconnected)
        for generation in wanted:
            last = generation.fingerprint == self.last_asked.get(generation.key)
            if generation.doomed and last and not may_doom:
                raise Violation(f"{generation.id} is doomed, and is what was asked for last")
        for key, old in ready.items():
            new = self.ledger.ready(key)
            if old is not None and new is not None and new.id < old.id:
                raise Violation(f"{new.id} of {key!r} took the place of the newer {old.id}")

    def _effect(self, effect: Effect) -> None:
        match effect:
            case Send(session, message, _):
                worker = self.workers[session]
                if worker.alive and not isinstance(message, Filling):
                    worker.to.append(message)
            case StartLoader(gen, key, _, fingerprint):
                self.loaders[gen] = ["starts", key, fingerprint]
                if "load" not in self.world.slow:
                    self._do_loader(gen)
            case SendSpace(message):
                if message.gen in self.loaders:
                    self.loaders[message.gen][0] = "fills"
                    if "load" not in self.world.slow:
                        self._do_loader(message.gen)
            case Back(gen):
                self._job("back", gen)
            case Seal(gen):
                self._job("seal", gen)
            case Free(gen):
                self.loaders.pop(gen, None)
                self.jobs = [job for job in self.jobs if job[1] != gen]
                self._job("free", gen)
            case Forget() | Exit():
                pass

    def _job(self, kind: str, gen: GenerationId) -> None:
        self.jobs.append((kind, gen))
        if kind not in self.world.slow:
            self._do_job(kind, gen)

    # --- a worker's reader ------------------------------------------------------------------------

    def _do_reader(self, session: int) -> None:
        """The worker's reader takes one message."""
        worker = self.workers[session]
        message = worker.to.pop(0)
        match message:
            case Ticket(rid, gen):
                request = worker.requests.get(rid)
                if request is None:
                    return
                request.gen = gen
                if request.thread is not None:
                    thread = worker.threads[request.thread]
                    thread.phase, thread.gen = "build", gen
            case Space(gen):
                for request in worker.requests.values():
                    if request.gen == gen and request.thread is not None:
                        request.space = True
                        worker.threads[request.thread].phase = "fill"
                        return
                self._send(worker, Abort(gen))
            case Grant(rid, gen):
                self._granted(session, self._expected(session, rid), gen)
            case Fail(rid):
                self._answered(session, self._expected(session, rid), message)
            case Done(rid):
                self._answered(session, self._expected(session, rid), message)
            case Revoke(gen, lease, asked):
                mapping = worker.table.get(gen)
                if mapping is not None and mapping.lease == lease:
                    mapping.asked = asked
                    worker.keeper.append(("revoke", mapping, lease, asked))
                self._revoke_charge(session, gen, lease, asked)

    def _expected(self, session: int, rid: int) -> Request:
        request = self.workers[session].requests.get(rid)
        if request is None:
            raise Violation(f"request {rid} of {session} was answered twice, or never asked")
        return request

    def _granted(self, session: int, request: Request, gen: GenerationId) -> None:
        worker = self.workers[session]
        thread = None if request.thread is None else worker.threads[request.thread]
        if thread is not None and self._op(session, request.thread).what == "charge":
            thread.charges.append((gen, request.rid))
            self._answered(session, request, "charged")
            return
        mapping = worker.table.get(gen)
        if mapping is not None and mapping in worker.mappings and self._alive(worker, mapping):
            self._take_over(mapping, request.rid)
        elif thread is not None or mapping is not None:
            mapping = Mapping(
                gen, self._op(session, request.thread).key if thread else mapping.key, request.rid
            )
            worker.mappings.append(mapping)
            worker.table[gen] = mapping
        if mapping is None:
            self._give_back(worker, gen, request.rid)
        self._answered(session, request, mapping)

    def _give_back(self, worker: Worker, gen: GenerationId, lease: int) -> None:
        """Rule 5: a grant that nobody wants any more is released."""
        self._send(worker, Release(gen, lease))

    def _take_over(self, mapping: Mapping, lease: int) -> None:
        """Rule 3: the map that is there takes the new lease. What was asked of the old is void."""
        mapping.lease = lease
        mapping.asked = ""

    def _answered(self, session: int, request: Request, reply: Any) -> None:
        """Close a request, and wake who waits for it."""
        worker = self.workers[session]
        worker.requests.pop(request.rid, None)
        if isinstance(reply, Fail) and request.space:
            self._send(worker, Abort(request.gen))  # what could not be sealed
        if request.thread is None:
            return
        thread = worker.threads[request.thread]
        op = self._op(session, request.thread)
        if isinstance(reply, Mapping):
            thread.phase, thread.mapping = "granted", reply
            return
        if isinstance(reply, Done) and op.what == "invalidate":
            self._check_invalidated(op.key, request.retires)
        self._land(worker, op, request.thread)
        self._next(session, request.thread)

    # --- a worker's keeper ------------------------------------------------------------------------

    def _do_keeper(self, session: int) -> None:
        """The keeper does the next thing in its queue."""
        worker = self.workers[session]
        match worker.keeper.pop(0):
            case ("unmap", mapping):
                worker.mappings.remove(mapping)
                if worker.table.get(mapping.gen) is mapping:
                    del worker.table[mapping.gen]
                self._send(worker, Release(mapping.gen, mapping.lease))
            case ("revoke", mapping, lease, asked):
                self._revoked(session, worker, mapping, lease, asked)
            case ("look" | "rested" as why, mapping):
                if self._alive(worker, mapping) and mapping.asked in ("idle", "room"):
                    self._serve(session, worker, mapping, rested=why == "rested")
            case ("settled", mapping, lease, asked):
                if mapping.lease == lease and self._alive(worker, mapping):
                    self._send(worker, Ack(mapping.gen, lease, asked))

    def _revoked(
        self, session: int, worker: Worker, mapping: Mapping, lease: int, asked: str
    ) -> None:
        if not self._alive(worker, mapping) or (mapping.lease, mapping.asked) != (lease, asked):
            return
        if asked == "stale":
            worker.records.retire(mapping.gen)
            # Behind what that lets go of.
            self._collect(session, worker)
            worker.keeper.append(("settled", mapping, lease, asked))
        elif not self._serve(session, worker, mapping, rested=False):
            self._send(worker, Ack(mapping.gen, lease, asked))

    def _serve(self, session: int, worker: Worker, mapping: Mapping, *, rested: bool) -> bool:
        """Let go, or say that nothing uses it, as was asked; say whether that was possible.

        `rested` says that its record was idle a moment ago.
        """
        seen = worker.records.look(mapping.gen)
        mapping.watched = self._others_use(worker, mapping)
        if mapping.watched:
            return False
        if mapping.asked == "idle" and (rested or seen is None or not seen[1]):
            self._send(worker, Ack(mapping.gen, mapping.lease, "idle", idle=True))
            mapping.asked = ""
            return True
        if mapping.asked == "idle":
            return False
        if worker.records.make_room(mapping.gen):
            self._evicts(session, mapping.gen)
        self._collect(session, worker)
        worker.keeper.append(("settled", mapping, mapping.lease, "room"))
        return True

    def _others_use(self, worker: Worker, mapping: Mapping) -> bool:
        """Say whether anything but the current record uses a map."""
        current = worker.records._current.values()
        return self._is_handed_out(worker, mapping) or any(
            record.module is mapping and all(record is not other for other in current)
            for record in worker.records.used()
        )

    def _is_handed_out(self, worker: Worker, mapping: Mapping) -> bool:
        """Say whether a thread has it: as tensors of its own, or for a record it is to make."""
        return any(
            thread.mapping is mapping or any(kept is mapping for kept in thread.kept.values())
            for thread in worker.threads
        )

    def _evicts(self, session: int, gen: GenerationId) -> None:
        """No eviction frees nothing: nobody makes room with what another holds for ever.

        That is said of holders who were never idle: a use may begin right after its process said
        that there was none.
        """
        for other in self.world.keeps - {session}:
            worker = self.workers[other]
            if worker.alive and any(record.generation == gen for record in worker.records.used()):
                raise Violation(f"{session} lets go of {gen}, and {other} never will")

    def _told(self, session: int, worker: Worker, ended: list[Record[Mapping]]) -> None:
        """What was watched is looked at again by the keeper."""
        for record in ended:
            if record.going == "room":
                self._evicts(session, record.generation)
            worker.keeper.append(("rested", record.module))

    def _revoke_charge(self, session: int, gen: GenerationId, lease: int, asked: str) -> None:
        """A charge is held by its thread until that is done with it."""
        worker = self.workers[session]
        if any((gen, lease) in thread.charges for thread in worker.threads):
            self._send(worker, Ack(gen, lease, asked))

    def _collect(self, session: int, worker: Worker) -> None:
        """What nothing refers to any more goes to the keeper, as finalizers have it."""
        queued = [item[1] for item in worker.keeper if item[0] == "unmap"]
        for mapping in worker.mappings:
            if mapping.watched and not self._others_use(worker, mapping):
                mapping.watched = False
                worker.keeper.append(("look", mapping))
            if mapping not in queued and not self._alive(worker, mapping):
                worker.keeper.append(("unmap", mapping))

    def _alive(self, worker: Worker, mapping: Mapping) -> bool:
        records = worker.records
        held = [*records._current.values(), *records.used()]
        return any(record.module is mapping for record in held) or self._is_handed_out(
            worker, mapping
        )

    # --- a worker's threads -----------------------------------------------------------------------

    def _op(self, session: int, index: int | None) -> Op:
        assert index is not None
        ops = self.world.programs[session][index].ops
        return ops[self.workers[session].threads[index].pc % len(ops)]

    def _next(self, session: int, index: int) -> None:
        """The thread comes to its next op, or is at the end of its program."""
        thread = self.workers[session].threads[index]
        program = self.world.programs[session][index]
        thread.pc += 1
        thread.phase, thread.gen, thread.mapping, thread.rid = "start", None, None, 0
        if thread.pc == len(program.ops):
            thread.pc = 0
            if not program.loops:
                thread.phase = "over"

    def _over(self, thread: Thread) -> None:
        thread.phase, thread.mapping, thread.gen = "over", None, None
        thread.claims, thread.kept, thread.charges = {}, {}, []

    def _do_thread(self, session: int, index: int) -> None:
        """A thread takes its next step."""
        worker = self.workers[session]
        thread = worker.threads[index]
        op = self._op(session, index)
        match thread.phase:
            case "start" | "flight":
                self._start(session, index, op)
            case "build":
                worker.requests[thread.rid].reserved = True
                self._send(worker, Reserve(thread.gen, self.world.sizes[op.key]))
                thread.phase = "asked"
            case "fill":
                self.bytes_from[thread.gen] = op.fingerprint
                self._send(worker, Commit(thread.gen))
                thread.phase = "asked"
            case "granted":
                self._has_bytes(session, index, op)
            case "assembled":
                record = Record(op.key, thread.mapping.gen, self._origin(op), thread.mapping)
                worker.records.admit(record, self._claim(worker, thread, op), thread.mapping.asked)
                self._land(worker, op, index)
                self._claimed(session, index, op)
            case "claimed":
                self._told(
                    session, worker, worker.records.end_claim(ClaimId(thread.claims.pop(op.key)))
                )
                self._next(session, index)
            case phase:
                raise AssertionError(phase)
        worker.records.check()

    def _start(self, session: int, index: int, op: Op) -> None:
        worker = self.workers[session]
        thread = worker.threads[index]
        match op.what:
            case "use" | "hold":
                if worker.records.closed:
                    self._next(session, index)
                    return
                claim = self._claim(worker, thread, op)
                if worker.records.claim(op.key, self._origin(op), ClaimId(claim)) is not None:
                    self._claimed(session, index, op)
                    return
                del thread.claims[op.key]
                if op.key in worker.flights:
                    thread.phase = "flight"
                    return
                worker.flights[op.key] = index
                self._acquire(session, index, op)
            case "state":
                self._acquire(session, index, op)
            case "prefetch":
                self._acquire(session, None, op)
                self._next(session, index)
            case "charge":
                rid = self._rid(worker)
                self._ask(session, index, Charge(rid, op.pool, op.key or "p", op.size, FOREVER_S))
            case "invalidate":
                self._ask(session, index, Invalidate(self._rid(worker), op.key, FOREVER_S))
            case "limit":
                self._ask(session, index, Limit(self._rid(worker), op.pool, op.size))
            case "pin":
                self._ask(session, index, Pin(self._rid(worker), op.key))
            case "unpin":
                self._ask(session, index, Unpin(self._rid(worker), op.key))
            case "evict_all":
                self._ask(session, index, Evict(self._rid(worker), None))
            case "end":
                claim = thread.claims.pop(op.key, None)
                if claim is not None:
                    self._told(session, worker, worker.records.end_claim(ClaimId(claim)))
                self._next(session, index)
            case "drop":
                thread.kept.pop(op.key, None)
                self._next(session, index)
            case "uncharge":
                for gen, lease in thread.charges:
                    self._send(worker, Release(gen, lease))
                thread.charges = []
                self._next(session, index)
            case "evict":
                worker.records.evict(op.key)
                self._next(session, index)
            case "shutdown":
                worker.records.close()
                self._next(session, index)
            case what:
                raise AssertionError(what)

    def _has_bytes(self, session: int, index: int, op: Op) -> None:
        worker = self.workers[session]
        thread = worker.threads[index]
        mapping = thread.mapping
        if op.what == "state":
            worker.records.outdate(op.key, mapping.gen)
            thread.kept[op.key] = mapping
            self._next(session, index)
            return
        claim = self._claim(worker, thread, op)
        if worker.records.adopt(op.key, mapping.gen, self._origin(op), ClaimId(claim)) is not None:
            self._land(worker, op, index)
            self._claimed(session, index, op)
            return
        del thread.claims[op.key]
        thread.phase = "assembled"

    def _claimed(self, session: int, index: int, op: Op) -> None:
        thread = self.workers[session].threads[index]
        if op.what == "hold":
            self._next(session, index)
        else:
            thread.phase, thread.mapping = "claimed", None

    def _claim(self, worker: Worker, thread: Thread, op: Op) -> int:
        worker.ids += 1
        thread.claims[op.key] = worker.ids
        return worker.ids

    def _origin(self, op: Op) -> Origin:
        return Origin("build" if op.build else "source", op.fingerprint)

    def _land(self, worker: Worker, op: Op, index: int) -> None:
        if worker.flights.get(op.key) == index:
            del worker.flights[op.key]

    def _rid(self, worker: Worker) -> int:
        worker.rids += 1
        return worker.rids

    def _acquire(self, session: int, index: int | None, op: Op) -> None:
        worker = self.workers[session]
        source = None if op.build else self.files.get(op.key, op.fingerprint or f"{op.key}/1")
        version = op.fingerprint if op.build else ""
        rid = self._rid(worker)
        prefetch = op.prefetch or op.what == "prefetch"
        self._ask(session, index, Acquire(rid, op.key, source, version, FOREVER_S, prefetch))

    def _ask(self, session: int, index: int | None, message: Any) -> None:
        worker = self.workers[session]
        request = Request(message.rid, index)
        if index is not None:
            thread = worker.threads[index]
            thread.phase, thread.rid = "asked", message.rid
        if not worker.connected:
            self._answered(session, request, None)
            return
        worker.requests[message.rid] = request
        self._send(worker, message)

    def _send(self, worker: Worker, message: Any) -> None:
        if worker.connected:
            worker.out.append(message)

    def _do_cancel(self, session: int, index: int) -> None:
        """The thread gives its request up, as by an exception from outside."""
        worker = self.workers[session]
        thread = worker.threads[index]
        request = worker.requests[thread.rid]
        request.thread = None
        if request.gen is not None and (request.space or not request.reserved):
            self._send(worker, Abort(request.gen))
        else:
            self._send(worker, Cancel(request.rid))
        self._land(worker, self._op(session, index), index)
        self._next(session, index)

    # --- what must hold ---------------------------------------------------------------------------

    def waiting(self) -> list[tuple[int, int]]:
        """Return the threads that others must move."""
        return [
            (session, index)
            for session, worker in enumerate(self.workers)
            if worker.alive and worker.connected
            for index, thread in enumerate(worker.threads)
            if thread.phase in WAITING
        ]

    def violations(self) -> list[str]:
        """Return what must not be in any state, beside the ledger's own invariants."""
        found = []
        for session, worker in enumerate(self.workers):
            known = self.ledger.sessions.get(session)
            leases = {} if known is None else {gen: lease.id for gen, lease in known.leases.items()}
            if not worker.alive:
                continue
            for mapping in worker.mappings:
                if mapping.gen not in leases:
                    found.append(f"{session} maps {mapping.gen} without a lease")
            for thread in worker.threads:
                filled = self.ledger.generations.get(thread.gen) if thread.phase == "fill" else None
                if thread.phase == "fill" and (filled is None or filled.state is State.FREEING):
                    found.append(f"{session} fills {thread.gen}, which nobody counts")
            for gen, lease in leases.items():
                if not worker.connected or self._accounted(worker, gen, lease):
                    continue
                found.append(f"{session} leases {gen} ({lease}), and knows nothing of it")
            for record in worker.records._current.values():
                handled = ("revoke", record.module) not in [item[:2] for item in worker.keeper]
                if record.module.asked == "stale" and handled:
                    found.append(f"{session} hands out {record.generation}, which is retired")
            for message in worker.to:
                sent = (
                    self.ledger.generations.get(message.gen) if isinstance(message, Space) else None
                )
                if isinstance(message, Space) and (sent is None or sent.state is State.FREEING):
                    found.append(
                        f"{session} is sent the bytes of {message.gen}, which nobody counts"
                    )
            found += self._unanswered(session, worker)
            rids = {rid for owner, rid in self.ledger.requests if owner == session}
            for rid in rids - set(worker.requests):
                if worker.connected:
                    found.append(f"request {rid} of {session} is open, and its asker does not know")
        for gen, content in self.bytes_from.items():
            generation = self.ledger.generations.get(gen)
            ready = generation is not None and generation.state not in RUNNING
            asked = "" if generation is None else generation.fingerprint.removeprefix("build:")
            if ready and generation.leases and content != asked:
                found.append(f"{gen} is said to be {asked!r} and is {content!r}")
        return found

    def _unanswered(self, session: int, worker: Worker) -> list[str]:
        """Rule 5: what a worker waits for is known to the ledger, or on its way."""
        known = {rid for owner, rid in self.ledger.requests if owner == session}
        known |= {
            waiting.rid for waiting in self.ledger.invalidations if waiting.session == session
        }
        known |= {m.rid for m in (*worker.to, *worker.out) if hasattr(m, "rid")}
        lost = set(worker.requests) - known if worker.connected else set()
        return [f"request {rid} of {session} will never be answered" for rid in lost]

    def _accounted(self, worker: Worker, gen: GenerationId, lease: int) -> bool:
        """Say whether the worker knows of a lease, or will, or has just given it back."""
        if any(mapping.gen == gen for mapping in worker.mappings):
            return True
        if any((gen, lease) in thread.charges for thread in worker.threads):
            return True
        return any(isinstance(m, Grant) and m.gen == gen for m in worker.to) or any(
            isinstance(m, Release) and (m.gen, m.lease) == (gen, lease) for m in worker.out
        )

    def _check_invalidated(self, key: str, retired: tuple[GenerationId, ...]) -> None:
        """Rule 9: once INVALIDATE is answered, no process hands the retired generations out."""
        for session, worker in enumerate(self.workers):
            record = worker.records._current.get(key)
            if worker.connected and record is not None and record.generation in retired:
                # Who was granted it meanwhile hears of it right behind the GRANT.
                late = any(
                    isinstance(m, Grant | Revoke) and m.gen == record.generation for m in worker.to
                )
                if not late:
                    raise Violation(f"{session} still hands out {record.generation} of {key!r}")
