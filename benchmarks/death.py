"""`death`: how long the leases of a worker outlive it, and how long a coordinator is missed.

A worker that holds two models, and has read all of them, is killed with SIGKILL, a hundred times.
The clock stops when the answer to a STATUS, asked for over and over on a raw connection, shows
neither its leases nor its session any more. So the time of a STATUS is in the figure, and is
reported beside it; nothing is subtracted. It starts, for the first row, at the kill; for the second
when the kernel says that the process has ended: its pidfd is readable, in a poll of our own, at the
same moment as in the coordinator's.

The floor is measured the same way, in between: a process that has mapped and read as many bytes of
the same kind of memory, and holds no lease, is killed, and another that does nothing else watches
its pidfd and is asked.

A coordinator is killed in a group of its own each time, while a process that holds a lease is
stopped, so that the next one awaits it. The clock runs from the kill until a worker that asks then
has been granted a key that was READY: start, pause before it, and the worker's coming back.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gpu_worker
from benchmarks.checkpoint import generate, write_safetensors
from benchmarks.contenders import FLOOR, OURS
from benchmarks.coordinator_process import ROOT, CoordinatorProcess
from benchmarks.holders import Holder, Order
from benchmarks.rows import Claim, Outcome, Row, conditions, interleave, percentile
from benchmarks.watcher import Watcher
from coordinator.group_file import read_group
from coordinator.operator import Operator
from shm_store.report import StatusReport

KEYS = ("benchmark/kill/a", "benchmark/kill/b")
SIZE_BYTES = 64_000_000
TENSORS = 100
LIMIT_S = 0.002
MISSED_LIMIT_S = 1.0
GONE_LIMIT_S = 10.0
PREPARED = 3
"""Workers that hold while one of them is killed: the others' leases must not change."""

Lease = tuple[str, int]
"""Generation and pid."""


@dataclass(frozen=True, slots=True)
class Options:
    """How often."""

    kills: int = 100
    coordinator_kills: int = 10


@dataclass(frozen=True, slots=True)
class _Kill:
    """What one kill showed.

    Attributes:
        dead_s: from the kill to the kernel's notice.
        gone_s: from there to the answer that shows no trace of the process.
        asked_s: how long each question took meanwhile.
        undisturbed: all other leases are as they were.
    """

    dead_s: float
    gone_s: float
    asked_s: list[float]
    undisturbed: bool


def run(options: Options) -> Outcome:
    """Kill, measure, and return the row."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wc-")))
        file = str(write_safetensors(generate(SIZE_BYTES, TENSORS), folder / "model.safetensors"))
        socket = str(folder / "c.sock")
        stack.enter_context(CoordinatorProcess(socket))
        operator = stack.enter_context(Operator.connect(socket, "benchmark"))
        watcher = stack.enter_context(Watcher())
        workers = _Supply(Order(socket, KEYS, file), PREPARED)
        stack.callback(workers.close)
        bytes_fd = os.memfd_create("benchmark")
        stack.callback(os.close, bytes_fd)
        os.posix_fallocate(bytes_fd, 0, SIZE_BYTES)
        same = f"/proc/{os.getpid()}/fd/{bytes_fd}"
        strangers = _Supply(Order("", KEYS, same, bare=True), 1)
        stack.callback(strangers.close)
        taken = interleave(
            options.kills,
            {
                OURS: lambda: _kill_worker(workers.take(), operator),
                FLOOR: lambda: _kill_stranger(strangers.take(), watcher),
            },
        )
        idle_s = statistics.median(_status_s(operator) for _ in range(200))
        rows = [_row_from_kill(taken), _row(taken, idle_s)]
        rows.append(_missed([_coordinator(file) for _ in range(options.coordinator_kills)]))
    return Outcome("death", conditions(kills=options.kills), rows)


class _Supply:
    """Holders of one kind, some of them ready ahead."""

    def __init__(self, order: Order, ahead: int) -> None:
        self._order = order
        self._ahead = ahead
        self._ready: deque[Holder] = deque()

    def take(self) -> Holder:
        """Return one that holds, with the others holding too."""
        while len(self._ready) < self._ahead:
            self._ready.append(Holder(self._order))
            self._ready[-1].wait()
        return self._ready.popleft()

    def close(self) -> None:
        for holder in self._ready:
            holder.let_go()


def _kill_worker(victim: Holder, operator: Operator) -> _Kill:
    before = _leases(operator.status())
    assert sum(pid == victim.pid for _, pid in before) == len(KEYS)
    gone = _kill(victim, lambda: not _present(victim.pid, operator.status()))
    after = _leases(operator.status())
    return _Kill(*gone, after == {lease for lease in before if lease[1] != victim.pid})


def _kill_stranger(victim: Holder, watcher: Watcher) -> _Kill:
    pidfd = os.pidfd_open(victim.pid)
    try:
        watcher.watch(pidfd)
    finally:
        os.close(pidfd)
    return _Kill(*_kill(victim, watcher.gone), undisturbed=True)


def _kill(victim: Holder, gone: Callable[[], bool]) -> tuple[float, float, list[float]]:
    """Return the seconds to the kernel's notice, from there to `gone`, and of each question."""
    pidfd = os.pidfd_open(victim.pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    asked_s = []
    gc.disable()
    try:
        killed_s = time.perf_counter()
        victim.kill()
        poll.poll()
        noticed_s = before_s = time.perf_counter()
        while before_s - noticed_s < GONE_LIMIT_S:
            ended = gone()
            now_s = time.perf_counter()
            asked_s.append(now_s - before_s)
            if ended:
                return noticed_s - killed_s, now_s - noticed_s, asked_s
            before_s = now_s
    finally:
        gc.enable()
        os.close(pidfd)
        victim.let_go()
    raise RuntimeError(f"the leases of {victim.pid} are still there after {GONE_LIMIT_S:g} s")


def _leases(report: StatusReport) -> set[Lease]:
    return {
        (generation.generation, lease.pid)
        for generation in report.generations
        for lease in generation.leases
    }


def _present(pid: int, report: StatusReport) -> bool:
    """Say whether the ledger still knows the process: a lease of it, or its session."""
    if any(session.pid == pid for session in report.sessions):
        return True
    return any(lease.pid == pid for known in report.generations for lease in known.leases)


def _status_s(operator: Operator) -> float:
    started_s = time.perf_counter()
    operator.status()
    return time.perf_counter() - started_s


def _coordinator(file: str) -> float:
    """Kill a coordinator, and return how long a worker waits for what it asks then."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="wc-"))
        socket = f"{folder}/c.sock"
        group = subprocess.Popen(
            [
                *(sys.executable, "-m", "coordinator", "launch", "--socket", socket, "--"),
                *(sys.executable, "-c", "import signal; signal.pause()"),
            ],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(group.wait)
        stack.callback(group.terminate)
        while not os.path.exists(socket):
            time.sleep(0.01)
        stopped = Holder(Order(socket, KEYS[:1], file))
        stack.callback(stopped.let_go)
        stopped.wait()
        with gpu_worker.attach(socket) as worker:
            state = worker.state_dict(KEYS[0], source=file)
            os.kill(stopped.pid, signal.SIGSTOP)
            stack.callback(os.kill, stopped.pid, signal.SIGCONT)
            started_s = time.perf_counter()
            os.kill(_coordinator_pid(socket), signal.SIGKILL)
            again = worker.state_dict(KEYS[0], source=file)
            missed_s = time.perf_counter() - started_s
            assert state.keys() == again.keys()
            del state, again
        return missed_s


def _coordinator_pid(socket: str) -> int:
    group = read_group(socket)
    assert group is not None
    (pid,) = (member.pid for member in group.members if member.name == "coordinator")
    assert pid is not None
    return pid


def _missed(missed_s: list[float]) -> Row:
    return Row(
        case="a READY key granted after SIGKILL of the coordinator, one holder stopped",
        unit="s",
        ours=statistics.median(missed_s),
        floor=None,
        claims=[Claim("longest in s", max(missed_s), MISSED_LIMIT_S)],
        beside={"longest_s": max(missed_s)},
    )


def _row_from_kill(taken: dict[str, list[_Kill]]) -> Row:
    ours, floor = ([kill.dead_s + kill.gone_s for kill in taken[of]] for of in (OURS, FLOOR))
    bare = [kill.dead_s for kill in taken[FLOOR]]
    above_s = statistics.median(ours) - statistics.median(bare)
    return Row(
        case="leases gone after SIGKILL, from the kill",
        unit="s",
        ours=statistics.median(ours),
        floor=statistics.median(bare),
        claims=[Claim("median above the floor's in s", above_s, LIMIT_S)],
        beside={
            "floor, asked of a watcher_s": statistics.median(floor),
            "99th percentile_s": percentile(ours, 99),
            "floor, 99th percentile_s": percentile(bare, 99),
        },
    )


def _row(taken: dict[str, list[_Kill]], idle_s: float) -> Row:
    gone = [kill.gone_s for kill in taken[OURS]]
    floor = [kill.gone_s for kill in taken[FLOOR]]
    middle, most = statistics.median(gone), percentile(gone, 99)
    disturbed = sum(not kill.undisturbed for kill in taken[OURS])
    asked = [asked_s for kill in taken[OURS] for asked_s in kill.asked_s]
    return Row(
        case="leases gone after SIGKILL, from the kernel's notice",
        unit="s",
        ours=middle,
        floor=statistics.median(floor),
        claims=[
            Claim("median in s", middle, LIMIT_S),
            Claim("99th percentile in s", most, LIMIT_S),
            Claim("kills after which another lease had changed", disturbed, 0),
        ],
        beside={
            "99th percentile_s": most,
            "longest_s": max(gone),
            "floor, 99th percentile_s": percentile(floor, 99),
            "floor, longest_s": max(floor),
            "STATUS round trip meanwhile_s": statistics.median(asked),
            "STATUS round trip when idle_s": idle_s,
            "STATUS requests per kill": len(asked) / len(gone),
        },
    )
