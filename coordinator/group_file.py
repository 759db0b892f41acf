"""The file beside a socket that says which group has it, and who is in it.

The supervisor holds a lock on its first byte for life, so there is one group for a socket; and one
on its second from when the file says the first word of this group. What it says is true as long as
that is locked: after a SIGKILL the file is left behind, and means nothing, also while the next
group has it and has said nothing yet. It is one line, JSON and its checksum, written anew whenever
something changes. The coordinator has no part in this.

    Note on the lock
    fact: `flock` cannot be looked at without taking it, and a reader that takes it for a moment
    would turn away a group that starts just then
    choice: an open-file lock (F_OFD_SETLK): F_OFD_GETLK looks without taking
    cost: its struct has to be packed by hand
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import zlib
from typing import Self

import msgspec

from shm_store.errors import ArgumentRefused, CoordinatorRunning

FILE_LIMIT_BYTES = 1 << 20
READS_LIMIT = 100
"""A file that is read while it is written can have something of both: read it again."""

_LOCK = struct.Struct("hhqqi0q")
"""struct flock: type, whence, start, length, pid."""

_TAKEN = _LOCK.pack(fcntl.F_WRLCK, 0, 0, 1, 0)
_SAID = _LOCK.pack(fcntl.F_WRLCK, 0, 1, 1, 0)


class MemberReport(msgspec.Struct, frozen=True):
    """One process of the group, over all its lives.

    `state` is "running", "restarting", "finished" or "ended"; `last_end` says how its last life
    ended, or nothing.
    """

    name: str
    state: str
    pid: int | None
    restarts: int
    last_end: str = ""


class GroupReport(msgspec.Struct, frozen=True):
    """A group: the process that was launched, and what it runs."""

    pid: int
    ending: bool
    members: tuple[MemberReport, ...]


class GroupFile:
    """The locked file, until `close`."""

    def __init__(self, socket: str) -> None:
        """Take the place of the group on `socket`.

        Raises:
            CoordinatorRunning: another group has it.
            ArgumentRefused: there can be no such file.
        """
        self._path = group_path(socket)
        self._fd = self._take()

    def _take(self) -> int:
        while True:
            try:
                fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise ArgumentRefused(
                    f"{self._path} cannot be opened: {error.strerror}",
                    remedy="choose a --socket in a folder that exists and is yours",
                ) from error
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _TAKEN)
            except OSError as error:
                os.close(fd)
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                found = read_group(self._path.removesuffix(".group"))
                who = f" (pid {found.pid})" if found else ""
                raise CoordinatorRunning(
                    f"another `weight-cache launch`{who} has {self._path.removesuffix('.group')}"
                ) from None
            if self._is_ours(fd):
                return fd
            os.close(fd)  # its owner unlinked it between our open and our lock

    def _is_ours(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self._path))
        except FileNotFoundError:
            return False

    def write(self, group: GroupReport) -> None:
        """Say what the group is now. A full disk leaves what was there, or nothing readable."""
        said = msgspec.json.encode(group)
        line = said + b" " + _checksum(said) + b"\n"
        try:
            os.pwrite(self._fd, line, 0)
            os.ftruncate(self._fd, len(line))
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _SAID)
        except OSError:
            pass  # `status` then shows less; the group has better things to do

    def close(self) -> None:
        """Remove the file, if it is still ours, and let it go."""
        if self._is_ours(self._fd):
            os.unlink(self._path)
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def group_path(socket: str) -> str:
    """Return the path of the file for the group on `socket`."""
    return f"{socket}.group"


def read_group(socket: str) -> GroupReport | None:
    """Return the group that has `socket`; None if none has, or it has not said so yet."""
    try:
        fd = os.open(group_path(socket), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        kind, *_ = _LOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _SAID))
        if kind == fcntl.F_UNLCK:
            return None  # left behind
        return msgspec.json.decode(_first_line(fd), type=GroupReport)
    except (OSError, msgspec.DecodeError):
        return None
    finally:
        os.close(fd)


def _first_line(fd: int) -> bytes:
    """Return what was written last, without its checksum. Nothing if that is never right."""
    for _ in range(READS_LIMIT):
        line = os.pread(fd, FILE_LIMIT_BYTES, 0).partition(b"\n")[0]
        said, _, checksum = line.rpartition(b" ")
        if checksum == _checksum(said):
            return said
    return b""


def _checksum(line: bytes) -> bytes:
    return b"%08x" % zlib.crc32(line)


def group_lines(group: GroupReport) -> list[str]:
    """Return the group as lines for people."""
    state = "ending" if group.ending else "running"
    lines = [f"group of `weight-cache launch` (pid {group.pid}): {state}"]
    for member in group.members:
        text = f"  {member.name}: {member.state}"
        if member.pid is not None:
            text += f", pid {member.pid}"
        if member.restarts:
            text += f", restarted {member.restarts} time{'s' if member.restarts > 1 else ''}"
        if member.last_end:
            text += f", last ended {member.last_end}"
        lines.append(text)
    return lines
