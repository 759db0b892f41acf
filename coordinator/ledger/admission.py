"""Who gets what: requests to generations, reservations to room.

A key's ACQUIREs wait for its generation, a pool's RESERVEs and CHARGEs wait for room. There is no
lookup without a claim: `seat` grants, attaches, or opens in one step.
"""

from __future__ import annotations

import shlex

from coordinator.ledger.events import Back, StartLoader
from coordinator.ledger.eviction import doubtful, revocable, victims
from coordinator.ledger.report import generation_report, silent_text
from coordinator.ledger.state import (
    LOADER,
    Generation,
    Ledger,
    Pool,
    Request,
    State,
)
from coordinator.ledger.turn import Turn
from shm_store.errors import (
    ArgumentRefused,
    BudgetExceeded,
    Cancelled,
    Draining,
    ResourceError,
    WeightCacheError,
)
from shm_store.keys import Fingerprint, Key, SessionId, parse_key, version_fingerprint
from shm_store.report import size_text
from shm_store.wire import RAM, Acquire, Cancel, Charge, Reserve, Ticket

OPEN_REQUESTS_LIMIT = 512
"""Of one session. No honest worker comes near; without a bound one peer slows down all others."""

PREFETCHES_LIMIT = 64
"""Of one session, beside its other requests: what nobody waits for keeps it from no load."""

HELD_LONG_S = 5.0
"""Who has used weights for so long since he was asked for them keeps no hit on them waiting."""

DEATHS_LIMIT = 2
"""A fill whose owners died this often fails all who wait: the weights are at fault, not they."""


def acquire(turn: Turn, session: SessionId, message: Acquire, source: Fingerprint) -> None:
    """Take an ACQUIRE from a session: grant, attach, or start a generation."""
    key = _checked(turn, session, message)
    if key is None:
        return
    built = message.source is None
    request = Request(
        session=session,
        rid=message.rid,
        key=key,
        fingerprint=version_fingerprint(message.version) if built else source,
        source=message.source,
        timeout_s=message.timeout_s,
        since_s=turn.now_s,
        prefetch=message.prefetch,
        pool=message.pool,
    )
    current = turn.ledger.ready((RAM, key))
    if message.pool != RAM and (current is None or current.id != message.version):
        # A copy of what is not current any more: it serves this asker, who has not heard so yet.
        seat(turn, request, doomed=True, deaths=0)
        return
    running = turn.ledger.filling(request.home)
    if running is not None and running.fingerprint != request.fingerprint:
        # Only an arriving request dooms. Were a re-seated one to do it too, two askers of different
        # versions would kill each other's loaders for ever.
        running.doomed = True
        settle_unasked(turn, running)
    seat(turn, request, doomed=False, deaths=0)


def _checked(turn: Turn, session: SessionId, message: Acquire | Charge) -> Key | None:
    """Return the key of a request that may be taken, or refuse it."""
    try:
        if turn.ledger.draining:
            raise _draining()
        prefetch = isinstance(message, Acquire) and message.prefetch
        limit = PREFETCHES_LIMIT if prefetch else OPEN_REQUESTS_LIMIT
        if turn.ledger.open_requests(session, prefetch=prefetch) >= limit:
            what = "prefetches" if prefetch else "open requests"
            raise ResourceError(
                f"this process has {limit} {what} already", remedy="wait for some of them"
            )
        if message.pool not in turn.ledger.pools:
            raise ArgumentRefused(f"there is no pool {message.pool!r}")
        if isinstance(message, Acquire) and message.pool != RAM and message.source is not None:
            raise ArgumentRefused("a loader fills memory of the host, and none of a device")
        return parse_key(message.key)
    except WeightCacheError as error:
        turn.refuse(session, message.rid, error)
        return None


def seat(turn: Turn, request: Request, *, doomed: bool, deaths: int) -> Generation:
    """Give `request` its place: a lease at once, or a generation to wait for."""
    ledger = turn.ledger
    ready = ledger.ready(request.home)
    if ready is not None and ready.fingerprint == request.fingerprint:
        if _waits_for_room(turn, ready, request.session):
            turn.ask(request, ready)
        else:
            turn.grant(request, ready)
        return ready
    running = ledger.filling(request.home)
    if running is not None and running.fingerprint == request.fingerprint:
        turn.ask(request, running)
        if running.total_bytes:
            turn.tell(request, running)
        return running
    # One that is seated again beside a newer fill serves those who asked for it, and then retires.
    doomed = doomed or running is not None
    generation = turn.open(request, doomed=doomed, deaths=deaths)
    turn.ask(request, generation)
    if ledger.awaited:
        generation.held = True
    else:
        start(turn, generation)
    return generation


def start(turn: Turn, generation: Generation) -> None:
    """Have the owner of an OPEN generation begin: the worker that asked first, or a loader."""
    generation.held = False
    first = next(iter(generation.askers.values()))
    # What it has waited for others before counts: its process waits no longer than that in all.
    first.timeout_s = max(0.0, first.since_s + first.timeout_s - turn.now_s)
    first.since_s = turn.now_s
    if first.source is None:
        turn.send(first.session, Ticket(first.rid, generation.id, first.key, first.fingerprint))
    else:
        turn.do(
            StartLoader(
                generation.id,
                first.key,
                first.source,
                first.fingerprint,
                first.session,
                first.rid,
            )
        )


def seat_again(turn: Turn, requests: list[Request], *, doomed: bool, deaths: int) -> None:
    """Seat those whose fill ended without their fault: the first becomes or starts the next owner.

    They stay together, also in a doomed fill, which takes no other asker: beside the one undoomed
    fill of its key it serves them, and then retires.
    """
    home: Generation | None = None
    for request in requests:
        if turn.ledger.draining:
            turn.refuse(request.session, request.rid, _draining())
        elif home is None or home.state is not State.OPEN:
            home = seat(turn, request, doomed=doomed, deaths=deaths)
        else:
            turn.ask(request, home)


def abandon(
    turn: Turn, generation: Generation, error: WeightCacheError | None, *, died: bool
) -> None:
    """End a running generation whose owner is out.

    Args:
        error: fails everyone with this; with None they are seated again.
        died: the owner's process ended. The second time that fails everyone.
    """
    requests = list(generation.askers.values())
    for request in requests:
        turn.detach(request)
    deaths = generation.deaths + died
    turn.free(generation)
    if error is not None:
        for request in requests:
            turn.refuse(request.session, request.rid, error)
    else:
        seat_again(turn, requests, doomed=generation.doomed, deaths=deaths)


def cancel(turn: Turn, session: SessionId, message: Cancel) -> None:
    """Give up a request. From RESERVED on an owner's request stays: its SPACE is answered ABORT."""
    request = turn.ledger.requests.get((session, message.rid))
    if request is None or request.gen is None:
        return
    generation = turn.ledger.generations[request.gen]
    if generation.owner is request and generation.state is not State.OPEN:
        return
    leave(turn, request, Cancelled(f"the request for {request.key!r} was given up"))


def leave(turn: Turn, request: Request, error: WeightCacheError | None) -> None:
    """Take one asker out, answered with `error` if given, and see what its generation becomes."""
    assert request.gen is not None
    generation = turn.ledger.generations[request.gen]
    owned = generation.owner is request
    if error is None:
        turn.detach(request)
    else:
        turn.fail(request, error)
    if owned:
        abandon(turn, generation, None, died=False)
    else:
        settle_unasked(turn, generation)


def settle_unasked(turn: Turn, generation: Generation) -> None:
    """End a loader's fill that nobody waits for, unless it is well under way and wanted."""
    if generation.owner != LOADER or generation.askers or generation.sealing:
        return
    if generation.state is not State.FILLING or generation.doomed:
        turn.free(generation)


def reserve(turn: Turn, generation: Generation, message: Reserve) -> None:
    """Queue an owner's RESERVE. `admit` takes it from there."""
    if generation.state is State.OPEN and generation.queued_s is None:
        _queue(turn, generation, message.size_bytes)


def charge(turn: Turn, session: SessionId, message: Charge) -> None:
    """Queue a CHARGE, which brings its own size and needs no segment."""
    key = _checked(turn, session, message)
    if key is None:
        return
    request = Request(
        session=session,
        rid=message.rid,
        key=key,
        fingerprint=Fingerprint(""),
        source=None,
        timeout_s=message.timeout_s,
        since_s=turn.now_s,
        pool=message.pool,
    )
    generation = turn.open(request, private=True, fixed=message.fixed, copy_of=message.copy_of)
    turn.ask(request, generation)
    _queue(turn, generation, message.size_bytes)


def _queue(turn: Turn, generation: Generation, size_bytes: int) -> None:
    generation.size_bytes = size_bytes
    generation.queued_s = turn.now_s
    turn.ledger.pools[generation.pool].queue.append(generation)


# --- room ---------------------------------------------------------------------------------------


def admit(turn: Turn) -> None:
    """Give room to those who wait for it, and have room made for those who lack it.

    First come first served in each pool, loads before prefetches. A request larger than the limit
    less what is pinned, and what its own process keeps by choice, is refused at once: it never
    could fit.
    """
    ledger = turn.ledger
    for pool in ledger.pools.values():
        pinned_bytes = ledger.pinned_bytes(pool.name) if pool.queue else 0
        for generation in list(pool.queue):
            kept_bytes = pinned_bytes + ledger.fixed_bytes(generation)
            if generation.size_bytes > pool.limit_bytes - kept_bytes:
                abandon(turn, generation, no_room(turn, generation), died=False)
    overtaken = True
    while overtaken:
        for pool in ledger.pools.values():
            _admit_first(turn, pool)
        # Whom that has asked for room decides who may overtake, in every pool.
        overtaken = False
        for pool in ledger.pools.values():
            overtaken |= _admit_overtakers(turn, pool)
    for generation in list(ledger.parked.values()):
        for request in list(generation.askers.values()):
            if not _waits_for_room(turn, generation, request.session):
                turn.grant(request, generation)
    for pool in ledger.pools.values():
        if pool.given_up and not pool.short:
            pool.given_up = False
            for generation in ledger.in_pool(pool.name):
                turn.unask(generation, ("idle", "room"))


def possible_bytes(ledger: Ledger, generation: Generation) -> int:
    """Return the most that those who wait for `generation` could have in its pool for it."""
    kept_bytes = ledger.pinned_bytes(generation.pool) + ledger.fixed_bytes(generation)
    return max(0, ledger.pools[generation.pool].limit_bytes - kept_bytes)


def _admit_first(turn: Turn, pool: Pool) -> None:
    """Admit those whose turn it is, and have room made for the first who lacks it."""
    for generation in pool.waiting():
        if not _fits(pool, generation):
            _make_room(turn, pool, generation)
            return
        _take_in(turn, generation)
    if pool.in_use_bytes > pool.limit_bytes:
        _make_room(turn, pool, None)


def _admit_overtakers(turn: Turn, pool: Pool) -> bool:
    """Admit what fits behind a blocked head if that head may wait for it; say whether any was.

    Sizes would deadlock otherwise: a head that waits for what a session holds, and that session for
    its own small request behind the head.
    """
    ledger = turn.ledger
    admitted = False
    for generation in pool.waiting()[1:]:
        if generation.prefetch or not _fits(pool, generation):
            continue
        askers = generation.askers.values()
        holds_up = any(
            _holds_victim(ledger, other, asker.session)
            for other in ledger.pools.values()
            for asker in askers
        )
        if holds_up or _waits_for_itself(ledger, pool):
            _take_in(turn, generation)
            admitted = True
    return admitted


def _fits(pool: Pool, generation: Generation) -> bool:
    return pool.in_use_bytes + generation.size_bytes <= pool.limit_bytes


def _take_in(turn: Turn, generation: Generation) -> None:
    """Charge `generation`. Its bytes come next, unless they are the process's own."""
    turn.unqueue(generation)
    if not generation.private:
        turn.move(generation, State.RESERVED)
        turn.do(Back(generation.id, generation.size_bytes, generation.pool))
        return
    turn.move(generation, State.READY)
    for request in list(generation.askers.values()):
        turn.grant(request, generation)


def _make_room(turn: Turn, pool: Pool, head: Generation | None) -> None:
    """Let go of what is retained, then ask for what is leased. A prefetch asks nobody."""
    ledger = turn.ledger
    needed_bytes = 0 if head is None else head.size_bytes
    for victim in victims(ledger, pool, needed_bytes):
        let_go(turn, victim)
    if head is not None and head.prefetch:
        return
    wanted = revocable(ledger, pool, needed_bytes)
    for generation in ledger.in_pool(pool.name):
        if generation not in wanted and not generation.refused:
            turn.unask(generation, ("idle",))
    for generation in wanted:
        unsure = doubtful(generation, head, turn.now_s)
        for session in unsure or generation.leases:
            turn.revoke(session, generation, "idle" if unsure else "room")


def let_go(turn: Turn, generation: Generation) -> None:
    """Free what nobody leases. Those who waited for a head to have its room start over."""
    requests = list(generation.askers.values())
    for request in requests:
        turn.detach(request)
    turn.free(generation)
    seat_again(turn, requests, doomed=False, deaths=0)


def _blocked_head(pool: Pool) -> Generation | None:
    """Return who waits for others to make room: a prefetch asks nobody."""
    waiting = pool.waiting()
    return waiting[0] if waiting and not waiting[0].prefetch else None


def _holds_victim(ledger: Ledger, pool: Pool, session: SessionId) -> bool:
    """Say whether the head of `pool` waits for something that `session` leases."""
    if _blocked_head(pool) is None:
        return False
    leased = (ledger.generations[gen] for gen in ledger.sessions[session].leases)
    return any(generation.pool == pool.name and generation.gives_way for generation in leased)


def _waits_for_itself(ledger: Ledger, pool: Pool) -> bool:
    """Say whether somebody who asked for the head of `pool` leases what it waits for."""
    head = _blocked_head(pool)
    return head is not None and any(
        _holds_victim(ledger, pool, asker.session) for asker in head.askers.values()
    )


def _waits_for_room(turn: Turn, generation: Generation, session: SessionId) -> bool:
    """Say whether a hit must wait: it would keep alive what a head waits for.

    Else those who let go and ask again would starve the head. But what somebody uses for long is
    not going, and one more holder makes no difference.
    """
    if not generation.gives_way or session in generation.leases:
        return False
    ledger = turn.ledger
    pool, refused_s = ledger.pools[generation.pool], generation.refused_s
    return (
        (refused_s is None or turn.now_s < refused_s + HELD_LONG_S)
        and not ledger.pinned(generation)
        and _blocked_head(pool) is not None
        and not _waits_for_itself(ledger, pool)
    )


def no_room(turn: Turn, generation: Generation) -> BudgetExceeded:
    """Return the refusal of a RESERVE, with everything that fills the pool."""
    ledger = turn.ledger
    pool = ledger.pools[generation.pool]
    holders = sorted(ledger.in_pool(pool.name), key=lambda holder: (-holder.size_bytes, holder.id))
    never = generation.size_bytes > pool.limit_bytes
    first = (pool.waiting() or [generation])[0]
    behind = ""
    if first is not generation and not never:
        behind = f"; {first.key!r} came first and waits for {size_text(first.size_bytes)}"
    own_bytes = ledger.fixed_bytes(generation)
    reserved_bytes = sum(holder.size_bytes for holder in holders if holder.fixed)
    if reserved_bytes > own_bytes:
        behind = f"; {size_text(reserved_bytes)} is what processes have reserved{behind}"
    elif own_bytes:
        behind = f"; {size_text(own_bytes)} is what its own process has reserved{behind}"
    if ledger.awaited:
        behind = f"; the coordinator was started again, and {silent_text(ledger)} may hold more"
    free = f"pool {pool.name!r} has {size_text(pool.free_bytes)} free of"
    if never:
        free = f"that is more than all of pool {pool.name!r},"
    raised = f"raise the limit: `weight-cache limit {shlex.quote(pool.name)} SIZE`"
    freed = "unlock models there (`weight-cache status`), let go of tensors of them, reserve less, "
    freed += "or "
    return BudgetExceeded(
        f"{generation.key!r} needs {size_text(generation.size_bytes)}; {free} "
        f"{size_text(pool.limit_bytes)}{behind}",
        remedy=raised if never else None if pool.name == RAM else freed + raised,
        needed_bytes=generation.size_bytes,
        free_bytes=pool.free_bytes,
        possible_bytes=possible_bytes(ledger, generation),
        holders=tuple(generation_report(ledger, holder, turn.now_s) for holder in holders),
    )


def gave_way(turn: Turn, request: Request, generation: Generation) -> BudgetExceeded:
    """Return the refusal of a hit whose bytes are to make room for others."""
    pool = turn.ledger.pools[generation.pool]
    first = _blocked_head(pool)
    name = "others" if first is None else repr(first.key)
    return BudgetExceeded(
        f"{request.key!r} is to make room for {name} in pool {pool.name!r}, and is not gone yet",
        needed_bytes=generation.size_bytes,
        free_bytes=pool.free_bytes,
        holders=(generation_report(turn.ledger, generation, turn.now_s),),
    )


def _draining() -> Draining:
    return Draining("the coordinator is draining and takes no new work")
