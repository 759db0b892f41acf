"""A refusal in Python says who is in the way, and whether that is the asking process itself."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest
import torch

from gpu_worker import BudgetExceeded, InvalidateIncomplete
from gpu_worker.refusal import name_holders
from tests.processes import Peer, running

pytestmark = pytest.mark.process

WIDTH = 512
"""One such module fits into the pool, two do not."""


def wide() -> torch.nn.Linear:
    return torch.nn.Linear(WIDTH, WIDTH, bias=False)


@pytest.fixture
def served(tmp_path):
    """One for each test: what one leaves warm or leased would be in the way of another."""
    with running(str(tmp_path / "s"), "--ram-budget", "2MiB") as started:
        yield started


def test_no_room_names_this_process_that_holds_it(worker):
    """And what to do: the caller's own module is what has to go."""
    held = worker.load("held", skeleton=wide, build=wide)
    asks = [
        lambda: worker.state_dict("more", build=wide, timeout=0.2),
        lambda: worker.load("more", skeleton=wide, build=wide, timeout=0.2),
        lambda: worker.load("mine", skeleton=wide, build=wide, private=True, timeout=0.2),
    ]
    for ask in asks:
        with pytest.raises(BudgetExceeded) as caught:
            ask()
        (holder,) = caught.value.holders
        assert (holder.key, holder.leases[0].pid) == ("held", os.getpid())
        assert "; held by 'held' (1.0 MiB, this process) (let go of modules" in str(caught.value)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    held.close()


HOLD = """
import gpu_worker, sys, torch
worker = gpu_worker.attach(sys.argv[1])
state = worker.state_dict("theirs", build=lambda: torch.nn.Linear(512, 512, bias=False))
print("READY", flush=True)
sys.stdin.read()
"""


def test_no_room_names_the_pid_of_another_process(worker, served):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, served.socket],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin and process.stdout and process.stdout.readline() == "READY\n"
        with pytest.raises(BudgetExceeded, match=rf"'theirs' \(1.0 MiB, pid {process.pid}\)"):
            worker.load("more", skeleton=wide, build=wide, timeout=0.2)
        process.stdin.close()
        assert process.wait(20) == 0


def test_an_invalidation_names_who_has_not_answered(worker, served):
    peer = Peer(served.socket, "silent")
    peer.publish("k")
    with pytest.raises(InvalidateIncomplete, match=r"; held by 'k' \(8.0 KiB, this process\)"):
        worker.invalidate("k", timeout=0.1)


def test_what_fits_nowhere_says_so_whoever_holds_what(worker):
    with pytest.raises(BudgetExceeded) as caught:
        worker.state_dict("large", build=lambda: {"w": torch.zeros(1 << 20)})
    assert "; that is more than all of pool 'ram', 2.0 MiB" in str(caught.value)
    assert "`weight-cache limit ram SIZE`" in caught.value.remedy


def test_a_refusal_without_holders_is_told_as_it_came():
    error = BudgetExceeded("no room")
    name_holders(error)
    assert error.message == "no room"
