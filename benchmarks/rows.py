"""What a benchmark says: rows of figures, the claims they decide, and how they are shown.

Ratios are ours divided by the other: below 1 we are faster, or smaller.
"""

from __future__ import annotations

import json
import math
import os
import platform
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

Unit = Literal["s", "bytes", "count"]

Sample = TypeVar("Sample")

MICROSECONDS_BELOW_S = 1e-4

WARM_BLOCK_BYTES = 64 * 1024 * 1024


class Unavailable(Exception):
    """A peer cannot be measured here. Its text says why, and goes into the row."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that must hold, and whether it did in this run."""

    what: str
    value: float
    limit: float
    relation: Literal["at most", "at least"] = "at most"

    @property
    def holds(self) -> bool:
        if self.relation == "at most":
            return self.value <= self.limit
        return self.value >= self.limit

    def plain(self) -> dict[str, object]:
        """Return the claim as JSON knows it."""
        return {
            "what": self.what,
            "value": self.value,
            "relation": self.relation,
            "limit": self.limit,
            "holds": self.holds,
        }


@dataclass(frozen=True, slots=True)
class Row:
    """One case: our figure, the least it could be, and what others need.

    `beside` holds further figures of the same run, in the units their names end in. `better` says
    which of the peers is the best.
    """

    case: str
    unit: Unit
    ours: float
    floor: float | None
    peers: Mapping[str, float] = field(default_factory=dict)
    claims: Sequence[Claim] = ()
    beside: Mapping[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()
    better: Literal["less", "more"] = "less"

    @property
    def ratio_to_floor(self) -> float | None:
        return self.ours / self.floor if self.floor else None

    @property
    def ratio_to_best_peer(self) -> float | None:
        if not self.peers:
            return None
        best = (min if self.better == "less" else max)(self.peers.values())
        return self.ours / best if best else None

    def with_claims(self, *claims: Claim) -> Row:
        """Return the row with further claims."""
        return replace(self, claims=[*self.claims, *claims])

    def plain(self) -> dict[str, object]:
        """Return the row as JSON knows it."""
        return {
            "case": self.case,
            "unit": self.unit,
            "ours": self.ours,
            "floor": self.floor,
            "peers": dict(self.peers),
            "ratio_to_floor": self.ratio_to_floor,
            "ratio_to_best_peer": self.ratio_to_best_peer,
            "claims": [claim.plain() for claim in self.claims],
            "beside": dict(self.beside),
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """All rows of one benchmark, and the circumstances they were measured in."""

    benchmark: str
    conditions: Mapping[str, object]
    rows: Sequence[Row]

    def to_json(self) -> str:
        return json.dumps(
            {
                "benchmark": self.benchmark,
                "conditions": dict(self.conditions),
                "rows": [row.plain() for row in self.rows],
            },
            indent=2,
        )


# --- measuring ----------------------------------------------------------------------------------


def interleave(
    rounds: int, samples: Mapping[str, Callable[[], Sample]], *, warm_up: bool = True
) -> dict[str, list[Sample]]:
    """Take one sample of each per round, each round in an order of its own.

    So whatever else the machine does meets all of them, and none always runs in the wake of the
    same other one. With `warm_up` one more round goes before, and does not count.
    """
    names = list(samples)
    taken: dict[str, list[Sample]] = {name: [] for name in names}
    for number in range(-1 if warm_up else 0, rounds):
        random.Random(number).shuffle(names)
        for name in names:
            sample = samples[name]()
            if number >= 0:
                taken[name].append(sample)
    return {name: taken[name] for name in samples}


def medians(taken: Mapping[str, Iterable[float]]) -> dict[str, float]:
    """Return the median of each."""
    return {name: statistics.median(samples) for name, samples in taken.items()}


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the smallest value that at least `percent` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def warm_memory(size_bytes: int) -> None:
    """Write and free so much memory.

    Memory that a virtual machine has never touched is several times slower at first: whoever comes
    first in a run would pay for all the others.
    """
    blocks = []
    for _ in range(0, size_bytes, WARM_BLOCK_BYTES):
        blocks.append(bytearray(b"\1") * WARM_BLOCK_BYTES)
    blocks.clear()


def conditions(**more: object) -> dict[str, object]:
    """Return what a reader has to know about this machine, and `more`."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        **more,
    }


# --- showing ------------------------------------------------------------------------------------


def show(outcome: Outcome) -> None:
    """Print the rows as tables for people."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout)
    console.print(f"[bold]{outcome.benchmark}[/bold]", _in_words(outcome.conditions))
    for row in outcome.rows:
        table = Table("", "", "ours / this", title=row.case, title_justify="left", min_width=72)
        table.columns[1].justify = table.columns[2].justify = "right"
        table.add_row("[bold]ours[/bold]", shown(row.ours, row.unit), "")
        if row.floor is not None:
            table.add_row("floor", shown(row.floor, row.unit), _ratio(row.ratio_to_floor))
        for name, value in sorted(row.peers.items(), key=lambda peer: peer[1]):
            ratio = row.ours / value if value else None
            table.add_row(name, shown(value, row.unit), _ratio(ratio))
        console.print(table)
        for name, value in row.beside.items():
            console.print(f"  {name}: {shown(value, _unit_in(name))}", highlight=False)
        for note in row.notes:
            console.print(f"  {note}", highlight=False, markup=False)
        for claim in row.claims:
            verdict = "[green]holds[/green]" if claim.holds else "[red]MISSED[/red]"
            said = f"{claim.what}: {claim.value:.4g} ({claim.relation} {claim.limit:g})"
            console.print(f"  {verdict}  {said}", highlight=False)
        console.print()


def shown(value: float, unit: Unit) -> str:
    """Return a figure in the unit people read it in."""
    if unit == "s" and 0 < value < MICROSECONDS_BELOW_S:
        return f"{value * 1e6:.3g} µs"
    if unit == "s":
        return f"{value * 1000:.3f} ms"
    if unit == "bytes":
        return f"{value / 1e6:.2f} MB"
    return f"{value:.6g}"


def _unit_in(name: str) -> Unit:
    if name.endswith("_s"):
        return "s"
    return "bytes" if name.endswith("_bytes") else "count"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _in_words(facts: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())
