"""The two ways a worker of the demo gets its weights: with weight-cache, and without."""

from __future__ import annotations

import contextlib
import gc
from typing import Protocol

import torch

import gpu_worker
from gpu_worker.demo.cases import Case

FLUSH_LIMIT_S = 20.0

Use = contextlib.AbstractContextManager[torch.nn.Module]


class Way(Protocol):
    """How a worker gets at weights. It has one model at a time."""

    def open(self, case: Case) -> str:
        """Make the case's module ready; return the generation of its weights, if they have one."""

    def use(self) -> Use:
        """Give the open module, for the length of a `with`."""

    def close(self) -> None:
        """Let go of the open module; return when that has taken effect."""


class Shared:
    """With weight-cache: attach, load, and lock for the length of each use."""

    def __init__(self, socket: str, name: str) -> None:
        self._socket = socket
        self._name = name
        self._worker: gpu_worker.Worker | None = None
        self._handle: gpu_worker.ModelHandle | None = None

    def open(self, case: Case) -> str:
        if self._worker is None:
            self._worker = gpu_worker.attach(self._socket, name=self._name)
        self._handle = case.share(self._worker)
        return self._handle.generation

    def use(self) -> Use:
        assert self._handle is not None
        return self._handle

    def close(self) -> None:
        assert self._worker is not None
        assert self._handle is not None
        self._handle.close()
        self._worker.evict(self._handle.key)
        self._handle = None
        gc.collect()
        self._worker.flush(FLUSH_LIMIT_S)

    def leave(self) -> None:
        """Shut down what is attached, if anything is."""
        if self._worker is not None:
            self._worker.shutdown(FLUSH_LIMIT_S)
            self._worker = None


class Plain:
    """Without it: each process reads, converts and keeps weights of its own."""

    def __init__(self) -> None:
        self._module: torch.nn.Module | None = None

    def open(self, case: Case) -> str:
        self._module = case.read()
        return ""

    def use(self) -> Use:
        assert self._module is not None
        return contextlib.nullcontext(self._module)

    def close(self) -> None:
        self._module = None
        gc.collect()
