"""What `weight-cache launch` runs: one coordinator and N workers that live and end together.

One thread, one loop: signals through a wakeup fd, deaths through pidfds, the coordinator's output
and a drain's answer through their own fds. It signals only processes it started, through their
pidfds, and returns only when all of them are gone.

    Note on process groups
    fact: a terminal sends INT to its whole foreground process group
    consequence: workers would get it twice, from the terminal and from here, and the coordinator
    would leave before the workers have given back what they hold
    choice: each child has a process group of its own, and hears signals only from here
    cost: a child cannot read the terminal, so its standard input is then empty
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import IO

from coordinator.display import say, show_error
from coordinator.operator import Operator
from coordinator.process_host import Child, ending, exit_code, module_command
from shm_store.channel import close_all
from shm_store.errors import (
    ArgumentRefused,
    ConnectionLost,
    CoordinatorLost,
    PlatformUnsupported,
    WeightCacheError,
)
from shm_store.paths import SOCKET_VARIABLE
from shm_store.wire import Drain, Fail

READY_LIMIT_S = 30.0
DRAIN_SLACK_S = 5.0
"""How long after a drain's deadline its answer may come."""

READY_MARK = b"weight-cache: ready on "
ENDING = (signal.SIGINT, signal.SIGTERM)
"""What asks the group to end."""
FORWARDED = (*ENDING, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to launch.

    Attributes:
        command: of every worker.
        socket: of the coordinator; None makes a private one, so that groups do not meet.
        ram_budget: as `serve` takes it.
        grace_s: between asking processes to end and SIGKILL; also how long the drain at the end
            waits for processes that are not of this group.
    """

    command: tuple[str, ...]
    workers: int = 1
    socket: str | None = None
    ram_budget: str | None = None
    grace_s: float = 10.0


def launch(plan: Plan) -> int:
    """Run the group until it has ended, and return its exit code.

    0 if every worker ended with 0, else the code of the first that did not: 128 + N for signal N.

    Raises:
        ArgumentRefused: the command cannot be found.
        PlatformUnsupported: no pidfds here.
    """
    if not hasattr(os, "pidfd_open"):
        raise PlatformUnsupported("this system has no pidfd_open")
    if shutil.which(plan.command[0]) is None:
        raise ArgumentRefused(f"{plan.command[0]!r} is no command that can be run")
    with _socket_of(plan) as path, _wakeups() as (wakeup, signals):
        return _Group(plan, path, wakeup, signals).run()


class _Group:
    """The processes of one launch, and how far it is."""

    def __init__(
        self, plan: Plan, path: str, wakeup: socket.socket, signals: tuple[int, ...]
    ) -> None:
        self._plan = plan
        self._path = path
        self._wakeup = wakeup
        self._signals = signals
        self._selector = selectors.DefaultSelector()
        self._coordinator: Child | None = None
        self._operator: Operator | None = None
        self._workers: list[Child] = []
        self._output: IO[bytes] | None = None
        self._half_line = b""
        self._ready = False
        self._ending = False
        self._dismissed = False
        self._asked = 0
        self._code: int | None = None
        self._alarm: tuple[float, Callable[[], None]] | None = None

    def run(self) -> int:
        try:
            self._watch(self._wakeup.fileno(), self._heard_signals)
            self._start_coordinator()
            while self._coordinator is not None or self._workers:
                for key, _ in self._selector.select(self._until_alarm_s()):
                    key.data()
                if self._alarm is not None and self._alarm[0] <= time.monotonic():
                    _, ring = self._alarm
                    self._alarm = None
                    ring()
        finally:
            left = [*self._workers, *([self._coordinator] if self._coordinator else [])]
            _kill(left)
            for child in left:
                child.reap()
            for ours in (self._operator, self._output):
                if ours is not None:
                    ours.close()
            self._selector.close()
        return self._code or 0

    # --- the coordinator ------------------------------------------------------------------------

    def _start_coordinator(self) -> None:
        command = [*module_command("coordinator"), "serve", "--socket", self._path]
        if self._plan.ram_budget is not None:
            command += ["--ram-budget", self._plan.ram_budget]
        self._coordinator = child = Child(command, stdout=subprocess.PIPE, own_group=True)
        self._output = output = child.process.stdout
        assert output is not None
        self._watch(output.fileno(), partial(self._read_output, output.fileno()))
        self._watch(child.pidfd, self._coordinator_ended)
        self._alarm_in(READY_LIMIT_S, self._never_ready)

    def _read_output(self, fd: int) -> None:
        data = os.read(fd, 65536)
        if not data:
            self._unwatch(fd)
        *lines, self._half_line = (self._half_line + data).split(b"\n")
        for line in lines:
            say(line.decode(errors="replace").removeprefix("weight-cache: "))
            if line.startswith(READY_MARK) and not self._ready:
                self._ready = True
                if not self._ending:
                    self._alarm = None
                    self._start_workers()

    def _never_ready(self) -> None:
        self._fail(CoordinatorLost(f"the coordinator was not ready within {READY_LIMIT_S:g} s"))

    def _coordinator_ended(self) -> None:
        child, self._coordinator = self._coordinator, None
        assert child is not None
        self._unwatch(child.pidfd)
        code = child.reap()
        if self._workers and not self._ending:
            self._fail(
                ConnectionLost(
                    f"the coordinator ended ({ending(code)}), so its workers end too",
                    remedy="see its last words above",
                )
            )
        elif not self._ready and self._code is None:
            self._code = exit_code(code) or CoordinatorLost.exit_code  # it has said why
            self._ending = True

    # --- workers --------------------------------------------------------------------------------

    def _start_workers(self) -> None:
        shared = {
            SOCKET_VARIABLE: os.path.abspath(self._path),
            "WEIGHT_CACHE_WORLD_SIZE": str(self._plan.workers),
        }
        stdin = subprocess.DEVNULL if os.isatty(0) else None
        for rank in range(self._plan.workers):
            environment = {**os.environ, **shared, "WEIGHT_CACHE_RANK": str(rank)}
            try:
                child = Child(self._plan.command, stdin=stdin, env=environment, own_group=True)
            except OSError as error:
                command = self._plan.command[0]
                self._fail(ArgumentRefused(f"{command!r} cannot be started: {error.strerror}"))
                return
            self._workers.append(child)
            self._watch(child.pidfd, partial(self._worker_ended, child))

    def _worker_ended(self, child: Child) -> None:
        self._workers.remove(child)
        self._unwatch(child.pidfd)
        code = child.reap()
        if code != 0 and self._code is None:
            self._code = exit_code(code)
            if not self._ending:
                say(f"worker {child.process.pid} ended ({ending(code)}), so the group ends")
        if not self._workers:
            self._no_worker_left()
        elif self._code is not None and not self._ending:
            self._end(signal.SIGTERM)

    def _no_worker_left(self) -> None:
        if not self._dismissed:
            self._alarm = None
        if self._code is None and self._coordinator is not None:
            self._drain()
        else:
            self._end_coordinator()

    # --- the end --------------------------------------------------------------------------------

    def _fail(self, error: WeightCacheError) -> None:
        show_error(error)
        if self._code is None:
            self._code = error.exit_code
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        """Ask the workers to end; kill them if they do not. Without any, end the coordinator."""
        for child in self._workers:
            child.send(number)
        if not self._workers:
            self._end_coordinator()
        elif not self._ending:
            self._alarm_in(self._plan.grace_s, partial(_kill, self._workers))
        self._ending = True

    def _drain(self) -> None:
        """Everything went well: let the coordinator go when nothing is held, or at a deadline."""
        self._ending = True
        try:
            self._operator = operator = Operator.connect(self._path, "launch")
            operator.send(Drain(operator.next_rid(), self._plan.grace_s))
        except WeightCacheError as error:
            show_error(error)
            self._end_coordinator()
            return
        self._watch(operator.fileno(), partial(self._drain_answered, operator))
        self._alarm_in(self._plan.grace_s + DRAIN_SLACK_S, self._end_coordinator)

    def _drain_answered(self, operator: Operator) -> None:
        try:
            received = operator.receive()
        except WeightCacheError as error:
            show_error(error)
            received = None
        if received is None:
            self._unwatch(operator.fileno())
            return
        message, fds = received
        close_all(fds)
        if isinstance(message, Fail):  # held by processes that are not of this group
            show_error(message.cause.error())
            self._end_coordinator()

    def _end_coordinator(self) -> None:
        """Ask it once: a second TERM could end it in the middle of cleaning up."""
        if self._coordinator is not None and not self._dismissed:
            self._dismissed = True
            self._coordinator.send(signal.SIGTERM)
            self._alarm_in(self._plan.grace_s, partial(_kill, [self._coordinator]))

    # --- events ---------------------------------------------------------------------------------

    def _heard_signals(self) -> None:
        for number in self._wakeup.recv(4096):
            if number in self._signals:
                self._heard(number)

    def _heard(self, number: int) -> None:
        if number not in ENDING:
            for child in self._workers:
                child.send(number)
            return
        self._asked += 1
        if self._code is None and (self._asked > 1 or not self._workers):
            self._code = 128 + number
        if self._asked == 1:
            self._end(number)
        elif self._workers:
            _kill(self._workers)
        elif self._coordinator is not None:
            _kill([self._coordinator])

    def _watch(self, fd: int, handle: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, handle)

    def _unwatch(self, fd: int) -> None:
        self._selector.unregister(fd)

    def _alarm_in(self, delay_s: float, ring: Callable[[], None]) -> None:
        self._alarm = (time.monotonic() + delay_s, ring)

    def _until_alarm_s(self) -> float | None:
        return None if self._alarm is None else max(0.0, self._alarm[0] - time.monotonic())


def _kill(children: Iterable[Child]) -> None:
    for child in children:
        child.send(signal.SIGKILL)


@contextmanager
def _socket_of(plan: Plan) -> Iterator[str]:
    """Give the path of the group's socket; a private one is in a new folder, removed at the end."""
    if plan.socket is not None:
        yield plan.socket
        return
    try:
        folder = tempfile.mkdtemp(prefix="weight-cache-", dir=os.environ.get("XDG_RUNTIME_DIR"))
    except OSError:  # the variable outlives its directory, as after `su`
        folder = tempfile.mkdtemp(prefix="weight-cache-")
    try:
        yield os.path.join(folder, "coordinator.sock")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _wakeups() -> Iterator[tuple[socket.socket, tuple[int, ...]]]:
    """Give a socket on which signals arrive as bytes, and those that do: none that is ignored."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    signals = tuple(number for number in FORWARDED if signal.getsignal(number) != signal.SIG_IGN)
    wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, _only_wake) for number in signals}
    # Were it inherited as ignored, the kernel would reap our children and keep their exit codes.
    handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield ours, signals
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        ours.close()
        theirs.close()


def _only_wake(number: int, frame: FrameType | None) -> None:
    """The byte on the wakeup socket says it all."""
