"""How fast a fill goes on, and how long it still takes. Pure: who asks says what time it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

SMOOTHED_S = 10.0
"""What is longer ago than this counts for little: a third, and soon nothing."""

QUIET_S = 2.0
"""A slow source takes this long between two reports: until then silence is not slowness."""


@dataclass(slots=True)
class Pace:
    """The speed of one fill, smoothed, from the bytes that it has come to.

    An exponential average, as if the fill had stood still before it began, and then divided by what
    that takes away. So a constant speed is told exactly, from the first report on; a fill that
    stands still slows down, and a page cache that ends is soon forgotten.
    """

    begun_s: float
    seen_bytes: int = 0
    """When it began to be watched; it had come to this then. Later: at the last report."""
    _seen_s: float | None = None
    _average: float = 0.0

    def came_to(self, done_bytes: int, now_s: float) -> None:
        """Take a report. The clock never goes back."""
        took_s = now_s - self._last_s
        passed = -math.expm1(-took_s / SMOOTHED_S)
        # In no time at all, the limit of what a short time does.
        share = passed / took_s if took_s > 0 else 1 / SMOOTHED_S
        self._average = self._average * (1 - passed) + (done_bytes - self.seen_bytes) * share
        self.seen_bytes, self._seen_s = done_bytes, now_s

    def bytes_per_s(self, now_s: float) -> float:
        """Return the speed by now; 0 before the first report."""
        at_s = max(self._last_s, now_s - QUIET_S)
        known = -math.expm1(-(at_s - self.begun_s) / SMOOTHED_S)
        left = math.exp((self._last_s - at_s) / SMOOTHED_S)
        return self._average * left / known if known > 0 else 0.0

    def left_s(self, total_bytes: int, now_s: float) -> float | None:
        """Return how long it takes until all is there at this speed; None if nobody can say."""
        missing_bytes = total_bytes - self.seen_bytes
        if missing_bytes <= 0:
            return 0.0
        speed = self.bytes_per_s(now_s)
        return missing_bytes / speed if speed >= 1 else None

    @property
    def _last_s(self) -> float:
        return self.begun_s if self._seen_s is None else self._seen_s
