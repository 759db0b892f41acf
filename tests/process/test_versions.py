"""A worker and a coordinator of different versions refuse each other by name, either way round."""

from __future__ import annotations

import signal

import pytest

from shm_store.wire import VERSION
from tests.gpu_worker.served import write
from tests.process.worker_process import Raised, WorkerProcess
from tests.processes import Coordinator, Peer, running

pytestmark = pytest.mark.process

NEWER = VERSION + 1
NEWER_PROGRAM = """
import shm_store.wire
shm_store.wire.VERSION += 1
from coordinator.cli import main
main()
"""


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "s")


@pytest.fixture
def newer(path):
    """A coordinator of the next version."""
    with running(path, program=("-c", NEWER_PROGRAM)) as started:
        started.unquiet = "an audit of this version is refused, too"
        yield started


@pytest.fixture
def fork(nursery):
    """A process of a version."""

    def fork(version: int) -> WorkerProcess:
        process = nursery.fork()
        process.do("import shm_store.wire; shm_store.wire.VERSION = version", version=version)
        process.do("import gpu_worker, torch")
        return process

    yield fork
    nursery.end_workers()


def refused(process: WorkerProcess, path: str, **arguments: bool) -> str:
    """What a process is told that may not attach."""
    with pytest.raises(Raised) as raised:
        process.do("gpu_worker.attach(path, **arguments)", path=path, arguments=arguments)
    assert raised.value.kind == "VersionMismatch"
    return str(raised.value)


def both(coordinator: int, peer: int) -> str:
    return (
        f"VersionMismatch: the coordinator speaks protocol version {coordinator}, the peer {peer} "
        "(install the same version of shm-weight-cache on both ends)"
    )


def test_an_older_worker_is_refused_by_a_newer_coordinator(fork, newer):
    assert refused(fork(VERSION), newer.socket) == both(NEWER, VERSION)
    Peer(newer.socket, version=NEWER).flush()  # it goes on with those of its own


def test_a_newer_worker_is_refused_by_an_older_coordinator(fork, coordinator):
    assert refused(fork(NEWER), coordinator.socket) == both(VERSION, NEWER)
    assert Peer(coordinator.socket, role="operator").status().sessions == ()


def test_neither_starts_a_coordinator_of_its_own_beside_the_other(fork, newer):
    assert refused(fork(VERSION), newer.socket, autostart=True) == both(NEWER, VERSION)
    Peer(newer.socket, version=NEWER).flush()


def test_what_is_mapped_outlives_a_coordinator_of_another_version(fork, path, tmp_path):
    """Who comes back is refused for good, and goes on with what it has."""
    file = write(tmp_path / "w.safetensors", 2.0)
    process = fork(VERSION)
    first = Coordinator(path)
    process.do("worker = gpu_worker.attach(path)", path=path)
    process.do("state = worker.state_dict('k', source=file)", file=file)
    first.stop(signal.SIGKILL)
    with running(path, program=("-c", NEWER_PROGRAM)) as second:
        second.unquiet = "an audit of this version is refused, too"
        for _ in range(2):
            with pytest.raises(Raised) as raised:
                process.do("worker.state_dict('k', source=file)")
            assert str(raised.value) == both(NEWER, VERSION)
        assert refused(process, path) == both(NEWER, VERSION)
        assert process.do("float(sum(tensor.sum() for tensor in state.values()))") == 16.0
        process.do("state['bias'].add_(1.0); bias = state['bias'].tolist()")
        assert process.do("bias") == [3.0, 3.0]
