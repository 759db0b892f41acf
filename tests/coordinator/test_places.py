"""Who starts when: by hand, on a clock that the test sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest

from coordinator.places import LAPSE_S, Places


class Loop:
    """The part of an event loop that places use."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.due: list[Timer] = []

    def call_later(self, delay_s: float, call: Callable[..., None], *arguments: str) -> Timer:
        timer = Timer(self, self.now_s + delay_s, partial(call, *arguments))
        self.due.append(timer)
        return timer

    def call_soon(self, call: Callable[[], None]) -> None:
        self.call_later(0, call)

    def run(self, until_s: float = 0) -> None:
        """Call what is due, up to so many seconds from now."""
        self.now_s += until_s
        while ready := [timer for timer in self.due if timer.at_s <= self.now_s]:
            for timer in ready:
                self.due.remove(timer)
                timer.call()


@dataclass(eq=False)
class Timer:
    loop: Loop
    at_s: float
    call: Callable[[], None]

    def cancel(self) -> None:
        if self in self.loop.due:
            self.loop.due.remove(self)


class Started:
    """Places for two, and what was started in them."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.places = Places(self.loop, 2)
        self.names: list[str] = []

    def enter(self, *names: str, whose: str = "a") -> None:
        for name in names:
            self.places.enter(name, whose, partial(self.names.append, name))

    def leave(self, name: str) -> None:
        self.places.leave(name)
        self.loop.run()


@pytest.fixture
def started() -> Started:
    return Started()


def test_no_more_start_than_there_are_places_and_then_in_their_order(started):
    started.enter("1", "2", "3", "4")
    assert started.names == ["1", "2"]
    started.leave("2")
    assert started.names == ["1", "2", "3"]
    started.leave("2")  # it has left
    assert started.names == ["1", "2", "3"]
    started.leave("1")
    assert started.names == ["1", "2", "3", "4"]


def test_who_leaves_before_its_turn_never_starts(started):
    started.enter("1", "2", "3", "4")
    started.leave("3")
    started.leave("1")
    assert started.names == ["1", "2", "4"]


def test_a_place_lapses_so_that_nothing_that_hangs_stops_the_others(started):
    started.enter("1", "2", "3", "4", "5")
    started.loop.run(LAPSE_S - 0.1)
    assert started.names == ["1", "2"]
    started.loop.run(0.2)
    assert started.names == ["1", "2", "3", "4"]
    started.leave("1")  # its place had lapsed: no other comes free
    assert started.names == ["1", "2", "3", "4"]


def test_who_asks_for_many_waits_behind_who_asks_for_one(started):
    started.enter("1", "2", "3", "4", whose="a")
    started.enter("5", "6", whose="b")
    started.leave("1")
    assert started.names == ["1", "2", "5"]  # b has none, a has one
    started.leave("5")
    assert started.names == ["1", "2", "5", "6"]
    started.leave("6")
    assert started.names == ["1", "2", "5", "6", "3"]


def test_whose_starts_hang_come_behind_also_when_their_places_lapsed(started):
    started.enter(*"12345678", whose="a")
    started.enter("b", whose="b")
    started.loop.run(LAPSE_S + 0.1)
    assert started.names[:3] == ["1", "2", "b"]


def test_hundreds_of_starts_that_fail_at_once_are_no_recursion(started):
    def fail(name: str) -> None:
        started.names.append(name)
        started.places.leave(name)

    for name in map(str, range(2000)):
        started.places.enter(name, "a", lambda name=name: fail(name))
    started.loop.run()
    assert started.names == [str(number) for number in range(2000)]


def test_hundreds_that_waited_and_fail_are_no_recursion(started):
    def fail(name: str) -> None:
        started.names.append(name)
        started.places.leave(name)

    started.enter("1", "2")
    for name in map(str, range(3, 2000)):
        started.places.enter(name, "a", lambda name=name: fail(name))
    started.leave("1")
    assert len(started.names) == 1999


def test_closed_it_starts_nothing_any_more(started):
    started.enter("1", "2", "3")
    started.places.close()
    started.leave("1")
    started.loop.run(2 * LAPSE_S)
    assert started.names == ["1", "2"]


def test_nothing_wakes_the_process_for_places_that_were_given_back():
    started = Started()
    started.enter("a", "b", "c")
    for name in ("a", "b"):
        started.leave(name)
    started.loop.run()
    started.leave("c")
    assert started.loop.due == []
