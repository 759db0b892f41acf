"""Worker processes that do what a test tells them, one piece of Python at a time.

Importing torch takes seconds, so one process has done that, and forks a copy of itself for every
worker; a copy attaches, lives and ends like any process. `Nursery` and `WorkerProcess` are the
test's side.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.processes import ROOT, WAIT_S

START_S = 60.0
"""Importing torch takes its time where others need the processors, too."""

ATTACHED = """
import gc, os, sys, threading, weakref
import torch, gpu_worker

told = []  # key and cause of every eviction
worker = gpu_worker.attach(
    socket, name=name, on_evict=lambda key, generation, cause: told.append([key, cause])
)

def skeleton():
    return torch.nn.Linear(3, 2)

def load(key, **weights):
    return worker.load(key, skeleton=skeleton, **weights)

def answer(key, **weights):  # all weights of one version are equal
    with worker.use(key, skeleton=skeleton, **weights) as module:
        return float(module(torch.ones(3))[0])

def in_thread(call):
    # Daemons: what waits for ever must not keep the process.
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread

def refused(call):  # the name of what it raises
    try:
        call()
    except gpu_worker.WeightCacheError as error:
        return type(error).__name__

def held():
    return [[one.key, one.claims, one.locks] for one in worker.shutdown()]
"""


class Raised(Exception):
    """What was told raised an error of this class, with this text."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Nursery:
    """The process that starts workers. What they say on stderr is in `stderr`."""

    def __init__(self, directory: Path) -> None:
        self.place = str(directory / "nursery")
        self.stderr = directory / "stderr"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.place)
        self.listener.listen()
        self.listener.settimeout(START_S)
        self.workers: list[WorkerProcess] = []
        with self.stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.process.worker_process", self.place],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def start(self, path: str, name: str) -> WorkerProcess:
        """A worker attached to the coordinator on `path`."""
        worker = self.fork()
        worker.do(ATTACHED, socket=path, name=name)
        return worker

    def fork(self) -> WorkerProcess:
        """A process that is no worker yet, and has not imported `gpu_worker`."""
        assert self.process.stdin is not None
        self.process.stdin.write("start\n")
        self.process.stdin.flush()
        connected, _ = self.listener.accept()
        self.workers.append(WorkerProcess(connected))
        return self.workers[-1]

    def end_workers(self) -> None:
        while self.workers:
            self.workers.pop().end(signal.SIGKILL)

    def close(self) -> None:
        self.end_workers()
        self.listener.close()
        self.process.communicate(timeout=WAIT_S)


class WorkerProcess:
    """One of them. Every answer has a timeout."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(WAIT_S)
        self.socket = connected
        self.lines = connected.makefile("rw")
        self.pid = int(self.lines.readline())
        self.pidfd = os.pidfd_open(self.pid)

    def do(self, code: str, **values: Any) -> Any:
        """Have it run `code`, with these names set; return the value of an expression.

        Raises:
            Raised: it did.
        """
        self.lines.write(json.dumps([code, values]) + "\n")
        self.lines.flush()
        line = self.lines.readline()
        assert line, f"worker {self.pid} ended at {code!r}"
        kind, answer = json.loads(line)
        if kind is not None:
            raise Raised(kind, answer)
        return answer

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended already."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def end(self, number: int | None = None) -> None:
        """Have it end, by a signal or else by leaving its interpreter, and wait for that."""
        if self.pidfd < 0:
            return
        if number is not None:
            self.signal(number)
        # Both, or the process would not see the end of its input.
        self.lines.close()
        self.socket.close()
        assert select.select([self.pidfd], [], [], WAIT_S)[0], "it does not end"
        os.close(self.pidfd)
        self.pidfd = -1


def _be_a_worker(place: str) -> None:
    connected = socket.socket(socket.AF_UNIX)
    connected.connect(place)
    names: dict[str, Any] = {}
    with connected, connected.makefile("rw") as lines:
        print(os.getpid(), file=lines, flush=True)
        for line in lines:
            code, values = json.loads(line)
            print(json.dumps(_answer(code, values, names)), file=lines, flush=True)


def _answer(code: str, values: dict[str, Any], names: dict[str, Any]) -> tuple[str | None, Any]:
    names |= values
    try:
        try:
            expression = compile(code, "told", "eval")
        except SyntaxError:
            exec(compile(code, "told", "exec"), names)
            return None, None
        return None, eval(expression, names)
    except Exception as error:
        return type(error).__name__, str(error)


def _be_a_nursery(place: str) -> None:
    """Fork a worker for every line; a worker returns at its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    for _ in sys.stdin:
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _be_a_worker(place)
            return


if __name__ == "__main__":
    import accelerate  # noqa: F401
    import torch  # noqa: F401

    _be_a_nursery(sys.argv[1])
