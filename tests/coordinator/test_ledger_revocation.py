"""Room that others hold, private charges, limits and retirement."""

from __future__ import annotations

import pytest

from coordinator.ledger.admission import HELD_LONG_S
from coordinator.ledger.events import Resumed, Send
from coordinator.ledger.eviction import REVOKE_PATIENCE_S
from coordinator.ledger.state import State
from shm_store.wire import (
    Ack,
    Acquire,
    Charge,
    Copied,
    CopiedPages,
    Done,
    Drain,
    Fail,
    Grant,
    HeldCharge,
    Invalidate,
    Limit,
    Pin,
    Revoke,
)
from tests.coordinator.ledger_world import World


def revokes(world: World) -> list[tuple[int, str, str]]:
    """Session, key and what was asked by every REVOKE so far, in order."""
    keys = {gen: generation.key for gen, generation in world.ledger.generations.items()}
    return [
        (effect.session, keys.get(effect.message.gen, "gone"), effect.message.asked)
        for effect in world.log
        if isinstance(effect, Send) and isinstance(effect.message, Revoke)
    ]


def wants(world: World, session: int, key: str, size: int, prefetch: bool = False) -> int:
    """A loader's RESERVE for a new key. Returns the rid."""
    rid = world.rid(session)
    message = Acquire(rid, key, f"/{key}", "", 300.0, prefetch)
    world.say(session, message, f"file:{key}")
    world.reserve(world.newest(), size)
    return rid


def ack(world: World, session: int, gen: str, asked: str = "room", *, idle: bool = False) -> None:
    world.say(session, Ack(gen, world.leases(gen)[session], asked, idle))


def charge(world: World, session: int, size: int, pool: str = "ram") -> tuple[int, str]:
    rid = world.rid(session)
    world.say(session, Charge(rid, pool, "private", size, 300.0))
    return rid, world.newest()


def answers_done(world: World, session: int, rid: int) -> list[Done]:
    return [
        effect.message
        for effect in world.log
        if isinstance(effect, Send)
        and effect.session == session
        and isinstance(effect.message, Done)
        and effect.message.rid == rid
    ]


# --- who is asked ---------------------------------------------------------------------------------


def test_what_is_retained_goes_before_anybody_is_asked():
    world = World()
    world.attach(1, 2)
    world.retain(1, "idle", 500)
    world.have(1, "held", 500)
    wants(world, 2, "new", 400)
    assert revokes(world) == []


def test_fewest_holders_are_asked_first_then_the_longest_granted_and_no_more_than_needed():
    world = World()
    world.attach(1, 2, 3)
    for key in ("shared", "again", "once"):
        world.have(1, key, 300)
    world.load(2, "shared")
    world.now_s = 5.0
    world.load(1, "again")
    wants(world, 3, "new", 350)
    assert revokes(world) == [(1, "once", "room")]


def test_what_is_coming_already_is_not_counted_twice():
    world = World()
    world.attach(1, 2)
    world.have(1, "a", 500)
    world.have(1, "b", 500)
    wants(world, 2, "small", 400)
    world.attach(3)
    assert revokes(world) == [(1, "a", "room")]


def test_a_pinned_one_is_never_asked_for():
    world = World()
    world.attach(1, 2)
    world.have(1, "pinned", 600)
    world.say(1, Pin(world.rid(1), "pinned"))
    world.have(1, "held", 300)
    wants(world, 2, "new", 300)
    assert revokes(world) == [(1, "held", "room")]


def test_a_holder_that_keeps_it_has_the_next_one_asked():
    world = World()
    world.attach(1, 2)
    kept, _ = world.have(1, "a", 500)
    world.now_s = 1.0
    world.have(1, "b", 500)
    wants(world, 2, "new", 400)
    assert revokes(world) == [(1, "a", "room")]
    ack(world, 1, kept)
    assert revokes(world) == [(1, "a", "room"), (1, "b", "room")]


def test_a_holder_that_says_nothing_has_the_next_one_asked_after_a_while():
    """It may be stopped."""
    world = World()
    world.attach(1, 2, 3)
    world.have(1, "a", 500)
    world.have(2, "b", 500)
    wants(world, 3, "new", 400)
    world.wait_until(REVOKE_PATIENCE_S / 2)
    assert revokes(world) == [(1, "a", "room")]
    world.wait_until(REVOKE_PATIENCE_S)
    assert revokes(world) == [(1, "a", "room"), (2, "b", "room")]


def test_a_waiter_that_gives_up_leaves_no_trace():
    """Who was asked for its room keeps what he has."""
    world = World()
    world.attach(1, 2)
    gen, _ = world.have(1, "a", 900)
    waiter = wants(world, 2, "new", 400)
    ack(world, 1, gen)
    world.cancel(2, waiter)
    assert revokes(world) == [(1, "a", "room"), (1, "a", "keep")]
    assert [one.asked for one in world.generation(gen).leases.values()] == [""]
    wants(world, 2, "newer", 400)
    assert revokes(world)[2:] == [(1, "a", "room")]


def test_a_hit_on_what_somebody_uses_for_long_waits_no_longer():
    """It is not going, and one more holder makes no difference."""
    world = World()
    world.attach(1, 2, 3)
    gen, _ = world.have(1, "a", 900)
    wants(world, 2, "new", 400)
    ack(world, 1, gen)
    hit = world.load(3, "a")
    world.wait_until(HELD_LONG_S - 0.1)
    assert world.answer(3, hit) is None
    world.wait_until(HELD_LONG_S)
    assert world.answer(3, hit) == Grant(hit, gen)


# --- of several holders ---------------------------------------------------------------------------


@pytest.fixture
def shared() -> tuple[World, str]:
    """Two hold "a"; a third waits for its room. `World` and the generation."""
    world = World()
    world.attach(1, 2, 3)
    gen, _ = world.have(1, "a", 900)
    world.load(2, "a")
    wants(world, 3, "new", 400)
    return world, gen


def test_several_holders_let_go_only_once_all_have_been_idle(shared):
    """While one uses it, what the others let go of would free nothing."""
    world, gen = shared
    assert revokes(world) == [(1, "a", "idle"), (2, "a", "idle")]
    ack(world, 1, gen, "idle", idle=True)
    ack(world, 2, gen, "idle")
    assert len(revokes(world)) == 2
    ack(world, 2, gen, "idle", idle=True)
    assert revokes(world)[2:] == [(1, "a", "room"), (2, "a", "room")]


def test_the_last_of_several_holders_lets_go_when_it_is_idle(shared):
    world, gen = shared
    ack(world, 2, gen, "idle")
    world.release(1, gen, world.leases(gen)[1])
    assert len(revokes(world)) == 2, "it says when it is not at work any more"
    ack(world, 2, gen, "idle", idle=True)
    assert revokes(world)[2:] == [(2, "a", "room")]


def test_a_holder_that_comes_later_is_asked_too(shared):
    world, gen = shared
    ack(world, 1, gen, "idle", idle=True)
    world.load(2, "a")  # a new lease, not asked yet
    assert revokes(world)[2:] == [(2, "a", "idle")]
    ack(world, 2, gen, "idle", idle=True)
    assert revokes(world)[3:] == [(1, "a", "room"), (2, "a", "room")]


def test_what_a_holder_said_long_ago_is_asked_again(shared):
    """It may have begun to work since, and the other would let go for nothing."""
    world, gen = shared
    ack(world, 1, gen, "idle", idle=True)
    ack(world, 2, gen, "idle")
    world.now_s = 100.0
    ack(world, 2, gen, "idle", idle=True)
    assert revokes(world)[2:] == [(1, "a", "idle")]
    ack(world, 1, gen, "idle")
    assert len(revokes(world)) == 3
    world.now_s = 140.0
    ack(world, 1, gen, "idle", idle=True)
    assert revokes(world)[3:] == [(1, "a", "room"), (2, "a", "room")], "40 s of 140 are not long"


def test_what_was_said_to_one_who_waited_before_counts_for_nothing(shared):
    world, gen = shared
    (waiting,) = [rid for session, rid in world.ledger.requests if session == 3]
    ack(world, 1, gen, "idle", idle=True)
    world.cancel(3, waiting)
    world.now_s = 100.0
    wants(world, 3, "newer", 400)
    ack(world, 2, gen, "idle", idle=True)
    assert revokes(world)[2:] == [(1, "a", "idle")]


def test_who_says_nothing_is_passed_over_and_heard_later(shared):
    world, gen = shared
    ack(world, 1, gen, "idle", idle=True)
    world.wait_until(REVOKE_PATIENCE_S)
    assert world.generation(gen).refused
    ack(world, 2, gen, "idle", idle=True)
    assert revokes(world)[2:] == [(1, "a", "room"), (2, "a", "room")]


def test_who_need_not_be_asked_any_more_is_left_alone(shared):
    """A hit on it waits no longer, either."""
    world, gen = shared
    world.attach(4)
    waits = world.load(4, "a")
    assert world.answer(4, waits) is None
    ack(world, 1, gen, "idle", idle=True)
    ack(world, 2, gen, "idle")
    world.say(3, Limit(world.rid(3), "ram", 2000))
    ack(world, 2, gen, "idle", idle=True)
    assert world.answer(4, waits) is not None
    world.say(3, Limit(world.rid(3), "ram", 1400))
    world.have(3, "small", 50)
    wants(world, 3, "next", 100)
    assert revokes(world)[2:] == [(3, "small", "room")]
    assert {lease.asked for lease in world.generation(gen).leases.values()} == {""}


def test_a_limit_is_lowered_at_once_whenever_they_said_it():
    world = World()
    world.attach(1, 2)
    gen, _ = world.have(1, "a", 900)
    world.load(2, "a")
    world.say(2, Limit(world.rid(2), "ram", 100))
    ack(world, 1, gen, "idle", idle=True)
    world.now_s = 100.0
    ack(world, 2, gen, "idle", idle=True)
    assert revokes(world)[2:] == [(1, "a", "room"), (2, "a", "room")]


def test_a_new_lease_starts_unasked_and_is_asked_again():
    world = World()
    world.attach(1, 2)
    gen, _ = world.have(1, "a", 900)
    wants(world, 2, "new", 400)
    world.load(1, "a")
    assert revokes(world) == [(1, "a", "room")] * 2
    ack(world, 1, gen)


def test_a_late_ack_of_another_lease_or_another_revoke_changes_nothing():
    world = World()
    world.attach(1, 2)
    gen, lease = world.have(1, "a", 900)
    world.say(1, Ack(gen, lease, "room"))  # of nothing
    wants(world, 2, "new", 400)
    world.say(1, Ack(gen, lease + 7, "room"))
    world.say(1, Ack(gen, lease, "stale"))
    world.say(2, Ack(gen, lease, "room"))
    assert [lease.answer for lease in world.generation(gen).leases.values()] == [""]


def test_what_was_asked_for_and_ends_makes_room():
    world = World()
    world.attach(1, 2)
    gen, lease = world.have(1, "a", 900)
    rid = wants(world, 2, "new", 400)
    new = world.newest()
    world.release(1, gen, lease)
    world.freed(gen)
    world.backed(new)
    world.commit(new)
    world.sealed(new)
    assert world.answer(2, rid) == Grant(rid, new)


# --- who waits, and who does not ------------------------------------------------------------------


def test_a_prefetch_asks_nobody_and_waits_behind_every_load():
    world = World()
    world.attach(1, 2)
    gen, lease = world.have(1, "held", 700)
    wants(world, 2, "fetched", 500, prefetch=True)
    fetched = world.newest()
    assert revokes(world) == []
    wants(world, 2, "loaded", 600)
    loaded = world.newest()
    world.release(1, gen, lease)
    world.freed(gen)
    assert world.state(loaded) is State.RESERVED and world.state(fetched) is State.OPEN


def test_a_load_of_what_is_prefetched_makes_it_a_load():
    world = World()
    world.attach(1, 2)
    world.have(1, "held", 700)
    wants(world, 2, "fetched", 500, prefetch=True)
    world.say(1, Acquire(world.rid(1), "fetched", "/fetched", "", 300.0), "file:fetched")
    assert revokes(world) == [(1, "held", "room")]


def test_a_hit_on_what_is_to_go_waits_and_has_it_if_it_stays():
    world = World()
    world.attach(1, 2, 3)
    gen, _ = world.have(1, "a", 900)
    waiting = wants(world, 2, "new", 400)
    hit = world.load(3, "a")
    assert world.answer(3, hit) is None
    world.cancel(2, waiting)
    assert world.answer(3, hit) == Grant(hit, gen)


def test_a_hit_on_what_is_to_go_starts_over_when_it_is_gone():
    world = World()
    world.attach(1, 2, 3)
    gen, lease = world.have(1, "a", 900)
    wants(world, 2, "new", 400)
    hit = world.load(3, "a")
    world.release(1, gen, lease)
    assert world.state(gen) is State.FREEING
    world.freed(gen)
    again = world.newest()
    world.fill(again, 500)
    assert world.answer(3, hit) == Grant(hit, again)


def test_a_hit_that_waits_has_a_deadline_too():
    world = World()
    world.attach(1, 2, 3)
    world.have(1, "a", 900)
    wants(world, 2, "new", 400)
    hit = world.load(3, "a", timeout_s=10.0)
    world.wait_until(10.0)
    answer = world.answer(3, hit)
    assert isinstance(answer, Fail) and answer.cause.code == "budget_exceeded"
    assert "make room for 'new'" in answer.cause.message


# --- private charges ------------------------------------------------------------------------------


def test_a_charge_is_granted_without_a_segment_and_never_matched_by_key():
    world = World()
    world.attach(1, 2)
    rid, gen = charge(world, 1, 300)
    (grant,) = [e for e in world.log if isinstance(e, Send) and isinstance(e.message, Grant)]
    assert (grant.message, grant.segment) == (Grant(rid, gen), None)
    assert (world.ram().private_bytes, world.ram().leased_bytes) == (300, 0)
    world.load(2, "private")
    assert world.newest() != gen
    other, _ = charge(world, 2, 300)
    assert isinstance(world.answer(2, other), Grant)


@pytest.mark.parametrize("end", ["release", "death"])
def test_a_charge_ends_at_once_with_its_lease_and_debits_only_its_class(end):
    """S3."""
    world = World()
    world.attach(1, 2)
    shared, _ = world.have(2, "a", 200)
    rid, gen = charge(world, 1, 300)
    if end == "release":
        world.release(1, gen, rid)
        world.release(1, gen, rid)
    else:
        world.end(1)
    assert world.state(gen) is None and world.state(shared) is State.READY
    assert (world.ram().private_bytes, world.ram().leased_bytes) == (0, 200)


def test_a_charge_that_a_forked_child_has_too_counts_once_until_both_end():
    world = World()
    world.attach(1, 2)
    rid, gen = charge(world, 1, 300)
    held = HeldCharge(gen, 50, "ram", "private", 300)
    world.event(Resumed(2, "child", "cpu", charges=(held,)))
    assert (world.ram().private_bytes, world.leases(gen)) == (300, {1: rid, 2: 50})
    world.end(1)
    assert world.ram().private_bytes == 300
    world.release(2, gen, 50)
    assert world.state(gen) is None and world.ram().private_bytes == 0


def test_a_charge_waits_for_room_and_can_be_given_up():
    world = World()
    world.attach(1, 2)
    held, lease = world.have(1, "a", 900)
    rid, gen = charge(world, 2, 300)
    given_up, _ = charge(world, 2, 50)
    world.cancel(2, given_up)
    assert world.failure(2, given_up) in (None, "cancelled")
    world.release(1, held, lease)
    world.freed(held)
    assert world.answer(2, rid) == Grant(rid, gen)
    too_much, _ = charge(world, 2, 5000)
    assert world.failure(2, too_much) == "budget_exceeded"
    nowhere = world.rid(2)
    world.say(2, Charge(nowhere, "vram", "private", 1, 1.0))
    assert world.failure(2, nowhere) == "argument_refused"


def test_copied_pages_are_charged_to_their_lease_and_end_with_it():
    """Past the limit, if need be: they exist."""
    world = World()
    world.attach(1, 2)
    gen, lease = world.have(1, "a", 900)
    pages = (CopiedPages(1, gen, 300), CopiedPages(2, gen, 100), CopiedPages(1, "none", 100))
    rid = world.rid(2)
    world.say(2, Copied(rid, pages))
    assert answers_done(world, 2, rid)
    assert (world.ram().private_bytes, world.ram().in_use_bytes) == (300, 1200)
    world.say(2, Copied(world.rid(2), (CopiedPages(1, gen, 100),)))
    assert world.ram().in_use_bytes == 1000
    world.load(1, "a")
    assert world.ram().private_bytes == 100, "the map is the same"
    world.release(1, gen, lease)
    world.release(1, gen, world.leases(gen)[1])
    assert world.ram().in_use_bytes == 900 and world.ram().private_bytes == 0


# --- limits, retirement, drain --------------------------------------------------------------------


def test_a_lowered_limit_evicts_what_is_idle_asks_for_the_rest_and_admits_nothing():
    """Rule 15."""
    world = World()
    world.attach(1, 2)
    idle = world.retain(1, "idle", 300)
    gen, lease = world.have(1, "held", 500)
    rid = world.rid(2)
    world.say(2, Limit(rid, "ram", 400))
    assert answers_done(world, 2, rid)
    assert world.state(idle) is State.FREEING and revokes(world) == [(1, "held", "room")]
    waiting = wants(world, 2, "new", 100)
    world.freed(idle)
    assert world.answer(2, waiting) is None and world.ram().in_use_bytes == 500
    never = wants(world, 2, "more", 450)
    assert world.failure(2, never) == "budget_exceeded"
    world.release(1, gen, lease)
    world.freed(gen)
    assert world.state(world.generation(world.newest()).id) is State.RESERVED


def test_a_limit_of_an_unknown_pool_is_refused():
    world = World()
    world.attach(1)
    rid = world.rid(1)
    world.say(1, Limit(rid, "vram", 1))
    assert world.failure(1, rid) == "argument_refused"


def test_invalidate_is_answered_when_every_holder_has_heard():
    """Rule 9."""
    world = World()
    world.attach(1, 2, 3)
    gen, _ = world.have(1, "a")
    world.load(2, "a")
    rid = world.rid(3)
    world.say(3, Invalidate(rid, "a", 10.0))
    assert world.state(gen) is State.RETIRED
    assert revokes(world) == [(1, "a", "stale"), (2, "a", "stale")]
    ack(world, 1, gen, "stale")
    assert answers_done(world, 3, rid) == []
    world.end(2)
    assert answers_done(world, 3, rid) == [Done(rid, ("a",))]
    again = world.load(3, "a")
    assert world.answer(3, again) is None and world.newest() != gen


def test_invalidate_names_at_its_deadline_who_has_not_heard():
    world = World()
    world.attach(1, 2)
    gen, _ = world.have(1, "a")
    rid = world.rid(2)
    world.say(2, Invalidate(rid, "a", 10.0))
    world.wait_until(10.0)
    answer = world.answer(2, rid)
    assert isinstance(answer, Fail) and answer.cause.code == "invalidate_incomplete"
    assert [holder.generation for holder in answer.cause.holders] == [gen]
    assert world.state(gen) is State.RETIRED


def test_invalidate_of_nothing_is_nothing():
    world = World()
    world.attach(1)
    rid = world.rid(1)
    world.say(1, Invalidate(rid, "a", 10.0))
    assert answers_done(world, 1, rid) == [Done(rid, ())]


def test_a_doomed_fill_tells_those_it_serves_that_it_is_retired():
    world = World()
    world.attach(1, 2)
    old = world.load(1, "a", file="f1")
    gen = world.newest()
    world.load(2, "a", file="f2")
    world.fill(gen)
    assert isinstance(world.answer(1, old), Grant)
    assert revokes(world) == [(1, "a", "stale")]


def test_drain_asks_for_everything():
    world = World()
    world.attach(1, 2)
    gen, lease = world.have(1, "a", 200)
    rid, private = charge(world, 1, 100)
    drained = world.rid(2)
    world.say(2, Drain(drained, 60.0))
    assert sorted(revokes(world)) == [(1, "a", "stale"), (1, "private", "stale")]
    world.release(1, gen, lease)
    world.freed(gen)
    world.release(1, private, rid)
    assert answers_done(world, 2, drained)


def test_an_audit_that_lies_charges_no_more_than_there_is():
    world = World()
    world.attach(1, 2)
    gen, _ = world.have(1, "a", 300)
    world.say(2, Copied(world.rid(2), (CopiedPages(1, gen, 1 << 50),)))
    assert world.ram().in_use_bytes == 600


def test_an_invalidate_waits_for_no_prefetch_which_may_wait_for_room_for_ever():
    world = World()
    world.attach(1, 2, 3)
    world.have(1, "held", 900)
    wants(world, 2, "fetched", 500, prefetch=True)
    rid = world.rid(3)
    world.say(3, Invalidate(rid, "fetched", 10.0))
    assert answers_done(world, 3, rid) == [Done(rid, ("fetched",))]


def test_prefetches_and_invalidations_are_bounded():
    world = World()
    world.attach(1, 2)
    gen, _ = world.have(1, "held", 1000)
    rids = [wants(world, 2, f"p{number}", 100, prefetch=True) for number in range(64)]
    over = world.rid(2)
    world.say(2, Acquire(over, "more", "/more", "", 300.0, True), "file:more")
    assert world.failure(2, over) == "resource" and world.failure(2, rids[-1]) is None
    hit = world.load(2, "held")
    assert world.answer(2, hit) == Grant(hit, gen)
    for _ in range(64):
        world.say(2, Invalidate(world.rid(2), "held", 10.0))
    last = world.rid(2)
    world.say(2, Invalidate(last, "held", 10.0))
    assert world.failure(2, last) == "resource"
