"""A minute of chaos, and that it sees what it is there to see."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys

import pytest

from tests.chaos import failpoints
from tests.chaos.checks import Trace
from tests.chaos.failpoints import Failpoint
from tests.chaos.hook import SABOTAGE_VARIABLE
from tests.chaos.watch import Violation
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
    """Four processes on one device. Another with each order of the tests, which draws its seed."""
    code, said = chaos("--minutes", "1", "--workers", "4", "--seed", str(random.getrandbits(32)))
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


def test_weights_that_are_ready_are_not_read_again(tmp_path):
    """What was removed may be; and what another fingerprint has."""
    (tmp_path / "trace").write_text(
        "read 1-1 file:a key\nstored 1-1\nread 1-2 file:b key\nstored 1-2\nremoved 1-1\n"
        "read 1-3 file:a key\n"
    )
    trace = Trace(str(tmp_path))
    trace.follow()
    assert (trace.loads, trace.stored, trace.starts) == (3, {"1-2"}, {"1"})
    with (tmp_path / "trace").open("a") as more:
        more.write("read 2-1 file:b key\n")
    with pytest.raises(Violation, match="was read again as 2-1: 1-2 was READY"):
        trace.follow()


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    ("sabotaged", "only", "seen"),
    [
        ("coordinator.store:Store.keep_segment", "at any time", "supervisor .* lacks"),
        ("coordinator.store:Store.forget_segment", "loader: at any time", "fd_held"),
        ("coordinator.store:Store.forget_session", "worker: at any time", "pidfd"),
        ("coordinator.store:Store.recover", "coordinator: at any time", "unknown_segment|read ag"),
        ("gpu_worker.mapping:unmap_range", "loader: at any time", "unleased_mapping"),
        ("gpu_worker.publish:Span.write", "loader: at any time", "build-.* differs"),
        ("gpu_worker.leases:Leases.share", "loader: at any time", "are to have one copy"),
    ],
    ids=[
        "READY is not stored",
        "what is freed stays in the store",
        "who has ended stays in the store",
        "nothing is recovered",
        "nothing is unmapped",
        "nothing is filled",
        "nothing is shared on the device",
    ],
)
def test_what_is_wrong_is_seen(sabotaged, only, seen):
    """Each of these is a fault in the product, made for the length of a run."""
    code, said = chaos("--minutes", "0.5", "--seed", "1", "--only", only, sabotaged=sabotaged)
    if folder := re.search("the folder of the run is (.*)", said):
        shutil.rmtree(folder[1])
    assert code == 1 and re.search(f"Violation: .*{seen}", said, re.DOTALL), said
