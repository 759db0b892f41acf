"""How far a fill of this process is, told now and then. The clock is the caller's."""

from __future__ import annotations

import time
from collections.abc import Callable

PAUSE_S = 0.25


class FillMeter:
    """Counts bytes as they are written, and reports them: every 0.25 s at most, and at the end."""

    def __init__(
        self,
        total_bytes: int,
        report: Callable[[int, int], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Count up to `total_bytes`. What `report` raises comes out of `add` and `finish`."""
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._told_bytes = 0
        self._report = report
        self._clock = clock
        self._told_s = clock()

    def add(self, size_bytes: int) -> None:
        """Count `size_bytes` more."""
        self._done_bytes += size_bytes
        now_s = self._clock()
        if now_s - self._told_s >= PAUSE_S:
            self._told_s = now_s
            self._tell()

    def finish(self) -> None:
        """Report how it ended, if that is not known."""
        if self._told_bytes < self._done_bytes:
            self._tell()

    def _tell(self) -> None:
        self._told_bytes = self._done_bytes
        self._report(self._done_bytes, self._total_bytes)
