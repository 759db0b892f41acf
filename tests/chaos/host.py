"""A group that is put under chaos, as seen from outside: started, paused, looked at, ended."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from coordinator.group_file import GroupReport, read_group
from tests.chaos import kernel, weights
from tests.chaos.group import CGROUP_VARIABLE
from tests.chaos.hook import FOLDER_VARIABLE
from tests.chaos.watch import Violation, until
from tests.chaos.worker import CONTROL, GO_ALONE
from tests.processes import ROOT, children_of

WHOLE_S = 60.0
"""In which everybody is up again after a fault: importing torch takes a while on a busy machine."""
PAUSE_S = 120.0
GONE_S = 40.0
"""In which a group is gone whose supervisor was killed: its grace, twice, and some more."""

SITE = Path(__file__).parent / "site"


class Worker:
    """The control connection of one worker process."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.pid = 0
        self.rank = -1
        self.facts: tuple[int, int, float] | None = None
        """What it has done, inferred, and its longest pause; None while it works."""
        self._half = b""

    def read(self) -> bool:
        """Take in what it says; False once it has gone."""
        try:
            data = self.socket.recv(65536)
        except ConnectionResetError:
            data = b""
        if not data:
            self.socket.close()
            return False
        *lines, self._half = (self._half + data).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if said["said"] == "up":
                self.pid, self.rank = said["pid"], said["rank"]
            else:
                self.facts = tuple(said["facts"])
        return True

    def tell(self, line: str) -> None:
        try:
            self.socket.sendall(f"{line}\n".encode())
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has just ended, and is missed soon enough


class Host:
    """One group after another, in one folder."""

    def __init__(self, folder: str, workers: int, cgroup: str | None) -> None:
        self.folder = folder
        self.workers = workers
        self.socket = os.path.join(folder, "s")
        self.cgroup = cgroup
        self.log = os.path.join(folder, "log")
        self.full = False
        """What the group writes goes to a full disk."""
        self.restarts: dict[str, int] = {}
        """Of each member, as it ought to be."""
        self.connected: list[Worker] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(os.path.join(folder, CONTROL))
        self._listener.listen(64)
        self._listener.setblocking(False)
        self.process: subprocess.Popen[bytes] | None = None
        os.mkdir(self.temporary)

    @property
    def temporary(self) -> str:
        return os.path.join(self.folder, "tmp")

    # --- its life ---------------------------------------------------------------------------------

    def start(self, log: str | None = None) -> None:
        """Start a group. What it says goes into `log`; the one before keeps its own, renamed."""
        self.full = log is not None
        if os.path.exists(self.log):
            os.rename(self.log, f"{self.log}.{time.monotonic_ns()}")
        environment = {
            **{k: v for k, v in os.environ.items() if k != "XDG_RUNTIME_DIR"},
            "PYTHONPATH": f"{SITE}:{ROOT}",
            "TMPDIR": self.temporary,
            FOLDER_VARIABLE: self.folder,
        }
        if self.cgroup is not None:
            environment[CGROUP_VARIABLE] = self.cgroup
        budget = str(weights.BUDGET_BYTES)
        with open(log or self.log, "ab", buffering=0) as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.group", self.socket, str(self.workers), budget],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )
        names = ["coordinator", *(f"worker {rank}" for rank in range(self.workers))]
        self.restarts = dict.fromkeys(names, 0)

    def end(self) -> None:
        """Kill everything of this run. For the end of chaos, however it came."""
        while pids := kernel.processes(self.folder):
            for pid in pids:
                kill(pid, signal.SIGKILL)
            if self.process is not None:
                self.process.wait()
        self.forget()
        self._listener.close()

    def forget(self) -> None:
        for worker in self.connected:
            worker.socket.close()
        self.connected.clear()

    def await_gone(self) -> None:
        """Wait until no process of the group is left, and reap the one that was started."""
        until(
            lambda: not kernel.processes(self.folder),
            GONE_S,
            lambda: f"processes are left: {self._described()}",
        )
        assert self.process is not None
        self.process.wait()
        self.forget()

    def _described(self) -> list[str]:
        return [f"{pid}: {kernel.command(pid)}" for pid in kernel.processes(self.folder)]

    def process_ended(self) -> bool:
        """The process that was started has ended."""
        return self.process is not None and self.process.poll() is not None

    # --- who is in it -----------------------------------------------------------------------------

    @property
    def front(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def supervisor(self) -> int:
        return min(children_of(self.front), key=kernel.started_at)

    def report(self) -> GroupReport:
        """What the group says of itself."""
        return until(lambda: read_group(self.socket), WHOLE_S, lambda: "the group has no file")

    def pid_of(self, name: str) -> int:
        """Return the pid of a member that runs, or is about to."""

        def look() -> int | None:
            found = read_group(self.socket)
            members = {} if found is None else {one.name: one.pid for one in found.members}
            return members.get(name)

        return until(look, WHOLE_S, lambda: f"there is no {name}")

    def name_of(self, pid: int) -> str:
        (name,) = [member.name for member in self.report().members if member.pid == pid]
        return name

    def await_whole(self) -> None:
        """Wait until everybody is there, restarted as often as ought to be and no more."""
        until(self._is_whole, WHOLE_S, lambda: f"the group is not whole: {self._state()}")

    def _is_whole(self) -> bool:
        self._hear()
        assert self.process is not None
        if self.process.poll() is not None:
            raise Violation(f"the group has ended with {self.process.returncode}")
        found = read_group(self.socket)
        if found is None:
            return False
        for member in found.members:
            wanted = self.restarts[member.name]
            if member.restarts > wanted:
                raise Violation(
                    f"{member.name} was started again {member.restarts} times instead of {wanted}, "
                    f"and last ended {member.last_end}"
                )
            if member.restarts < wanted or member.state != "running" or member.pid is None:
                return False
        up = {worker.pid for worker in self.connected if worker.pid}
        return up == {member.pid for member in found.members if member.name != "coordinator"}

    def _state(self) -> str:
        up = sorted(worker.pid for worker in self.connected)
        return f"{read_group(self.socket)}, wanted {self.restarts}, up {up}"

    # --- what workers are told --------------------------------------------------------------------

    def go(self, seed: str, *, alone: bool) -> None:
        """Have all workers work, each by lots of its own; `alone`: see `worker`."""
        for worker in self.connected:
            worker.facts = None
            worker.tell(f"{GO_ALONE if alone else 'go'} {seed} {worker.rank}")

    def pause(self) -> None:
        """Have all workers finish what they are at and give back what they let go of."""
        for worker in self.connected:
            worker.facts = None
            worker.tell("pause")
        until(self._is_paused, PAUSE_S, lambda: f"who does not pause: {self._busy()}")

    def _is_paused(self) -> bool:
        self._hear()
        if len(self.connected) != self.workers:
            raise Violation(f"a worker ended while it was to pause: {self._state()}")
        return not self._busy()

    def _busy(self) -> list[int]:
        return [worker.pid for worker in self.connected if worker.facts is None]

    def _hear(self) -> None:
        try:
            while True:
                accepted, _ = self._listener.accept()
                accepted.setblocking(True)
                self.connected.append(Worker(accepted))
        except BlockingIOError:
            pass
        readable, _, _ = select.select([worker.socket for worker in self.connected], [], [], 0)
        for worker in list(self.connected):
            if worker.socket in readable and not worker.read():
                self.connected.remove(worker)


def kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it has ended by itself
