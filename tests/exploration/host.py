"""The coordinator's side of a modelled host: the real ledger, its executor, loaders and files.

The seam to the workers is their connections, which are two queues each: `said` takes what came out
of one, and what the ledger sends is put into the other. Nothing else of a worker is touched here.

Jobs of the executor have their outcome at once, or later where the world says that they are slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

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
    Keep,
    LoaderEnded,
    LoaderSaid,
    Offer,
    Recovered,
    Remember,
    Resumed,
    Said,
    Seal,
    Sealed,
    SealRefused,
    Send,
    SendSpace,
    SessionEnded,
    StartLoader,
    TimePassed,
    Unkeep,
)
from coordinator.ledger.state import OTHERS, State
from shm_store.errors import SourceChanged
from shm_store.keys import GenerationId
from shm_store.wire import RAM, Abort, Acquire, Cause, Commit, Filling, Invalidate, Receive, Reserve
from tests.exploration.parts import FOREVER_S, Action, Parcel, Violation, World

if TYPE_CHECKING:
    from tests.exploration.worker import Worker


class Host:
    """A host but for its workers' insides.

    Attributes:
        world: what it starts from, and how its jobs and programs go.
        jobs: what the executor is at.
        loaders: of each, its next step, and key and fingerprint of what it is to read.
        files: the state of each file that has changed.
        bytes_from: what is in a segment: the file's state, or the version of what was built.
        last_asked: the fingerprint of the last ACQUIRE that was not a repetition, by key.
        sealed: what each sealed segment says that it is, as long as there is one.
        store: those that outlive a coordinator; pins and limits do, too.
        ready: what was READY when a coordinator died, by key, until somebody retires it.
        over: what was retired, and may not be READY again.
        draining: bytes on devices of processes that ended, which those have not given back yet.
        parcels: what was sent from one process to another, and not received yet.
    """

    def __init__(self, world: World) -> None:
        """Start a coordinator; `attach` brings its workers."""
        self.world = world
        self.ledger = new_ledger(1, dict(world.limits))
        self.workers: list[Worker] = []
        self.jobs: list[tuple[str, Any]] = []
        self.loaders: dict[GenerationId, list[str]] = {}
        self.files: dict[str, str] = {}
        self.bytes_from: dict[GenerationId, str] = {}
        self.last_asked: dict[str, str] = {}
        self.now_s = 0.0
        self.lives = 1
        self.sealed: dict[GenerationId, Offer] = {}
        self.store: dict[GenerationId, Offer] = {}
        self.words = Remember((), {}, False)
        self.ready: dict[str, GenerationId] = {}
        self.over: set[GenerationId] = set()
        self.draining: dict[GenerationId, int] = {}
        self.parcels: list[Parcel] = []

    def attach(self, workers: list[Worker]) -> None:
        """Let all workers attach. The session of each is its place in the list."""
        self.workers = workers
        for session in range(len(workers)):
            self.feed(Attached(session, 1000 + session, f"w{session}", "cpu", "worker"))

    def actions(self) -> Iterator[Action]:
        """Yield what executor and loaders can do next."""
        yield from (("job", *job) for job in self.jobs if job[1] not in self.draining)
        yield from (("given_back", gen) for gen in self.draining)
        yield from (("loader", gen) for gen, steps in self.loaders.items() if steps[0] != "waits")
        if OTHERS in self.ledger.awaited:
            yield ("patience",)

    # --- messages and ends of processes -----------------------------------------------------------

    def do_channel(self, session: int) -> None:
        """The coordinator reads one message."""
        worker = self.workers[session]
        message = worker.out.pop(0)
        if isinstance(message, Acquire) and "replay" in self.world.faults:
            worker.said.append(message)
        self.said(session, message)

    def can_replay(self) -> Iterator[Action]:
        for session, worker in enumerate(self.workers):
            if worker.alive and worker.connected:
                yield from (("replay", session, index) for index in range(len(worker.said)))

    def do_replay(self, session: int, index: int) -> None:
        self.said(session, self.workers[session].said[index])

    def said(self, session: int, message: Any) -> None:
        """A message has arrived."""
        fingerprint = ""
        if isinstance(message, Acquire) and message.source is not None:
            # The name of the source stands for the state of the file as the asker opened it.
            fingerprint = message.source
        known = self.ledger.sessions.get(session)
        on_host = isinstance(message, Acquire) and message.pool == RAM
        if on_host and known is not None and message.rid > known.last_rid:
            self.last_asked[message.key] = fingerprint or f"build:{message.version}"
        asked = self.workers[session].requests.get(getattr(message, "rid", 0))
        if isinstance(message, Invalidate) and asked is not None:
            asked.retires = tuple(g.id for g in self.ledger.of_key(message.key))
        self.feed(Said(session, message, fingerprint))
        if isinstance(message, Receive):
            self._check_received(session, message)

    def _check_received(self, session: int, message: Receive) -> None:
        """What is under way is had by who receives it, unless nobody can say that it is there."""
        leased = (
            session in self.ledger.generations[message.gen].leases
            if (message.gen in self.ledger.generations)
            else False
        )
        if leased:
            return
        for parcel in self.parcels:
            sender = self.workers[parcel.sender]
            if parcel.gen == message.gen and parcel.taken and sender.alive and sender.connected:
                raise Violation(f"{session} cannot have {message.gen}, which is under way to it")

    def do_pidfd(self, session: int) -> None:
        self.feed(SessionEnded(session))

    # --- the ledger and its executor --------------------------------------------------------------

    def feed(self, event: Event) -> None:
        """Give the ledger an event, and do what it says.

        Raises:
            Violation: it did what no event may do.
        """
        before = {name: pool.in_use_bytes for name, pool in self.ledger.pools.items()}
        ready = {key: self.ledger.ready((RAM, key)) for key in self.world.sizes}
        wanted = [
            generation for generation in self.ledger.running.values() if not generation.doomed
        ]
        for effect in apply(self.ledger, event, self.now_s):
            self._effect(effect)
        self._check_ready()
        for name, pool in self.ledger.pools.items():
            stated = isinstance(event, Recovered | Resumed)
            if pool.in_use_bytes > max(pool.limit_bytes, before[name]) and not stated:
                raise Violation(f"{name!r} went from {before[name]} to {pool.in_use_bytes}")
        invalidates = isinstance(event, Said) and isinstance(event.message, Invalidate)
        may_doom = invalidates or isinstance(event, SealRefused | Disconnected | Resumed)
        for generation in wanted:
            asked = self.last_asked.get(generation.key)
            last = generation.pool == RAM and generation.fingerprint == asked
            if generation.doomed and last and not may_doom:
                raise Violation(f"{generation.id} is doomed, and is what was asked for last")
        for key, old in ready.items():
            new = self.ledger.ready((RAM, key))
            if old is not None and new is not None and new.id < old.id:
                raise Violation(f"{new.id} of {key!r} took the place of the newer {old.id}")

    def _effect(self, effect: Effect) -> None:
        match effect:
            case Send(session, message, _):
                worker = self.workers[session]
                if worker.alive and not isinstance(message, Filling):
                    worker.to.append(message)
            case StartLoader(gen, key, _, fingerprint):
                self._check_read(key, fingerprint)
                self.loaders[gen] = ["starts", key, fingerprint]
                if "load" not in self.world.slow:
                    self.do_loader(gen)
            case SendSpace(message):
                if message.gen in self.loaders:
                    self.loaders[message.gen][0] = "fills"
                    if "load" not in self.world.slow:
                        self.do_loader(message.gen)
            case Back(gen):
                self._job("back", gen)
            case Seal(gen):
                self._job("seal", gen)
            case Free(gen):
                self.loaders.pop(gen, None)
                self.jobs = [job for job in self.jobs if job[1] != gen]
                self._job("free", gen)
            case Keep(gen):
                self.store[gen] = self.sealed[gen]
            case Unkeep(gen):
                self.store.pop(gen, None)
            case Remember():
                self.words = effect
            case Forget() | Exit():
                pass

    def _check_ready(self) -> None:
        """What was retired stays so; what was READY stays that until somebody retires it.

        Without a store the next coordinator knows only from who has heard of it, and still has it.
        """
        told = {
            m.gen for w in self.workers if w.connected for m in w.mappings if m.asked == "stale"
        }
        for generation in self.ledger.generations.values():
            if generation.state in (State.RETIRED, State.FREEING):
                self.over.add(generation.id)
            elif generation.state is State.READY and generation.id in self.over | told:
                raise Violation(f"{generation.id} was retired, and is READY again")
        self.ready = {key: gen for key, gen in self.ready.items() if gen not in self.over}

    def _check_read(self, key: str, fingerprint: str) -> None:
        """Nothing is read again that is still here."""
        gen = self.ready.get(key)
        if gen is None or self.sealed[gen].fingerprint != fingerprint:
            return
        mapped = any(m.gen == gen for w in self.workers if w.alive for m in w.mappings)
        if mapped or gen in self.store:
            raise Violation(f"{key!r} is read again, and {gen} is still there")

    # --- its end, and the next one ----------------------------------------------------------------

    def can_crash(self) -> Iterator[Action]:
        yield ("crash", False)
        if any(kind == "seal" for kind, _ in self.jobs):
            yield ("crash", True)

    def do_crash(self, sealed: bool) -> None:
        """The coordinator dies, its children with it, and another one is started.

        What it was sealing is sealed by then, or not.
        """
        if sealed:
            for kind, gen in self.jobs:
                if kind == "seal":
                    self._is_sealed(gen)
        old, words = self.ledger, self.words
        self.jobs, self.loaders = [], {}
        self.ready = {
            key: g.id for key in self.world.sizes if (g := old.ready((RAM, key))) is not None
        }
        self.lives += 1
        self.ledger = new_ledger(self.lives, dict(self.world.limits))
        attached = []
        for session, worker in enumerate(self.workers):
            if worker.alive and session in old.sessions:
                attached.append((session, 1000 + session))
            worker.lose()
        if not self.world.store:
            self.store, self.over = {}, set()
            self.feed(Recovered(others=True, patience_s=FOREVER_S))
            return
        kept = tuple(self.store.values())
        limits_bytes = words.limits_bytes
        self.feed(Recovered(kept, tuple(attached), False, FOREVER_S, words.pins, limits_bytes))

    def can_impatient(self) -> Iterator[Action]:
        if self.ledger.awaited:
            yield ("impatient",)

    def do_impatient(self) -> None:
        """Who is awaited does not come in time."""
        self.ledger.awaited_until_s = self.now_s
        self.ready = {}
        self.feed(TimePassed())

    def do_patience(self) -> None:
        """Where nobody knows who is awaited, the wait always has this end."""
        self.do_impatient()

    def _is_sealed(self, gen: GenerationId) -> None:
        generation = self.ledger.generations[gen]
        facts = (generation.key, generation.fingerprint, generation.size_bytes)
        self.sealed[gen] = Offer(gen, 0, *facts, pool=generation.pool)

    def _job(self, kind: str, gen: GenerationId) -> None:
        self.jobs.append((kind, gen))
        if kind not in self.world.slow and gen not in self.draining:
            self.do_job(kind, gen)

    def do_job(self, kind: str, gen: GenerationId) -> None:
        self.jobs.remove((kind, gen))
        match kind:
            case "back":
                self.feed(Backed(gen))
            case "seal":
                self._is_sealed(gen)
                self.feed(Sealed(gen))
            case _:
                self.feed(Freed(gen))

    def can_nomem(self) -> Iterator[Action]:
        return (("nomem", gen) for kind, gen in self.jobs if kind == "back")

    def do_nomem(self, gen: GenerationId) -> None:
        """The kernel has no memory for a segment, or the coordinator no fd."""
        self.jobs.remove(("back", gen))
        self.feed(BackingRefused(gen, "no memory"))

    def can_unsealed(self) -> Iterator[Action]:
        return (("unsealed", gen) for kind, gen in self.jobs if kind == "seal")

    def do_unsealed(self, gen: GenerationId) -> None:
        self.jobs.remove(("seal", gen))
        self.feed(SealRefused(gen, "busy"))

    def do_given_back(self, gen: GenerationId) -> None:
        """A device has the memory back that a process had there."""
        del self.draining[gen]

    # --- loaders and files ------------------------------------------------------------------------

    def do_loader(self, gen: GenerationId) -> None:
        """A loader takes its next step."""
        steps = self.loaders[gen]
        step = steps[0]
        key, fingerprint = steps[1], steps[2]
        if step == "starts":
            steps[0] = "waits"
            self.feed(LoaderSaid(gen, Reserve(gen, self.world.sizes[key])))
        elif step == "fills":
            # It says what it has read only if the file is still the one that was asked for.
            changed = key in self.files and self.files[key] != fingerprint
            del self.loaders[gen]
            self.bytes_from[gen] = self.files.get(key, fingerprint)
            if changed and self._loader_compares():
                cause = Cause.of(SourceChanged("changed", source=key))
                self.feed(LoaderSaid(gen, Abort(gen, cause)))
            else:
                self.feed(LoaderSaid(gen, Commit(gen)))
            self.feed(LoaderEnded(gen, "ended"))

    def _loader_compares(self) -> bool:
        """Rule 8. A mutant says no."""
        return True

    def can_kill(self) -> Iterator[Action]:
        return (("kill", gen) for gen in self.loaders)

    def do_kill(self, gen: GenerationId) -> None:
        del self.loaders[gen]
        self.feed(LoaderEnded(gen, "was killed"))

    def can_change(self) -> Iterator[Action]:
        return (("change", key) for key in self.world.sizes)

    def do_change(self, key: str) -> None:
        self.files[key] = f"{key}/changed"

    # --- time -------------------------------------------------------------------------------------

    def can_deadline(self) -> Iterator[Action]:
        for session, rid in self.ledger.requests:
            request = self.ledger.requests[session, rid]
            if deadlines._deadline_s(self.ledger, request) is not None:
                yield ("deadline", session, rid)
        yield from (("deadline", w.session, w.rid) for w in self.ledger.invalidations)

    def do_deadline(self, session: int, rid: int) -> None:
        request = self.ledger.requests.get((session, rid))
        if request is not None:
            request.timeout_s = -1e6
        for invalidating in self.ledger.invalidations:
            if (invalidating.session, invalidating.rid) == (session, rid):
                invalidating.deadline_s = self.now_s - 1.0
        self.feed(TimePassed())

    def can_overdue(self) -> Iterator[Action]:
        if deadlines._unanswered(self.ledger):
            yield ("overdue",)

    def do_overdue(self) -> None:
        for lease in deadlines._unanswered(self.ledger):
            lease.asked_s = self.now_s - 2 * eviction.REVOKE_PATIENCE_S
        self.feed(TimePassed())

    def can_clock(self) -> Iterator[Action]:
        yield ("clock",)

    def do_clock(self) -> None:
        """The host was asleep, past every deadline."""
        self.now_s += 2 * FOREVER_S
        self.feed(TimePassed())
