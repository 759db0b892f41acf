"""The executor with real children: who starts when, and what is left of them."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from coordinator import backing, loader
from coordinator.executor import Executor
from coordinator.ledger.events import Back, BackingRefused, Event, Free, Freed, LoaderEnded
from coordinator.ledger.events import StartLoader as Start
from coordinator.places import PLACES
from coordinator.source_table import OpenedSource
from shm_store import channel
from shm_store.keys import Fingerprint, GenerationId, Key, RequestId, SessionId
from shm_store.reading import AS_IT_IS
from tests.processes import WAIT_S, children_of, fds_of

pytestmark = pytest.mark.process

LOADS = """
import signal, socket, sys
socket.recv_fds(socket.socket(fileno=int(sys.argv[1])), 1 << 16, 1)
signal.pause()
"""
BACKS = "import signal; signal.pause()"


@pytest.fixture(autouse=True)
def _children_that_only_wait(monkeypatch):
    """A loader takes its source and goes no further; a backing child does nothing."""
    monkeypatch.setattr(loader, "command", lambda fd: [sys.executable, "-c", LOADS, str(fd)])
    monkeypatch.setattr(backing, "command", lambda *numbers: [sys.executable, "-c", BACKS])


class Outside:
    """The server, as far as the executor sees it, and the ledger that hears the outcomes."""

    def __init__(self, source: Path) -> None:
        self.opened = OpenedSource([os.open(source, os.O_RDONLY)], (), AS_IT_IS)
        self.heard: list[Event] = []
        self.news = asyncio.Event()

    def source(self, session: SessionId, rid: RequestId) -> OpenedSource:
        return self.opened

    def feed(self, event: Event) -> None:
        self.heard.append(event)
        self.news.set()

    async def expect(self, event: Event) -> None:
        async with asyncio.timeout(WAIT_S):
            while event not in self.heard:
                self.news.clear()
                await self.news.wait()


def gen(number: int) -> GenerationId:
    return GenerationId(f"0000000000000001-{number:08x}")


def start(number: int) -> Start:
    name = Fingerprint("file:")
    return Start(gen(number), Key(str(number)), "a", name, SessionId(1), RequestId(number))


OTHERS: set[int] = set()
"""Children that other tests leave to the end of this process, as those of process pools do."""


@pytest.fixture(autouse=True)
def _none_of_others() -> None:
    OTHERS.update(children_of(os.getpid()))


def children() -> list[int]:
    """Of this process, without those of other tests."""
    return [child for child in children_of(os.getpid()) if child not in OTHERS]


def work(path: Path, talk: Callable[[Executor, Outside], Awaitable[None]]) -> None:
    """Run `talk` with an executor; nothing of it may be left, neither child nor fd."""
    path.write_bytes(b"source")
    before = fds_of(os.getpid())

    async def run() -> None:
        outside = Outside(path)
        works = Executor(asyncio.get_running_loop(), outside, outside.feed)
        try:
            await talk(works, outside)
        finally:
            await works.close()
            if outside.opened.users:
                outside.opened.close()

    asyncio.run(run())
    assert children() == []
    assert fds_of(os.getpid()) == before


def test_a_crowd_of_loaders_starts_a_few_at_a_time(tmp_path):
    """Whoever is freed before its turn never runs; a place that comes free is taken at once."""

    async def talk(works: Executor, outside: Outside) -> None:
        for number in range(PLACES + 3):
            works.perform(start(number))
        await places_are_taken_in_turn(works, outside)

    work(tmp_path / "a", talk)


def test_a_crowd_of_backing_children_starts_a_few_at_a_time(tmp_path):
    async def talk(works: Executor, outside: Outside) -> None:
        for number in range(PLACES + 3):
            works.perform(Back(gen(number), 4096))
        await places_are_taken_in_turn(works, outside)

    work(tmp_path / "a", talk)


async def places_are_taken_in_turn(works: Executor, outside: Outside) -> None:
    first = children()
    assert len(first) == PLACES
    works.perform(Free(gen(PLACES)))  # its turn would be next
    await outside.expect(Freed(gen(PLACES)))
    assert children() == first
    works.perform(Free(gen(0)))
    await outside.expect(Freed(gen(0)))
    assert len(set(children()) - set(first)) == 1
    for number in set(range(PLACES + 3)) - {0, PLACES}:
        works.perform(Free(gen(number)))
        await outside.expect(Freed(gen(number)))
    assert children() == []


def test_at_its_end_it_starts_nothing_that_still_waits(tmp_path, monkeypatch):
    commands = []
    real = loader.command

    def noted(fd: int) -> list[str]:
        commands.append(fd)
        return real(fd)

    monkeypatch.setattr(loader, "command", noted)

    async def talk(works: Executor, outside: Outside) -> None:
        for number in range(PLACES + 3):
            works.perform(start(number))

    work(tmp_path / "a", talk)
    assert len(commands) == PLACES


def test_a_loader_has_its_source_though_who_brought_it_gave_up(tmp_path):
    """Others may wait for the same weights: the first asker's fd is kept for the loader."""

    async def talk(works: Executor, outside: Outside) -> None:
        for number in range(PLACES + 1):
            works.perform(start(number))
        outside.opened.close()
        first = set(children())
        works.perform(Free(gen(0)))
        await outside.expect(Freed(gen(0)))
        (second,) = set(children()) - first
        async with asyncio.timeout(WAIT_S):
            while str(tmp_path / "a") not in fds_of(second).values():
                await asyncio.sleep(0)

    work(tmp_path / "a", talk)


@pytest.mark.parametrize("effect", [start(1), Back(gen(1), 4096)], ids=["loader", "segment"])
def test_without_fds_nothing_starts_and_the_reason_says_whose(tmp_path, monkeypatch, effect):
    def refuse(fd: int, kept: int) -> None:
        os.close(fd)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("coordinator.segment_table.require_free", refuse)
    monkeypatch.setattr(channel, "pair", lambda: refuse(os.dup(0), 0))

    async def talk(works: Executor, outside: Outside) -> None:
        works.perform(effect)
        (event,) = outside.heard
        assert isinstance(event, LoaderEnded | BackingRefused)
        assert "the coordinator is out of file descriptors" in event.reason
        assert "ulimit -n" in event.reason
        assert children() == []

    work(tmp_path / "a", talk)


def test_what_comes_back_while_it_is_freed_keeps_its_own_fd(tmp_path):
    """Ending its children takes a while. The old fd goes then, and not the one that came since."""

    async def talk(works: Executor, outside: Outside) -> None:
        works.perform(Back(gen(1), 4096))
        while works.segments.fd(gen(1)) is None:
            await asyncio.sleep(0)
        works.perform(Free(gen(1)))
        theirs = os.memfd_create("theirs")
        works.segments.adopt(gen(1), theirs)
        await outside.expect(Freed(gen(1)))
        assert works.segments.fd(gen(1)) == theirs
        os.fstat(theirs)

    work(tmp_path / "a", talk)
