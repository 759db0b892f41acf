"""A coordinator in the background: `python -m coordinator.detached SOCKET LOG LEAVE_AFTER_S APART`.

Returns with 0 once a coordinator answers on SOCKET: one that it has started, or another. Else it
writes one line to standard error, and ends with the error's code.

Of many that are called at once, the lock of the socket chooses one, and the others wait until that
one's coordinator answers. A process of our own, not code of the starter: that one may have threads,
locks and gigabytes, and may be killed at any moment.

The starter gives us empty standard input and output, and a session. APART is `apart` if we have a
control group of our own, as `systemd-run --scope` gives it; else `within`, and the log says what is
lost then.

    Note on being nobody's child
    fact: whoever starts this makes it the first process of a session. A child of that is no leader,
    so it can never get a terminal, and it is pid 1's (or the nearest subreaper's) once we end
    consequence: no signal for the starter's group or terminal reaches the coordinator, and no
    parent has to reap it
    choice: fork, without an exec: the child has the lock and the pipe that we wait at, and nothing
    has to be passed on a command line
    cost: it is seen as `coordinator.detached`, not as `serve`
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from logging.handlers import RotatingFileHandler
from typing import NoReturn

from shm_store.channel import connect
from shm_store.errors import (
    CoordinatorRunning,
    NoCoordinator,
    StartFailed,
    WeightCacheError,
)

START_LIMIT_S = 30.0
POLL_S = 0.02
"""Between two looks for a coordinator that somebody else starts: nothing of it can be awaited."""

LOG_LIMIT_BYTES = 1 << 20
"""Of the log; as much of it again is kept from before."""

LAST_LINE_LIMIT_BYTES = 4096

log = logging.getLogger("coordinator")


def main(arguments: Sequence[str]) -> int:
    """Have a coordinator answer, and return the exit code. In the child: be it, and return its."""
    from coordinator.cli import open_streams
    from coordinator.display import show_error

    open_streams()
    # The starter's may be anything: a thread of it that blocks TERM, for one.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would cost our child's exit code
    os.umask(0o077)
    path, log_path, leave_after, apart = arguments
    try:
        start(path, log_path, float(leave_after), apart == "apart")
    except WeightCacheError as error:
        show_error(error)
        return error.exit_code
    return 0


def start(path: str, log_path: str, leave_after_s: float, apart: bool) -> None:
    """Return once a coordinator answers on `path`. In the child it ends the interpreter.

    Raises:
        StartFailed: none does.
        WeightCacheError: as `connect`, and `take_lock`.
    """
    from coordinator.group_file import read_group

    _make_folder(os.path.dirname(path))
    deadline_s = time.monotonic() + START_LIMIT_S
    while not _answers(path):
        group = read_group(path)
        if group is None:
            lock = _take_free_lock(path)
            if lock is not None:
                _run(path, lock, log_path, leave_after_s, apart)
                return
        if time.monotonic() >= deadline_s:
            whose = "another process" if group is None else f"`launch` (pid {group.pid})"
            raise StartFailed(f"{whose} has {path}, but nobody answers there")
        threading.Event().wait(POLL_S)


def _make_folder(folder: str) -> None:
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as error:
        raise StartFailed(f"{folder} cannot be made: {error.strerror}") from error


def _answers(path: str) -> bool:
    try:
        connect(path).close()
    except NoCoordinator:
        return False
    return True


def _take_free_lock(path: str) -> int | None:
    from coordinator.serve import take_lock

    try:
        return take_lock(path)
    except CoordinatorRunning:
        return None


def _run(path: str, lock: int, log_path: str, leave_after_s: float, apart: bool) -> None:
    """Start a coordinator, and return once it listens. It keeps the lock when we have ended.

    Raises:
        StartFailed: it does not, and has ended.
    """
    handler = _open_log(log_path)
    begun_bytes = os.stat(log_path).st_size
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.close(ours)
        _be_coordinator(path, lock, handler, theirs, leave_after_s, apart)
    os.close(theirs)
    with select.epoll() as poller:
        poller.register(ours, select.EPOLLIN)
        in_time = bool(poller.poll(START_LIMIT_S))
    if in_time and os.read(ours, 1):
        return
    if not in_time:
        os.kill(child, signal.SIGKILL)  # ours to reap, so the pid is still its own
    _, status = os.waitpid(child, 0)
    raise StartFailed(_reason(log_path, begun_bytes, os.waitstatus_to_exitcode(status), in_time))


def _reason(log_path: str, begun_bytes: int, code: int, in_time: bool) -> str:
    """Return the last line that it has logged; where there is none, how it ended."""
    from coordinator.process_host import ending

    if not in_time:
        return f"it was not ready within {START_LIMIT_S:g} s"
    with open(log_path, "rb") as lines:
        size_bytes = lines.seek(0, os.SEEK_END)
        lines.seek(max(begun_bytes, size_bytes - LAST_LINE_LIMIT_BYTES))
        said = lines.read().decode(errors="replace").splitlines()
    return said[-1].removeprefix("weight-cache: ") if said else f"it ended ({ending(code)})"


# --- the coordinator ----------------------------------------------------------------------------


class _Log(RotatingFileHandler):
    """A log that does not grow without bound. Whatever is written to standard error is part of it,
    our children's words and a traceback of the interpreter's too.
    """

    def follow(self) -> None:
        """Have standard error go where the log does."""
        assert self.stream is not None
        os.dup2(self.stream.fileno(), 2)

    def doRollover(self) -> None:  # noqa: N802 (its name in logging)
        super().doRollover()
        self.follow()


def _open_log(path: str) -> _Log:
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        handler = _Log(path, maxBytes=LOG_LIMIT_BYTES, backupCount=1, errors="backslashreplace")
    except OSError as error:
        raise StartFailed(
            f"its log {path} cannot be opened: {error.strerror}",
            remedy="set XDG_STATE_HOME to a folder that is yours",
        ) from error
    return handler


def _be_coordinator(
    path: str, lock: int, handler: _Log, ready: int, leave_after_s: float, apart: bool
) -> NoReturn:
    from coordinator.config import Config
    from coordinator.serve import serve

    handler.follow()
    form = "%(asctime)s weight-cache: %(message)s"
    logging.basicConfig(level=logging.INFO, handlers=[handler], format=form)

    def tell() -> None:
        log.info("ready on %s (pid %d)", path, os.getpid())
        if not apart:
            log.info(
                "systemd does not run for this user: this coordinator stays in the control group "
                "of what started it, so its memory counts there, and it ends when that is ended"
            )
        try:
            os.write(ready, b".")
        except BrokenPipeError:
            pass  # who waited was killed, which is no reason to end
        os.close(ready)

    sys.exit(serve(Config(path, leave_after_s=leave_after_s), lock=lock, ready=tell))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
