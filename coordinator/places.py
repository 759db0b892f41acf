"""How many of our children start at once; the others wait for their turn.

Note on what a place is for
fact: a loader that waits for room ends when others let go of theirs, and one that reads from a
dead file server may never end; and its askers' time runs while their fill does not progress
consequence: places held until a fill ends would be held by those who wait for room, or for ever
by one bad source, and good fills in a long queue would fail at their deadlines
choice: a place is for work that takes processor time and ends by itself: starting a loader
until it has read the header and says RESERVE, and backing. It lapses after a few seconds,
whatever happens. What holds a place waits for nobody, so nothing here can deadlock; and nobody
waits longer than those before him take, or their places last. Fills need none: their bytes were
admitted by the budget
cost: loaders that fill or wait for room are as many as the requests; each is idle, or waits for
its disk, and takes some megabytes
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Hashable

from shm_store.keys import GenerationId

PLACES = max(2, min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2))
"""More starts at once than processors make none of them faster."""

LAPSE_S = 5.0
"""Twenty times what a start takes on a busy machine, and little beside any deadline."""


class Places:
    """A number of places, and the starts that wait for one.

    The next is one of whoever has the fewest inside, among these first come first served: who
    asks for hundreds at once, or brings sources that hang, delays mostly himself.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int = PLACES) -> None:
        self._loop = loop
        self._limit = limit
        self._waiting: dict[GenerationId, tuple[Hashable, Callable[[], None]]] = {}
        self._inside: dict[GenerationId, tuple[Hashable, asyncio.TimerHandle | None]] = {}
        """Whose, and what ends the place; None once it has lapsed."""

    def enter(self, gen: GenerationId, whose: Hashable, start: Callable[[], None]) -> None:
        """Call `start` when there is a place for `gen`: now or later, unless it leaves before."""
        self._waiting[gen] = (whose, start)
        self._admit()

    def leave(self, gen: GenerationId) -> None:
        """Give the place back, or the turn up. May be called again."""
        self._waiting.pop(gen, None)
        _, timer = self._inside.pop(gen, (None, None))
        if timer is not None:
            timer.cancel()
        if timer is not None and self._waiting:
            # Not from here: a start that fails leaves, and a hundred could fail in a row.
            self._loop.call_soon(self._admit)

    def close(self) -> None:
        """Start nothing any more of what waits."""
        self._waiting.clear()
        for _, timer in self._inside.values():
            if timer is not None:
                timer.cancel()

    def _admit(self) -> None:
        while self._waiting and self._taken() < self._limit:
            gen = min(self._waiting, key=lambda gen: self._having(self._waiting[gen][0]))
            whose, start = self._waiting.pop(gen)
            self._inside[gen] = (whose, self._loop.call_later(LAPSE_S, self._lapse, gen))
            start()

    def _taken(self) -> int:
        return sum(timer is not None for _, timer in self._inside.values())

    def _lapse(self, gen: GenerationId) -> None:
        whose, _ = self._inside[gen]
        self._inside[gen] = (whose, None)
        self._admit()

    def _having(self, whose: Hashable) -> int:
        """Return how many are inside for `whose`, those whose place has lapsed included."""
        return sum(inside == whose for inside, _ in self._inside.values())
