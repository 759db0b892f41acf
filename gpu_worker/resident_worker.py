"""The resident worker: has the weights of chosen keys on a device, for whoever attaches beside it.

It is a worker like any other, of a process that computes nothing, so what it has is admitted,
revoked, retired and counted like everybody's, and outlives what theirs outlives. Rules:

- It takes nothing from anybody: what it asks for waits behind all others, and only what nobody
  leases goes for it. What others need of what it has goes at once: it locks nothing for long.
- One thread for each key. The first time they take turns, in the order in which keys are named.
  Then each waits for events, and where there are none, such as for a file to be
  there again, for a pause that doubles; see `_Pauses`.
- It has no module. What a skeleton gives no place is on the device all the same: processes share
  the memory of a whole checkpoint, whatever part of it each of them uses.
- A device whose memory cannot be shared gets nothing: a copy there would be of use to nobody. The
  weights are kept on the host then.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpu_worker.attach import attach
from gpu_worker.device import device_named
from shm_store.errors import (
    BudgetExceeded,
    CallerError,
    Draining,
    LoadTimeout,
    SourceError,
    WeightCacheError,
    WorkerClosed,
)
from shm_store.keep import KEEP_OPTION
from shm_store.keys import Key, short_generation
from shm_store.report import size_text

if TYPE_CHECKING:
    import torch

    from gpu_worker.handle import ModelHandle
    from gpu_worker.residence import Residence

logger = logging.getLogger("gpu_worker.resident_worker")

ROOM_WAIT_S = 1.0
"""How long it waits for room on the device in one go. The copy on the host is in use meanwhile, so
whoever needs that waits as long.
"""

LOOK_S = 1.0
"""How often it looks whether the coordinator has left for good. It asks nobody for that."""

END_TIMEOUT_S = 5.0

HEALTHY_S = 10.0
"""What was there for so long is brought back at once."""

CAUSES = {
    "room": "others need its room on the host, or its limit was lowered",
    "there": "others need its room on the device, or its limit was lowered",
    "replaced": "there are newer weights",
    "invalidated": "it was retired, or there are newer weights",
    "shutdown": "it is given back",
}


@dataclass(slots=True)
class _Pauses:
    """Pauses, each twice as long as the one before, up to the longest."""

    first_s: float
    longest_s: float
    _next_s: float = 0.0

    def next_s(self) -> float:
        pause_s = min(max(self.first_s, self._next_s), self.longest_s)
        self._next_s = 2 * pause_s
        return pause_s

    def begin_anew(self) -> None:
        self._next_s = 0.0


class ResidentWorker:
    """Keeps weights on a device from when it is made until `close`.

    Attributes:
        device: the name of it.
        shares: its memory can be shared.
        place: where weights are kept, in words.
    """

    def __init__(self, device: str, keep: Mapping[Key, str], socket: str | None = None) -> None:
        """Attach, and begin to bring what is to be kept.

        Args:
            keep: the path of a source for each key, first ones first.

        Raises:
            WeightCacheError: as `attach`.
        """
        where = device_named(device)
        self.device = where.name
        self._ends: queue.SimpleQueue[WeightCacheError] = queue.SimpleQueue()
        self._kept: dict[Key, _Kept] = {}
        before: _Kept | None = None
        for key, source in keep.items():
            before = self._kept[key] = _Kept(self, key, source, before)
        self.worker = attach(
            socket,
            where.name,
            f"resident {where.name}",
            share_vram=True,
            on_evict=self._evicted,
        )
        self.worker._client.background = True
        self.shares = where.shares
        self.place = where.name if where.shares else "the host"
        keys = f"{len(keep)} key{'' if len(keep) == 1 else 's'} to keep"
        if not keep:
            keys = f"nothing to keep: name it with {KEEP_OPTION} KEY=SOURCE"
        self.say(f"attached with {self.device}, {keys}")
        if not self.shares:
            why = "its memory cannot be shared" if where.pool else "it has no memory of its own"
            self.say(f"{why}, so weights are kept on the host")
        for kept in self._kept.values():
            kept.start()

    def wait(self) -> WeightCacheError:
        """Return why it is to end, once it is. `Draining` is no failure."""
        while True:
            try:
                return self._ends.get(timeout=LOOK_S)
            except queue.Empty:
                pass
            if self.worker._client.ended:
                try:
                    self.worker.flush()
                except WeightCacheError as error:
                    return error

    def close(self) -> None:
        """Give everything back. What is under way ends with the process."""
        self.worker.shutdown(END_TIMEOUT_S)

    def end(self, error: WeightCacheError) -> None:
        """Have `wait` return this."""
        self._ends.put(error)

    def say(self, text: str, *, level: int = logging.INFO) -> None:
        """Write a line of the log."""
        logger.log(level, "weight-cache: %s", text)

    def _evicted(self, key: str, generation: str, cause: str) -> None:
        kept = self._kept.get(Key(key))
        if kept is not None:
            kept.gone(CAUSES.get(cause, cause))


class _Kept(threading.Thread):
    """Keeps the weights of one key, in a thread of its own."""

    def __init__(self, owner: ResidentWorker, key: Key, source: str, before: _Kept | None) -> None:
        super().__init__(name=f"weight-cache-kept-{key}", daemon=True)
        self._owner = owner
        self._key = key
        self._source = source
        self._before = before
        self._tried = threading.Event()
        """It was on the device, or there was no room, or it cannot be kept: the next may try."""
        self._size_bytes = 0
        self._causes: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Why it is not there any more. In any thread, with any lock: only put."""
        self._there: bool | None = None
        """Whether it was said to be there, or not to be; None if nothing was said so far."""
        self._there_s = 0.0
        """Since when it was there."""
        self._worked = False
        self._failures = _Pauses(1.0, 60.0)
        self._room = _Pauses(0.25, 5.0)
        self._returns = _Pauses(0.5, 60.0)

    def gone(self, cause: str) -> None:
        """Hear that it is not there any more."""
        self._causes.put(cause)

    def run(self) -> None:
        if self._before is not None:
            self._before._tried.wait()  # first named, first served
            self._before = None
        try:
            while True:
                self._turn()
        except WorkerClosed:
            pass  # by `close`
        except WeightCacheError as error:
            error.message = f"{self._key!r} cannot be kept: {error.message}"
            self._owner.end(error)
        except BaseException as bug:  # else nobody would notice that it is kept no more
            logger.exception("weight-cache: %r is kept no more", self._key)
            self._owner.end(WeightCacheError(f"{self._key!r} is kept no more: {bug!r}"))

    def _turn(self) -> None:
        """Bring it, unless it is there; then wait until something has changed.

        Raises:
            WeightCacheError: there is no use in going on.
        """
        try:
            placed = self._bring()
        except (Draining, CallerError):
            raise
        except SourceError as error:
            if not self._worked:
                raise
            pause_s = self._failed(error)
        except WeightCacheError as error:
            pause_s = self._failed(error)
        else:
            self._failures.begin_anew()
            if placed:
                self._room.begin_anew()
                cause = self._causes.get()
                while self._is_there():
                    cause = self._causes.get()  # that was of what it has taken the place of
                self._left(cause)
                return
            pause_s = self._room.next_s()
        with contextlib.suppress(queue.Empty):
            self._left(self._causes.get(timeout=pause_s))

    def _failed(self, error: WeightCacheError) -> float:
        self._tried.set()
        pause_s = self._failures.next_s()
        self._there = False
        text = f"{self._key!r} is not there: {error}; tried again in {pause_s:g} s"
        self._owner.say(text, level=logging.WARNING)
        return pause_s

    def _left(self, cause: str) -> None:
        """It has left. What does so again and again is not brought back at once, each time."""
        now_s = time.monotonic()
        if self._there:
            self._owner.say(f"{self._key!r} has left {self._owner.place}: {cause}")
        self._there = None
        if now_s - self._there_s >= HEALTHY_S:
            self._returns.begin_anew()
        else:
            time.sleep(self._returns.next_s())

    def _bring(self) -> bool:
        """Have it on the host, and on the device if that shares its memory and has room.

        Returns:
            Whether it is where it is to be.
        """
        started_s, moved_bytes = time.monotonic(), self._moved_bytes()
        with contextlib.closing(self._load()) as handle:
            self._worked = True
            there, no_room = True, ""
            if self._owner.shares:
                there, no_room = self._bring_there(handle)
            took_s = time.monotonic() - started_s
            moved_bytes = self._moved_bytes() - moved_bytes
            self._tell(handle, there, no_room, moved_bytes, took_s)
        self._tried.set()
        return there

    def _load(self) -> ModelHandle:
        return self._owner.worker.load(self._key, skeleton=self._skeleton, source=self._source)

    def _bring_there(self, handle: ModelHandle) -> tuple[bool, str]:
        """Have it on the device. Returns whether it is, and why not."""
        residence = self._residence()
        if residence is not None:
            residence.left = self._has_left
        handle._timeout_s = ROOM_WAIT_S
        try:
            with handle:
                if self._is_there():
                    return True, ""
        except (BudgetExceeded, LoadTimeout) as error:
            return False, error.message
        self._owner.worker.offload(self._key)
        return False, "the device is too small for it"

    def _is_there(self) -> bool:
        """Say whether it is where it is to be. Asks nobody."""
        known = self._owner.worker._table.residences()
        if not self._owner.shares or not self._size_bytes:
            return self._key in known
        residence = known.get(self._key)
        return residence is not None and residence.here and residence.size_bytes > 0

    def _residence(self) -> Residence | None:
        return self._owner.worker._table.residences().get(self._key)

    def _has_left(self) -> None:
        """Hear that it is not on the device any more. What was retired has left the host before."""
        there = self._key in self._owner.worker._table.residences()
        self.gone(CAUSES["there" if there else "invalidated"])

    def _tell(
        self, handle: ModelHandle, there: bool, no_room: str, moved_bytes: int, took_s: float
    ) -> None:
        """Say what has changed, once."""
        if there:
            self._there_s = time.monotonic()
        if self._there is there:
            return
        self._there = there
        gen, size = short_generation(handle.generation), size_text(self._size_bytes)
        if not there:
            self._owner.say(f"{self._key!r} {gen} is on the host alone, {size}: {no_room}")
            return
        moved = f", {size_text(moved_bytes)} moved" if self._owner.shares else ""
        where = self._owner.place
        self._owner.say(f"{self._key!r} {gen} is on {where}: {size}{moved}, {took_s:.2f} s")

    def _moved_bytes(self) -> int:
        return sum(
            one.moved_bytes for one in self._owner.worker._table.counted() if one.key == self._key
        )

    def _skeleton(self) -> torch.nn.Module:
        """Return a module that takes note how large weights are, and has no place for any."""
        import torch

        kept = self

        class Nothing(torch.nn.Module):
            def load_state_dict(
                self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
            ) -> Any:
                kept._size_bytes = _size_bytes(state_dict)
                return [], []

        return Nothing()


def _size_bytes(state: Mapping[str, Any]) -> int:
    """Return the bytes of all tensors, what several share once."""
    import torch

    from gpu_worker.wrappers import plain_parts

    held = [tensor for tensor in state.values() if isinstance(tensor, torch.Tensor)]
    storages = [part.untyped_storage() for tensor in held for part in plain_parts(tensor)]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())
