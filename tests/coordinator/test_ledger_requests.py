"""Leases, requests and fills in the ledger: rules 1 to 8 of the protocol."""

from __future__ import annotations

import pytest

from coordinator.ledger.admission import OPEN_REQUESTS_LIMIT
from coordinator.ledger.state import State
from shm_store.errors import SourceMalformed
from shm_store.wire import Acquire, Cause, Fail, Filling, Grant, Progress
from tests.coordinator.ledger_world import Back, Forget, Free, Seal, SendSpace, StartLoader, World


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


def test_a_foreign_or_unknown_release_changes_nothing():
    world = World()
    world.attach(1, 2)
    gen, lease = world.have(1, "k")
    world.release(2, gen, lease)
    world.release(1, "0000000000000009-00000009", lease)
    assert world.leases(gen) == {1: lease}


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
    world.reserve(gen, 100)
    world.backed(gen)
    world.cancel(1, rid)
    world.now_s = 200.0
    world.by_owner(gen, None, Progress(gen, 10, 100))
    world.wait_until(499.0)
    assert world.state(gen) is State.FILLING
    world.wait_until(501.0)
    assert world.state(gen) is State.FREEING


def test_another_fingerprint_dooms_the_running_fill_but_not_its_askers():
    """Rules 6 and 7: both askers get what they asked for, one generation stays READY."""
    world = World()
    world.attach(1, 2)
    old_rid = world.load(1, "k", file="f1")
    old = world.newest()
    world.reserve(old, 100)
    world.backed(old)
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
    world.reserve(old, 100)
    world.backed(old)
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
    world.reserve(gen, 100)
    world.backed(gen)
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
    world.reserve(new, 100)
    world.backed(new)
    world.commit(new)
    assert world.state(old) is State.READY
    world.sealed(new)
    assert (world.state(old), world.state(new)) == (State.RETIRED, State.READY)
    assert world.ram().retired_bytes == 100
    assert world.answer(2, rid) == Grant(rid, new)
    world.release(1, old, lease)
    assert world.state(old) is State.FREEING


def test_a_loaders_first_death_starts_another_and_its_second_fails_everyone():
    world = World()
    world.attach(1, 2)
    rids = {session: world.load(session, "k") for session in (1, 2)}
    first = world.newest()
    world.reserve(first, 100)
    world.backed(first)
    world.loader_ended(first, "was ended by SIGKILL")
    assert world.state(first) is State.FREEING
    second = world.newest()
    assert second != first and len(world.done(StartLoader)) == 2
    world.loader_ended(second, "was ended by SIGKILL")
    assert world.state(second) is None
    assert {world.failure(session, rid) for session, rid in rids.items()} == {"fill_failed"}
    answer = world.answer(1, rids[1])
    assert isinstance(answer, Fail) and "SIGKILL" in answer.cause.message


def test_a_builders_death_promotes_the_next_and_frees_its_bytes():
    """S15 with a ticket: all of it in one event."""
    world = World()
    world.attach(1, 2)
    first, second = world.build(1, "k"), world.build(2, "k")
    gen = world.ticket(1, first)
    world.reserve(gen, 100, session=1)
    world.backed(gen)
    world.end(1)
    assert world.state(gen) is State.FREEING
    assert world.ticket(2, second) is not None


def test_a_builder_that_ends_after_commit_has_done_its_work():
    world = World()
    world.attach(1, 2)
    first, second = world.build(1, "k"), world.build(2, "k")
    gen = world.ticket(1, first)
    world.reserve(gen, 100, session=1)
    world.backed(gen)
    world.commit(gen, session=1)
    world.end(1)
    world.sealed(gen)
    assert world.answer(2, second) == Grant(second, gen)
    assert world.leases(gen) == {2: second}


def test_a_faulty_source_fails_every_asker_with_the_reason():
    world = World()
    world.attach(1, 2)
    rids = {session: world.load(session, "k") for session in (1, 2)}
    gen = world.newest()
    cause = Cause.of(SourceMalformed("/k: truncated", source="/k"))
    world.abort(gen, cause=cause)
    for session, rid in rids.items():
        assert world.answer(session, rid) == Fail(rid, cause)
    assert world.ledger.generations == {}
    again = world.load(1, "k")
    world.fill(world.newest())
    assert isinstance(world.answer(1, again), Grant)


def test_a_failed_build_ends_its_own_request_and_promotes_the_next():
    world = World()
    world.attach(1, 2)
    first, second = world.build(1, "k"), world.build(2, "k")
    world.abort(world.ticket(1, first), session=1)
    assert world.failure(1, first) == "cancelled"
    assert world.answer(2, second) is None and world.ticket(2, second) is not None


def test_refused_backing_fails_everyone_and_stays_charged_until_freed():
    world = World()
    world.attach(1, 2)
    rids = {session: world.load(session, "k") for session in (1, 2)}
    gen = world.newest()
    world.reserve(gen, 100)
    world.backing_refused(gen, "No space left on device")
    assert {world.failure(session, rid) for session, rid in rids.items()} == {"backing_failed"}
    assert world.state(gen) is State.FREEING and world.ram().in_use_bytes == 100
    world.freed(gen)
    assert world.ram().in_use_bytes == 0


def test_a_refused_seal_of_a_living_builder_stays_charged_until_it_lets_go():
    """It may still map the bytes: they are counted, never handed out, and the others start over."""
    world = World()
    world.attach(1, 2)
    first, second = world.build(1, "k"), world.build(2, "k")
    gen = world.ticket(1, first)
    world.reserve(gen, 100, session=1)
    world.backed(gen)
    world.commit(gen, session=1)
    world.seal_refused(gen, "a writable map")
    assert world.failure(1, first) == "segment_refused"
    assert world.state(gen) is State.FILLING and world.ram().filling_bytes == 100
    again = world.ticket(2, second)
    assert again not in (None, gen)
    world.fill(again, 100, session=2)
    assert world.state(again) is State.READY
    world.end(1)
    assert world.state(gen) is State.FREEING


def test_a_refused_seal_of_a_loader_ends_it():
    world = World()
    world.attach(1)
    rid = world.load(1, "k")
    gen = world.newest()
    world.reserve(gen, 100)
    world.backed(gen)
    world.commit(gen)
    world.seal_refused(gen)
    assert world.failure(1, rid) == "segment_refused"
    assert world.state(gen) is State.FREEING


def test_only_the_owner_can_reserve_commit_or_abort():
    """S-kind: a client that speaks for a ticket it does not have changes nothing."""
    world = World()
    world.attach(1, 2)
    rid = world.build(1, "k")
    gen = world.ticket(1, rid)
    assert world.reserve(gen, 100, session=2) == []
    assert world.commit(gen, session=2) == []
    assert world.abort(gen, session=2) == []
    world.by_owner(gen, None, Progress(gen, 1, 2))
    assert world.state(gen) is State.OPEN
    world.reserve(gen, 100, session=1)
    world.reserve(gen, 900, session=1)
    assert world.generation(gen).size_bytes == 100
    world.backed(gen)
    assert world.abort(gen, session=2) == []
    assert world.state(gen) is State.FILLING


def test_a_repeated_commit_seals_once():
    world = World()
    world.attach(1)
    world.load(1, "k")
    gen = world.newest()
    world.reserve(gen, 100)
    world.backed(gen)
    world.commit(gen)
    world.commit(gen)
    assert len(world.done(Seal)) == 1
    world.sealed(gen)
    assert world.commit(gen) == [] and world.sealed(gen) == []
    assert world.leases(gen) == {1: 1}


def test_those_who_wait_hear_of_progress():
    world = World()
    world.attach(1, 2)
    world.load(1, "k")
    world.load(2, "k")
    gen = world.newest()
    world.reserve(gen, 100)
    effects = world.backed(gen)
    assert [type(effect) for effect in effects] == [SendSpace]
    effects = world.by_owner(gen, None, Progress(gen, 40, 100))
    assert [effect.message for effect in effects] == [Filling(1, 40, 100), Filling(1, 40, 100)]
    assert world.by_owner(gen, None, Progress(gen, 40, 100)) == []


def test_outcomes_for_generations_that_are_past_them_change_nothing():
    world = World()
    world.attach(1)
    gen, lease = world.have(1, "k")
    for late in (world.backed, world.backing_refused, world.sealed, world.loader_ended):
        assert late(gen) == []
    assert world.freed(gen) == []
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
