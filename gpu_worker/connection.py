"""The socket to the coordinator: frames go out without ever blocking, and come in by one thread.

Knows no message's meaning: what arrives goes to its session, in order. A connection that is lost is
made again by that thread, until the coordinator has said that it leaves, or refused the session.

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
import time
from collections import deque
from collections.abc import Sequence
from typing import NoReturn, Protocol

from shm_store.channel import TOO_MANY_UNDER_WAY, Channel, close_all, connect, frames
from shm_store.errors import (
    ConnectionLost,
    CoordinatorLost,
    FdsExhausted,
    ResourceError,
    WeightCacheError,
    WorkerClosed,
)
from shm_store.wire import AnyMessage, encode

logger = logging.getLogger("gpu_worker")

CLOSED = "the connection was closed: nothing used it any more"

FIRST_PAUSE_S = 0.01
LONGEST_PAUSE_S = 1.0
"""Between two attempts to connect."""

OUTAGE_SHARE = 8
"""A pause is this part of the outage so far: it makes no outage longer by more than that."""


class Speaker(Protocol):
    """Whose connection it is: the session. The reader thread calls all of it."""

    def take(self, data: bytes, fds: list[int]) -> None:
        """Take a message and its fds. A WeightCacheError that it raises ends the connection."""

    def parted(self, fault: WeightCacheError | None) -> None:
        """There is no connection for now. The lock is held.

        Args:
            fault: what failed here, if anything did. It would fail again.
        """

    def bear(self) -> float:
        """Tell those who have waited too long for a coordinator; return when to look again."""

    def state(self) -> None:
        """Say who it is on a new connection, and all that it has. The lock is held."""

    def ended(self, error: WeightCacheError) -> None:
        """There is no connection any more. After this, nothing is taken or sent."""


class Connection:
    """One connection and its reader thread.

    `lock` orders what is sent; its owner may guard more with it. Nothing waits while it is held.
    """

    def __init__(self, path: str, speaker: Speaker, patience_s: float) -> None:
        """Describe a connection to `path`; `open` makes it.

        Args:
            patience_s: how long to look for a coordinator only to tell it that nothing is held.
        """
        self.path = path
        self.lock = threading.RLock()
        self.at_work = threading.RLock()
        """Held while a message is taken, so that a fork can wait for its end."""
        self.lost: WeightCacheError | None = None
        """Why there is no connection any more."""
        self.away: WeightCacheError | None = None
        """Why nobody answers at present: set with each loss, and until `settle`."""
        self.away_since_s = 0.0
        self.lasting = False
        """It is made again once it is lost."""
        self.farewell: WeightCacheError | None = None
        """What the end of file will mean, if it has been said."""
        self.closing = False
        self._closing_since_s = 0.0
        self._hurry = False
        self._speaker = speaker
        self._patience_s = patience_s
        self._attempts = 0
        """To connect, since nobody answers."""
        self._broken: ConnectionLost | None = None
        self._channel: Channel | None = None
        self._wake = -1
        self._outbox: deque[tuple[bytes, Sequence[int]]] = deque()
        self._settled = threading.Event()
        self._reader = self._new_reader()

    @property
    def runs_here(self) -> bool:
        """Whether the calling thread is the reader. Ids of ended threads are used again."""
        return self._reader.ident == threading.get_ident() and self._reader.is_alive()

    @property
    def connected(self) -> bool:
        """Whether what is posted now can arrive."""
        return self._channel is not None

    def open(self) -> None:
        """Connect, have the session introduce itself, and start to read.

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
                self._speaker.state()
        except OSError as error:
            raise FdsExhausted(f"no connection could be made: {error.strerror}") from error
        self._reader.start()

    def post(self, message: AnyMessage, fds: Sequence[int] = ()) -> None:
        """Send a message, or leave it to the reader. The lock is held; the fds stay the caller's.

        Without a connection nothing is sent, and nobody is told here: the next one begins with all
        that is so then.

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
            if not self.closing:
                self.closing, self._closing_since_s = True, time.monotonic()
            self._hurry = self._hurry or hurry
            self._alert()
            unread = self._reader.ident is None and self.lost is None
        if unread:
            self._lose(WorkerClosed("the connection was given up before it was made"))

    def settle(self) -> None:
        """Somebody answers: an outage, if there was one, is over."""
        with self.lock:
            self.away = None
            self._attempts = 0
        self._settled.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the reader to end."""
        if self._reader.is_alive():
            self._reader.join(timeout_s)

    def after_fork(self) -> None:
        """In a forked child: close the parent's fds, and be ready to make a connection of its own.

        One that was not made yet, or was closing, is lost. The lock is held.
        """
        if self.lost is not None:
            return
        if self._channel is not None:
            self._channel.close()  # without a shutdown, as in `_hang_up`: it is the parent's
            self._channel = None
        self._drop_outbox()
        self.farewell = self._broken = None
        self.at_work = threading.RLock()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1
        if self.closing or not self.lasting:
            self.closing, self.lost = True, WorkerClosed(CLOSED)
            return
        self.away, self.away_since_s = ConnectionLost("this process was forked"), time.monotonic()
        self._attempts = 0
        self._settled = threading.Event()
        try:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            self.lost = FdsExhausted(f"no connection could be made: {error.strerror}")
            return
        self._reader = self._new_reader()

    def start_after_fork(self) -> None:
        """In a forked child: begin to make that connection, unless there is to be none."""
        if self.lost is None:
            self._reader.start()

    def wait_settled(self, timeout_s: float) -> bool:
        """Say whether somebody has answered after a fork, by then at the latest."""
        return self.lost is not None or self._settled.wait(timeout_s)

    def _new_reader(self) -> threading.Thread:
        return threading.Thread(target=self._read, name="weight-cache-reader", daemon=True)

    def _alert(self) -> None:
        """Have the reader look at the outbox and at `closing`. The lock is held."""
        if self.lost is None and self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _break(self, channel: Channel, error: ConnectionLost) -> None:
        """A frame is lost, so the connection is. The reader still takes what had come before."""
        self._broken = self._broken or error
        try:
            channel.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer has done so already

    def _read(self) -> None:
        """Listen, and come back after each loss, until it is final."""
        error = self.lost  # given up, by an exception from outside, while this thread started
        try:
            while error is None:
                # Without a channel, after a fork.
                error = (self._channel and self._listen()) or self._come_back()
        except BaseException as bug:  # a reader that ends unnoticed would leave everyone waiting
            error = self._failed(bug)
        self._lose(error)

    def _listen(self) -> WeightCacheError | None:
        """Take what comes until the connection is over; return why, if that is final."""
        channel, fault = self._channel, False
        assert channel is not None
        try:
            self._exchange(channel)
        except ConnectionLost as lost:
            error: WeightCacheError = self.farewell or self._broken or lost
        except WeightCacheError as refused:
            error, fault = refused, True
        except BaseException as bug:
            error, fault = self._failed(bug), True
        # To come back would not change what the coordinator has said, but for want of something.
        told = error is self.farewell and not isinstance(error, ResourceError)
        if told or self._hurry or not self.lasting or isinstance(error, WorkerClosed):
            return error
        with self.lock:
            self._hang_up()
            if self.away is None:
                self.away_since_s = time.monotonic()
                logger.info("the connection to %s was lost: %s", self.path, error.message)
            self.away = error
            self._speaker.parted(error if fault else None)
        return None

    def _failed(self, bug: BaseException) -> ConnectionLost:
        logger.error("the reader of %s failed", self.path, exc_info=bug)
        return ConnectionLost(f"the reader failed: {bug!r}")

    def _exchange(self, channel: Channel) -> NoReturn:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        while True:
            poller.register(channel, select.POLLIN | (select.POLLOUT if self._outbox else 0))
            for fd, _ in poller.poll(None if self.away is None else 1000 * self._speaker.bear()):
                if fd == self._wake:
                    os.eventfd_read(self._wake)
            if self._outbox:
                self._send_outbox(channel)
            if self.closing and (self._hurry or not self._outbox):
                raise WorkerClosed(CLOSED)
            with self.at_work:
                try:
                    received = channel.receive()
                except BlockingIOError:
                    continue
                if received is None:
                    raise ConnectionLost(f"the coordinator on {self.path} went away")
                self._speaker.take(*received)
                del received

    def _come_back(self) -> WeightCacheError | None:
        """Connect again, however long that takes; return why not, if there is no use in it."""
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        next_s = time.monotonic() + (self._pause_s() if self._attempts else 0.0)
        while True:
            look_s = self._speaker.bear()
            if self._hurry or self._has_closed():
                return WorkerClosed(CLOSED)
            left_s = next_s - time.monotonic()
            if left_s > 0:
                # Rounded up, or the rest of a millisecond would be spent in a circle.
                if poller.poll(1000 * min(left_s, look_s) + 1):
                    os.eventfd_read(self._wake)
                continue
            self._attempts += 1
            try:
                self._reconnect()
                return None
            except (CoordinatorLost, ResourceError) as error:
                with self.lock:
                    self._hang_up()
                    self.away = error
            except WeightCacheError as error:
                return error
            next_s = time.monotonic() + self._pause_s()

    def _reconnect(self) -> None:
        try:
            channel = connect(self.path, blocking=False)
        except OSError as error:
            raise FdsExhausted(f"no connection could be made: {error.strerror}") from error
        with self.lock:
            self._channel = channel
            self._speaker.state()

    def _pause_s(self) -> float:
        outage_s = time.monotonic() - self.away_since_s
        return min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, outage_s / OUTAGE_SHARE))

    def _has_closed(self) -> bool:
        """Say whether nobody needs it, and nobody was there for long enough to be told so."""
        waited_s = time.monotonic() - self._closing_since_s
        return self.closing and self._attempts > 0 and waited_s >= self._patience_s

    def _hang_up(self) -> None:
        """Drop the channel, and what was said about it. The lock is held."""
        self._drop_outbox()
        if self._channel is not None:
            # A forked child may have the socket open, too, so closing would not end it.
            self._break(self._channel, ConnectionLost("closed"))
            self._channel.close()
            self._channel = None
        self.farewell = self._broken = None

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
            self._hang_up()
            if self._wake >= 0:
                os.close(self._wake)
        self._speaker.ended(error)


def _duplicates(fds: Sequence[int]) -> list[int]:
    try:
        return [os.dup(fd) for fd in fds]
    except OSError as error:
        raise FdsExhausted(f"an fd could not be kept to be sent: {error.strerror}") from error
