"""The socket to the coordinator: frames go out without ever blocking, and come in by one thread.

Knows no message's meaning. What arrives goes to `take`, in order; the end goes to `ended`, once.

    Note on a coordinator that does not read
    fact: a stopped process leaves its socket buffer full after a few hundred frames, and a blocking
    send then waits for it
    consequence: whoever sends under a lock would stop every thread of this process, and a caller
    could not leave at its own timeout
    choice: the socket does not block; what it does not take goes to an outbox, which the reader
    empties when it can
    cost: one poll() per message, and an eventfd to wake the reader
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn

from shm_store.channel import TOO_MANY_UNDER_WAY, Channel, close_all, connect, frames
from shm_store.errors import ConnectionLost, FdsExhausted, WeightCacheError, WorkerClosed
from shm_store.wire import AnyMessage, encode

logger = logging.getLogger("gpu_worker")

CLOSED = "the connection was closed: nothing used it any more"


class Connection:
    """One connection and its reader thread.

    `lock` orders what is sent; its owner may guard more with it. Nothing waits while it is held.
    """

    def __init__(
        self,
        path: str,
        take: Callable[[bytes, list[int]], None],
        ended: Callable[[WeightCacheError], None],
    ) -> None:
        """Describe a connection to `path`; `open` makes it.

        Args:
            take: gets each message and its fds, which are then its own, in the reader thread. A
                WeightCacheError that it raises ends the connection.
            ended: told why there is no connection any more, in the reader thread; after that,
                nothing is taken or sent.
        """
        self.path = path
        self.lock = threading.RLock()
        self.lost: WeightCacheError | None = None
        """Why there is no connection any more."""
        self.farewell: WeightCacheError | None = None
        """What the end of file will mean, if it has been said."""
        self.closing = False
        self._hurry = False
        self._take = take
        self._ended = ended
        self._channel: Channel | None = None
        self._wake = -1
        self._outbox: deque[tuple[bytes, Sequence[int]]] = deque()
        self._reader = threading.Thread(target=self._read, name="weight-cache-reader", daemon=True)

    @property
    def runs_here(self) -> bool:
        """Whether the calling thread is the reader. Ids of ended threads are used again."""
        return self._reader.ident == threading.get_ident() and self._reader.is_alive()

    def open(self, first: AnyMessage) -> None:
        """Connect, send `first`, and start to read.

        Raises:
            NoCoordinator, PeerForbidden, ArgumentRefused, PlatformUnsupported: as `connect`.
            FdsExhausted: this process has no fd left.
        """
        try:
            channel = connect(self.path)
            channel.socket.setblocking(False)
            with self.lock:
                self._channel = channel
                self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                self.post(first)
        except OSError as error:
            raise FdsExhausted(f"no connection could be made: {error.strerror}") from error
        self._reader.start()

    def post(self, message: AnyMessage, fds: Sequence[int] = ()) -> None:
        """Send a message, or leave it to the reader. The lock is held; the fds stay the caller's.

        Without a connection nothing is sent, and nobody is told here: the reader tells them.

        Raises:
            ArgumentRefused: the message cannot be encoded. Nothing was sent.
            FdsExhausted: the socket is full, and an fd could not be kept for later; or this user
                has too many under way. Nothing was sent.
        """
        channel = self._channel
        if channel is None:
            return
        for frame, carried in frames(encode(message), fds):
            if not self._outbox:
                try:
                    channel.send_frame(frame, carried)
                    continue
                except BlockingIOError as error:
                    if error.errno == errno.ETOOMANYREFS:
                        # Nobody could tell the reader when to try again.
                        raise FdsExhausted(TOO_MANY_UNDER_WAY) from error
                except ConnectionLost as error:
                    self._break(channel, error)
                    return
            self._outbox.append((frame, _duplicates(carried)))
            self._alert()

    def close(self, *, hurry: bool = False) -> None:
        """Have the reader end the connection when everything is sent; in a `hurry`, at once."""
        with self.lock:
            self.closing = True
            self._hurry = self._hurry or hurry
            self._alert()
            unread = self._reader.ident is None and self.lost is None
        if unread:
            self._lose(WorkerClosed("the connection was given up before it was made"))

    def join(self, timeout_s: float) -> None:
        """Wait for the reader to end."""
        if self._reader.is_alive():
            self._reader.join(timeout_s)

    def forget_inherited(self) -> None:
        """In a forked child: close the parent's fds. Touches no lock, sends and ends nothing."""
        if self._channel is not None and self.lost is None:
            self._channel.close()
            if self._wake >= 0:
                os.close(self._wake)
            for _, carried in self._outbox:
                close_all(carried)

    def _alert(self) -> None:
        """Have the reader look at the outbox and at `closing`. The lock is held."""
        if self.lost is None and self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _break(self, channel: Channel, error: ConnectionLost) -> None:
        """A frame is lost, so the connection is. The reader still takes what had come before."""
        if self.farewell is None:
            self.farewell = error
        try:
            channel.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer has done so already

    def _read(self) -> None:
        if self.lost is not None:
            return  # given up, by an exception from outside, while this thread started
        assert self._channel is not None
        try:
            self._listen(self._channel)
        except WeightCacheError as error:
            self._lose(error)
        except BaseException as error:  # a reader that ends unnoticed would leave everyone waiting
            logger.error("the reader of %s failed", self.path, exc_info=error)
            self._lose(ConnectionLost(f"the reader failed: {error!r}"))

    def _listen(self, channel: Channel) -> NoReturn:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        while True:
            poller.register(channel, select.POLLIN | (select.POLLOUT if self._outbox else 0))
            for fd, _ in poller.poll():
                if fd == self._wake:
                    os.eventfd_read(self._wake)
            if self._outbox:
                self._send_outbox(channel)
            if self.closing and (self._hurry or not self._outbox):
                raise WorkerClosed(CLOSED)
            try:
                received = channel.receive()
            except BlockingIOError:
                continue
            if received is None:
                raise self.farewell or ConnectionLost(f"the coordinator on {self.path} went away")
            self._take(*received)
            del received

    def _send_outbox(self, channel: Channel) -> None:
        with self.lock:
            while self._outbox:
                frame, carried = self._outbox[0]
                try:
                    channel.send_frame(frame, carried)
                except BlockingIOError:
                    return
                except ConnectionLost as error:
                    self._break(channel, error)
                    # What is left cannot be sent, and must not keep the reader from the end.
                    self._drop_outbox()
                    return
                self._outbox.popleft()
                close_all(carried)

    def _drop_outbox(self) -> None:
        for _, carried in self._outbox:
            close_all(carried)
        self._outbox.clear()

    def _lose(self, error: WeightCacheError) -> None:
        """End it, once: by the time of a second end the fds may be somebody else's."""
        with self.lock:
            if self.lost is not None:
                return
            self.lost = error
            self._drop_outbox()
            if self._channel is not None:
                # A forked child may have the socket open, too, so closing would not end it.
                self._break(self._channel, ConnectionLost("closed"))
                self._channel.close()
            if self._wake >= 0:
                os.close(self._wake)
        self._ended(error)


def _duplicates(fds: Sequence[int]) -> list[int]:
    try:
        return [os.dup(fd) for fd in fds]
    except OSError as error:
        raise FdsExhausted(f"an fd could not be kept to be sent: {error.strerror}") from error
