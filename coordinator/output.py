"""What the workers of a group write: whole lines, each with its worker's name, never waited for.

`LineCutter` is pure. An `Outlet` is our own standard output or error. Whoever reads that slowly
slows the workers down, through their pipes, and nobody else: the supervisor never waits for it.
Once it is gone, the workers' pipes go too, so that they notice as if they had written themselves.
A full disk costs lines, and no worker its pipe: how much is missing is said once there is room.

Bytes pass as they are: only line ends matter, and a line that does not end is cut.

    Note on not waiting
    fact: O_NONBLOCK belongs to the open file, which we share with whoever started us
    consequence: set on our standard output, it would make the shell's writes fail
    choice: pipes and terminals are opened anew through /proc, and the new open file does not block;
    where that is not allowed we look before every write whether there is room, and write little
    cost: in that last case another writer may take the room just then, and we wait for the reader
"""

from __future__ import annotations

import errno
import io
import os
import select
import socket
import stat
from collections.abc import Callable
from functools import partial

from coordinator.loop import Loop

LINE_LIMIT_BYTES = 64 * 1024
READ_BYTES = 64 * 1024
OUTLET_LIMIT_BYTES = 1 << 20
"""With so much unwritten, nothing more is read until half of it is written."""

SMALL_WRITE_BYTES = select.PIPE_BUF

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""There is no room for what is written, and there may be later."""
LOST = b"\nweight-cache: %d bytes are missing here, because the disk was full\n"


class LineCutter:
    """Cuts what one writer writes into lines, each with a prefix. Pure."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._half = b""

    def feed(self, data: bytes) -> bytes:
        """Return the lines that are whole now."""
        *lines, half = (self._half + data).split(b"\n")
        while len(half) > LINE_LIMIT_BYTES:
            lines.append(half[:LINE_LIMIT_BYTES])
            half = half[LINE_LIMIT_BYTES:]
        self._half = half
        return b"".join(b"%b%b\n" % (self._prefix, line) for line in lines)

    def end(self) -> bytes:
        """Return what is left, as a line."""
        return self.feed(b"\n") if self._half else b""


class Outlet:
    """One of our standard streams."""

    def __init__(self, loop: Loop, fd: int) -> None:
        """Write to what `fd` is, which stays the caller's."""
        self._loop = loop
        self._write, self._fd, self._close = _writer(fd)
        self._unwritten = bytearray()
        self._lost_bytes = 0
        """Since there was room last."""
        self._sources: set[Source] = set()
        self.gone = False
        """Nobody reads it any more."""

    def put(self, data: bytes) -> None:
        """Write `data`, now or when there is room.

        It is dropped if nobody reads any more, or if the disk is full; in the second case what is
        written next comes behind a line that says how much is missing.
        """
        if not self.gone:
            self._unwritten += data
            self.flush()

    @property
    def unwritten_bytes(self) -> int:
        return len(self._unwritten)

    def add(self, source: Source) -> None:
        self._sources.add(source)
        self._pace()

    def drop(self, source: Source) -> None:
        self._sources.discard(source)

    def flush(self) -> None:
        """Write what there is room for."""
        try:
            if self._lost_bytes and self._unwritten:
                self._write(LOST % self._lost_bytes)
                self._lost_bytes = 0
            while self._unwritten:
                written = self._write(bytes(self._unwritten[:READ_BYTES]))
                del self._unwritten[:written]
        except BlockingIOError:
            pass
        except OSError as error:
            self.gone = error.errno not in FULL
            self._lost_bytes += len(self._unwritten)
            self._unwritten.clear()
        if self._unwritten:
            self._loop.when_writable(self._fd, self.flush)
        else:
            self._loop.forget(self._fd)
        self._pace()

    def _pace(self) -> None:
        """Read on, or wait, or be gone for the workers too."""
        for source in list(self._sources):
            if self.gone:
                source.close()
            elif len(self._unwritten) > OUTLET_LIMIT_BYTES:
                self._loop.forget(source.fd)
            elif len(self._unwritten) <= OUTLET_LIMIT_BYTES // 2:
                self._loop.when_readable(source.fd, source.read)

    def close(self) -> None:
        self._loop.forget(self._fd)
        self._close()


class Source:
    """The pipe of one worker's stream."""

    def __init__(self, loop: Loop, outlet: Outlet, prefix: str) -> None:
        self._loop = loop
        self._outlet = outlet
        self._lines = LineCutter(prefix.encode())
        self.fd, self.theirs = os.pipe()
        """Ours to read, and the worker's end, for `started` to close."""
        os.set_blocking(self.fd, False)

    def started(self) -> None:
        """The worker has its end: close ours of it, and read. Or it has none: call `close` then."""
        os.close(self.theirs)
        self.theirs = -1
        if self._outlet.gone:
            self.close()
        else:
            self._outlet.add(self)

    def read(self) -> None:
        """Pass on some of what is there."""
        if self._read_some() == b"":
            self.close()

    def finish(self) -> None:
        """Its worker has ended: pass on what it wrote, and close. Its heirs lose the pipe."""
        left = OUTLET_LIMIT_BYTES  # an heir of the pipe could write for ever
        while self.fd >= 0 and left > 0 and (data := self._read_some()):
            left -= len(data)
        self.close()

    def _read_some(self) -> bytes | None:
        try:
            data = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return None
        self._outlet.put(self._lines.feed(data))  # which may close this, when its reader is gone
        return data

    def close(self) -> None:
        """Read no more. What was half a line goes out as one."""
        if self.theirs >= 0:
            os.close(self.theirs)
            self.theirs = -1
        if self.fd < 0:
            return
        self._loop.forget(self.fd)
        os.close(self.fd)
        self.fd = -1
        self._outlet.drop(self)
        self._outlet.put(self._lines.end())


class OutletText(io.TextIOBase):
    """A text stream over an outlet, for our own lines."""

    def __init__(self, outlet: Outlet) -> None:
        self._outlet = outlet

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        self._outlet.put(text.encode(errors="backslashreplace"))
        return len(text)


def _writer(fd: int) -> tuple[Callable[[bytes], int], int, Callable[[], None]]:
    """Return what writes without waiting, an fd to wait with, and what closes it."""
    kind = os.fstat(fd).st_mode
    if stat.S_ISSOCK(kind):
        connected = socket.socket(fileno=os.dup(fd))
        send = partial(_send_now, connected)
        return send, connected.fileno(), connected.close
    if stat.S_ISFIFO(kind) or stat.S_ISCHR(kind):
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            anew = os.open(f"/proc/self/fd/{fd}", flags)
            return partial(os.write, anew), anew, partial(os.close, anew)
        except OSError:  # it is another user's, or /proc is not mounted
            ours = os.dup(fd)
            return partial(_write_if_room, ours), ours, partial(os.close, ours)
    ours = os.dup(fd)  # a file: it never waits for a reader
    return partial(os.write, ours), ours, partial(os.close, ours)


def _send_now(connected: socket.socket, data: bytes) -> int:
    return connected.send(data, socket.MSG_DONTWAIT)


def _write_if_room(fd: int, data: bytes) -> int:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    if not poll.poll(0):
        raise BlockingIOError
    return os.write(fd, data[:SMALL_WRITE_BYTES])
