"""What a record keeps of a module, and how tightly.

A record that is to make room and is idle keeps its module weakly. If nobody else has it, it is gone
at once. If somebody has (a name bound by `as model` is enough), letting go would free nothing: so
it is handed out as before, and is gone when that somebody lets go.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_ALONE = 2
"""References to a module that only its record has: one, and that of the call that counts them."""


class Loaded:
    """A module, the mode it was loaded in, and the names it does not use. Guarded by its table.

    `weights` are the mapped bytes, if they are shared. The module may not use them any more, as
    after `half()`; but as long as it is handed out, its lease goes on, or nobody would tell that it
    is retired.

    Attributes:
        module: None while it is kept weakly.
        told: its eviction has been told.
    """

    __slots__ = ("_refs", "_weights", "module", "told", "train", "unexpected")

    def __init__(
        self, module: torch.nn.Module, train: bool, unexpected: tuple[str, ...], weights: object
    ) -> None:
        self.module: torch.nn.Module | None = module
        self.train = train
        self.unexpected = unexpected
        self.told = False
        self._weights = weights
        self._refs: list[weakref.ref[object]] = []

    @property
    def weights(self) -> object:
        """The mapped bytes; None if they are private, or gone."""
        if self._weights is None and len(self._refs) > 1:
            return self._refs[1]()
        return self._weights

    @property
    def elsewhere(self) -> bool:
        """Whether somebody has the module beside its record; or it has itself, in a cycle."""
        return self.module is None or sys.getrefcount(self.module) > _ALONE

    def weaken(self, gone: Callable[[object], object]) -> tuple[object, ...]:
        """Keep the module weakly from now on.

        Args:
            gone: called when it ends, in whatever thread. Only enqueues.

        Returns:
            What was kept so far: dropping it may run destructors.
        """
        if self.module is None:
            return ()
        kept = (self.module,) if self._weights is None else (self.module, self._weights)
        self._refs = [weakref.ref(one, gone) for one in kept]
        self.module = self._weights = None
        return kept

    def revive(self) -> bool:
        """Keep the module again, if it is still there; say whether it is."""
        if self.module is not None:
            return True
        kept = [ref() for ref in self._refs]
        if any(one is None for one in kept):
            return False
        self.module = kept[0]  # type: ignore[assignment]
        self._weights = kept[1] if len(kept) > 1 else None
        self._refs = []
        return True
