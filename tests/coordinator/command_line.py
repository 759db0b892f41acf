"""The command line for tests: commands as people run them, and a coordinator played by the test."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

from shm_store import channel
from shm_store.channel import Channel
from shm_store.wire import FromSession, ToSession, decode, encode, session_decoder
from tests.processes import ROOT, WAIT_S, Peer

BUDGET_BYTES = 1 << 20
"""What the fixture `coordinator` may use."""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "coordinator", *arguments]


def environment(**changes: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k != "WEIGHT_CACHE_SOCKET"}
    return {**inherited, "PYTHONPATH": str(ROOT), **changes}


def run(*arguments: str, cwd: Path = ROOT, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run one command to its end. No expected failure may leave a traceback."""
    done = subprocess.run(
        command(*arguments),
        check=False,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        cwd=cwd,
        env=environment(**changes),
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def start(*arguments: str, **changes: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(**changes),
    )


def on_terminal(columns: int, *arguments: str) -> list[str]:
    """Return the lines of a command whose output is a terminal of so many columns."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    changes = {"TERM": "xterm", "COLUMNS": "", "LINES": ""}
    process = subprocess.Popen(
        command(*arguments),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env=environment(**changes),
    )
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 65536):
            shown += data
    except OSError:
        pass  # how a terminal says that nobody has its other end any more
    os.close(ours)
    process.wait(WAIT_S)
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).splitlines()


class Played:
    """A command whose coordinator is played by the test."""

    def __init__(self, path: str, *arguments: str) -> None:
        with channel.listen(path) as listener:
            listener.setblocking(True)
            self.process = start(*arguments, WEIGHT_CACHE_SOCKET=path)
            self.channel = Channel(listener.accept()[0])
        assert self.channel.receive() is not None  # RESUME

    def __enter__(self) -> Played:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        self.process.kill()
        self.process.communicate()

    def heard(self) -> FromSession:
        received = self.channel.receive()
        assert received is not None
        channel.close_all(received[1])
        return decode(session_decoder, received[0])

    def say(self, message: ToSession, *fds: int) -> None:
        self.channel.send(encode(message), fds)

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, out, err


def only_line(text: str) -> str:
    (line,) = text.splitlines()
    return line


def in_use_bytes(peer: Peer) -> int:
    return sum(pool.in_use_bytes for pool in peer.status().pools)
