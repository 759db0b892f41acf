"""The processes of the demo, as the demo sees them: started here, spoken to by lines, ended here.

A worker ends with its standard input. Only processes that were started here are ever signalled.

    Note on process groups
    fact: a terminal sends INT to its whole foreground process group
    consequence: coordinator and workers would end while the demo still tells how it ends them
    choice: each child has a process group of its own; should the demo die without ending them, the
    kernel sends them TERM
    cost: a `preexec_fn`, and with it the next note

    Note on interrupts
    fact: with a `preexec_fn` Python runs its at-fork hooks, and drops what is raised in them
    consequence: a Ctrl-C that comes just then is lost
    choice: hold the signals that end the demo until a child is started and its end is arranged
    cost: the child has to let them go again

    Note on arenas
    fact: glibc gives each thread an arena, and `malloc_trim` leaves the top of all but the first
    consequence: after transformers has loaded in threads, tens of MB that nothing uses stay
    choice: one arena in each worker, so that what is measured is what is used
    cost: none here, where one thread computes
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import TypeVar

from gpu_worker.demo.lines import Failed, Ready, Reply, Request, Setting, encode, reply_decoder
from shm_store.paths import SOCKET_VARIABLE

READY_LIMIT_S = 120.0
"""torch and transformers can take this long to import from a slow disk, for the first time."""

ANSWER_LIMIT_S = 60.0
END_LIMIT_S = 20.0
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that end the demo."""

READY_MARK = b"weight-cache: ready on "

_PR_SET_PDEATHSIG = 1
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
}
"""What every child is told."""

Kind = TypeVar("Kind", bound=Reply)


class DemoFailed(Exception):
    """The demo cannot go on. The text says why."""


_OF_TORCHAO = re.compile(r"Failed to load \S*/torchao/|W\d{4} \S+ +\d+ \S*torch/utils/_pytree\.py")
"""Where it is installed transformers imports it: then it speaks of this machine and of torch."""


class Process:
    """A child with pipes for its lines and a file for its complaints."""

    def __init__(self, name: str, module: str, *arguments: str, folder: str) -> None:
        """Start `python -m module arguments`.

        Args:
            name: for people.
            folder: where its standard error is kept, and whatever else it or a library writes.
        """
        self.name = name
        self._complaints = os.path.join(folder, f"{name.replace(' ', '-')}.log")
        self._unread = b""
        environment = {**os.environ, **_ENVIRONMENT, "HF_HOME": folder, "TMPDIR": folder}
        environment.pop(SOCKET_VARIABLE, None)
        with open(self._complaints, "wb") as complaints:
            self._child = subprocess.Popen(
                [*_python(), "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                env=environment,
                process_group=0,
                preexec_fn=_prepare_child,
            )
        self.pid = self._child.pid

    def write(self, line: bytes) -> None:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(line)
            self._child.stdin.flush()
        except BrokenPipeError as error:
            raise self.failure("has ended") from error

    def read(self, limit_s: float) -> bytes:
        """Return the next line.

        Raises:
            DemoFailed: there is none within `limit_s`, or the process has ended.
        """
        assert self._child.stdout is not None
        deadline_s = time.monotonic() + limit_s
        poll = select.poll()
        poll.register(self._child.stdout, select.POLLIN)
        while b"\n" not in self._unread:
            if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
                raise self.failure(f"said nothing for {limit_s:g} s")
            data = os.read(self._child.stdout.fileno(), 65536)
            if not data:
                raise self.failure("has ended")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def kill(self) -> float:
        """Send SIGKILL and return the seconds until the kernel told that it has ended."""
        pidfd = os.pidfd_open(self.pid)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            started_s = time.perf_counter()
            self._child.kill()
            if not poll.poll(END_LIMIT_S * 1000):
                raise self.failure("does not end")
            return time.perf_counter() - started_s
        finally:
            os.close(pidfd)

    def wait(self) -> int:
        """Return its exit code once it has ended by itself.

        Raises:
            DemoFailed: it does not end.
        """
        try:
            return self._child.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise self.failure("does not end") from error

    def hang_up(self) -> None:
        """Close its standard input."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.close()
        except BrokenPipeError:
            pass  # what it did not read, it will not need

    def end(self, number: signal.Signals, grace_s: float) -> None:
        """Make sure that it has ended: by signal `number`, and after `grace_s` by SIGKILL."""
        self.hang_up()
        self._child.send_signal(number)
        try:
            self._child.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        assert self._child.stdout is not None
        self._child.stdout.close()

    def complaints(self) -> str:
        """Return what it has written to standard error, but for what torchao says of itself."""
        with open(self._complaints, encoding="utf-8", errors="replace") as file:
            return "".join(line for line in file if not _OF_TORCHAO.match(line)).strip()

    def failure(self, what: str) -> DemoFailed:
        """Return an error about this process."""
        return DemoFailed(f"{self.name} {what}")


class Coordinator(Process):
    """The coordinator, started as `weight-cache serve` starts it."""

    def __init__(self, socket: str, folder: str) -> None:
        started_s = time.perf_counter()
        super().__init__(
            "the coordinator", "coordinator", "serve", "--socket", socket, folder=folder
        )
        self._started_s = started_s

    def await_ready(self) -> float:
        """Wait until it serves; return the seconds since it was started."""
        line = self.read(READY_LIMIT_S)
        if not line.startswith(READY_MARK):
            raise self.failure(f"said {line!r} instead of being ready")
        return time.perf_counter() - self._started_s


class Worker(Process):
    """A worker, and its answers to requests."""

    def __init__(self, setting: Setting, folder: str) -> None:
        super().__init__(setting.name, "gpu_worker.demo.worker", folder=folder)
        self.write(encode(setting))

    def await_ready(self) -> float:
        """Wait until it has imported everything; return the seconds which that took it."""
        return self._expect(Ready, READY_LIMIT_S).took_s

    def ask(self, request: Request, kind: type[Kind]) -> Kind:
        """Return the answer to one request.

        Raises:
            DemoFailed: it failed there, did not answer in time, or has ended.
        """
        self.write(encode(request))
        return self._expect(kind, ANSWER_LIMIT_S)

    def _expect(self, kind: type[Kind], limit_s: float) -> Kind:
        reply = reply_decoder.decode(self.read(limit_s))
        if isinstance(reply, Failed):
            raise self.failure(f"failed: {reply.error}")
        if not isinstance(reply, kind):
            raise self.failure(f"answered {reply!r}")
        return reply


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Hold the signals that end the demo, for the length of a `with`. Start children inside."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _python() -> list[str]:
    """Return how to start Python so that it finds what this one found.

    `-P` was given where a folder of the working directory must not pass for one of our packages.
    """
    return [sys.executable, *(["-P"] if sys.flags.safe_path else [])]


def _prepare_child() -> None:
    """In a child, before it becomes another: hold no signals, and get TERM when the parent dies."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


_libc = ctypes.CDLL(None)
