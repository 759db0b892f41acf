"""One SEQPACKET socket: whole messages and the fds beside them, and who is at the other end.

A frame is one flag byte (`MORE` or `LAST`) and a part of a message, together `FRAME_LIMIT_BYTES` at
most. A longer message goes in several frames, all but the last of them full, its fds with the
first. So no message needs a paging scheme of its own, no frame is empty, and what is half received
takes no more memory than its bytes.

    Note on zero-length frames
    fact: on SEQPACKET a zero-length frame reads exactly like end of file
    consequence: a peer could fake its own end, or end a reader by mistake
    choice: every frame carries a flag byte, so no correct frame is empty
    cost: one byte

    Note on resets
    fact: a peer that closes without having read everything makes the next call here fail with
    ECONNRESET, once; what it had sent before is still queued behind that
    consequence: taking the reset for the end loses its last frames (a RELEASE, a COMMIT)
    choice: after a reset, read on until end of file
    cost: none

    Note on fds under way
    fact: a user without privileges may have no more fds in messages that nobody has read, all its
    processes together, than the one that sends may have open; then it gets ETOOMANYREFS
    consequence: whoever does not read would end the connections of others, if that were an end
    choice: it is a full socket, of which nothing was sent; a blocking one cannot wait for that
    cost: poll() finds room, so who is to send again must not rely on it alone
"""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shm_store.errors import (
    ArgumentRefused,
    ConnectionLost,
    FdsExhausted,
    NoCoordinator,
    PeerForbidden,
    PlatformUnsupported,
    ProtocolViolation,
)

FRAME_LIMIT_BYTES = 64 * 1024
"""Far below the default socket buffer (about 208 KiB), which bounds a frame."""

MESSAGE_LIMIT_BYTES = 32 * 1024 * 1024
FDS_LIMIT = 252
"""No message carries more. The kernel's bound is one more (SCM_MAX_FD), so that too many show."""

TOO_MANY_UNDER_WAY = "this user's processes have too many fds under way to be sent another"

_LAST = b"\0"
_MORE = b"\1"
_PART_LIMIT_BYTES = FRAME_LIMIT_BYTES - 1
_FD_SIZE_BYTES = struct.calcsize("i")
# Room for one fd too many, which tells a peer that sends too many from a full fd table here.
_ANCILLARY_BYTES = (
    socket.CMSG_SPACE((FDS_LIMIT + 1) * _FD_SIZE_BYTES) if hasattr(socket, "CMSG_SPACE") else 0
)
# Plain numbers: testing a bit with an enum of `socket` costs as much as the system call.
_DATA_LOST = int(socket.MSG_TRUNC)
_LOST = _DATA_LOST | int(socket.MSG_CTRUNC)
_CLOEXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
PATH_LIMIT_BYTES = 107
SO_PEERPIDFD = 77


class Credentials(NamedTuple):
    """Who connected, by the kernel's word at the time of `connect`."""

    pid: int
    uid: int
    gid: int


class Channel:
    """One end of a connection. Owns its socket; not thread-safe in either direction by itself.

    Sending and receiving do not share state, so one thread may send while another receives.
    """

    def __init__(self, connected: socket.socket, *, limit_bytes: int = MESSAGE_LIMIT_BYTES) -> None:
        """Take over `connected`, a SOCK_SEQPACKET socket, blocking or not (but with no timeout).

        Args:
            limit_bytes: the longest message to accept, and so what a peer can make this end hold.
        """
        self.socket = connected
        self._limit_bytes = limit_bytes
        self._parts: list[bytes] = []
        self._fds: list[int] = []

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: bytes, fds: Sequence[int] = ()) -> None:
        """Send a whole message on a blocking socket. The fds stay the caller's.

        Raises:
            ConnectionLost: the peer is gone.
            FdsExhausted: this user has too many fds under way. What is to carry fds was not sent.
        """
        for frame, carried in frames(message, fds):
            try:
                self.send_frame(frame, carried)
            except BlockingIOError as error:
                if not self.socket.getblocking():
                    raise
                raise FdsExhausted(TOO_MANY_UNDER_WAY) from error

    def send_frame(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Send one frame made by `frames`.

        Raises:
            BlockingIOError: the socket is non-blocking and full, or, with the errno ETOOMANYREFS,
                this user has too many fds under way; nothing was sent.
            ConnectionLost: the peer is gone, or this socket was closed.
        """
        try:
            if fds:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
                self.socket.sendmsg([frame], [rights])
            else:
                self.socket.send(frame)
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:
                raise BlockingIOError(error.errno, error.strerror) from error
            raise ConnectionLost(f"a frame could not be sent: {error.strerror}") from error

    def receive(self) -> tuple[bytes, list[int]] | None:
        """Return the next whole message and its fds, which are then the caller's to close.

        Returns:
            None at end of file.

        Raises:
            BlockingIOError: the socket is non-blocking and holds no further frame; what is half
                received is kept.
            ConnectionLost: the connection broke.
            FdsExhausted: an fd could not be installed here; the frame's other fds are closed.
            ProtocolViolation: a frame that `frames` does not make, a message that is too long, or
                too many fds. Its fds are closed.
        """
        while True:
            frame, fds = self._receive_frame()
            flag, part = frame[:1], frame[1:]
            if flag == _LAST and not self._parts:
                return part, fds
            self._fds += fds
            if not frame:
                self.forget()
                return None
            if fault := self._fault_in(frame, fds):
                self.forget()
                raise ProtocolViolation(fault)
            self._parts.append(part)
            if flag == _LAST:
                whole, taken = b"".join(self._parts), self._fds
                self._parts, self._fds = [], []
                return whole, taken

    def _fault_in(self, frame: bytes, fds: list[int]) -> str:
        """Say what is wrong with one frame of several; nothing if it may be kept."""
        if frame[:1] not in (_LAST, _MORE):
            return "a frame has no valid flag byte"
        if frame[:1] == _MORE and len(frame) < FRAME_LIMIT_BYTES:
            return "a frame is not full although more follow"
        if self._parts and fds:
            return "fds came behind the first frame of their message"
        if len(self._parts) * _PART_LIMIT_BYTES + len(frame) - 1 > self._limit_bytes:
            return f"a message exceeds {self._limit_bytes} bytes"
        return ""

    def _receive_frame(self) -> tuple[bytes, list[int]]:
        while True:
            try:
                frame, ancillary, flags, _ = self.socket.recvmsg(
                    FRAME_LIMIT_BYTES, _ANCILLARY_BYTES, _CLOEXEC
                )
                break
            except BlockingIOError:
                raise
            except ConnectionResetError:
                continue  # see the note on resets
            except OSError as error:
                self.forget()
                raise ConnectionLost(f"the connection broke: {error.strerror}") from error
        fds = _fds_in(ancillary) if ancillary else []
        if flags & _LOST or len(fds) > FDS_LIMIT:
            close_all(fds)
            self.forget()
            if flags & _DATA_LOST:
                raise ProtocolViolation(f"a frame exceeds {FRAME_LIMIT_BYTES} bytes")
            if len(fds) > FDS_LIMIT:
                raise ProtocolViolation(f"a message carried more than {FDS_LIMIT} fds")
            # The kernel drops what it cannot install: this process has no room for more.
            raise FdsExhausted("a file descriptor sent to this process was lost")
        return frame, fds

    def forget(self) -> None:
        """Drop a half-received message and close its fds."""
        close_all(self._fds)
        self._parts, self._fds = [], []

    def close(self) -> None:
        """Close the socket and whatever was half received. May be called again."""
        self.forget()
        self.socket.close()

    def credentials(self) -> Credentials:
        """Return the peer's pid, uid and gid (SO_PEERCRED)."""
        packed = self.socket.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        return Credentials(*struct.unpack("3i", packed))

    def open_pidfd(self) -> int:
        """Return a pidfd of the peer's process, the caller's to close.

        SO_PEERPIDFD (Linux 6.5) names the very process that connected; before it, the pid in the
        credentials has to do.

        Raises:
            ProcessLookupError: the process has ended already.
        """
        try:
            return self.socket.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
        except OSError as error:
            if error.errno in (errno.ESRCH, errno.EINVAL):
                raise ProcessLookupError("the peer's process has ended") from error
            return os.pidfd_open(self.credentials().pid)


def frames(message: bytes, fds: Sequence[int] = ()) -> Iterable[tuple[bytes, Sequence[int]]]:
    """Cut `message` into frames for `Channel.send_frame`; the fds go with the first."""
    if len(message) <= _PART_LIMIT_BYTES:
        yield _LAST + message, fds
        return
    for start in range(0, len(message), _PART_LIMIT_BYTES):
        end = start + _PART_LIMIT_BYTES
        yield (_MORE if end < len(message) else _LAST) + message[start:end], () if start else fds


def connect(path: str, *, blocking: bool = True) -> Channel:
    """Return a channel to the coordinator that listens on `path`.

    Args:
        blocking: wait for a place where too many others wait to be accepted; the channel blocks.

    Raises:
        NoCoordinator: no such socket, or nothing listens on it; or one would have to wait.
        PeerForbidden: this user may not use it.
        ArgumentRefused: the path is too long for a socket.
        PlatformUnsupported: not Linux.
    """
    _require_platform()
    _check_path(path)
    connecting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connecting.setblocking(blocking)
    try:
        connecting.connect(path)
    except PermissionError as error:
        connecting.close()
        raise PeerForbidden(f"this user may not open {path}") from error
    except OSError as error:
        connecting.close()
        # The commonest mistake of all: its text is here, so the traceback need not say it twice.
        raise NoCoordinator(f"no coordinator answers on {path}: {error.strerror}") from None
    return Channel(connecting)


def listen(path: str) -> socket.socket:
    """Return a non-blocking listening socket on `path` with mode 0600. The path must not exist.

    Raises:
        ArgumentRefused: the path is too long for a socket.
        PlatformUnsupported: not Linux.
        OSError: the path exists already, or its directory does not.
    """
    _require_platform()
    _check_path(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        # The mode of the socket file is that of the inode bind() makes, so set it before listen().
        listening.bind(path)
        os.chmod(path, 0o600)
        listening.listen(512)
    except OSError:
        listening.close()
        raise
    return listening


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected SEQPACKET sockets, for a parent and its child."""
    _require_platform()
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def close_all(fds: Iterable[int]) -> None:
    """Close fds that arrived and are not wanted."""
    for fd in fds:
        os.close(fd)


def _fds_in(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % _FD_SIZE_BYTES])
    return list(found)


def _check_path(path: str) -> None:
    if len(os.fsencode(path)) > PATH_LIMIT_BYTES:
        raise ArgumentRefused(
            f"socket path {path!r} is longer than {PATH_LIMIT_BYTES} bytes",
            remedy="choose a shorter --socket or WEIGHT_CACHE_SOCKET",
        )


def _require_platform() -> None:
    if not (hasattr(socket, "SO_PEERCRED") and hasattr(os, "pidfd_open")):
        raise PlatformUnsupported("this system has no SO_PEERCRED or no pidfd_open")
