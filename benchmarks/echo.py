"""The other end of the floor: a process that answers every frame with one frame and one fd.

    python -m benchmarks.echo SOCKET FD

It knows no protocol and keeps no books: no coordinator could answer faster.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading

from benchmarks.coordinator_process import ROOT

FRAME_BYTES = 64 * 1024


def start(path: str, fd: int) -> subprocess.Popen[str]:
    """Start an echo process that hands out `fd`; return when it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.echo", path, str(fd)],
        cwd=ROOT,
        pass_fds=(fd,),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def connect(path: str) -> socket.socket:
    """Return a connection to the echo process on `path`."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connected.connect(path)
    return connected


def main(path: str, fd: int) -> None:
    """Serve each connection in a thread of its own until it is closed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(path)
        listening.listen()
        print("ready", flush=True)
        while True:
            accepted, _ = listening.accept()
            threading.Thread(target=_answer, args=(accepted, fd), daemon=True).start()


def _answer(connected: socket.socket, fd: int) -> None:
    with connected:
        while frame := connected.recv(FRAME_BYTES):
            socket.send_fds(connected, [frame], [fd])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
