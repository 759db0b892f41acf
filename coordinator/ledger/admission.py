"""Who gets what: requests to generations, reservations to room.

A key's ACQUIREs wait for its generation, a pool's RESERVEs wait for room. There is no lookup
without a claim: `seat` grants, attaches, or opens in one step.
"""

from __future__ import annotations

from coordinator.ledger.events import Back, StartLoader
from coordinator.ledger.eviction import victims
from coordinator.ledger.report import generation_report
from coordinator.ledger.state import (
    LOADER,
    RAM,
    Generation,
    Pool,
    Request,
    State,
)
from coordinator.ledger.turn import Turn
from shm_store.errors import (
    BudgetExceeded,
    Cancelled,
    Draining,
    KeyRefused,
    ResourceError,
    WeightCacheError,
)
from shm_store.keys import Fingerprint, SessionId, parse_key, version_fingerprint
from shm_store.report import size_text
from shm_store.wire import Acquire, Cancel, Reserve, Ticket

OPEN_REQUESTS_LIMIT = 512
"""Of one session. No honest worker comes near; without a bound one peer slows down all others."""

DEATHS_LIMIT = 2
"""A fill whose owners died this often fails all who wait: the weights are at fault, not they."""


def acquire(turn: Turn, session: SessionId, message: Acquire, source: Fingerprint) -> None:
    """Take an ACQUIRE from a session: grant, attach, or start a generation."""
    if turn.ledger.draining:
        turn.refuse(session, message.rid, _draining())
        return
    try:
        key = parse_key(message.key)
    except KeyRefused as error:
        turn.refuse(session, message.rid, error)
        return
    if turn.ledger.open_requests(session) >= OPEN_REQUESTS_LIMIT:
        flood = ResourceError(
            f"this process has {OPEN_REQUESTS_LIMIT} open requests already",
            remedy="wait for some of them",
        )
        turn.refuse(session, message.rid, flood)
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
    )
    running = turn.ledger.filling(key)
    if running is not None and running.fingerprint != request.fingerprint:
        # Only an arriving request dooms. Were a re-seated one to do it too, two askers of different
        # versions would kill each other's loaders for ever.
        running.doomed = True
        settle_unasked(turn, running)
    seat(turn, request, doomed=False, deaths=0)


def seat(turn: Turn, request: Request, *, doomed: bool, deaths: int) -> Generation:
    """Give `request` its place: a lease at once, or a generation to wait for."""
    ledger = turn.ledger
    ready = ledger.ready(request.key)
    if ready is not None and ready.fingerprint == request.fingerprint:
        turn.grant(request, ready)
        return ready
    running = ledger.filling(request.key)
    if running is not None and running.fingerprint == request.fingerprint:
        turn.ask(request, running)
        return running
    generation = turn.open(request, doomed=doomed, deaths=deaths, pool=RAM)
    turn.ask(request, generation)
    if request.source is None:
        turn.send(
            request.session,
            Ticket(request.rid, generation.id, request.key, request.fingerprint),
        )
    else:
        turn.do(
            StartLoader(
                generation.id,
                request.key,
                request.source,
                request.fingerprint,
                request.session,
                request.rid,
            )
        )
    return generation


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
    if generation.state is not State.OPEN or generation.queued_s is not None:
        return
    generation.size_bytes = message.size_bytes
    generation.queued_s = turn.now_s
    turn.ledger.pools[generation.pool].queue.append(generation)


def admit(turn: Turn, pool: Pool) -> None:
    """Give room to those who wait for it, first come first; make room for the first if it lacks.

    A request larger than the limit less what is pinned is refused at once: it never could fit.
    """
    ledger = turn.ledger
    possible_bytes = pool.limit_bytes - ledger.pinned_bytes(pool.name)
    for generation in list(pool.queue):
        if generation.size_bytes > possible_bytes:
            abandon(turn, generation, no_room(turn, generation), died=False)
    while pool.queue:
        head = pool.queue[0]
        if ledger.in_use_bytes(pool.name) + head.size_bytes <= pool.limit_bytes:
            turn.unqueue(head)
            turn.move(head, State.RESERVED)
            turn.do(Back(head.id, head.size_bytes))
            continue
        for victim in victims(ledger, pool.name, head.size_bytes):
            turn.free(victim)
        return


def no_room(turn: Turn, generation: Generation) -> BudgetExceeded:
    """Return the refusal of a RESERVE, with everything that fills the pool."""
    ledger = turn.ledger
    pool = ledger.pools[generation.pool]
    free_bytes = max(0, pool.limit_bytes - ledger.in_use_bytes(pool.name))
    holders = sorted(ledger.in_pool(pool.name), key=lambda holder: (-holder.size_bytes, holder.id))
    never = generation.size_bytes > pool.limit_bytes
    first = pool.queue[0] if pool.queue else generation
    behind = ""
    if first is not generation and not never:
        behind = f"; {first.key!r} came first and waits for {size_text(first.size_bytes)}"
    return BudgetExceeded(
        f"{generation.key!r} needs {size_text(generation.size_bytes)}; pool {pool.name!r} has "
        f"{size_text(free_bytes)} free of {size_text(pool.limit_bytes)}{behind}",
        remedy="raise --ram-budget" if never else None,
        needed_bytes=generation.size_bytes,
        free_bytes=free_bytes,
        holders=tuple(generation_report(ledger, holder, turn.now_s) for holder in holders),
    )


def _draining() -> Draining:
    return Draining("the coordinator is draining and takes no new work")
