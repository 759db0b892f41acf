"""What must hold after every event. Each check names its law or rule (docs/architecture.md)."""

from __future__ import annotations

from coordinator.ledger.state import LEASABLE, LOADER, RUNNING, Ledger, Request, State
from shm_store.keys import version_fingerprint
from shm_store.wire import RAM


def violations(ledger: Ledger) -> list[str]:
    """Return every broken invariant in words; none if all is well."""
    return [
        *_one_generation_per_key(ledger),
        *_room(ledger),
        *_leases(ledger),
        *_requests(ledger),
        *_owners(ledger),
        *_indexes(ledger),
    ]


def _one_generation_per_key(ledger: Ledger) -> list[str]:
    """Law 2: at most one READY, and at most one fill that will become READY, in each pool.

    Rule 32: on a device nothing older is READY than on the host.
    """
    found = []
    for (pool, key), siblings in ledger.by_home.items():
        if any(g.home != (pool, key) for g in siblings):
            found.append(f"{key!r} in {pool!r} has what is elsewhere")
        if sum(g.state is State.READY for g in siblings) > 1:
            found.append(f"{key!r} has two READY generations in {pool!r}")
        if sum(g.state in RUNNING and not g.doomed for g in siblings) > 1:
            found.append(f"{key!r} has two fills that would become READY in {pool!r}")
        host, there = ledger.ready((RAM, key)), ledger.ready((pool, key))
        if pool == RAM or host is None or there is None:
            continue
        if there.fingerprint != version_fingerprint(host.id):
            found.append(f"{there.id} is READY in {pool!r}, and no copy of {host.id}")
    return found


def _room(ledger: Ledger) -> list[str]:
    """Law 3: what is charged is the sum of what there is; who waits is charged nothing yet.

    Whether it fits is a matter of each admission: a limit may be lowered, and pages are copied
    without asking.
    """
    found = []
    for pool in ledger.pools.values():
        used = sum(
            generation.size_bytes + sum(lease.copied_bytes for lease in generation.leases.values())
            for generation in ledger.in_pool(pool.name)
        )
        if used != pool.in_use_bytes:
            found.append(f"pool {pool.name!r} holds {used} bytes and says {pool.in_use_bytes}")
        head = pool.waiting()[0] if pool.queue else None
        fits = head is not None and pool.in_use_bytes + head.size_bytes <= pool.limit_bytes
        if head is not None and fits and not ledger.awaited:
            found.append(f"{head.id} waits for room and fits")
        for generation in pool.queue:
            if generation.state is not State.OPEN or generation.queued_s is None:
                found.append(f"{generation.id} waits for room as {generation.state.value}")
            if ledger.generations.get(generation.id) is not generation:
                found.append(f"{generation.id} waits for room and is gone")
    for generation in ledger.generations.values():
        if generation.charged_bytes <= 0 and generation.state is not State.OPEN:
            found.append(f"{generation.id} is {generation.state.value} and charged nothing")
    return found


def _leases(ledger: Ledger) -> list[str]:
    """Laws 3 to 5: only sealed bytes are leased, by sessions that exist, once each.

    Rules 9 and 11: who leases what is retired was told. A private charge is somebody's.
    """
    found = []
    for generation in ledger.generations.values():
        for lease in generation.leases.values():
            if generation.state is State.RETIRED and lease.asked != "stale":
                found.append(f"{generation.id} is retired, and lease {lease.id} was not told")
        loose = generation.private and generation.state not in (State.OPEN, State.FREEING)
        if loose and not generation.leases:
            found.append(f"private {generation.id} has no holder")
        if generation.leases and generation.state not in LEASABLE:
            found.append(f"{generation.id} is {generation.state.value} and leased")
        if generation.state is State.RETIRED and not (generation.leases or ledger.awaited):
            found.append(f"{generation.id} is retired and nobody leases it")
        for session, lease in generation.leases.items():
            known = ledger.sessions.get(session)
            if known is None or known.leases.get(generation.id) is not lease:
                found.append(f"{generation.id} is leased by {session}, which does not know it")
    for known in ledger.sessions.values():
        for gen in known.leases:
            leased = ledger.generations.get(gen)
            if leased is None or known.id not in leased.leases:
                found.append(f"session {known.id} leases {gen}, which does not know it")
    return found


def _requests(ledger: Ledger) -> list[str]:
    """Law 1: every open request belongs to one generation of its key, running or making room."""
    found = []
    asked = 0
    for generation in ledger.generations.values():
        asked += len(generation.askers)
        if generation.askers and generation.state not in (*RUNNING, State.READY):
            found.append(f"{generation.id} is {generation.state.value} and owes answers")
        if generation.askers and generation.state is State.READY and not generation.gives_way:
            found.append(f"{generation.id} is ready, and its askers wait for nothing")
        for request in generation.askers.values():
            if request.gen != generation.id or ledger.requests.get(request.id) is not request:
                found.append(f"request {request.id} is not where it says")
            if request.session not in ledger.sessions:
                found.append(f"request {request.id} has no session")
            if (*request.home, request.fingerprint) != (*generation.home, generation.fingerprint):
                found.append(f"request {request.id} waits for other weights than it asked for")
    if asked != len(ledger.requests):
        found.append(f"{len(ledger.requests)} open requests, {asked} attached")
    return found


def _owners(ledger: Ledger) -> list[str]:
    """Rule 6: a running generation has an owner; a loader works only while somebody wants it."""
    found = []
    for generation in ledger.generations.values():
        if (generation.owner is not None) != (generation.state in RUNNING):
            found.append(f"{generation.id} is {generation.state.value}: {generation.owner}")
        if generation.held and not (ledger.awaited and generation.state is State.OPEN):
            found.append(f"{generation.id} is held, and nobody is awaited")
        owner = generation.owner
        builder = owner.session if isinstance(owner, Request) and not generation.sealing else None
        if builder is not None and builder not in ledger.sessions:
            found.append(f"{generation.id} is owned by a process that ended")
        unwanted = owner == LOADER and not generation.askers and not generation.sealing
        if unwanted and (generation.state is not State.FILLING or generation.doomed):
            found.append(f"{generation.id} is loaded for nobody")
    return found


def _indexes(ledger: Ledger) -> list[str]:
    """The indexes say what the tables say."""
    found = []
    running = [g.id for g in ledger.generations.values() if g.state in RUNNING]
    if sorted(running) != sorted(ledger.running):
        found.append("the index of running generations is off")
    listed = [g.id for siblings in ledger.by_home.values() for g in siblings]
    if sorted(listed) != sorted(g.id for g in ledger.generations.values() if not g.private):
        found.append("the index by pool and key is off")
    parked = [g.id for g in ledger.generations.values() if g.askers and g.state is State.READY]
    if sorted(parked) != sorted(ledger.parked):
        found.append("the index of those who wait for a ready generation is off")
    waiting = [g.id for pool in ledger.pools.values() for g in pool.queue]
    queued = [g.id for g in ledger.generations.values() if g.queued_s is not None]
    if sorted(waiting) != sorted(queued):
        found.append("the queue for room is off")
    return found
