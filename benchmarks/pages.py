"""`pages`: attach and the first read of every page, with weights in huge pages and in small ones.

The same file is READY at two coordinators: one has it in pages of 2 MiB, the other was told to
leave it in pages of 4 KiB. Beside them safetensors' `load_file`, which maps the file. Before that:
what memory of either kind costs who fills it.

Repeats in one process and the first time in fresh ones, in turns, in the conditions of `attach`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks import echo, filling, fresh
from benchmarks.attach import visit
from benchmarks.checkpoint import generate, total_bytes, write_safetensors
from benchmarks.contenders import ALIGNED_FLOOR, LOAD_FILE, OURS, Contender, Places, contender
from benchmarks.coordinator_process import CoordinatorProcess, acquire_segment
from benchmarks.rows import Claim, Outcome, Row, conditions, interleave, medians, warm_memory
from coordinator.operator import Operator
from shm_store.report import GenerationReport

KEY = "benchmark/pages"
HUGE = "ours in pages of 2 MiB"
SMALL = "ours in pages of 4 KiB"
HUGE_FLOOR = "floor in pages of 2 MiB"
SMALL_FLOOR = "floor in pages of 4 KiB"
KINDS = {
    HUGE: OURS,
    SMALL: OURS,
    HUGE_FLOOR: ALIGNED_FLOOR,
    SMALL_FLOOR: ALIGNED_FLOOR,
    LOAD_FILE: LOAD_FILE,
}

COLLAPSE_LIMIT_S = 60.0
COLLAPSE_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Options:
    """How large, and how often."""

    size_bytes: int = 2_000_000_000
    tensors: int = 1000
    rounds: int = 25
    fresh_rounds: int = 9
    warm_bytes: int = 3 << 30
    fill_rounds: int = 9


def run(options: Options) -> Outcome:
    """Measure, and return the rows."""
    torch.set_num_threads(1)
    warm_memory(options.warm_bytes)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wc-")))
        tensors = generate(options.size_bytes, options.tensors)
        weights_bytes = total_bytes(tensors)
        file = write_safetensors(tensors, folder / "model.safetensors")
        tensors.clear()
        rows = [filling.row(file, options.fill_rounds)] if options.fill_rounds else []
        huge, collapsed = _coordinator(stack, folder, "huge", file)
        small, _ = _coordinator(stack, folder, "small", file, "--no-huge-pages")
        places = {HUGE: huge, HUGE_FLOOR: huge, SMALL: small, SMALL_FLOOR: small, LOAD_FILE: small}
        rows += _rows("repeated in one process", _repeats(stack, places, options.rounds), collapsed)
        if options.fresh_rounds:
            taken = interleave(
                options.fresh_rounds,
                {name: partial(fresh.sample, KINDS[name], where) for name, where in places.items()},
                warm_up=False,
            )
            read = {name: [one.read_s for one in took] for name, took in taken.items()}
            rows += _rows("first in a fresh process", medians(read), None)
        facts = conditions(
            torch=torch.__version__,
            weights_bytes=weights_bytes,
            tensors=options.tensors,
            torch_threads=1,
            garbage_collector="off while timed",
            page_cache="warm",
            rounds=options.rounds,
            fresh_rounds=options.fresh_rounds,
            fill_rounds=options.fill_rounds,
        )
    return Outcome("pages", facts, rows)


@dataclass(frozen=True, slots=True)
class _Collapsed:
    """What became of the segment, and how long after it was READY."""

    generation: GenerationReport
    took_s: float


def _coordinator(
    stack: contextlib.ExitStack, folder: Path, name: str, file: Path, *options: str
) -> tuple[Places, _Collapsed]:
    """Start one that has the weights in such pages as it can, until the stack ends."""
    path = str(folder / f"{name}.sock")
    budget_bytes = os.path.getsize(file) * 2 + (64 << 20)
    stack.enter_context(CoordinatorProcess(path, "--ram-budget", f"{budget_bytes}B", *options))
    operator = stack.enter_context(Operator.connect(path, "benchmark"))
    _, fd = acquire_segment(operator, KEY, file)
    ready_s = time.perf_counter()
    places = Places(path, KEY, str(file), echo=str(folder / f"{name}-echo.sock"))
    process = echo.start(places.echo, fd)
    os.close(fd)
    stack.callback(process.communicate)
    stack.callback(process.terminate)
    while True:
        (generation,) = operator.status().generations
        took_s = time.perf_counter() - ready_s
        if generation.huge_bytes or generation.not_huge:
            return places, _Collapsed(generation, took_s)
        if took_s > COLLAPSE_LIMIT_S:
            raise RuntimeError(f"not collapsed within {COLLAPSE_LIMIT_S:g} s")
        time.sleep(COLLAPSE_POLL_S)


def _repeats(
    stack: contextlib.ExitStack, places: dict[str, Places], rounds: int
) -> dict[str, float]:
    """Attach and read again and again in this process."""
    entered: dict[str, Contender] = {}
    for name, where in places.items():
        entered[name] = taken = contender(KINDS[name], where)
        taken.prepare()
        taken.connect()
        stack.callback(taken.close)
    gc.collect()
    gc.freeze()
    try:
        samples = {name: partial(visit, one, True) for name, one in entered.items()}
        return medians(interleave(rounds, samples))
    finally:
        gc.unfreeze()


def _rows(case: str, middle: dict[str, float], collapsed: _Collapsed | None) -> list[Row]:
    peer = {LOAD_FILE: middle[LOAD_FILE]}
    huge = Row(
        f"attach and first read of every page, pages of 2 MiB, {case}",
        "s",
        middle[HUGE],
        middle[HUGE_FLOOR],
        {**peer, SMALL: middle[SMALL]},
        claims=[
            Claim(f"times as fast as {LOAD_FILE}", peer[LOAD_FILE] / middle[HUGE], 4.0, "at least")
        ],
    )
    if collapsed is not None:
        found = collapsed.generation
        part = found.huge_bytes / found.size_bytes
        huge = replace(
            huge,
            beside={"from READY until collapsed_s": collapsed.took_s, "part in huge pages": part},
            notes=[found.not_huge] if found.not_huge else [],
        )
    small = Row(
        f"attach and first read of every page, pages of 4 KiB, {case}",
        "s",
        middle[SMALL],
        middle[SMALL_FLOOR],
        peer,
        claims=[Claim(f"ours / {LOAD_FILE}", middle[SMALL] / peer[LOAD_FILE], 1.2)],
    )
    return [huge, small]
