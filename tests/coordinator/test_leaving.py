"""`serve --leave-after`: it ends when nobody has been there for so long, and not before."""

from __future__ import annotations

import os
import subprocess
import threading
import time

import pytest

from shm_store import channel
from tests.coordinator.command_line import only_line
from tests.processes import WAIT_S, Coordinator, Peer

pytestmark = pytest.mark.process

LEAVE_AFTER_S = 1.0
LONGER_S = 1.6


@pytest.fixture
def leaving(path):
    started = Coordinator(path, "--leave-after", f"{LEAVE_AFTER_S:g}", "--ram-budget", "1MiB")
    yield started
    Peer.close_all()
    started.stop()


def stays(coordinator: Coordinator) -> bool:
    try:
        coordinator.process.wait(LONGER_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def ends_well(coordinator: Coordinator) -> None:
    """It ends by itself, says so, and leaves nothing."""
    _, stderr = coordinator.process.communicate(timeout=WAIT_S)
    assert coordinator.process.returncode == 0
    assert only_line(stderr) == "weight-cache: no session for 1 s, so it ends"
    assert not os.path.exists(coordinator.socket)
    assert not os.path.exists(f"{coordinator.socket}.lock")


def test_to_whom_nobody_comes_it_ends(leaving):
    ends_well(leaving)


def test_it_stays_for_a_session_and_for_its_time_after_it(leaving):
    """What was retained goes with it."""
    peer = Peer(leaving.socket)
    peer.publish("k")
    assert stays(leaving)
    peer.give_back()
    peer.flush()
    assert peer.generation("k").leases == ()
    ended_s = time.monotonic()
    peer.close()
    ends_well(leaving)
    assert time.monotonic() - ended_s >= LEAVE_AFTER_S


def test_who_comes_in_time_begins_it_anew(leaving):
    """Any session does, a command's as well."""
    until_s = time.monotonic() + LONGER_S
    while time.monotonic() < until_s:
        Peer(leaving.socket, "status", role="operator").status()
        Peer.close_all()
        threading.Event().wait(LEAVE_AFTER_S / 5)
    assert leaving.process.poll() is None
    ends_well(leaving)


def test_a_process_that_has_lost_its_connection_and_holds_weights_is_there(leaving):
    """It may still map them, and comes back."""
    peer = Peer(leaving.socket)
    peer.publish("k")
    peer.close()
    assert stays(leaving)
    operator = Peer(leaving.socket, role="operator")
    assert operator.generation("k").leases != ()


def test_a_connection_that_has_said_nothing_yet_is_there(leaving):
    """It is about to, if its process is slow."""
    connected = Peer.connect(leaving.socket)
    assert stays(leaving)
    connected.close()
    ends_well(leaving)


def test_those_who_may_come_back_are_waited_for(path):
    """Somebody may have been attached to the coordinator that left its socket behind."""
    channel.listen(path).close()
    started = Coordinator(path, "--leave-after", "0.1")
    ready_s = time.monotonic()
    _, stderr = started.process.communicate(timeout=WAIT_S)
    assert started.process.returncode == 0, stderr
    assert time.monotonic() - ready_s > 1.5


def test_without_the_option_it_stays(path):
    started = Coordinator(path)
    assert stays(started)
    assert started.stop()[0] == 0
