"""A handle on a module: the claim it holds, and the locks made through it."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from gpu_worker.records import ClaimId, LockId
from shm_store.errors import CallerError
from shm_store.keys import GenerationId, Key, short_generation

if TYPE_CHECKING:
    import torch

    from gpu_worker.record_table import RecordTable


class ModelHandle:
    """A claim on a module: as long as it has not ended, the module is there to be locked.

    Entering it (`with handle as module:`) locks the module, leaving unlocks it; both nest, and may
    be repeated until the handle is closed. A handle that is dropped ends its claim, but not a lock.

    Attributes:
        key: the name that processes share the weights by.
        generation: which weights of that key they are.
        unexpected: names of tensors that the weights have and the skeleton does not use.
    """

    def __init__(self, table: RecordTable, key: Key, claim: ClaimId) -> None:
        """Prepare to hold `claim`. Only `Worker.load` makes handles."""
        self.key = key
        self.generation = GenerationId("")
        self.unexpected: tuple[str, ...] = ()
        self._table = table
        self._claim = claim
        self._timeout_s: float | None = None
        table.watch(self, claim)

    def __enter__(self) -> torch.nn.Module:
        """Lock the module, bring it to its device unless it is there, and return it.

        Waits for room on the device as long as its load would have for the weights.

        Raises:
            WorkerClosed: the handle was closed.
            BudgetExceeded: there was no room on the device in time. It names who has what there.
            LoadTimeout: other threads build modules for so long, or one moves this one.
            DeviceOutOfMemory: the device has less memory than it should.
            In all cases nothing is locked, and the module is on the host.
        """
        lock: LockId = next(self._table.ids)
        try:
            return self._table.lock(self._claim, lock, self._timeout_s)
        except BaseException:
            self._table.unlock(lock)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        chosen: list[LockId] = []
        try:
            self._table.unlock_last(self._claim, chosen)
        except CallerError:
            raise
        except BaseException:  # from outside, such as KeyboardInterrupt, at any point of it
            self._table.unlock_last(self._claim, chosen)
            raise

    def close(self) -> None:
        """End the claim. Locks made through it go on. May be called again, in any thread."""
        try:
            self._table.end_claim(self._claim)
        except BaseException:  # from outside, at any point of it
            self._table.end_claim(self._claim)
            raise

    def __repr__(self) -> str:
        return f"<ModelHandle {self.key!r} generation {short_generation(self.generation)}>"
