"""Attaching while there is no coordinator."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import gpu_worker
from gpu_worker.attach import RANK_VARIABLE
from shm_store.channel import connect
from shm_store.errors import NoCoordinator
from shm_store.paths import SOCKET_VARIABLE
from tests.processes import WAIT_S, running

pytestmark = pytest.mark.process


@pytest.fixture
def tried(monkeypatch) -> threading.Event:
    """Set when somebody has found no coordinator twice."""
    tried, refused = threading.Event(), []

    def watched(*arguments, **options):
        try:
            return connect(*arguments, **options)
        except NoCoordinator:
            refused.append(arguments)
            if len(refused) > 1:
                tried.set()
            raise

    monkeypatch.setattr("gpu_worker.connection.connect", watched)
    return tried


@pytest.fixture
def launched(monkeypatch, tmp_path) -> str:
    """A socket of the group that this process is said to be of."""
    path = str(tmp_path / "s")
    monkeypatch.setenv(SOCKET_VARIABLE, path)
    monkeypatch.setenv(RANK_VARIABLE, "0")
    return path


def test_a_worker_of_a_group_waits_for_the_next_coordinator(launched, tried):
    """It was started while there was one; the supervisor starts another."""
    with ThreadPoolExecutor(1) as pool:
        attaching = pool.submit(gpu_worker.attach)
        assert tried.wait(WAIT_S)
        with running(launched):
            attaching.result(WAIT_S).shutdown()


def test_it_waits_for_so_long(launched, tried):
    with pytest.raises(NoCoordinator):
        gpu_worker.attach(patience=0.2)
    assert tried.is_set()


def test_others_hear_at_once(launched, tried, tmp_path):
    """Nobody would start one: of another socket, or without a group."""
    with pytest.raises(NoCoordinator):
        gpu_worker.attach(str(tmp_path / "other"))
    assert not tried.is_set()
