"""`scale`: many clients at once, and many keys and sessions.

Throughput: client processes that acquire and release one READY generation as fast as they can. The
clients of ours and of the floor are the same processes, which speak the wire themselves, one
request at a time; `gpu_worker` in as many others is reported beside. So clients and server share
the processors, in both.

Latency: one client acquires and releases, one after the other, keys of a server that has few and of
one that has many; see `full_server` for what is real in it.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import gpu_worker
from benchmarks import bare_loop, full_server
from benchmarks.contenders import FLOOR, OURS
from benchmarks.coordinator_process import CoordinatorProcess
from benchmarks.pairs import Crowd
from benchmarks.rows import Claim, Outcome, Row, conditions, interleave, medians
from benchmarks.wire_client import WireClient

KEY = "benchmark/scale"
OF_FLOOR_LIMIT = 0.35
TIMES_FEW_LIMIT = 1.5
FEW_KEYS, FEW_SESSIONS = 10, 2
WORKER = "gpu_worker"


@dataclass(frozen=True, slots=True)
class Options:
    """How many clients, how often: `pairs` of each in each of `rounds`; how many keys, sessions."""

    clients: int = 8
    pairs: int = 300
    rounds: int = 25
    keys: int = 10_000
    sessions: int = 256


def run(options: Options) -> Outcome:
    """Measure, and return the rows."""
    with tempfile.TemporaryDirectory(prefix="wc-") as folder:
        rows = [_throughput(folder, options), _latency(folder, options)]
    facts = conditions(clients=options.clients, pairs=options.pairs, rounds=options.rounds)
    return Outcome("scale", facts, rows)


# --- throughput -----------------------------------------------------------------------------------


def _throughput(folder: str, options: Options) -> Row:
    ours, floor = f"{folder}/c.sock", f"{folder}/e.sock"
    with contextlib.ExitStack() as stack:
        coordinator = stack.enter_context(CoordinatorProcess(ours))
        worker = stack.enter_context(gpu_worker.attach(ours, name="benchmark"))
        kept = worker.state_dict(KEY, build=lambda: {"weight": torch.ones(1024)})
        bare_pid = stack.enter_context(_bare_loop(floor))
        wire = stack.enter_context(Crowd(options.clients, "wire", KEY, [ours, floor]))
        workers = stack.enter_context(Crowd(options.clients, "worker", KEY, [ours]))
        rates = {
            OURS: partial(_rate, wire, 0, options.pairs, coordinator.pid),
            FLOOR: partial(_rate, wire, 1, options.pairs, bare_pid),
            WORKER: partial(_rate, workers, 0, options.pairs, coordinator.pid),
        }
        taken = interleave(options.rounds, rates)
        kept.clear()
    middle = medians({name: [rate.pairs_per_s for rate in took] for name, took in taken.items()})
    used_s = medians({name: [rate.pair_used_s for rate in took] for name, took in taken.items()})
    return Row(
        case=f"acquire and release, pairs per second of {options.clients} client processes",
        unit="count",
        ours=middle[OURS],
        floor=middle[FLOOR],
        better="more",
        claims=[
            Claim(
                "of the bare loop's throughput",
                middle[OURS] / middle[FLOOR],
                OF_FLOOR_LIMIT,
                "at least",
            )
        ],
        beside={
            "gpu_worker's own client, state dicts made and dropped per second": middle[WORKER],
            "coordinator's processor time per pair_s": used_s[OURS],
            "bare loop's processor time per pair_s": used_s[FLOOR],
            "coordinator's processor time / bare loop's": used_s[OURS] / used_s[FLOOR],
        },
        notes=["floor: the same clients, and a loop with nothing behind it"],
    )


@contextlib.contextmanager
def _bare_loop(path: str) -> Iterator[int]:
    """Run one; gives its pid."""
    fd = os.memfd_create("benchmark")
    process = bare_loop.start(path, fd)
    os.close(fd)
    try:
        yield process.pid
    finally:
        process.terminate()
        process.communicate()


@dataclass(frozen=True, slots=True)
class _Rate:
    """How many pairs a second, and how long the server had a processor for each."""

    pairs_per_s: float
    pair_used_s: float


def _rate(crowd: Crowd, index: int, pairs: int, server_pid: int) -> _Rate:
    before_s = _processor_s(server_pid)
    pairs_per_s = crowd.pairs_per_s(index, pairs)
    used_s = _processor_s(server_pid) - before_s
    return _Rate(pairs_per_s, used_s / (crowd.clients * pairs))


def _processor_s(pid: int) -> float:
    """Return how long a process of one thread has had a processor, in user and system mode."""
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[0]) / 1e9


# --- latency --------------------------------------------------------------------------------------


def _latency(folder: str, options: Options) -> Row:
    many = f"{options.keys} keys, {options.sessions} sessions"
    few = f"{FEW_KEYS} keys, {FEW_SESSIONS} sessions"
    with contextlib.ExitStack() as stack:
        # All on one processor: a server that happens to share the client's answers twice as fast as
        # one that does not, however many keys either has.
        processors = os.sched_getaffinity(0)
        stack.callback(os.sched_setaffinity, 0, processors)
        os.sched_setaffinity(0, {min(processors)})
        pairs = {
            name: partial(
                _pair_s, stack.enter_context(_client(path, keys, sessions)), options.pairs
            )
            for name, path, keys, sessions in (
                (many, f"{folder}/many.sock", options.keys, options.sessions),
                (few, f"{folder}/few.sock", FEW_KEYS, FEW_SESSIONS),
            )
        }
        gc.collect()
        gc.disable()
        stack.callback(gc.enable)
        # A sample is a few milliseconds, so there can be many of them.
        middle = medians(interleave(options.rounds * 4, pairs))
    times = middle[many] / middle[few]
    return Row(
        case=f"acquire and release, one client, {many}",
        unit="s",
        ours=middle[many],
        floor=middle[few],
        claims=[Claim("times as long as with few", times, TIMES_FEW_LIMIT)],
        notes=[f"floor: ours with {few}"],
    )


@dataclass(frozen=True, slots=True)
class _Client:
    wire: WireClient
    keys: Iterator[str]


@contextlib.contextmanager
def _client(path: str, keys: int, sessions: int) -> Iterator[_Client]:
    """Return the last of so many sessions, and an endless supply of keys in random order."""
    with full_server.full_server(path, keys, sessions - 1):
        numbers = list(range(keys))
        random.Random(keys).shuffle(numbers)
        wire = WireClient(path)
        try:
            yield _Client(wire, itertools.cycle([full_server.key(number) for number in numbers]))
        finally:
            wire.close()


def _pair_s(client: _Client, pairs: int) -> float:
    pair, keys = client.wire.pair, [next(client.keys) for _ in range(pairs)]
    started_s = time.perf_counter()
    for key in keys:
        pair(key)
    return (time.perf_counter() - started_s) / pairs
