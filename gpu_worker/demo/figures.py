"""What one run of the demo measured: the fields of `--json`. Pure."""

from __future__ import annotations

import msgspec

from gpu_worker.demo.claims import Claim
from gpu_worker.demo.lines import Way

Pair = tuple[float, float]
"""Seconds, of the first worker to ask and of the second."""

PairBytes = tuple[int, int]
"""The same for sizes."""


class Row(msgspec.Struct, frozen=True):
    """One line of the table: two workers that use the same weights in the same way."""

    weights: str
    """What they are, a comma, and what is done to them at load."""
    way: Way
    ready_s: Pair
    """From the request to a module that can be used."""
    first_answer_s: Pair
    """From the request to the first answer of that module."""
    private_bytes: PairBytes
    """Added to the process, in pages that no other process maps."""
    shared_bytes: PairBytes
    """Added to the process: its share of pages that others map too."""

    @property
    def total_bytes(self) -> int:
        return sum(self.private_bytes) + sum(self.shared_bytes)


class Kill(msgspec.Struct, frozen=True):
    """How a worker's end was taken."""

    pid: int
    noticed_s: float
    """From SIGKILL until the kernel tells that the process has ended."""
    lease_gone_s: float
    """From there until its lease is seen to be gone."""


class Replacement(msgspec.Struct, frozen=True):
    """How the worker came up that took its place."""

    pid: int
    imports_s: float
    ready_s: float
    first_answer_s: float


class Found(msgspec.Struct, frozen=True):
    """A sentence, and how near it is to the query."""

    score: float
    sentence: str


class Machine(msgspec.Struct, frozen=True):
    """Where this was measured."""

    kernel: str
    cpus: int
    python: str
    torch: str
    transformers: str


class Figures(msgspec.Struct):
    """All of it, filled in as the demo goes on."""

    machine: Machine
    checkpoint_bytes: int = 0
    coordinator_ready_s: float | None = None
    query: str = ""
    found: tuple[Found, ...] = ()
    kill: Kill | None = None
    replacement: Replacement | None = None
    table: list[Row] = msgspec.field(default_factory=list)
    notes: tuple[str, ...] = ()


class Outcome(msgspec.Struct, frozen=True):
    """How a run ended."""

    ok: bool
    error: str | None
    duration_s: float
    claims: tuple[Claim, ...]
    figures: Figures
