"""`fill`: until the bytes of a checkpoint are in memory for everybody.

Ours ends with a READY generation: ACQUIRE sent, a loader started, memory backed by a child, filled,
sealed, granted. The peers end with the bytes in the memory of one process, each in a process of its
own with its imports done.

With the file in the page cache the floor is one thread that backs a memfd and has `sendfile` copy
the file into it. Without, it is the best that this disk gives to any number of threads, through the
page cache or past it, into memory that is there already; what that takes with its memory made is
beside it. A third part has many workers ask at once for a cold model, and counts what is read and
what memory it takes.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import loader_steps, reading
from benchmarks.checkpoint import generate, write_safetensors
from benchmarks.contenders import FLOOR, OURS
from benchmarks.coordinator_process import LOAD_LIMIT_S, CoordinatorProcess
from benchmarks.crowd import ask_at_once
from benchmarks.fillers import PEERS, READS, Filler, Places, write_places
from benchmarks.loader_steps import Steps
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
from benchmarks.slow_disk import held_to
from coordinator.operator import Operator
from shm_store.checkpoint_files import open_checkpoint
from shm_store.keys import Key
from shm_store.reading import AS_IT_IS

OF_FLOOR = 0.9
"""Of the floor's speed, and of the disk's."""
COPIES = 1.2
READ_ONCE = 1.02
"""Of the file: its directory and its inode are read, too."""
CACHED = 0.01
"""So much of a file may still be in the page cache when it is called cold."""

STAYS = "stays in memory: name a --folder on a disk"

THREADS = (1, 2, 4, 8)
MAKING_THREADS = 4
"""Where making the memory counts, too: it takes longer than what the threads differ by."""
WAYS = ("buffered", "direct")
STEPS = "steps"
CROWD_TENSOR_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Options:
    """How large, and how often."""

    size_bytes: int = 2_000_000_000
    tensors: int = 300
    rounds: int = 5
    cold_rounds: int = 5
    crowd_bytes: int = 4_000_000_000
    workers: int = 8
    warm_bytes: int = 3 << 30
    skip: Sequence[str] = ()
    folder: str | None = None
    disk_bytes_per_s: int = 0


def run(options: Options) -> Outcome:
    """Measure, and return the rows."""
    warm_memory(options.warm_bytes)
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="wc-", dir=options.folder))
        notes: list[str] = []
        names = [name for name in PEERS if name not in options.skip]
        tensors = generate(options.size_bytes, options.tensors)
        file = write_safetensors(tensors, Path(name) / "a.safetensors")
        places = write_places(tensors, file, names)
        del tensors
        stack.enter_context(held_to(options.disk_bytes_per_s, file))
        budget_bytes = 2 * max(options.size_bytes, options.crowd_bytes) + (256 << 20)
        socket = str(Path(name) / "c.sock")
        coordinator = stack.enter_context(
            CoordinatorProcess(socket, "--ram-budget", f"{budget_bytes}B")
        )
        ours = _Ours(socket, stack)
        fillers = _start(names, places, stack, notes)
        if options.rounds:
            rows += _warm(options, str(file), ours, fillers, notes)
        if options.cold_rounds:
            rows += _cold(options, places, ours, fillers, stack, notes)
        for filler in fillers.values():
            filler.close()
        for left in Path(name).glob("a.*"):
            left.unlink()
        if options.crowd_bytes:
            rows += _crowd(options, Path(name), coordinator.pid, socket, notes)
    facts = conditions(
        rounds=options.rounds,
        cold_rounds=options.cold_rounds,
        torch_threads=1,
        **({"disk_bytes_per_s": options.disk_bytes_per_s} if options.disk_bytes_per_s else {}),
        notes=notes,
    )
    return Outcome("fill", facts, rows)


class _Ours:
    """Asks a coordinator for a file under a new key each time, and lets go of it."""

    def __init__(self, socket: str, stack: contextlib.ExitStack) -> None:
        self._operator = stack.enter_context(Operator.connect(socket, "benchmark"))
        self._number = 0

    def sample(self, file: str) -> float:
        """Return the seconds from ACQUIRE to READY."""
        self._number += 1
        key = Key(f"fill/{self._number}")
        started_s = time.perf_counter()
        source = open_checkpoint(file)
        try:
            granted = self._operator.acquire(key, source, AS_IT_IS, LOAD_LIMIT_S)
        finally:
            source.close()
        took_s = time.perf_counter() - started_s
        self._operator.release(granted)
        self._operator.evict(key)
        self._operator.flush()
        return took_s


def _start(
    names: Sequence[str], places: Places, stack: contextlib.ExitStack, notes: list[str]
) -> dict[str, Filler]:
    """Start those that can run here; note why the others cannot."""
    fillers = {}
    for name in names:
        try:
            fillers[name] = stack.enter_context(Filler(name, places))
        except Unavailable as error:
            notes.append(f"{name}: not measured, {error}")
    return fillers


def _measure(
    rounds: int,
    samples: Mapping[str, Callable[[], float]],
    fillers: Mapping[str, Filler],
    before: Callable[[str], None],
    notes: list[str],
) -> dict[str, list[float]]:
    """Take samples in turns, each after `before` its file. Who fails once is out, and noted."""
    failed: dict[str, str] = {}

    def of_peer(name: str) -> float:
        if name in failed:
            return 0.0
        before(fillers[name].file)
        try:
            return fillers[name].sample()
        except Unavailable as error:
            failed[name] = str(error)
            return 0.0

    peers: dict[str, Callable[[], float]] = {name: partial(of_peer, name) for name in fillers}
    taken: dict[str, list[float]] = interleave(rounds, {**samples, **peers})
    notes += [f"{name}: not measured, {why}" for name, why in failed.items()]
    return {name: samples for name, samples in taken.items() if name not in failed}


def _warm(
    options: Options, file: str, ours: _Ours, fillers: Mapping[str, Filler], notes: list[str]
) -> list[Row]:
    steps: list[Steps] = []
    floors: list[tuple[float, float]] = []

    def taken_apart() -> float:
        steps.append(loader_steps.sample(file))
        return steps[-1].filled_s

    def floor() -> float:
        floors.append(reading.floor_s(file))
        return sum(floors[-1])

    own: dict[str, Callable[[], float]] = {
        OURS: lambda: ours.sample(file),
        FLOOR: floor,
        STEPS: taken_apart,
    }
    taken = _measure(options.rounds, own, fillers, _nothing, notes)
    median = medians(taken)
    peers = {name: median[name] for name in fillers if name in median}
    copied_s = statistics.median(copied for _, copied in floors[1:])
    size = f"{options.size_bytes / 1e9:.3g} GB in {options.tensors} tensors"
    whole = Row(
        case=f"{size}, file in the page cache: ACQUIRE to READY",
        unit="s",
        ours=median[OURS],
        floor=median[FLOOR],
        peers=peers,
        claims=[_speed("of the floor's speed", median[FLOOR], median[OURS])],
        beside={
            "floor, of it the backing_s": statistics.median(backed for backed, _ in floors[1:]),
        },
        notes=_spread(taken),
    )
    alone = Row(
        case="of that in the loader only: SPACE to COMMIT",
        unit="s",
        ours=median[STEPS],
        floor=copied_s,
        beside={
            "before it: loader started, to its RESERVE_s": _step(steps, "started_s"),
            "before it: backing child, from exec to its end_s": _step(steps, "backed_s"),
            "after it: the seal_s": _step(steps, "sealed_s"),
        },
        notes=["floor: sendfile only, into memory that is backed"],
    )
    return [whole, alone]


def _step(steps: Sequence[Steps], name: str) -> float:
    return statistics.median(getattr(step, name) for step in steps[1:])


def _cold(
    options: Options,
    places: Places,
    ours: _Ours,
    fillers: Mapping[str, Filler],
    stack: contextlib.ExitStack,
    notes: list[str],
) -> list[Row]:
    file = places.safetensors
    if reading.drop(file) > CACHED:
        notes.append(f"cold: not measured, {file} {STAYS}")
        return []
    there = [f"{READS} {threads} {way} there" for threads in THREADS for way in WAYS]
    made = [f"{READS} {MAKING_THREADS} {way} made" for way in WAYS]
    readers = _start([*there, *made], places, stack, notes)
    own = {OURS: lambda: _after_drop(file, partial(ours.sample, file))}
    taken = _measure(options.cold_rounds, own, {**fillers, **readers}, _drop, notes)
    for reader in readers.values():
        reader.close()
    median = medians(taken)
    best, best_made = _best(median, there), _best(median, made)
    limit = median[best]
    return [
        Row(
            case=f"{options.size_bytes / 1e9:.3g} GB, file on the disk only: ACQUIRE to READY",
            unit="s",
            ours=median[OURS],
            floor=limit,
            peers={name: median[name] for name in fillers if name in median},
            claims=[
                _speed("of the best parallel read's speed", limit, median[OURS]),
                _speed("of that with its memory made", median[best_made], median[OURS]),
            ],
            beside={"best read with its memory made_s": median[best_made]},
            notes=[
                f"floor: {best} (threads, way, memory), the best of {len(there)}",
                f"disk: {options.size_bytes / limit / 1e9:.2f} GB/s by that",
                *_spread(taken),
            ],
        )
    ]


def _best(median: Mapping[str, float], names: Sequence[str]) -> str:
    measured = [name for name in names if name in median]
    if not measured:
        raise RuntimeError("nothing can read the file")
    return min(measured, key=lambda name: median[name])


def _after_drop(file: str, sample: Callable[[], float]) -> float:
    _drop(file)
    return sample()


def _drop(file: str) -> None:
    left = reading.drop(file)
    if left > CACHED:
        raise RuntimeError(f"{left:.1%} of {file} are still in the page cache")


def _nothing(file: str) -> None:
    """What is done before a sample of a file that stays in the page cache."""


def _speed(what: str, floor_s: float, ours_s: float) -> Claim:
    return Claim(what, floor_s / ours_s, OF_FLOOR, "at least")


def _spread(taken: Mapping[str, Sequence[float]]) -> list[str]:
    return [
        f"{name}: {min(samples):.3f} to {max(samples):.3f} s" for name, samples in taken.items()
    ]


# --- many at once -------------------------------------------------------------------------------


def _crowd(
    options: Options, folder: Path, coordinator_pid: int, socket: str, notes: list[str]
) -> list[Row]:
    file = _write_large(folder / "crowd.safetensors", options.crowd_bytes)
    try:
        size_bytes = file.stat().st_size
        if reading.drop(str(file)) > CACHED:
            notes.append(f"many at once: not measured, {file} {STAYS}")
            return []
        found = ask_at_once(options.workers, coordinator_pid, socket, "fill/crowd", str(file))
    finally:
        file.unlink()
    row = Row(
        case=f"{options.workers} workers ask at once for {size_bytes / 1e9:.3g} GB on the disk",
        unit="bytes",
        ours=found.peak_bytes,
        floor=size_bytes,
        claims=[
            Claim("copies in memory at its peak", found.peak_bytes / size_bytes, COPIES),
            Claim("files read from the disk", found.read_bytes / size_bytes, READ_ONCE),
            Claim("files read by system calls", found.called_bytes / size_bytes, READ_ONCE),
        ],
        beside={
            "until the last had read every page_s": found.seconds,
            "looks at memory": found.looks,
        },
        notes=[
            "ours: blocks of all segments, and RssAnon of coordinator, its children and workers, "
            "less what they had before; no file pages"
        ],
    )
    return [row]


def _write_large(path: Path, size_bytes: int) -> Path:
    """Write a `.safetensors` file without having all of it in memory."""
    count = max(1, size_bytes // CROWD_TENSOR_BYTES)
    each = size_bytes // count
    table = {
        f"layer.{number}": {
            "dtype": "U8",
            "shape": [each],
            "data_offsets": [number * each, (number + 1) * each],
        }
        for number in range(count)
    }
    header = json.dumps(table).encode()
    noise = os.urandom(each)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _ in range(count):
            file.write(noise)
        file.flush()
        os.fsync(file.fileno())
    return path
