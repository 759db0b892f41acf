"""Sessions that say of memory on a device what is not so."""

from __future__ import annotations

import os
import socket

import pytest

from shm_store.memfds import by_owner
from shm_store.segment import freeze
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
    Release,
    Reserve,
    Space,
    Ticket,
)
from tests.coordinator.device_peer import (
    LIMIT,
    POOL,
    SIZE,
    Worker,
    in_use,
    memory,
    published,
    there,
)
from tests.gpu_worker.served import wait_until
from tests.processes import WAIT_S, Peer, running

pytestmark = pytest.mark.process


@pytest.fixture
def coordinator(tmp_path):
    with running(str(tmp_path / "s")) as started:
        yield started


@pytest.fixture
def operator(coordinator) -> Peer:
    return Peer(coordinator.socket, "operator", role="operator")


@pytest.mark.parametrize("lie", ["another pool", "another size", "another file", "not sealed"])
def test_no_session_states_what_it_cannot_have(coordinator, lie):
    a, gen = published(coordinator)
    grant = a.upload(gen)
    (fd,) = a.fds
    pool, size, other = POOL, SIZE, -1
    match lie:
        case "another pool":
            pool = "vram:sim-8"
        case "another size":
            size = 2 * SIZE
        case _:
            other = memory(grant.gen)
            if lie == "another file":
                freeze(other, "it")
    sent = fd if other < 0 else other
    said = [
        (Declare(pool, LIMIT), ()),
        (HeldOnDevice(grant.gen, 77, pool, "k", gen, size), [sent]),
    ]
    liar = Worker(coordinator, token="b" * 32, held=said)
    refused = liar.receive()
    assert isinstance(refused, Fail) and refused.rid == 0
    assert liar.receive() is None
    for one in {fd, sent}:
        os.close(one)


def stated(coordinator, gen: str, of: str, fd: int, size: int = SIZE) -> Worker:
    """A session that comes back with this, it says."""
    held = [(Declare(POOL, LIMIT), ()), (HeldOnDevice(gen, 99, POOL, "k", of, size), [fd])]
    return Worker(coordinator, "liar", token="d" * 32, held=held)


def refused(liar: Worker) -> str:
    said = liar.receive()
    assert isinstance(said, Fail) and said.rid == 0
    assert liar.receive() is None
    return said.cause.message


def sealed(gen: str, size: int = SIZE) -> int:
    fd = memory(gen, size)
    freeze(fd, gen)
    return fd


def test_who_states_what_another_fills_does_not_end_that_fill(coordinator, operator):
    """Nothing in the memory of a device proves a COMMIT: its bytes would be anybody's."""
    a, gen = published(coordinator)
    made = a.reserve(gen)
    fake = sealed(made)
    assert "no bytes yet" in refused(stated(coordinator, made, gen, fake))
    os.close(fake)
    fd = memory(made)
    a.send(Commit(made), [fd])
    granted = a.expect(Grant)
    assert granted.gen == made and os.path.samestat(os.fstat(a.fds[0]), os.fstat(fd))
    os.close(fd)


@pytest.mark.parametrize("lie", ["half of it", "twice as much", "another file", "of newer weights"])
def test_what_is_on_its_way_out_comes_back_as_what_it_was(coordinator, operator, lie):
    """A forked child may state it late; whatever is not that memory is not believed."""
    a, gen = published(coordinator)
    made = a.upload(gen)
    (fd,) = a.fds
    a.send(Release(made.gen, made.rid))
    a.flush()
    operator.send(Evict(operator.next_rid(), "k"))
    operator.expect(Done)
    wait_until(lambda: [g.state for g in there(operator)] == ["freeing"])
    size = {"half of it": SIZE // 2, "twice as much": 2 * SIZE}.get(lie, SIZE)
    if lie == "of newer weights":
        of = published(coordinator, version="2")[1]
        liar = stated(coordinator, made.gen, of, fd)
    else:
        other = sealed(made.gen, size)
        liar = stated(coordinator, made.gen, gen, other, size)
        os.close(other)
    refused(liar)
    assert [g.state for g in there(operator)] == ["freeing"]
    os.close(fd)
    wait_until(lambda: in_use(operator) == 0 and made.gen not in by_owner())


@pytest.mark.parametrize("when", ["before RESERVE", "while it waits for room"])
def test_memory_that_comes_before_there_is_room_is_not_kept(coordinator, operator, when):
    """Nothing is charged for it yet."""
    a, gen = published(coordinator)
    full = a.reserve(gen)
    b, other = published(coordinator, "other")
    b.ask(other, "other")
    ticket = b.expect(Ticket)
    if when == "while it waits for room":
        b.send(Reserve(ticket.gen, LIMIT))
    fd = memory(ticket.gen)
    b.send(Commit(ticket.gen), [fd])
    b.flush()
    os.close(fd)
    assert ticket.gen not in by_owner()
    a.send(Abort(full))


@pytest.mark.parametrize("what", ["socket", "folder", "/dev/null", "memfd", "file"])
def test_what_no_driver_gives_is_no_memory_of_a_gpu(coordinator, what):
    a, gen = published(coordinator)
    a.send(Declare("vram:gpu", LIMIT))
    rid = a.next_rid()
    a.send(Acquire(rid, "k", None, gen, WAIT_S, pool="vram:gpu"))
    made = a.expect(Ticket).gen
    a.send(Reserve(made, SIZE))
    a.expect(Space)
    match what:
        case "socket":
            fds = [one.detach() for one in socket.socketpair()]
        case "memfd":
            fds = [memory(made)]
        case _:
            fds = [os.open({"folder": "/", "file": __file__}.get(what, what), os.O_RDONLY)]
    a.send(Commit(made), fds[:1])
    for fd in fds:
        os.close(fd)
    assert "no memory of vram:gpu" in a.expect(Fail).cause.message
