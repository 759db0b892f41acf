"""Waiting for what other processes do by themselves, and what is raised when they do wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

LOOK_S = 0.005

Found = TypeVar("Found")


class Violation(Exception):
    """What must hold under every fault did not."""


def until(look: Callable[[], Found | None], limit_s: float, what: Callable[[], str]) -> Found:
    """Return the first thing that `look` returns and that is true.

    Raises:
        Violation: there is none within `limit_s`; `what` says what is lacking.
    """
    until_s = time.monotonic() + limit_s
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > until_s:
            raise Violation(f"{what()} (waited for {limit_s:g} s)")
        threading.Event().wait(LOOK_S)
