"""`share`: locking a model that another process has on the device, beside attaching it on the host.

Another process has the model locked on the device, shared. This one locks it there for the first
time, and gives everything back. In turns with that it attaches the same model on the host, where
the weights are, too: to a module, by `load`, which is what a lock has to be compared with, and to a
bare dict of tensors. Nothing of the weights is moved by any of these, and what was locked answers
rightly: otherwise the benchmark ends with an error.

A simulated device puts all pages of what it shares into the map at once, where a host map gets them
with their first use: 80% of a lock of 1 GB. So each is measured with its first answer, too.
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import gpu_worker
from benchmarks.answering import Answering, Plan
from benchmarks.coordinator_process import CoordinatorProcess
from benchmarks.models import MINILM, ModelPlan, generated, minilm, same
from benchmarks.rows import (
    Claim,
    Outcome,
    Row,
    Unavailable,
    conditions,
    interleave,
    medians,
    warm_memory,
)
from coordinator.operator import Operator

DEVICE = "sim:0"
SIZE_VARIABLE = "WEIGHT_CACHE_SIM_BYTES"
SPARE_BYTES = 64 << 20
SMALL_BYTES = 4_096_000
SMALL_TENSORS = 1000

HOST = "host attach, to a module"
DICT = "host attach, to a dict of tensors"
LOCK = "lock on the device"
TIMES_LIMIT = 2.0
FLUSH_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Options:
    """How large the generated model is, in how many matrices, and how often."""

    size_bytes: int = 1_000_000_000
    tensors: int = 60
    rounds: int = 25
    warm_bytes: int = 3 << 30
    skip: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _Took:
    """Seconds of `load`, of the first lock, and of the first answer."""

    load_s: float
    lock_s: float
    answer_s: float


def run(options: Options) -> Outcome:
    """Measure, and return the rows."""
    torch.set_num_threads(1)
    warm_memory(options.warm_bytes)
    notes, rows = [], []
    with tempfile.TemporaryDirectory(prefix="wc-") as name:
        folder = Path(name)
        models = [
            generated(options.size_bytes, options.tensors, folder),
            generated(SMALL_BYTES, SMALL_TENSORS, folder),
        ]
        try:
            models += [] if MINILM in options.skip else [minilm()]
        except Unavailable as error:
            notes.append(f"{MINILM}: not measured, {error}")
        for number, model in enumerate(models):
            rows.append(_row(model, options.rounds, str(folder / f"{number}.sock")))
    facts = conditions(
        rounds=options.rounds, torch_threads=1, garbage_collector="off while timed", notes=notes
    )
    return Outcome("share", facts, rows)


def _row(model: ModelPlan, rounds: int, socket: str) -> Row:
    os.environ[SIZE_VARIABLE] = str(2 * model.size_bytes + SPARE_BYTES)
    key = f"share/{model.name}"
    model.prepare()
    with contextlib.ExitStack() as stack:
        budget_bytes = 2 * model.size_bytes + SPARE_BYTES
        stack.enter_context(CoordinatorProcess(socket, "--ram-budget", f"{budget_bytes}B"))
        plan = Plan(model, "shared", socket, key, DEVICE, idle=True)
        holder = stack.enter_context(Answering(plan))
        here = stack.enter_context(gpu_worker.attach(socket, device=DEVICE, share_vram=True))
        host = stack.enter_context(gpu_worker.attach(socket, device="cpu"))
        right = holder.started.answer
        taken = interleave(
            rounds,
            {
                LOCK: partial(_take, here, model, key, right),
                HOST: partial(_take, host, model, key, right),
                DICT: partial(_take_dict, host, model, key),
            },
        )
        # With the warm-up; what the module makes beside its weights nobody else has.
        own_bytes = (rounds + 1) * holder.started.own_bytes
        moved_bytes = _moved_bytes(here, socket) - own_bytes
        if moved_bytes:
            raise RuntimeError(f"{moved_bytes} bytes were moved to where they were")
    load = medians({name: [one.load_s for one in took] for name, took in taken.items()})
    lock = medians({name: [one.lock_s for one in took] for name, took in taken.items()})
    answer = medians({name: [one.answer_s for one in took] for name, took in taken.items()})
    whole = {name: load[name] + lock[name] + answer[name] for name in taken}
    claims = [
        Claim("first lock / host attach", lock[LOCK] / load[HOST], TIMES_LIMIT),
        Claim(
            "attach to first answer, on the device / on the host",
            whole[LOCK] / whole[HOST],
            TIMES_LIMIT,
        ),
        Claim("bytes of the weights moved", moved_bytes, 0),
    ]
    return Row(
        case=f"first lock of {model.name}, which another process has there",
        unit="s",
        ours=lock[LOCK],
        floor=load[HOST],
        peers={DICT: load[DICT]},
        claims=claims,
        beside={
            "load before that, on the host_s": load[LOCK],
            "first answer after it_s": answer[LOCK],
            "first answer after the host attach_s": answer[HOST],
        },
        notes=["floor: a host attach of the same model (`load` with device='cpu')"],
    )


def _take(worker: gpu_worker.Worker, model: ModelPlan, key: str, right: Sequence[float]) -> _Took:
    """Load and lock once, from nothing to nothing of it in this process."""
    gc.collect()
    gc.disable()
    try:
        started_s = time.perf_counter()
        handle = worker.load(key, skeleton=model.skeleton, source=model.file)
        loaded_s = time.perf_counter()
        with handle as module:
            locked_s = time.perf_counter()
            answer = model.answer(module)
            answered_s = time.perf_counter()
    finally:
        gc.enable()
    if not same(answer, right):
        raise RuntimeError(f"{answer}, where {list(right)} was right")
    handle.close()
    del module
    worker.evict(key)
    gc.collect()
    worker.flush(FLUSH_LIMIT_S)
    return _Took(loaded_s - started_s, locked_s - loaded_s, answered_s - locked_s)


def _take_dict(worker: gpu_worker.Worker, model: ModelPlan, key: str) -> _Took:
    gc.collect()
    gc.disable()
    try:
        started_s = time.perf_counter()
        tensors = worker.state_dict(key, source=model.file)
        took_s = time.perf_counter() - started_s
    finally:
        gc.enable()
    del tensors
    worker.flush(FLUSH_LIMIT_S)
    return _Took(took_s, 0.0, 0.0)


def _moved_bytes(worker: gpu_worker.Worker, socket: str) -> int:
    """Return how many bytes this process has moved to the device in all."""
    worker.flush(FLUSH_LIMIT_S)
    with Operator.connect(socket, "benchmark") as operator:
        (session,) = [one for one in operator.status().sessions if one.pid == os.getpid()]
    return sum(one.moved_bytes for one in session.models if one.device == DEVICE)
