"""Segments in huge pages: when the coordinator has it done, for what, and what it says of it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

import pytest

from coordinator import collapsing
from coordinator.executor import Executor
from coordinator.ledger.events import Back, Backed, Event, Free, Freed, Keep
from coordinator.ledger.events import Send as Said
from shm_store import segment
from shm_store.keys import GenerationId, SessionId
from shm_store.layout import HUGE_PAGE_BYTES
from shm_store.report import GenerationReport, StatusReport
from shm_store.wire import RAM, Evict, Release, Report
from tests import huge_pages
from tests.coordinator.command_line import run
from tests.coordinator.launched import HELLO, WAITS
from tests.processes import WAIT_S, Coordinator, Peer, children_of, running

pytestmark = pytest.mark.process

MIB = 1 << 20
LARGE = 5 * MIB
LARGE_BYTES = 6 * MIB
"""What its segment takes."""
LARGEST = 500 * MIB
"""Not collapsed before a test has looked."""

SMALL_AT_FIRST = """
from coordinator import backing
command = backing.command
backing.command = lambda fd, size_bytes, huge: command(fd, size_bytes, False)
from coordinator.cli import main
main()
"""
"""A coordinator whose segments have no huge pages from the start, as on a fragmented host."""


@pytest.fixture(autouse=True)
def _huge_pages():
    huge_pages.require()


def until(peer: Peer, key: str, what) -> GenerationReport:
    """The generation of a key, once `what` is true of it."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        found = peer.generation(key)
        assert found is not None
        if what(found):
            return found
        assert time.monotonic() < deadline_s, found


def settled(found: GenerationReport) -> bool:
    return bool(found.huge_bytes or found.not_huge)


def give_back(peer: Peer, grant) -> None:
    peer.send(Release(grant.gen, grant.rid))
    peer.flush()


# --- a coordinator --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("huge") / "s")
    with running(path, "--ram-budget", "1GiB") as started:
        yield started


@pytest.fixture
def small_at_first(tmp_path):
    path = str(tmp_path / "s")
    with running(path, "--ram-budget", "1GiB", program=("-c", SMALL_AT_FIRST)) as started:
        yield started


def test_a_large_segment_is_in_huge_pages_when_it_is_ready(coordinator: Coordinator):
    """It was backed so: nothing has to be waited for."""
    peer = Peer(coordinator.socket)
    peer.publish("at once", b"\1" * LARGE)
    found = peer.generation("at once")
    assert found is not None
    assert (found.state, found.huge_bytes, found.not_huge) == ("ready", found.size_bytes, "")
    assert found.collapsed_by is None
    assert children_of(coordinator.pid) == []


def test_what_was_sealed_is_in_huge_pages_and_status_says_so(small_at_first: Coordinator):
    coordinator = small_at_first
    peer = Peer(coordinator.socket)
    peer.publish("large", b"\1" * LARGE)
    found = until(peer, "large", settled)
    assert (found.size_bytes, found.huge_bytes, found.not_huge) == (LARGE_BYTES, LARGE_BYTES, "")
    assert found.collapsed_by is None
    assert "ready, huge pages" in run("status", "--socket", coordinator.socket).stdout


def test_what_is_less_than_a_huge_page_is_left_alone(coordinator: Coordinator):
    peer = Peer(coordinator.socket)
    peer.publish("small", b"\1" * 1000)
    peer.publish("after", b"\1" * LARGE)
    until(peer, "after", settled)
    found = peer.generation("small")
    assert found is not None
    assert (found.huge_bytes, found.not_huge, found.collapsed_by) == (0, "", None)


def test_books_and_kernel_agree_while_it_is_done_and_freeing_does_not_wait(small_at_first):
    """The child has fd and map, and is stopped: FREED comes, and then nobody has any of it."""
    coordinator = small_at_first
    peer = Peer(coordinator.socket)
    grant = peer.publish("freed", b"\1" * LARGEST)
    os.close(*peer.fds)
    found = until(peer, "freed", lambda found: found.collapsed_by)
    child = found.collapsed_by
    assert child is not None
    assert child in children_of(coordinator.pid)
    pidfd = os.pidfd_open(child)
    signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
    os.close(pidfd)
    give_back(peer, grant)
    coordinator.audit()
    blocks = coordinator.segment_blocks()
    peer.send(Evict(peer.next_rid(), "freed"))
    Peer(coordinator.socket).flush()
    assert child not in children_of(coordinator.pid)
    assert blocks - coordinator.segment_blocks() == found.size_bytes
    coordinator.audit()


def test_the_coordinator_ends_while_it_is_done(small_at_first):
    """`running` holds its end against what it may say and how."""
    peer = Peer(small_at_first.socket)
    peer.publish("k", b"\1" * LARGEST)
    child = until(peer, "k", lambda found: found.collapsed_by).collapsed_by
    small_at_first.stop()
    assert not os.path.exists(f"/proc/{child}")


def test_turned_off_nothing_is_done_and_status_says_why(tmp_path):
    path = str(tmp_path / "s")
    with running(path, "--ram-budget", "1GiB", "--no-huge-pages") as coordinator:
        peer = Peer(path)
        peer.publish("k", b"\1" * LARGE)
        found = peer.generation("k")
        assert found is not None
        assert (found.huge_bytes, found.collapsed_by) == (0, None)
        assert "--no-huge-pages" in found.not_huge
        assert children_of(coordinator.pid) == []
        shown = run("status", "--socket", path).stdout
        assert "6.0 MiB of k in pages of 4 KiB: turned off by --no-huge-pages" in shown


@pytest.mark.parametrize("options", [[], ["--no-huge-pages"]], ids=["on", "off"])
def test_it_is_the_same_for_the_next_coordinator_of_a_group(launch, options):
    """What is found in the store is collapsed, or is so already; where that is off, it is not."""
    launched = launch("--ram-budget", "64MiB", *options, worker=f"{HELLO}\n{WAITS}")
    launched.up(1)
    peer = Peer(launched.socket())
    grant = peer.publish("k", b"\1" * LARGE)
    first = until(peer, "k", settled)
    assert (first.huge_bytes == 0) == bool(options)
    give_back(peer, grant)
    pid = launched.coordinator
    os.kill(pid, signal.SIGKILL)
    launched.said("it is started again")
    launched.said("ready on")
    again = Peer(launched.socket())
    second = until(again, "k", settled)
    assert second.generation == grant.gen
    assert (second.huge_bytes, second.not_huge) == (first.huge_bytes, first.not_huge)
    Peer.close_all()
    launched.send(signal.SIGTERM)
    launched.end()


# --- an executor, with children that do as they are told ------------------------------------------

WAITS_FOR_EVER = "import signal; signal.pause()"


class Outside:
    """The server and the ledger, as far as the executor sees them."""

    def __init__(self) -> None:
        self.heard: list[Event] = []
        self.sent: list[StatusReport] = []
        self.news = asyncio.Event()

    def feed(self, event: Event) -> None:
        self.heard.append(event)
        self.news.set()

    def send(self, session, message, fd) -> None:
        self.sent.append(message.report)

    async def freed(self, gen: GenerationId) -> None:
        await self.hear(Freed(gen))

    async def hear(self, event: Event) -> None:
        async with asyncio.timeout(WAIT_S):
            while event not in self.heard:
                self.news.clear()
                await self.news.wait()


class Works:
    """An executor with so many large segments, READY."""

    def __init__(self, executor: Executor, outside: Outside, count: int) -> None:
        self.executor, self.outside = executor, outside
        self.gens: list[GenerationId] = []
        for _ in range(count):
            self.add()

    def add(self) -> None:
        self.gens.append(gen := GenerationId(f"0000000000000001-{len(self.gens):08x}"))
        fd = self.executor.segments.create(gen)
        os.posix_fallocate(fd, 0, HUGE_PAGE_BYTES)
        segment.freeze(fd, gen)
        self.executor.perform(Keep(gen))

    def back(self) -> GenerationId:
        """Have a child back one more."""
        self.gens.append(gen := GenerationId(f"0000000000000001-{len(self.gens):08x}"))
        self.executor.perform(Back(gen, HUGE_PAGE_BYTES))
        return gen

    def report(self) -> list[GenerationReport]:
        """What STATUS would say of them."""
        facts = ("ready", HUGE_PAGE_BYTES, RAM, False, ())
        books = StatusReport(
            False, (), tuple(GenerationReport("k", gen, *facts) for gen in self.gens), ()
        )
        self.executor.perform(Said(SessionId(1), Report(1, books), None))
        return list(self.outside.sent.pop().generations)

    async def until(self, what) -> list[GenerationReport]:
        async with asyncio.timeout(WAIT_S):
            while not what(found := self.report()):
                await asyncio.sleep(0)
        return found


def work(talk, count: int, huge_pages: bool = True) -> None:
    async def go() -> None:
        outside = Outside()
        loop = asyncio.get_running_loop()
        executor = Executor(loop, outside, outside.feed, huge_pages=huge_pages)
        try:
            await talk(Works(executor, outside, count))
        finally:
            await executor.close()

    asyncio.run(go())


def pids(found: list[GenerationReport]) -> list[int]:
    return [one.collapsed_by for one in found if one.collapsed_by]


@pytest.fixture
def children(monkeypatch) -> list[str]:
    """What the children run, one after the other; those after the last do what they should."""
    scripts: list[str] = []
    real = collapsing.command

    def command(fd: int, size_bytes: int) -> list[str]:
        line = real(fd, size_bytes)
        return [sys.executable, "-c", scripts.pop(0)] if scripts else line

    monkeypatch.setattr(collapsing, "command", command)
    return scripts


def test_ready_does_not_wait_for_a_child_and_there_is_one_at_a_time(children):
    """None starts within the effect; the next starts when that one is over; none twice."""
    children += [WAITS_FOR_EVER, WAITS_FOR_EVER]

    async def talk(works: Works) -> None:
        assert pids(works.report()) == []
        (first,) = pids(await works.until(pids))
        await asyncio.sleep(0)
        assert pids(works.report()) == [first]
        works.executor.perform(Keep(works.gens[0]))  # as a session states it once more
        works.add()
        os.kill(first, signal.SIGKILL)
        (second,) = pids(await works.until(lambda found: found[1].collapsed_by))
        os.kill(second, signal.SIGKILL)
        found = await works.until(lambda found: found[2].huge_bytes)
        assert pids(found) == []
        assert "SIGKILL" in found[0].not_huge

    work(talk, 2)


@pytest.mark.parametrize("wanted", [True, False])
def test_what_was_backed_huge_is_known_to_be_and_no_child_is_started(children, wanted):
    """Where that is turned off, it was not."""
    children += [WAITS_FOR_EVER]

    async def talk(works: Works) -> None:
        gen = works.back()
        await works.outside.hear(Backed(gen))
        works.executor.perform(Keep(gen))
        await asyncio.sleep(0)
        (found,) = works.report()
        assert found.huge_bytes == HUGE_PAGE_BYTES * wanted
        assert ("--no-huge-pages" in found.not_huge) != wanted
        assert children == [WAITS_FOR_EVER]

    work(talk, 0, wanted)


def test_what_is_freed_when_it_was_backed_is_forgotten():
    """The child is done, and FREE comes before that is heard of."""

    async def talk(works: Works) -> None:
        before = children_of(os.getpid())
        gen = works.back()
        (child,) = set(children_of(os.getpid())) - set(before)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        works.executor.perform(Free(gen))
        await works.outside.freed(gen)
        assert Backed(gen) in works.outside.heard
        assert works.report()[0].huge_bytes == 0

    work(talk, 0)


def test_freeing_ends_the_child_and_who_waits_is_never_started(children):
    children += [WAITS_FOR_EVER]

    async def talk(works: Works) -> None:
        (child,) = pids(await works.until(pids))
        for gen in works.gens[:2]:
            works.executor.perform(Free(gen))
        for gen in works.gens[:2]:
            await works.outside.freed(gen)
        assert not os.path.exists(f"/proc/{child}")
        found = await works.until(lambda found: found[2].huge_bytes)
        assert [one.huge_bytes for one in found[:2]] == [0, 0]

    work(talk, 3)


def test_at_its_end_it_starts_nothing_that_still_waits(children):
    children += [WAITS_FOR_EVER] * 3

    async def talk(works: Works) -> None:
        await works.until(pids)

    work(talk, 3)
    assert len(children) == 2


def test_a_ready_segment_that_goes_at_once_is_not_begun(children, monkeypatch):
    """As when its last asker has gone while it was sealed."""
    children += [WAITS_FOR_EVER]

    async def talk(works: Works) -> None:
        works.executor.perform(Free(works.gens[0]))
        await works.outside.freed(works.gens[0])
        assert children == [WAITS_FOR_EVER]

    work(talk, 1)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("import os; os.kill(os.getpid(), 9)", "the collapsing child ended (by SIGKILL)"),
        ("raise SystemExit(3)", "the collapsing child ended (exit code 3)"),
        ("print(4096, 'pages are pinned')", "pages are pinned"),
    ],
)
def test_a_failure_is_one_line_of_the_log_and_the_next_goes_on(children, caplog, script, why):
    children += [script]
    caplog.set_level("INFO", "coordinator")

    async def talk(works: Works) -> None:
        failed, done = await works.until(lambda found: settled(found[1]))
        assert failed.not_huge == why
        assert (done.huge_bytes, done.not_huge) == (HUGE_PAGE_BYTES, "")

    work(talk, 2)
    (line,) = caplog.messages
    assert why in line


def test_no_child_to_be_had_is_said_and_nothing_else_fails(monkeypatch):
    def refuse(*arguments, **named):
        raise OSError(24, os.strerror(24))

    monkeypatch.setattr("coordinator.huge_pages.Child", refuse)

    async def talk(works: Works) -> None:
        (found,) = await works.until(lambda found: settled(found[0]))
        assert found.not_huge.startswith("no child could be started: ")

    work(talk, 1)
