"""When somebody has waited long enough. Every wait has an end; a deadlock is just a long wait."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.ledger import admission, recovery
from coordinator.ledger.admission import HELD_LONG_S
from coordinator.ledger.eviction import REVOKE_PATIENCE_S
from coordinator.ledger.operators import expire_drains, expire_invalidations
from coordinator.ledger.report import silent_text
from coordinator.ledger.state import Generation, Lease, Ledger, Request, State
from coordinator.ledger.turn import Turn
from shm_store.errors import LoadTimeout, WeightCacheError

UNASKED_FILL_S = 300.0
"""How long a fill that nobody waits for may stand still."""


def next_deadline_s(ledger: Ledger) -> float | None:
    """Return when `expire` next has something to do, on the clock of the events."""
    times = [
        *(_deadline_s(ledger, request) for request in ledger.requests.values()),
        *(_standstill_s(generation) for generation in ledger.running.values()),
        *(draining.deadline_s for draining in ledger.drains),
        *(invalidating.deadline_s for invalidating in ledger.invalidations),
        *(lease.asked_s + REVOKE_PATIENCE_S for lease in _unanswered(ledger)),
        *(since_s + HELD_LONG_S for since_s in _refused_s(ledger)),
        ledger.awaited_until_s,
    ]
    return min((time for time in times if time is not None), default=None)


def expire(turn: Turn) -> None:
    """Answer every request whose deadline has come, and end fills that stand still unasked."""
    ledger = turn.ledger
    recovery.expire(turn)
    for request in list(ledger.requests.values()):
        deadline_s = _deadline_s(ledger, request)
        if deadline_s is not None and deadline_s <= turn.now_s and request.gen is not None:
            admission.leave(turn, request, _too_late(turn, request))
    for generation in list(ledger.running.values()):
        standstill_s = _standstill_s(generation)
        if standstill_s is not None and standstill_s <= turn.now_s:
            turn.free(generation)
    for lease in _unanswered(ledger):
        if lease.asked_s + REVOKE_PATIENCE_S <= turn.now_s:
            lease.answer, lease.answered_s = "overdue", turn.now_s
    expire_invalidations(turn)
    expire_drains(turn)


def _refused_s(ledger: Ledger) -> Iterator[float]:
    """Yield since when holders use what hits wait for: those do not for long."""
    times = (generation.refused_s for generation in ledger.parked.values())
    return (time for time in times if time is not None)


def _unanswered(ledger: Ledger) -> list[Lease]:
    """Return the leases whose answer to a REVOKE somebody waits for, to have room."""
    short = [pool.name for pool in ledger.pools.values() if pool.short]
    return [
        lease
        for name in short
        for generation in ledger.in_pool(name)
        for lease in generation.leases.values()
        if lease.asked and not lease.answer
    ]


def _deadline_s(ledger: Ledger, request: Request) -> float | None:
    """A ticket holder is timed only while its RESERVE waits, an asker while nothing progresses.

    Who is asked to build because another has given up has waited for that one, too: see `start`.
    """
    if request.gen is None:
        return None
    generation = ledger.generations[request.gen]
    if generation.owner is request and not generation.held:
        queued_s = generation.queued_s
        return None if queued_s is None else queued_s + request.timeout_s
    if generation.sealing:
        return None
    return max(request.since_s, generation.progressed_s) + request.timeout_s


def _standstill_s(generation: Generation) -> float | None:
    return generation.progressed_s + UNASKED_FILL_S if generation.unasked_fill else None


def _too_late(turn: Turn, request: Request) -> WeightCacheError:
    assert request.gen is not None
    generation = turn.ledger.generations[request.gen]
    if generation.queued_s is not None:
        return admission.no_room(turn, generation)
    if generation.state is State.READY:
        return admission.gave_way(turn, request, generation)
    if generation.held:
        return LoadTimeout(
            f"{request.key!r} was not ready within {request.timeout_s:g} s: the coordinator was "
            f"started again, and {silent_text(turn.ledger)} may have it"
        )
    return LoadTimeout(
        f"{request.key!r} was not ready within {request.timeout_s:g} s: generation "
        f"{generation.id} is {generation.state.value}"
    )
