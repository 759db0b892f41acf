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

    from gpu_worker.mapping import Buffer
    from gpu_worker.residence import Residence

_OURS = 2
"""References to a module where they are counted: what it is read from, and the call."""


class Loaded:
    """A module, the mode it was loaded in, and the names it does not use. Guarded by its table.

    `residence` is where it is; None if it never leaves the host.

    `weights` are the mapped bytes, if they are shared. The module may not use them any more, as
    after `half()`; but as long as it is handed out, its lease goes on, or nobody would tell that it
    is retired.

    Attributes:
        module: None while it is kept weakly.
        told: its eviction has been told.
    """

    __slots__ = (
        "_itself",
        "_refs",
        "_weights",
        "module",
        "residence",
        "told",
        "train",
        "unexpected",
    )

    def __init__(
        self,
        module: torch.nn.Module,
        train: bool,
        unexpected: tuple[str, ...],
        weights: Buffer | None,
    ) -> None:
        self.module: torch.nn.Module | None = module
        self.train = train
        self.unexpected = unexpected
        self.told = False
        self.residence: Residence | None = None
        self._weights: Buffer | None = weights
        self._refs: list[weakref.ref[object]] = []
        self._itself = 0

    def count_itself(self) -> None:
        """Take note how often the module has itself, in cycles. Call it while nobody else has it.

        What its skeleton keeps of it counts as its own, too.
        """
        self._itself = self._references()

    @property
    def shared(self) -> Buffer | None:
        """The mapped bytes that it keeps the lease on; None if it has given that up."""
        return self._weights

    @shared.setter
    def shared(self, weights: Buffer | None) -> None:
        self._weights = weights

    @property
    def weights(self) -> object:
        """The mapped bytes; None if they are private, or gone."""
        if self._weights is None and len(self._refs) > 1:
            return self._refs[1]()
        return self._weights

    @property
    def elsewhere(self) -> bool:
        """Whether somebody has the module beside its record and itself."""
        return self._references() > self._itself

    @property
    def garbage(self) -> bool:
        """Whether the module is still there, and nobody has it any more, its record included."""
        return self.module is None and 0 < self._references() <= self._itself

    def weaken(self, gone: Callable[[object], object]) -> tuple[object, ...]:
        """Keep the module weakly from now on.

        Args:
            gone: called when it ends, in whatever thread. Only enqueues.

        Returns:
            What was kept so far: dropping it may run destructors.
        """
        if self.module is None:
            return ()
        kept: tuple[object, ...] = (self.module,)
        if self._weights is not None:
            kept = (self.module, self._weights)
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
        self._weights = kept[1] if len(kept) > 1 else None  # type: ignore[assignment]
        self._refs = []
        return True

    def _references(self) -> int:
        """Return how many references to the module there are beside ours; 0 if it is gone."""
        if self.module is not None:
            return sys.getrefcount(self.module) - _OURS
        kept = [ref() for ref in self._refs[:1]]
        return 0 if not kept or kept[0] is None else sys.getrefcount(kept[0]) - _OURS
