"""`memory`: what a model takes that many workers use, with every page of it read.

Shared memory is counted by PSS: each page once, divided among those who map it. RSS would count it
in full in each. A peer's weights are its maps of the file and the growth of its private memory.

Two cases, and they differ: a file as it is, which safetensors maps and so shares through the page
cache just as we do; and weights that were converted when they were loaded, which plain loading
leaves each process a copy of its own. Beside them: what the kernel promised (Committed_AS), fds,
and whether it works with few of those and without /dev/shm.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from benchmarks import kernel
from benchmarks.checkpoint import generate, total_bytes, write_safetensors
from benchmarks.confined import Confined
from benchmarks.contenders import LOAD_FILE, SHARING
from benchmarks.coordinator_process import ROOT, CoordinatorProcess, acquire_segment
from benchmarks.holders import Held, Order, hold_all
from benchmarks.rows import Claim, Outcome, Row, conditions, warm_memory
from coordinator.operator import Operator
from shm_store.keys import GenerationId

PLAIN = "benchmark/memory"
CONVERTED = "benchmark/memory:bf16"

PSS_LIMIT = 1.02
COMMITTED_LIMIT = 0.02
"""Of one copy: a dict of a thousand tensors is memory of its own, and counts."""
SMALL_BYTES = 8_000_000
SMALL_MODELS = 4
FEW_FDS = 256
SMALL_SHM = "1m"
CONFINED_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Options:
    """How large, and for how many."""

    size_bytes: int = 500_000_000
    tensors: int = 1000
    workers: int = 8
    warm_bytes: int = 3 << 30
    skip: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _Shared:
    """What a number of processes take that hold the same weights.

    Attributes:
        weights_bytes: PSS of the maps of the weights, of all together.
        private_bytes: how much private memory grew, of all together.
        accounted_maps: maps of the weights whose size the kernel charged to Committed_AS.
        held: what each saw of itself.
    """

    weights_bytes: int
    private_bytes: int
    accounted_maps: int
    held: Sequence[Held]

    @property
    def committed_bytes(self) -> float:
        """The median growth of Committed_AS, which all processes of the host move, others too."""
        return statistics.median(
            held.committed_after_bytes - held.committed_before_bytes for held in self.held
        )


def run(options: Options) -> Outcome:
    """Measure, and return the rows."""
    warm_memory(options.warm_bytes)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wc-")))
        tensors = generate(options.size_bytes, options.tensors, torch.float32)
        size_bytes = total_bytes(tensors)
        file = write_safetensors(tensors, folder / "model.safetensors")
        del tensors
        rows = [
            *_plain(options, folder, file),
            _converted(options, folder, file),
            _few_fds(options, file),
            _small_shm(options, file),
        ]
    facts = conditions(
        torch=torch.__version__,
        weights_bytes=size_bytes,
        tensors=options.tensors,
        workers=options.workers,
        torch_threads=1,
    )
    return Outcome("memory", facts, rows)


def _plain(options: Options, folder: Path, file: Path) -> list[Row]:
    """Hold the file as it is; look at PSS, Committed_AS and fds."""
    socket = str(folder / "plain.sock")
    with CoordinatorProcess(socket) as process, Operator.connect(socket, "benchmark") as operator:
        fds = _fds_per_model(process, operator, folder, options.tensors)
        gen, fd = acquire_segment(operator, PLAIN, file)
        os.close(fd)
        copy_bytes = kernel.segment_bytes(process.pid, gen)
        ours = _hold(options.workers, Order(socket, (PLAIN,), str(file)), kernel.is_segment)
    peers = {}
    if LOAD_FILE not in options.skip:
        order = Order("", (PLAIN,), str(file))
        peers[LOAD_FILE] = _hold(options.workers, order, lambda path: path == str(file))
    case = f"PSS of the weights in {options.workers} workers, file as it is"
    pss = _pss_row(case, copy_bytes, ours, peers, "a tie: safetensors maps the file, too")
    return [pss, _committed_row(copy_bytes, ours, peers), _fds_row(fds, ours)]


def _fds_per_model(
    process: CoordinatorProcess, operator: Operator, folder: Path, tensors: int
) -> float:
    """Return how many fds each further model takes in the coordinator, once it is loaded."""
    file = write_safetensors(generate(SMALL_BYTES, tensors), folder / "small.safetensors")
    counts = []
    for number in range(SMALL_MODELS + 1):
        _, fd = acquire_segment(operator, f"benchmark/small/{number}", file)
        os.close(fd)
        # A loader ends a moment after its weights are granted, and only then its fds are closed.
        psutil.wait_procs(psutil.Process(process.pid).children())
        operator.flush()
        counts.append(kernel.fd_count(process.pid))
    return (counts[-1] - counts[0]) / SMALL_MODELS


def _converted(options: Options, folder: Path, file: Path) -> Row:
    """Hold the weights converted to bf16: ours once, by whoever gets the ticket."""
    socket = str(folder / "converted.sock")
    with CoordinatorProcess(socket) as process, Operator.connect(socket, "benchmark") as operator:
        order = Order(socket, (CONVERTED,), str(file), convert=True)

        def measure() -> int:
            (generation,) = operator.status().generations
            return kernel.segment_bytes(process.pid, GenerationId(generation.generation))

        sizes: list[int] = []
        ours = _hold(options.workers, order, kernel.is_segment, lambda: sizes.append(measure()))
    peers = {}
    name = f"{LOAD_FILE}, then bf16"
    if LOAD_FILE not in options.skip:
        order = Order("", (CONVERTED,), str(file), convert=True)
        peers[name] = _hold(options.workers, order, lambda path: path == str(file))
    case = f"PSS of the weights in {options.workers} workers, converted to bf16 at load"
    return _pss_row(case, sizes[0], ours, peers, "plain loading leaves each a copy of its own")


def _hold(
    workers: int,
    order: Order,
    is_weights: Callable[[str], bool],
    meanwhile: Callable[[], object] = lambda: None,
) -> _Shared:
    """Have so many processes hold the same, look at all of them, and let them go."""
    holders = hold_all([order] * workers)
    try:
        meanwhile()
        chosen = [
            entry
            for holder, _ in holders
            for entry in kernel.maps(holder.pid)
            if is_weights(entry.path)
        ]
        return _Shared(
            weights_bytes=sum(entry.sizes["Pss"] for entry in chosen),
            private_bytes=sum(
                kernel.private_bytes(holder.pid) - held.private_before_bytes
                for holder, held in holders
            ),
            accounted_maps=sum("ac" in entry.flags for entry in chosen),
            held=[held for _, held in holders],
        )
    finally:
        for holder, _ in holders:
            holder.let_go()


def _pss_row(
    case: str, copy_bytes: int, ours: _Shared, peers: dict[str, _Shared], note: str
) -> Row:
    return Row(
        case=case,
        unit="bytes",
        ours=ours.weights_bytes,
        floor=copy_bytes,
        peers={name: peer.weights_bytes + peer.private_bytes for name, peer in peers.items()},
        claims=[Claim("PSS / one copy", ours.weights_bytes / copy_bytes, PSS_LIMIT)],
        beside={
            "private memory of ours, all workers, tensor objects included_bytes": ours.private_bytes
        },
        notes=["floor: one copy, as the kernel counts the segment", note],
    )


def _committed_row(copy_bytes: int, ours: _Shared, peers: dict[str, _Shared]) -> Row:
    return Row(
        case="growth of Committed_AS by one worker's mapping, median",
        unit="bytes",
        ours=ours.committed_bytes,
        floor=None,
        peers={name: peer.committed_bytes for name, peer in peers.items()},
        claims=[
            Claim("growth / one copy", ours.committed_bytes / copy_bytes, COMMITTED_LIMIT),
            Claim("maps of the segment that the kernel charged", ours.accounted_maps, 0),
        ],
        notes=["Committed_AS is the whole host's: others move it meanwhile"],
    )


def _fds_row(coordinator_fds: float, ours: _Shared) -> Row:
    tensors = ours.held[0].tensors
    worker_fds = max(held.fds_after - held.fds_before for held in ours.held)
    return Row(
        case=f"fds of a worker per model of {tensors} tensors",
        unit="count",
        ours=worker_fds,
        floor=0,
        claims=[
            Claim("fds of a worker per model", worker_fds, 1),
            Claim("fds of the coordinator per model", coordinator_fds, 1),
        ],
    )


# --- confined -----------------------------------------------------------------------------------


def _few_fds(options: Options, file: Path) -> Row:
    limits = ["sh", "-c", f'ulimit -n {FEW_FDS} && exec "$@"', "sh"]
    found = _confined(limits, options, file)
    return _confined_row(f"tensors that arrive under `ulimit -n {FEW_FDS}`", options, found)


def _small_shm(options: Options, file: Path) -> Row:
    case = f"tensors that arrive with a /dev/shm of {SMALL_SHM}"
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return Row(case, "count", 0, None, notes=["skipped: mounting needs root and `unshare`"])
    mount = f'mount -t tmpfs -o size={SMALL_SHM} tmpfs /dev/shm && exec "$@"'
    found = _confined(["unshare", "-m", "sh", "-c", mount, "sh"], options, file)
    return _confined_row(case, options, found)


def _confined(around: Sequence[str], options: Options, file: Path) -> Confined | str:
    """Return what came out of it, or why it could not be tried."""
    peers = [name for name in SHARING if name not in options.skip]
    ended = subprocess.run(
        [*around, sys.executable, "-m", "benchmarks.confined", str(file), *peers],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=CONFINED_LIMIT_S,
        check=False,
    )
    if ended.returncode:
        return (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
    return Confined(**json.loads(ended.stdout))


def _confined_row(case: str, options: Options, found: Confined | str) -> Row:
    if isinstance(found, str):
        claims = [Claim("tensors, bit-equal", 0, options.tensors, "at least")]
        return Row(case, "count", 0, options.tensors, claims=claims, notes=[found])
    return Row(
        case=case,
        unit="count",
        ours=found.equal,
        floor=options.tensors,
        peers=found.peers,
        claims=[Claim("tensors, bit-equal", found.equal, options.tensors, "at least")],
        beside={"limit of fds": found.fd_limit, "/dev/shm_bytes": found.shm_bytes},
        notes=found.notes,
        better="more",
    )
