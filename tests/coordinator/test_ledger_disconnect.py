"""A worker that loses its connection while it holds a ticket, and lives on."""

from __future__ import annotations

import pytest

from coordinator.ledger import status_report
from coordinator.ledger.state import State
from shm_store.wire import Grant
from tests.coordinator.ledger_world import World


@pytest.mark.parametrize("reserved", [False, True], ids=["open", "reserved"])
def test_a_ticket_without_bytes_is_given_back_with_the_connection(reserved):
    """The process may live on for ever; the key must not wait for it."""
    world = World()
    world.attach(1, 2)
    gen = world.ticket(1, world.build(1, "k"))
    if reserved:
        world.reserve(gen, 100, session=1)
    second = world.build(2, "k")
    world.disconnect(1)
    assert world.state(gen) is (State.FREEING if reserved else None)
    assert world.ticket(2, second) is not None
    assert 1 not in world.ledger.sessions, "it holds nothing"


def test_a_ticket_that_waits_for_room_is_given_back_with_the_connection():
    world = World(limit_bytes=100)
    world.attach(1, 2)
    world.have(2, "other", 100)
    gen = world.ticket(1, world.build(1, "k"))
    world.reserve(gen, 50, session=1)
    world.disconnect(1)
    assert world.ledger.pools["ram"].queue == []
    assert world.state(gen) is None


def test_a_fill_with_bytes_stays_counted_over_a_lost_connection_and_wedges_nobody():
    """Rule 1: the process may still map the bytes; who waits for them starts over without it."""
    world = World()
    world.attach(1, 2)
    first = world.build(1, "k")
    gen = world.ticket(1, first)
    world.begin_fill(gen, session=1)
    second = world.build(2, "k")
    world.disconnect(1)
    assert world.state(gen) is State.FILLING and world.ram().in_use_bytes == 100
    successor = world.ticket(2, second)
    assert successor is not None
    world.fill(successor, session=2)
    assert world.answer(2, second) == Grant(second, successor)
    assert world.state(gen) is State.FILLING, "its process lives"
    world.end(1)
    assert world.state(gen) is State.FREEING and world.answer(1, first) is None


def test_a_lost_connection_after_commit_changes_nothing_of_the_fill():
    world = World()
    world.attach(1, 2)
    first, second = world.build(1, "k"), world.build(2, "k")
    gen = world.ticket(1, first)
    world.begin_fill(gen, session=1)
    world.commit(gen, session=1)
    world.disconnect(1)
    world.sealed(gen)
    assert world.answer(2, second) == Grant(second, gen)
    assert world.state(gen) is State.READY and world.leases(gen) == {2: second}


def test_the_filler_of_a_generation_is_named():
    world = World()
    world.attach(1)
    gen = world.ticket(1, world.build(1, "k"))
    world.begin_fill(gen, session=1)
    world.load(1, "loaded")
    filled_by = {g.key: g.filled_by for g in status_report(world.ledger, 0.0).generations}
    assert filled_by == {"k": 1001, "loaded": None}
    world.disconnect(1)
    assert status_report(world.ledger, 0.0).generations[0].filled_by == 1001


@pytest.mark.parametrize("with_bytes", [False, True], ids=["open", "filling"])
def test_a_lost_owner_counts_as_a_dead_one(with_bytes):
    """A process that dies closes its socket first. A build that kills must not go on to all."""
    world = World()
    world.attach(1, 2, 3, 4)
    rids = {session: world.build(session, "k") for session in (1, 2, 3, 4)}
    for session in (1, 2):
        gen = world.ticket(session, rids[session])
        if with_bytes:
            world.begin_fill(gen, session=session)
        world.disconnect(session)
        world.end(session)
    assert world.ticket(3, rids[3]) is None
    assert {world.failure(session, rids[session]) for session in (3, 4)} == {"fill_failed"}
