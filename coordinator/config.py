"""What a coordinator is started with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of one coordinator.

    Attributes:
        socket: path of its Unix socket; beside it lies the lock file that makes it the only one.
        ram_budget_bytes: limit of the pool `ram`; None takes half of what this process may use.
        resume_patience_s: how long sessions of an earlier coordinator are waited for, before what
            they may have mapped is freed.
        leave_after_s: end once no session has been there for so long; None stays for ever.
        huge_pages: whether sealed segments are collapsed to pages of 2 MiB in the background.
    """

    socket: str
    ram_budget_bytes: int | None = None
    resume_patience_s: float = 10.0
    leave_after_s: float | None = None
    huge_pages: bool = True
