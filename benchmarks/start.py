"""`start`: how soon a coordinator listens, what it then takes, and that it sleeps when idle."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import kernel
from benchmarks.checkpoint import generate, write_safetensors
from benchmarks.coordinator_process import ROOT, CoordinatorProcess
from benchmarks.holders import Order, hold_all
from benchmarks.rows import Claim, Outcome, Row, conditions, interleave, medians
from coordinator.operator import Operator

READY_LIMIT_S = 0.3
RESIDENT_LIMIT_BYTES = 40_000_000
IDLE_WORKERS = 2


@dataclass(frozen=True, slots=True)
class Options:
    """How often to start, and how long to watch an idle one."""

    starts: int = 10
    idle_s: float = 30.0


def run(options: Options) -> Outcome:
    """Measure, and return the rows."""
    with tempfile.TemporaryDirectory(prefix="wc-") as name:
        folder = Path(name)
        rows = [*_starts(folder, options.starts), _idle(folder, options.idle_s)]
    return Outcome("start", conditions(starts=options.starts, idle_s=options.idle_s), rows)


def _starts(folder: Path, starts: int) -> list[Row]:
    """Start coordinators, and bare interpreters between them."""
    resident = []

    def start_ours() -> float:
        with CoordinatorProcess(str(folder / "start.sock")) as process:
            resident.append(kernel.resident_bytes(process.pid))
            return process.ready_s

    middle = medians(interleave(starts, {"ours": start_ours, "floor": _start_python}))
    ready_s, resident_bytes = middle["ours"], statistics.median(resident)
    return [
        Row(
            case="coordinator, exec to its ready line",
            unit="s",
            ours=ready_s,
            floor=middle["floor"],
            claims=[Claim("median in s", ready_s, READY_LIMIT_S)],
            notes=["floor: an interpreter that prints a line"],
        ),
        Row(
            case="coordinator, resident set when ready",
            unit="bytes",
            ours=resident_bytes,
            floor=None,
            claims=[Claim("bytes, largest", max(resident), RESIDENT_LIMIT_BYTES)],
        ),
    ]


def _start_python() -> float:
    started_s = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", "print('ready', flush=True)"], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    ready_s = time.perf_counter() - started_s
    process.communicate()
    return ready_s


def _idle(folder: Path, idle_s: float) -> Row:
    """Watch a coordinator with attached workers do nothing."""
    file = write_safetensors(generate(8_000_000, 20), folder / "idle.safetensors")
    socket = str(folder / "idle.sock")
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(CoordinatorProcess(socket))
        for holder, _ in hold_all([Order(socket, ("benchmark/idle",), str(file))] * IDLE_WORKERS):
            stack.callback(holder.let_go)
        operator = stack.enter_context(Operator.connect(socket, "benchmark"))
        operator.flush()
        sessions = len(operator.status().sessions)
        # The answer wakes us before the coordinator has gone back to sleep.
        _await_sleep(process.pid)
        before = kernel.voluntary_switches(process.pid)
        time.sleep(idle_s)  # what is measured, not a wait for something
        switches = kernel.voluntary_switches(process.pid) - before
    return Row(
        case=f"coordinator, voluntary context switches in {idle_s:g} s of idling",
        unit="count",
        ours=switches,
        floor=0,
        claims=[Claim("switches", switches, 0)],
        beside={"attached sessions": sessions},
    )


def _await_sleep(pid: int) -> None:
    """Wait until the coordinator has blocked, after whatever it did last."""
    before = -1
    while before != (before := kernel.voluntary_switches(pid)):
        time.sleep(0.2)
