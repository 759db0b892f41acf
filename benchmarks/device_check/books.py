"""Whether the books of a device say what its driver says, at every step."""

from __future__ import annotations

from benchmarks.device_check.checks import Found, Missed
from benchmarks.device_check.models import Large
from benchmarks.device_check.place import MIB, Place
from shm_store.report import size_text

TURNS = 2


def agree_at_every_step(place: Place) -> Found:
    """Two models that fit only by turns, and one whose tensor somebody keeps."""
    size_bytes = max(place.size_bytes, 24 * MIB)
    limit_bytes = size_bytes * 3 // 2 // (2 * MIB) * (2 * MIB)
    place.limit(limit_bytes)
    first, second = (place.load(lambda: Large(size_bytes, 20)) for _ in range(2))
    ledger = _Ledger(place, limit_bytes)
    for _ in range(TURNS):
        with first:
            ledger.compare("the first is locked")
        with second:
            ledger.compare("the second has taken its place")
    with first as module:
        kept = next(module.parameters()).detach()
        place.worker.offload(second.key)
    del module
    place.worker.offload(first.key)
    if ledger.compare("a tensor of it is kept") == 0:
        raise Missed("a tensor is still there, and nothing is charged for it")
    del kept
    if ledger.compare("nothing is there") != 0:
        raise Missed("the device is empty, and something is charged")
    figures = {"steps": ledger.steps, "most_apart_bytes": ledger.most_apart_bytes}
    apart = size_text(ledger.most_apart_bytes)
    said = f"{ledger.steps} steps, the driver's free memory at most {apart} off"
    return Found(said, figures)


class _Ledger:
    """Books and driver, each from where they were at first."""

    def __init__(self, place: Place, limit_bytes: int) -> None:
        self._place = place
        self._limit_bytes = limit_bytes
        place.settle()
        self._own_bytes = place.own_bytes()
        self._used_bytes = place.used_bytes()
        self.steps = 0
        self.most_apart_bytes = 0

    def compare(self, step: str) -> int:
        """Return what is charged.

        Raises:
            Missed: it is not what is there, or more than the limit.
        """
        place = self._place
        place.settle()
        self.steps += 1
        charged_bytes = place.charged_bytes()
        own_bytes = place.own_bytes() - self._own_bytes
        apart_bytes = abs(place.used_bytes() - self._used_bytes - charged_bytes)
        self.most_apart_bytes = max(self.most_apart_bytes, apart_bytes)
        if charged_bytes != own_bytes:
            raise Missed(f"{step}: charged {charged_bytes} bytes, and this process has {own_bytes}")
        if apart_bytes > place.slack_bytes:
            raise Missed(f"{step}: charged {charged_bytes} bytes, {apart_bytes} from the driver's")
        if charged_bytes > self._limit_bytes:
            raise Missed(f"{step}: charged {charged_bytes} bytes of {self._limit_bytes}")
        return charged_bytes


CHECKS = (("VRAM books and the driver agree", agree_at_every_step),)
