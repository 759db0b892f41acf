"""A coordinator for each test, and worker processes that do what they are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu_worker.served import write
from tests.process.worker_process import Nursery
from tests.processes import Peer, running


@pytest.fixture(scope="module")
def nursery(tmp_path_factory):
    started = Nursery(tmp_path_factory.mktemp("n"))
    yield started
    started.close()
    assert started.stderr.read_text() == ""


@pytest.fixture
def coordinator(tmp_path):
    with running(str(tmp_path / "s"), "--ram-budget", "64MiB") as started:
        yield started


@pytest.fixture
def start(nursery, coordinator):
    """Starts a worker process of that name."""
    yield lambda name: nursery.start(coordinator.socket, name)
    nursery.end_workers()


@pytest.fixture
def operator(coordinator):
    return Peer(coordinator.socket, "operator", role="operator")


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Weights for a worker's `skeleton`, all ones; its answer is then 4."""
    return write(tmp_path / "w.safetensors", 1.0)
