"""One accepted connection: frames in, frames out, and back-pressure between them.

A peer that does not read is not read either: its answers wait here, bounded by what it had asked,
and nobody else notices.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable, Sequence

from coordinator.fd_limit import exhausted
from shm_store.channel import Channel, frames
from shm_store.errors import ConnectionLost, FdsExhausted, WeightCacheError
from shm_store.keys import GenerationId, RequestId
from shm_store.wire import Cause, Fail, Filling, ToLoader, ToSession, encode

BURST = 16
"""Messages read from one peer before the others get their turn."""

LAST_WORDS_LIMIT = 1024
"""More than a socket buffer holds. A forked child may still have the socket and go on talking."""

IN_FLIGHT_PAUSE_S = 0.05
"""Between two attempts to send an fd; see the note on fds in flight in `channel`."""


class Connection:
    """A non-blocking channel on the event loop.

    Args:
        receive: called with every message and its fds, which it then owns.
        lost: called once, with the reason, when the connection is over; the channel is closed.
        fds_of: gives the fds that go with a message, by generation, at the moment it is sent.
            Numbers are never queued: by the time a slow peer reads, a number could name something
            else.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        channel: Channel,
        receive: Callable[[Connection, bytes, list[int]], None],
        lost: Callable[[Connection, WeightCacheError | None], None],
        fds_of: Callable[[GenerationId], Sequence[int]],
    ) -> None:
        self._loop = loop
        self._receive = receive
        self._lost = lost
        self._fds_of = fds_of
        self._outgoing: deque[tuple[bytes, GenerationId | None]] = deque()
        self.channel = channel
        self.open = True
        loop.add_reader(channel.fileno(), self._readable)

    def send(self, message: ToSession | ToLoader, segment: GenerationId | None = None) -> None:
        """Send now, or as soon as the peer reads. Progress is not worth waiting for."""
        if not self.open or (self._outgoing and isinstance(message, Filling)):
            return
        blocked = bool(self._outgoing)
        for index, (frame, _) in enumerate(frames(encode(message))):
            self._outgoing.append((frame, segment if index == 0 else None))
        if not blocked:
            self._flush()

    def drain_input(self) -> None:
        """Read everything that has arrived: these are the last words of a process that ended."""
        for _ in range(LAST_WORDS_LIMIT):
            if not self.open or not self._read_one():
                return

    def close(self, reason: WeightCacheError | None = None) -> None:
        """Close at once; what was queued is lost. May be called again."""
        if not self.open:
            return
        self.open = False
        fd = self.channel.fileno()
        self._loop.remove_reader(fd)
        self._loop.remove_writer(fd)
        if reason is not None and not self._outgoing:
            self._say_why(reason)
        self.channel.close()
        self._outgoing.clear()
        self._lost(self, reason)

    def _say_why(self, reason: WeightCacheError) -> None:
        """Tell the peer, if it still listens, why it is closed."""
        try:
            self.channel.send_frame(
                *next(iter(frames(encode(Fail(RequestId(0), Cause.of(reason))))))
            )
        except (BlockingIOError, ConnectionLost):
            pass  # it reads nothing, or is gone: then it finds the end of file

    def _readable(self) -> None:
        for _ in range(BURST):
            if not self.open or not self._read_one():
                return

    def _read_one(self) -> bool:
        try:
            received = self.channel.receive()
        except BlockingIOError:
            return False
        except FdsExhausted:
            # It is ours that are too few, and the peer shall read so.
            self.close(exhausted("one that was sent to it was lost"))
            return False
        except WeightCacheError as error:
            self.close(error)
            return False
        if received is None:
            self.close()
            return False
        self._receive(self, *received)
        return True

    def _flush(self) -> None:
        """Send what is queued. While something is left, write instead of reading."""
        blocked = self._send_queued()
        if blocked is not None:
            self._loop.remove_reader(self.channel.fileno())
            self._await_room(blocked)

    def _await_room(self, blocked: BlockingIOError) -> None:
        if blocked.errno == errno.ETOOMANYREFS:
            self._loop.call_later(IN_FLIGHT_PAUSE_S, self._writable)
        else:
            self._loop.add_writer(self.channel.fileno(), self._writable)

    def _writable(self) -> None:
        if not self.open:
            return
        fd = self.channel.fileno()
        self._loop.remove_writer(fd)
        blocked = self._send_queued()
        if blocked is not None:
            self._await_room(blocked)
        else:
            self._loop.add_reader(fd, self._readable)

    def _send_queued(self) -> BlockingIOError | None:
        """Send until the queue is empty, or return what blocks it."""
        while self._outgoing:
            frame, segment = self._outgoing[0]
            fds = () if segment is None else self._fds_of(segment)
            try:
                self.channel.send_frame(frame, fds)
            except BlockingIOError as blocked:
                return blocked
            except ConnectionLost:
                # The peer is gone, but what it had sent before may still be unread: the reader
                # comes to it, then to the end of file.
                self._outgoing.clear()
                return None
            self._outgoing.popleft()
        return None
