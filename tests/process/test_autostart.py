"""`attach(autostart=True)`: a coordinator for those who find none, which is nobody's child."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shm_store import channel
from shm_store.errors import NoCoordinator
from tests.gpu_worker.served import wait_until, write
from tests.process.worker_process import Raised, WorkerProcess
from tests.processes import WAIT_S, Peer, children_of

pytestmark = pytest.mark.process

STARTERS = 16

PREPARED = """
import os
os.environ.pop("WEIGHT_CACHE_SOCKET", None)
os.environ |= environment
import gpu_worker, torch
from gpu_worker import autostart
autostart.LEAVE_AFTER_S = leave_after_s
"""
ATTACH = "worker = gpu_worker.attach(path, autostart=True)"


IGNORE = "import signal; signal.signal(signal.SIGCHLD, getattr(signal, children))"


class Started:
    """The coordinator that answers on a path, whoever started it."""

    def __init__(self, path: str) -> None:
        self.path = path
        connected = channel.connect(path)
        self.pid = connected.credentials().pid  # of who listens
        self.pidfd = connected.open_pidfd()
        connected.close()

    def end(self, number: int = signal.SIGTERM) -> None:
        signal.pidfd_send_signal(self.pidfd, number)
        self.wait()

    def wait(self) -> None:
        assert select.select([self.pidfd], [], [], WAIT_S)[0], "it does not end"

    def stat(self, pid: int | None = None) -> list[str]:
        """State, parent, group, session, terminal and more of a process; by default, its own."""
        text = Path(f"/proc/{pid or self.pid}/stat").read_text()
        return text.rpartition(")")[2].split()


class Place:
    """A socket that nobody serves yet, and those who attach to it."""

    def __init__(self, folder: Path, fork) -> None:
        self.folder = folder
        self.path = str(folder / "run" / "c.sock")
        self.environment = {"XDG_STATE_HOME": str(folder / "state")}
        self._fork = fork

    def fork(self, leave_after_s: float = 1800.0) -> WorkerProcess:
        """A process that is about to attach."""
        process = self._fork()
        process.do(PREPARED, environment=self.environment, leave_after_s=leave_after_s)
        return process

    def attach(self, process: WorkerProcess) -> None:
        process.do(ATTACH, path=self.path)

    def coordinator(self) -> Started:
        return Started(self.path)

    def processes(self) -> list[int]:
        """Every process that was told of this socket on its command line."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if self.path.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(int(pid))
            except OSError:
                continue  # it ended while we looked
        return found

    def play_systemd(self, tried: str, starts: str = ":") -> Path:
        """Have a `systemd-run` of the test's found; its calls are in the file returned.

        Args:
            tried: what it does, in shell, with a command that only shows that it ran.
            starts: what it does before it becomes any other.
        """
        calls = self.folder / "calls"
        program = self.folder / "bin" / "systemd-run"
        program.parent.mkdir()
        program.write_text(
            f'#!/bin/sh\necho "$@" >> {calls}\nwhile [ "$1" != -- ]; do shift; done\nshift\n'
            f'if [ "$1" = echo ]; then {tried}; fi\n{starts}\nexec "$@"\n'
        )
        program.chmod(0o755)
        self.environment["PATH"] = f"{program.parent}:{os.environ['PATH']}"
        return calls

    def log(self) -> str:
        (log,) = (self.folder / "state" / "weight-cache" / "log").iterdir()
        assert stat.S_IMODE(log.stat().st_mode) == 0o600
        return log.read_text()

    def end(self) -> None:
        """End what a test left, also one that does not mind TERM."""
        try:
            self.coordinator().end(signal.SIGKILL)
        except NoCoordinator:
            pass
        wait_until(lambda: not self.processes())


@pytest.fixture
def place(nursery, tmp_path):
    made = Place(tmp_path, nursery.fork)
    yield made
    nursery.end_workers()
    Peer.close_all()
    made.end()


def test_of_many_that_attach_at_once_one_starts_a_coordinator(place, tmp_path):
    """Its folder did not exist. All share one copy of what they load."""
    processes = [place.fork() for _ in range(STARTERS)]
    with ThreadPoolExecutor(STARTERS) as pool:
        list(pool.map(place.attach, processes))
    assert place.processes() == [place.coordinator().pid]
    assert stat.S_IMODE(os.stat(os.path.dirname(place.path)).st_mode) == 0o700
    assert place.log().count("ready on") == 1

    file = write(tmp_path / "w.safetensors", 1.0)
    for process in processes:
        process.do("state = worker.state_dict('k', source=file)", file=file)
    report = Peer(place.path, role="operator").status()
    workers = sorted(session.pid for session in report.sessions)
    assert workers == sorted(process.pid for process in processes)
    (generation,) = report.generations
    assert len(generation.leases) == STARTERS


def test_it_is_no_part_of_its_starter(place):
    """No group, session, terminal, parent, file or variable of it; and no signal is blocked."""
    place.environment |= {
        "NOTIFY_SOCKET": "/no/manager",
        "LISTEN_FDS": "1",
        "LISTEN_PID": "1",
        "FDSTORE": "3",
        "WEIGHT_CACHE_RANK": "7",
    }
    process = place.fork()
    process.do(
        "import fcntl, signal, termios; os.setsid(); ours, terminal = os.openpty();"
        "fcntl.ioctl(terminal, termios.TIOCSCTTY, 0);"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})"
    )
    place.attach(process)
    assert process.do("os.readlink('/proc/self/cwd')") != "/"
    assert children_of(process.pid) == []

    coordinator = place.coordinator()
    _, parent, group, session, terminal, *_ = coordinator.stat()
    _, _, its_group, its_session, its_terminal, *_ = coordinator.stat(process.pid)
    assert int(parent) not in (process.pid, os.getpid())
    assert group != its_group and session != its_session and str(coordinator.pid) != session
    assert (terminal, its_terminal == "0") == ("0", False)
    proc = Path(f"/proc/{coordinator.pid}")
    assert os.readlink(proc / "cwd") == "/"
    assert [os.readlink(proc / "fd" / number) for number in "01"] == [os.devnull] * 2
    assert os.readlink(proc / "fd" / "2").endswith("run%c.sock.log")
    variables = (proc / "environ").read_text()
    assert not re.search(r"NOTIFY_SOCKET|LISTEN_|FDSTORE|WEIGHT_CACHE_", variables), variables

    operator = Peer(place.path, role="operator")
    process.end(signal.SIGKILL)
    wait_until(lambda: operator.status().sessions == ())
    coordinator.end(signal.SIGTERM)
    assert not os.path.exists(place.path)


def test_its_start_outlives_who_asked_for_it(place):
    go_on = place.folder / "go on"
    os.mkfifo(go_on)
    place.play_systemd("echo apart; exit 0", f"read word < '{go_on}'")
    process = place.fork()
    process.lines.write(json.dumps([ATTACH, {"path": place.path}]) + "\n")
    process.lines.flush()
    with go_on.open("w") as waiting:  # opened, once it waits
        assert place.processes() and not os.path.exists(place.path)
        process.end(signal.SIGKILL)
        waiting.write("now\n")
    wait_until(lambda: os.path.exists(place.path))
    place.attach(place.fork())
    wait_until(lambda: place.processes() == [place.coordinator().pid])
    assert place.log().count("ready on") == 1


def test_a_socket_that_was_left_behind_is_taken_over(place):
    os.mkdir(os.path.dirname(place.path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(place.path)
    place.attach(place.fork())
    assert place.processes() == [place.coordinator().pid]


def test_after_a_crash_the_next_who_attaches_starts_another(place, tmp_path):
    """What is mapped stays valid meanwhile."""
    file = write(tmp_path / "w.safetensors", 3.0)
    process = place.fork()
    place.attach(process)
    process.do("state = worker.state_dict('k', source=file)", file=file)
    first = place.coordinator()
    first.end(signal.SIGKILL)

    place.attach(place.fork())
    assert place.coordinator().pid != first.pid
    assert process.do("state['weight'].tolist()") == [[3.0] * 3] * 2
    place.attach(process)
    assert process.do("worker.state_dict('k', source=file)['bias'].tolist()") == [3.0, 3.0]


def test_it_leaves_some_time_after_its_last_session(place):
    """And its log says so. Whoever comes then starts the next."""
    process = place.fork(leave_after_s=1.5)
    place.attach(process)
    first = place.coordinator()
    assert not select.select([first.pidfd], [], [], 2.0)[0]
    ended_s = time.monotonic()
    process.end(signal.SIGKILL)
    first.wait()
    assert time.monotonic() - ended_s > 1.4
    assert place.log().endswith("weight-cache: no session for 1.5 s, so it ends\n")
    assert not os.path.exists(place.path) and not os.path.exists(f"{place.path}.lock")
    place.attach(place.fork())
    assert place.log().count("ready on") == 2


@pytest.mark.parametrize("children", ["SIG_DFL", "SIG_IGN"])
def test_one_that_cannot_start_is_an_error_with_the_last_line_of_its_log(place, children):
    """Also where the starter ignores SIGCHLD, and so hears of no exit code."""
    os.mkdir(os.path.dirname(place.path))
    Path(place.path).write_text("somebody's file")
    process = place.fork()
    process.do(IGNORE, children=children)
    for _ in range(2):  # nothing is left of the first try
        with pytest.raises(Raised) as raised:
            place.attach(process)
        assert raised.value.kind == "StartFailed"
        reason = f"{place.path} exists and is no socket (choose another --socket)"
        assert place.log().splitlines()[-1] == f"weight-cache: {reason}"
        assert f"no coordinator could be started on {place.path}: {reason} (see " in str(
            raised.value
        )
    assert Path(place.path).read_text() == "somebody's file"
    assert not place.processes() and os.listdir(os.path.dirname(place.path)) == ["c.sock"]


def test_without_autostart_nobody_starts_one(place):
    process = place.fork()
    with pytest.raises(Raised, match="NoCoordinator: no coordinator answers"):
        process.do("gpu_worker.attach(path)", path=place.path)
    assert not os.path.exists(os.path.dirname(place.path))


class TestControlGroup:
    """With a `systemd-run` of the test's: few machines that run tests have systemd for the user."""

    def test_where_systemd_runs_it_gets_one_of_its_own(self, place):
        calls = place.play_systemd("echo apart; exit 0")
        place.attach(place.fork())
        tried, started = calls.read_text().splitlines()
        options = started.partition(" -- ")[0]
        assert tried == f"{options} -- echo apart"
        assert {"--user", "--scope", "--property=Delegate=yes"} <= set(options.split())
        assert f"-m coordinator.detached {place.path} " in started
        assert "control group" not in place.log()

    @pytest.mark.parametrize("children", ["SIG_DFL", "SIG_IGN"])
    def test_where_it_fails_it_stays_in_its_starters_and_says_what_is_lost(self, place, children):
        calls = place.play_systemd("exit 1")
        process = place.fork()
        process.do(IGNORE, children=children)
        place.attach(process)
        assert len(calls.read_text().splitlines()) == 1
        assert "stays in the control group of what started it" in place.log()
