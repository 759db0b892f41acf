"""What becomes of a generation and of a session, as owners, executor and kernel report."""

from __future__ import annotations

from coordinator.ledger import admission
from coordinator.ledger.events import Attached, BackingRefused, Forget, Seal, SendSpace
from coordinator.ledger.state import (
    LEASABLE,
    LOADER,
    RUNNING,
    VRAM,
    Generation,
    Ledger,
    Pool,
    Request,
    Session,
    State,
)
from coordinator.ledger.turn import Turn
from shm_store.errors import (
    BackingFailed,
    Cancelled,
    FillFailed,
    ResourceError,
    SegmentRefused,
)
from shm_store.keys import GenerationId, Key, SessionId, version_fingerprint
from shm_store.pace import Pace
from shm_store.wire import (
    NO_GENERATION,
    RAM,
    Abort,
    Ack,
    Declare,
    Progress,
    Receive,
    Release,
    Space,
)

POOLS_LIMIT = 64
POOL_NAME_LIMIT = 200

# --- fills --------------------------------------------------------------------------------------


def backed(turn: Turn, generation: Generation) -> None:
    """The pages are there: the owner may fill them."""
    turn.move(generation, State.FILLING)
    generation.progressed_s = turn.now_s
    generation.pace = Pace(turn.now_s)
    generation.filled_bytes = generation.total_bytes = 0
    if isinstance(generation.owner, Request):
        turn.send(generation.owner.session, Space(generation.id), generation.id)
    else:
        turn.do(SendSpace(Space(generation.id)))


def backing_refused(turn: Turn, generation: Generation, event: BackingRefused) -> None:
    """The kernel gave no memory: everyone who asked hears why."""
    error = BackingFailed(f"no memory for {generation.key!r}: {event.reason}", remedy=event.remedy)
    admission.abandon(turn, generation, error, died=False)


def progress(turn: Turn, generation: Generation, message: Progress) -> None:
    """The owner came further: others who wait are told, and their deadlines start anew.

    What is behind what was said, more than all, or later than COMMIT changes nothing. Before
    RESERVE a loader fetches what it has to have to know the size.
    """
    done_bytes, total_bytes = message.done_bytes, message.total_bytes
    fetches = generation.state is State.OPEN and generation.owner == LOADER
    if not (fetches or generation.state is State.FILLING) or generation.sealing:
        return
    if not generation.filled_bytes < done_bytes <= total_bytes:
        return
    if generation.pace is None:
        generation.pace = Pace(turn.now_s, done_bytes)
    else:
        generation.pace.came_to(done_bytes, turn.now_s)
    generation.filled_bytes, generation.total_bytes = done_bytes, total_bytes
    generation.progressed_s = turn.now_s
    for request in generation.askers.values():
        if request is not generation.owner:
            turn.tell(request, generation)


def commit(turn: Turn, generation: Generation) -> None:
    """The owner is done: seal it. A repeated COMMIT changes nothing."""
    if generation.state is State.FILLING and not generation.sealing:
        generation.sealing = True
        turn.do(
            Seal(
                generation.id,
                generation.key,
                generation.fingerprint,
                generation.pool,
                generation.size_bytes,
            )
        )


def sealed(turn: Turn, generation: Generation) -> None:
    """The bytes are canonical: everyone who asked gets a lease, doomed or not."""
    previous = turn.ledger.ready(generation.home)
    if generation.doomed:
        turn.move(generation, State.RETIRED)
    else:
        turn.move(generation, State.READY)
        if previous is not None:
            retire(turn, previous)
        if generation.pool == RAM:
            retire_copies(turn, generation.key, but=generation.id)
    generation.filled_bytes = generation.size_bytes
    generation.pace = None
    generation.idle_s = turn.now_s
    for request in list(generation.askers.values()):
        turn.grant(request, generation)
    if generation.doomed:
        turn.settle_retired(generation)


def seal_refused(turn: Turn, generation: Generation, reason: str) -> None:
    """The owner still has a writable map, or wrote over the preamble.

    A loader is ended. A worker that lives keeps its bytes, so they stay charged until it ABORTs or
    ends; the others start over without it.
    """
    generation.sealing = False
    owner = generation.owner
    error = SegmentRefused(f"the weights of {generation.key!r} were not accepted: {reason}")
    if not isinstance(owner, Request) or owner.session not in turn.ledger.sessions:
        admission.abandon(turn, generation, error, died=False)
        return
    if owner.id in generation.askers:
        turn.fail(owner, error)
    _part(turn, generation, None)


def _part(turn: Turn, generation: Generation, died: FillFailed | None) -> None:
    """Seat those who wait for a worker that still has the bytes again, without it.

    It may still have them mapped, so they stay charged until its ABORT or its end.

    Args:
        died: what they hear instead if its owner is taken for dead, and is not the first.
    """
    doomed, generation.doomed = generation.doomed, True
    others = [request for request in generation.askers.values() if request is not generation.owner]
    for request in others:
        turn.detach(request)
    deaths = generation.deaths + (died is not None)
    if died is not None and deaths >= admission.DEATHS_LIMIT:
        for request in others:
            turn.refuse(request.session, request.rid, died)
    else:
        admission.seat_again(turn, others, doomed=doomed, deaths=deaths)


def abort(turn: Turn, generation: Generation, message: Abort) -> None:
    """The owner gives its ticket back.

    A loader found the source at fault: everyone hears the cause. A worker failed by itself: its own
    request ends, the others are seated again.
    """
    owner = generation.owner
    if generation.sealing:
        return
    if not isinstance(owner, Request):
        cause = message.cause
        error = cause.error() if cause else FillFailed(f"the loader gave up {generation.key!r}")
        admission.abandon(turn, generation, error, died=False)
        return
    if owner.id in generation.askers:
        cause = message.cause
        turn.fail(owner, cause.error() if cause else Cancelled(f"{owner.key!r} was aborted"))
    admission.abandon(turn, generation, None, died=False)


def loader_ended(turn: Turn, generation: Generation, reason: str) -> None:
    """A loader's process ended. After COMMIT or ABORT that is as it should be."""
    if generation.owner == LOADER and not generation.sealing:
        _owner_died(turn, generation, f"the loader of {generation.key!r} {reason}")


def _owner_died(turn: Turn, generation: Generation, reason: str) -> None:
    hopeless = generation.deaths + 1 >= admission.DEATHS_LIMIT
    admission.abandon(turn, generation, FillFailed(reason) if hopeless else None, died=True)


# --- ready generations ----------------------------------------------------------------------------


def retire(turn: Turn, generation: Generation) -> None:
    """Never handed out again, still counted while leased, and its holders are told.

    Those who wait for it get it: they asked before. What is on devices of it goes the same way.
    """
    if generation.pool == RAM:
        ready = turn.ledger.ready(generation.home)
        if ready is None or ready is generation:
            retire_copies(turn, generation.key)
        else:
            retire_copies(turn, generation.key, but=ready.id)
    for request in list(generation.askers.values()):
        turn.grant(request, generation)
    if not generation.leases and not turn.ledger.awaited:
        turn.free(generation)
        return
    turn.move(generation, State.RETIRED)
    for session in list(generation.leases):
        turn.revoke(session, generation, "stale")


def retire_copies(turn: Turn, key: Key, but: GenerationId = NO_GENERATION) -> list[Generation]:
    """Retire what is on devices of `key`, but for copies of one generation of the host.

    Returns:
        Those that somebody has still to hear of.
    """
    ledger = turn.ledger
    copies = [copy for copy in ledger.copies(key) if copy.copy_of != but]
    for copy in copies:
        for session in copy.leases:
            turn.revoke(session, copy, "stale")
    current = version_fingerprint(but)
    shared = [g for g in ledger.of_key(key) if g.pool != RAM and g.fingerprint != current]
    for generation in shared:
        if generation.state is State.READY:
            retire(turn, generation)
        elif generation.state in RUNNING:
            generation.doomed = True
            admission.settle_unasked(turn, generation)
    return copies + [g for g in shared if g.doomed or g.state is State.RETIRED]


def ack(turn: Turn, session: SessionId, message: Ack) -> None:
    """A holder has heard a REVOKE, and something of its own keeps the lease."""
    generation = turn.ledger.generations.get(message.gen)
    lease = None if generation is None else generation.leases.get(session)
    if lease is None or lease.id != message.lease or lease.asked != message.asked:
        return
    idle = message.idle and lease.asked == "idle"
    lease.answer, lease.answered_s = "idle" if idle else "kept", turn.now_s


def release(turn: Turn, session: SessionId, message: Release) -> None:
    """End the lease with this very id. Late, doubled and foreign ones change nothing."""
    generation = turn.ledger.generations.get(message.gen)
    if generation is None or generation.state not in LEASABLE:
        return
    lease = generation.leases.get(session)
    if lease is not None and lease.id == message.lease:
        turn.end_lease(session, generation)


def receive(turn: Turn, session: SessionId, message: Receive) -> None:
    """Grant what another process has sent to this one, whatever its key has by now.

    It does not wait for those who lack room, as a hit would: who sent it keeps it until this is
    answered, so waiting would free nothing.
    """
    generation = turn.ledger.generations.get(message.gen)
    if generation is None or generation.private or generation.pool != RAM:
        generation = None
    if generation is None or generation.state not in LEASABLE:
        error = ResourceError(
            f"nobody has generation {message.gen} any more, which was sent to this process",
            remedy="have the sender keep it, and live, until it was received",
        )
        turn.refuse(session, message.rid, error)
        return
    facts = (generation.key, generation.fingerprint, None, 0.0, turn.now_s)
    turn.grant(Request(session, message.rid, *facts), generation)


def freed(turn: Turn, gen: GenerationId) -> None:
    """The kernel has the bytes back."""
    generation = turn.ledger.generations.get(gen)
    if generation is not None and generation.state is State.FREEING:
        turn.remove(generation)


# --- sessions -----------------------------------------------------------------------------------


def attached(turn: Turn, event: Attached) -> None:
    """A process is here."""
    turn.ledger.sessions[event.session] = Session(
        event.session, event.pid, event.name, event.device, event.role
    )


def names_device(name: str) -> bool:
    """Say whether a device's pool can have this name."""
    return name.startswith(VRAM) and name.isprintable() and len(name) <= POOL_NAME_LIMIT


def may_be_pool(ledger: Ledger, name: str, beside: int = 0) -> bool:
    """Say whether there can be one more pool, of this name, `beside` so many other new ones."""
    return names_device(name) and len(ledger.pools) + beside < POOLS_LIMIT


def declared(turn: Turn, session: Session, message: Declare) -> None:
    """A session can use a device's memory: there is a pool for it, whose limit several may say."""
    name = message.pool
    pool = make_pool(turn.ledger, name, message.limit_bytes) if names_device(name) else None
    if pool is None:
        return
    session.devices[name] = message
    if not message.budgeted and message.limit_bytes > pool.found_bytes:
        pool.found_bytes = message.limit_bytes
        turn.remember()
    _have_limit_said(turn.ledger, name)


def make_pool(ledger: Ledger, name: str, limit_bytes: int) -> Pool | None:
    """Return the pool of a device, made with this limit if need be; None if there can be none."""
    if name not in ledger.pools and may_be_pool(ledger, name):
        ledger.pools[name] = Pool(name, limit_bytes, said_by="sessions")
    return ledger.pools.get(name)


def _have_limit_said(ledger: Ledger, name: str) -> None:
    """Have the limit of a pool be the least budget of those who are here; else what was found."""
    pool = ledger.pools[name]
    said = [one.devices[name] for one in ledger.sessions.values() if name in one.devices]
    budgets = [one.limit_bytes for one in said if one.budgeted]
    if pool.said_by == "sessions" and (budgets or pool.found_bytes):
        pool.limit_bytes = min(budgets) if budgets else pool.found_bytes


def _forget(turn: Turn, session: Session) -> None:
    """It is not here any more, and what it has said of limits does not count."""
    del turn.ledger.sessions[session.id]
    for name in session.devices:
        _have_limit_said(turn.ledger, name)
    turn.do(Forget(session.id))


def disconnected(turn: Turn, session: Session) -> None:
    """The connection is gone, the process may not be: what waits is dropped, and tickets.

    A ticket without bytes is given back. A fill that has some can no longer be committed, and parts
    from those who wait for it. Either counts as a death of the owner: a process that dies closes
    its socket before its pidfd tells.
    """
    session.connected = False
    _drop_waiting(turn, session)
    for generation in turn.ledger.owned_by(session.id):
        reason = f"process {session.pid} was lost while it filled it"
        if generation.state is not State.FILLING:
            _owner_died(turn, generation, reason)
        elif not generation.sealing:
            _part(turn, generation, FillFailed(reason))
    if not session.leases and not turn.ledger.owned_by(session.id):
        _forget(turn, session)


def ended(turn: Turn, session: Session) -> None:
    """The process is gone, and with it its requests, leases and tickets. Happens once."""
    session.connected = False
    _drop_waiting(turn, session)
    for gen in list(session.leases):
        turn.end_lease(session.id, turn.ledger.generations[gen], died=True)
    for generation in turn.ledger.owned_by(session.id):
        if not generation.sealing:
            _owner_died(turn, generation, f"process {session.pid} was lost while it filled it")
    _forget(turn, session)


def _drop_waiting(turn: Turn, session: Session) -> None:
    """Drop the requests of a session without an answer; nobody is there to read one."""
    ledger = turn.ledger
    for request in [found for found in ledger.requests.values() if found.session == session.id]:
        assert request.gen is not None
        if ledger.generations[request.gen].owner is request:
            turn.detach(request)
        else:
            admission.leave(turn, request, None)
    ledger.flushes = [flush for flush in ledger.flushes if flush.session != session.id]
    ledger.drains = [drain for drain in ledger.drains if drain.session != session.id]
    ledger.invalidations = [
        waiting for waiting in ledger.invalidations if waiting.session != session.id
    ]


def owned(turn: Turn, sender: SessionId | None, gen: GenerationId) -> Generation | None:
    """Return the running generation whose ticket the sender has; None is its loader."""
    generation = turn.ledger.running.get(gen)
    if generation is None:
        return None
    owner = generation.owner
    has_it = owner.session == sender if isinstance(owner, Request) else sender is None
    return generation if has_it and owner is not None else None
