"""The loads under way in one worker: one per key, which others wait for.

The owner of a flight is the thread that made it; it is over when its load has succeeded or failed.
Waits that could never end are refused: for oneself, around a circle of `build`s, and from inside a
skeleton, where every other load waits for this thread to be done with its module.

    Note on exceptions from outside
    fact: KeyboardInterrupt comes at the start of a function, after a call, or at the end of a round
    of a loop, also in a `finally`; a plain store there is never kept from happening
    consequence: landing, which takes a lock and wakes others, may not happen at all
    choice: the owner says by a store that it is `over`; landing only makes that known sooner
    cost: who waits for a flight that did not land notices at its next step
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field

from gpu_worker.fill_meter import PAUSE_S
from gpu_worker.records import Held
from gpu_worker.request import Progress
from gpu_worker.waits import steps
from shm_store.errors import CallerError, LoadTimeout
from shm_store.keys import GenerationId, Key


@dataclass(slots=True, eq=False)
class Flight:
    """One thread's load of one key. `in_skeleton` while it builds the module.

    `came_to` is how far the fill is that it waits for, in bytes and of how many, if known.
    Its owner sets `over` in a `finally`, in front of any call, and then has it landed.
    """

    key: Key
    thread: int = field(default_factory=threading.get_ident)
    name: str = field(default_factory=lambda: threading.current_thread().name)
    landed: threading.Event = field(default_factory=threading.Event)
    in_skeleton: bool = False
    over: bool = False
    came_to: tuple[int, int] | None = None

    def telling(self, progress: Progress | None) -> Progress:
        """Return what notes here how far the fill is, and tells `progress`."""

        def told(done_bytes: int, total_bytes: int) -> None:
            self.came_to = done_bytes, total_bytes
            if progress is not None:
                progress(done_bytes, total_bytes)

        return told


class Flights:
    """The flights of one worker, guarded by the worker's lock."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._flights: dict[Key, Flight] = {}
        self._waits: dict[int, Flight] = {}

    def board(self, mine: Flight) -> Flight:
        """Return the flight of a key: the one under way, or else `mine`. The lock is held."""
        flight = self._flights.get(mine.key)
        if flight is None or flight.over:
            flight = self._flights[mine.key] = mine
        return flight

    def land(self, mine: Flight) -> None:
        """Forget `mine`, which is over, if it ever began, and wake those who wait for it."""
        with self._lock:
            if self._flights.get(mine.key) is mine:
                del self._flights[mine.key]
        mine.landed.set()

    def held(self) -> tuple[Held, ...]:
        """Return the loads under way, which have no generation yet. The lock is held."""
        return tuple(
            Held(flight.key, GenerationId(""), claims=1, locks=0, threads=(flight.name,))
            for flight in self._flights.values()
            if not flight.over
        )

    def wait(self, flight: Flight, left_s: float | None, progress: Progress | None = None) -> None:
        """Wait until another thread's flight has landed, however that ended.

        Args:
            progress: called meanwhile with what the flight `came_to`. What it raises ends the wait.

        Raises:
            CallerError: it waits for this thread, so neither would ever end.
            LoadTimeout: it takes longer than `left_s`.
            ForkedProcess: this is a forked child, where nobody lands it.
        """
        thread = threading.get_ident()
        try:
            with self._lock:
                step: Flight | None = flight
                while step is not None and not step.over:
                    if step.thread == thread:
                        raise CallerError(f"the load of {step.key!r} waits for itself")
                    step = self._waits.get(step.thread)
                self._waits[thread] = flight
            told: tuple[int, int] | None = None
            for step_s in steps(left_s, os.getpid(), None if progress is None else PAUSE_S):
                landed = flight.over or flight.landed.wait(step_s)
                came_to = flight.came_to
                if progress is not None and came_to is not None and came_to != told:
                    told = came_to
                    progress(*told)
                if landed:
                    return
            raise LoadTimeout(f"{flight.key!r} was not ready in time: another thread loads it")
        finally:
            self._waits.pop(thread, None)

    def after_fork(self) -> None:
        """In a forked child: none is under way, but those that this thread has forked in.

        Of those the child is told as soon as it comes back, so they are over as well.
        """
        for flight in self._flights.values():
            flight.over = True
        self._flights, self._waits = {}, {}

    def refuse_in_skeleton(self, key: Key) -> None:
        """Refuse to go and wait for `key` while this thread builds a module. The lock is held.

        Raises:
            CallerError: it does.
        """
        thread = threading.get_ident()
        for flight in self._flights.values():
            if flight.in_skeleton and flight.thread == thread and not flight.over:
                raise CallerError(
                    f"the skeleton of {flight.key!r} loads {key!r}",
                    remedy="load that first, and use it in the skeleton",
                )
