"""Leases on memory of a device, frame by frame."""

from __future__ import annotations

import os

import pytest

from gpu_worker.request import Charge
from shm_store.errors import BudgetExceeded, DeviceOutOfMemory, SegmentRefused
from shm_store.keys import Fingerprint, GenerationId, Key, LeaseId
from shm_store.layout import PAGE_BYTES
from shm_store.wire import (
    Abort,
    Ack,
    Acquire,
    Commit,
    Grant,
    HeldOnDevice,
    Release,
    Reserve,
    Revoke,
    Space,
    Ticket,
)
from tests.gpu_worker.spoken import WAIT_S

POOL = "vram:sim-test"
HOST = GenerationId("host-1")
THERE, LATER = GenerationId("there-1"), GenerationId("there-2")
FINGERPRINT = Fingerprint("build:host-1")
SIZE_BYTES = 2 * PAGE_BYTES


OPEN: set[GenerationId] = set()
"""What was made, and was not closed."""


class Memory:
    """What a device makes, in a memfd."""

    def __init__(self, gen: GenerationId) -> None:
        self.gen = gen
        self.fd = os.memfd_create(f"weight-cache:{gen}", os.MFD_CLOEXEC)
        os.truncate(self.fd, SIZE_BYTES)
        OPEN.add(gen)

    def close(self) -> None:
        if self.gen in OPEN:
            OPEN.remove(self.gen)
            os.close(self.fd)


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert not OPEN


@pytest.fixture
def client(coordinator):
    """Patient, as workers are."""
    return coordinator.attach(WAIT_S)


@pytest.fixture
def share(coordinator, client):
    """Has another thread ask for a copy of `HOST`; gives what that returns, and the charge."""

    def ask(make=Memory, copy_of=HOST):
        charge = Charge(copy_of=copy_of)
        facts = (charge, Key("a"), POOL, SIZE_BYTES, make, WAIT_S)
        return coordinator.call(client.share, *facts), charge

    return ask


def fill(coordinator, gen=THERE) -> Acquire:
    """Take the ACQUIRE, and bring its asker to where it fills."""
    asked = coordinator.expect(Acquire)
    reserve(coordinator, asked, gen)
    return asked


def reserve(coordinator, asked: Acquire, gen: GenerationId) -> None:
    coordinator.send(Ticket(asked.rid, gen, Key("a"), FINGERPRINT))
    assert coordinator.expect(Reserve) == Reserve(gen, SIZE_BYTES)
    coordinator.send(Space(gen))


def test_who_gets_the_ticket_brings_an_fd_and_is_given_one(coordinator, client, share):
    sharing, charge = share()
    asked = fill(coordinator)
    assert (asked.key, asked.source, asked.version, asked.pool) == ("a", None, HOST, POOL)
    assert coordinator.expect(Commit) == Commit(THERE)
    (fd,) = coordinator.fds
    coordinator.send(Grant(asked.rid, THERE), os.dup(fd))
    assert sharing.result(WAIT_S) is True
    assert os.path.samestat(os.fstat(charge.fd), os.fstat(fd)) and not OPEN

    client.leases.discharge(charge)
    assert coordinator.expect(Release) == Release(THERE, LeaseId(asked.rid))
    assert charge.fd == -1


def test_what_is_there_is_granted_without_making_anything(coordinator, client, share):
    sharing, charge = share(make=None)
    asked = coordinator.expect(Acquire)
    coordinator.send(Grant(asked.rid, THERE), os.memfd_create("test"))
    assert sharing.result(WAIT_S) is True
    client.leases.discharge(charge)
    coordinator.expect(Release)


def test_a_process_has_one_lease_on_a_copy_and_another_copy_is_another(coordinator, client, share):
    first, charge = share()
    asked = coordinator.expect(Acquire)
    coordinator.send(Grant(asked.rid, THERE), os.memfd_create("test"))
    first.result(WAIT_S)
    again, _ = share()
    assert again.result(WAIT_S) is False
    newer, other = share(copy_of=GenerationId("host-2"))
    asked = coordinator.expect(Acquire)
    coordinator.send(Grant(asked.rid, LATER), os.memfd_create("test"))
    assert newer.result(WAIT_S) is True
    for one in (charge, other):
        client.leases.discharge(one)
        coordinator.expect(Release)


def test_it_is_stated_with_its_fd_and_that_it_is_stale(coordinator, client, share):
    sharing, charge = share(make=None)
    asked = coordinator.expect(Acquire)
    coordinator.send(Grant(asked.rid, THERE), os.memfd_create("test"))
    sharing.result(WAIT_S)
    lease = LeaseId(asked.rid)
    coordinator.send(Revoke(THERE, lease, "stale"))
    assert coordinator.expect(Ack).asked == "stale"
    coordinator.peer.close()
    _, held, said = coordinator.come_back()
    stated = HeldOnDevice(THERE, lease, POOL, Key("a"), HOST, SIZE_BYTES, stale=True)
    assert (held, said) == ([stated], [])
    (fd,) = coordinator.told_fds[stated]
    assert os.path.samestat(os.fstat(fd), os.fstat(charge.fd))
    client.leases.discharge(charge)
    coordinator.expect(Release)


@pytest.mark.parametrize("committed", [False, True])
def test_a_fill_that_was_lost_is_given_back_before_room_is_asked_for_again(
    coordinator, client, share, committed
):
    """On a full device there is no room for both."""
    inside = []

    def make(gen):
        if gen == THERE and not committed:
            coordinator.peer.close()  # while it is being filled
        inside.append(set(OPEN))
        return Memory(gen)

    sharing, charge = share(make)
    fill(coordinator)
    if committed:
        coordinator.expect(Commit)
        coordinator.peer.close()
    _, held, said = coordinator.come_back()
    assert held == []
    (asked,) = [message for message in said if isinstance(message, Acquire)]
    coordinator.send(Ticket(asked.rid, LATER, Key("a"), FINGERPRINT))
    assert coordinator.expect(Reserve) == Reserve(LATER, SIZE_BYTES)
    assert not OPEN
    coordinator.send(Space(LATER))
    coordinator.expect(Commit)
    coordinator.send(Grant(asked.rid, LATER), os.dup(coordinator.fds[0]))
    assert sharing.result(WAIT_S) is True and inside == [set(), set()]
    client.leases.discharge(charge)
    coordinator.expect(Release)


def test_who_cannot_allocate_gives_the_ticket_back(coordinator, client, share):
    def make(gen):
        raise DeviceOutOfMemory("nothing left")

    sharing, charge = share(make)
    asked = fill(coordinator)
    assert coordinator.expect(Abort).gen == THERE
    coordinator.fail(asked.rid, DeviceOutOfMemory("it said so"))
    with pytest.raises(DeviceOutOfMemory):
        sharing.result(WAIT_S)
    client.leases.discharge(charge)
    coordinator.in_step(client)


def test_what_the_coordinator_does_not_take_is_given_back(coordinator, client, share):
    sharing, charge = share()
    asked = fill(coordinator)
    coordinator.expect(Commit)
    coordinator.fail(asked.rid, SegmentRefused("it is no memory of that device"))
    with pytest.raises(SegmentRefused):
        sharing.result(WAIT_S)
    assert not OPEN
    assert coordinator.expect(Abort).gen == THERE
    client.leases.discharge(charge)
    coordinator.in_step(client)


def test_a_refusal_is_raised_and_the_next_one_may_ask(coordinator, client, share):
    sharing, charge = share()
    asked = coordinator.expect(Acquire)
    coordinator.fail(asked.rid, BudgetExceeded("full", needed_bytes=2, free_bytes=1))
    with pytest.raises(BudgetExceeded):
        sharing.result(WAIT_S)
    client.leases.discharge(charge)
    coordinator.in_step(client)
    again, charge = share(make=None)
    asked = coordinator.expect(Acquire)
    coordinator.send(Grant(asked.rid, THERE), os.memfd_create("test"))
    assert again.result(WAIT_S) is True
    client.leases.discharge(charge)
    coordinator.expect(Release)
