"""Budgets in the ledger: admission, eviction, pins, deadlines and drain."""

from __future__ import annotations

import pytest

from coordinator.ledger import next_deadline_s, status_report
from coordinator.ledger.events import Exit
from coordinator.ledger.state import State
from shm_store.wire import (
    Charge,
    Done,
    Drain,
    Evict,
    Fail,
    Flush,
    Flushed,
    Grant,
    Pin,
    Status,
    Unpin,
)
from tests.coordinator.ledger_world import Back, Free, World


def sent(world: World, session: int, kind: type) -> list:
    return [
        effect.message
        for effect in world.log
        if getattr(effect, "session", None) == session
        and isinstance(getattr(effect, "message", None), kind)
    ]


def test_the_longest_unused_retained_generation_goes_first():
    world = World(limit_bytes=300)
    world.attach(1)
    gens = {}
    for key in ("a", "b", "c"):
        world.now_s += 1
        gens[key] = world.retain(1, key)
    world.now_s += 1
    lease = world.load(1, "a")
    world.now_s += 1
    world.release(1, gens["a"], lease)
    world.load(1, "new")
    world.reserve(world.newest(), 150)
    assert {key: world.state(gen) for key, gen in gens.items()} == {
        "a": State.READY,
        "b": State.FREEING,
        "c": State.FREEING,
    }


def test_room_that_is_coming_is_counted_and_nothing_more_is_evicted():
    """Rule 10: FREEING stays charged until reported, and eviction knows that it is coming."""
    world = World(limit_bytes=300)
    world.attach(1)
    gens = [world.retain(1, key) for key in ("a", "b", "c")]
    world.load(1, "new")
    new = world.newest()
    world.reserve(new, 100)
    assert world.state(new) is State.OPEN and world.ram().in_use_bytes == 300
    world.load(1, "c")
    world.wait_until(1.0)
    assert [world.state(gen) for gen in gens] == [State.FREEING, State.READY, State.READY]
    world.freed(gens[0])
    assert world.state(new) is State.RESERVED and world.ram().in_use_bytes == 300


def test_leased_and_pinned_generations_are_never_evicted():
    world = World(limit_bytes=300)
    world.attach(1)
    leased, _ = world.have(1, "leased")
    pinned = world.retain(1, "pinned")
    world.say(1, Pin(world.rid(1), "pinned"))
    retained = world.retain(1, "retained")
    rid = world.load(1, "new", timeout_s=10.0)
    world.reserve(world.newest(), 150)
    assert world.state(retained) is State.FREEING
    world.freed(retained)
    assert [world.state(gen) for gen in (leased, pinned)] == [State.READY, State.READY]
    assert world.answer(1, rid) is None
    world.wait_until(11.0)
    assert world.failure(1, rid) == "budget_exceeded"


def test_what_can_never_fit_is_refused_at_once():
    world = World(limit_bytes=300)
    world.attach(1, 2)
    rids = {session: world.load(session, "k") for session in (1, 2)}
    gen = world.newest()
    world.reserve(gen, 301)
    for session, rid in rids.items():
        answer = world.answer(session, rid)
        assert isinstance(answer, Fail)
        assert (answer.cause.needed_bytes, answer.cause.free_bytes) == (301, 300)
        assert answer.cause.remedy == "raise the limit: `weight-cache limit ram SIZE`"
    assert world.state(gen) is None and [effect.gen for effect in world.done(Free)] == [gen]
    assert world.done(Back) == []


def test_a_pin_counts_against_what_could_ever_fit():
    """A waiting request is looked at again when a pin arrives."""
    world = World(limit_bytes=300)
    world.attach(1)
    gen, lease = world.have(1, "a", 200)
    rid = world.load(1, "b")
    world.reserve(world.newest(), 200)
    assert world.answer(1, rid) is None
    world.say(1, Pin(world.rid(1), "a"))
    assert world.failure(1, rid) == "budget_exceeded"
    assert world.leases(gen) == {1: lease}


def test_a_refusal_names_who_came_first():
    """What would fit waits behind what does not: without its name the refusal explains nothing."""
    world = World(limit_bytes=300)
    world.attach(1, 2, 3)
    world.have(1, "held", 200)
    world.load(3, "large")
    world.reserve(world.newest(), 200)
    rid = world.load(2, "small", timeout_s=10.0)
    world.reserve(world.newest(), 50)
    world.wait_until(10.0)
    answer = world.answer(2, rid)
    assert isinstance(answer, Fail)
    assert answer.cause.message == (
        "'small' needs 50 B; pool 'ram' has 100 B free of 300 B; "
        "'large' came first and waits for 200 B"
    )


def test_a_refusal_lists_who_holds_what():
    world = World(limit_bytes=300)
    world.attach(1, 2)
    gen, _ = world.have(1, "big", 250)
    world.now_s = 5.0
    rid = world.load(2, "more", timeout_s=10.0)
    world.reserve(world.newest(), 100)
    world.wait_until(15.0)
    answer = world.answer(2, rid)
    assert isinstance(answer, Fail)
    cause = answer.cause
    assert (cause.code, cause.needed_bytes, cause.free_bytes) == ("budget_exceeded", 100, 50)
    assert cause.message == "'more' needs 100 B; pool 'ram' has 50 B free of 300 B"
    assert "evict some" in cause.remedy and "`weight-cache limit ram SIZE`" in cause.remedy
    (holder,) = cause.holders
    assert (holder.key, holder.generation, holder.size_bytes) == ("big", gen, 250)
    assert [(lease.session, lease.pid, lease.age_s) for lease in holder.leases] == [(1, 1001, 15.0)]


def test_waiting_for_room_is_first_come_first_served():
    world = World(limit_bytes=300)
    world.attach(1, 2, 3)
    gen, lease = world.have(1, "a", 290)
    world.load(2, "large")
    large = world.newest()
    world.reserve(large, 300)
    world.load(3, "small")
    small = world.newest()
    world.reserve(small, 10)
    assert (world.state(large), world.state(small)) == (State.OPEN, State.OPEN)
    world.release(1, gen, lease)
    assert world.state(gen) is State.FREEING
    world.freed(gen)
    assert (world.state(large), world.state(small)) == (State.RESERVED, State.OPEN)


def test_a_reserve_that_waits_cannot_be_changed_and_is_charged_nothing():
    world = World(limit_bytes=100)
    world.attach(1, 2)
    gen, lease = world.have(1, "a", 100)
    world.load(2, "b")
    new = world.newest()
    world.reserve(new, 60)
    world.reserve(new, 30)
    report = status_report(world.ledger, 0.0)
    assert [(g.key, g.size_bytes) for g in report.generations] == [("a", 100), ("b", 0)]
    world.release(1, gen, lease)
    world.freed(gen)
    assert [(effect.gen, effect.size_bytes) for effect in world.done(Back)][1:] == [(new, 60)]


def test_a_released_lease_lets_the_waiter_in():
    world = World(limit_bytes=100)
    world.attach(1, 2)
    gen, lease = world.have(1, "a", 100)
    rid = world.load(2, "b")
    new = world.newest()
    world.reserve(new, 100)
    world.release(1, gen, lease)
    world.freed(gen)
    world.backed(new)
    world.commit(new)
    world.sealed(new)
    assert world.answer(2, rid) == Grant(rid, new)


def test_an_asker_is_timed_while_nothing_progresses():
    world = World()
    world.attach(1, 2)
    quick = world.load(1, "k", timeout_s=5.0)
    gen = world.newest()
    patient = world.load(2, "k", timeout_s=50.0)
    assert next_deadline_s(world.ledger) == 5.0
    world.now_s = 4.0
    world.begin_fill(gen)
    assert next_deadline_s(world.ledger) == 9.0
    world.wait_until(8.9)
    assert world.answer(1, quick) is None
    world.wait_until(9.0)
    assert world.failure(1, quick) == "load_timeout"
    assert world.answer(2, patient) is None
    world.commit(gen)
    assert next_deadline_s(world.ledger) is None
    world.sealed(gen)
    assert world.answer(2, patient) == Grant(patient, gen)


def test_a_ticket_holder_is_timed_only_while_its_reserve_waits():
    world = World(limit_bytes=100)
    world.attach(1, 2)
    world.have(1, "a", 100)
    rid = world.build(2, "b", timeout_s=5.0)
    world.wait_until(100.0)
    assert world.answer(2, rid) is None
    gen = world.ticket(2, rid)
    world.reserve(gen, 50, session=2)
    world.wait_until(104.0)
    assert world.answer(2, rid) is None
    world.wait_until(105.0)
    assert world.failure(2, rid) == "budget_exceeded"
    assert world.state(gen) is None


def test_an_unasked_fill_gives_way_when_room_is_short():
    world = World(limit_bytes=100)
    world.attach(1)
    rid = world.load(1, "a")
    old = world.newest()
    world.begin_fill(old, 80)
    world.cancel(1, rid)
    assert world.state(old) is State.FILLING
    world.load(1, "b")
    world.reserve(world.newest(), 80)
    assert world.state(old) is State.FREEING


def test_evict_by_name_frees_only_what_nobody_holds():
    world = World()
    world.attach(1)
    world.attach(9, role="operator")
    held, lease = world.have(1, "held")
    idle = world.retain(1, "idle")
    for key, code in (("held", "in_use"), ("nowhere", "argument_refused")):
        rid = world.rid(9)
        world.say(9, Evict(rid, key))
        assert world.failure(9, rid) == code
    rid = world.rid(9)
    world.say(9, Evict(rid, "idle"))
    assert sent(world, 9, Done) == [Done(rid, ("idle",))]
    assert world.state(idle) is State.FREEING and world.leases(held) == {1: lease}


def test_evict_idle_leaves_pins_and_a_pin_can_be_taken_back():
    world = World()
    world.attach(1)
    pinned, idle = world.retain(1, "pinned"), world.retain(1, "idle")
    world.say(1, Pin(world.rid(1), "pinned"))
    world.say(1, Evict(world.rid(1), None))
    assert (world.state(pinned), world.state(idle)) == (State.READY, State.FREEING)
    rid = world.rid(1)
    world.say(1, Evict(rid, "pinned"))
    assert world.failure(1, rid) == "in_use"
    world.say(1, Unpin(world.rid(1), "pinned"))
    world.say(1, Evict(world.rid(1), None))
    assert world.state(pinned) is State.FREEING


def test_pins_have_an_end(monkeypatch):
    monkeypatch.setattr("coordinator.ledger.operators.PINS_LIMIT", 2)
    world = World()
    world.attach(1)
    rids = [world.rid(1) for _ in range(3)]
    for number, rid in enumerate(rids):
        world.say(1, Pin(rid, f"k{number}"))
    assert world.failure(1, rids[2]) == "resource"
    assert list(world.ledger.pins) == ["k0", "k1"]


def test_a_refused_evict_says_what_is_in_the_way_and_what_to_do_about_that():
    world = World()
    world.attach(1)
    world.retain(1, "pinned")
    world.have(1, "held key")
    world.have(1, "both")
    for key in ("pinned", "both"):
        world.say(1, Pin(world.rid(1), key))
    world.say(1, Charge(world.rid(1), "ram", "own", 100, 300.0))
    own = "retire it there, by `worker.evict` or `worker.invalidate`"

    def unpin(key: str) -> str:
        return f"take the pin back: `weight-cache unpin {key}`"

    def retire(key: str) -> str:
        return f"retire it, so that it goes where it is idle: `weight-cache invalidate {key}`"

    for key, message, remedy in (
        ("pinned", "'pinned' is pinned", unpin("pinned")),
        ("held key", "'held key' is in use", retire("'held key'")),
        ("both", "'both' is pinned and in use", f"{unpin('both')} and {retire('both')}"),
        ("own", "'own' is private to pid 1001", own),
        ("nope", "there are no weights 'nope'", "see `weight-cache status`"),
    ):
        rid = world.rid(1)
        world.say(1, Evict(rid, key))
        answer = world.answer(1, rid)
        assert isinstance(answer, Fail)
        assert (answer.cause.message, answer.cause.remedy) == (message, remedy)


def test_flush_is_answered_when_what_was_freeing_is_gone():
    world = World()
    world.attach(1)
    gen = world.retain(1, "a")
    world.say(1, Evict(world.rid(1), None))
    rid = world.rid(1)
    world.say(1, Flush(rid))
    assert sent(world, 1, Flushed) == []
    world.freed(gen)
    assert sent(world, 1, Flushed) == [Flushed(rid)]
    rid = world.rid(1)
    world.say(1, Flush(rid))
    assert sent(world, 1, Flushed)[-1] == Flushed(rid)


def test_drain_refuses_new_work_waits_for_leases_then_exits():
    world = World()
    world.attach(1)
    world.attach(9, role="operator")
    gen, lease = world.have(1, "a")
    pinned = world.retain(1, "pinned")
    world.say(9, Pin(world.rid(9), "pinned"))
    rid = world.rid(9)
    world.say(9, Drain(rid, 10.0))
    refused = world.load(1, "b")
    assert world.failure(1, refused) == "draining"
    assert world.state(pinned) is State.FREEING
    world.freed(pinned)
    assert world.done(Exit) == []
    world.release(1, gen, lease)
    world.freed(gen)
    assert len(world.done(Exit)) == 1
    assert Done(rid) in sent(world, 9, Done)


def test_drain_names_what_is_left_at_its_deadline_and_goes_on():
    world = World()
    world.attach(1)
    world.attach(9, role="operator")
    gen, _ = world.have(1, "a")
    rid = world.rid(9)
    world.say(9, Drain(rid, 10.0))
    assert next_deadline_s(world.ledger) == 10.0
    world.wait_until(10.0)
    answer = world.answer(9, rid)
    assert isinstance(answer, Fail) and answer.cause.code == "drain_incomplete"
    assert [holder.key for holder in answer.cause.holders] == ["a"]
    assert answer.cause.message == "1 generation is still held"
    world.end(1)
    world.freed(gen)
    assert len(world.done(Exit)) == 1


@pytest.mark.parametrize("owner", ["loader", "open builder", "filling builder"])
def test_drain_and_fills(owner):
    """Loaders end, an open ticket fails, a worker that fills goes on to its COMMIT."""
    world = World()
    world.attach(1, 2)
    if owner == "loader":
        rid = world.load(1, "k")
        gen = world.newest()
        world.reserve(gen, 100)
    else:
        rid = world.build(1, "k")
        gen = world.newest()
        if owner == "filling builder":
            world.begin_fill(gen, session=1)
            waiting = world.build(2, "k")
    world.say(2, Drain(world.rid(2), 10.0))
    if owner != "filling builder":
        assert world.failure(1, rid) == "draining"
        assert world.state(gen) is (State.FREEING if owner == "loader" else None)
        return
    assert world.failure(2, waiting) == "draining"
    world.commit(gen, session=1)
    world.sealed(gen)
    assert world.answer(1, rid) == Grant(rid, gen)
    assert world.done(Exit) == []


@pytest.mark.parametrize("refused", [False, True])
def test_drain_lets_a_seal_finish_and_seats_nobody_again(refused):
    world = World()
    world.attach(1, 2)
    first, second = world.build(1, "k"), world.build(2, "k")
    gen = world.ticket(1, first)
    world.begin_fill(gen, session=1)
    world.commit(gen, session=1)
    world.say(2, Drain(world.rid(2), 10.0))
    assert (world.answer(1, first), world.answer(2, second)) == (None, None)
    if refused:
        world.seal_refused(gen)
        assert world.failure(1, first) == "segment_refused"
        assert world.failure(2, second) == "draining"
    else:
        world.sealed(gen)
        assert world.answer(2, second) == Grant(second, gen)


def test_status_speaks_of_workers_pools_and_generations():
    world = World()
    world.attach(1)
    world.attach(9, role="operator")
    world.have(1, "a", 100)
    world.load(1, "b")
    rid = world.rid(9)
    effects = world.say(9, Status(rid))
    report = effects[0].message.report
    assert [(s.session, s.pid, s.waiting_for) for s in report.sessions] == [(1, 1001, ("b",))]
    assert [(g.key, g.state, g.size_bytes, g.waiting) for g in report.generations] == [
        ("a", "ready", 100, 0),
        ("b", "open", 0, 1),
    ]
    (pool,) = report.pools
    kinds = ("leased", "retained", "filling", "retired", "private", "freeing")
    assert pool.in_use_bytes == sum(getattr(pool, f"{kind}_bytes") for kind in kinds) == 100
