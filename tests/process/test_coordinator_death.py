"""A coordinator is killed and started again: its workers go on, and state what they have."""

from __future__ import annotations

import os
import signal

import pytest

from shm_store.wire import Acquire, Grant, HeldMap, Release
from tests.gpu_worker.served import wait_until
from tests.processes import WAIT_S, Coordinator, Peer, segments_mapped_by

pytestmark = pytest.mark.process

BUDGET = ("--ram-budget", "64MiB")
MIB = 1 << 20

BUILD = """
begun, go_on = threading.Event(), threading.Event()
builds, results, errors = [], [], []

def build(value, size_bytes, waits=True):
    builds.append(value)
    begun.set()
    assert not waits or go_on.wait(20)
    return {'w': torch.full((size_bytes // 4,), float(value))}

def load_state(key, *arguments):
    try:
        results.append(worker.state_dict(key, build=lambda: build(*arguments)))
    except BaseException as error:
        errors.append(repr(error))
        raise

def same(value):
    return [bool((state['w'] == value).all()) for state in results]
"""

SLOW_FILL = """
from gpu_worker import publish
fill = publish.fill

def slowly(fd, *rest):
    os.pwrite(fd, b'half of it', 4096)
    begun.set()
    assert go_on.wait(20)
    fill(fd, *rest)

publish.fill = slowly
"""

SERVE = """
stop, answers, failed = threading.Event(), [0], []
module = handle.__enter__()

def serve():
    while not stop.is_set():
        try:
            assert float(module(torch.ones(3))[0]) == 4
            answers[0] += 1
        except BaseException as error:
            failed.append(repr(error))
            raise

thread = in_thread(serve)
"""


class Restarted:
    """A coordinator that can be killed and started again on its socket."""

    def __init__(self, path: str) -> None:
        self.path = self.socket = path
        self.now = Coordinator(path, *BUDGET)

    def kill(self) -> None:
        self.now.stop(signal.SIGKILL)

    def start(self) -> None:
        self.now = Coordinator(self.path, *BUDGET)

    def restart(self) -> None:
        self.kill()
        self.start()


@pytest.fixture
def coordinator(tmp_path):
    """Ends with 0 and in silence, its books equal to the kernel."""
    started = Restarted(str(tmp_path / "s"))
    try:
        yield started
        started.now.audit_quiet()
    finally:
        Peer.close_all()
        code, stderr = started.now.stop()
    assert (code, "Traceback" in stderr) == (0, False), stderr


@pytest.fixture
def status(coordinator):
    """What the present coordinator says."""

    def ask():
        with_it = Peer(coordinator.path, "operator", role="operator")
        try:
            return with_it.status()
        finally:
            with_it.close()

    return ask


def held_by(status, pid: int) -> dict[str, str]:
    """Key to state of what a process leases."""
    return {
        generation.key: generation.state
        for generation in status().generations
        if any(lease.pid == pid for lease in generation.leases)
    }


def test_everything_under_way_goes_on(coordinator, status, start, file):
    """Inference, a lease, a build, a fill, a charge, and a request that waits for room."""
    serving = start("serving")
    serving.do("handle = load('m', source=file)", file=file)
    serving.do(SERVE)
    holding = start("holding")
    holding.do(BUILD + f"go_on.set(); load_state('big', 1, {10 * MIB})")
    charged = start("charged")
    charged.do("private = load('private', build=skeleton, private=True)")
    filling = start("filling")
    filling.do(BUILD + SLOW_FILL)
    filling.do(f"thread = in_thread(lambda: load_state('filled', 2, {4 * MIB}, False))")
    filling.do("begun.wait(20)")
    wait_until(lambda: {g.key for g in status().generations if g.state == "filling"} == {"filled"})
    building = start("building")
    building.do(BUILD + f"thread = in_thread(lambda: load_state('built', 3, {2 * MIB}))")
    building.do("begun.wait(20)")
    waiting = start("waiting")
    waiting.do(BUILD + f"thread = in_thread(lambda: load_state('waits', 4, {48 * MIB}, False))")
    wait_until(lambda: waits_for_room(status, "waits"))

    coordinator.restart()

    workers = (serving, holding, charged, filling, building, waiting)
    wait_until(lambda: {s.pid for s in status().sessions} >= {w.pid for w in workers})
    assert held_by(status, serving.pid) == {"m": "ready"}
    assert held_by(status, holding.pid) == {"big": "ready"}
    assert held_by(status, charged.pid) == {"private": "ready"}
    before = serving.do("answers[0]")
    wait_until(lambda: serving.do("answers[0]") > before + 10)
    filling.do("go_on.set(); thread.join(20)")
    assert filling.do("same(2)") == [True] and filling.do("builds") == [2]
    wait_until(lambda: waits_for_room(status, "waits"))
    building.do("go_on.set()")
    holding.do("results.clear(); gc.collect(); worker.flush()")
    waiting.do("thread.join(20)")
    building.do("thread.join(20)")
    assert waiting.do("same(4)") == [True]
    assert building.do("same(3)") == [True] and building.do("builds") == [3]
    assert waiting.do("builds") == [4], "its plan was kept"
    assert [worker.do("errors") for worker in (filling, building, waiting)] == [[], [], []]
    assert serving.do("stop.set() or thread.join() or failed") == []
    coordinator.now.audit()

    serving.do("handle.__exit__(None, None, None); handle.close(); del handle, module")
    for worker in (filling, building, waiting):
        worker.do("results.clear()")
    charged.do("private.close(); del private; worker.evict('private')")
    for worker in workers:
        worker.do("gc.collect(); worker.flush(); worker.shutdown()")
        assert segments_mapped_by(worker.pid) == []
    wait_until(lambda: not any(generation.leases for generation in status().generations))


def waits_for_room(status, key: str) -> bool:
    return any(key in session.waiting_for for session in status().sessions)


def test_it_is_missed_again_and_again(coordinator, status, start, file):
    """Each time in the middle of whatever it was at; no load fails, none is wrong."""
    workers = [start(f"worker {number}") for number in range(2)]
    for worker in workers:
        worker.do(
            """
stop, loads, failed = threading.Event(), [0], []

def go_round():
    while not stop.is_set():
        try:
            assert answer(f'm{loads[0] % 3}', source=file) == 4
            worker.evict(f'm{loads[0] % 3}')
            loads[0] += 1
        except BaseException as error:
            failed.append(repr(error))
            raise

threads = [in_thread(go_round) for _ in range(2)]
""",
            file=file,
        )
    for _ in range(5):
        before = [worker.do("loads[0]") for worker in workers]
        coordinator.restart()
        wait_until(
            lambda before=before: all(
                worker.do("failed") or worker.do("loads[0]") > was + 3
                for worker, was in zip(workers, before, strict=True)
            )
        )
    for worker in workers:
        assert worker.do("stop.set() or [thread.join() for thread in threads] and failed") == []
        assert worker.do("gc.collect() and False or worker.flush()") is None
    assert [s.pid for s in status().sessions if s.pid in {w.pid for w in workers}]
    coordinator.now.audit()


def test_a_worker_that_ends_while_none_is_there_ends_at_once(coordinator, start, file):
    """By shutdown, and by leaving its interpreter with something mapped."""
    worker = start("worker")
    worker.do("state = worker.state_dict('m', source=file)", file=file)
    coordinator.kill()
    worker.do("import time; since_s = time.monotonic(); worker.shutdown()")
    assert worker.do("time.monotonic() - since_s") < 5
    worker.end()
    coordinator.start()


def test_a_release_from_before_the_reconnect_ends_no_newer_lease(coordinator, status):
    """S16: it names the lease that was replaced, whichever way it came to be late."""
    path, token = coordinator.path, "t" * 32
    Peer(path, "other").publish("k")
    first = Peer(path, "comes back", token=token)
    first.send(Acquire(first.next_rid(), "k", None, "", WAIT_S))
    old = first.expect(Grant)
    (fd,) = first.fds
    second = Peer(path, "comes back", token=token, held=[(HeldMap(old.gen, old.rid), [fd])])
    second.rid = first.rid
    second.send(Acquire(second.next_rid(), "k", None, "", WAIT_S))
    new = second.expect(Grant)
    assert new.gen == old.gen and new.rid != old.rid
    second.send(Release(old.gen, old.rid))
    second.flush()
    (generation,) = status().generations
    assert len(generation.leases) == 2
    first.leases.clear()
    first.asked.clear()
    second.send(Release(new.gen, new.rid))
    second.flush()
    (generation,) = status().generations
    assert len(generation.leases) == 1
    Peer.attached.remove(first)
    os.close(fd)
