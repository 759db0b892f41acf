"""Records: who may use a module, and when it is let go of."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from gpu_worker.records import ClaimId, Held, LockId, Origin, Record, Records
from shm_store.errors import WorkerClosed
from shm_store.keys import GenerationId, Key

KEY = Key("minilm")
OTHER = Key("vae")
G1 = GenerationId("g1")
FILE = Origin("source", "/models/minilm.safetensors")
LINK = Origin("source", "/models/latest.safetensors")


def record(key=KEY, generation="g1", origin=FILE, module="module") -> Record[str]:
    return Record(key, GenerationId(generation), origin, module)


def modules(evicted: list[Record[str]]) -> list[str]:
    return [gone.module for gone in evicted]


@pytest.fixture
def records() -> Records[str]:
    """One idle record of KEY; claim 1 was on it."""
    made: Records[str] = Records()
    assert made.admit(record(), ClaimId(1)) == []
    assert made.end_claim(ClaimId(1)) == []
    return made


class TestClaims:
    def test_a_claim_is_only_put_on_what_was_made_from_the_same_origin(self, records):
        """The same path, or the same version, is a hit; anything else has to be asked for."""
        assert records.claim(KEY, FILE, ClaimId(2)).module == "module"
        assert records.claim(KEY, LINK, ClaimId(3)) is None
        assert records.claim(KEY, Origin("build", FILE.name), ClaimId(4)) is None
        assert records.claim(OTHER, FILE, ClaimId(5)) is None
        assert records.held() == (Held(KEY, G1, claims=1, locks=0, threads=("",)),)

    def test_a_record_of_the_granted_generation_is_adopted_under_its_new_name(self, records):
        """Two paths of one file are one generation, and so one module."""
        assert records.adopt(KEY, GenerationId("g2"), LINK, ClaimId(2)) is None
        assert records.held() == ()
        assert records.adopt(KEY, GenerationId("g1"), LINK, ClaimId(2)).module == "module"
        assert records.claim(KEY, LINK, ClaimId(3)).module == "module"

    def test_a_claim_keeps_a_record_through_eviction(self, records):
        records.claim(KEY, FILE, ClaimId(2))
        assert records.evict(KEY) == []
        assert records.lock(ClaimId(2), LockId(1)) == "module"
        assert records.end_claim(ClaimId(2)) == []
        assert modules(records.unlock(LockId(1))) == ["module"]

    def test_the_last_of_several_claims_lets_go(self, records):
        """S9: two handles on one stale record."""
        records.claim(KEY, FILE, ClaimId(2))
        records.claim(KEY, FILE, ClaimId(3))
        records.evict(KEY)
        assert records.end_claim(ClaimId(2)) == []
        assert modules(records.end_claim(ClaimId(3))) == ["module"]

    def test_ending_a_claim_twice_or_one_that_never_was_changes_nothing(self, records):
        """Callers end what an interrupt may have kept from coming to be."""
        records.claim(KEY, FILE, ClaimId(2))
        records.claim(KEY, FILE, ClaimId(3))
        records.evict(KEY)
        assert records.end_claim(ClaimId(99)) == []
        assert records.end_claim(ClaimId(2)) == []
        assert records.end_claim(ClaimId(2)) == []
        assert records.held() == (Held(KEY, G1, claims=1, locks=0, threads=("",)),)


class TestLocks:
    def test_locks_nest_and_each_ends_once(self, records):
        records.claim(KEY, FILE, ClaimId(2))
        records.lock(ClaimId(2), LockId(1))
        records.lock(ClaimId(2), LockId(2))
        records.end_claim(ClaimId(2))
        records.evict(KEY)
        assert records.unlock(LockId(2)) == []
        assert records.unlock(LockId(2)) == []
        assert records.held() == (Held(KEY, G1, claims=0, locks=1, threads=("",)),)
        assert modules(records.unlock(LockId(1))) == ["module"]

    def test_the_last_lock_of_a_claim_is_the_newest_that_has_not_ended(self, records):
        records.claim(KEY, FILE, ClaimId(2))
        records.claim(KEY, FILE, ClaimId(3))
        assert records.last_lock(ClaimId(2)) is None
        for lock, claim in ((1, 2), (2, 2), (3, 3)):
            records.lock(ClaimId(claim), LockId(lock))
        assert (records.last_lock(ClaimId(2)), records.last_lock(ClaimId(3))) == (2, 3)
        records.unlock(LockId(2))
        records.end_claim(ClaimId(2))
        assert records.last_lock(ClaimId(2)) == 1
        records.unlock(LockId(1))
        assert records.last_lock(ClaimId(2)) is None

    def test_an_ended_claim_locks_nothing(self, records):
        records.claim(KEY, FILE, ClaimId(2))
        records.end_claim(ClaimId(2))
        with pytest.raises(WorkerClosed):
            records.lock(ClaimId(2), LockId(1))
        assert records.held() == ()
        assert modules(records.evict(KEY)) == ["module"]


class TestEnds:
    def test_an_idle_record_is_gone_at_once_and_only_once(self, records):
        """S5, S26."""
        assert modules(records.evict(KEY)) == ["module"]
        assert records.evict(KEY) == []
        assert records.claim(KEY, FILE, ClaimId(2)) is None

    def test_a_stale_record_is_not_handed_out_beside_its_successor(self, records):
        """S4: what happens to the old record never touches the new one."""
        records.claim(KEY, FILE, ClaimId(2))
        assert records.admit(record(generation="g2", module="new"), ClaimId(3)) == []
        assert records.claim(KEY, FILE, ClaimId(4)).module == "new"
        assert modules(records.end_claim(ClaimId(2))) == ["module"]
        assert records.end_claim(ClaimId(3)) == records.end_claim(ClaimId(4)) == []
        assert modules(records.evict(KEY)) == ["new"]

    def test_an_idle_predecessor_is_let_go_of_when_its_successor_is_admitted(self, records):
        assert modules(records.admit(record(generation="g2", module="new"), ClaimId(2))) == [
            "module"
        ]

    def test_only_a_newer_generation_outdates_a_record(self, records):
        assert records.outdate(KEY, GenerationId("g0")) == []
        assert records.outdate(KEY, GenerationId("g1")) == []
        assert records.outdate(OTHER, GenerationId("g2")) == []
        assert records.claim(KEY, FILE, ClaimId(2)) is not None
        records.end_claim(ClaimId(2))
        assert modules(records.outdate(KEY, GenerationId("g2"))) == ["module"]

    def test_closing_lets_the_idle_go_and_makes_the_rest_stale(self, records):
        """S6, S7."""
        records.admit(record(key=OTHER, module="vae"), ClaimId(2))
        assert modules(records.close()) == ["module"]
        assert records.held() == (Held(OTHER, G1, claims=1, locks=0, threads=("",)),)
        assert records.claim(OTHER, FILE, ClaimId(3)) is None
        assert modules(records.end_claim(ClaimId(2))) == ["vae"]
        assert records.close() == []

    def test_what_arrives_after_closing_is_usable_once(self, records):
        """S11: a load in flight during shutdown arrives stale."""
        records.close()
        assert records.admit(record(generation="g2", module="late"), ClaimId(2)) == []
        assert records.claim(KEY, FILE, ClaimId(3)) is None
        assert records.lock(ClaimId(2), LockId(1)) == "late"
        assert records.end_claim(ClaimId(2)) == []
        assert modules(records.unlock(LockId(1))) == ["late"]


class RecordsAgainstModel(RuleBasedStateMachine):
    """Any sequence of calls, beside a model that knows only sets of ids per record.

    Every module is let go of exactly once, exactly when nothing leads to it or uses it any more.
    """

    claims = Bundle("claims")
    locks = Bundle("locks")

    def __init__(self) -> None:
        super().__init__()
        self.records: Records[str] = Records()
        self.ids = iter(range(1, 10**6))
        self.current: dict[Key, str] = {}
        self.origins: dict[str, Origin] = {}
        self.generations: dict[str, str] = {}
        self.uses: dict[str, set[object]] = {}
        self.leaving: set[str] = set()
        self.alive: set[str] = set()

    def let_go(self, dropped: list[Record[str]]) -> None:
        """What was let go of must be what the model has no more use for."""
        for key, module in list(self.current.items()):
            if module in self.leaving and not self.uses[module]:
                del self.current[key]
        for record in dropped:
            if record.going == "room":
                self.records.lose(record)  # nobody else has its module
        for module in modules(dropped):
            assert module in self.alive, f"{module} was let go of twice"
            self.alive.remove(module)
        led_to = set(self.current.values())
        kept = {module for module, uses in self.uses.items() if uses or module in led_to}
        assert self.alive == kept

    @rule(
        target=claims,
        key=st.sampled_from([KEY, OTHER]),
        origin=st.sampled_from([FILE, LINK]),
    )
    def load(self, key, origin):
        claim = ClaimId(next(self.ids))
        module = self.current.get(key)
        found = self.records.claim(key, origin, claim)
        if module is not None and self.origins[module] == origin:
            assert found is not None and found.module == module
        else:
            assert found is None
            module = f"module {claim}"
            self.origins[module] = origin
            self.generations[module] = f"{claim:06}"
            self.uses[module] = set()
            self.alive.add(module)
            made = record(key, self.generations[module], origin, module)
            dropped = self.records.admit(made, claim)
            if not self.records.closed:
                self.current[key] = module
            self.uses[module].add(claim)
            self.let_go(dropped)
        self.uses[module].add(claim)
        return claim

    @rule(target=claims, key=st.sampled_from([KEY, OTHER]), origin=st.sampled_from([FILE, LINK]))
    def adopt(self, key, origin):
        claim = ClaimId(next(self.ids))
        module = self.current.get(key)
        generation = GenerationId(self.generations[module] if module else "none")
        found = self.records.adopt(key, generation, origin, claim)
        assert (found.module if found else None) == module
        if module is not None:
            self.origins[module] = origin
            self.leaving.discard(module)
            self.uses[module].add(claim)
        return claim

    @rule(target=locks, claim=claims)
    def lock(self, claim):
        lock = LockId(next(self.ids))
        used = [module for module, uses in self.uses.items() if claim in uses]
        if used:
            assert self.records.lock(claim, lock) == used[0]
            self.uses[used[0]].add(("lock", lock))
        else:
            with pytest.raises(WorkerClosed):
                self.records.lock(claim, lock)
        return lock

    @rule(lock=locks)
    def unlock(self, lock):
        for uses in self.uses.values():
            uses.discard(("lock", lock))
        self.let_go(self.records.unlock(lock))

    @rule(claim=claims)
    def end_claim(self, claim):
        for uses in self.uses.values():
            uses.discard(claim)
        self.let_go(self.records.end_claim(claim))

    @rule(claim=consumes(claims))
    def end_claim_for_good(self, claim):
        self.end_claim(claim)

    @rule(key=st.sampled_from([KEY, OTHER]))
    def evict(self, key):
        self.current.pop(key, None)
        self.let_go(self.records.evict(key))

    @rule(key=st.sampled_from([KEY, OTHER]), generation=st.integers(0, 60))
    def outdate(self, key, generation):
        newer = f"{generation:06}"
        module = self.current.get(key)
        if module is not None and self.generations[module] < newer:
            del self.current[key]
        if module is not None and self.generations[module] == newer:
            self.leaving.discard(module)
        self.let_go(self.records.outdate(key, GenerationId(newer)))

    @rule(key=st.sampled_from([KEY, OTHER]), asked=st.sampled_from(["room", "stale"]))
    def revoke(self, key, asked):
        module = self.current.get(key)
        if module is None:
            return
        if asked == "stale":
            del self.current[key]
        else:
            self.leaving.add(module)
        do = self.records.retire if asked == "stale" else self.records.make_room
        self.let_go(do(GenerationId(self.generations[module])))

    @rule()
    def expire(self):
        """Every use ended at 0."""
        for key, module in list(self.current.items()):
            if not self.uses[module]:
                del self.current[key]
        self.let_go(self.records.expire(0.0))

    @rule(sure=st.integers(0, 9))
    def close(self, sure):
        if sure == 0:
            self.current.clear()
            self.let_go(self.records.close())

    @invariant()
    def agree(self):
        self.records.check()
        counts = sorted(
            (self.generations[module], len(uses)) for module, uses in self.uses.items() if uses
        )
        held = sorted((held.generation, held.claims + held.locks) for held in self.records.held())
        assert held == counts


RecordsAgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestRecordsAgainstModel = RecordsAgainstModel.TestCase
