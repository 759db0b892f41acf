"""The socket on which a group's coordinator talks to its supervisor, and who may.

Datagrams in, from anybody who can open the path; each with the pid that the kernel says sent it.
Only the coordinator that runs now is heard. Everything else, and everything wrong, is dropped with
its fds closed, and named in the log: at its first time, its tenth, its hundredth and so on.

    Note on pids
    fact: a pid may be given to another process once its process has been reaped
    consequence: a datagram's pid alone could name a stranger
    choice: the supervisor reads all that is queued before it reaps its coordinator, and expects
    nobody until the next one runs
    cost: none
"""

from __future__ import annotations

import array
import os
import select
import socket
import stat
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.fd_store import (
    DEFAULT_NAME,
    NOTICE_LIMIT_BYTES,
    FdStore,
    Notice,
    NoticeRefused,
    read_notice,
)
from shm_store.channel import close_all

DATAGRAMS_AT_ONCE = 64
"""So many are read before others get their turn."""

WRONG_LIMIT = 64
"""So many different complaints are counted."""

SCM_FDS_LIMIT = 253
REFUSALS_LIMIT_BYTES = 4096  # PIPE_BUF: a pipe with any room takes it whole

_CREDENTIALS = struct.Struct("3i")
_ANCILLARY_BYTES = (
    socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(SCM_FDS_LIMIT * 4)
    if hasattr(socket, "CMSG_SPACE")
    else 0
)


@dataclass(frozen=True, slots=True)
class Datagram:
    """As it came. Its fds are the receiver's."""

    pid: int
    data: bytes
    fds: list[int]
    cut: bool
    """Something of it did not arrive: it was too long, or there was no room for its fds."""


class NotifySocket:
    """One bound socket, and the store that it fills."""

    def __init__(self, path: str, store: FdStore, say: Callable[[str], None]) -> None:
        """Bind `path`, which must not exist. `say` is called with what is wrong, in words."""
        self.path = path
        self._store = store
        self._say = say
        self._wrong: Counter[str] = Counter()
        self._refusals: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._socket.bind(path)
            os.chmod(path, 0o600)
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def hear(self, pid: int, at_most: int | None = DATAGRAMS_AT_ONCE) -> Notice:
        """Read what has come, do what the coordinator wants stored and removed, and say the rest.

        Args:
            pid: of the coordinator; 0 while there is none.
            at_most: datagrams to read; None reads all that there are.

        Returns:
            A notice with `ready` and `stopping`, if one of those read said so.
        """
        ready = stopping = False
        while at_most is None or at_most > 0:
            datagram = self._receive()
            if datagram is None:
                break
            at_most = None if at_most is None else at_most - 1
            try:
                notice = self._heard(datagram, pid)
                ready, stopping = ready or notice.ready, stopping or notice.stopping
            except NoticeRefused as refused:
                if pid and datagram.pid == pid:
                    self._refusals.append(str(refused))
                self._complain(str(refused), datagram.pid)
            finally:
                close_all(datagram.fds)
        return Notice(ready=ready, stopping=stopping)

    def _receive(self) -> Datagram | None:
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(
                NOTICE_LIMIT_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        pid, fds = 0, array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
            elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                pid, _, _ = _CREDENTIALS.unpack(content)
        return Datagram(pid, data, list(fds), bool(flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)))

    def _heard(self, datagram: Datagram, pid: int) -> Notice:
        """Do what one datagram says. Fds that are taken out of it are no longer its own."""
        if not pid or datagram.pid != pid:
            raise NoticeRefused("it does not come from the coordinator")
        if datagram.cut:
            raise NoticeRefused("it did not arrive whole: too long, or no room for its fds")
        notice = read_notice(datagram.data)
        if notice.barrier:
            if len(datagram.fds) != 1:
                raise NoticeRefused(f"a barrier came with {len(datagram.fds)} fds")
            self._pass_barrier(datagram.fds[0])
        elif notice.store:
            fds = datagram.fds[:]
            datagram.fds.clear()
            self._store.keep(DEFAULT_NAME if notice.name is None else notice.name, fds)
        elif datagram.fds:
            raise NoticeRefused(f"{len(datagram.fds)} fds came without FDSTORE=1")
        elif notice.remove:
            assert notice.name is not None
            self._store.remove(notice.name)
        return notice

    def _pass_barrier(self, fd: int) -> None:
        """Write what was refused since the last barrier, if it is a pipe; closing it says done."""
        refusals = "\n".join(self._refusals).encode()[:REFUSALS_LIMIT_BYTES]
        self._refusals.clear()
        poll = select.poll()
        poll.register(fd, select.POLLOUT)
        if refusals and stat.S_ISFIFO(os.fstat(fd).st_mode) and poll.poll(0):
            try:
                os.write(fd, refusals)
            except OSError:
                pass  # whoever asked does not want to know any more, or gave a read end

    def _complain(self, what: str, pid: int) -> None:
        if len(self._wrong) == WRONG_LIMIT and what not in self._wrong:
            self._wrong.clear()  # names can be made up without end
        self._wrong[what] += 1
        times = self._wrong[what]
        if str(times).rstrip("0") == "1":
            again = f", {times} times so far" if times > 1 else ""
            self._say(f"a notice from pid {pid} is dropped: {what}{again}")
