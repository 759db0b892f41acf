"""Two fingerprints of one key in the ledger: who is doomed, and when the old one retires."""

from __future__ import annotations

import pytest

from coordinator.ledger.state import State
from shm_store.wire import Grant
from tests.coordinator.ledger_world import StartLoader, World


def test_another_fingerprint_dooms_the_running_fill_but_not_its_askers():
    """Rules 6 and 7: both askers get what they asked for, one generation stays READY."""
    world = World()
    world.attach(1, 2)
    old_rid = world.load(1, "k", file="f1")
    old = world.newest()
    world.begin_fill(old)
    new_rid = world.load(2, "k", file="f2")
    new = world.newest()
    assert new != old and world.generation(old).doomed
    world.commit(old)
    world.sealed(old)
    assert world.answer(1, old_rid) == Grant(old_rid, old)
    assert world.state(old) is State.RETIRED
    world.fill(new, 100)
    assert world.answer(2, new_rid) == Grant(new_rid, new)
    assert world.state(new) is State.READY
    world.release(1, old, old_rid)
    assert world.state(old) is State.FREEING


def test_a_doomed_loader_whose_askers_left_is_ended_though_it_fills():
    world = World()
    world.attach(1, 2)
    rid = world.load(1, "k", file="f1")
    old = world.newest()
    world.begin_fill(old)
    world.load(2, "k", file="f2")
    world.cancel(1, rid)
    assert world.state(old) is State.FREEING


def test_askers_seated_again_doom_nobody():
    """Rule 7: only an arriving request dooms, or two versions end each other's loaders for ever."""
    world = World()
    world.attach(1, 2)
    old_rid = world.load(1, "k", file="f1")
    old = world.newest()
    new_rid = world.load(2, "k", file="f2")
    new = world.newest()
    world.loader_ended(old, "was ended by SIGKILL")
    again = world.newest()
    assert again not in (old, new)
    assert world.generation(again).doomed and not world.generation(new).doomed
    world.fill(new, 100)
    world.fill(again, 100)
    assert world.answer(1, old_rid) == Grant(old_rid, again)
    assert world.answer(2, new_rid) == Grant(new_rid, new)
    assert world.state(new) is State.READY and world.state(again) is State.RETIRED


def test_askers_of_a_doomed_fill_stay_together_when_its_loader_dies():
    """A doomed fill takes no new asker, but those who were seated again share one loader."""
    world = World()
    world.attach(1, 2, 3)
    rids = {session: world.load(session, "k", file="f1") for session in (1, 2)}
    old = world.newest()
    world.load(3, "k", file="f2")
    world.loader_ended(old)
    assert len(world.done(StartLoader)) == 3
    again = world.newest()
    world.fill(again)
    assert world.leases(again) == rids


@pytest.mark.parametrize("doomed", [False, True])
def test_what_is_being_sealed_is_finished_though_nobody_waits_any_more(doomed):
    """Ready, it is retained; doomed, it goes at once."""
    world = World()
    world.attach(1, 2)
    rid = world.load(1, "k", file="f1")
    gen = world.newest()
    world.begin_fill(gen)
    world.commit(gen)
    world.loader_ended(gen, "ended with exit code 0")
    if doomed:
        world.load(2, "k", file="f2")
    world.cancel(1, rid)
    assert world.state(gen) is State.FILLING
    world.sealed(gen)
    assert world.state(gen) is (State.FREEING if doomed else State.READY)


def test_the_ready_generation_retires_in_its_successors_commit():
    """Rule 7: no gap between them."""
    world = World()
    world.attach(1, 2)
    old, lease = world.have(1, "k", file="f1")
    rid = world.load(2, "k", file="f2")
    new = world.newest()
    world.begin_fill(new)
    world.commit(new)
    assert world.state(old) is State.READY
    world.sealed(new)
    assert (world.state(old), world.state(new)) == (State.RETIRED, State.READY)
    assert world.ram().retired_bytes == 100
    assert world.answer(2, rid) == Grant(rid, new)
    world.release(1, old, lease)
    assert world.state(old) is State.FREEING
