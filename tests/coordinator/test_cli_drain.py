"""`weight-cache drain`: the end of a coordinator, once nothing is held."""

from __future__ import annotations

import os
import signal

import pytest

from shm_store.keys import RequestId
from shm_store.wire import Drain, Fail, Grant
from tests.coordinator.command_line import only_line, run, start
from tests.processes import WAIT_S, Coordinator, Peer

pytestmark = pytest.mark.process


def test_drain_returns_when_the_coordinator_has_gone(path, weights):
    first = Coordinator(path)
    run("load", "k", weights, "--socket", path)
    done = run("drain", "--socket", path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the coordinator has ended\n", "")
    assert first.process.poll() == 0
    assert not os.path.exists(path)
    first.stop()


def test_a_drain_at_its_deadline_names_the_holders_and_goes_on(coordinator, weights):
    coordinator.unquiet = "it ends with the last lease"
    holder = Peer(coordinator.socket)
    assert isinstance(holder.load("k", weights), Grant)
    late = run("drain", "--timeout", "0.2", "--socket", coordinator.socket)
    assert (late.returncode, late.stdout) == (4, "")
    first, *table = late.stderr.splitlines()
    assert first.startswith("weight-cache: 1 generation is still held (")
    assert f"pid {os.getpid()} (" in table[-1]

    refused = run("load", "k2", weights, "--socket", coordinator.socket)
    assert refused.returncode == 6 and "draining" in only_line(refused.stderr)
    assert holder.status().draining


def test_an_interrupted_drain_ends_with_130(coordinator, weights):
    coordinator.unquiet = "it ends with the last lease"
    holder = Peer(coordinator.socket)
    assert isinstance(holder.load("k", weights), Grant)
    process = start("drain", "--socket", coordinator.socket)
    while not holder.status().draining:
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out, err) == (130, "", "")


def test_a_drain_that_another_one_finished_is_done(path, weights):
    first = Coordinator(path)
    holder = Peer(path)
    holder.load("k", weights)
    process = start("drain", "--socket", path)
    while not holder.status().draining:
        assert process.poll() is None
    holder.send(Drain(RequestId(holder.next_rid()), 0.0))
    assert isinstance(holder.expect(Fail), Fail)
    first.process.send_signal(signal.SIGTERM)  # it says BYE, and never answers the drain
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out, err) == (0, "the coordinator has ended\n", "")
    first.stop()
