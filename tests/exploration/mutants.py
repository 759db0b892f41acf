"""One rule switched off at a time. Each must be caught in the worlds it names.

A mutant replaces one function of the ledger, of the records, or of the model of what is not pure in
the product. `how` is the fault in words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import coordinator.ledger as heart
from coordinator.ledger import admission, eviction, lifecycle, recovery
from coordinator.ledger import turn as turn_of_ledger
from coordinator.ledger.events import Unkeep
from coordinator.ledger.state import LEASABLE, Request, State
from coordinator.ledger.turn import Turn
from gpu_worker.records import Records
from shm_store.errors import Cancelled
from shm_store.keys import RequestId, SessionId, generation_id
from shm_store.wire import RAM, Receive
from tests.exploration.explore import Explored, explore
from tests.exploration.host import Host
from tests.exploration.parts import Op, Parcel, Resident
from tests.exploration.thread import Thread
from tests.exploration.worker import Worker
from tests.exploration.worlds import SMALL

_end_lease = Turn.end_lease


@dataclass(frozen=True)
class Mutant:
    """A rule that is off.

    Attributes:
        rule: its number in the protocol.
        world: the name of the world that must catch it.
        where, name: the function that is replaced by `instead`.
    """

    rule: int
    how: str
    world: str
    where: Any
    name: str
    instead: Callable[..., Any]

    @contextmanager
    def applied(self) -> Iterator[None]:
        with patch.object(self.where, self.name, self.instead):
            yield


def _stays_though_it_was_asked_for(self: Thread, resident: Resident) -> None:
    resident.wanted = False


def _goes_with_its_process(
    turn: Turn, session: Any, generation: Any, *, died: bool = False
) -> None:
    """Take a device's memory for free as soon as its process has ended."""
    _end_lease(turn, session, generation)


def _ends_with_its_connection(turn: Turn, session: Any) -> None:
    lifecycle.ended(turn, session)


def _releases_whatever_lease(turn: Turn, session: Any, message: Any) -> None:
    generation = turn.ledger.generations.get(message.gen)
    if generation is not None and generation.state in LEASABLE and session in generation.leases:
        turn.end_lease(session, generation)


def _releases_by_key(turn: Turn, session: Any, message: Any) -> None:
    named = turn.ledger.generations.get(message.gen)
    for generation in turn.ledger.of_key(named.key) if named else []:
        if generation.state in LEASABLE and session in generation.leases:
            turn.end_lease(session, generation)


def _takes_any_ack(turn: Turn, session: Any, message: Any) -> None:
    generation = turn.ledger.generations.get(message.gen)
    lease = generation.leases.get(session) if generation else None
    if lease is not None and lease.id == message.lease and lease.asked:
        lease.answer = "kept"


_said = heart._said


def _takes_replays(turn: Turn, event: Any) -> None:
    session = turn.ledger.sessions.get(event.session)
    if session is not None:
        session.last_rid = RequestId(0)
    _said(turn, event)


def _cancels_silently(turn: Turn, session: Any, message: Any) -> None:
    request = turn.ledger.requests.get((session, message.rid))
    if request is not None:
        admission.leave(turn, request, None)


def _cancels_a_fill(turn: Turn, session: Any, message: Any) -> None:
    request = turn.ledger.requests.get((session, message.rid))
    if request is not None:
        admission.leave(turn, request, Cancelled("given up"))


_acquire = admission.acquire


def _frees_what_another_fills(turn: Turn, session: Any, message: Any, source: Any) -> None:
    running = turn.ledger.filling((RAM, message.key))
    _acquire(turn, session, message, source)
    if running is not None and running.doomed and running.id in turn.ledger.running:
        admission.abandon(turn, running, None, died=False)


_sealed = lifecycle.sealed


def _hands_out_the_doomed(turn: Turn, generation: Any) -> None:
    generation.doomed = False
    _sealed(turn, generation)


_seat = admission.seat


def _dooms_when_seated_again(turn: Turn, request: Any, *, doomed: bool, deaths: int) -> Any:
    running = turn.ledger.filling(request.home)
    if running is not None and running.fingerprint != request.fingerprint:
        running.doomed = True
        admission.settle_unasked(turn, running)
    return _seat(turn, request, doomed=False, deaths=0)


_revoke = Turn.revoke


def _tells_nobody_of_retirement(self: Turn, session: Any, generation: Any, asked: Any) -> None:
    if asked != "stale":
        _revoke(self, session, generation, asked)


def _keeps_handing_out(self: Any, generation: Any) -> Any:
    return []


def _admits_as_if_nothing_was_asked(self: Any, record: Any, claim: Any, asked: Any = "") -> Any:
    return _admit(self, record, claim)


_admit = Records.admit
_grant = Turn.grant


def _grants_as_asked_before(self: Turn, request: Any, generation: Any) -> None:
    previous = generation.leases.get(request.session)
    _grant(self, request, generation)
    if previous is not None and not generation.private and generation.state is State.READY:
        lease = generation.leases[request.session]
        lease.asked, lease.answer = previous.asked, previous.answer


def _counts_what_was_asked_as_free(pool: Any, generation: Any) -> bool:
    return _fits(pool, generation) or any(
        other.coming and other.state is not State.FREEING for other in pool.queue
    )


_fits = admission._fits


def _waits_for_the_slow(ledger: Any, pool: Any, needed_bytes: int) -> Any:
    if any(g.coming and g.state is State.READY for g in ledger.in_pool(pool.name)):
        return []
    return _victims(ledger, pool, needed_bytes)


_victims = eviction.victims


def _no(*_: Any) -> bool:
    return False


_collect = Worker.collect


def _unmaps_only(self: Worker) -> None:
    for mapping in self.mappings:
        mapping.watched = False
    _collect(self)


def _nobody(*_: Any, **__: Any) -> list[Any]:
    return []


def _overtakes_in_its_own_pool(turn: Any, pool: Any) -> bool:
    others = dict(turn.ledger.pools)
    turn.ledger.pools = {pool.name: pool}
    try:
        return _admit_overtakers(turn, pool)
    finally:
        turn.ledger.pools = others


_admit_overtakers = admission._admit_overtakers


_holds_victim = admission._holds_victim
_waits_for_room = admission._waits_for_room


def _waits_for_the_idle(turn: Any, generation: Any, session: Any) -> bool:
    return _waits_for_room(turn, generation, session) and not generation.refused


def _parks_the_holder_too(turn: Any, generation: Any, session: Any) -> bool:
    pool = turn.ledger.pools[generation.pool]
    return generation.gives_way and admission._blocked_head(pool) is not None


def _asks_again_at_once(self: Worker, op: Any) -> bool:
    return True


def _leaves_the_old_lease(self: Worker, mapping: Any, lease: int) -> None:
    mapping.asked = ""


def _keeps_the_unwanted(self: Worker, gen: Any, lease: int) -> None:
    pass


def _frees_before_asking(turn: Turn, pool: Any, head: Any) -> None:
    """Revokes for a prefetch too."""
    head = None if head is None else head
    for victim in eviction.victims(turn.ledger, pool, 0 if head is None else head.size_bytes):
        admission.let_go(turn, victim)
    for generation in eviction.revocable(turn.ledger, pool, 0 if head is None else head.size_bytes):
        for session in list(generation.leases):
            turn.revoke(session, generation, "room")


def _awaits_nobody(turn: Turn, event: Any) -> None:
    recovered(turn, event)
    turn.ledger.awaited = {}
    recovery._end_if_complete(turn)


recovered = recovery.recovered


def _holds_nothing_back(turn: Turn, request: Any, *, doomed: bool, deaths: int) -> Any:
    """Loads at once what may yet be offered."""
    generation = _seat(turn, request, doomed=doomed, deaths=deaths)
    if generation.held:
        admission.start(turn, generation)
    return generation


def _keeps_what_is_not_stated(turn: Turn, event: Any) -> None:
    session = turn.ledger.sessions[event.session]
    kept = dict(session.leases)
    _resumed(turn, event)
    for gen, lease in kept.items():
        generation = turn.ledger.generations.get(gen)
        if gen not in session.leases and generation is not None:
            session.leases[gen] = generation.leases[session.id] = lease


_resumed = recovery.resumed


def _believes_every_offer(turn: Turn, offer: Any) -> Any:
    return turn.adopt(offer, State.READY)


def _answers_no_fill_that_is_ready(turn: Turn, session: Any, offer: Any) -> None:
    generation = turn.ledger.generations.get(offer.gen)
    if generation is None or generation.state is State.FILLING:
        _filling(turn, session, offer)


_filling = recovery._filling


def _states_no_fill(self: Any, request: Any, thread: Any) -> Any:
    return replace(_stated_fill(self, request, thread), gen=generation_id(1, 99))


_stated_fill = Worker._stated_fill


def _keeps_for_ever(self: Any, effect: Any) -> None:
    if not isinstance(effect, Unkeep):
        _effect(self, effect)


_effect = Host._effect


def _says_what_it_was_granted(turn: Turn, session: Any, lease: Any, generation: Any) -> None:
    """The lease keeps the id that the coordinator knows."""
    known = generation.leases.get(session)
    _lease(turn, session, lease if known is None else known.id, generation)


_lease = Turn.lease


def _names_by_key(self: Worker) -> Any:
    """States what is READY under the key of what it has."""
    for offer in _stated_maps(self):
        ready = self.host.ledger.ready(offer.home)
        if ready is not None:
            yield replace(offer, gen=ready.id)


def _states_nothing_on_devices(self: Worker) -> Any:
    return (offer for offer in _stated_maps(self) if offer.pool == RAM)


def _takes_any_copy(turn: Turn, request: Any, *, doomed: bool, deaths: int) -> Any:
    return _seat(turn, request, doomed=doomed and request.pool == RAM, deaths=deaths)


def _states_nothing_retired(self: Worker) -> Any:
    return (offer for offer in _stated_maps(self) if not offer.stale)


_stated_maps = Worker._stated_maps


def _begins_anew(start_ns: int, counter: int) -> str:
    return generation_id(1, counter)


def _receives_as_a_hit(turn: Turn, session: SessionId, message: Receive) -> None:
    generation = turn.ledger.generations[message.gen]
    facts = (generation.key, generation.fingerprint, None, 0.0, turn.now_s)
    admission.seat(turn, Request(session, message.rid, *facts), doomed=False, deaths=0)


def _keeps_nothing_that_it_has_sent(self: Thread, op: Op) -> None:
    mapping = self.kept.get(op.key)
    if mapping is not None:
        parcel = Parcel(mapping.gen, op.key, self.worker.session, None)
        self.worker.host.parcels.append(parcel)
    self.next()


MUTANTS = [
    Mutant(
        1,
        "a lost connection ends leases",
        "a holder loses its connection",
        lifecycle,
        "disconnected",
        _ends_with_its_connection,
    ),
    Mutant(
        2,
        "a RELEASE ends whatever lease there is",
        "asked again while the map lives",
        lifecycle,
        "release",
        _releases_whatever_lease,
    ),
    Mutant(
        3,
        "a map that is there keeps its old lease",
        "asked again while the map lives",
        Worker,
        "_take_over",
        _leaves_the_old_lease,
    ),
    Mutant(
        4, "a replay is taken for a request", "a frame comes twice", heart, "_said", _takes_replays
    ),
    Mutant(5, "CANCEL is not answered", "one gives up", admission, "cancel", _cancels_silently),
    Mutant(
        5, "CANCEL ends what is being filled", "one gives up", admission, "cancel", _cancels_a_fill
    ),
    Mutant(
        5, "an unwanted GRANT is kept", "one gives up", Worker, "_give_back", _keeps_the_unwanted
    ),
    Mutant(
        6,
        "a fill of another process is freed",
        "two fingerprints",
        admission,
        "acquire",
        _frees_what_another_fills,
    ),
    Mutant(
        6,
        "a doomed fill becomes READY",
        "two fingerprints",
        lifecycle,
        "sealed",
        _hands_out_the_doomed,
    ),
    Mutant(
        7,
        "a request that is seated again dooms",
        "two fingerprints from loaders",
        admission,
        "seat",
        _dooms_when_seated_again,
    ),
    Mutant(
        8, "the loader reads whatever is there", "the file changes", Host, "_loader_compares", _no
    ),
    Mutant(
        9,
        "holders of what is retired are not told",
        "invalidate",
        Turn,
        "revoke",
        _tells_nobody_of_retirement,
    ),
    Mutant(
        9,
        "a worker goes on handing out what is retired",
        "invalidate",
        Records,
        "retire",
        _keeps_handing_out,
    ),
    Mutant(
        9,
        "a record arrives fresh after its REVOKE",
        "invalidate",
        Records,
        "admit",
        _admits_as_if_nothing_was_asked,
    ),
    Mutant(
        9,
        "an ACK of one REVOKE is taken for that of the next",
        "invalidate what makes room",
        lifecycle,
        "ack",
        _takes_any_ack,
    ),
    Mutant(
        11,
        "a new grant starts as if it had been asked",
        "a holder asks for what it holds",
        Turn,
        "grant",
        _grants_as_asked_before,
    ),
    Mutant(
        11,
        "what was asked for counts as gone",
        "three keys, room for two",
        admission,
        "victims",
        _waits_for_the_slow,
    ),
    Mutant(
        11,
        "each of several holders lets go for himself",
        "one of two holders never lets go",
        admission,
        "doubtful",
        _nobody,
    ),
    Mutant(
        11,
        "a holder that was at work does not say when it is idle",
        "two holders, and a head",
        Worker,
        "told",
        _nobody,
    ),
    Mutant(
        11,
        "a holder of tensors does not say when they are gone",
        "an idle module beside tensors",
        Worker,
        "collect",
        _unmaps_only,
    ),
    Mutant(
        12,
        "a hit on what a holder keeps does not wait",
        "re-acquirers and a head",
        admission,
        "_waits_for_room",
        _waits_for_the_idle,
    ),
    Mutant(
        12,
        "a holder waits for what it holds",
        "a holder asks for what it holds",
        admission,
        "_waits_for_room",
        _parks_the_holder_too,
    ),
    Mutant(
        12,
        "a worker asks again before it has let go",
        "room for one of two",
        Worker,
        "may_ask",
        _asks_again_at_once,
    ),
    Mutant(13, "nothing overtakes", "a holder needs one more", admission, "_admit_overtakers", _no),
    Mutant(
        13,
        "only holders of the same pool overtake",
        "a circle through two pools",
        admission,
        "_admit_overtakers",
        _overtakes_in_its_own_pool,
    ),
    Mutant(
        12,
        "a hit waits for a head that waits for itself",
        "a head waits for its own asker, and a hit does not",
        admission,
        "_waits_for_itself",
        _no,
    ),
    Mutant(
        13,
        "nothing overtakes a head that waits for itself",
        "a head waits for its own asker, and what fits does not",
        admission,
        "_waits_for_itself",
        _no,
    ),
    Mutant(
        10,
        "what a process had on a device is free as soon as that has ended",
        "three on a device for two, one of which dies there",
        Turn,
        "end_lease",
        _goes_with_its_process,
    ),
    Mutant(
        30,
        "what was in use on a device when it was asked for stays there",
        "two take turns on a device, for ever",
        Thread,
        "offload",
        _stays_though_it_was_asked_for,
    ),
    Mutant(
        16,
        "what was found is freed while somebody may have it",
        "crash: invalidate",
        recovery,
        "recovered",
        _awaits_nobody,
    ),
    Mutant(
        16,
        "what may yet be offered is loaded",
        "crash without a store",
        admission,
        "seat",
        _holds_nothing_back,
    ),
    Mutant(
        17,
        "what a session does not state goes on",
        "a holder loses its connection, and comes back",
        recovery,
        "resumed",
        _keeps_what_is_not_stated,
    ),
    Mutant(
        17,
        "a lease keeps an id that its holder never heard of",
        "a holder loses its connection, and comes back",
        Turn,
        "lease",
        _says_what_it_was_granted,
    ),
    Mutant(
        18,
        "every map that is offered is READY",
        "crash: invalidate",
        recovery,
        "_adopt_sealed",
        _believes_every_offer,
    ),
    Mutant(
        19,
        "a fill that turns out to be READY is not answered",
        "crash: two builders",
        recovery,
        "_filling",
        _answers_no_fill_that_is_ready,
    ),
    Mutant(
        20,
        "a fill is not stated",
        "crash: two builders",
        Worker,
        "_stated_fill",
        _states_no_fill,
    ),
    Mutant(
        21,
        "what is retired stays in the store",
        "crash: invalidate",
        Host,
        "_effect",
        _keeps_for_ever,
    ),
    Mutant(
        22,
        "ids begin anew after a crash",
        "crash: two builders",
        turn_of_ledger,
        "generation_id",
        _begins_anew,
    ),
    Mutant(
        24,
        "a child states the key of what it has inherited",
        "a holder forks, and what it has is retired",
        Worker,
        "_stated_maps",
        _names_by_key,
    ),
    Mutant(
        24,
        "a child does not state what is retired",
        "a holder forks, and what it has is retired",
        Worker,
        "_stated_maps",
        _states_nothing_retired,
    ),
    Mutant(
        32,
        "a copy on a device stays READY though newer weights are",
        "a copy on a device, and newer weights",
        lifecycle,
        "retire_copies",
        _nobody,
    ),
    Mutant(
        32,
        "a copy of what is not READY any more is READY",
        "a copy on a device, and newer weights",
        admission,
        "seat",
        _takes_any_copy,
    ),
    Mutant(
        32,
        "an idle copy stays though it is invalidated",
        "a copy on a device is invalidated",
        Thread,
        "offload",
        _stays_though_it_was_asked_for,
    ),
    Mutant(
        32,
        "a lease on a copy on a device is not stated",
        "crash: a copy on a device",
        Worker,
        "_stated_maps",
        _states_nothing_on_devices,
    ),
    Mutant(
        33,
        "what is retired cannot be received",
        "sent, and retired on its way",
        lifecycle,
        "LEASABLE",
        (State.READY,),
    ),
    Mutant(
        33,
        "what was sent waits for room as a hit does",
        "sent, while another waits for room",
        lifecycle,
        "receive",
        _receives_as_a_hit,
    ),
    Mutant(
        33,
        "a sender lets go of what is under way",
        "sent, and retired on its way",
        Thread,
        "_send",
        _keeps_nothing_that_it_has_sent,
    ),
    Mutant(
        25,
        "a RELEASE ends what has the same key",
        "rolling replacement",
        lifecycle,
        "release",
        _releases_by_key,
    ),
]


def of_world(name: str) -> Explored:
    """Explore the world with this name."""
    (world,) = [world for world in SMALL if world.name == name]
    return explore(world)


def of_mutant(number: int) -> Explored:
    """Explore the world that is to catch a mutant, with it."""
    with MUTANTS[number].applied():
        return of_world(MUTANTS[number].world)
