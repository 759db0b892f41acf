"""A refusal as its asker reads it: in Python nobody draws a table of those who are in the way."""

from __future__ import annotations

import os

from shm_store.errors import BudgetExceeded, InvalidateIncomplete, holders_text


def name_holders(error: BudgetExceeded | InvalidateIncomplete) -> None:
    """Put the largest holders into the text of `error`, those of this process by that name."""
    named = holders_text(error.holders, os.getpid())
    if named:
        error.message = f"{error.message}; held by {named}"
        error.args = (error.message,)
