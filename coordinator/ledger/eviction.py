"""Which bytes go when room is needed. Decides only; `turn` acts.

The order: retained generations, least recently leased first; then fills that nobody waits for any
more; then, by asking their holders, what is leased. Never a pinned one. Evicting what somebody
still maps frees nothing, so what was asked for counts as coming only until a holder says that it
keeps it, or says nothing in time.
"""

from __future__ import annotations

from coordinator.ledger.state import Generation, Ledger, Pool, State


def retained(ledger: Ledger, pool: str) -> list[Generation]:
    """Return what may be evicted from `pool` without taking anything from anybody, LRU first."""
    idle = [
        generation
        for generation in ledger.in_pool(pool)
        if generation.retained and not ledger.pinned(generation)
    ]
    return sorted(idle, key=lambda generation: (generation.idle_s, generation.id))


def lacking_bytes(ledger: Ledger, pool: Pool, needed_bytes: int) -> int:
    """Return how many more bytes must be let go of until `needed_bytes` become free in `pool`.

    What is coming counts, or too much would go.
    """
    coming = sum(g.size_bytes for g in ledger.in_pool(pool.name) if g.coming)
    return pool.in_use_bytes + needed_bytes - pool.limit_bytes - coming


def victims(ledger: Ledger, pool: Pool, lacking: int) -> list[Generation]:
    """Return what must go now so that `lacking` bytes become free in `pool`.

    If everything that may go is too little, returns all of it: the request waits for more.
    """
    unasked = [generation for generation in ledger.in_pool(pool.name) if generation.unasked_fill]
    return _enough([*retained(ledger, pool.name), *unasked], lacking)


def revocable(ledger: Ledger, pool: Pool, lacking: int) -> list[Generation]:
    """Return what to ask the holders for so that `lacking` bytes become free in `pool`.

    Fewest holders first, as each of them has to load it again; then what was granted longest ago.
    Nothing that a holder has refused: while one keeps it, what the others let go of frees nothing.
    """
    leased = [
        generation
        for generation in ledger.in_pool(pool.name)
        if generation.state is State.READY
        and generation.leases
        and not generation.coming
        and not any(lease.answer for lease in generation.leases.values())
        and not ledger.pinned(generation)
    ]
    leased.sort(
        key=lambda generation: (
            len(generation.leases),
            max(lease.since_s for lease in generation.leases.values()),
            generation.id,
        )
    )
    return _enough(leased, lacking)


def _enough(candidates: list[Generation], lacking: int) -> list[Generation]:
    chosen = []
    for generation in candidates:
        if lacking <= 0:
            break
        chosen.append(generation)
        lacking -= generation.size_bytes
    return chosen
