"""Resident workers as processes, and what attaches beside them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from safetensors.torch import save_file

from tests.processes import ROOT, WAIT_S

SIDE = 512
SIZE = "1.0 MiB"
"""What a `checkpoint` takes."""


def checkpoint(path, value: float = 1.0) -> str:
    """Write weights for a Linear of SIDE x SIDE beside `path`, then rename: all are `value`."""
    tensors = {"weight": torch.full((SIDE, SIDE), value), "bias": torch.full((SIDE,), value)}
    save_file(tensors, f"{path}.new")
    os.rename(f"{path}.new", path)
    return str(path)


def linear() -> torch.nn.Module:
    return torch.nn.Linear(SIDE, SIDE)


def result(module: torch.nn.Module) -> float:
    """Return what it computes of ones. All of it has to be the same."""
    computed = module(torch.ones(1, SIDE))
    assert (computed == computed[0, 0]).all()
    return float(computed[0, 0])


class Resident:
    """`python -m gpu_worker`, and its log line by line."""

    def __init__(self, socket: str, device: str, keep: dict[str, str], **environment: str) -> None:
        options = [f"--keep={key}={source}" for key, source in keep.items()]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpu_worker", "--socket", socket, "--device", device, *options],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **environment},
        )
        self.heard: list[str] = []

    def said(self, pattern: str) -> str:
        """Read its log up to a line in which `pattern` is found, and return that."""
        assert self.process.stderr is not None
        while line := self.process.stderr.readline():
            self.heard.append(line.rstrip("\n"))
            if re.search(pattern, line):
                return self.heard[-1]
        raise AssertionError(self.heard)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, list[str]]:
        """Send a signal and wait; return the exit code, and all lines."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, list[str]]:
        """Wait for its end; as `end`."""
        assert self.process.stderr is not None
        self.heard += self.process.stderr.read().splitlines()  # behind what `said` has buffered
        return self.process.wait(WAIT_S), self.heard


@contextmanager
def resident(
    socket: str, device: str, keep: dict[str, str], **environment: str
) -> Iterator[Resident]:
    """A resident worker that is killed at the end, unless it has ended."""
    started = Resident(socket, device, keep, **environment)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.communicate()


class Beside:
    """An inference process beside it: it locks `key`, and computes whenever it is asked."""

    PROGRAM = """
import sys, gpu_worker
from tests.gpu_worker.resident import linear, result
socket, device, key, source = sys.argv[1:]
worker = gpu_worker.attach(socket, device=device, share_vram=True)
with worker.use(key, skeleton=linear, source=source) as model:
    for line in sys.stdin:
        moved = sum(one.moved_bytes for one in worker._table.counted())
        print(result(model), moved, flush=True)
"""

    def __init__(self, socket: str, device: str, key: str, source: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM, socket, device, key, source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def computed(self) -> tuple[float, int]:
        """Return what it computes, and the bytes that it has moved so far."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        value, moved = self.process.stdout.readline().split()
        return float(value), int(moved)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
