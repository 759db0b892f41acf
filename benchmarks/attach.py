"""`attach`: how long it takes until a process has the tensors of weights that are READY.

Two circumstances, each with and without the first read of every page:

- repeats in one process: what was attached is dropped, and its unmapping awaited, in between;
- the first time in a fresh process, imports done, connecting included.

The garbage collector is off while anything is timed and runs before, for everybody; torch computes
with one thread; the files are in the page cache.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks import echo, fresh, sender
from benchmarks.checkpoint import (
    Tensors,
    generate,
    read_every_page,
    total_bytes,
    write_pickled,
    write_safetensors,
)
from benchmarks.contenders import (
    FLOOR,
    LOAD_FILE,
    OURS,
    PEERS,
    RAY,
    SHARING,
    TORCH_LOAD,
    Contender,
    Places,
    RayCluster,
    contender,
)
from benchmarks.coordinator_process import CoordinatorProcess, acquire_segment
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

KEY = "benchmark/attach"


@dataclass(frozen=True, slots=True)
class Options:
    """How large, and how often."""

    size_bytes: int = 2_000_000_000
    tensors: int = 1000
    rounds: int = 25
    fresh_rounds: int = 9
    warm_bytes: int = 3 << 30
    skip: Sequence[str] = ()


def run(options: Options) -> Outcome:
    """Measure, and return the rows."""
    torch.set_num_threads(1)
    warm_memory(options.warm_bytes)
    with contextlib.ExitStack() as stack:
        scene = _Scene(options, stack)
        rows = [
            _repeats(scene, options.rounds, read=False),
            _repeats(scene, options.rounds, read=True),
        ]
        if options.fresh_rounds:
            rows += _fresh(scene, options.fresh_rounds)
        facts = conditions(
            torch=torch.__version__,
            weights_bytes=scene.weights_bytes,
            tensors=options.tensors,
            torch_threads=1,
            garbage_collector="off while timed",
            page_cache="warm",
            rounds=options.rounds,
            fresh_rounds=options.fresh_rounds,
        )
    return Outcome("attach", facts, rows)


class _Scene:
    """Everybody who is measured, set up on the same weights; taken down with `stack`."""

    def __init__(self, options: Options, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.notes: list[str] = []
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wc-")))
        tensors = generate(options.size_bytes, options.tensors)
        self.weights_bytes = total_bytes(tensors)
        file = write_safetensors(tensors, folder / "model.safetensors")
        self.places = Places(str(folder / "c.sock"), KEY, str(file), echo=str(folder / "e.sock"))
        wanted = [name for name in PEERS if name not in options.skip]
        if TORCH_LOAD in wanted:
            pickled = write_pickled(tensors, folder / "model.pt")
            self.places = replace(self.places, pickled=str(pickled))
        if RAY in wanted and not self._possible(RAY, partial(self._start_ray, tensors, folder)):
            wanted.remove(RAY)
        tensors.clear()
        self._start_ours(file)
        for name in set(SHARING) & set(wanted):
            if not self._possible(name, partial(self._start_sender, name, file, folder)):
                wanted.remove(name)
        self.names = [OURS, FLOOR, *wanted]

    def enter(self) -> dict[str, Contender]:
        """Return everybody, connected in this process until the scene ends."""
        entered = {}
        for name in list(self.names):
            taken = contender(name, self.places)
            taken.prepare()
            taken.connect()
            self._stack.callback(taken.close)
            entered[name] = taken
            if name in PEERS and not self._possible(name, taken.attach):
                self.names.remove(name)
                del entered[name]
        return entered

    def _possible(self, name: str, step: Callable[[], object]) -> bool:
        """Take a step for a peer; if it fails, note why and go on without it."""
        try:
            step()
        except (Unavailable, OSError, RuntimeError) as error:
            self.notes.append(f"{name}: not measured, {error}")
            return False
        return True

    def _start_ours(self, file: Path) -> None:
        budget_bytes = os.path.getsize(file) * 2 + (64 << 20)
        self._stack.enter_context(
            CoordinatorProcess(self.places.socket, "--ram-budget", f"{budget_bytes}B")
        )
        operator = self._stack.enter_context(Operator.connect(self.places.socket, "benchmark"))
        _, fd = acquire_segment(operator, KEY, file)
        try:
            self._end_with_scene(echo.start(self.places.echo, fd))
        finally:
            os.close(fd)

    def _start_sender(self, name: str, file: Path, folder: Path) -> None:
        address = str(folder / f"{SHARING[name]}.sock")
        self._end_with_scene(sender.start(SHARING[name], file, address))
        self.places = replace(self.places, senders={**self.places.senders, name: address})

    def _start_ray(self, tensors: Tensors, folder: Path) -> None:
        cluster = RayCluster(tensors, str(folder / "ray"))
        self._stack.callback(cluster.close)
        self.places = replace(
            self.places, ray_address=cluster.address, ray_reference=cluster.reference
        )

    def _end_with_scene(self, process: subprocess.Popen[str]) -> None:
        def end() -> None:
            process.terminate()
            process.wait()
            # Not read to their ends: torch's helper of a sender has them open a little longer.
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()

        self._stack.callback(end)


def _repeats(scene: _Scene, rounds: int, *, read: bool) -> Row:
    """Attach again and again in this process."""
    entered = scene.enter()
    gc.collect()
    gc.freeze()
    try:
        taken = interleave(
            rounds,
            {name: partial(visit, one, read) for name, one in entered.items()},
        )
    finally:
        gc.unfreeze()
    middle = medians(taken)
    if read:
        return _row("attach and first read of every page, repeated", middle, scene.notes)
    claims = [
        Claim("repeated attach / floor", middle[OURS] / middle[FLOOR], 1.25),
        *_faster_than(LOAD_FILE, middle, 4.0),
        *_faster_than(RAY, middle, 1.0),
    ]
    return replace(_row("attach, repeated in one process", middle, scene.notes), claims=claims)


def visit(one: Contender, read: bool) -> float:
    """Attach twice, and return the seconds of the second: a repeat, whoever was measured before.

    The first also waits for what that one has left to others: a sender that closes a thousand fds,
    a store that counts its references.
    """
    _attach(one, read)
    return _attach(one, read)


def _attach(one: Contender, read: bool) -> float:
    gc.collect()
    gc.disable()
    try:
        started_s = time.perf_counter()
        tensors = one.attach()
        if read:
            read_every_page(tensors)
        taken_s = time.perf_counter() - started_s
    finally:
        gc.enable()
    del tensors
    one.settle()
    return taken_s


def _fresh(scene: _Scene, rounds: int) -> list[Row]:
    """Attach once in each of many processes."""
    taken = interleave(
        rounds,
        {name: partial(fresh.sample, name, scene.places) for name in scene.names},
        warm_up=False,
    )
    attached = medians({name: [one.attached_s for one in took] for name, took in taken.items()})
    read = medians({name: [one.read_s for one in took] for name, took in taken.items()})
    deferred_s = statistics.median(one.deferred_import_s for one in taken[OURS])
    return [
        replace(
            _row("attach, first in a fresh process", attached, scene.notes),
            claims=_faster_than(LOAD_FILE, attached, 2.5),
            beside={"imports that ours does at its first attach, not counted_s": deferred_s},
        ),
        _row("attach and first read of every page, fresh process", read, scene.notes),
    ]


def _faster_than(peer: str, middle: dict[str, float], times: float) -> list[Claim]:
    if peer not in middle:
        return []
    faster = middle[peer] / middle[OURS]
    return [Claim(f"times as fast as {peer}", faster, times, "at least")]


def _row(case: str, middle: dict[str, float], notes: Sequence[str]) -> Row:
    peers = {name: value for name, value in middle.items() if name not in (OURS, FLOOR)}
    return Row(case, "s", middle[OURS], middle[FLOOR], peers, notes=tuple(notes))
