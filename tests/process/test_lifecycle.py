"""Records and leases of real worker processes, through shutdowns and deaths.

After every step that leaves it quiet, the books are held against the kernel (`Coordinator.audit`).
"""

from __future__ import annotations

import os
import signal

import pytest

from shm_store.wire import Bye, Done, Drain, Evict, Fail, Release
from tests.gpu_worker.served import wait_until
from tests.processes import WAIT_S, Peer, segments_mapped_by

pytestmark = pytest.mark.process

SHARED_BYTES = 2 * 4096
"""What the weights of `file` take: a page for the preamble, and one for manifest and tensors."""

HOLD = """
handle = load('m', source=file)
"""

BUILD_ON_DEMAND = """
building, go_on = threading.Event(), threading.Event()
def build():
    building.set()
    go_on.wait()
    return {'weight': torch.full((2, 3), 5.0), 'bias': torch.full((2,), 5.0)}
"""


@pytest.fixture
def a(start):
    return start("a")


@pytest.fixture
def b(start):
    return start("b")


def pids(operator: Peer, key: str) -> list[int]:
    """The processes that lease the one generation of a key."""
    generation = operator.generation(key)
    return sorted(lease.pid for lease in generation.leases) if generation else []


def names(operator: Peer) -> set[str]:
    return {session.name for session in operator.status().sessions}


def pool(operator: Peer):
    (ram,) = operator.status().pools
    return ram


def evict(operator: Peer, key: str) -> Done | Fail:
    operator.send(Evict(operator.next_rid(), key))
    return operator.expect(Done | Fail)


@pytest.mark.parametrize("then", ["retained", "freed"])
def test_what_was_idle_at_shutdown_stays_warm_for_a_peer(coordinator, operator, a, b, file, then):
    """S1, S2: the module is gone, the bytes stay until somebody wants them gone, counted once."""
    a.do(HOLD + "with handle as module: alive = weakref.ref(module)", file=file)
    a.do("handle.close(); del module")
    assert pids(operator, "m") == [a.pid]
    assert a.do("held()") == [] and a.do("alive() is None") and a.do("told") == [["m", "shutdown"]]
    generation = operator.generation("m")
    assert (generation.state, generation.leases) == ("ready", ())
    assert segments_mapped_by(a.pid) == []
    assert pool(operator).retained_bytes == coordinator.segment_blocks() == SHARED_BYTES
    coordinator.audit()

    if then == "freed":
        evict(operator, "m")
        operator.flush()
        assert pool(operator).in_use_bytes == coordinator.segment_blocks() == 0
    assert b.do("answer('m', source=file)", file=file) == 4
    adopted = operator.generation("m").generation
    assert (adopted == generation.generation) is (then == "retained")
    assert pool(operator).in_use_bytes == coordinator.segment_blocks() == SHARED_BYTES
    assert pids(operator, "m") == [b.pid] and coordinator.audit().leases == 1


def test_an_eviction_after_shutdown_debits_its_own_class(coordinator, operator, a, b, file):
    """S3: shared bytes leave the shared ones; the private charges beside them are untouched."""
    private = """
charged = load('p', build=lambda: skeleton().requires_grad_(False), private=True)
"""
    b.do(private)
    of_b_bytes = pool(operator).private_bytes
    a.do(HOLD + private, file=file)
    both_bytes = pool(operator).private_bytes
    assert both_bytes == 2 * of_b_bytes > 0
    assert sorted(a.do("held()")) == [["m", 1, 0], ["p", 1, 0]]
    assert (pool(operator).leased_bytes, pool(operator).private_bytes) == (SHARED_BYTES, both_bytes)

    a.do("handle.close()")
    wait_until(lambda: pids(operator, "m") == [])
    assert pool(operator).retained_bytes == SHARED_BYTES
    assert pool(operator).private_bytes == both_bytes
    coordinator.audit()
    evict(operator, "m")
    operator.flush()
    assert pool(operator).in_use_bytes == pool(operator).private_bytes == both_bytes

    a.do("charged.close()")
    wait_until(lambda: pool(operator).in_use_bytes == of_b_bytes)
    coordinator.audit()
    b.end(signal.SIGKILL)
    wait_until(lambda: pool(operator).in_use_bytes == 0)


def test_a_warm_handle_is_locked_after_shutdown_beside_a_peer(coordinator, operator, a, b, file):
    """S6: the record stays, and is counted, until the handle ends."""
    a.do(HOLD, file=file)
    assert a.do("held()") == [["m", 1, 0]]
    assert pids(operator, "m") == [a.pid]
    a.do("module = handle.__enter__()")
    assert b.do("answer('m', source=file)", file=file) == 4
    assert pids(operator, "m") == sorted([a.pid, b.pid])
    assert pool(operator).in_use_bytes == SHARED_BYTES
    assert coordinator.audit().leases == 2
    assert a.do("float(module(torch.ones(3))[0])") == 4
    a.do("del module; handle.__exit__(None, None, None)")
    assert a.do("told") == [] and a.do("held()") == [["m", 1, 0]]
    a.do("handle.close()")
    assert a.do("told") == [["m", "shutdown"]] and a.do("held()") == []
    wait_until(lambda: pids(operator, "m") == [b.pid])
    assert coordinator.audit().leases == 1


def test_a_handle_that_was_never_entered_leaves_nothing(coordinator, operator, a, file):
    """S7: record, lease, session and bytes reach zero."""
    a.do(HOLD, file=file)
    assert a.do("held()") == [["m", 1, 0]]
    a.do("del handle; gc.collect()")
    wait_until(lambda: names(operator) == set())
    assert a.do("told") == [["m", "shutdown"]] and a.do("held()") == []
    assert segments_mapped_by(a.pid) == [] and pids(operator, "m") == []
    coordinator.audit()
    evict(operator, "m")
    operator.flush()
    assert pool(operator).in_use_bytes == coordinator.segment_blocks() == 0


def test_a_claim_outlives_the_invalidation_by_a_peer(coordinator, operator, a, b, file):
    """S10: the old generation is retired, counted and usable; every later load gets a new one."""
    a.do(HOLD, file=file)
    assert b.do("worker.invalidate('m')") is True
    old = operator.generation("m")
    assert (old.state, [lease.pid for lease in old.leases]) == ("retired", [a.pid])
    coordinator.audit()
    a.do("with handle as module: seen = float(module(torch.ones(3))[0])")
    a.do("del module")
    assert a.do("seen") == 4

    assert b.do("answer('m', source=file)", file=file) == 4
    new = [g for g in operator.status().generations if g.generation != old.generation]
    assert [g.state for g in new] == ["ready"]
    assert pool(operator).in_use_bytes == coordinator.segment_blocks() == 2 * SHARED_BYTES
    assert coordinator.audit().leases == 2
    a.do("later = load('m', source=file)", file=file)
    assert a.do("later.generation") == new[0].generation
    assert a.do("told") == []
    a.do("handle.close()")
    assert a.do("told") == [["m", "invalidated"]]
    a.do("worker.flush()")
    assert operator.generation("m").generation == new[0].generation
    assert pool(operator).in_use_bytes == coordinator.segment_blocks() == SHARED_BYTES
    assert coordinator.audit().leases == 2


def test_the_ticket_of_a_thread_that_died_goes_to_who_waits(coordinator, operator, a, b):
    """S13: at once, with its process alive and nothing reserved."""
    a.do(BUILD_ON_DEMAND)
    a.do(
        """
def dying():
    build()
    raise SystemExit
thread = in_thread(lambda: load('m', build=dying))
building.wait()
"""
    )
    b.do(BUILD_ON_DEMAND)
    b.do("thread = in_thread(lambda: globals().update(handle=load('m', build=build)))")
    wait_until(lambda: operator.generation("m").waiting == 2)
    assert operator.generation("m").filled_by == a.pid
    a.do("go_on.set(); thread.join()")
    b.do("building.wait()")
    assert operator.generation("m").filled_by == b.pid
    assert pool(operator).in_use_bytes == coordinator.segment_blocks() == 0
    coordinator.audit()
    b.do("go_on.set(); thread.join()")
    assert pids(operator, "m") == [b.pid]
    assert a.do("answer('m', build=dying)") == 20, "the weights of the one that built"
    assert coordinator.audit().leases == 2


def test_a_killed_process_takes_all_it_had_and_no_more(coordinator, operator, a, b, file):
    """S15: leases, locks, claims, a waiting request, gone in one event; peers are undisturbed."""
    b.do(HOLD + BUILD_ON_DEMAND, file=file)
    b.do("thread = in_thread(lambda: globals().update(built=load('k', build=build)))")
    b.do("building.wait()")
    a.do(HOLD + "module = handle.__enter__()", file=file)
    a.do("claimed = load('n', source=file)", file=file)
    a.do("waiting = in_thread(lambda: load('k', build=skeleton))")
    wait_until(lambda: operator.generation("k").waiting == 2)
    assert pids(operator, "m") == sorted([a.pid, b.pid]) and pids(operator, "n") == [a.pid]

    a.signal(signal.SIGKILL)
    while "a" in names(operator):
        report = operator.status()
        had = [g.key for g in report.generations if a.pid in [lease.pid for lease in g.leases]]
        assert sorted(had) in ([], ["m", "n"]), "part of what it had is gone"
    assert pids(operator, "m") == [b.pid] and pids(operator, "n") == []
    assert operator.generation("n").state == "ready" and operator.generation("k").waiting == 1
    coordinator.audit()
    b.do("go_on.set(); thread.join()")
    assert b.do("answer('k', build=build)") == 20 and b.do("answer('m', source=file)") == 4
    assert coordinator.audit().leases == 2


@pytest.mark.parametrize("has", ["lease", "ticket", "fill", "waiting"])
def test_a_drain_ends_though_a_holder_dies_in_it(coordinator, operator, a, file, has):
    """S17: nothing is stranded, whatever it had."""
    coordinator.unquiet = "it has ended"
    other = Peer(coordinator.socket, "other")
    lease = other.publish("other")
    os.close(*other.fds)
    if has == "lease":
        a.do(HOLD, file=file)
    elif has == "waiting":
        other.ticket("m")
        a.do("in_thread(lambda: refused(lambda: load('m', build=skeleton))) and None")
        wait_until(lambda: operator.generation("m").waiting == 2)
    else:
        a.do(BUILD_ON_DEMAND)
        a.do(
            """
from gpu_worker import publish
publish.fill = lambda *given: build()
first = build if has == 'ticket' else skeleton
in_thread(lambda: refused(lambda: load('m', build=first)))
building.wait()
""",
            has=has,
        )
        assert operator.generation("m").filled_by == a.pid
    operator.send(Drain(operator.next_rid(), WAIT_S))
    watcher = Peer(coordinator.socket, "watcher", role="operator")
    assert watcher.status().draining
    a.end(signal.SIGKILL)
    wait_until(lambda: names(watcher) == {"other"})
    watcher.flush()
    assert [g.key for g in watcher.status().generations] == ["other"]
    other.send(Release(lease.gen, lease.rid))
    assert operator.expect(Done).rid == operator.rid
    assert operator.expect(Bye) == Bye() and operator.receive() is None
    assert coordinator.process.wait(WAIT_S) == 0
    assert not os.path.exists(coordinator.socket)


def test_the_death_of_a_peer_leaves_a_grant_that_is_on_its_way(coordinator, operator, a, b, file):
    """S18: what is granted is leased before it is mapped."""
    b.do(HOLD, file=file)
    a.do(
        """
from gpu_worker.mapping import MappingTable
arrived, go_on = threading.Event(), threading.Event()
granted = MappingTable.granted
def slowly(*arguments):
    arrived.set()
    go_on.wait()
    return granted(*arguments)
MappingTable.granted = slowly
thread = in_thread(lambda: globals().update(handle=load('m', source=file)))
arrived.wait()
""",
        file=file,
    )
    generation = operator.generation("m").generation
    assert pids(operator, "m") == sorted([a.pid, b.pid])
    b.end(signal.SIGKILL)
    wait_until(lambda: "b" not in names(operator))
    assert pids(operator, "m") == [a.pid]
    assert evict(operator, "m").cause.code == "in_use"
    a.do("go_on.set(); thread.join()")
    assert a.do("handle.generation") == generation
    assert a.do("answer('m', source=file)") == 4
    assert coordinator.audit().leases == 1


def test_a_lock_that_never_ends_is_counted_until_its_process_ends(coordinator, operator, a, file):
    """S25."""
    a.do(HOLD + "handle.__enter__() and None", file=file)
    a.do("del handle; gc.collect(); worker.flush()")
    assert a.do("held()") == [["m", 0, 1]]
    assert pids(operator, "m") == [a.pid] and evict(operator, "m").cause.code == "in_use"
    assert coordinator.audit().leases == 1
    a.end()
    wait_until(lambda: pids(operator, "m") == [])
    assert coordinator.audit().leases == 0
    assert isinstance(evict(operator, "m"), Done)
    operator.flush()
    assert pool(operator).in_use_bytes == coordinator.segment_blocks() == 0
