"""`restart`: a process that serves answers is killed, and started again: until its first answer.

What it finds then is what its predecessor has left behind, and differs:

- *kept on the device*: the coordinator has the memory of the device, and nothing is moved;
- *on the host*: that was needed by others (`weight-cache limit` has had it leave); it is uploaded;
- *on disk*: the coordinator has nothing (`weight-cache evict`), and a loader reads the file. That
  is in the page cache all the time, as it is after any restart.

All of these are one program, and take turns with two that know no coordinator: `load_file` and a
copy, as `.to(device)` makes one of what was read, and `load_file` alone, used as it maps the file:
the floor here, which no GPU has. Each process is killed by SIGKILL while it computes an answer, and
the next one is started when the coordinator has noticed. The device is a simulated one.

The benchmark ends with an error if what was to be kept was not, if a byte of it was moved, or if an
answer was wrong.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.answering import Answering, Plan
from benchmarks.contenders import FLOOR
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
from shm_store.keys import Key
from shm_store.report import GenerationReport
from shm_store.wire import RAM

DEVICE = "sim:0"
POOL = "vram:sim-0"
SIZE_VARIABLE = "WEIGHT_CACHE_SIM_BYTES"

KEPT = "kept on the device"
HOST = "on the host"
DISK = "on disk"
COPIED = "safetensors load_file, and a copy"

GONE_LIMIT_S = 30.0
SPARE_BYTES = 64 << 20
NOTHING_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Options:
    """How large the generated model is, in how many matrices, and how often to kill."""

    size_bytes: int = 1_000_000_000
    tensors: int = 60
    rounds: int = 7
    warm_bytes: int = 3 << 30
    skip: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _Restart:
    """One of them: seconds from exec, from the imports, of those, of the first lock; and what was
    moved of the weights, and of what the module makes beside them.
    """

    from_exec_s: float
    from_imports_s: float
    imports_s: float
    locked_s: float
    weights_bytes: int
    own_bytes: int


def run(options: Options) -> Outcome:
    """Measure, and return the rows."""
    warm_memory(options.warm_bytes)
    rows: list[Row] = []
    notes = []
    with tempfile.TemporaryDirectory(prefix="wc-") as name:
        folder = Path(name)
        models = []
        try:
            models += [] if MINILM in options.skip else [minilm()]
        except Unavailable as error:
            notes.append(f"{MINILM}: not measured, {error}")
        models.append(generated(options.size_bytes, options.tensors, folder))
        for model in models:
            rows += _rows(model, options, folder)
    facts = conditions(
        rounds=options.rounds,
        torch_threads=1,
        page_cache="warm",
        device=DEVICE,
        notes=notes,
    )
    return Outcome("restart", facts, rows)


def _rows(model: ModelPlan, options: Options, folder: Path) -> list[Row]:
    os.environ[SIZE_VARIABLE] = str(2 * model.size_bytes + SPARE_BYTES)
    socket = str(folder / "c.sock")
    with contextlib.ExitStack() as stack:
        budget_bytes = 2 * model.size_bytes + SPARE_BYTES
        stack.enter_context(CoordinatorProcess(socket, "--ram-budget", f"{budget_bytes}B"))
        scene = _Scene(model, socket, stack)
        samples: dict[str, Callable[[], _Restart]] = {
            KEPT: scene.kept,
            HOST: scene.on_host,
            DISK: scene.on_disk,
            FLOOR: partial(scene.plain, "mapped"),
        }
        if COPIED not in options.skip:
            samples[COPIED] = partial(scene.plain, "copied")
        taken = interleave(options.rounds, samples, warm_up=False)  # the scene has started two
    return [_row(model, state, taken) for state in (KEPT, HOST, DISK)]


def _row(model: ModelPlan, state: str, taken: dict[str, list[_Restart]]) -> Row:
    from_imports = medians(
        {name: [one.from_imports_s for one in took] for name, took in taken.items()}
    )
    from_exec = medians({name: [one.from_exec_s for one in took] for name, took in taken.items()})
    imports = medians({name: [one.imports_s for one in took] for name, took in taken.items()})
    lock = medians({name: [one.locked_s for one in took] for name, took in taken.items()})
    weights_bytes = max(one.weights_bytes for one in taken[state])
    others = [name for name in taken if name not in (FLOOR, state)]
    claims = []
    if state == KEPT:
        claims.append(Claim("bytes of the weights moved, at most", weights_bytes, 0))
        for slower in (HOST, DISK):
            ratio = from_imports[KEPT] / from_imports[slower]
            claims.append(Claim(f"times as long as with weights {slower}", ratio, 1.0))
    return Row(
        case=f"{model.name}, imports done to the first answer, weights {state}",
        unit="s",
        ours=from_imports[state],
        floor=from_imports[FLOOR],
        peers={COPIED: from_imports[COPIED]} if COPIED in others else {},
        claims=claims,
        beside={
            "of the weights moved to the device, at most_bytes": weights_bytes,
            "what the module makes beside them, moved_bytes": taken[state][0].own_bytes,
            "of it the first lock_s": lock[state],
            "from exec to the first answer_s": from_exec[state],
            "imports_s": imports[state],
            **({"the peer, from exec_s": from_exec[COPIED]} if COPIED in others else {}),
            "the floor, from exec_s": from_exec[FLOOR],
        },
        notes=["floor: load_file, used as it maps the file, with no device"],
    )


class _Scene:
    """A coordinator, and the one process that serves, which is killed for the next one."""

    def __init__(self, model: ModelPlan, socket: str, stack: contextlib.ExitStack) -> None:
        self._model, self._socket = model, socket
        self._key = Key(f"restart/{model.name}")
        self._serving: Answering | None = None
        self._operator = stack.enter_context(Operator.connect(socket, "benchmark"))
        stack.callback(self._end)
        # The first has nobody before it; its answer is what all others have to be.
        self._right: list[float] = []
        self._right = self._start(Plan(model, "mapped")).answer
        self._measure(self._plan())

    def kept(self) -> _Restart:
        """Start again with everything as the one before has left it."""
        self._kill()
        before = self._there(POOL)
        if len(before) != 1 or not self._there(RAM):
            raise RuntimeError(f"{self._key!r} was not kept: {self._operator.status()}")
        took = self._measure(self._plan())
        if [one.generation for one in self._there(POOL)] != [one.generation for one in before]:
            raise RuntimeError("the memory on the device is another one")
        if took.weights_bytes:
            raise RuntimeError(f"{took.weights_bytes} bytes were moved to where they were")
        return took

    def on_host(self) -> _Restart:
        """Start again after the device has been another's."""
        self._kill()
        (pool,) = [one for one in self._operator.status().pools if one.name == POOL]
        self._operator.limit(POOL, NOTHING_BYTES)
        self._operator.flush()
        self._operator.limit(POOL, pool.limit_bytes)
        self._check_there(host=1, device=0)
        return self._measure(self._plan(), moves=True)

    def on_disk(self) -> _Restart:
        """Start again with a coordinator that has nothing."""
        self._kill()
        self._operator.evict(self._key)
        self._operator.flush()
        self._check_there(host=0, device=0)
        return self._measure(self._plan(), moves=True)

    def plain(self, way: str) -> _Restart:
        """Start one that knows no coordinator."""
        self._kill()
        return self._measure(Plan(self._model, "copied" if way == "copied" else "mapped"))

    def _plan(self) -> Plan:
        return Plan(self._model, "shared", self._socket, self._key, DEVICE)

    def _kill(self) -> None:
        """Kill who serves while it computes, and wait until the coordinator is without it."""
        serving, self._serving = self._serving, None
        if serving is None:
            return
        with serving:
            serving.kill_while_it_computes()
        end_s = time.monotonic() + GONE_LIMIT_S
        while any(one.pid == serving.pid for one in self._operator.status().sessions):
            if time.monotonic() > end_s:
                raise RuntimeError(f"process {serving.pid} was killed, and is still there")
            time.sleep(0.001)
        self._operator.flush()

    def _end(self) -> None:
        if self._serving is not None:
            self._serving.kill()

    def _measure(self, plan: Plan, *, moves: bool = False) -> _Restart:
        started = self._start(plan)
        assert self._serving is not None
        weights_bytes = started.moved_bytes - started.own_bytes
        if moves and weights_bytes <= 0:
            raise RuntimeError("nothing was moved, and nothing was there")
        return _Restart(
            from_exec_s=started.answered_s - self._serving.exec_s,
            from_imports_s=started.answered_s - started.imported_s,
            imports_s=started.imported_s - self._serving.exec_s,
            locked_s=started.ready_s - started.loaded_s,
            weights_bytes=weights_bytes,
            own_bytes=started.own_bytes,
        )

    def _start(self, plan: Plan):
        self._kill()
        self._serving = Answering(plan)
        started = self._serving.started
        if self._right and not same(started.answer, self._right):
            raise RuntimeError(f"{started.answer}, where {self._right} was right")
        return started

    def _there(self, pool: str) -> list[GenerationReport]:
        status = self._operator.status()
        found = [one for one in status.generations if one.key == self._key and one.pool == pool]
        return [one for one in found if one.state == "ready" and not one.private]

    def _check_there(self, *, host: int, device: int) -> None:
        found = len(self._there(RAM)), len(self._there(POOL))
        if found != (host, device):
            raise RuntimeError(f"{found} copies on the host and the device are there")
