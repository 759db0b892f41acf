"""What `weight-cache launch` runs: one coordinator and N workers that live and end together.

One thread, one loop: signals through a wakeup fd, deaths through pidfds, notices, output and
answers through their own fds. It signals only processes it started, reaps only those, and returns
only when all of them are gone. Nobody is waited for: neither a coordinator that is stopped nor
whoever reads our output.

What fails is started again or ends the group; `roster` says which. The workers are not disturbed
while there is no coordinator. The end has an order: workers, then what is held, then the
coordinator; and a deadline for each.

    Note on process groups
    fact: a terminal sends INT to its whole foreground process group
    consequence: workers would get it twice, from the terminal and from here, and the coordinator
    would leave before the workers have given back what they hold
    choice: each child has a process group of its own, and hears signals only from here
    cost: a child cannot read the terminal, so its standard input is then empty
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from functools import partial
from typing import assert_never

from coordinator import front
from coordinator.coordinator_host import CoordinatorHost
from coordinator.display import say, show_error
from coordinator.fd_limit import raise_fd_limit
from coordinator.group_file import GroupFile, GroupReport, MemberReport
from coordinator.limits import read_limits
from coordinator.loop import Loop, wakeups
from coordinator.memory import default_ram_budget_bytes
from coordinator.output import Outlet, OutletText
from coordinator.plan import Plan
from coordinator.process_host import ending, exit_code
from coordinator.roster import Again, Finished, GivenUp, Member
from coordinator.workers import Worker, Workers
from shm_store.errors import (
    ArgumentRefused,
    ConnectionLost,
    CoordinatorLost,
    PlatformUnsupported,
    WeightCacheError,
    listed,
)
from shm_store.report import size_text
from shm_store.wire import RAM

ENDING = (signal.SIGINT, signal.SIGTERM)
"""What asks the group to end."""
FORWARDED = (*ENDING, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def launch(plan: Plan) -> int:
    """Run the group until it has ended, and return its exit code.

    0 if every worker ended with 0 and nothing is held, else that of the first failure which was
    not followed by a restart: 128 + N for signal N.

    Raises:
        ArgumentRefused: the command cannot be found, or the limits cannot be read.
        PlatformUnsupported: no pidfds here.
    """
    if not hasattr(os, "pidfd_open"):
        raise PlatformUnsupported("this system has no pidfd_open")
    if shutil.which(plan.command[0]) is None:
        raise _no_command(plan.command[0])
    if plan.limits is not None:
        read_limits(plan.limits)  # before anything is started; read again where it counts
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            # As under nohup. Here it is no terminal's hangup, and whoever sends it means it.
            signal.signal(signal.SIGHUP, lambda *_: None)
    with _private_folder() as folder:
        return front.run(partial(_supervise, plan, folder), FORWARDED, plan.grace_s)


def _no_command(name: str) -> ArgumentRefused:
    """Return why `name` is none that can be run, and what to do."""
    if not os.path.dirname(name):
        why = "it is not found on PATH"
        remedy = "see `echo $PATH`, or give its path"
        if os.path.isfile(name):
            remedy = f"for the file in this folder write ./{name}"
    elif os.path.isdir(name):
        why, remedy = "it is a folder", "give the path of a program in it"
    elif os.path.exists(name):
        why = "it is not executable"
        remedy = "`chmod +x` it, or name what runs it first, as in `-- python app.py`"
    else:
        why, remedy = "it is not found", "paths that are relative begin in the current folder"
        if os.path.isabs(name):
            remedy = "see whether the path is right"
    return ArgumentRefused(f"{name!r} is no command that can be run: {why}", remedy=remedy)


def _supervise(plan: Plan, folder: str, front_fd: int) -> int:
    """Run the group from a process of its own; see `front`."""
    path = plan.socket or os.path.join(folder, "coordinator.sock")
    with ExitStack() as stack:
        # The front does it too; but it may be gone by then.
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        wakeup, signals = stack.enter_context(wakeups(FORWARDED))
        file = stack.enter_context(GroupFile(os.path.abspath(path)))
        return _Group(plan, path, folder, file, signals).run(wakeup, front_fd)


class _Group:
    """The processes of one launch, and how far it is."""

    def __init__(
        self, plan: Plan, path: str, folder: str, file: GroupFile, signals: tuple[int, ...]
    ) -> None:
        self._plan = plan
        self._path = path
        self._file = file
        self._signals = signals
        self._launched = os.getppid()
        self._limits = {} if plan.limits is None else read_limits(plan.limits)
        self._unsent = {pool: size for pool, size in self._limits.items() if pool != RAM}
        """Limits that were read while no coordinator could be told. It is started with RAM's."""
        self._loop = Loop()
        # The limit of open files as it was is for the workers: `select` cannot count far.
        self._fds_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise_fd_limit()
        self._outlets = (Outlet(self._loop, 1), Outlet(self._loop, 2))
        self._coordinator = CoordinatorHost(
            self._loop, self, path, folder, plan.workers, self._fds_limit
        )
        self._coordinator_member = Member(plan.coordinator_rule)
        self._coordinator_end = ""
        self._workers = Workers(self._loop, plan, path, self._outlets, self._fds_limit)
        self._ending = False
        self._last_step = False
        """No worker is left; the coordinator is on its way out."""
        self._not_drained: WeightCacheError | None = None
        """Why the last drain did not end as it should. Its end may say more."""
        self._asked = 0
        self._code = 0

    def run(self, wakeup: socket.socket, front_fd: int) -> int:
        with redirect_stderr(OutletText(self._outlets[1])):
            try:
                self._loop.when_readable(wakeup.fileno(), partial(self._heard_signals, wakeup))
                self._loop.when_readable(front_fd, partial(self._front_ended, front_fd))
                self._start_coordinator()
                while not self._over():
                    self._loop.turn()
            finally:
                self._kill_workers()
                for worker in self._workers.running():
                    self._workers.reap(worker)
                self._coordinator.close()
                self._write_out()
        for outlet in self._outlets:
            outlet.close()
        self._loop.close()
        return self._code

    def _over(self) -> bool:
        if self._coordinator.pid is not None or self._workers.running():
            return False
        return self._ending

    # --- the coordinator ------------------------------------------------------------------------

    def _start_coordinator(self) -> None:
        self._coordinator_member.started(time.monotonic())
        if RAM not in self._limits:
            # Once for all its lives: later, what is kept for it would count as used.
            budget = self._plan.ram_budget_bytes
            self._limits[RAM] = default_ram_budget_bytes() if budget is None else budget
        try:
            self._coordinator.start(self._limits[RAM], huge_pages=self._plan.huge_pages)
        except OSError as error:
            self._fail(CoordinatorLost(f"no coordinator can be started: {error.strerror}"))
        self._publish()

    def coordinator_ready(self) -> None:
        self._send_limits()
        self._publish()
        for worker in self._workers.all:
            if worker.due and not self._ending:
                self._start_worker(worker)

    def coordinator_ended(self, code: int, by_us: bool) -> None:
        self._coordinator_end = ending(code)
        host = self._coordinator
        if not host.was_ready:
            self._set_code(code if code > 0 else CoordinatorLost.exit_code)  # it has said why
            self._ending = True
        elif self._last_step:
            if code != 0 and not by_us:
                say(f"the coordinator ended ({ending(code)}) before it was drained")
                self._set_code(exit_code(code))
            elif self._not_drained is not None:
                show_error(self._not_drained)
                self._set_code(self._not_drained.exit_code)
        elif code == 0 or host.leaving:
            if not self._ending:
                self._fail(
                    ConnectionLost(
                        f"the coordinator was ended ({ending(code)}), so its workers end too",
                        remedy="",
                    )
                )
        else:
            self._coordinator_failed(code)
        self._publish()

    def _coordinator_failed(self, code: int) -> None:
        """Start another one, while the workers go on."""
        what = f"the coordinator ended ({ending(code)})"
        match self._coordinator_member.ended(code, time.monotonic()):
            case Again(delay_s):
                say(f"{what}; it is started again in {delay_s:g} s, and the workers go on")
                self._loop.alarm("coordinator start", delay_s, self._start_coordinator)
            case GivenUp(reason):
                why = f": {reason}" if reason else ""
                say(f"{what}, so its workers end too{why}")
                self._set_code(exit_code(code))
                self._end(signal.SIGTERM)
            case Finished():
                raise AssertionError("a failure is no end that was meant")
            case other:
                assert_never(other)

    # --- workers --------------------------------------------------------------------------------

    def _start_worker(self, worker: Worker) -> None:
        worker.due = not self._coordinator.ready
        if worker.due:
            return  # its first call would fail
        worker.member.started(time.monotonic())
        try:
            self._workers.start(worker, self._worker_ended)
        except OSError as error:
            worker.state = "ended"
            self._fail(self._not_started(error))
        self._publish()

    def _worker_ended(self, worker: Worker) -> None:
        pid, (never_ran, code) = worker.pid, self._workers.reap(worker)
        worker.last_end = ending(code)
        worker.state = "finished" if code == 0 else "ended"
        if never_ran is not None:
            self._fail(self._not_started(never_ran))
        elif self._ending:
            self._set_code(exit_code(code))
        else:
            self._decide(worker, f"{worker.name} (pid {pid}) ended ({ending(code)})", code)
        self._publish()
        if self._workers.over():
            self._no_worker_left()

    def _decide(self, worker: Worker, what: str, code: int) -> None:
        """A worker ended and the group does not: see whether it is started again."""
        match worker.member.ended(code, time.monotonic()):
            case Again(delay_s):
                say(f"{what}; it is started again in {delay_s:g} s")
                worker.state = "restarting"
                self._loop.alarm(worker.name, delay_s, partial(self._start_worker, worker))
            case GivenUp(reason):
                why = f": {reason}" if reason else ""
                say(f"{what}, so the group ends{why}")
                self._set_code(exit_code(code))
                self._end(signal.SIGTERM)
            case Finished():
                pass
            case other:
                assert_never(other)

    def _not_started(self, error: OSError) -> ArgumentRefused:
        return ArgumentRefused(f"{self._plan.command[0]!r} cannot be started: {error.strerror}")

    # --- the end --------------------------------------------------------------------------------

    def _fail(self, error: WeightCacheError) -> None:
        show_error(error)
        self._set_code(error.exit_code)
        self._end(signal.SIGTERM)

    def _set_code(self, code: int) -> None:
        """The first failure's is the group's. 0 is none."""
        self._code = self._code or code

    def _end(self, number: int) -> None:
        """Ask the workers to end; kill them if they do not. Then drain, then end the coordinator.

        A coordinator that is to be started again is, while there are workers: they may need it to
        finish what they do.
        """
        if self._ending:
            return  # they have heard it; a second one is often taken for impatience
        self._ending = True
        for worker in self._workers.all:
            self._loop.cancel(worker.name)
            if worker.child is None and worker.state == "restarting":
                worker.state = "ended"
        self._loop.alarm("workers end", self._plan.grace_s, self._grace_is_over)
        self._workers.send(number)
        self._publish()
        if self._workers.over():
            self._no_worker_left()

    def _grace_is_over(self) -> None:
        names = listed([f"{worker.name} (pid {worker.pid})" for worker in self._workers.running()])
        say(f"not ended within {self._plan.grace_s:g} s, so killed: {names}")
        self._kill_workers()

    def _kill_workers(self) -> None:
        self._workers.send(signal.SIGKILL)

    def _no_worker_left(self) -> None:
        """Let the coordinator go when nothing is held, or at a deadline."""
        if self._last_step:
            return
        self._ending = self._last_step = True
        self._publish()
        self._loop.cancel("workers end")
        self._loop.cancel("coordinator start")
        if self._coordinator.ready and self._asked < 2:
            self._coordinator.drain(self._plan.grace_s, self._drained)
        else:
            self._coordinator.end(self._plan.grace_s)

    def _drained(self, error: WeightCacheError | None) -> None:
        """Nothing is held any more, and it leaves; or it cannot, and is told to."""
        if error is None:
            end = partial(self._coordinator.end, self._plan.grace_s)
            self._loop.alarm("coordinator end", self._plan.grace_s, end)
            return
        if not self._coordinator.told_to_end:
            self._not_drained = error
        self._coordinator.end(self._plan.grace_s)

    def _write_out(self) -> None:
        """Wait for whoever reads our output, as long as it goes on."""
        left = [outlet for outlet in self._outlets if outlet.unwritten_bytes]
        while left:
            before = sum(outlet.unwritten_bytes for outlet in left)
            late: list[bool] = []
            self._loop.alarm("output", self._plan.grace_s, partial(late.append, True))
            self._loop.turn()
            left = [outlet for outlet in left if outlet.unwritten_bytes]
            if late and sum(outlet.unwritten_bytes for outlet in left) == before:
                break

    # --- events ---------------------------------------------------------------------------------

    def _front_ended(self, front_fd: int) -> None:
        self._loop.forget(front_fd)
        say(f"the process that was launched (pid {self._launched}) is gone, so its group ends")
        if not self._asked:
            self._asked_to_end(signal.SIGTERM)

    def _heard_signals(self, wakeup: socket.socket) -> None:
        for number in wakeup.recv(4096):
            if number in self._signals:
                self._heard(number)

    def _heard(self, number: int) -> None:
        if number == signal.SIGHUP and self._plan.limits is not None:
            self._reload(self._plan.limits)
            return
        if number not in ENDING:
            self._workers.send(number)
            return
        name = signal.Signals(number).name.removeprefix("SIG")
        if self._asked:
            say(f"{name} again: what is waited for is killed")
        elif not self._ending:
            say(f"{name}: the group ends")
        self._asked_to_end(number)

    def _asked_to_end(self, number: int) -> None:
        self._asked += 1
        if self._asked > 1 or not self._workers.running():
            self._set_code(128 + number)
        if self._asked == 1:
            self._end(number)
        elif self._workers.running():
            self._kill_workers()
        else:
            self._coordinator.kill()

    def _reload(self, path: str) -> None:
        """Read the limits anew. If they cannot be read, or one is refused, the old one stays.

        What is read while there is no coordinator is for the next: to it, what was stored by the
        one before would count more than the budget that it is started with.
        """
        try:
            limits = read_limits(path)
        except ArgumentRefused as error:
            error.message += "; nothing was changed"
            show_error(error)
            return
        self._limits.update(limits)
        self._unsent.update(limits)
        sizes = [f"{pool} {size_text(limit_bytes)}" for pool, limit_bytes in limits.items()]
        say(f"read the limits in {path}: {', '.join(sizes) or 'none'}")
        if self._coordinator.ready:
            self._send_limits()

    def _send_limits(self) -> None:
        unsent, self._unsent = self._unsent, {}
        for pool, limit_bytes in unsent.items():
            self._coordinator.limit(pool, limit_bytes, _complain)

    def _publish(self) -> None:
        """Say in the group's file who is in it, once the socket is surely ours."""
        host = self._coordinator
        if not host.was_ready:
            return
        state = "running" if host.pid is not None else "ended" if self._ending else "restarting"
        restarts, last_end = self._coordinator_member.restarts, self._coordinator_end
        members = [MemberReport("coordinator", state, host.pid, restarts, last_end)]
        for worker in self._workers.all:
            restarts, last_end = worker.member.restarts, worker.last_end
            members.append(MemberReport(worker.name, worker.state, worker.pid, restarts, last_end))
        self._file.write(GroupReport(self._launched, self._ending, tuple(members)))


def _complain(error: WeightCacheError | None) -> None:
    if error is not None:
        show_error(error)


@contextmanager
def _private_folder() -> Iterator[str]:
    """Give a new folder that is removed at the end: for the group's sockets."""
    try:
        folder = tempfile.mkdtemp(prefix="weight-cache-", dir=os.environ.get("XDG_RUNTIME_DIR"))
    except OSError:  # the variable outlives its directory, as after `su`
        folder = tempfile.mkdtemp(prefix="weight-cache-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
