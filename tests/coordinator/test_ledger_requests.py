"""Requests in the ledger: each gets one final answer, and may be given up."""

from __future__ import annotations

import pytest

from coordinator.ledger.admission import OPEN_REQUESTS_LIMIT
from coordinator.ledger.state import State
from shm_store.wire import Acquire, Filling, Grant, Progress
from tests.coordinator.ledger_world import Back, Forget, Free, SendSpace, StartLoader, World


def test_one_fill_serves_everyone_who_asked_meanwhile():
    """Single flight: three askers, one loader, one generation, three leases."""
    world = World()
    world.attach(1, 2, 3)
    rids = {session: world.load(session, "k") for session in (1, 2, 3)}
    assert len(world.done(StartLoader)) == 1
    gen = world.newest()
    world.fill(gen, 100)
    assert [world.answer(session, rid) for session, rid in rids.items()] == [
        Grant(1, gen),
        Grant(1, gen),
        Grant(1, gen),
    ]
    assert world.leases(gen) == {1: 1, 2: 1, 3: 1}
    assert world.ram().leased_bytes == world.ram().in_use_bytes == 100


def test_a_hit_is_granted_at_once_and_charges_nothing_more():
    world = World()
    world.attach(1, 2)
    gen, _ = world.have(1, "k", 400)
    rid = world.load(2, "k")
    assert world.answer(2, rid) == Grant(rid, gen)
    assert world.ram().in_use_bytes == 400


def test_a_disconnect_drops_what_waits_and_forgets_a_session_that_holds_nothing():
    world = World()
    world.attach(1, 2)
    world.load(1, "k")
    gen = world.newest()
    rid = world.load(2, "k")
    world.disconnect(1)
    assert 1 not in world.ledger.sessions
    assert [effect.session for effect in world.done(Forget)] == [1]
    world.fill(gen)
    assert world.leases(gen) == {2: rid}
    assert world.answers(1, 1) == []


def test_a_replayed_or_lower_request_id_is_dropped():
    """Rule 4: ids of one process only rise."""
    world = World()
    world.attach(1)
    rid = world.load(1, "k")
    for replay in (rid, rid - 1):
        world.say(1, Acquire(replay, "other", "/o", "", 1.0), "file:o")
    assert len(world.done(StartLoader)) == 1
    assert len(world.ledger.requests) == 1


def test_cancel_of_a_waiter_is_answered_once_and_the_fill_goes_on_for_the_others():
    """Rule 5."""
    world = World()
    world.attach(1, 2)
    world.load(1, "k")
    gen = world.newest()
    waiting = world.load(2, "k")
    world.cancel(2, waiting)
    world.cancel(2, waiting)
    assert world.failure(2, waiting) == "cancelled"
    world.fill(gen)
    assert world.leases(gen) == {1: 1}


def test_cancel_after_the_grant_changes_nothing():
    world = World()
    world.attach(1)
    gen, lease = world.have(1, "k")
    world.cancel(1, lease)
    assert world.leases(gen) == {1: lease}


def test_cancel_of_an_open_ticket_hands_it_to_the_next():
    """Rule 5, S13: nothing reserved, the waiter is promoted at once."""
    world = World()
    world.attach(1, 2)
    first, second = world.build(1, "k"), world.build(2, "k")
    old = world.ticket(1, first)
    assert world.ticket(2, second) is None
    world.cancel(1, first)
    new = world.ticket(2, second)
    assert world.failure(1, first) == "cancelled"
    assert new is not None and new != old
    assert world.ram().in_use_bytes == 0
    world.fill(new, 100, session=2)
    assert world.answer(2, second) == Grant(second, new)


def test_cancel_of_a_reserved_ticket_waits_for_the_abort():
    """Rule 5: from RESERVED on a cancel changes nothing, and the unwanted SPACE is aborted."""
    world = World()
    world.attach(1)
    rid = world.build(1, "k")
    gen = world.ticket(1, rid)
    world.reserve(gen, 100, session=1)
    world.cancel(1, rid)
    assert world.answer(1, rid) is None and world.state(gen) is State.RESERVED
    world.backed(gen)
    world.abort(gen, session=1)
    assert world.failure(1, rid) == "cancelled"
    assert world.state(gen) is State.FREEING and world.ram().freeing_bytes == 100
    world.freed(gen)
    assert world.ram().in_use_bytes == 0


@pytest.mark.parametrize("moment", ["open", "reserved", "filling"])
def test_a_source_nobody_waits_for_any_more_ends_unless_it_is_filling(moment):
    """Rule 6: OPEN and RESERVED loaders are ended; one that fills finishes and is retained."""
    world = World()
    world.attach(1)
    rid = world.load(1, "k")
    gen = world.newest()
    if moment != "open":
        world.reserve(gen, 100)
    if moment == "filling":
        world.backed(gen)
    world.cancel(1, rid)
    assert world.failure(1, rid) == "cancelled"
    if moment == "filling":
        world.commit(gen)
        world.sealed(gen)
        assert world.state(gen) is State.READY and world.ram().retained_bytes == 100
    else:
        assert [effect.gen for effect in world.done(Free)] == [gen]
        assert world.ram().freeing_bytes == (100 if moment == "reserved" else 0)
        assert world.state(gen) is (State.FREEING if moment == "reserved" else None)


def test_an_unasked_fill_that_stands_still_is_ended():
    world = World()
    world.attach(1)
    rid = world.load(1, "k", timeout_s=1000.0)
    gen = world.newest()
    world.begin_fill(gen)
    world.cancel(1, rid)
    world.now_s = 200.0
    world.by_owner(gen, None, Progress(gen, 10, 100))
    world.wait_until(499.0)
    assert world.state(gen) is State.FILLING
    world.wait_until(501.0)
    assert world.state(gen) is State.FREEING


def test_those_who_wait_hear_of_progress():
    world = World()
    world.attach(1, 2)
    world.load(1, "k")
    world.load(2, "k")
    gen = world.newest()
    effects = world.begin_fill(gen)
    assert [type(effect) for effect in effects] == [SendSpace]
    effects = world.by_owner(gen, None, Progress(gen, 40, 100))
    assert [effect.message for effect in effects] == [Filling(1, 40, 100), Filling(1, 40, 100)]
    assert world.by_owner(gen, None, Progress(gen, 40, 100)) == []


def test_one_session_cannot_have_requests_without_end():
    """Each costs a little of every deadline's search: a flood would slow down all others."""
    world = World()
    world.attach(1, 2)
    rids = [world.build(1, f"k{number}") for number in range(OPEN_REQUESTS_LIMIT + 1)]
    assert world.answer(1, rids[-2]) is None
    assert world.failure(1, rids[-1]) == "resource"
    other = world.build(2, "k")
    assert world.ticket(2, other) is not None
    world.abort(world.ticket(1, rids[0]), session=1)
    again = world.build(1, "again")
    assert world.ticket(1, again) is not None


def test_a_key_that_is_no_key_is_refused_by_name():
    world = World()
    world.attach(1)
    rid = world.load(1, "bad\nkey")
    assert world.failure(1, rid) == "key_refused"
    assert world.ledger.generations == {} and world.done(Back) == []


def test_who_is_promoted_has_waited_already_and_is_refused_in_time_with_the_reason():
    """Its process waits no longer than its timeout in all, and would not hear who has the room."""
    world = World(limit_bytes=100)
    world.attach(1, 2, 3)
    world.have(3, "held", 60)
    first = world.build(1, "k", timeout_s=2.5)
    world.reserve(world.ticket(1, first), 60, 1)
    world.wait_until(1.0)
    second = world.build(2, "k", timeout_s=2.5)
    world.wait_until(2.5)
    assert world.failure(1, first) == "budget_exceeded"
    assert world.answer(2, second) is None
    world.reserve(world.ticket(2, second), 60, 2)
    world.wait_until(3.5)
    assert world.failure(2, second) == "budget_exceeded"
    assert [holder.key for holder in world.answer(2, second).cause.error().holders] == ["held"]


def test_a_new_generation_is_no_progress():
    """Else who waits for loaders that die would be answered after its process has given up."""
    world = World()
    world.attach(1, 2)
    rids = {session: world.load(session, "k", timeout_s=2.5) for session in (1, 2)}
    world.wait_until(2.0)
    world.loader_ended(world.newest(), "was killed by signal 9")
    assert [world.answer(session, rid) for session, rid in rids.items()] == [None, None]
    world.wait_until(2.5)
    for session, rid in rids.items():
        assert world.failure(session, rid) == "load_timeout"
