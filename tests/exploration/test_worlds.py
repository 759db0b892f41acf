"""Every state of every small world, and every rule that is switched off is missed in one of them.

Both run in as many processes as there are cores, all at once, before the first test asks.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import pytest

from tests.exploration.explore import Explored
from tests.exploration.mutants import MUTANTS, of_mutant, of_world
from tests.exploration.worlds import SMALL

pytestmark = [pytest.mark.sim, pytest.mark.timeout(400)]

WAIT_S = 300.0


Explorations = dict[str | int, Future[Explored]]


@pytest.fixture(scope="module")
def explorations() -> Iterator[Explorations]:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), spawn) as processes:
        asked: Explorations = {w.name: processes.submit(of_world, w.name) for w in SMALL}
        asked |= {n: processes.submit(of_mutant, n) for n in range(len(MUTANTS))}
        yield asked


@pytest.mark.parametrize("name", [world.name for world in SMALL])
def test_nothing_goes_wrong_in(explorations: Explorations, name: str) -> None:
    explored = explorations[name].result(WAIT_S)
    assert not explored.problem, (explored.problem, explored.path)
    assert explored.whole


@pytest.mark.parametrize(
    "number", range(len(MUTANTS)), ids=[f"rule {m.rule}: {m.how}" for m in MUTANTS]
)
def test_it_is_noticed_when(explorations: Explorations, number: int) -> None:
    assert explorations[number].result(WAIT_S).problem
