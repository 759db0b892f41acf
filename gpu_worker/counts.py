"""What a worker has done with each model, for people to see whether a cache helps. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from shm_store.keys import Key
from shm_store.report import ModelReport
from shm_store.wire import MODELS_LIMIT


@dataclass(slots=True)
class Count:
    """Of one key on one device; as in `ModelReport`."""

    hits: int = 0
    misses: int = 0
    moved_bytes: int = 0
    waited_s: float = 0.0
    moved_s: float = 0.0


class Counts:
    """Every count of one worker, guarded by its table's lock. Of too many keys, the last."""

    def __init__(self) -> None:
        self._counts: dict[tuple[Key, str], Count] = {}

    def of(self, key: Key, device: str) -> Count:
        """Return the count to add to."""
        count = self._counts.get((key, device))
        if count is None:
            while len(self._counts) >= MODELS_LIMIT:
                del self._counts[next(iter(self._counts))]
            count = self._counts[key, device] = Count()
        return count

    def reports(self) -> Iterator[ModelReport]:
        for (key, device), count in self._counts.items():
            yield ModelReport(key, device, **asdict(count))
