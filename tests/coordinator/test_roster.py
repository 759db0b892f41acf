"""When a process is started again: every rule, without a clock and without a process."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.roster import Again, Finished, GivenUp, Member, Policy, Rule

ENDLESS = Rule(restarts=1_000_000)


def fail(member: Member, now_s: float, ran_s: float = 0.0) -> float:
    """Have it run and fail; return the time at which it is started again."""
    member.started(now_s)
    verdict = member.ended(1, now_s + ran_s)
    assert isinstance(verdict, Again), verdict
    return now_s + ran_s + verdict.delay_s


@pytest.mark.parametrize("policy", Policy)
def test_an_end_with_0_is_final_whatever_the_policy(policy):
    member = Member(Rule(policy))
    member.started(0.0)
    assert member.ended(0, 0.0) == Finished()
    assert member.restarts == 0


@pytest.mark.parametrize("code", [1, 2, 255, -9, -15])
def test_never_means_never(code):
    member = Member(Rule(Policy.NEVER))
    assert member.ended(code, 1e6) == GivenUp()
    assert member.restarts == 0


@pytest.mark.parametrize("code", [1, 2, 255, -9, -15])
def test_every_other_end_is_a_failure_and_waits_half_a_second(code):
    member = Member(Rule())
    member.started(100.0)
    assert member.ended(code, 100.0) == Again(0.5)
    assert member.restarts == 1


def test_the_wait_doubles_to_half_a_minute_and_stays_there():
    member = Member(ENDLESS)
    delays = []
    for _ in range(9):
        member.started(0.0)
        verdict = member.ended(1, 9.9)
        delays.append(verdict.delay_s)
    assert delays == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_who_ran_well_for_a_while_waits_as_at_the_beginning():
    member = Member(ENDLESS)
    for _ in range(4):
        fail(member, 0.0)
    member.started(50.0)
    assert member.ended(1, 59.999) == Again(8)  # not quite
    member.started(70.0)
    assert member.ended(1, 80.0) == Again(0.5)
    member.started(81.0)
    assert member.ended(1, 81.0) == Again(1)


def test_the_sixth_failure_in_ten_minutes_ends_it():
    member = Member(Rule())
    now_s = 0.0
    for _ in range(5):
        now_s = fail(member, now_s)
    assert now_s == 0.5 + 1 + 2 + 4 + 8
    member.started(now_s)
    assert member.ended(3, now_s) == GivenUp("it was restarted 5 times in 10 minutes")
    assert member.restarts == 5
    assert member.ended(3, 599.9) == GivenUp("it was restarted 5 times in 10 minutes")


def test_a_failure_is_forgotten_after_ten_minutes_and_makes_room_for_one():
    member = Member(Rule())
    for at_s in (0.0, 100.0, 200.0, 300.0, 400.0):
        fail(member, at_s)
    member.started(500.0)
    assert isinstance(member.ended(1, 599.9), GivenUp)
    assert member.ended(1, 600.0) == Again(0.5)  # the one at 0.0 is over; it ran well
    assert isinstance(member.ended(1, 699.9), GivenUp)


def test_without_restarts_the_first_failure_ends_it():
    member = Member(Rule(restarts=0))
    assert member.ended(1, 0.0) == GivenUp("it was restarted 0 times in 10 minutes")


def test_a_first_end_that_no_restart_mends_is_final_and_a_later_one_is_not():
    """Wrong arguments stay wrong; a file that was there may come back."""
    rule = Rule(hopeless=frozenset({2, 3}))
    member = Member(rule)
    member.started(0.0)
    assert member.ended(2, 0.1) == GivenUp()
    member = Member(rule)
    fail(member, 0.0)
    member.started(1.0)
    assert isinstance(member.ended(2, 1.1), Again)


def test_a_short_window_is_named_in_seconds():
    assert Member(Rule(restarts=0, window_s=5)).ended(1, 0.0) == GivenUp(
        "it was restarted 0 times in 5 s"
    )


def test_every_short_history_keeps_the_rules():
    """All ways in which six lives may go: short or long, with 0 or not, under each policy."""
    lives = list(itertools.product((0.0, 5.0, 10.0, 130.0), (0, 1, -9)))
    for policy, few in itertools.product(Policy, (0, 1, 2)):
        rule = Rule(policy, restarts=few)
        for history in itertools.product(lives, repeat=4):
            member, now_s = Member(rule), 0.0
            begun: list[float] = []
            expected_s = rule.first_delay_s
            for ran_s, code in history:
                member.started(now_s)
                now_s += ran_s
                verdict = member.ended(code, now_s)
                recent = [at_s for at_s in begun if now_s - at_s < rule.window_s]
                if code == 0:
                    assert verdict == Finished()
                    break
                if policy is Policy.NEVER or len(recent) >= few:
                    assert isinstance(verdict, GivenUp)
                    break
                if ran_s >= rule.healthy_s:
                    expected_s = rule.first_delay_s
                assert verdict == Again(expected_s)
                expected_s *= 2
                begun.append(now_s)
                now_s += verdict.delay_s
            assert member.restarts == len(begun)


@given(st.lists(st.floats(0, 400), max_size=40), st.integers(0, 6))
def test_no_ten_minutes_ever_hold_more_restarts_than_allowed(runs_s, few):
    member, now_s = Member(Rule(restarts=few)), 0.0
    begun: list[float] = []
    for ran_s in runs_s:
        member.started(now_s)
        now_s += ran_s
        verdict = member.ended(1, now_s)
        if isinstance(verdict, Again):
            assert 0.5 <= verdict.delay_s <= 30
            begun.append(now_s)
            now_s += verdict.delay_s
    for first, at_s in enumerate(begun):
        assert len([s for s in begun[first:] if s - at_s < 600]) <= few
