"""RECEIVE in the ledger: a lease on what another process has sent, by its generation."""

from __future__ import annotations

import pytest

from coordinator.ledger.events import Send
from coordinator.ledger.state import State
from shm_store.wire import Charge, Fail, Grant, Receive, Revoke
from tests.coordinator.ledger_world import World


def receive(world: World, session: int, gen: str) -> Grant | Fail | None:
    rid = world.rid(session)
    world.say(session, Receive(rid, gen))
    return world.answer(session, rid)


def test_what_is_ready_is_granted_with_its_segment():
    """It is a lease like any other: charged once, and retained after its end."""
    world = World()
    world.attach(1, 2)
    gen, lease = world.have(1, "k")
    answer = receive(world, 2, gen)
    assert answer == Grant(1, gen)
    assert Send(2, answer, gen) in world.log
    assert world.leases(gen) == {1: lease, 2: 1}
    assert world.ram().in_use_bytes == 100
    world.release(1, gen, lease)
    world.release(2, gen, 1)
    assert world.state(gen) is State.READY


def test_what_is_retired_is_granted_and_its_receiver_hears_so():
    """Its sender leases it still. It is freed after the last of both."""
    world = World()
    world.attach(1, 2)
    gen, lease = world.have(1, "k")
    world.have(1, "k", file="f2")
    assert world.state(gen) is State.RETIRED
    answer = receive(world, 2, gen)
    assert answer == Grant(1, gen)
    assert Send(2, Revoke(gen, 1, "stale")) in world.log
    world.release(1, gen, lease)
    assert world.state(gen) is State.RETIRED
    world.release(2, gen, 1)
    assert world.state(gen) is State.FREEING


def test_it_does_not_wait_for_those_who_lack_room():
    """Its sender keeps it until it is received: to wait for its end would be to wait for itself."""
    world = World(limit_bytes=100)
    world.attach(1, 2, 3, 4)
    gen, lease = world.have(1, "k")
    other = world.load(3, "other")
    world.reserve(world.newest(), 50)
    assert world.answer(3, other) is None
    hit = world.load(4, "k")
    assert world.answer(4, hit) is None
    assert receive(world, 2, gen) == Grant(1, gen)
    assert world.leases(gen) == {1: lease, 2: 1}
    assert world.answer(4, hit) is None


@pytest.mark.parametrize("state", ["unknown", "filling", "freeing", "private"])
def test_what_nobody_has_is_refused_and_nothing_changes(state):
    world = World()
    world.attach(1, 2)
    gen = "0000000000000001-0000000000000099"
    if state == "filling":
        world.load(1, "k")
        gen = world.newest()
        world.begin_fill(gen)
    elif state == "freeing":
        gen, lease = world.have(1, "k")
        world.have(1, "k", file="f2")
        world.release(1, gen, lease)
        assert world.state(gen) is State.FREEING
    elif state == "private":
        world.say(1, Charge(world.rid(1), "ram", "k", 40, 1.0))
        gen = world.newest()
    before = {one.id: (one.state, dict(one.leases)) for one in world.ledger.generations.values()}
    answer = receive(world, 2, gen)
    assert isinstance(answer, Fail)
    assert answer.cause.code == "resource"
    after = {one.id: (one.state, dict(one.leases)) for one in world.ledger.generations.values()}
    assert after == before


def test_a_replay_changes_nothing():
    world = World()
    world.attach(1, 2)
    gen, _ = world.have(1, "k")
    assert receive(world, 2, gen) == Grant(1, gen)
    world.release(2, gen, 1)
    world.say(2, Receive(1, gen))
    assert world.answers(2, 1) == [Grant(1, gen)]
    assert 2 not in world.leases(gen)
