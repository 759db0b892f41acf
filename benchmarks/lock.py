"""`lock`: what entering and leaving a handle costs once its module is there.

A pair is `with handle: pass` on a loaded module. The floor is acquire and release of a bare
`threading.RLock`, both looked up before the clock runs: any lock that nests does at least that.
Ours also refuses forked children and calls from inside another call, and knows who holds what.

What is sent meanwhile is counted where everything leaves this process: at the socket.
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

import gpu_worker
from benchmarks.contenders import FLOOR, OURS
from benchmarks.coordinator_process import CoordinatorProcess
from benchmarks.rows import Claim, Outcome, Row, conditions, interleave, medians
from shm_store.channel import Channel

KEY = "benchmark/lock"
TIMES_LIMIT = 25.0
THREADS = 2

FLOOR_PAIRS = 20
"""For each of ours, so that samples of both take about a millisecond. The longer one is, the more
often others get the processor meanwhile: the median then holds their time, of one side only."""

Loop = Callable[[int], object]
"""Does so many pairs."""


@dataclass(frozen=True, slots=True)
class Options:
    """How often: `pairs` of ours in each of `rounds`."""

    pairs: int = 500
    rounds: int = 200


def run(options: Options) -> Outcome:
    """Measure, and return the rows."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="wc-"))
        stack.enter_context(CoordinatorProcess(f"{folder}/c.sock"))
        worker = stack.enter_context(gpu_worker.attach(f"{folder}/c.sock", name="benchmark"))
        handle = worker.load(KEY, skeleton=_module, build=_module)
        stack.callback(handle.close)
        sent, sent_by_flush = _sent(partial(_lock, handle, options.pairs)), _sent(worker.flush)
        assert sent_by_flush, "the counter counts nothing"
        gc.collect()
        gc.disable()
        stack.callback(gc.enable)
        rows = [_alone(handle, options), _nested(handle, options), _contended(handle, options)]
    claim = Claim(f"messages sent in {options.pairs} pairs", sent, 0)
    rows[0] = rows[0].with_claims(claim)
    facts = conditions(
        pairs=options.pairs, rounds=options.rounds, garbage_collector="off while timed"
    )
    return Outcome("lock", facts, rows)


def _module() -> torch.nn.Module:
    return torch.nn.Linear(8, 8)


def _lock(handle: gpu_worker.ModelHandle, pairs: int) -> None:
    for _ in range(pairs):
        with handle:
            pass


def _lock_bare(lock: threading.RLock, pairs: int) -> None:
    acquire, release = lock.acquire, lock.release
    for _ in range(pairs):
        acquire()
        release()


def _alone(handle: gpu_worker.ModelHandle, options: Options) -> Row:
    row = _row(
        "lock and unlock, alone", options, partial(_lock, handle), partial(_lock_bare, _new_lock())
    )
    assert row.ratio_to_floor is not None
    return row.with_claims(Claim("times the pair of a bare RLock", row.ratio_to_floor, TIMES_LIMIT))


def _nested(handle: gpu_worker.ModelHandle, options: Options) -> Row:
    lock = _new_lock()
    with handle, lock:
        return _row(
            "lock and unlock, inside another of the same thread",
            options,
            partial(_lock, handle),
            partial(_lock_bare, lock),
        )


def _contended(handle: gpu_worker.ModelHandle, options: Options) -> Row:
    # Threads meet only if they run for longer than the interpreter lets one of them.
    longer = replace(options, pairs=options.pairs * 20, rounds=max(1, options.rounds // 10))
    return _row(
        f"lock and unlock, {THREADS} threads at it",
        longer,
        partial(_together, partial(_lock, handle)),
        partial(_together, partial(_lock_bare, _new_lock())),
    )


def _new_lock() -> threading.RLock:
    return threading.RLock()


def _together(loop: Loop, pairs: int) -> None:
    """Share the pairs between threads that all start at once."""
    threads = [threading.Thread(target=loop, args=(pairs // THREADS,)) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _row(case: str, options: Options, ours: Loop, floor: Loop) -> Row:
    samples = {
        OURS: partial(_pair_s, ours, options.pairs),
        FLOOR: partial(_pair_s, floor, options.pairs * FLOOR_PAIRS),
    }
    middle = medians(interleave(options.rounds, samples))
    return Row(case, "s", middle[OURS], middle[FLOOR], notes=["floor: a bare threading.RLock"])


def _pair_s(loop: Loop, pairs: int) -> float:
    started_s = time.perf_counter()
    loop(pairs)
    return (time.perf_counter() - started_s) / pairs


def _sent(call: Callable[[], object]) -> int:
    """Return how many frames this process sends during a call."""
    with _counting() as frames:
        call()
    return len(frames)


@contextlib.contextmanager
def _counting() -> Iterator[list[bytes]]:
    frames: list[bytes] = []
    send_frame = Channel.send_frame

    def counted(channel: Channel, frame: bytes, *rest: object, **more: object) -> None:
        frames.append(frame)
        send_frame(channel, frame, *rest, **more)  # type: ignore[arg-type]

    Channel.send_frame = counted  # type: ignore[method-assign, assignment]
    try:
        yield frames
    finally:
        Channel.send_frame = send_frame  # type: ignore[method-assign]
