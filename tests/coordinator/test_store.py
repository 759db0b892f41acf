"""What a coordinator has stored while its manager does not read."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from collections.abc import Callable

import pytest

from coordinator import notify
from coordinator.kernel_facts import ABOUT
from coordinator.ledger.events import Offer
from coordinator.store import RETRY_S, About, Found, Store, _memfd
from shm_store.keys import LeaseId, generation_id
from shm_store.segment import SEALS
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
                data, fds, _, _ = socket.recv_fds(self._socket, 4096, 2)
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


# --- what was on a device -----------------------------------------------------------------------

GEN = generation_id(1, 7)
POOL = "vram:sim-7"
SIZE_BYTES = 8192
KNOWN = Offer(GEN, LeaseId(0), "k", "build:host", SIZE_BYTES, pool=POOL)


def memory(gen: str = GEN) -> int:
    """Return memory of a simulated device, as nobody may change it any more."""
    fd = os.memfd_create(f"weight-cache:sim:7:{gen}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, SIZE_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


def about(**other) -> int:
    facts = {"pool": POOL, "key": "k", "fingerprint": "build:host", "size_bytes": SIZE_BYTES}
    return _memfd(ABOUT, About(**(facts | other)))


def found(monkeypatch, *fds: int) -> tuple[Found, list[tuple[str, int]]]:
    """Return what a store finds in these, and what it tells its manager. Closes all it found."""
    monkeypatch.setattr(notify, "inherited", lambda: {f"segment-{GEN}": list(fds)})
    said: list[tuple[str, int]] = []
    monkeypatch.setattr(Store, "_say", lambda self, name, *stored: said.append((name, len(stored))))

    async def main() -> Found:
        there = Store(asyncio.get_running_loop()).recover(2)
        assert there is not None
        return there

    there = asyncio.run(main())
    for fd, _ in there.segments.values():
        os.close(fd)
    return there, said


@pytest.mark.parametrize(
    "stored", [(memory, about), (about, memory)], ids=["as it was stored", "the other way round"]
)
def test_what_is_on_a_device_is_found_with_what_it_is(monkeypatch, stored):
    before = held("weight-cache:")
    there, said = found(monkeypatch, *(make() for make in stored))
    assert {gen: offer for gen, (_, offer) in there.segments.items()} == {GEN: KNOWN}
    assert (said, held("weight-cache:")) == ([], before)


def test_what_was_stored_twice_is_stored_once_again(monkeypatch):
    before = held("weight-cache:")
    there, said = found(monkeypatch, memory(), about(), memory(), about())
    assert there.segments[GEN][1] == KNOWN
    assert said == [(f"segment-{GEN}", 0), (f"segment-{GEN}", 2)]
    assert held("weight-cache:") == before


@pytest.mark.parametrize(
    "stored",
    [
        [memory],
        [about],
        [lambda: memory(generation_id(1, 8)), about],
        [memory, lambda: about(size_bytes=4096)],
        [memory, lambda: about(pool="vram:sim-8")],
        [memory, lambda: about(key="\n")],
        [memory, lambda: os.memfd_create("weight-cache:about")],
    ],
    ids=["no word", "no memory", "another", "a size", "a device", "a key", "nothing said"],
)
def test_what_does_not_agree_is_given_back_and_forgotten(
    monkeypatch, caplog, stored: list[Callable[[], int]]
):
    before = held("weight-cache:")
    there, said = found(monkeypatch, *(make() for make in stored))
    assert there.segments == {} and said == [(f"segment-{GEN}", 0)]
    assert held("weight-cache:") == before
    assert f"generation {GEN} is not used" in caplog.text


def test_what_is_on_a_device_is_stored_once_with_what_it_is(manager):
    async def main() -> None:
        store = Store(asyncio.get_running_loop())
        fd = memory()
        for _ in range(2):
            store.keep_segment(GEN, fd, KNOWN)
        os.close(fd)
        store.forget_segment(GEN)
        fd = memory()
        store.keep_segment(GEN, fd, KNOWN)
        os.close(fd)
        stores = f"FDSTORE=1 FDNAME=segment-{GEN} FDPOLL=0"
        assert manager.read() == [stores, f"FDSTOREREMOVE=1 FDNAME=segment-{GEN}", stores]

    asyncio.run(main())
