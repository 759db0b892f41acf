"""Leases in the ledger, and the bytes they keep charged: who has one, and what alone ends it."""

from __future__ import annotations

import pytest

from coordinator.ledger.events import Attached
from coordinator.ledger.state import State
from tests.coordinator.ledger_world import World


def test_bytes_are_charged_from_reservation_until_freed():
    """Law 3, at every step of one life."""
    world = World()
    world.attach(1)
    world.load(1, "k")
    gen = world.newest()
    charged = [world.ram().in_use_bytes]
    world.reserve(gen, 70)
    charged.append(world.ram().in_use_bytes)
    world.backed(gen)
    world.commit(gen)
    world.sealed(gen)
    charged.append(world.ram().in_use_bytes)
    world.release(1, gen, 1)
    charged.append(world.ram().in_use_bytes)
    world.generation(gen)
    world.load(1, "k", file="f2")
    successor = world.newest()
    world.fill(successor, 30)
    assert world.state(gen) is State.FREEING
    charged.append(world.ram().in_use_bytes)
    world.freed(gen)
    charged.append(world.ram().in_use_bytes)
    assert charged == [0, 70, 70, 70, 100, 30]


@pytest.mark.parametrize("lost", [True, False], ids=["disconnect", "process end"])
def test_only_the_end_of_the_process_ends_its_leases(lost):
    """Rule 1: a process may lose its socket and still map the bytes."""
    world = World()
    world.attach(1, 2)
    gen, lease = world.have(1, "k")
    (world.disconnect if lost else world.end)(1)
    assert world.leases(gen) == ({1: lease} if lost else {})
    assert (1 in world.ledger.sessions) is lost
    world.end(1)
    assert world.leases(gen) == {}
    assert world.state(gen) is State.READY


def test_a_new_grant_replaces_the_lease_id_and_a_late_release_changes_nothing():
    """Rule 2, law 4, S16 without the reconnect."""
    world = World()
    world.attach(1)
    gen, first = world.have(1, "k")
    second = world.load(1, "k")
    assert world.leases(gen) == {1: second}
    world.release(1, gen, first)
    assert world.leases(gen) == {1: second}
    world.release(1, gen, second)
    assert world.leases(gen) == {}
    world.release(1, gen, second)
    assert world.state(gen) is State.READY


def test_a_release_from_before_a_reconnect_leaves_the_new_lease():
    """S16: a late one of the old session, or one that quotes the old lease; even of equal ids."""
    world = World()
    world.attach(1)
    gen, first = world.have(1, "k")
    world.disconnect(1)
    world.rids[2] = 0
    world.event(Attached(2, 1001, "w1", "cpu", "worker"))  # the same process
    second = world.load(2, "k")
    assert second == first and world.leases(gen) == {1: first, 2: second}
    world.release(1, gen, first)
    assert world.leases(gen) == {2: second}
    third = world.load(2, "k")
    world.release(1, gen, third)
    world.release(2, gen, first)
    assert world.leases(gen) == {2: third}
    world.end(1)
    assert world.leases(gen) == {2: third}


def test_a_foreign_or_unknown_release_changes_nothing():
    world = World()
    world.attach(1, 2)
    gen, lease = world.have(1, "k")
    world.release(2, gen, lease)
    world.release(1, "0000000000000009-00000009", lease)
    assert world.leases(gen) == {1: lease}


def test_generation_ids_are_never_reused_and_rise_across_restarts():
    """Rule 22."""
    seen = []
    for start_ns in (5, 6):
        world = World(start_ns=start_ns)
        world.attach(1)
        for file in ("a", "b", "c"):
            world.load(1, "k", file=file)
            seen.append(world.newest())
    assert seen == sorted(set(seen))
