"""The floor of `death`: a process that watches one pidfd and says, when asked, if it was readable.

    python -m benchmarks.watcher FD

FD is one end of a SEQPACKET pair. A frame that brings a pidfd names the process to watch; to any
other frame the answer is `GONE` or `HERE`. Whoever keeps books cannot know earlier.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
from types import TracebackType
from typing import Self

from benchmarks.coordinator_process import ROOT

HERE = b"here"
GONE = b"gone"
_WATCH = b"watch"
_ASK = b"ask"


class Watcher:
    """Such a process; a context manager that ends it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.watcher", str(theirs.fileno())],
                cwd=ROOT,
                pass_fds=(theirs.fileno(),),
            )

    def watch(self, pidfd: int) -> None:
        """Have it watch this process from now on."""
        socket.send_fds(self._socket, [_WATCH], [pidfd])
        self.gone()  # an answer says that it does

    def gone(self) -> bool:
        """Ask whether the process has ended."""
        self._socket.send(_ASK)
        return self._socket.recv(len(GONE)) == GONE

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._socket.close()
        self._process.wait()


def main(fd: int) -> None:
    """Watch and answer until the other end is closed."""
    connected = socket.socket(fileno=fd)
    selector = selectors.DefaultSelector()
    selector.register(connected, selectors.EVENT_READ)
    watched = -1
    answer = HERE
    while True:
        for key, _ in selector.select():
            if key.fd == watched:
                selector.unregister(watched)
                os.close(watched)
                watched, answer = -1, GONE
                continue
            frame, fds, _, _ = socket.recv_fds(connected, len(_WATCH), 1)
            if not frame:
                return
            if fds:
                watched, answer = fds[0], HERE
                selector.register(watched, selectors.EVENT_READ)
            else:
                connected.send(answer)


if __name__ == "__main__":
    main(int(sys.argv[1]))
