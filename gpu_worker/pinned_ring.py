"""A few buffers through which bytes go from host to device: read into one while others are copied.

Pure but for its threads: what reads, what copies, and what the buffers are, callers say.

Rules:

- The buffers are a budget: there are no others, whoever fills whatever.
- A buffer is written to only when the copy out of it is over.
- `send` returns when the source has been read, not when the copies are over; also when it raises.

    Note on several readers
    fact: one thread reads 8 to 10 GB/s out of a memfd; a link of today takes 25 to 55
    consequence: one reader leaves most of the link idle
    choice: a few threads, which read side by side, as reading needs no GIL; and buffers of a few
    MiB, so that the first copies begin early
    cost: the threads, which sleep otherwise
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol


class Copy(Protocol):
    """A copy that was started. torch's events are that."""

    def synchronize(self) -> object:
        """Wait until it is over."""


Read = Callable[[memoryview, int], object]
"""Fills the memory it is given with the source's bytes from an offset on."""

Start = Callable[[int, int, int], Copy]
"""Starts to copy out of the buffer of that number: to an offset of the target, so many bytes."""


@dataclass(slots=True)
class _Buffer:
    number: int
    memory: memoryview
    copy: Copy | None = None
    """The last one out of it."""


class PinnedRing:
    """Buffers, and the threads that read into them. Thread-safe."""

    def __init__(self, buffers: Sequence[memoryview], readers: int) -> None:
        """Use `buffers`, of equal size, and at most as many threads as `readers`."""
        self.buffer_bytes = len(buffers[0])
        self._free: SimpleQueue[_Buffer] = SimpleQueue()
        """Those that nobody reads into; the one that was used longest ago first."""
        for number, memory in enumerate(buffers):
            self._free.put(_Buffer(number, memory))
        self._readers = min(readers, len(buffers))
        self._threads = ThreadPoolExecutor(self._readers, "weight-cache-reader")

    def send(self, size_bytes: int, read: Read, start: Start) -> None:
        """Read `size_bytes`, and start the copies of all of them.

        Raises:
            Whatever `read`, `start` or an earlier copy raises first. Nothing is read any more, and
            the ring can be used as before.
        """
        sending = _Sending(size_bytes, self.buffer_bytes, read, start)
        try:
            for _ in range(min(self._readers, -(-size_bytes // self.buffer_bytes))):
                self._threads.submit(sending.run, self._free)
            sending.wait()
        finally:
            sending.stop()
        if sending.error is not None:
            try:
                raise sending.error
            finally:
                del sending  # whose error has this frame in its traceback


class _Sending:
    """The steps of one `send`, which its readers take one after the other.

    An interrupt may come anywhere in `send`, also while it has a reader started. So who reads is
    counted by the readers: after `stop`, nobody does, and nobody begins.
    """

    def __init__(self, size_bytes: int, step_bytes: int, read: Read, start: Start) -> None:
        self.error: BaseException | None = None
        self._size_bytes = size_bytes
        self._step_bytes = step_bytes
        self._read = read
        self._start = start
        self._changed = threading.Condition()
        """Guards what follows, and `error`."""
        self._next = 0
        self._reading = 0

    def run(self, free: SimpleQueue[_Buffer]) -> None:
        """Take steps until there are no more. In a reader's thread."""
        while (offset := self._begin()) is not None:
            error: BaseException | None = None
            try:
                self._step(free, offset)
            except BaseException as raised:
                error = raised
            self._end(error)

    def wait(self) -> None:
        """Wait until all is read, or one step has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._next >= self._size_bytes and not self._reading)

    def stop(self) -> None:
        """Let no step begin any more, and wait until none is under way."""
        with self._changed:
            self._next = self._size_bytes
            self._changed.wait_for(lambda: not self._reading)

    def _begin(self) -> int | None:
        with self._changed:
            offset = self._next
            if offset >= self._size_bytes:
                return None
            self._next += self._step_bytes
            self._reading += 1
            return offset

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            self._reading -= 1
            if error is not None:
                self.error = self.error or error
                self._next = self._size_bytes
            self._changed.notify_all()

    def _step(self, free: SimpleQueue[_Buffer], offset: int) -> None:
        length = min(self._step_bytes, self._size_bytes - offset)
        buffer = free.get()
        try:
            copy, buffer.copy = buffer.copy, None
            if copy is not None:
                copy.synchronize()
            self._read(buffer.memory[:length], offset)
            buffer.copy = self._start(buffer.number, offset, length)
        finally:
            free.put(buffer)
