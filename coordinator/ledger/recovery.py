"""What a coordinator finds that was started after another, and what sessions say that come back.

A session states what it has mapped, fills, or was charged; what it does not state it has no more.
What the store kept was READY.

While a session is *awaited* that was attached before, it may have mapped whatever nobody leases. So
nothing is freed, no byte is admitted, and what is missing is not loaded: it may yet be offered.
What is READY is granted. The wait ends when all have resumed or ended, or at its deadline: a
process may be stopped.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.ledger import admission, lifecycle
from coordinator.ledger.events import Offer, Recovered, Resumed
from coordinator.ledger.state import (
    LEASABLE,
    OTHERS,
    VRAM,
    Generation,
    Ledger,
    Pool,
    Request,
    Session,
    State,
)
from coordinator.ledger.turn import Turn
from shm_store.keys import (
    Fingerprint,
    RequestId,
    SessionId,
    version_fingerprint,
    was_given,
)
from shm_store.wire import RAM, Declare, HeldCharge


def recovered(turn: Turn, event: Recovered) -> None:
    """Take over what another coordinator has left. The first event of a ledger, or none."""
    ledger = turn.ledger
    ledger.pins = dict.fromkeys(event.pins)
    ledger.draining = event.draining
    for pool, limit_bytes in event.limits_bytes.items():
        if pool in ledger.pools or pool.startswith(VRAM):
            ledger.pools[pool] = Pool(pool, limit_bytes)
    for name, found_bytes in event.found_bytes.items():
        found = lifecycle.make_pool(ledger, name, found_bytes)
        if found is not None:
            found.found_bytes = found_bytes
    for session, pid in event.sessions:
        ledger.sessions[session] = Session(
            session, pid, "", "", "worker", connected=False, silent=True
        )
    ledger.awaited = dict.fromkeys(session for session, _ in event.sessions)
    if event.others:
        ledger.awaited[OTHERS] = None
    ledger.awaited_until_s = turn.now_s + event.patience_s
    for offer in event.segments:
        there = lifecycle.make_pool(ledger, offer.pool, 0)
        if there is not None and there.said_by == "sessions" and not there.found_bytes:
            there.limit_bytes += offer.size_bytes  # until somebody says what the device has
    # Of two of one key the newer was about to retire the other.
    for offer in sorted(event.segments, key=lambda offer: offer.gen, reverse=True):
        known = ledger.ready(offer.home)
        turn.adopt(offer, State.READY if known is None else State.RETIRED)
    for offer in event.segments:
        ready = ledger.ready((RAM, offer.key))
        if ready is not None:
            lifecycle.retire_copies(turn, offer.key, but=ready.id)
    _end_if_complete(turn)


def cannot_be(
    ledger: Ledger,
    session: SessionId | None,
    maps: Sequence[Offer],
    fills: Sequence[Offer],
    charges: Sequence[HeldCharge],
    devices: Sequence[Declare] = (),
) -> str | None:
    """Say what of the statement of `session` it cannot have; None if all of it can be.

    Taken for true it would be a lease on what has no bytes, or have the id of a generation that is
    still to come. A forked child has what its parent has, charges included, but for its fills.

    Args:
        session: None if it is a new one.
    """
    table = ledger.generations
    new = {device.pool for device in devices} - set(ledger.pools)
    for pool in sorted(new):
        if not lifecycle.may_be_pool(ledger, pool, len(new) - 1):
            return f"there can be no pool {pool!r}"
    everything: tuple[Offer | HeldCharge, ...] = (*maps, *fills, *charges)
    for stated in everything:
        if not was_given(stated.gen, ledger.start_ns, ledger.counter):
            return f"no coordinator has given the id {stated.gen!r}"
        known = table.get(stated.gen)
        if known is not None and known.key != stated.key:
            return f"{stated.gen} is of another key than {stated.key!r}"
        if known is not None and known.pool != stated.pool:
            return f"{stated.gen} is in {known.pool!r}, and not in {stated.pool!r}"
        if stated.pool not in ledger.pools and stated.pool not in new:
            return f"there is no pool {stated.pool!r}"
        if known is not None and known.private == isinstance(stated, Offer):
            return f"{stated.gen} is {'' if known.private else 'no '}private memory"
    for offer in maps:
        known = table.get(offer.gen)
        if known is None:
            continue
        # On the host a sealed preamble proves a COMMIT. Memory of a device says nothing itself.
        early = (State.OPEN, State.RESERVED, *([] if offer.pool == RAM else [State.FILLING]))
        if known.state in early:
            return f"{offer.gen} has no bytes yet that could be mapped"
        if offer.pool != RAM and known.size_bytes != offer.size_bytes:
            return f"{offer.gen} has {known.size_bytes} bytes, and not {offer.size_bytes}"
        if offer.pool != RAM and known.fingerprint != offer.fingerprint:
            return f"{offer.gen} is a copy of something else"
    for held in charges:
        known = table.get(held.gen)
        if known is not None and known.state not in (*LEASABLE, State.FREEING):
            return f"{held.gen} was not granted yet"
    for offer in fills:
        known = table.get(offer.gen)
        if known is not None and not _may_fill(known, session):
            return f"{offer.gen} is filled by another process"
    if len({offer.lease for offer in fills}) < len(fills):
        return "one request fills two generations"
    return None


def resumed(turn: Turn, event: Resumed) -> None:
    """A session is connected, again or for the first time, and has said all that it has."""
    ledger = turn.ledger
    session = ledger.sessions[event.session]
    session.connected, session.silent = True, False
    session.name, session.device = event.name, event.device
    stated = {offer.gen for offer in event.maps + event.fills}
    stated |= {held.gen for held in event.charges}
    for gen in [gen for gen in session.leases if gen not in stated]:
        turn.end_lease(session.id, ledger.generations[gen])
    for device in event.devices:
        lifecycle.declared(turn, session, device)
    fills = {offer.gen for offer in event.fills}
    for generation in ledger.owned_by(session.id):
        if generation.id not in fills and not generation.sealing:
            admission.abandon(turn, generation, None, died=False)
    for offer in event.maps:
        _mapped(turn, session.id, offer)
    for charge in event.charges:
        _charged(turn, session.id, charge)
    for offer in event.fills:
        _filling(turn, session.id, offer)
    heard(turn, session.id)


def heard(turn: Turn, session: SessionId) -> None:
    """A session has resumed, or ended: it is awaited no more."""
    if turn.ledger.awaited:
        turn.ledger.awaited.pop(session, None)
        _end_if_complete(turn)


def expire(turn: Turn) -> None:
    """Wait for the silent no longer. What they have comes back when they do."""
    until_s = turn.ledger.awaited_until_s
    if until_s is not None and until_s <= turn.now_s:
        turn.ledger.awaited = {}
        _end_if_complete(turn)


def _end_if_complete(turn: Turn) -> None:
    """Once nobody is awaited: free what nobody has, and load what nobody offered."""
    ledger = turn.ledger
    if ledger.awaited:
        return
    ledger.awaited_until_s = None
    for generation in list(ledger.generations.values()):
        if generation.state is State.RETIRED:
            turn.settle_retired(generation)
        elif generation.held:
            admission.start(turn, generation)


# --- what is stated -------------------------------------------------------------------------------


def _mapped(turn: Turn, session: SessionId, offer: Offer) -> None:
    """A process has `offer` mapped, so it is leased, whatever the table said of it."""
    generation = turn.ledger.generations.get(offer.gen)
    if generation is None:
        generation = _adopt_sealed(turn, offer)
    elif generation.state is State.FILLING:
        lifecycle.sealed(turn, generation)  # nobody maps it before its COMMIT
    elif generation.state is State.FREEING:
        # On a device, which has not got it back: a child was forked, and comes late.
        turn.move(generation, State.READY if _is_current(turn.ledger, offer) else State.RETIRED)
    turn.lease(session, offer.lease, generation)
    if offer.stale and generation.state is State.READY:
        lifecycle.retire(turn, generation)  # who stated it before had not heard


def _is_current(ledger: Ledger, offer: Offer) -> bool:
    """Say whether there is no other copy on that device, and what it is a copy of is READY."""
    host = ledger.ready((RAM, offer.key))
    copied = host is not None and offer.fingerprint == version_fingerprint(host.id)
    return copied and not offer.stale and ledger.ready(offer.home) is None


def _charged(turn: Turn, session: SessionId, held: HeldCharge) -> None:
    generation = turn.ledger.generations.get(held.gen)
    if generation is None:
        none = Fingerprint("")
        offer = Offer(held.gen, held.lease, held.key, none, held.size_bytes, pool=held.pool)
        generation = turn.adopt(
            offer,
            State.READY,
            private=True,
            fixed=held.fixed,
            copy_of=held.copy_of,
        )
    elif generation.state is State.FREEING:
        turn.move(generation, State.READY)  # its parent ended before this child was attached
    turn.lease(session, held.lease, generation)
    ready = turn.ledger.ready((RAM, held.key))
    if held.copy_of and ready is not None and ready.id != held.copy_of:
        turn.revoke(session, generation, "stale")  # newer weights came meanwhile


def _filling(turn: Turn, session: SessionId, offer: Offer) -> None:
    """A process fills `offer`, or has committed it, and waits for the answer."""
    ledger = turn.ledger
    generation = ledger.generations.get(offer.gen)
    if generation is None:
        generation = _adopt_sealed(turn, offer) if offer.sealed else _adopt_fill(turn, offer)
    rid = RequestId(offer.lease)
    request = Request(session, rid, offer.key, offer.fingerprint, None, 0.0, turn.now_s)
    turn.ask(request, generation)
    if generation.state is State.FILLING:
        if not generation.sealing:
            generation.owner = request
    else:
        turn.grant(request, generation)


def _adopt_sealed(turn: Turn, offer: Offer) -> Generation:
    """Take in a sealed segment: READY only if it can have been all along.

    Where there was a store, it was not: it would be there. Else the newest of a key was.
    """
    ledger = turn.ledger
    ready = ledger.ready(offer.home)
    known = OTHERS not in ledger.awaited or offer.stale or _invalidated(ledger, offer)
    if known or _filled(ledger, offer) or (ready is not None and ready.id > offer.gen):
        return turn.adopt(offer, State.RETIRED)
    generation = turn.adopt(offer, State.READY)
    if ready is not None:
        lifecycle.retire(turn, ready)
    elif offer.pool == RAM:
        lifecycle.retire_copies(turn, offer.key, but=offer.gen)
    _seat_held(turn, offer)
    return generation


def _adopt_fill(turn: Turn, offer: Offer) -> Generation:
    """Take in a fill. Of several of one key the newest goes on to be READY."""
    ledger = turn.ledger
    ready, other = ledger.ready(offer.home), _filled(ledger, offer)
    newer = [known for known in (ready, other) if known is not None and known.id > offer.gen]
    same = ready is not None and ready.fingerprint == offer.fingerprint
    doomed = bool(newer) or same or _invalidated(ledger, offer)
    if other is not None and not doomed:
        other.doomed = True
        admission.settle_unasked(turn, other)
    generation = turn.adopt(offer, State.FILLING, doomed=doomed)
    if not doomed:
        _seat_held(turn, offer)
    return generation


def _filled(ledger: Ledger, offer: Offer) -> Generation | None:
    """Return the fill of the key that has begun, and will be READY."""
    running = ledger.filling(offer.home)
    return None if running is None or running.held else running


def _may_fill(generation: Generation, session: SessionId | None) -> bool:
    """Say whether `session` can be who fills a generation, or has filled it.

    One without bytes was given back with its connection, if it was its own.
    """
    owner = generation.owner
    if generation.state is State.FILLING:
        return isinstance(owner, Request) and owner.session == session
    return generation.state not in (State.OPEN, State.RESERVED)


def _invalidated(ledger: Ledger, offer: Offer) -> bool:
    """Say whether its key is being invalidated; if so, that waits for this one too."""
    waiting = [found for found in ledger.invalidations if found.key == offer.key]
    for invalidating in waiting:
        invalidating.known = True
        invalidating.retired.append(offer.gen)
    return bool(waiting)


def _seat_held(turn: Turn, offer: Offer) -> None:
    """Those who waited whether somebody would offer it get it now."""
    for generation in list(turn.ledger.by_home.get(offer.home, ())):
        if generation.held:
            admission.abandon(turn, generation, None, died=False)
