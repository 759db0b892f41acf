"""Pools of devices: who says their limits, what is asked for there, and what the dead leave."""

from __future__ import annotations

import pytest

from coordinator.ledger.events import Free, Offer, Recovered, Remember, Resumed
from coordinator.ledger.lifecycle import POOLS_LIMIT
from coordinator.ledger.recovery import cannot_be
from coordinator.ledger.state import State
from shm_store.keys import generation_id
from shm_store.wire import (
    Ack,
    Acquire,
    Charge,
    Declare,
    Done,
    Fail,
    Flush,
    Flushed,
    Grant,
    HeldCharge,
    Invalidate,
    Limit,
    Receive,
    Revoke,
)
from tests.coordinator.ledger_world import World

GPU = "vram:gpu-1"


def with_device(limit_bytes: int = 100, *sessions: int) -> World:
    world = World()
    world.attach(*(sessions or (1, 2, 3)))
    world.say(1, Declare(GPU, limit_bytes))
    return world


def charge(world: World, session: int, size: int, *, fixed: bool = False, key: str = "m") -> int:
    """CHARGE on the device. Returns the rid, which is the lease once it is granted."""
    rid = world.rid(session)
    world.say(session, Charge(rid, GPU, key, size, 300.0, fixed))
    return rid


def on_device(world: World, session: int, size: int, key: str = "m") -> tuple[str, int]:
    """A charge that was granted: its generation and lease."""
    rid = charge(world, session, size, key=key)
    granted = world.answer(session, rid)
    assert isinstance(granted, Grant)
    return granted.gen, rid


def asked(world: World, session: int) -> list[tuple[str, str]]:
    return [(revoke.gen, revoke.asked) for revoke in world.messages(session, Revoke)]


class TestRefusals:
    def test_what_others_have_reserved_is_said(self):
        world = with_device(100)
        for session in (2, 3):
            charge(world, session, 30, fixed=True)
        charge(world, 1, 20, fixed=True)
        refused = charge(world, 1, 60)
        world.wait_until(400.0)
        answer = world.answer(1, refused)
        assert (
            isinstance(answer, Fail)
            and "80 B is what processes have reserved" in answer.cause.message
        )


class TestLimits:
    def test_a_device_has_what_the_largest_word_for_it_says(self):
        """Who attaches later finds less free on the device, as others are there by then."""
        world = with_device(100)
        world.say(2, Declare(GPU, 80))
        assert world.ledger.pools[GPU].limit_bytes == 100
        world.say(2, Declare(GPU, 120))
        assert world.ledger.pools[GPU].limit_bytes == 120

    def test_what_was_found_before_counts_though_who_found_it_has_ended(self):
        """Who comes after him finds less what he has left there: memory that is shared."""
        world = with_device(100)
        world.end(1)
        world.say(2, Declare(GPU, 40))
        assert world.ledger.pools[GPU].limit_bytes == 100
        world.say(2, Declare(GPU, 30, budgeted=True))
        assert world.ledger.pools[GPU].limit_bytes == 30
        world.end(2)
        assert world.ledger.pools[GPU].limit_bytes == 100

    def test_what_was_found_before_a_restart_counts_after_it(self):
        world = with_device(100)
        assert world.done(Remember)[-1].found_bytes == {GPU: 100}
        again = World(start_ns=2)
        copy = Offer(generation_id(1, 1), 0, "m", "build:x", 60, pool=GPU)
        again.event(Recovered((copy,), (), patience_s=1.0, found_bytes={GPU: 100}))
        assert again.ledger.pools[GPU].limit_bytes == 100
        again.attach(1)
        again.say(1, Declare(GPU, 40))
        assert again.ledger.pools[GPU].limit_bytes == 100 and again.done(Remember) == []

    @pytest.mark.parametrize("order", [(50, 70), (70, 50)])
    def test_the_least_budget_counts_before_what_the_device_has(self, order):
        world = with_device(100)
        for session, limit_bytes in enumerate(order, 1):
            world.say(session, Declare(GPU, limit_bytes, budgeted=True))
        world.say(3, Declare(GPU, 500))
        assert world.ledger.pools[GPU].limit_bytes == 50

    def test_a_budget_counts_as_long_as_who_set_it_is_there(self):
        world = with_device(100)
        world.say(2, Declare(GPU, 30, budgeted=True))
        world.say(3, Declare(GPU, 40, budgeted=True))
        on_device(world, 1, 25)
        waits = charge(world, 1, 12)
        assert world.answer(1, waits) is None
        world.end(2)
        assert world.ledger.pools[GPU].limit_bytes == 40
        assert isinstance(world.answer(1, waits), Grant)
        world.disconnect(3)
        assert world.ledger.pools[GPU].limit_bytes == 100
        world.end(1)
        assert world.ledger.pools[GPU].limit_bytes == 100, "nobody says anything else"

    def test_of_one_session_the_last_word_counts(self):
        world = with_device(100)
        for limit_bytes in (30, 50):
            world.say(2, Declare(GPU, limit_bytes, budgeted=True))
        assert world.ledger.pools[GPU].limit_bytes == 50

    def test_what_an_operator_sets_counts_before_all_and_is_remembered(self):
        world = with_device(100)
        world.say(2, Limit(world.rid(2), GPU, 60))
        world.say(3, Declare(GPU, 20, budgeted=True))
        assert world.ledger.pools[GPU].limit_bytes == 60
        assert world.done(Remember)[-1].limits_bytes == {"ram": 1000, GPU: 60}

    def test_it_may_be_limited_before_anybody_uses_it(self):
        world = World()
        world.attach(1)
        world.say(1, Limit(world.rid(1), GPU, 60))
        assert world.messages(1, Done) and world.ledger.pools[GPU].limit_bytes == 60
        world.say(1, Declare(GPU, 100))
        assert world.ledger.pools[GPU].limit_bytes == 60

    def test_a_limit_of_before_a_restart_is_there_before_the_device_is(self):
        world = World(start_ns=2)
        world.event(Recovered((), (), patience_s=1.0, limits_bytes={GPU: 60, "gone": 5}))
        world.attach(1)
        world.say(1, Declare(GPU, 100))
        assert {name: pool.limit_bytes for name, pool in world.ledger.pools.items()} == {
            "ram": 1000,
            GPU: 60,
        }

    @pytest.mark.parametrize("name", ["ram", "disk", "vram:\n", "x" * 100])
    def test_nothing_else_can_be_declared(self, name):
        world = with_device()
        world.say(2, Declare(name, 1))
        assert set(world.ledger.pools) == {"ram", GPU}
        assert world.ledger.pools["ram"].limit_bytes == 1000

    def test_one_peer_cannot_fill_the_table_of_pools(self):
        world = with_device()
        for number in range(2 * POOLS_LIMIT):
            world.say(2, Declare(f"vram:{number}", 1))
        assert len(world.ledger.pools) == POOLS_LIMIT
        told = Declare("vram:one-too-many", 1)
        assert cannot_be(world.ledger, 2, (), (), (), (told,)) is not None
        assert cannot_be(world.ledger, 2, (), (), (), (Declare("ram2", 1),)) is not None


class TestRoom:
    def test_the_smallest_that_suffices_is_asked_for(self):
        world = with_device(100)
        large, _ = on_device(world, 1, 60, "large")
        small, _ = on_device(world, 2, 20, "small")
        charge(world, 3, 40)
        assert asked(world, 2) == [(small, "room")] and asked(world, 1) == []
        assert world.state(large) is State.READY

    def test_what_is_not_needed_beside_a_large_one_is_left_alone(self):
        """Smallest first alone would empty the device."""
        world = with_device(100)
        large, _ = on_device(world, 1, 60, "large")
        on_device(world, 2, 20, "small")
        charge(world, 3, 80)
        assert asked(world, 1) == [(large, "room")] and asked(world, 2) == []

    def test_who_is_in_use_says_so_and_the_next_is_asked(self):
        world = with_device(100)
        large, large_lease = on_device(world, 1, 60, "large")
        small, lease = on_device(world, 2, 40, "small")
        rid = charge(world, 3, 30)
        world.say(2, Ack(small, lease, "room"))
        assert asked(world, 1) == [(large, "room")]
        world.release(1, large, large_lease)
        assert isinstance(world.answer(3, rid), Grant)

    def test_what_is_fixed_is_never_asked_for(self):
        world = with_device(100)
        charge(world, 1, 60, fixed=True)
        rid = charge(world, 2, 60)
        assert asked(world, 1) == []
        world.wait_until(300.0)
        assert world.failure(2, rid) == "budget_exceeded"

    def test_what_its_own_process_reserved_can_never_make_room_for_it(self):
        world = with_device(100)
        charge(world, 1, 60, fixed=True)
        rid = charge(world, 1, 60)
        refusal = world.answer(1, rid)
        assert isinstance(refusal, Fail)
        assert "60 B is what its own process has reserved" in refusal.cause.message

    def test_ram_goes_by_age_as_before(self):
        world = World(limit_bytes=100)
        world.attach(1, 2, 3)
        old, _ = world.have(1, "old", size=60)
        world.now_s = 1.0
        world.have(2, "new", size=20, file="f2")
        world.load(3, "third", file="f3")
        world.reserve(world.newest(), 60)
        assert (old, "room") in asked(world, 1) and not asked(world, 2)


class TestCopies:
    """Weights that are on a device alone: their process leases none on the host, and is to hear."""

    def copy(self, world: World, session: int, of: str, key: str = "k") -> tuple[str, int]:
        rid = world.rid(session)
        world.say(session, Charge(rid, GPU, key, 40, 300.0, False, of))
        granted = world.answer(session, rid)
        assert isinstance(granted, Grant)
        return granted.gen, rid

    def test_newer_weights_retire_them(self):
        world = with_device(200)
        old, lease = world.have(1, "k")
        copy, _ = self.copy(world, 1, old)
        self.copy(world, 2, "0000000000000009-00000001", "other")
        world.release(1, old, lease)
        new, _ = world.have(2, "k", file="f2")
        assert asked(world, 1) == [(copy, "stale")] and asked(world, 2) == []
        again, _ = self.copy(world, 2, new)
        assert world.state(again) is State.READY and asked(world, 2) == []

    def test_an_invalidate_waits_until_its_process_knows(self):
        world = with_device(200)
        old, lease = world.have(1, "k")
        copy, copied = self.copy(world, 1, old)
        world.release(1, old, lease)
        rid = world.rid(3)
        world.say(3, Invalidate(rid, "k", 30.0))
        assert asked(world, 1) == [(copy, "stale")] and not world.messages(3, Done)
        world.say(1, Ack(copy, copied, "stale"))
        assert world.messages(3, Done) == [Done(rid, ("k",))]

    def test_one_that_comes_back_hears_what_it_has_missed(self):
        world = with_device(200)
        old, lease = world.have(1, "k")
        copy, copied = self.copy(world, 1, old)
        world.release(1, old, lease)
        world.disconnect(1)
        world.have(2, "k", file="f2")
        held = HeldCharge(copy, copied, GPU, "k", 40, False, old)
        world.event(Resumed(1, "w1", "cuda:0", charges=(held,)))
        assert asked(world, 1) == [(copy, "stale")]


class TestDeath:
    def test_its_memory_stays_charged_until_the_device_has_it_back(self):
        world = with_device(100)
        gen, _ = on_device(world, 1, 60)
        rid = charge(world, 2, 60)
        world.end(1)
        assert world.done(Free) == [Free(gen, GPU, 1001)]
        assert world.state(gen) is State.FREEING and world.answer(2, rid) is None
        world.freed(gen)
        assert isinstance(world.answer(2, rid), Grant)

    def test_memory_of_the_host_is_gone_with_its_process(self):
        world = World(limit_bytes=100)
        world.attach(1)
        world.say(1, Charge(world.rid(1), "ram", "m", 60, 300.0))
        world.end(1)
        assert not world.done(Free) and world.ram().in_use_bytes == 0

    def test_a_forked_child_that_comes_late_has_it(self):
        """Its parent had ended before: the books had it on its way out."""
        world = with_device(100)
        gen, _ = on_device(world, 1, 60)
        world.end(1)
        held = HeldCharge(gen, 9, GPU, "m", 60)
        world.attach(7)
        assert cannot_be(world.ledger, 7, (), (), (held,), ()) is None
        world.say(2, Flush(waits := world.rid(2)))
        assert world.messages(2, Flushed) == [Flushed(waits)], "who has it may be a stranger"
        world.event(Resumed(7, "child", "sim:0", charges=(held,)))
        world.freed(gen)  # of before
        assert world.state(gen) is State.READY and world.leases(gen) == {7: 9}
        world.release(7, gen, 9)
        assert world.state(gen) is None and world.ledger.pools[GPU].in_use_bytes == 0


class TestRestart:
    def test_a_session_brings_its_pools_and_what_it_has_there(self):
        world = World(start_ns=2)
        world.event(Recovered((), ((1, 1001),), patience_s=10.0))
        held = HeldCharge("0000000000000001-00000001", 5, GPU, "m", 60, True)
        told = Declare(GPU, 100, budgeted=True)
        assert cannot_be(world.ledger, 1, (), (), (held,), ()) is not None
        assert cannot_be(world.ledger, 1, (), (), (held,), (told,)) is None
        world.event(Resumed(1, "w1", "cuda:0", charges=(held,), devices=(told,)))
        assert world.ledger.pools[GPU].in_use_bytes == 60
        assert world.generation(held.gen).fixed


class TestShared:
    """What goes first of what nobody leases, where devices have copies that all processes share."""

    def copied(self, world: World, session: int, host: str, key: str, size: int = 30) -> str:
        """Have a copy of a generation on the device, which nobody leases any more."""
        rid = world.rid(session)
        world.say(session, Acquire(rid, key, None, host, 300.0, pool=GPU))
        gen = world.newest()
        world.fill(gen, size, session)
        assert world.answer(session, rid) == Grant(rid, gen)
        world.release(session, gen, rid)
        return gen

    def test_on_the_host_what_a_device_has_a_copy_of_goes_last(self):
        """Read anew it would be another generation, and what is there of no use."""
        world = with_device(100)
        kept, goes = world.retain(1, "a", 400), world.retain(1, "b", 400)
        there = self.copied(world, 1, kept, "a")
        world.load(2, "c")
        world.reserve(world.newest(), 500)
        assert (world.state(kept), world.state(goes)) == (State.READY, State.FREEING)
        world.load(2, "d")
        world.reserve(world.newest(), 800)
        world.freed(goes)
        assert world.state(kept) is State.FREEING and world.state(there) is State.READY

    def test_on_a_device_a_copy_of_what_is_gone_goes_first(self):
        world = with_device(100)
        a, lease = world.have(1, "a", 400)
        b = world.retain(1, "b", 400)
        kept, goes = self.copied(world, 1, a, "a", 40), self.copied(world, 1, b, "b", 40)
        world.load(2, "c")
        world.reserve(world.newest(), 500)
        assert world.state(b) is State.FREEING and lease in world.leases(a).values()
        charge(world, 2, 50)
        assert (world.state(kept), world.state(goes)) == (State.READY, State.FREEING)

    def test_it_is_not_received_from_another_process(self):
        """What a device has is mapped by its driver. Torch sends it in its own way."""
        world = with_device(100)
        host, _ = world.have(1, "a", 400)
        there = self.copied(world, 1, host, "a")
        rid = world.rid(2)
        world.say(2, Receive(rid, there))
        answer = world.answer(2, rid)
        assert isinstance(answer, Fail) and answer.cause.code == "resource"
        assert world.leases(there) == {}
