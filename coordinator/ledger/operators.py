"""What is asked of the whole: pin, unpin, evict, invalidate, limit, copied, drain, flush."""

from __future__ import annotations

import shlex

from coordinator.ledger import admission, lifecycle
from coordinator.ledger.events import Exit
from coordinator.ledger.eviction import retained
from coordinator.ledger.report import generation_report, silent_text
from coordinator.ledger.state import (
    LOADER,
    OTHERS,
    Draining,
    Flushing,
    Invalidating,
    Ledger,
    State,
)
from coordinator.ledger.turn import Turn
from shm_store.errors import (
    ArgumentRefused,
    DrainIncomplete,
    InUse,
    InvalidateIncomplete,
    KeyRefused,
    ResourceError,
    listed,
)
from shm_store.errors import Draining as DrainingError
from shm_store.keys import GenerationId, Key, RequestId, SessionId, parse_key
from shm_store.wire import RAM, Copied, Done, Drain, Evict, Flushed, Invalidate, Limit

PINS_LIMIT = 4096
INVALIDATIONS_LIMIT = 64
"""Of one session."""


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
    turn.remember()
    turn.send(session, Done(rid, (key,)))


def unpin(turn: Turn, session: SessionId, rid: RequestId, key: Key) -> None:
    """Take a pin back; one that is not there is already gone."""
    was_pinned = key in turn.ledger.pins
    turn.ledger.pins.pop(key, None)
    turn.remember()
    turn.send(session, Done(rid, (key,) if was_pinned else ()))


def evict(turn: Turn, session: SessionId, message: Evict) -> None:
    """Free what nobody leases: one key by name, or everything that is not pinned."""
    ledger = turn.ledger
    if ledger.awaited:
        refusal = InUse(
            f"the coordinator was started again, and {silent_text(ledger)} may have them in use",
            remedy="try again in a moment",
        )
        turn.refuse(session, message.rid, refusal)
        return
    if message.key is None:
        idle = [generation for name in ledger.pools for generation in retained(ledger, name)]
    else:
        key = message.key
        known = [g for g in ledger.of_key(key) if g.state is not State.FREEING]
        idle = [generation for generation in known if generation.retained]
        if not known:
            turn.refuse(session, message.rid, _nothing_shared(turn, key))
            return
        if key in ledger.pins or not idle:
            why, remedies, quoted = [], [], shlex.quote(key)
            if key in ledger.pins:
                why.append("pinned")
                remedies.append(f"take the pin back: `weight-cache unpin {quoted}`")
            if not idle:
                why.append("in use")
                retire = f"`weight-cache invalidate {quoted}`"
                remedies.append(f"retire it, so that it goes where it is idle: {retire}")
            refusal = InUse(
                f"{key!r} is {' and '.join(why)}",
                holders=tuple(generation_report(ledger, g, turn.now_s) for g in known),
                remedy=" and ".join(remedies),
            )
            turn.refuse(session, message.rid, refusal)
            return
    for generation in idle:
        admission.let_go(turn, generation)
    keys = dict.fromkeys(generation.key for generation in idle)
    turn.send(session, Done(message.rid, tuple(keys)))


def _nothing_shared(turn: Turn, key: Key) -> ArgumentRefused | InUse:
    """Say why there is nothing of `key` to evict: what is private is its worker's alone."""
    own = tuple(
        generation_report(turn.ledger, generation, turn.now_s)
        for generation in turn.ledger.generations.values()
        if generation.private
        and generation.pool == RAM
        and generation.key == key
        and generation.leases
    )
    if not own:
        return ArgumentRefused(f"there are no weights {key!r}", remedy="see `weight-cache status`")
    pids = listed([f"pid {lease.pid}" for report in own for lease in report.leases])
    return InUse(
        f"{key!r} is private to {pids}",
        holders=own,
        remedy="retire it there, by `worker.evict` or `worker.invalidate`",
    )


def invalidate(turn: Turn, session: SessionId, message: Invalidate) -> None:
    """Retire what there is of a key, pinned or not, and doom what is being filled.

    It is answered when no process hands any of that out any more: those who wait for a doomed fill
    are to have had it, and to have heard that it is retired.
    """
    ledger = turn.ledger
    try:
        key = parse_key(message.key)
    except KeyRefused as error:
        turn.refuse(session, message.rid, error)
        return
    if sum(open.session == session for open in ledger.invalidations) >= INVALIDATIONS_LIMIT:
        flood = ResourceError(
            f"this process has {INVALIDATIONS_LIMIT} open invalidations already",
            remedy="wait for some of them",
        )
        turn.refuse(session, message.rid, flood)
        return
    running = ledger.filling((RAM, key))
    if running is not None:
        running.doomed = True
        admission.settle_unasked(turn, running)
    ready = ledger.ready((RAM, key))
    if ready is not None:
        lifecycle.retire(turn, ready)
    siblings = ledger.by_home.get((RAM, key), ())
    retired = [g.id for g in siblings if g.doomed or g.state is State.RETIRED]
    copies = lifecycle.retire_copies(turn, key)
    retired += [copy.id for copy in copies]
    known = running is not None or ready is not None or bool(copies)
    deadline_s = turn.now_s + message.timeout_s
    ledger.invalidations.append(Invalidating(session, message.rid, key, known, retired, deadline_s))


def settle_invalidations(turn: Turn) -> None:
    """Answer those whose holders have all heard of it, or have ended."""
    if turn.ledger.awaited:
        return  # those may have it, too
    waiting = []
    for invalidating in turn.ledger.invalidations:
        invalidating.retired = [
            gen for gen in invalidating.retired if _handed_out(turn.ledger, gen)
        ]
        if invalidating.retired:
            waiting.append(invalidating)
        else:
            keys = (invalidating.key,) if invalidating.known else ()
            turn.send(invalidating.session, Done(invalidating.rid, keys))
    turn.ledger.invalidations = waiting


def _handed_out(ledger: Ledger, gen: GenerationId) -> bool:
    """Say whether some process may not know yet that this generation is retired.

    Nobody is handed what is prefetched, and that may wait for room for ever.
    """
    generation = ledger.generations.get(gen)
    if generation is None:
        return False
    heard = all(lease.answer == "kept" for lease in generation.leases.values())
    return any(not asker.prefetch for asker in generation.askers.values()) or not heard


def limit(turn: Turn, session: SessionId, message: Limit) -> None:
    """Set a pool's limit. What is above it goes as soon as it is idle; nothing is taken away."""
    # A device's may be limited before anybody uses that.
    pool = lifecycle.make_pool(turn.ledger, message.pool, message.limit_bytes)
    if pool is None:
        pools = listed([repr(name) for name in turn.ledger.pools])
        unknown = ArgumentRefused(
            f"there is no pool {message.pool!r}", remedy=f"those there are: {pools}"
        )
        turn.refuse(session, message.rid, unknown)
        return
    pool.limit_bytes, pool.said_by = message.limit_bytes, "operator"
    turn.remember()
    turn.send(session, Done(message.rid))


def copied(turn: Turn, session: SessionId, message: Copied) -> None:
    """Charge the pages that processes have written to in their maps, as an audit saw them."""
    for pages in message.pages:
        generation = turn.ledger.generations.get(pages.gen)
        lease = None if generation is None else generation.leases.get(pages.session)
        if generation is not None and lease is not None and not generation.private:
            turn.copied(generation, lease, min(pages.size_bytes, generation.size_bytes))
    turn.send(session, Done(message.rid))


def flush(turn: Turn, session: SessionId, rid: RequestId) -> None:
    """Answer once everything on the host that is FREEING now has been freed.

    That takes the kernel milliseconds. A device has memory back when the last process that has it
    lets go, and that may be a stranger's child.
    """
    freeing = [
        generation.id
        for generation in turn.ledger.in_pool(RAM)
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
    turn.remember()
    for generation in list(ledger.parked.values()):
        for request in list(generation.askers.values()):
            turn.fail(request, _draining())
    for generation in list(ledger.running.values()):
        if generation.sealing:
            continue
        refusal = _draining()
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
        if generation.state is State.READY and not generation.private:
            lifecycle.retire(turn, generation)
        elif generation.private:
            for holder in list(generation.leases):
                turn.revoke(holder, generation, "stale")
    if ledger.generations or _may_hold_more(ledger):
        return
    for draining in ledger.drains:
        turn.send(draining.session, Done(draining.rid))
    ledger.drains = []
    turn.do(Exit())


def _may_hold_more(ledger: Ledger) -> bool:
    """Say whether somebody who was attached before has not spoken yet, known here or not."""
    silent = any(session.silent for session in ledger.sessions.values())
    return silent or OTHERS in ledger.awaited


def _draining() -> DrainingError:
    return DrainingError("the coordinator is draining")


def expire_invalidations(turn: Turn) -> None:
    """Fail those whose deadline has come, with who has not answered. What is retired stays so."""
    ledger = turn.ledger
    for late in [found for found in ledger.invalidations if found.deadline_s <= turn.now_s]:
        ledger.invalidations.remove(late)
        left = [ledger.generations[gen] for gen in late.retired if _handed_out(ledger, gen)]
        error = InvalidateIncomplete(
            f"{late.key!r} is retired, but not every process has said that it knows",
            holders=tuple(generation_report(ledger, g, turn.now_s) for g in left),
        )
        turn.refuse(late.session, late.rid, error)


def expire_drains(turn: Turn) -> None:
    """Fail the drains whose deadline has come, with what is left. Draining goes on."""
    ledger = turn.ledger
    late = [draining for draining in ledger.drains if draining.deadline_s <= turn.now_s]
    ledger.drains = [draining for draining in ledger.drains if draining not in late]
    for draining in late:
        left = ledger.generations.values()
        count = len(left)
        what = "1 generation is still held" if count == 1 else f"{count} generations are still held"
        if _may_hold_more(ledger):
            what = f"{what}; {silent_text(ledger)} may hold more"
        error = DrainIncomplete(
            what,
            holders=tuple(generation_report(ledger, g, turn.now_s) for g in left),
        )
        turn.refuse(draining.session, draining.rid, error)
