"""How this package waits for others: in steps, and in one process. Pure but for the pid.

Note on a fork in the middle of a call
fact: a signal handler may fork during a wait, and user code in a callback; the child then goes
on where its parent was, without the threads that would have ended the wait
consequence: one long wait, or a lock that another thread held, would keep the child for ever
choice: wait in steps, and look at the pid before each, and after each callback
cost: a thread that waits wakes once a second
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from shm_store.errors import ForkedProcess

STEP_S = 1.0


def refuse_fork(pid: int) -> None:
    """Refuse to go on in another process than `pid`.

    Raises:
        ForkedProcess: this is another one.
    """
    if os.getpid() != pid:
        raise ForkedProcess("this call is one of the parent process, which goes on with it")


def steps(left_s: float | None, pid: int, longest_s: float | None = None) -> Iterator[float]:
    """Yield how long to wait next, at least once, until `left_s` are over; None is for ever.

    Args:
        longest_s: no step is longer; None is `STEP_S`.

    Raises:
        ForkedProcess: this is not the process `pid` (any more).
    """
    longest_s = STEP_S if longest_s is None else longest_s
    end_s = None if left_s is None else time.monotonic() + left_s
    step_s = longest_s if left_s is None else min(longest_s, left_s)
    while True:
        refuse_fork(pid)
        yield step_s
        if end_s is not None:
            step_s = min(longest_s, end_s - time.monotonic())
            if step_s <= 0:
                refuse_fork(pid)
                return
