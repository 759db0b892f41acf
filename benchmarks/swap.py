"""`swap`: what it takes to have a model on its device, and to have it leave.

The device is a simulated one, whose memory is the host's: what is measured is all that a real one
would add nothing to. The floor of an upload is a copy of the same bytes into memory that was made
in the same way, and populated; that of an offload is one `.data =` for each parameter.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

import gpu_worker
from benchmarks.contenders import FLOOR, OURS
from benchmarks.coordinator_process import CoordinatorProcess
from benchmarks.rows import (
    Claim,
    Outcome,
    Row,
    conditions,
    interleave,
    medians,
    percentile,
    warm_memory,
)
from gpu_worker.residency import PASS_BYTES

DEVICE = "sim:0"
SIZE_VARIABLE = "WEIGHT_CACHE_SIM_BYTES"
WARM_COPY = "memcpy into memory that is there already"

SPEED_LEAST = 0.85
PASSES_MOST = 2.0
PARAMETERS = (10, 100, 1000)


@dataclass(frozen=True, slots=True)
class Options:
    """How large, in how many parameters, and how often; how much memory to warm up before."""

    size_bytes: int = 10**9
    tensors: int = 400
    rounds: int = 15
    constructions: int = 60
    warm_bytes: int = 3 << 30


class Model(torch.nn.Module):
    """So many parameters of so many bytes in all."""

    def __init__(self, size_bytes: int, tensors: int) -> None:
        super().__init__()
        elements = max(1, size_bytes // tensors // 2)
        for number in range(tensors):
            weight = torch.nn.Parameter(torch.ones(elements, dtype=torch.bfloat16))
            self.register_parameter(f"weight_{number}", weight)


def run(options: Options) -> Outcome:
    """Measure, and return the rows."""
    os.environ[SIZE_VARIABLE] = str(3 * options.size_bytes + (64 << 20))
    warm_memory(options.warm_bytes)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="wc-"))
        stack.enter_context(CoordinatorProcess(f"{folder}/c.sock"))
        worker = stack.enter_context(
            gpu_worker.attach(f"{folder}/c.sock", device=DEVICE, name="benchmark")
        )
        rows = [_upload(worker, options), _offload(worker, options), _construct(worker, options)]
    facts = conditions(
        size_mb=round(options.size_bytes / 1e6),
        parameters=options.tensors,
        rounds=options.rounds,
        pass_mb=round(PASS_BYTES / 1e6),
    )
    return Outcome("swap", facts, rows)


def _load(worker: gpu_worker.Worker, size_bytes: int, tensors: int) -> gpu_worker.ModelHandle:
    make = partial(Model, size_bytes, tensors)
    return worker.load(f"swap/{size_bytes}/{tensors}", skeleton=make, build=make)


# --- in -----------------------------------------------------------------------------------------


def _upload(worker: gpu_worker.Worker, options: Options) -> Row:
    handle = _load(worker, options.size_bytes, options.tensors)
    with handle as module:
        pass
    worker.offload(handle.key)
    source = torch.cat([parameter.detach() for parameter in module.parameters()])
    with _fresh(source.nbytes) as there:
        warm = there
        samples = {
            OURS: partial(_lock_s, worker, handle),
            FLOOR: partial(_fresh_copy_s, source),
            WARM_COPY: partial(_copy_s, source, warm),
        }
        middle = medians(interleave(options.rounds, samples))
    handle.close()
    worker.evict(handle.key)
    speed = middle[FLOOR] / middle[OURS]
    return Row(
        f"swap in {options.size_bytes / 1e9:g} GB, {options.tensors} parameters",
        "s",
        middle[OURS],
        middle[FLOOR],
        {WARM_COPY: middle[WARM_COPY]},
        claims=[Claim("times as fast as a bare memcpy of it", speed, SPEED_LEAST, "at least")],
        notes=["floor: memory is allocated and populated, then one memcpy"],
    )


def _lock_s(worker: gpu_worker.Worker, handle: gpu_worker.ModelHandle) -> float:
    started_s = time.perf_counter()
    with handle:
        took_s = time.perf_counter() - started_s
    worker.offload(handle.key)
    worker.flush()  # the memory is the kernel's again before anybody else takes some
    return took_s


@contextlib.contextmanager
def _fresh(size_bytes: int) -> Iterator[int]:
    """Give the address of memory as a simulated device has it: a memfd, allocated, and mapped."""
    fd = os.memfd_create("floor")
    os.posix_fallocate(fd, 0, size_bytes)
    with mmap.mmap(fd, size_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE) as mapped:
        os.close(fd)
        first = ctypes.c_ubyte.from_buffer(mapped)
        yield ctypes.addressof(first)
        del first


def _fresh_copy_s(source: torch.Tensor) -> float:
    started_s = time.perf_counter()
    with _fresh(source.nbytes) as there:
        ctypes.memmove(there, source.data_ptr(), source.nbytes)
        return time.perf_counter() - started_s


def _copy_s(source: torch.Tensor, there: int) -> float:
    started_s = time.perf_counter()
    ctypes.memmove(there, source.data_ptr(), source.nbytes)
    return time.perf_counter() - started_s


# --- out ----------------------------------------------------------------------------------------


def _offload(worker: gpu_worker.Worker, options: Options) -> Row:
    size_bytes = options.size_bytes // 4
    taken: dict[int, float] = {}
    floor_s = 0.0
    for count in PARAMETERS:
        handle = _load(worker, size_bytes, count)
        with handle as module:
            pass
        parameters = list(module.parameters())
        samples = {
            OURS: partial(_offload_s, worker, handle),
            FLOOR: partial(_repoint_s, parameters),
        }
        middle = medians(interleave(options.rounds, samples))
        taken[count], floor_s = middle[OURS], middle[FLOOR]
        del module, parameters
        handle.close()
        worker.evict(handle.key)
        gc.collect()
        worker.flush()
    beside = {f"{count} parameters, s": taken[count] for count in PARAMETERS}
    return Row(
        f"offload of {size_bytes / 1e9:g} GB, {PARAMETERS[-1]} parameters",
        "s",
        taken[PARAMETERS[-1]],
        floor_s,
        beside=beside,
        notes=["floor: one `.data =` for each parameter; nothing is copied"],
    )


def _offload_s(worker: gpu_worker.Worker, handle: gpu_worker.ModelHandle) -> float:
    with handle:
        pass
    worker.flush()
    started_s = time.perf_counter()
    worker.offload(handle.key)
    took_s = time.perf_counter() - started_s
    worker.flush()
    return took_s


def _repoint_s(parameters: list[torch.nn.Parameter]) -> float:
    data = [parameter.data for parameter in parameters]
    started_s = time.perf_counter()
    for parameter, one in zip(parameters, data, strict=True):
        parameter.data = one
    return time.perf_counter() - started_s


# --- who builds meanwhile -----------------------------------------------------------------------


def _construct(worker: gpu_worker.Worker, options: Options) -> Row:
    """How long a construction waits while another thread swaps without a pause."""
    handle = _load(worker, options.size_bytes, options.tensors)
    stop, waits = threading.Event(), []

    def swap() -> None:
        while not stop.is_set():
            with handle:
                pass
            worker.offload(handle.key)

    thread = threading.Thread(target=swap)
    thread.start()
    for _ in range(options.constructions):
        started_s = time.perf_counter()
        with gpu_worker.constructing():
            waits.append(time.perf_counter() - started_s)
        # As long as a pass, so that the next one comes at any point of one.
        threading.Event().wait(0.01)
    stop.set()
    thread.join()
    with handle as module:
        source = torch.cat([parameter.detach() for parameter in module.parameters()])
    pass_s = _pass_s(source, options.rounds)
    handle.close()
    waited_s = percentile(waits, 95)
    return Row(
        "a construction waits for an upload under way, 95 of 100",
        "s",
        waited_s,
        pass_s,
        claims=[Claim("times one pass", waited_s / pass_s, PASSES_MOST)],
        beside={"median, s": percentile(waits, 50), "longest, s": max(waits)},
        notes=["floor: one pass, allocated, populated and copied by itself"],
    )


def _pass_s(source: torch.Tensor, rounds: int) -> float:
    part = source.view(torch.uint8)[:PASS_BYTES]
    return medians({FLOOR: [_fresh_copy_s(part) for _ in range(rounds)]})[FLOOR]
