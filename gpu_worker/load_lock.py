"""The load lock: while a module is built, no other thread of this process moves one.

A construction takes the write side. Each pass of a move between host and device, of an offload, or
of an assignment takes the read side; passes run side by side.

Rules
- In order of arrival: who asks waits for those that came before, unless both read. So a writer that
  waits holds back the readers that come later, and waits for the passes under way; a reader waits
  for the writers that came before it, and for none that comes later. Nobody starves.
- A move is many short passes, each under the read side by itself, and never one long one: whoever
  waits to build is let in between two.
- Public methods take the lock themselves; callers never hold it around them. It comes before every
  other lock of this package.
- No I/O, and no wait for another process, while it is held: the whole process would wait with it.
- A thread has one side at most, once. Asking again raises, whichever it has and asks for, and
  whether it has it or still waits: it would wait for itself.

    Note on exceptions from outside
    fact: KeyboardInterrupt comes between any two instructions of Python code: in front of the first
    line of an `__exit__`, and inside `threading.Condition`, which may not have its lock then
    consequence: a side could stay taken for ever, and with it the process
    choice: what a `with` has is a lock of its own, which its thread owns from its arrival to its
    end. It is left by the `__exit__` of `RLock`, one call into C where nothing comes between; and
    others wait for its end by acquiring it. The end needs nothing else: no list to be taken from,
    nobody to be told
    cost: the table of arrivals keeps the last one of every thread, long over, until its next
"""

from __future__ import annotations

import os
import threading
from _thread import RLock  # the class: `threading.RLock` is a function
from collections.abc import Callable
from contextlib import AbstractContextManager

from gpu_worker.reentry import owned
from gpu_worker.waits import steps
from shm_store.errors import CallerError, LoadTimeout, ReentryRefused, WeightCacheError

STEP_S = 0.05
"""The longest until an exception from outside is noticed in a thread that is not the main one."""

Busy = Callable[[], WeightCacheError]
"""Words what a caller gets whose time is up."""


def _busy() -> WeightCacheError:
    return LoadTimeout(
        "it was not this thread's turn in time: others build modules, or move them",
        remedy="build and move less at once, or pass a longer timeout=",
    )


class LoadLock:
    """A lock with a side for many readers and one for a single writer. One in a process.

    In a forked child it is free, but for what the forking thread has.
    """

    def __init__(self) -> None:
        self._holds: dict[int, _Hold] = {}
        """The last hold of each thread, in order of arrival. Only its own thread changes an entry,
        by one operation of a dict each time; whether it is over, the hold itself says."""

    def read(
        self, left_s: float | None = None, *, busy: Busy = _busy
    ) -> AbstractContextManager[None]:
        """Return a context manager for one pass: nobody builds meanwhile; others may read.

        It waits when it is entered, and is entered once, and left by the thread that did. With
        nobody else there that takes 1 to 2 µs, where a bare RLock takes 0.3.

        Args:
            left_s: how long to wait for who came before; None is for ever.
            busy: makes the error that is raised then.

        Raises (when it is entered, with nothing taken):
            ReentryRefused: this thread reads or writes already, or waits to.
            LoadTimeout: or whatever `busy` makes.
            ForkedProcess: this is a forked child, and its parent waited.
        """
        return self._hold(False, left_s, busy)

    def write(
        self, left_s: float | None = None, *, busy: Busy = _busy
    ) -> AbstractContextManager[None]:
        """Return a context manager for a construction: nobody else reads or writes meanwhile.

        As `read` in everything else.
        """
        return self._hold(True, left_s, busy)

    def owned(self) -> bool:
        """Say whether the calling thread has either side, or waits for one."""
        hold = self._holds.get(threading.get_ident())
        return hold is not None and owned(hold)

    def refuse_owned(self) -> None:
        """Raise ReentryRefused if the calling thread has either side.

        For calls that ask only later, or wait for a thread that asks.
        """
        if self.owned():
            raise _refusal(self._holds[threading.get_ident()])

    def _hold(self, writes: bool, left_s: float | None, busy: Busy) -> _Hold:
        hold = _Hold()
        hold.lock, hold.writes, hold.left_s, hold.busy = self, writes, left_s, busy
        hold.entered = hold.over = False
        return hold

    def _take(self, hold: _Hold) -> WeightCacheError | None:
        """Arrive, and wait until it is the turn of `hold`. Returns why it is not to be.

        Whatever comes of it, the end of `hold` ends it.
        """
        hold.acquire()
        thread = threading.get_ident()
        # One that is over is taken away first, or the new one would have the place of the old; and
        # as long as there is one: a finalizer may come and go between any two lines.
        while (last := self._holds.setdefault(thread, hold)) is not hold:
            if owned(last):
                return _refusal(last)
            self._holds.pop(thread, None)
        if self._ahead(hold) and not self._wait(hold):
            return hold.busy()
        return None

    def _ahead(self, hold: _Hold) -> list[_Hold]:
        """Return who came before `hold`, and is to leave first, as far as is known."""
        ahead = []
        for other in list(self._holds.values()):
            if other is hold:
                break
            if (other.writes or hold.writes) and not other.over:
                ahead.append(other)
        return ahead

    def _wait(self, hold: _Hold) -> bool:
        """Wait for those ahead of `hold`, and say whether they are over in time."""
        pid = os.getpid()  # before looking who is ahead: in a forked child, nobody is
        ahead = self._ahead(hold)
        return any(_over(ahead, step_s) for step_s in steps(hold.left_s, pid, STEP_S))

    def _forget_inherited(self) -> None:
        """In a forked child: forget the other threads, which are not there to leave."""
        thread = threading.get_ident()
        mine = self._holds.get(thread)
        self._holds = {} if mine is None else {thread: mine}


class _Hold(RLock):  # type: ignore[misc]  # it is final for type checkers alone
    """One side of the lock for one `with`, owned by its thread from its arrival to its end.

    Attributes:
        lock: what it is a side of, and `writes` which side.
        left_s: how long to wait; `busy` makes the error of that.
        entered: it was, and is of no more use after that.
        over: somebody has seen that it is over. So nobody need try again.
    """

    __slots__ = ("busy", "entered", "left_s", "lock", "over", "writes")

    lock: LoadLock
    writes: bool
    left_s: float | None
    busy: Busy
    entered: bool
    over: bool

    def __enter__(self) -> None:  # type: ignore[override]
        if self.entered:
            raise CallerError(
                "a side of the load lock is entered twice", remedy="ask for another for each `with`"
            )
        self.entered = True
        try:
            refusal = self.lock._take(self)
            if refusal is not None:
                self.release()  # before it raises: an exception from outside may come behind that
                raise refusal
        except BaseException:
            try:
                self.release()
            except RuntimeError:
                pass  # it was not acquired yet, or is released
            raise

    def wait_over(self, step_s: float) -> bool:
        """Wait until it is over, for `step_s` at most, and say whether it is. For other threads."""
        if not self.over:
            try:
                if self.acquire(timeout=step_s):
                    self.over = True
                    self.release()
            except BaseException:
                try:
                    self.release()
                except RuntimeError:
                    pass  # it was not acquired, or is released
                raise
        return self.over


def _over(holds: list[_Hold], step_s: float) -> bool:
    """Wait for one of `holds` at most, and say whether all are over. Those leave the list."""
    while holds:
        if not holds[-1].wait_over(step_s):
            return False
        holds.pop()
        step_s = 0.0
    return True


def _refusal(held: _Hold) -> ReentryRefused:
    """Word what a thread gets that has `held` and asks again."""
    does = "builds a module" if held.writes else "moves one"
    return ReentryRefused(f"asked to build or move a module while the same thread {does}")


load_lock = LoadLock()
"""The one of this process."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=load_lock._forget_inherited)
