"""Fills in the ledger: their owners' ends and faults, refusals of the kernel, late outcomes."""

from __future__ import annotations

from coordinator.ledger import status_report
from coordinator.ledger.state import State
from shm_store.errors import SourceMalformed
from shm_store.wire import Cause, Fail, Filling, Grant, Progress, Reserve
from tests.coordinator.ledger_world import Seal, StartLoader, World


def test_a_loaders_first_death_starts_another_and_its_second_fails_everyone():
    world = World()
    world.attach(1, 2)
    rids = {session: world.load(session, "k") for session in (1, 2)}
    first = world.newest()
    world.begin_fill(first)
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
    world.begin_fill(gen, session=1)
    world.end(1)
    assert world.state(gen) is State.FREEING
    assert world.ticket(2, second) is not None


def test_a_builder_that_ends_after_commit_has_done_its_work():
    world = World()
    world.attach(1, 2)
    first, second = world.build(1, "k"), world.build(2, "k")
    gen = world.ticket(1, first)
    world.begin_fill(gen, session=1)
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
    world.begin_fill(gen, session=1)
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
    world.begin_fill(gen)
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
    world.begin_fill(gen)
    world.commit(gen)
    world.commit(gen)
    assert len(world.done(Seal)) == 1
    world.sealed(gen)
    assert world.commit(gen) == [] and world.sealed(gen) == []
    assert world.leases(gen) == {1: 1}


def test_outcomes_for_generations_that_are_past_them_change_nothing():
    world = World()
    world.attach(1)
    gen, lease = world.have(1, "k")
    for late in (world.backed, world.backing_refused, world.sealed, world.loader_ended):
        assert late(gen) == []
    assert world.freed(gen) == []
    assert world.leases(gen) == {1: lease}


def test_a_loader_that_fetches_before_it_knows_the_size_is_waited_for():
    """Its PROGRESS counts before RESERVE, too, and is counted anew as it fills."""
    world = World()
    world.attach(1)
    rid = world.load(1, "k", timeout_s=10)
    gen = world.newest()
    for step in range(1, 4):
        world.wait_until(9.0 * step)
        world.by_owner(gen, None, Progress(gen, 50 * step, 200))
    assert world.answer(1, rid) is None
    assert world.messages(1, Filling)[-1] == Filling(rid, 150, 200)
    (shown,) = status_report(world.ledger, world.now_s).generations
    fill = shown.fill
    assert fill is not None and (fill.done_bytes, fill.total_bytes) == (150, 200)
    world.by_owner(gen, None, Reserve(gen, 100))
    (shown,) = status_report(world.ledger, world.now_s).generations
    assert shown.fill is None
    world.backed(gen)
    world.wait_until(36.0)
    world.by_owner(gen, None, Progress(gen, 10, 100))
    assert world.generation(gen).filled_bytes == 10
    assert world.messages(1, Filling)[-1] == Filling(rid, 10, 100)
    world.by_owner(gen, None, Progress(gen, 10, 100))  # no more than before: no progress
    world.wait_until(47.0)
    assert world.failure(1, rid) == "load_timeout"
