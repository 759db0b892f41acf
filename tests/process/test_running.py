"""What `running` promises of every test: its coordinator's books end as the kernel's."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch

import gpu_worker
from gpu_worker.client import Client
from gpu_worker.mapping import MappingTable
from shm_store.wire import Acquire, Ticket
from tests.mapper import PAGE_BYTES, Mapper
from tests.processes import WAIT_S, Coordinator, Peer, running

pytestmark = pytest.mark.process


@pytest.fixture
def path(tmp_path) -> str:
    return str(tmp_path / "own")


@pytest.fixture
def keeper(path) -> Iterator[list[Mapper]]:
    """Where a process that keeps an fd is put, to be ended after its coordinator."""
    started: list[Mapper] = []
    yield started
    for one in started:
        one.end()


def keep_an_fd(path: str, keeper: list[Mapper]) -> None:
    keeper.append(Mapper(path))
    keeper[0].do("publish", "k", PAGE_BYTES)


def test_a_difference_fails_the_test_that_leaves_it(path, keeper):
    with pytest.raises(AssertionError, match="fd_held"), running(path):
        keep_an_fd(path, keeper)


def test_a_test_that_fails_is_told_of_its_own_failure_only(path, keeper):
    def test() -> None:
        with running(path):
            keep_an_fd(path, keeper)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        test()


def test_a_reason_spares_the_audit(path, keeper):
    with running(path) as coordinator:
        keep_an_fd(path, keeper)
        coordinator.unquiet = "it is tried here"


def test_after_each_test_those_that_run_are_audited(path, keeper):
    """Also one that several tests share, and which is therefore not over."""
    with running(path) as coordinator:
        keep_an_fd(path, keeper)
        assert coordinator in Coordinator.audited
        with pytest.raises(AssertionError, match="fd_held"):
            coordinator.audit_quiet()
        coordinator.unquiet = "it is tried here"
    assert coordinator not in Coordinator.audited


def test_peers_give_back_what_they_lease_keep_and_wait_for(path):
    """As workers do. What they have is no difference, as long as they can say so."""
    with running(path) as coordinator:
        holder, waiter = Peer(path, "holder"), Peer(path, "waiter")
        holder.publish("k")
        kept = holder.fds[0]
        waiter.send(Acquire(waiter.next_rid(), "k", None, "", WAIT_S))  # its grant is unread
        ticket = holder.ticket("other")
        waiter.send(Acquire(waiter.next_rid(), "other", None, "", WAIT_S))
        assert isinstance(ticket, Ticket)
        Peer.settle(path)
        assert holder.asked == waiter.asked == set()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(kept)
        assert coordinator.audit().leases == 0
        (left,) = Peer(path, role="operator").status().generations
        assert (left.key, left.state) == ("k", "ready")


def test_workers_of_this_process_are_waited_for(path, monkeypatch):
    """Here one is held between the end of a map and its RELEASE, until somebody waits for that."""
    unmap, flush = MappingTable.unmap, Client.flush
    unmapped, waited_for = threading.Event(), threading.Event()

    def unmap_and_wait(table, ended):
        unmap(table, ended)
        unmapped.set()
        assert waited_for.wait(WAIT_S)

    def flush_and_say(client, timeout_s):
        waited_for.set()
        flush(client, timeout_s)

    monkeypatch.setattr(MappingTable, "unmap", unmap_and_wait)
    monkeypatch.setattr(Client, "flush", flush_and_say)
    with running(path):
        worker = gpu_worker.attach(path)
        worker.state_dict("k", build=lambda: {"w": torch.ones(4)})
        assert unmapped.wait(WAIT_S)
    worker.shutdown()
