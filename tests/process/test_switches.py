"""Models that come and go by the hundred leave nothing behind, in no process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks import kernel
from tests.processes import ROOT, WAIT_S, Coordinator, running

SWITCHES = 500
SETTLED = 50
"""By then every allocator has its arenas, and every model was there several times."""

MODELS = 6
WIDTH = 256
SEGMENT_BYTES = WIDTH * WIDTH * 4 + 2 * 4096
"""Of a model: its matrix, and what describes it."""

RESIDENT_TOLERANCE_BYTES = 2 << 20
"""Noise of allocators. 450 models that stay, of a quarter of a MiB each, would be 112 MiB."""

WORKER = f"""
import sys
import torch
import gpu_worker

WIDTH = {WIDTH}
evicted = []
builds = 0

def skeleton():
    return torch.nn.Linear(WIDTH, WIDTH, bias=False)

def build():
    global builds
    builds += 1
    module = skeleton()
    torch.nn.init.constant_(module.weight, float(model + 1))
    return module

torch.set_num_threads(1)
noted = lambda *told: evicted.append(told)
with gpu_worker.attach(sys.argv[1], on_evict=noted) as worker:
    for line in sys.stdin:
        model = int(line)
        with worker.use(f"model-{{model}}", skeleton=skeleton, build=build) as module:
            with torch.inference_mode():
                said = module(torch.ones(1, WIDTH))
        assert (said == WIDTH * (model + 1)).all()
        del module
        worker.flush()
        causes = {{cause for _, _, cause in evicted}}
        print(builds, len(evicted), *causes, flush=True)
"""


class Switching:
    """A worker process that goes from one model to the next and infers with each."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.switches = 0

    def switch_until(self, switches: int) -> list[str]:
        """Return how many models it has built, how many were evicted, and why."""
        assert self.process.stdin is not None and self.process.stdout is not None
        while self.switches < switches:
            print(self.switches % MODELS, file=self.process.stdin, flush=True)
            said = self.process.stdout.readline()
            assert said, "the worker has ended"
            self.switches += 1
        return said.split()


@contextmanager
def switching(path: str) -> Iterator[Switching]:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        yield Switching(process)
    finally:
        process.communicate(timeout=WAIT_S)
    assert process.returncode == 0


def resident(coordinator: Coordinator, worker: Switching) -> dict[str, int]:
    pids = {"coordinator": coordinator.pid, "worker": worker.process.pid}
    return {name: kernel.resident_bytes(pid) for name, pid in pids.items()}


def counted(coordinator: Coordinator, worker: Switching) -> dict[str, int]:
    """What must not change at all."""
    return {
        "shared memory": coordinator.segment_blocks(),
        "fds of the coordinator": kernel.fd_count(coordinator.pid),
        "fds of the worker": kernel.fd_count(worker.process.pid),
        "segments that the worker maps": sum(
            kernel.is_segment(entry.path) for entry in kernel.maps(worker.process.pid)
        ),
        "threads of the worker": len(os.listdir(f"/proc/{worker.process.pid}/task")),
    }


@pytest.mark.process
def test_five_hundred_switches_leave_shared_memory_own_memory_and_fds_as_they_were(tmp_path):
    """Room for two of six models in turn, so that each switch evicts one and makes one."""
    path = str(tmp_path / "s")
    budget = f"{2 * SEGMENT_BYTES}B"
    with running(path, "--ram-budget", budget) as coordinator, switching(path) as worker:
        worker.switch_until(SETTLED)
        counted_before, resident_before = (
            counted(coordinator, worker),
            resident(coordinator, worker),
        )
        assert 0 < counted_before["shared memory"] <= 2 * SEGMENT_BYTES
        builds, evicted, *causes = worker.switch_until(SWITCHES)
        assert (int(builds), int(evicted), causes) == (SWITCHES, SWITCHES - 2, ["room"])
        assert counted(coordinator, worker) == counted_before
        for name, size_bytes in resident(coordinator, worker).items():
            grown_bytes = size_bytes - resident_before[name]
            assert grown_bytes <= RESIDENT_TOLERANCE_BYTES, f"{name}: {grown_bytes} bytes more"
        print(counted_before, resident_before, resident(coordinator, worker))
        assert coordinator.audit().differences == ()
