"""Two coordinators: one spoken by hand, with a client and a request; one real, with a worker."""

from __future__ import annotations

import textwrap

import pytest

import gpu_worker
from gpu_worker.request import Ask
from shm_store.wire import Acquire
from tests.gpu_worker.served import write
from tests.gpu_worker.spoken import SpokenCoordinator, built
from tests.gpu_worker.template import ATTACHED, Template
from tests.processes import Peer, running


@pytest.fixture
def coordinator(tmp_path):
    spoken = SpokenCoordinator(str(tmp_path / "s"))
    yield spoken
    spoken.close()


@pytest.fixture
def client(coordinator):
    return coordinator.attach()


@pytest.fixture
def asked(coordinator, client):
    """Starts an ACQUIRE in another thread; gives its future and its request id."""

    def ask(what: Ask | None = None, timeout_s: float | None = None, progress=None):
        future = coordinator.call(client.acquire, what or built(), timeout_s, progress)
        return future, coordinator.expect(Acquire).rid

    return ask


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A real coordinator, shared by the tests of a module."""
    with running(str(tmp_path_factory.mktemp("served") / "s")) as started:
        yield started


@pytest.fixture
def worker(served):
    worker = gpu_worker.attach(served.socket)
    yield worker
    worker.shutdown()


@pytest.fixture
def operator(served):
    peer = Peer(served.socket, role="operator")
    yield peer
    peer.close()


@pytest.fixture
def key(request) -> str:
    """A key that no other test uses."""
    return request.node.name


@pytest.fixture
def source(tmp_path) -> str:
    """A checkpoint for `served.skeleton`, all ones."""
    return write(tmp_path / "linear.safetensors", 1.0)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    started = Template(tmp_path_factory.mktemp("template"))
    yield started
    started.close()


@pytest.fixture
def run(served, template):
    """Runs a script that has attached; it must say nothing on stderr."""

    def run(script: str, socket: str = served.socket, *arguments: str) -> str:
        whole = textwrap.dedent(ATTACHED) + textwrap.dedent(script)
        code, stdout, stderr = template.run(whole, socket, *arguments)
        print(stderr)  # whole, if this fails
        assert (code, stderr) == (0, "")
        return stdout

    return run
