"""A running `weight-cache launch`, for tests: what its workers say, and who is in it."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

from coordinator.group_file import GroupReport, read_group
from tests.processes import ROOT, WAIT_S, children_of

PREAMBLE = """
import os, signal, socket, sys
woken, wakes = socket.socketpair()
wakes.setblocking(False)
signal.set_wakeup_fd(wakes.fileno())
def hear():  # also what comes just before it waits, for which signal.pause() would wait for ever
    woken.recv(1)
def say(*words):  # in one write: several workers share the pipe
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""
HELLO = "say('up', os.environ['WEIGHT_CACHE_RANK'], os.getpid())"
IGNORING = """
import os, signal, sys
signal.signal(int(sys.argv[1]), signal.SIG_IGN)
os.execv(sys.argv[2], sys.argv[2:])
"""
WAITS = "signal.pause()"
"""A worker that ends by whatever signal comes."""


class Launched:
    """A running `launch` whose workers are Python code; each says `up RANK PID` when it is."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        worker: str | None,
        ignored: int = 0,
        play: str = "",
        **popen,
    ) -> None:
        """Start it.

        Args:
            worker: None gives no command: the workers are resident ones.
            ignored: a signal that it finds ignored, as under nohup.
            play: Python code to run in its place; it has to do the same in the end.
        """
        command = [sys.executable, *(("-c", play) if play else ("-m", "coordinator"))]
        command += ["launch", *options]
        if worker is not None:
            command += ["--", sys.executable, "-c", PREAMBLE + worker]
        if ignored:
            command = [sys.executable, "-c", IGNORING, str(ignored), *command]
        inherited = {k: v for k, v in os.environ.items() if k != "XDG_RUNTIME_DIR"}
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**inherited, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)},
            **{**streams, "stderr": subprocess.PIPE, **popen},
        )
        self.folder = folder
        self.family: set[int] = set()
        self.socket_path = ""

    def line(self) -> str:
        """The next line of any worker, without its name. By then that worker runs."""
        return self.named_line()[1]

    def named_line(self) -> tuple[str, str]:
        """The next line of any worker: its name, and what it said."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().rstrip("\n")
        assert line, self.process.stderr and self.process.stderr.read()
        return split(line)

    def said(self, text: str) -> str:
        """Read standard error up to the line that has `text`, and return it."""
        assert self.process.stderr is not None
        heard = []
        while line := self.process.stderr.readline():
            heard.append(line)
            if text in line:
                return line.rstrip("\n")
        raise AssertionError(heard)

    def next_line(self) -> str:
        """The next line of standard error."""
        assert self.process.stderr is not None
        return self.process.stderr.readline().rstrip("\n")

    def up(self, count: int) -> dict[int, int]:
        """Wait until `count` workers are up; return rank to pid."""
        found = {}
        for _ in range(count):
            name, line = self.named_line()
            word, rank, pid = line.split()
            assert (word, name) == ("up", f"worker {rank}"), line
            found[int(rank)] = int(pid)
        self.family |= descendants_of(self.process.pid)
        return found

    @property
    def supervisor(self) -> int:
        """The first child of the front; orphans come later."""
        return min(children_of(self.process.pid), key=started_at)

    @property
    def group(self) -> GroupReport:
        found = read_group(self.socket())
        assert found is not None
        return found

    @property
    def coordinator(self) -> int:
        pid = self.group.members[0].pid
        assert pid is not None
        self.family.add(pid)
        return pid

    def socket(self) -> str:
        if not self.socket_path:
            (folder,) = self.folder.glob("weight-cache-*")
            self.socket_path = str(folder / "coordinator.sock")
        return self.socket_path

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, *pidfds: int) -> tuple[int, list[str], str]:
        """Wait for its end; return exit code, further lines and stderr. Nothing may be left.

        Args:
            pidfds: of processes that may end a moment later than the process that was started.
        """
        out, err = self.process.communicate(timeout=WAIT_S)
        assert all_end(*pidfds)
        assert "Traceback" not in err, err
        assert list(self.folder.glob("weight-cache-*")) == []
        assert [pid for pid in self.family if runs(pid)] == []
        return self.process.returncode, [split(line)[1] for line in out.splitlines()], err

    def clean_up(self) -> None:
        """End what a test that failed left. Only what is its own just now."""
        if self.process.poll() is None:
            for pid in descendants_of(self.process.pid):
                os.kill(pid, signal.SIGKILL)
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def started_at(pid: int) -> int:
    """When a process was started, in ticks since boot."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def split(line: str) -> tuple[str, str]:
    found = re.fullmatch(r"\[(worker \d+|resident \S+)\] (.*)", line)
    assert found, line
    return found[1], found[2]


def watch(*pids: int) -> list[int]:
    """Pidfds of processes that are other processes' children."""
    return [os.pidfd_open(pid) for pid in pids]


def all_end(*pidfds: int) -> bool:
    """Whether all of these processes end in good time. Closes their pidfds."""
    left = list(pidfds)
    while left:
        ended, _, _ = select.select(left, [], [], WAIT_S)
        if not ended:
            return False
        for pidfd in ended:
            os.close(pidfd)
            left.remove(pidfd)
    return True


def descendants_of(pid: int) -> set[int]:
    try:
        children = set(children_of(pid))
    except FileNotFoundError:
        return set()
    return children.union(*map(descendants_of, children))


def runs(pid: int) -> bool:
    """Whether a process runs. An orphan's zombie is init's to reap, whenever that comes to it."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
