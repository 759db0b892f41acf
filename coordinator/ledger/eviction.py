"""Which bytes go when room is needed. Decides only; `turn` acts.

The order: retained generations, those of least use first, then those least recently leased; then
fills that nobody waits for any more; then, by asking their holders, what is leased. Never a pinned
one.

Evicting what somebody else still maps frees nothing. So of several holders each is asked first
whether it uses the bytes, and they let go only once none has said that it does; and what was asked
for counts as coming only until a holder says that it keeps it, or says nothing in time.
"""

from __future__ import annotations

import math

from coordinator.ledger.state import Generation, Ledger, Pool, State
from shm_store.keys import SessionId, version_fingerprint
from shm_store.wire import RAM

REVOKE_PATIENCE_S = 1.0
"""How long the bytes of a lease that was asked for count as coming. A process may be stopped."""


def retained(ledger: Ledger, pool: str) -> list[Generation]:
    """Return what may be evicted from `pool` without taking anything from anybody.

    What is of least use first, then LRU.
    """
    idle = [
        generation
        for generation in ledger.in_pool(pool)
        if generation.retained and not ledger.pinned(generation)
    ]
    return sorted(idle, key=lambda one: (_use(ledger, one), one.idle_s, one.id))


def _use(ledger: Ledger, generation: Generation) -> int:
    """Return of how much use it is that this stays.

    A copy on a device of what is not READY any more is of none: nobody is granted it. And without
    what is on the host, so would be what a device has of it.
    """
    if generation.pool != RAM:
        host = ledger.ready((RAM, generation.key))
        return int(host is not None and generation.fingerprint == version_fingerprint(host.id))
    there = (one for one in ledger.of_key(generation.key) if one.pool != RAM)
    return 1 + any(one.state is State.READY for one in there)


def victims(ledger: Ledger, pool: Pool, needed_bytes: int) -> list[Generation]:
    """Return what must go now so that `needed_bytes` become free in `pool`.

    What is FREEING counts, or too much would go. What was only asked for does not: what is idle now
    could be taken again while its holders still think. If everything that may go is too little,
    returns all of it: the request waits for more.
    """
    lacking = pool.in_use_bytes + needed_bytes - pool.limit_bytes
    lacking -= sum(g.size_bytes for g in ledger.in_pool(pool.name) if g.state is State.FREEING)
    unasked = [generation for generation in ledger.in_pool(pool.name) if generation.unasked_fill]
    return _enough([*retained(ledger, pool.name), *unasked], lacking)


def revocable(ledger: Ledger, pool: Pool, needed_bytes: int) -> list[Generation]:
    """Return what to ask the holders for so that `needed_bytes` become free in `pool`.

    Fewest holders first, as each of them has to load it again; then what was granted longest ago,
    and on a device, where it comes back from the host, as few bytes as will do.
    Nothing that a holder has refused: while one keeps it, what the others let go of frees nothing.
    """
    lacking = pool.in_use_bytes + needed_bytes - pool.limit_bytes
    lacking -= sum(g.size_bytes for g in ledger.in_pool(pool.name) if g.coming)
    leased = [
        generation
        for generation in ledger.in_pool(pool.name)
        if generation.state is State.READY
        and generation.leases
        and not generation.coming
        and not generation.refused
        and not generation.fixed
        and not ledger.pinned(generation)
    ]
    leased.sort(
        key=lambda generation: (
            len(generation.leases),
            0 if pool.name == RAM else generation.size_bytes,
            max(lease.since_s for lease in generation.leases.values()),
            generation.id,
        )
    )
    chosen = _enough(leased, lacking)
    return chosen if pool.name == RAM else _needed(chosen, lacking)


def doubtful(generation: Generation, head: Generation | None, now_s: float) -> list[SessionId]:
    """Return the holders that are to say whether they use `generation`, before any lets go.

    Nobody, if there is only one holder: whenever he lets go, that frees it. An answer counts for
    half as long as `head` has waited, so that holders who are at work in turns cannot keep it
    waiting for ever, and what was said long before it came counts for nothing.
    """
    if len(generation.leases) == 1:
        return []
    began_s = None if head is None else head.queued_s
    waited_s = math.inf if began_s is None else now_s - began_s
    since_s = now_s - max(REVOKE_PATIENCE_S, waited_s / 2)
    return [
        session
        for session, lease in generation.leases.items()
        if lease.answer != "idle" or lease.answered_s < since_s
    ]


def _needed(chosen: list[Generation], lacking: int) -> list[Generation]:
    """Return what is left of `chosen` once those that are not needed are out, first ones first."""
    spare = sum(generation.size_bytes for generation in chosen) - lacking
    needed = []
    for generation in chosen:
        if generation.size_bytes <= spare:
            spare -= generation.size_bytes
        else:
            needed.append(generation)
    return needed


def _enough(candidates: list[Generation], lacking: int) -> list[Generation]:
    chosen = []
    for generation in candidates:
        if lacking <= 0:
            break
        chosen.append(generation)
        lacking -= generation.size_bytes
    return chosen
