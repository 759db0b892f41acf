"""What a check is, and how one that goes wrong is told from one that cannot be made. Pure."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar

Verdict = Literal["ok", "MISSED", "skipped"]


@dataclass(frozen=True, slots=True)
class Found:
    """What a check has found that holds: for people, and the same in figures."""

    said: str
    figures: Mapping[str, float] = field(default_factory=dict)


class Missed(Exception):
    """What was promised does not hold. Its text says how, `figures` by how much."""

    def __init__(self, said: str, figures: Mapping[str, float] | None = None) -> None:
        super().__init__(said)
        self.figures = figures or {}


class Skipped(Exception):
    """It cannot be checked here, or makes no sense here. Its text says why."""


@dataclass(frozen=True, slots=True)
class Check:
    """One promise, and what came of it."""

    name: str
    verdict: Verdict
    said: str
    figures: Mapping[str, float] = field(default_factory=dict)


Place = TypeVar("Place")

Named = tuple[str, Callable[[Place], Found]]
"""A promise in words, and what checks it."""


def run(
    place: Place,
    checks: Iterable[Named[Place]],
    tidy: Callable[[], object],
) -> Iterator[Check]:
    """Make one check after the other. An error of any kind is a promise missed, and no end.

    Args:
        tidy: called after each, so that it leaves nothing to the next.
    """
    for name, check in checks:
        try:
            found = _made(name, partial(check, place))
            tidied = _made(name, partial(_quiet, tidy))
        except KeyboardInterrupt:
            yield Check(name, "skipped", "interrupted")
            return
        yield tidied if found.verdict == "ok" and tidied.verdict != "ok" else found


def _quiet(tidy: Callable[[], object]) -> Found:
    tidy()
    return Found("")


def _made(name: str, check: Callable[[], Found]) -> Check:
    try:
        found = check()
    except Skipped as skipped:
        return Check(name, "skipped", str(skipped))
    except Missed as missed:
        _forget(missed)
        return Check(name, "MISSED", str(missed), missed.figures)
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        _forget(error)
        first, *_ = str(error).splitlines() or [""]
        return Check(name, "MISSED", f"{type(error).__name__}: {first}")
    return Check(name, "ok", found.said, found.figures)


def _forget(error: BaseException) -> None:
    """Drop what the frames of an error have, tensors among it, or the next check finds them."""
    chained: BaseException | None = error
    while chained is not None:
        traceback.clear_frames(chained.__traceback__)
        chained = chained.__cause__ or chained.__context__
