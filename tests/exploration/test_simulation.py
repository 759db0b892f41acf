"""A slice of the seeds that `scripts/simulate` runs at length, and proof that they see faults."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from unittest.mock import patch

import pytest

from coordinator.ledger import admission
from tests.exploration import simulate
from tests.exploration.worker import Worker

pytestmark = pytest.mark.sim

SEEDS = 600


def test_no_seed_goes_wrong() -> None:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), spawn) as processes:
        outcomes = processes.map(simulate.simulate, range(SEEDS), chunksize=25)
    failed = {seed: problem for seed, (_, _, problem) in enumerate(outcomes) if problem}
    assert not failed


_seat = admission.seat


def _starts_undoomed_beside_a_newer_fill(turn, request, *, doomed, deaths):
    """What `seat` once did for a hit that had waited and starts over."""
    running = turn.ledger.filling(request.home)
    made = _seat(turn, request, doomed=doomed, deaths=deaths)
    if running is not None and made is not running:
        made.doomed = doomed
    return made


def _gives_back_what_an_old_map_needs(self):
    """What a worker once did with a grant that it could not map."""
    grant = self.to.pop(0)
    request = self._expected(grant.rid)
    self._give_back(grant.gen, grant.rid)
    self._answered(request, None)


@pytest.mark.parametrize(
    ("where", "name", "instead", "seeds"),
    [
        (admission, "seat", _starts_undoomed_beside_a_newer_fill, range(800)),
        (Worker, "do_unmapped", _gives_back_what_an_old_map_needs, range(3700, 4700)),
    ],
    ids=["a second fill beside a newer one", "a lease that ends before its map"],
)
def test_faults_that_were_found_are_found_again(where, name, instead, seeds) -> None:
    with patch.object(where, name, instead):
        assert any(simulate.simulate(seed)[2] for seed in seeds)
