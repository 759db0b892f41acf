"""Which bytes go when room is needed. Decides only; `turn` acts.

The order: retained generations, least recently leased first; then fills that nobody waits for any
more. Never a pinned or a leased one: evicting what somebody still maps frees nothing.
"""

from __future__ import annotations

from coordinator.ledger.state import Generation, Ledger, State


def retained(ledger: Ledger, pool: str) -> list[Generation]:
    """Return what may be evicted from `pool` without taking anything from anybody, LRU first."""
    idle = [
        generation
        for generation in ledger.in_pool(pool)
        if generation.retained and generation.key not in ledger.pins
    ]
    return sorted(idle, key=lambda generation: (generation.idle_s, generation.id))


def victims(ledger: Ledger, pool: str, needed_bytes: int) -> list[Generation]:
    """Return what must go so that `needed_bytes` become free in `pool`.

    What is FREEING already counts as room that is coming, or too much would go. If everything that
    may go is too little, returns all of it: the request waits for more.
    """
    coming = ledger.pools[pool].limit_bytes - ledger.in_use_bytes(pool)
    coming += sum(
        generation.size_bytes
        for generation in ledger.in_pool(pool)
        if generation.state is State.FREEING
    )
    unasked = [generation for generation in ledger.in_pool(pool) if generation.unasked_fill]
    chosen = []
    for generation in [*retained(ledger, pool), *unasked]:
        if coming >= needed_bytes:
            break
        chosen.append(generation)
        coming += generation.size_bytes
    return chosen
