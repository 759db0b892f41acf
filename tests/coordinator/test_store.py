"""What a coordinator has stored while its manager does not read."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from coordinator.store import RETRY_S, Store
from tests.processes import fds_of


class Manager:
    """A notify socket that is read when the test says so."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(path)
        self._socket.setblocking(False)

    def read(self) -> list[str]:
        """Return all that has come, one line per message."""
        said: list[str] = []
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, 4096, 1)
            except BlockingIOError:
                return said
            for fd in fds:
                os.close(fd)
            said.append(" ".join(data.decode().split()))

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path, monkeypatch):
    path = str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    started = Manager(path)
    yield started
    started.close()


def held(name: str) -> int:
    """How many fds this process has of a memfd."""
    return sum(f"memfd:{name}" in target for target in fds_of(os.getpid()).values())


def test_one_that_is_busy_is_named_once_and_one_that_is_gone_is_not(manager, caplog):
    """What is gone was killed, and who has seen it says so in words for people."""

    async def main() -> None:
        store = Store(asyncio.get_running_loop())
        fd = os.memfd_create("asked")
        number = 0
        while held("asked") < 3:  # until the manager takes no more, and two wait
            number += 1
            store.keep_segment(f"1-{number}", fd)
        (said,) = caplog.messages
        assert "does not read what it is to store" in said
        caplog.clear()
        manager.close()
        Store(asyncio.get_running_loop()).keep_segment("1-1", fd)
        os.close(fd)

    with caplog.at_level("INFO"):
        asyncio.run(main())
    assert caplog.messages == []


def test_what_is_gone_before_it_could_be_stored_is_held_by_nobody(manager):
    """Its fd waits to be told; once the segment is freed, it alone would keep the memory."""

    async def main() -> None:
        store = Store(asyncio.get_running_loop())
        fd = os.memfd_create("gone")
        number = 0
        while held("gone") == 1:  # until the manager takes no more
            number += 1
            store.keep_segment(f"1-{number}", fd)
        last = f"1-{number + 1}"
        store.keep_segment(last, fd)
        assert held("gone") == 3
        store.forget_segment(last)
        store.forget_segment(f"1-{number}")
        store.forget_segment("1-1")
        assert held("gone") == 1
        said = manager.read()
        while not any("REMOVE" in line for line in said):
            await asyncio.sleep(RETRY_S)
            said += manager.read()
        assert said == [
            *(f"FDSTORE=1 FDNAME=segment-1-{one} FDPOLL=0" for one in range(1, number)),
            "FDSTOREREMOVE=1 FDNAME=segment-1-1",
        ]
        os.close(fd)

    asyncio.run(main())
