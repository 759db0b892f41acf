"""Memory on a device that its processes share: a segment like any other, but that they make it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shm_store.memfds import by_owner
from shm_store.segment import is_sealed
from shm_store.wire import (
    Abort,
    Acquire,
    Commit,
    Declare,
    Done,
    Evict,
    Fail,
    Grant,
    HeldOnDevice,
    Invalidate,
    Release,
    Reserve,
    Revoke,
    Space,
    Ticket,
)
from tests.coordinator.device_peer import (
    LIMIT,
    POOL,
    SIZE,
    Worker,
    agree,
    in_use,
    memory,
    published,
    there,
)
from tests.gpu_worker.served import wait_until
from tests.processes import ROOT, WAIT_S, Coordinator, Peer, running

pytestmark = pytest.mark.process


@pytest.fixture
def coordinator(tmp_path):
    with running(str(tmp_path / "s")) as started:
        yield started


@pytest.fixture
def operator(coordinator) -> Peer:
    return Peer(coordinator.socket, "operator", role="operator")


def test_one_uploads_and_all_lease_that(coordinator, operator):
    a, gen = published(coordinator)
    first = a.upload(gen)
    (own,) = a.fds
    b = Worker(coordinator)
    b.host()
    b.send(Acquire(rid := b.next_rid(), "k", None, gen, WAIT_S, pool=POOL))
    second = b.expect(Grant)
    (shared,) = b.fds
    assert (second.gen, second.rid) == (first.gen, rid)
    assert os.path.samestat(os.fstat(own), os.fstat(shared))
    assert os.pread(shared, 7, 0) == b"weights" and is_sealed(shared)
    assert in_use(operator) == SIZE == by_owner()[first.gen]
    (one,) = there(operator)
    assert (one.state, one.private, len(one.leases)) == ("ready", False, 2)
    agree(coordinator)
    for peer, lease in ((a, first.rid), (b, second.rid)):
        os.close(*peer.fds)
        peer.send(Release(first.gen, lease))
        peer.flush()
    # Nobody has it, and it is there all the same.
    assert in_use(operator) == SIZE == by_owner()[first.gen]
    agree(coordinator)
    c = Worker(coordinator)
    assert c.host().gen == gen
    c.ask(gen)
    assert c.expect(Grant).gen == first.gen
    os.close(*c.fds)


PROCESS = """
import signal, sys
from shm_store.wire import Commit, Grant
from tests.coordinator.test_device_segments import Worker, memory

class Coordinator:
    socket = sys.argv[1]

worker = Worker(Coordinator, "process")
gen = worker.host().gen
made = worker.reserve(gen)
fd = memory(made)
if sys.argv[2] == "commits":
    worker.send(Commit(made), [fd])
    worker.expect(Grant)
print(made, flush=True)
signal.pause()
"""


@contextmanager
def process(coordinator, what: str) -> Iterator[str]:
    """A process that uploads it, and `commits`, or does not. Gives the generation; is killed."""
    command = [sys.executable, "-c", PROCESS, coordinator.socket, what]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert started.stdout is not None
    try:
        yield started.stdout.readline().strip()
    finally:
        started.kill()
        started.communicate()


def test_it_outlives_who_has_made_it(coordinator, operator):
    """A process that is started again finds it there."""
    a, gen = published(coordinator)
    with process(coordinator, "commits") as made:
        assert [len(g.leases) for g in there(operator)] == [1]
    wait_until(lambda: [len(g.leases) for g in there(operator)] == [0])
    assert in_use(operator) == SIZE == by_owner()[made]
    a.ask(gen)
    assert a.expect(Grant).gen == made
    os.close(*a.fds)


def test_it_goes_when_nobody_has_it_and_others_lack_room(coordinator, operator):
    a, gen = published(coordinator)
    made = [a.upload(gen)]
    os.close(*a.fds)
    for key in ("l", "m", "n"):
        grant = a.publish(key)
        os.close(*a.fds)
        made.append(grant)
    a.send(Release(made[0].gen, made[0].rid))
    for key, grant in zip(("l", "m", "n"), made[1:], strict=True):
        a.upload(grant.gen, key)
        os.close(*a.fds)
    assert {g.key for g in there(operator)} == {"l", "m", "n"}
    assert made[0].gen not in by_owner()
    agree(coordinator)


def test_who_leases_what_others_lack_the_room_of_is_asked_and_named(coordinator, operator):
    a, gen = published(coordinator)
    made = {"k": a.upload(gen)}
    os.close(*a.fds)
    for key in ("l", "m"):
        grant = a.publish(key)
        os.close(*a.fds)
        made[key] = a.upload(grant.gen, key)
        os.close(*a.fds)
    b = Worker(coordinator, "other")
    grant = b.publish("n")
    os.close(*b.fds)
    rid = b.ask(grant.gen, "n", timeout_s=0.3)
    ticket = b.expect(Ticket)
    b.send(Reserve(ticket.gen, SIZE))
    assert a.expect(Revoke).asked == "room"
    refused = b.expect(Fail)
    assert refused.rid == rid and refused.cause.code == "budget_exceeded"
    assert {holder.key for holder in refused.cause.holders} == {"k", "l", "m"}
    rid = b.ask(grant.gen, "n")
    ticket = b.expect(Ticket)
    b.send(Reserve(ticket.gen, SIZE))
    a.send(Release(made["k"].gen, made["k"].rid))
    b.expect(Space)
    b.send(Abort(ticket.gen))
    assert b.expect(Fail).rid == rid


@pytest.mark.parametrize("how", ["newer", "invalidated"])
def test_what_it_is_a_copy_of_is_retired_and_it_goes_too(coordinator, operator, how):
    a, gen = published(coordinator)
    kept = a.upload(gen)
    os.close(*a.fds)
    if how == "newer":
        b = Worker(coordinator)
        b.publish("k", version="2")
        os.close(*b.fds)
    else:
        operator.send(Invalidate(operator.next_rid(), "k", WAIT_S))
    told = {(revoke.gen, revoke.asked) for revoke in (a.expect(Revoke), a.expect(Revoke))}
    assert told == {(gen, "stale"), (kept.gen, "stale")}
    assert [g.state for g in there(operator)] == ["retired"]
    # Who has the old weights still may have the old copy; it is retired at once.
    again = a.upload(gen)
    os.close(*a.fds)
    assert again.gen != kept.gen
    assert a.expect(Revoke) == Revoke(again.gen, again.rid, "stale")
    for one in (kept, again):
        a.send(Release(one.gen, one.rid))
    wait_until(lambda: in_use(operator) == 0)
    if how == "invalidated":
        a.send(Release(gen, a.leases[gen]))
        operator.expect(Done)


ODD = {
    "nothing": lambda gen: None,
    "a file": lambda gen: os.open("/proc/self/exe", os.O_RDONLY),
    "another device's": lambda gen: memory(gen, device="sim:8"),
    "another generation's": lambda gen: memory(gen[:-1] + "f"),
    "too small": lambda gen: memory(gen, SIZE // 2),
    "too large": lambda gen: memory(gen, 2 * SIZE),
}


@pytest.mark.parametrize("what", ODD)
def test_what_is_not_the_memory_that_was_charged_is_refused(coordinator, operator, what):
    a, gen = published(coordinator)
    made = a.reserve(gen)
    fd = ODD[what](made)
    a.send(Commit(made), [] if fd is None else [fd])
    if fd is not None:
        os.close(fd)
    refused = a.expect(Fail)
    assert refused.cause.code == "segment_refused"
    a.send(Abort(made))
    wait_until(lambda: in_use(operator) == 0 and not there(operator))
    grant = a.upload(gen)
    os.close(*a.fds)
    assert [g.generation for g in there(operator)] == [grant.gen]


def test_a_second_commit_changes_nothing(coordinator, operator):
    a, gen = published(coordinator)
    made = a.reserve(gen)
    fd, other = memory(made), memory(made)
    a.send(Commit(made), [fd])
    a.send(Commit(made), [other])
    grant = a.expect(Grant)
    assert os.path.samestat(os.fstat(*a.fds), os.fstat(fd))
    for one in (fd, other, *a.fds):
        os.close(one)
    agree(coordinator)
    assert grant.gen == made


def test_who_dies_between_allocation_and_commit_leaves_nothing(coordinator, operator):
    """And whoever waits for it uploads it instead."""
    a, gen = published(coordinator)
    with process(coordinator, "dies") as made:
        a.ask(gen)
        a.flush()
        assert by_owner()[made] == SIZE == in_use(operator)
    ticket = a.expect(Ticket)
    assert ticket.gen != made
    a.send(Abort(ticket.gen))
    a.expect(Fail)
    wait_until(lambda: in_use(operator) == 0)
    assert made not in by_owner()


def test_it_is_evicted_by_its_key(coordinator, operator):
    a, gen = published(coordinator)
    grant = a.upload(gen)
    os.close(*a.fds)
    a.send(Release(grant.gen, grant.rid))
    a.flush()
    operator.send(Evict(operator.next_rid(), "k"))
    assert operator.expect(Done).keys == ("k",)
    wait_until(lambda: in_use(operator) == 0 and grant.gen not in by_owner())


def test_a_session_states_it_to_the_next_coordinator(tmp_path):
    """There was no store: what somebody has is not lost, and is one again."""
    first = Coordinator(str(tmp_path / "s"))
    a, gen = published(first)
    grant = a.upload(gen)
    (fd,) = a.fds
    first.stop(signal.SIGKILL)
    Peer.close_all()
    said = [
        (Declare(POOL, LIMIT), ()),
        (HeldOnDevice(grant.gen, grant.rid, POOL, "k", gen, SIZE), [fd]),
    ]
    with running(first.socket) as second:
        back = Worker(second, token="a" * 32, held=said)
        back.flush()
        operator = Peer(second.socket, "operator", role="operator")
        (one,) = there(operator)
        assert (one.generation, one.state, len(one.leases)) == (grant.gen, "ready", 1)
        assert in_use(operator) == SIZE
        os.close(fd)
        back.send(Release(grant.gen, grant.rid))
        back.flush()


def test_a_forked_child_that_comes_late_has_it(coordinator, operator):
    """Its parent has let go, and it is on its way out: the child's statement has it back."""
    a, gen = published(coordinator)
    made = a.upload(gen)
    (fd,) = a.fds
    a.send(Release(made.gen, made.rid))
    a.flush()
    operator.send(Evict(operator.next_rid(), "k"))
    operator.expect(Done)
    wait_until(lambda: [g.state for g in there(operator)] == ["freeing"])
    said = [
        (Declare(POOL, LIMIT), ()),
        (HeldOnDevice(made.gen, 77, POOL, "k", gen, SIZE), [fd]),
    ]
    child = Worker(coordinator, "child", token="c" * 32, held=said)
    child.flush()
    (one,) = there(operator)
    assert (one.generation, one.state, len(one.leases)) == (made.gen, "ready", 1)
    child.send(Release(made.gen, 77))
    child.flush()
    assert in_use(operator) == SIZE == by_owner()[made.gen]
    # The coordinator has an fd of it again, and gives that back, too.
    operator.send(Evict(operator.next_rid(), "k"))
    operator.expect(Done)
    os.close(fd)
    wait_until(lambda: in_use(operator) == 0 and made.gen not in by_owner())
