"""What two workers do with the same weights in the same way, and what the kernel says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_worker.demo import kernel
from gpu_worker.demo.figures import Row
from gpu_worker.demo.lines import (
    Answered,
    Ask,
    Close,
    Finished,
    Open,
    Opened,
    Settle,
    Touch,
    Way,
)
from gpu_worker.demo.operator import Operator
from gpu_worker.demo.process import Coordinator, Worker
from shm_store.report import GenerationReport


@dataclass(frozen=True, slots=True)
class Cast:
    """Who takes part: the coordinator, a connection to it, and the two workers of the moment."""

    coordinator: Coordinator
    operator: Operator
    workers: tuple[Worker, Worker]

    @property
    def pids(self) -> list[int]:
        """The pids of the workers, in order."""
        return sorted(worker.pid for worker in self.workers)


@dataclass(frozen=True, slots=True)
class Part:
    """What one worker did, and the memory it took."""

    opened: Opened
    answered: Answered
    memory: kernel.Memory


@dataclass(frozen=True, slots=True)
class Performance:
    """Both workers, and what the ledger then had of the key. Their models were left open."""

    key: str
    way: Way
    parts: tuple[Part, Part]
    held: Sequence[GenerationReport]

    @property
    def answered(self) -> Answered:
        """The answer of the worker that was first to ask."""
        return self.parts[0].answered

    @property
    def generation(self) -> str:
        """The generation that the first worker was given."""
        return self.parts[0].opened.generation

    @property
    def size_bytes(self) -> int:
        """Of that generation, by the ledger; 0 if it knows none."""
        return sum(each.size_bytes for each in self.held if each.generation == self.generation)

    def row(self, weights: str) -> Row:
        """Return the line of the table."""
        first, second = self.parts
        return Row(
            weights,
            self.way,
            (first.opened.took_s, second.opened.took_s),
            (_first_answer_s(first), _first_answer_s(second)),
            (first.memory.private_bytes, second.memory.private_bytes),
            (first.memory.shared_bytes, second.memory.shared_bytes),
        )


def perform(cast: Cast, key: str, way: Way) -> Performance:
    """Have both workers open `key`, one after the other, answer, and read all of the weights."""
    before = [_memory(worker) for worker in cast.workers]
    done = [
        (worker.ask(Open(key, way), Opened), worker.ask(Ask(), Answered)) for worker in cast.workers
    ]
    for worker in cast.workers:
        worker.ask(Touch(), Finished)
    # Only now: a page counts as shared once the other worker maps it too.
    added = [
        _memory(worker).since(memory) for worker, memory in zip(cast.workers, before, strict=True)
    ]
    first, second = (Part(*did, memory) for did, memory in zip(done, added, strict=True))
    return Performance(key, way, (first, second), cast.operator.generations(key))


def close(cast: Cast) -> None:
    """Have both workers let go of their open model."""
    for worker in cast.workers:
        worker.ask(Close(), Finished)


def _memory(worker: Worker) -> kernel.Memory:
    worker.ask(Settle(), Finished)
    return kernel.data_memory(worker.pid)


def _first_answer_s(part: Part) -> float:
    return part.opened.took_s + part.answered.took_s
