"""What operators ask for: pin, unpin, evict, drain, flush."""

from __future__ import annotations

from coordinator.ledger import admission
from coordinator.ledger.events import Exit
from coordinator.ledger.eviction import retained
from coordinator.ledger.report import generation_report
from coordinator.ledger.state import LOADER, Draining, Flushing, State
from coordinator.ledger.turn import Turn
from shm_store.errors import ArgumentRefused, DrainIncomplete, InUse, KeyRefused, ResourceError
from shm_store.errors import Draining as DrainingError
from shm_store.keys import Key, RequestId, SessionId, parse_key
from shm_store.wire import Done, Drain, Evict, Flushed

PINS_LIMIT = 4096


def pin(turn: Turn, session: SessionId, rid: RequestId, key: Key) -> None:
    """Protect the READY generations of `key`. Pinning twice is pinning once."""
    try:
        parse_key(key)
    except KeyRefused as error:
        turn.refuse(session, rid, error)
        return
    if key not in turn.ledger.pins and len(turn.ledger.pins) >= PINS_LIMIT:
        full = ResourceError(f"{PINS_LIMIT} keys are pinned already", remedy="unpin some")
        turn.refuse(session, rid, full)
        return
    turn.ledger.pins[key] = None
    turn.send(session, Done(rid, (key,)))


def unpin(turn: Turn, session: SessionId, rid: RequestId, key: Key) -> None:
    """Take a pin back; one that is not there is already gone."""
    was_pinned = key in turn.ledger.pins
    turn.ledger.pins.pop(key, None)
    turn.send(session, Done(rid, (key,) if was_pinned else ()))


def evict(turn: Turn, session: SessionId, message: Evict) -> None:
    """Free what nobody leases: one key by name, or everything that is not pinned."""
    ledger = turn.ledger
    if message.key is None:
        idle = [generation for name in ledger.pools for generation in retained(ledger, name)]
    else:
        key = message.key
        known = [g for g in ledger.by_key.get(key, ()) if g.state is not State.FREEING]
        idle = [generation for generation in known if generation.retained]
        if not known:
            unknown = ArgumentRefused(
                f"there are no weights {key!r}", remedy="see `weight-cache status`"
            )
            turn.refuse(session, message.rid, unknown)
            return
        if key in ledger.pins or not idle:
            why = ["pinned"] if key in ledger.pins else []
            remedies = ["take the pin back with `weight-cache unpin`"] if why else []
            if not idle:
                why.append("in use")
                remedies.append("let the holders finish")
            refusal = InUse(
                f"{key!r} is {' and '.join(why)}",
                holders=tuple(generation_report(ledger, g, turn.now_s) for g in known),
                remedy=" and ".join(remedies),
            )
            turn.refuse(session, message.rid, refusal)
            return
    for generation in idle:
        turn.free(generation)
    turn.send(session, Done(message.rid, tuple(generation.key for generation in idle)))


def flush(turn: Turn, session: SessionId, rid: RequestId) -> None:
    """Answer once everything that is FREEING now has been freed."""
    freeing = [
        generation.id
        for generation in turn.ledger.generations.values()
        if generation.state is State.FREEING
    ]
    turn.ledger.flushes.append(Flushing(session, rid, freeing))


def settle_flushes(turn: Turn) -> None:
    """Answer the flushes whose generations are gone."""
    waiting = []
    for flushing in turn.ledger.flushes:
        flushing.freeing = [gen for gen in flushing.freeing if gen in turn.ledger.generations]
        if flushing.freeing:
            waiting.append(flushing)
        else:
            turn.send(flushing.session, Flushed(flushing.rid))
    turn.ledger.flushes = waiting


def drain(turn: Turn, session: SessionId, message: Drain) -> None:
    """Take no new work from now on. Waiting requests fail, loaders end, pins protect no more."""
    ledger = turn.ledger
    ledger.drains.append(Draining(session, message.rid, turn.now_s + message.timeout_s))
    if ledger.draining:
        return
    ledger.draining = True
    for generation in list(ledger.running.values()):
        if generation.sealing:
            continue
        refusal = DrainingError("the coordinator is draining")
        if generation.owner == LOADER or generation.state is State.OPEN:
            admission.abandon(turn, generation, refusal, died=False)
            continue
        # A worker that fills goes on to its COMMIT; those who wait for it do not.
        for request in list(generation.askers.values()):
            if generation.owner is not request:
                turn.fail(request, refusal)


def settle_drain(turn: Turn) -> None:
    """Free what is no longer held; when nothing is left, say so and exit."""
    ledger = turn.ledger
    if not ledger.draining:
        return
    for generation in list(ledger.generations.values()):
        if generation.retained:
            turn.free(generation)
    if ledger.generations:
        return
    for draining in ledger.drains:
        turn.send(draining.session, Done(draining.rid))
    ledger.drains = []
    turn.do(Exit())


def expire_drains(turn: Turn) -> None:
    """Fail the drains whose deadline has come, with what is left. Draining goes on."""
    ledger = turn.ledger
    late = [draining for draining in ledger.drains if draining.deadline_s <= turn.now_s]
    ledger.drains = [draining for draining in ledger.drains if draining not in late]
    for draining in late:
        left = ledger.generations.values()
        count = len(left)
        error = DrainIncomplete(
            "1 generation is still held" if count == 1 else f"{count} generations are still held",
            holders=tuple(generation_report(ledger, g, turn.now_s) for g in left),
        )
        turn.refuse(draining.session, draining.rid, error)
