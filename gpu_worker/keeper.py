"""The keeper: the thread that does what runs destructors or waits for no one.

It takes mappings whose last tensor is gone, unmaps them and says so; and tasks, such as ending the
claim of a handle that was dropped. Everything comes through one queue, in order, because finalizers
may only enqueue: they run in any thread, inside any lock.

    Note on the end of the interpreter
    fact: a daemon thread that runs torch while the interpreter ends aborts the process
    consequence: this thread may not be at work then
    choice: stop and join it at exit; what is still queued, the end of the process does
    cost: exit waits for the one item at hand

    Note on taking an item
    fact: another thread may fork between any two instructions of this one
    consequence: an item that had left the queue, and was not noted yet, would be lost in the child:
    a mapping that is never unmapped there, a claim that never ends
    choice: `deque.extend(map(get, ...))` takes and notes it in one call, in which no other thread
    runs from there on
    cost: it has to be read twice
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpu_worker.callbacks import report

Task = Callable[[], object]

SETTLE_ROUNDS = 16
"""Deeper than destructors that drop handles on modules whose destructors drop handles go."""


@dataclass(frozen=True, order=True, slots=True)
class _Timed:
    """A task that is to be called at a time; `number` keeps the order of equal times."""

    at_s: float
    number: int
    task: Task = field(compare=False)


class Keeper:
    """A daemon thread and its queue. `queue` takes `Mapping`s and `Task`s.

    A forked child has another queue.
    """

    def __init__(self, end: Callable[[Any], None]) -> None:
        """Make a keeper that calls `end` for every mapping; `start` it before use."""
        # Any: the mapping table says what its mappings are, and tasks share their queue.
        self.queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._old = self.queue
        self.at_work = threading.RLock()
        """Held while a task is done, so that a fork can wait for its end."""
        self._end = end
        self._hurry = False
        self._numbers = itertools.count()
        self._timed: list[_Timed] = []
        """A heap. The thread's own."""
        self._at_hand: deque[Any] = deque()
        """What was taken from the queue, until it is done: one item, or none."""
        self._thread = self._new_thread()

    def start(self) -> None:
        self._thread.start()

    def renew(self) -> None:
        """In a forked child: begin another queue, to which everybody is to turn before `go_on`.

        The old one is of no use: the parent's thread may have had its lock for a moment.
        """
        self._old, self.queue = self.queue, queue.SimpleQueue()

    def go_on(self) -> None:
        """In a forked child: be ready to do what was at hand, and what is in both queues.

        Once it is started. So any task may be done twice. What was to come at a time is forgotten:
        the heap may be half sorted.
        """
        while not self._old.empty():
            self.queue.put(self._old.get_nowait())
        self._timed = []
        self.at_work = threading.RLock()
        self._thread = self._new_thread()

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._run, name="weight-cache-keeper", daemon=True)

    @property
    def runs_here(self) -> bool:
        """Whether the calling thread is the keeper. Ids of ended threads are used again."""
        return self._thread.ident == threading.get_ident() and self._thread.is_alive()

    def put(self, task: Task) -> None:
        """Have `task` called after everything that was queued before it. Safe in a finalizer."""
        self.queue.put(task)

    def put_at(self, at_s: float, task: Task) -> None:
        """Have `task` called at `at_s` of the monotonic clock, or soon after."""
        self.queue.put(_Timed(at_s, next(self._numbers), task))

    def call_settled(self, done: Callable[[], object]) -> None:
        """Have `done` called after everything queued so far, and after what that enqueues.

        What a task destroys enqueues its mappings behind it, so once through the queue is not
        enough. Others who go on enqueueing cannot keep it waiting for ever.
        """
        rounds = itertools.count(1)

        def settled() -> None:
            if self.queue.empty() or next(rounds) == SETTLE_ROUNDS:
                done()
            else:
                self.queue.put(settled)

        self.queue.put(settled)

    def attempt(self, task: Task) -> None:
        """Call `task` in this thread, which nothing may end but `leave` and `stop`."""
        try:
            with self.at_work:
                task()
        except BaseException as error:
            with contextlib.suppress(BaseException):  # of a handler of the log
                report("the keeper could not finish one of its tasks", error)

    def leave(self) -> None:
        """End the thread once everything queued so far is done."""
        self.queue.put(None)

    def stop(self, timeout_s: float) -> None:
        """End the thread after the item at hand, and wait for that. The rest stays undone."""
        self._hurry = True
        self.queue.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        leaving = False
        # What `call_settled` waits for puts itself behind what it finds, and so behind a `leave`.
        while not (leaving and self.queue.empty()):
            if not self._at_hand:
                self._take()
            if self._hurry:
                return
            if self._at_hand[0] is None:
                leaving = True
            else:
                self.attempt(self._perform)
            if self._thread is not threading.current_thread():
                return  # its task has forked, and this is the child, which has a keeper
            self._at_hand.clear()

    def _take(self) -> None:
        """Wait for what comes next: from the queue, or a task whose time has come."""
        while self._timed:
            left_s = self._timed[0].at_s - time.monotonic()
            if left_s <= 0:
                self._at_hand.append(heapq.heappop(self._timed).task)
                return
            wait_s = min(left_s, threading.TIMEOUT_MAX)
            try:
                self._at_hand.extend(map(self.queue.get, (True,), (wait_s,)))
                return
            except queue.Empty:
                continue
        self._at_hand.extend(map(self.queue.get, (True,)))

    def _perform(self) -> None:
        item = self._at_hand[0]
        if isinstance(item, _Timed):
            heapq.heappush(self._timed, item)
        elif callable(item):
            item()
        else:
            self._end(item)
