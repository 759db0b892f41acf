"""Loaders that stop where a test wants them to, and say so: no test waits by a clock.

A coordinator started with `PROGRAM` runs the real loader, wrapped in a few lines: each asks the
test where it is to stop, and there it says that it has come so far and waits to be killed, or to
have no memory from there on. `HeldLoaders` is the test's side.

Points: a number of bytes that are in the segment, or `before Fetch`, `before Reserve`,
`after Reserve`, `before Commit`, `after Commit`; NEVER is none of them.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from pathlib import Path

from tests.processes import WAIT_S

NEVER = "never"
OUT_OF_MEMORY = b"out of memory"
LITTLE_MEMORY = b"little memory"

LOADER = r"""
import os, resource, socket, sys
from coordinator import loader, pump

pump.PROGRESS_PAUSE_S = 0.0  # where it stops it has said how far it is

pump.THREADS = 1  # or the points were not exact
asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
asking.connect(os.environ["HELD_LOADERS"])
asking.send(str(os.getpid()).encode())
stop = asking.recv(64).decode()
copied = 0

def no_memory(left_bytes):
    for line in open("/proc/self/status"):
        if line.startswith("VmSize:"):
            resource.setrlimit(resource.RLIMIT_AS, (int(line.split()[1]) * 1024 + left_bytes,) * 2)

def reached(point):
    if stop == str(point):
        asking.send(stop.encode())
        said = asking.recv(64)
        if said in (b"out of memory", b"little memory"):
            no_memory((8 << 20) * (said == b"little memory"))

send, receive_fetch, move = loader._send, loader._receive_fetch, pump.Pump._move
finish = pump.Meter.finish

def stepped_send(channel, message):
    reached("before " + type(message).__name__)
    send(channel, message)
    reached("after " + type(message).__name__)

def stepped_receive_fetch(channel):
    reached("before Fetch")
    return receive_fetch(channel)

def stepped_move(pump, *where):
    *where, size = where
    global copied
    reached(copied)
    if stop.isdigit() and copied < int(stop):
        size = min(size, int(stop) - copied)
    bytearray(64 << 20)  # a copy needs no memory of its own; so that it has none where it is short
    moved = move(pump, *where, size)
    copied += moved
    return moved

def stepped_finish(meter):
    reached(copied)
    finish(meter)

loader._send, loader._receive_fetch = stepped_send, stepped_receive_fetch
pump.Pump._move, pump.Meter.finish = stepped_move, stepped_finish
sys.exit(loader.main(["loader", sys.argv[1]]))
"""

PROGRAM = (
    "-c",
    f"""
import sys
from coordinator import loader
loader.command = lambda fd: [sys.executable, "-c", {LOADER!r}, str(fd)]
from coordinator.cli import main
main()
""",
)


class HeldLoader:
    """One loader, which has not been told yet where to stop. Ended with the test."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.settimeout(WAIT_S)
        self.pid = int(self._socket.recv(64))
        self._pidfd = os.pidfd_open(self.pid)

    def stop_at(self, point: object) -> None:
        """Let it go on to `point`, and wait until it is there."""
        self._socket.send(str(point).encode())
        if point != NEVER:
            assert self._socket.recv(64) == str(point).encode()

    def kill(self) -> None:
        """Kill it, and wait until it has ended: its last frames have been sent by then."""
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self.ends()

    def run_out_of_memory(self, *, whole: bool = True) -> None:
        """Let it go on, with not a byte more than it has; or else with a little, for its words."""
        self._socket.send(OUT_OF_MEMORY if whole else LITTLE_MEMORY)

    def ends(self) -> None:
        assert select.select([self._pidfd], [], [], WAIT_S)[0], "the loader does not end"

    def close(self) -> None:
        self._socket.close()
        os.close(self._pidfd)


class HeldLoaders:
    """Where the loaders of one coordinator ask."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "held")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen()
        self._listener.settimeout(WAIT_S)
        self._loaders: list[HeldLoader] = []

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "HELD_LOADERS": self.path}

    def next(self) -> HeldLoader:
        """Return the next one that was started."""
        connected, _ = self._listener.accept()
        self._loaders.append(HeldLoader(connected))
        return self._loaders[-1]

    def close(self) -> None:
        self._listener.close()
        while self._loaders:
            self._loaders.pop().close()
