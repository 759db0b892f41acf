"""A minute of chaos, and that it sees what it is there to see."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest

from tests.chaos import failpoints
from tests.chaos.failpoints import Failpoint
from tests.chaos.hook import SABOTAGE_VARIABLE
from tests.processes import ROOT

pytestmark = pytest.mark.process

LIMIT_S = 240


def chaos(*arguments: str, sabotaged: str = "") -> tuple[int, str]:
    """Run it; return its exit code and what it said."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.chaos", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), SABOTAGE_VARIABLE: sabotaged},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout


@pytest.mark.timeout(LIMIT_S)
def test_a_minute_of_chaos_loses_nothing_and_leaks_nothing():
    """Another one with each order of the tests: its seed says which."""
    code, said = chaos("--minutes", "1", "--seed", str(random.getrandbits(32)))
    print(said)
    assert code == 0


@pytest.mark.parametrize(
    "target",
    ["coordinator.store:no_such_function", "coordinator.executor:Executor._free", "os:PathLike"],
    ids=["nothing", "what has no end of its own", "a class"],
)
def test_a_failpoint_that_would_test_nothing_is_refused(target, monkeypatch):
    point = Failpoint("coordinator", "nowhere", target, "after")
    monkeypatch.setattr(failpoints, "FAILPOINTS", (*failpoints.FAILPOINTS, point))
    with pytest.raises(LookupError):
        failpoints.check()


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    ("sabotaged", "only", "seen"),
    [
        ("coordinator.store:Store.keep_segment", "coordinator: at any time", "store"),
        ("coordinator.store:Store.forget_segment", "loader: at any time", "supervisor"),
        ("coordinator.store:Store.forget_session", "worker: at any time", "pidfd"),
        ("gpu_worker.mapping:_unmap", "loader: at any time", "unleased_mapping"),
    ],
    ids=["READY is not stored", "what is freed is", "who has ended is", "nothing is unmapped"],
)
def test_what_is_wrong_is_seen(sabotaged, only, seen):
    """Each of these is a fault in the product, made for the length of a run."""
    code, said = chaos("--minutes", "0.5", "--seed", "1", "--only", only, sabotaged=sabotaged)
    assert code == 1 and "VIOLATION" in said and seen in said, said
