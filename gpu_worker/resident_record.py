"""What a residence knows of the record whose module it moves: locks, and weights on the host.

It refers to the record weakly, which has the residence, and that has this.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from gpu_worker.client import Client
from gpu_worker.records import Record, Records
from gpu_worker.request import Ask
from shm_store.keys import GenerationId

if TYPE_CHECKING:
    from gpu_worker.loaded import Loaded
    from gpu_worker.mapping import Buffer


class ResidentRecord:
    """A record as its residence sees it. All but `fetch` are called with the table's lock.

    Attributes:
        key: the name that processes share the weights by.
        keeps_host: its weights stay on the host, too, while it is on its device.
    """

    def __init__(
        self,
        records: Records[Loaded],
        record: Record[Loaded],
        client: Client,
        ask: Ask,
        keeps_host: bool,
    ) -> None:
        self.key = record.key
        self.keeps_host = keeps_host
        self._records = weakref.ref(records)
        self._record = weakref.ref(record)
        self._client = client
        self._ask = ask

    @property
    def locks(self) -> int:
        """How many there are."""
        records, record = self._records(), self._record()
        return 0 if records is None or record is None else records.locks_on(record)

    @property
    def generation(self) -> GenerationId:
        return self._known().generation

    @property
    def weights(self) -> Buffer | None:
        """The weights on the host, if they are shared, and there."""
        return self._known().module.shared

    def give_up(self) -> Buffer | None:
        """Keep the weights on the host no more, and return them, if they are there.

        Their lease ends with the last tensor over them.
        """
        loaded = self._known().module
        weights, loaded.shared = loaded.shared, None
        return weights

    def fetch(self, left_s: float | None) -> tuple[GenerationId, Buffer]:
        """Ask the coordinator for the weights again. They may be of another generation by now."""
        granted = self._client.acquire(self._ask, left_s, None)
        return granted.gen, granted.buffer

    def keep(self, gen: GenerationId, weights: Buffer) -> None:
        """Keep weights on the host that were fetched."""
        record = self._known()
        record.generation, record.module.shared = gen, weights

    def _known(self) -> Record[Loaded]:
        record = self._record()
        assert record is not None  # it is locked
        return record
