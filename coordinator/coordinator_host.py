"""The one coordinator of a group over all its lives: started, heard, asked, told to end.

It keeps nothing of what a coordinator knows. What a coordinator stored with us, by systemd's
protocol, the next one finds at its start. Whether there is a next one the supervisor decides.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from coordinator import notify
from coordinator.display import say
from coordinator.fd_store import FDS_LIMIT, FdStore
from coordinator.loop import Loop
from coordinator.notify_socket import NotifySocket
from coordinator.operator import Operator
from coordinator.process_host import Child, Leash, module_command
from shm_store.channel import close_all
from shm_store.errors import ArgumentRefused, ConnectionLost, CoordinatorLost, WeightCacheError
from shm_store.keys import RequestId
from shm_store.wire import Done, Drain, Fail, FromSession, Limit

READY_LIMIT_S = 30.0
ANSWER_LIMIT_S = 20.0
DRAIN_SLACK_S = 2.0
"""How long after a drain's deadline its answer may come."""

FDS_KEPT_FREE = 256
FDS_PER_WORKER = 6
"""What is for the store is what these leave."""

LAST_WORDS = 4096
"""So many notices of a coordinator that has ended are read; one that floods is cut off."""

READY_MARK = b"weight-cache: ready on "
READ_BYTES = 65536

Answered = Callable[[WeightCacheError | None], None]
"""Called once: with nothing when it is done, else with why not."""


class Heard(Protocol):
    """What the host tells the supervisor."""

    def coordinator_ready(self) -> None:
        """It serves."""

    def coordinator_ended(self, code: int, by_us: bool) -> None:
        """Its process has been reaped.

        Args:
            code: as `subprocess` says it.
            by_us: it is the signal that we have sent.
        """


class CoordinatorHost:
    """Runs one coordinator at a time."""

    def __init__(
        self, loop: Loop, heard: Heard, path: str, folder: str, workers: int, fds_limit: int
    ) -> None:
        """Nothing runs yet.

        Args:
            path: of the coordinator's socket.
            folder: a private one, for the notify socket.
            workers: how many fds are not for the store follows from it.
            fds_limit: the coordinator's soft limit of open files.
        """
        self._loop = loop
        self._heard = heard
        self._path = path
        self._fds_limit = fds_limit
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = soft - FDS_KEPT_FREE - FDS_PER_WORKER * workers
        # Handing over n takes 2n for a moment.
        self.store = FdStore(max(0, min(FDS_LIMIT, room // 2)))
        path = os.path.join(folder, "notify.sock")
        try:
            self._notices = NotifySocket(path, self.store, say)
        except OSError as error:
            raise ArgumentRefused(
                f"{path} cannot be bound: {error.strerror or error}",
                remedy="set TMPDIR, or XDG_RUNTIME_DIR, to a short path",
            ) from error
        self._loop.when_readable(self._notices.fileno(), self._read_notices)
        self._child: Child | None = None
        self._output = -1
        self._half_line = b""
        self._operators: list[Operator] = []
        self._told_to_end = False
        self.ready = False
        """The one that runs now has said that it serves."""
        self.was_ready = False
        """One ever has."""
        self.leaving = False
        """It has said that it ends on purpose."""

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.process.pid

    @property
    def told_to_end(self) -> bool:
        """We have asked it to leave."""
        return self._told_to_end

    # --- its life -------------------------------------------------------------------------------

    def start(self, ram_budget_bytes: int, *, huge_pages: bool = True) -> None:
        """Start one. What is stored comes with it."""
        fds, names = self.store.handover()
        command = [*module_command("coordinator"), "serve", "--socket", self._path]
        command += ["--ram-budget", str(ram_budget_bytes)]
        command += [] if huge_pages else ["--no-huge-pages"]
        self._child = child = Child(
            command,
            stdout=subprocess.PIPE,
            env=self._environment(names),
            own_group=True,
            leash=Leash(signal.SIGTERM, tuple(fds), self._fds_limit),
        )
        self.ready = self.leaving = False
        self._half_line = b""
        assert child.process.stdout is not None
        self._output = child.process.stdout.fileno()
        os.set_blocking(self._output, False)
        self._loop.when_readable(self._output, self._read_output)
        self._loop.when_readable(child.pidfd, self._ended)
        self._loop.alarm("coordinator ready", READY_LIMIT_S, self._never_ready)

    def _environment(self, names: Sequence[str]) -> Mapping[str, str]:
        environment = {
            **os.environ,
            notify.NOTIFY_SOCKET: self._notices.path,
            notify.STORE_LIMIT: str(self.store.limit),
        }
        for variable in (notify.LISTEN_PID, notify.LISTEN_FDS, notify.LISTEN_FDNAMES):
            environment.pop(variable, None)  # those of whoever started us
        if names:
            environment[notify.LISTEN_FDS] = str(len(names))
            environment[notify.LISTEN_FDNAMES] = ":".join(names)
        return environment

    def end(self, grace_s: float) -> None:
        """Ask it once, and kill it when the time is up.

        A second TERM could end it in the middle of cleaning up.
        """
        if self._child is not None and not self._told_to_end:
            self._told_to_end = True
            self._child.send(signal.SIGTERM)
            self._loop.alarm("coordinator end", grace_s, self.kill)

    def kill(self) -> None:
        if self._child is not None:
            self._child.send(signal.SIGKILL)

    def close(self) -> None:
        """Kill it if it runs, and let go of everything, what is stored too."""
        if self._child is not None:
            self.kill()
            self._child.reap()
        self._forget_child()
        for operator in self._operators:
            operator.close()
        self._loop.forget(self._notices.fileno())
        self._notices.close()
        self.store.close()

    def _never_ready(self) -> None:
        error = CoordinatorLost(f"the coordinator was not ready within {READY_LIMIT_S:g} s")
        say(error.message)
        self.kill()

    def _ended(self) -> None:
        child = self._child
        assert child is not None
        # While its pid is still its own: what it said last counts.
        notice = self._notices.hear(child.process.pid, LAST_WORDS)
        self.leaving = self.leaving or notice.stopping
        self._read_output()
        self._loop.forget(child.pidfd)
        sent = child.sent  # reaping kills what is left of its process group
        code = child.reap()
        self._forget_child()
        self._heard.coordinator_ended(code, sent != 0 and code == -sent)

    def _forget_child(self) -> None:
        for alarm in ("coordinator ready", "coordinator end"):
            self._loop.cancel(alarm)
        child, self._child = self._child, None
        self.ready = False
        if child is not None and child.process.stdout is not None:
            self._loop.forget(self._output)
            child.process.stdout.close()

    # --- what it says ---------------------------------------------------------------------------

    def _read_notices(self) -> None:
        notice = self._notices.hear(self.pid or 0)
        self.leaving = self.leaving or notice.stopping
        if notice.ready:
            self._became_ready()

    def _read_output(self) -> None:
        """Pass on what it prints. Its log goes to our standard error by itself."""
        try:
            data = os.read(self._output, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._loop.forget(self._output)
        *lines, self._half_line = (self._half_line + data).split(b"\n")
        self._half_line = self._half_line[:READ_BYTES]
        for line in lines:
            say(line.decode(errors="replace").removeprefix("weight-cache: "))
            if line.startswith(READY_MARK):
                self._became_ready()

    def _became_ready(self) -> None:
        if not self.ready:
            self.ready = self.was_ready = True
            self._loop.cancel("coordinator ready")
            self._heard.coordinator_ready()

    # --- what it is asked -----------------------------------------------------------------------

    def limit(self, pool: str, limit_bytes: int, answered: Answered) -> None:
        """Set the limit of a pool."""
        self._ask(lambda rid: Limit(rid, pool, limit_bytes), ANSWER_LIMIT_S, answered)

    def drain(self, timeout_s: float, answered: Answered) -> None:
        """Have it take no new work and leave when nothing is held; or say who holds what."""
        limit_s = timeout_s + DRAIN_SLACK_S
        self._ask(lambda rid: Drain(rid, timeout_s), limit_s, answered)

    def _ask(
        self, message: Callable[[RequestId], FromSession], limit_s: float, answered: Answered
    ) -> None:
        """Send one request, and have its final answer reported. Nothing here waits for it."""
        try:
            operator = Operator.connect(self._path, "launch")
            self._operators.append(operator)
            operator.send(message(operator.next_rid()))
        except WeightCacheError as error:
            answered(error)
            return
        fd = operator.fileno()

        def finish(error: WeightCacheError | None) -> None:
            self._loop.cancel(f"answer {fd}")
            self._loop.forget(fd)
            self._operators.remove(operator)
            operator.close()
            answered(error)

        def read() -> None:
            try:
                received = operator.receive()
            except WeightCacheError as error:
                finish(error)
                return
            if received is None:
                finish(None if operator.left else ConnectionLost("the coordinator went away"))
                return
            answer, fds = received
            close_all(fds)
            if isinstance(answer, Fail):
                finish(answer.cause.error())
            elif isinstance(answer, Done):
                finish(None)

        self._loop.when_readable(fd, read)
        silent = CoordinatorLost(f"the coordinator did not answer within {limit_s:g} s")
        self._loop.alarm(f"answer {fd}", limit_s, partial(finish, silent))
