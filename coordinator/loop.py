"""One thread's waiting: fds with what they wake, alarms by name, and signals as bytes.

The supervisor's; the coordinator has asyncio. Nothing may wait inside a callback.
"""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

Callback = Callable[[], None]


class Loop:
    """Calls back when an fd can be read or written, or a time has come."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._alarms: dict[str, tuple[float, Callback]] = {}

    def close(self) -> None:
        self._selector.close()

    def when_readable(self, fd: int, call: Callback) -> None:
        """Call whenever `fd` can be read. Once is enough: nothing, if it is watched already."""
        if fd not in self._selector.get_map():
            self._selector.register(fd, selectors.EVENT_READ, call)

    def when_writable(self, fd: int, call: Callback) -> None:
        """Call whenever `fd` can be written. Nothing, if it is watched already."""
        if fd not in self._selector.get_map():
            self._selector.register(fd, selectors.EVENT_WRITE, call)

    def forget(self, fd: int) -> None:
        """Watch `fd` no more; before it is closed. Nothing, if it is not watched."""
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def alarm(self, name: str, delay_s: float, call: Callback) -> None:
        """Call once, `delay_s` from now, instead of what has that name now."""
        self._alarms[name] = (time.monotonic() + delay_s, call)

    def cancel(self, name: str) -> None:
        self._alarms.pop(name, None)

    def turn(self) -> None:
        """Wait until something is due, and call what is."""
        wait_s = None
        if self._alarms:
            wait_s = max(0.0, min(at_s for at_s, _ in self._alarms.values()) - time.monotonic())
        for key, _ in self._selector.select(wait_s):
            # A callback before this one may have closed the fd, or given its number to another.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        now_s = time.monotonic()
        for name, (at_s, call) in sorted(self._alarms.items(), key=lambda item: item[1][0]):
            if at_s <= now_s and self._alarms.get(name) == (at_s, call):
                del self._alarms[name]
                call()


@contextmanager
def wakeups(numbers: Iterable[int]) -> Iterator[tuple[socket.socket, tuple[int, ...]]]:
    """Give a socket on which signals arrive as bytes, and those that do: none that is ignored.

    They may be blocked until then.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    signals = tuple(n for n in numbers if signal.getsignal(n) != signal.SIG_IGN)
    wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, _only_wake) for number in signals}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)  # the front has held them for us
    try:
        yield ours, signals
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        ours.close()
        theirs.close()


def _only_wake(number: int, frame: FrameType | None) -> None:
    """The byte on the wakeup socket says it all."""
