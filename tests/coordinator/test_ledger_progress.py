"""PROGRESS: who may say it, who hears of it, and what `status` makes of it."""

from __future__ import annotations

import pytest

from coordinator.ledger import next_deadline_s, status_report
from coordinator.ledger.state import State
from shm_store.keys import GenerationId
from shm_store.report import FillReport
from shm_store.wire import Filling, Progress
from tests.coordinator.ledger_world import World


def fill_of(world: World, gen: GenerationId) -> FillReport | None:
    report = status_report(world.ledger, world.now_s)
    (fill,) = [one.fill for one in report.generations if one.generation == gen]
    return fill


def building(*others: int) -> tuple[World, GenerationId]:
    """Session 1 builds k, at time 0, and others wait for it."""
    world = World()
    world.attach(1, 2, 3)
    rid = world.build(1, "k")
    gen = world.ticket(1, rid)
    assert gen is not None
    for session in others:
        world.build(session, "k")
    world.begin_fill(gen, session=1)
    return world, gen


def test_the_others_hear_how_far_a_worker_has_filled_and_it_hears_no_echo():
    world, gen = building(2, 3)
    effects = world.by_owner(gen, 1, Progress(gen, 40, 90))
    assert [effect.session for effect in effects] == [2, 3]
    assert [effect.message for effect in effects] == [Filling(1, 40, 90)] * 2


def test_who_comes_later_hears_it_at_once():
    world, gen = building()
    rid = world.build(2, "k")
    assert world.messages(2, Filling) == [], "nothing is known yet"
    world.by_owner(gen, 1, Progress(gen, 40, 90))
    rid = world.build(3, "k")
    assert world.messages(3, Filling) == [Filling(rid, 40, 90)]


def test_what_a_worker_fills_keeps_those_waiting_who_wait_for_it():
    world, gen = building()
    rid = world.build(2, "k", timeout_s=10.0)
    for now_s, done_bytes in ((8.0, 10), (16.0, 20)):
        world.wait_until(now_s)
        world.by_owner(gen, 1, Progress(gen, done_bytes, 90))
    world.wait_until(25.0)
    assert world.answer(2, rid) is None
    world.by_owner(gen, 1, Progress(gen, 20, 90))  # that is no progress
    world.wait_until(26.5)
    assert world.failure(2, rid) == "load_timeout"


@pytest.mark.parametrize("sender", [2, 3, None])
def test_only_the_owner_of_a_build_can_say_how_far_it_is(sender):
    """Law 4: an asker, a stranger and a loader of something else change nothing."""
    world, gen = building(2)
    world.by_owner(gen, 1, Progress(gen, 10, 90))
    before = (fill_of(world, gen), next_deadline_s(world.ledger))
    world.now_s = 5.0
    assert world.by_owner(gen, sender, Progress(gen, 50, 90)) == []
    world.now_s = 0.0
    assert (fill_of(world, gen), next_deadline_s(world.ledger)) == before


def test_a_worker_cannot_say_how_far_a_loader_is():
    world = World()
    world.attach(1)
    world.load(1, "k")
    gen = world.newest()
    world.begin_fill(gen)
    assert world.by_owner(gen, 1, Progress(gen, 50, 90)) == []
    assert fill_of(world, gen) == FillReport(0, 0, 0.0)


@pytest.mark.parametrize("figures", [(39, 90), (40, 90), (91, 90), (50, 0)])
def test_what_is_behind_or_cannot_be_changes_nothing(figures):
    world, gen = building(2)
    world.by_owner(gen, 1, Progress(gen, 40, 90))
    before = (fill_of(world, gen), next_deadline_s(world.ledger))
    assert world.by_owner(gen, 1, Progress(gen, *figures)) == []
    assert (fill_of(world, gen), next_deadline_s(world.ledger)) == before


@pytest.mark.parametrize("moment", ["open", "reserved", "sealing", "ready", "freed"])
def test_early_and_late_progress_changes_nothing(moment):
    world = World()
    world.attach(1, 2)
    gen = world.ticket(1, world.build(1, "k"))
    world.build(2, "k")
    if moment != "open":
        world.reserve(gen, 100, session=1)
    if moment in ("sealing", "ready"):
        world.backed(gen)
        world.commit(gen, session=1)
    if moment == "ready":
        world.sealed(gen)
    if moment == "freed":
        world.abort(gen, session=1)
    before = status_report(world.ledger, 0.0)
    assert world.by_owner(gen, 1, Progress(gen, 50, 90)) == []
    assert status_report(world.ledger, 0.0) == before


def test_status_says_how_far_a_fill_is_how_fast_and_what_is_left():
    world, gen = building()
    world.now_s = 0.5
    assert fill_of(world, gen) == FillReport(0, 0, 0.5)
    world.by_owner(gen, 1, Progress(gen, 20, 90))
    assert fill_of(world, gen) == FillReport(20, 90, 0.5, 40, 1.75)
    world.now_s = 1.0
    world.by_owner(gen, 1, Progress(gen, 40, 90))
    assert fill_of(world, gen) == FillReport(40, 90, 1.0, 40, 1.25)
    world.now_s = 100.0
    standing = fill_of(world, gen)
    assert standing == FillReport(40, 90, 100.0, 0, None)
    world.by_owner(gen, 1, Progress(gen, 90, 90))
    assert fill_of(world, gen).left_s == 0.0


def test_what_is_not_being_filled_has_no_such_figures():
    world = World()
    world.attach(1)
    gen = world.ticket(1, world.build(1, "k"))
    assert fill_of(world, gen) is None
    world.begin_fill(gen, session=1)
    assert fill_of(world, gen) is not None
    world.commit(gen, session=1)
    world.sealed(gen)
    assert world.state(gen) is State.READY and fill_of(world, gen) is None


def test_a_prefetch_is_as_visible_as_a_load():
    world = World()
    world.attach(1)
    world.load(1, "k")
    gen = world.newest()
    world.begin_fill(gen)
    world.now_s = 1.0
    world.by_owner(gen, None, Progress(gen, 30, 90))
    assert fill_of(world, gen) == FillReport(30, 90, 1.0, 30, 2.0)
