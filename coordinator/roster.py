"""When a process of the group is started again, and when the group gives up. Pure.

One `Member` for each process that is to run: the coordinator, and each worker. It hears when its
process was started and how it ended, and answers what is to be done. Time is an argument, in
seconds of any clock that does not jump.

A failure is an end with another exit code than 0. Who is restarted waits first: twice as long after
each failure, and from the beginning once it has run well for a while. Who fails too often in a
short time is not restarted again, however long it waited: a crash loop ends the group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

RESTARTS = 5


class Policy(StrEnum):
    """Whether a process that failed is started again."""

    NEVER = "never"
    ON_FAILURE = "on-failure"


@dataclass(frozen=True, slots=True)
class Rule:
    """How often one role is restarted, and how soon.

    Attributes:
        first_delay_s, longest_delay_s: the wait doubles from the first to the longest.
        healthy_s: a process that ran so long was well: the wait begins anew.
        restarts, window_s: so many within that time; the next failure ends the group.
        hopeless: exit codes that no restart mends where the very first process ends with them.
    """

    policy: Policy = Policy.ON_FAILURE
    first_delay_s: float = 0.5
    longest_delay_s: float = 30.0
    healthy_s: float = 10.0
    restarts: int = RESTARTS
    window_s: float = 600.0
    hopeless: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Finished:
    """It did what it was there for."""


@dataclass(frozen=True, slots=True)
class Again:
    """It is to be started again, `delay_s` from now."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class GivenUp:
    """It is not started again, and the group ends. `reason` is empty where that is the policy."""

    reason: str = ""


Verdict = Finished | Again | GivenUp


@dataclass(slots=True)
class Member:
    """One process that is to run, over all its lives."""

    rule: Rule
    restarts: int = 0
    """How often it was started again, all in all."""
    _started_s: float = 0.0
    _delay_s: float = 0.0
    _restarted_s: list[float] = field(default_factory=list)

    def started(self, now_s: float) -> None:
        """Its process runs since now."""
        self._started_s = now_s

    def ended(self, code: int, now_s: float) -> Verdict:
        """Its process has ended, with this exit code or by a signal (below 0). Say what follows."""
        rule = self.rule
        if code == 0:
            return Finished()
        if rule.policy is Policy.NEVER or (code in rule.hopeless and not self.restarts):
            return GivenUp()
        self._restarted_s = [at_s for at_s in self._restarted_s if now_s - at_s < rule.window_s]
        if len(self._restarted_s) >= rule.restarts:
            times = f"{len(self._restarted_s)} time{'' if len(self._restarted_s) == 1 else 's'}"
            return GivenUp(f"it was restarted {times} in {_time_text(rule.window_s)}")
        if now_s - self._started_s >= rule.healthy_s:
            self._delay_s = 0.0
        delay_s = min(max(rule.first_delay_s, 2 * self._delay_s), rule.longest_delay_s)
        self._delay_s = delay_s
        self._restarted_s.append(now_s)
        self.restarts += 1
        return Again(delay_s)


def _time_text(seconds: float) -> str:
    return f"{seconds / 60:g} minutes" if seconds >= 120 else f"{seconds:g} s"
