"""The process that a user starts and signals, in front of the supervisor: each minds the other.

`launch` forks at once. The parent is the front: it passes signals on, waits, and ends with the
supervisor's exit code. The child is the supervisor, which has all the work. Either may be killed:

- the front: the supervisor reads end of file on a pipe, and ends the group in order;
- the supervisor: the kernel kills the workers and asks the coordinator to end (`leash`); the front
  inherits what is left of them, waits, and kills it.

The front allocates little, reads nothing and knows nothing of the group.

    Note on inheriting
    fact: a child whose parent has ended becomes that of the nearest ancestor that asked for it
    (PR_SET_CHILD_SUBREAPER), else that of pid 1
    consequence: the front gets every descendant of a supervisor that was killed, also those that
    the kernel's signal does not reach: what a worker's shell had started
    choice: it kills those of its own session; who made a session of its own left on purpose
    cost: while the group runs, the front reaps daemons that workers left behind, as pid 1 would

    Note on both at once
    fact: nothing is left then to inherit anything
    consequence: what workers had started goes on, unless it minds its own parent; so does a
    coordinator that is stopped, until somebody lets it go on
    choice: none: see `coordinator.leash`. A cgroup, as a systemd service has one, would do
    cost: they are to be found by WEIGHT_CACHE_SOCKET in their environment
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from typing import NoReturn

from coordinator.display import say, show_error
from coordinator.process_host import ending, exit_code
from shm_store.errors import WeightCacheError

_PR_SET_CHILD_SUBREAPER = 36

KILL_LIMIT_S = 5.0
"""What a SIGKILL has not ended by then hangs in the kernel."""

Supervise = Callable[[int], int]
"""Runs the group, given an fd that is at end of file once the front is gone."""


def run(supervise: Supervise, forwarded: Iterable[int], grace_s: float) -> int:
    """Run `supervise` in a child of ours, and return its exit code: 128 + N if signal N ended it.

    Args:
        forwarded: the signals to pass on, but for those that are ignored here.
        grace_s: how long what a killed supervisor leaves behind may take to end by itself.
    """
    heard = [number for number in forwarded if signal.getsignal(number) != signal.SIG_IGN]
    # Were it inherited as ignored, the kernel would reap our child and keep its exit code.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ours, theirs = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    supervisor = os.fork()
    if not supervisor:
        os.close(theirs)
        _be_supervisor(partial(supervise, ours))
    os.close(ours)
    pidfd = os.pidfd_open(supervisor)
    try:
        return _wait(supervisor, pidfd, heard, grace_s)
    finally:
        os.close(pidfd)
        os.close(theirs)


def _be_supervisor(supervise: Callable[[], int]) -> NoReturn:
    """Run in the child, and end it here: nothing of our caller's is to happen twice.

    What is forwarded is blocked until `supervise` can hear it.
    """
    code = WeightCacheError.exit_code
    try:
        # A signal for the front's process group, as from a terminal, would come twice otherwise.
        os.setpgid(0, 0)
        code = supervise()
    except WeightCacheError as error:
        show_error(error)
        code = error.exit_code
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _wait(supervisor: int, pidfd: int, heard: list[int], grace_s: float) -> int:
    """Pass signals on until the supervisor has ended.

    They stay blocked, until this process ends too, and are taken one by one: a handler would not
    run for one that comes just before a system call begins to wait, until that ends.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while (status := _reap(supervisor)) is None:
        number = signal.sigwait([signal.SIGCHLD, *heard])
        if number != signal.SIGCHLD:
            signal.pidfd_send_signal(pidfd, number)  # not reaped, so it is there
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        say(f"the supervisor (pid {supervisor}) ended ({ending(code)}), so its group ends")
        _clear(grace_s)
    return exit_code(code)


def _clear(grace_s: float) -> None:
    """Wait for the descendants that were left to us; kill them when the time is up."""
    if not _reap_until(time.monotonic() + grace_s):
        pids = ", ".join(f"pid {pid}" for pid in _children())
        say(f"what is left of the group is killed: {pids}")
        _reap_until(time.monotonic() + KILL_LIMIT_S, kill=True)


def _reap_until(deadline_s: float, *, kill: bool = False) -> bool:
    """Say whether every child of our session had ended by then.

    Args:
        kill: kill them, and then what those had started, which comes to us in turn.
    """
    while True:
        while _reap_one() is not None:
            pass
        children = _children()
        left_s = deadline_s - time.monotonic()
        if not children or left_s <= 0:
            return not children
        for pid in children if kill else ():
            os.kill(pid, signal.SIGKILL)  # ours to reap, so the pid is still theirs
        signal.sigtimedwait([signal.SIGCHLD], left_s)


def _reap(supervisor: int) -> int | None:
    """Reap who has ended up to the supervisor; return its wait status, or nothing so far."""
    while (ended := _reap_one()) is not None:
        pid, status = ended
        if pid == supervisor:
            return status
    return None


def _reap_one() -> tuple[int, int] | None:
    """Return pid and wait status of a child that has ended, if any has."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def _children() -> list[int]:
    """Return the pids of our children that have stayed in our session."""
    import psutil

    session = os.getsid(0)
    pids = [child.pid for child in psutil.Process().children()]
    return [pid for pid in pids if _session(pid) == session]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0
