"""A loader and its parent: whatever the socket says, it does not outlive the coordinator."""

import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shm_store.channel import Channel, pair
from shm_store.keys import GenerationId, Key
from shm_store.source import fingerprint, open_source
from shm_store.wire import Fetch, encode

pytestmark = pytest.mark.process

PATIENCE_S = 30
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}

PARENT = """
import json, socket, subprocess, sys
from coordinator import loader
from shm_store.channel import pair
link = socket.socket(fileno=int(sys.argv[1]))
ours, theirs = pair()
if sys.argv[2] == "foreign pair":
    _, (fd,), _, _ = socket.recv_fds(link, 1, 1)
    theirs = socket.socket(fileno=fd)
child = subprocess.Popen(loader.command(theirs.fileno()), pass_fds=(theirs.fileno(),))
theirs.close()
socket.send_fds(link, [json.dumps(child.pid).encode()], [ours.fileno()])
ours.close()
link.recv(1)
"""


@contextlib.contextmanager
def grandchild(how: str, fds: list[int]) -> Iterator[tuple[subprocess.Popen[bytes], int, Channel]]:
    """Start a parent that starts a loader; yield the parent, the loader's pid, and its channel."""
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE_S)
    with ours, theirs:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, str(theirs.fileno()), how],
            env=ENVIRONMENT,
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        if fds:
            socket.send_fds(ours, [b"x"], fds)
        try:
            data, (fd,), _, _ = socket.recv_fds(ours, 64, 1)
            connected = socket.socket(fileno=fd)
            connected.settimeout(PATIENCE_S)
            yield parent, json.loads(data), Channel(connected)
            connected.close()
        finally:
            parent.kill()
            parent.wait()


def ends(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(PATIENCE_S * 1000))


def test_it_dies_with_its_parent_though_its_socket_stays_open(tmp_path):
    """A coordinator's socket may survive in another process; the kernel's signal does not wait."""
    (tmp_path / "a").write_bytes(struct.pack("<Q", 2) + b"{}")
    with grandchild("own pair", []) as (parent, pid, channel):
        pidfd = os.pidfd_open(pid)
        source_fd = open_source(tmp_path / "a")
        channel.send(
            encode(Fetch(GenerationId("1"), Key("k"), "a", fingerprint([os.fstat(source_fd)]))),
            [source_fd],
        )
        os.close(source_fd)
        assert channel.receive() is not None
        parent.kill()
        assert ends(pidfd)
        os.close(pidfd)


def test_it_does_not_start_without_its_parent():
    """Who made the pair must be the parent; a parent that ended too early sends no signal."""
    ours, theirs = pair()
    ours.settimeout(PATIENCE_S)
    with ours, grandchild("foreign pair", [theirs.fileno()]):
        theirs.close()
        # Nothing was sent to it and our end stays open: only its own look at the parent ends it.
        assert Channel(ours).receive() is None
