"""A coordinator that follows another: what it finds, what is stated, and what waits for that."""

from __future__ import annotations

import pytest

from coordinator.ledger import status_report
from coordinator.ledger.events import Exit, Offer, Recovered, Resumed, StartLoader
from coordinator.ledger.recovery import cannot_be
from coordinator.ledger.state import State
from shm_store.report import FillReport
from shm_store.wire import (
    Ack,
    Done,
    Drain,
    Evict,
    Grant,
    HeldCharge,
    Invalidate,
    Pin,
    Progress,
    Revoke,
)
from tests.coordinator.ledger_world import World

OLD = "0000000000000001-0000000"
"""What the ids of the earlier coordinator begin with."""


def offer(number: int, key: str = "a", *, file: str = "f1", size: int = 300, **facts) -> Offer:
    return Offer(f"{OLD}{number}", facts.pop("lease", 0), key, f"file:{file}", size, **facts)


def recovered(*segments: Offer, sessions: tuple[int, ...] = (), **facts) -> World:
    """A world after a restart, in which sessions are awaited, with the pids 1000 and up."""
    world = World(start_ns=2)
    known = tuple((session, 1000 + session) for session in sessions)
    world.rids = dict.fromkeys(sessions, 100)
    world.event(Recovered(segments, known, patience_s=10.0, **facts))
    return world


def resume(world: World, session: int, **held) -> None:
    world.event(Resumed(session, f"w{session}", "cpu", **held))


class TestWhatIsFound:
    def test_it_is_ready_at_once_and_charged(self):
        world = recovered(offer(1))
        world.attach(7)
        assert world.answer(7, world.load(7, "a")) == Grant(1, f"{OLD}1")
        assert world.ram().in_use_bytes == 300

    def test_of_two_of_one_key_the_newer_is_ready(self):
        """The coordinator died between keeping the new and letting go of the old."""
        world = recovered(offer(1), offer(2), sessions=(1,))
        assert (world.state(f"{OLD}1"), world.state(f"{OLD}2")) == (State.RETIRED, State.READY)
        resume(world, 1)
        assert world.state(f"{OLD}1") is State.FREEING

    def test_pins_limits_and_the_drain_go_on(self):
        world = recovered(offer(1), pins=("a",), limits_bytes={"ram": 555, "gone": 1})
        assert world.ram().limit_bytes == 555
        world.attach(7)
        world.load(7, "b", file="f2")
        world.reserve(world.newest(), 300)
        assert world.state(f"{OLD}1") is State.READY, "it is pinned"
        assert world.failure(7, 1) == "budget_exceeded"
        draining = recovered(offer(1), draining=True)
        draining.attach(7)
        assert draining.failure(7, draining.load(7, "a")) == "draining"


class TestAwaited:
    def test_ready_weights_are_granted_and_no_byte_is_admitted(self):
        world = recovered(offer(1), sessions=(1,))
        world.attach(7)
        assert isinstance(world.answer(7, world.load(7, "a")), Grant)
        waits = world.load(7, "b", file="f2")
        assert not world.done(StartLoader), "an awaited session may have it"
        resume(world, 1)
        (start,) = world.done(StartLoader)
        assert (start.key, start.rid) == ("b", waits)

    def test_a_ticket_waits_too(self):
        world = recovered(sessions=(1,))
        world.attach(7)
        rid = world.build(7, "b")
        assert world.ticket(7, rid) is None
        world.end(1)
        assert world.ticket(7, rid) is not None

    def test_nothing_is_freed_until_all_have_spoken(self):
        """The session that has not may have it mapped."""
        world = recovered(offer(1), offer(2, "b"), sessions=(1, 2))
        world.attach(7)
        world.say(7, Invalidate(world.rid(7), "a", 5.0))
        assert world.state(f"{OLD}1") is State.RETIRED
        world.say(7, Evict(world.rid(7), "b"))
        assert world.state(f"{OLD}2") is State.READY
        resume(world, 1)
        assert world.state(f"{OLD}1") is State.RETIRED
        resume(world, 2, maps=(offer(1, lease=3),))
        assert world.leases(f"{OLD}1") == {2: 3}
        world.release(2, f"{OLD}1", 3)
        assert world.state(f"{OLD}1") is State.FREEING

    def test_an_invalidate_reaches_what_is_stated_behind_it(self):
        world = recovered(sessions=(1,), others=True)
        world.attach(7)
        rid = world.rid(7)
        world.say(7, Invalidate(rid, "a", 30.0))
        resume(world, 1, maps=(offer(1, lease=3),), fills=(offer(2, lease=4, sealed=False),))
        assert world.state(f"{OLD}1") is State.RETIRED
        assert world.generation(f"{OLD}2").doomed
        world.say(1, Ack(f"{OLD}1", 3, "stale"))
        world.commit(f"{OLD}2", 1)
        world.sealed(f"{OLD}2")
        world.wait_until(10.0)
        assert not world.messages(7, Done)
        world.say(1, Ack(f"{OLD}2", 4, "stale"))
        assert world.messages(7, Done) == [Done(rid, ("a",))]

    def test_who_never_speaks_is_not_waited_for_longer_than_the_patience(self):
        world = recovered(offer(1), sessions=(1,))
        world.attach(7)
        rid = world.load(7, "b", file="f2")
        world.wait_until(9.0)
        assert not world.done(StartLoader)
        world.wait_until(10.0)
        assert [start.rid for start in world.done(StartLoader)] == [rid]

    def test_a_refusal_names_who_is_awaited(self):
        world = recovered(sessions=(1,))
        world.attach(7)
        rid = world.load(7, "b", file="f2", timeout_s=3.0)
        built = world.build(7, "c", timeout_s=3.0)
        world.wait_until(3.0)
        for late in (rid, built):
            answer = world.answer(7, late)
            assert answer.cause.code == "load_timeout" and "1001" in answer.cause.message

    def test_a_drain_ends_only_when_nobody_can_have_anything(self):
        world = recovered(sessions=(1,))
        world.attach(7)
        rid = world.rid(7)
        world.say(7, Drain(rid, 20.0))
        world.wait_until(15.0)
        assert not world.failure(7, rid)
        world.wait_until(20.0)
        assert world.failure(7, rid) == "drain_incomplete"
        assert "1001" in world.answer(7, rid).cause.message

    def test_a_drain_waits_for_those_whom_nobody_knows(self):
        """Only as long as they are waited for; and one who comes in time is waited for himself."""
        world = recovered(others=True)
        world.attach(7)
        world.say(7, Drain(world.rid(7), 0.5))
        assert not world.done(Exit)
        world.wait_until(1.0)
        assert (
            "a process that was attached before may hold more" in world.answer(7, 1).cause.message
        )
        world.attach(8)
        resume(world, 8, maps=(offer(1, lease=5),))
        world.wait_until(10.0)
        assert world.state(f"{OLD}1") is State.RETIRED and not world.done(Exit)
        alone = recovered(others=True)
        alone.attach(7)
        alone.say(7, Drain(alone.rid(7), 20.0))
        alone.wait_until(10.0)
        assert len(alone.done(Exit)) == 1

    def test_others_may_offer_what_nobody_kept(self):
        """A plain restart: nobody knows who was there."""
        world = recovered(others=True)
        world.attach(7)
        waits = world.load(7, "a")
        world.attach(8)
        resume(world, 8, maps=(offer(1, lease=5),))
        assert world.answer(7, waits) == Grant(waits, f"{OLD}1")
        assert world.leases(f"{OLD}1") == {8: 5, 7: waits}
        assert not world.done(StartLoader)

    @pytest.mark.parametrize("first", [7, 8])
    def test_one_holder_that_has_heard_is_enough(self, first):
        """The coordinator died between two REVOKEs; the last word is that it is retired."""
        world = recovered(others=True)
        world.attach(7, 8)
        for session in (first, 15 - first):
            resume(world, session, maps=(offer(1, lease=session, stale=session == 8),))
        assert world.state(f"{OLD}1") is State.RETIRED
        assert world.leases(f"{OLD}1") == {7: 7, 8: 8}
        assert world.messages(7, Revoke)[-1] == Revoke(f"{OLD}1", 7, "stale")


class TestStatement:
    def test_maps_are_leased_under_the_ids_it_names(self):
        world = recovered(offer(1), sessions=(1,))
        resume(world, 1, maps=(offer(1, lease=42),))
        assert world.leases(f"{OLD}1") == {1: 42}

    def test_what_it_does_not_name_has_ended(self):
        world = World()
        world.attach(1)
        first, lease = world.have(1, "a")
        second, _ = world.have(1, "b", file="f2")
        world.disconnect(1)
        resume(world, 1, maps=(Offer(first, lease, "a", "file:f1", 100),))
        assert world.leases(first) == {1: lease} and world.leases(second) == {}

    def test_a_lease_it_never_heard_of_goes_back_to_the_one_it_has(self):
        """Its GRANT was lost with the connection. S16: what it says of the old id still counts."""
        world = World()
        world.attach(1)
        gen, old = world.have(1, "a")
        world.load(1, "a")
        world.disconnect(1)
        resume(world, 1, maps=(Offer(gen, old, "a", "file:f1", 100),))
        assert world.leases(gen) == {1: old}

    def test_s16_a_release_from_before_is_ignored(self):
        world = World()
        world.attach(1)
        gen, old = world.have(1, "a")
        world.disconnect(1)
        resume(world, 1, maps=(Offer(gen, old, "a", "file:f1", 100),))
        again = world.load(1, "a")
        world.release(1, gen, old)
        assert world.leases(gen) == {1: again}

    def test_what_is_retired_is_said_again(self):
        world = World()
        world.attach(1, 2)
        gen, lease = world.have(1, "a")
        world.disconnect(1)
        world.say(2, Invalidate(world.rid(2), "a", 5.0))
        before = len(world.log)
        resume(world, 1, maps=(Offer(gen, lease, "a", "file:f1", 100),))
        sent = [
            e.message for e in world.log[before:] if isinstance(getattr(e, "message", 0), Revoke)
        ]
        assert sent == [Revoke(gen, lease, "stale")]

    def test_a_charge_goes_on(self):
        world = recovered(sessions=(1,))
        resume(world, 1, charges=(HeldCharge(f"{OLD}1", 5, "ram", "mine", 200),))
        assert world.ram().private_bytes == 200
        world.release(1, f"{OLD}1", 5)
        assert world.ram().in_use_bytes == 0

    @pytest.mark.parametrize(
        ("others", "late", "stale"),
        [(True, False, False), (False, False, False), (True, True, False), (True, False, True)],
    )
    def test_an_unknown_map_is_ready_only_where_nothing_was_kept_and_in_time(
        self, others, late, stale
    ):
        """What was READY would be in the store. Later, something else may have been handed out."""
        world = recovered(sessions=(1,), others=others)
        if late:
            world.wait_until(10.0)
        resume(world, 1, maps=(offer(1, lease=3, stale=stale),))
        ready = others and not late and not stale
        assert world.state(f"{OLD}1") is (State.READY if ready else State.RETIRED)

    def test_of_two_unknown_maps_the_newer_is_ready(self):
        for order in ((1, 2), (2, 1)):
            world = recovered(sessions=(1, 2), others=True)
            for session in order:
                resume(world, session, maps=(offer(session, lease=3),))
            assert world.state(f"{OLD}1") is State.RETIRED
            assert world.state(f"{OLD}2") is State.READY

    def test_an_unknown_map_beside_a_ready_one_is_retired(self):
        world = recovered(offer(2), sessions=(1,))
        resume(world, 1, maps=(offer(1, lease=3),))
        assert world.state(f"{OLD}1") is State.RETIRED


class TestFills:
    def fill(self, number: int = 1, **facts) -> Offer:
        return offer(number, lease=50, sealed=False, **facts)

    def test_it_goes_on_and_serves_those_who_wait(self):
        world = recovered(sessions=(1,))
        world.attach(7)
        waits = world.load(7, "a")
        resume(world, 1, fills=(self.fill(),))
        assert not world.done(StartLoader)
        world.commit(f"{OLD}1", 1)
        world.sealed(f"{OLD}1")
        assert world.answer(1, 50) == Grant(50, f"{OLD}1")
        assert world.answer(7, waits) == Grant(waits, f"{OLD}1")

    def test_the_pace_of_what_another_coordinator_began_is_told_since_it_was_heard_of(self):
        """Else all that was filled before would seem to have come in no time."""
        world = recovered(sessions=(1,))
        resume(world, 1, fills=(self.fill(),))
        gen = self.fill().gen
        for now_s, done_bytes in ((1.0, 200), (2.0, 210)):
            world.now_s = now_s
            world.by_owner(gen, 1, Progress(gen, done_bytes, 300))
        (report,) = status_report(world.ledger, 2.0).generations
        assert report.fill == FillReport(210, 300, 1.0, 10, 9.0)

    def test_committed_before_it_is_answered_now(self):
        world = recovered(offer(1), sessions=(1,))
        resume(world, 1, fills=(offer(1, lease=50),))
        assert world.answer(1, 50) == Grant(50, f"{OLD}1")

    def test_what_its_session_leases_already_is_not_let_go_of_in_between(self):
        """Another thread of it had its grant; the filler's was lost with the connection."""
        world = World()
        world.attach(1, 2)
        rid = world.build(1, "a")
        gen = world.ticket(1, rid)
        world.build(1, "a")
        world.begin_fill(gen, session=1)
        world.build(2, "a", version="newer")  # dooms it
        world.commit(gen, session=1)
        world.sealed(gen)
        assert world.state(gen) is State.RETIRED and 1 in world.leases(gen)
        world.disconnect(1)
        resume(world, 1, fills=(Offer(gen, 50, "a", "build:", 100),))
        assert world.state(gen) is State.RETIRED
        assert world.leases(gen) == {1: 50}
        assert world.answer(1, 50) == Grant(50, gen)

    def test_a_peers_map_proves_that_it_was_committed(self):
        world = recovered(sessions=(1, 2))
        resume(world, 1, fills=(self.fill(),))
        resume(world, 2, maps=(offer(1, lease=9),))
        assert world.state(f"{OLD}1") is State.READY
        assert world.answer(1, 50) == Grant(50, f"{OLD}1")

    def test_over_a_lost_connection_it_serves_its_filler_alone(self):
        """The others were seated again without it."""
        world = World()
        world.attach(1, 2)
        world.build(1, "a")
        waits = world.build(2, "a")
        gen = world.newest()
        world.begin_fill(gen, 100, 1)
        world.disconnect(1)
        assert world.ticket(2, waits) is not None
        resume(world, 1, fills=(Offer(gen, 50, "a", "build:", 100, sealed=False),))
        world.commit(gen, 1)
        world.sealed(gen)
        assert world.answer(1, 50) == Grant(50, gen)
        assert world.state(gen) is State.RETIRED

    def test_what_is_no_more_filled_is_freed(self):
        world = World()
        world.attach(1)
        world.build(1, "a")
        gen = world.newest()
        world.begin_fill(gen, 100, 1)
        world.disconnect(1)
        resume(world, 1)
        assert world.state(gen) is State.FREEING

    def test_of_two_the_newer_will_be_ready(self):
        for order in ((1, 2), (2, 1)):
            world = recovered(sessions=(1, 2))
            for session in order:
                resume(world, session, fills=(self.fill(session, file=f"f{session}"),))
            for session in order:
                world.commit(f"{OLD}{session}", session)
                world.sealed(f"{OLD}{session}")
            assert world.state(f"{OLD}1") is State.RETIRED
            assert world.state(f"{OLD}2") is State.READY

    def test_one_that_was_overtaken_is_doomed(self):
        world = recovered(offer(2), sessions=(1,))
        resume(world, 1, fills=(self.fill(1, file="f0"),))
        assert world.generation(f"{OLD}1").doomed

    def test_that_of_another_process_is_not_taken(self):
        world = recovered(sessions=(1, 2))
        resume(world, 1, fills=(self.fill(),))
        for session in (2, None):
            lie = cannot_be(world.ledger, session, (), (self.fill(),), ())
            assert lie == f"{OLD}1 is filled by another process"
        assert cannot_be(world.ledger, 1, (), (self.fill(),), ()) is None


def test_pinned_weights_stay_pinned_for_who_comes_back():
    world = recovered(offer(1), sessions=(1,))
    world.attach(7)
    world.say(7, Pin(world.rid(7), "a"))
    resume(world, 1)
    assert world.generation(f"{OLD}1").retained and world.ledger.pinned(world.generation(f"{OLD}1"))
