"""What a worker's owner wants to hear of. Other people's code, called with no lock held.

A callback that raises is logged and changes nothing: what it was told of has happened already. One
that is interrupted (KeyboardInterrupt) is raised once everybody has been told.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from gpu_worker.records import EvictCause
from shm_store.keys import GenerationId, Key

logger = logging.getLogger("gpu_worker")

Evicted = tuple[Key, GenerationId, EvictCause]


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Each may be None.

    Attributes:
        on_evict: called once for every module that is gone from its worker, with the key, the
            generation and the cause (`EvictCause`).
        on_hit: called when a load found its module in the worker, with the key and the generation.
        on_miss: called when a load has to ask the coordinator, with the key.
    """

    on_evict: Callable[[str, str, str], object] | None = None
    on_hit: Callable[[str, str], object] | None = None
    on_miss: Callable[[str], object] | None = None

    def evicted(self, gone: list[Evicted]) -> None:
        """Tell of every eviction, whatever any of the calls raises. Takes each out of `gone`."""
        if self.on_evict is None:
            return
        interrupted: BaseException | None = None
        while gone:
            try:
                _tell(self.on_evict, *gone.pop(0))
            except BaseException as error:  # from outside: the others are told first
                interrupted = interrupted or error
        if interrupted is not None:
            raise interrupted

    def hit(self, key: Key, generation: GenerationId) -> None:
        if self.on_hit is not None:
            _tell(self.on_hit, key, generation)

    def miss(self, key: Key) -> None:
        if self.on_miss is not None:
            _tell(self.on_miss, key)


def _tell(callback: Callable[..., object], *facts: str) -> None:
    try:
        callback(*facts)
    except Exception as error:
        report("a callback raised", error)


def report(what: str, error: BaseException) -> None:
    """Log an error of other people's code, whatever the log's handlers do."""
    try:
        logger.error("weight-cache: %s", what, exc_info=error)
    except Exception:  # a handler that raises must not stop what is under way
        pass
