"""How fast a fill is, and what is left: by a clock that the test moves."""

from __future__ import annotations

import pytest

from shm_store.pace import QUIET_S, SMOOTHED_S, Pace


def came(*reports: tuple[float, int], begun_s: float = 0.0) -> Pace:
    pace = Pace(begun_s)
    for now_s, done_bytes in reports:
        pace.came_to(done_bytes, now_s)
    return pace


@pytest.mark.parametrize("steps", [(1.0,), (0.25, 0.5, 0.75, 1.0), (0.25, 3.0, 40.0, 41.0)])
def test_a_constant_speed_is_told_exactly_from_the_first_report_on(steps):
    pace = came(*((7 + step_s, round(step_s * 1000)) for step_s in steps), begun_s=7.0)
    now_s = 7 + steps[-1]
    assert pace.bytes_per_s(now_s) == pytest.approx(1000)
    assert pace.left_s(round(steps[-1] * 1000) + 500, now_s) == pytest.approx(0.5)


def test_nothing_is_known_before_the_first_report():
    pace = Pace(5.0)
    assert pace.bytes_per_s(5.0) == pace.bytes_per_s(100.0) == 0
    assert pace.left_s(1000, 100.0) is None


def test_what_there_was_at_the_beginning_is_no_speed():
    pace = Pace(0.0, 5000)
    pace.came_to(6000, 1.0)
    assert pace.bytes_per_s(1.0) == pytest.approx(1000)


def test_what_is_long_ago_is_forgotten():
    """A page cache ends: after three times the smoothing hardly anything of it is left."""
    fast = [(second, second * 10_000) for second in range(1, 11)]
    slow = [(10 + second, 100_000 + second * 100) for second in range(1, 31)]
    pace = came(*fast, *slow)
    assert 100 < pace.bytes_per_s(40.0) < 700


def test_a_fill_that_stands_still_slows_down_and_then_nobody_knows_what_is_left():
    pace = came((1.0, 1000), (2.0, 2000))
    speeds = [pace.bytes_per_s(2.0 + seconds) for seconds in (0, QUIET_S, 5, SMOOTHED_S, 60)]
    assert speeds[0] == speeds[1], "a slow source says nothing for as long"
    assert speeds[1:] == sorted(speeds[1:], reverse=True) and speeds[-1] < 20
    assert pace.left_s(3000, 500.0) is None


def test_two_reports_at_one_moment_are_both_counted():
    pace = came((1.0, 1000), (1.0, 1500))
    assert pace.bytes_per_s(1.0) == pytest.approx(1500, rel=0.06)
    at_once = came((0.0, 500))
    assert at_once.bytes_per_s(0.0) == 0 and at_once.left_s(1000, 0.0) is None


def test_of_what_is_all_there_nothing_is_left():
    assert came((1.0, 10)).left_s(10, 99.0) == 0.0
