"""What the demo claims, and whether it held. A run that claims nothing has not succeeded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec


class Claim(msgspec.Struct, frozen=True):
    """One claim: what should hold, whether it did, and what was seen."""

    claim: str
    held: bool
    seen: str


class Claims:
    """Collects claims in the order they are made, and tells each to a listener."""

    def __init__(self, tell: Callable[[Claim], None]) -> None:
        self._tell = tell
        self._made: list[Claim] = []

    def check(self, claim: str, held: bool, seen: str) -> None:
        """Take down whether `claim` held, and what was `seen`."""
        made = Claim(claim, bool(held), seen)
        self._made.append(made)
        self._tell(made)

    @property
    def made(self) -> Sequence[Claim]:
        return tuple(self._made)

    @property
    def hold(self) -> bool:
        """Whether there are claims, and all of them held."""
        return bool(self._made) and all(claim.held for claim in self._made)
