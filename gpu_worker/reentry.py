"""Calls that interrupt another call of ours, in its own thread, and would wait for it.

A garbage collection runs finalizers, and the interpreter runs signal handlers, between any two
instructions: inside our locks, too. Locks of this package are RLocks, so that the thread does not
hang there, and what must not happen inside asks here first.
"""

from __future__ import annotations

import threading
from typing import NoReturn

from shm_store.errors import CallerError


def owned(lock: threading.RLock) -> bool:
    """Say whether the calling thread holds `lock`."""
    # No public name for it, but what `threading.Condition` asks of any lock.
    return bool(lock._is_owned())  # type: ignore[attr-defined]


def free_after_fork(lock: threading.RLock) -> None:
    """In a forked child: free a lock that another thread held, which is not there to do it.

    One that the forking thread holds is left alone: a handler of a signal has forked inside a call
    of ours, which goes on in the child and frees it.
    """
    if not owned(lock):
        lock._at_fork_reinit()  # type: ignore[attr-defined]  # as the standard library does


def refuse_reentry() -> NoReturn:
    """Raise what a call gets that would have to wait for the very call it interrupted."""
    raise CallerError(
        "called by a finalizer or a signal handler in the middle of another call",
        remedy="set a flag there, and call from the program's normal flow",
    )
