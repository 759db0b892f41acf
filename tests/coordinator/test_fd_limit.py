"""When fds run short: who is refused, who goes on, and what each of them reads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordinator import server
from coordinator.fd_limit import FOR_CONNECTIONS, FOR_SEGMENTS, FOR_SOURCES, reserved
from coordinator.segment_table import SegmentTable
from coordinator.server import ATTACHED_LIMIT, EMFILE_PAUSE_S, Server
from shm_store import channel
from shm_store.channel import Channel
from shm_store.errors import ConnectionLost
from shm_store.keys import GenerationId
from shm_store.wire import (
    VERSION,
    Acquire,
    Cause,
    Fail,
    Grant,
    Release,
    Reserve,
    Resume,
    Status,
    decode,
    encode,
    to_session_decoder,
)
from tests.processes import WAIT_S, Coordinator, Peer, fds_of, running, write_safetensors

pytestmark = pytest.mark.process

LIMIT = 64
GEN = GenerationId("0000000000000001-00000001")


@pytest.fixture
def coordinator(path: str) -> Iterator[Coordinator]:
    """A coordinator that may have 64 fds, of which it needs about ten for itself."""

    def few_fds() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))

    with running(path, "--ram-budget", "64MiB", preexec_fn=few_fds) as started:
        yield started


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return write_safetensors(tmp_path / "w", {"w": ("U8", [5000], bytes(5000))})


@contextmanager
def without_fds(coordinator: Coordinator) -> Iterator[None]:
    """For the length of a block the coordinator can open nothing more."""
    limits = resource.prlimit(coordinator.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(coordinator.pid, resource.RLIMIT_NOFILE, (1, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(coordinator.pid, resource.RLIMIT_NOFILE, limits)


def last_word(connected: Channel) -> Cause | None:
    """Why the coordinator closed a connection; None if it did not."""
    connected.socket.settimeout(WAIT_S)
    received = connected.receive()
    if received is None:
        return None
    message = decode(to_session_decoder, received[0])
    assert isinstance(message, Fail) and message.rid == 0, message
    assert connected.receive() is None
    return message.cause


def crowd(path: str, count: int) -> tuple[list[Channel], list[Channel]]:
    """Connect without a word. Return who was taken, and who was refused."""
    connected = [Peer.connect(path) for _ in range(count)]
    settle(path)
    said = {fd for fd, _ in _poll(connected)}
    return (
        [one for one in connected if one.fileno() not in said],
        [one for one in connected if one.fileno() in said],
    )


def ask(connected: Channel) -> object:
    """Say RESUME and STATUS; the first answer. Who is refused may find the other end closed."""
    connected.socket.settimeout(WAIT_S)
    with contextlib.suppress(ConnectionLost):
        connected.send(encode(Resume(VERSION, "asked")))
        connected.send(encode(Status(1)))
    received = connected.receive()
    assert received is not None
    return decode(to_session_decoder, received[0])


def settle(path: str) -> None:
    """Whoever connected before this was taken or refused: they come in their order."""
    last = Peer.connect(path)
    ask(last)
    last.close()


def _poll(connected: list[Channel]) -> list[tuple[int, int]]:
    poll = select.poll()
    for one in connected:
        poll.register(one, select.POLLIN)
    return poll.poll(0)


def blames_the_coordinator(cause: Cause | None) -> bool:
    return (
        cause is not None
        and cause.code == "fds_exhausted"
        and "the coordinator is out of file descriptors" in cause.message
        and "`ulimit -n` of the coordinator" in cause.remedy
    )


# --- too many connections -----------------------------------------------------------------------


def test_a_crowd_is_refused_with_the_reason_and_those_attached_go_on(coordinator, weights):
    """Connections leave fds to the others: a file is loaded, weights are published, as ever."""
    first = Peer(coordinator.socket, "first")
    taken, refused = crowd(coordinator.socket, 50)
    assert taken and refused
    assert all(blames_the_coordinator(last_word(connected)) for connected in refused)
    assert isinstance(first.load("k", weights), Grant)
    assert isinstance(first.publish("built"), Grant)
    assert max(map(int, fds_of(coordinator.pid))) < LIMIT
    assert [s.name for s in first.status().sessions] == ["first"]
    for connected in taken:
        connected.close()
    first.flush()
    assert len(Peer(coordinator.socket, "next").status().sessions) == 2


def test_without_an_fd_to_watch_it_a_peer_is_refused_with_the_reason(coordinator):
    """The crowd says RESUME: each session takes a second fd, and those are reserved, too."""
    first = Peer(coordinator.socket, "first")
    taken, _ = crowd(coordinator.socket, 50)
    answers = [ask(connected) for connected in taken]
    refused = [answer.cause for answer in answers if isinstance(answer, Fail)]
    assert refused and len(refused) < len(taken)
    assert all(map(blames_the_coordinator, refused))
    assert len(first.status().sessions) == 1 + len(taken) - len(refused)
    assert max(map(int, fds_of(coordinator.pid))) < LIMIT - LIMIT * FOR_CONNECTIONS // 128


def test_a_pidfd_that_cannot_be_made_is_a_reason_too(coordinator):
    first = Peer(coordinator.socket, "first")
    late = Peer.connect(coordinator.socket)
    settle(coordinator.socket)
    with without_fds(coordinator):
        late.send(encode(Resume(VERSION, "late")))
        assert blames_the_coordinator(last_word(late))
    assert "late" not in [s.name for s in first.status().sessions]


def test_without_any_fd_it_pauses_instead_of_spinning_and_recovers(coordinator):
    """EMFILE at accept: those who wait stay in the backlog."""
    first = Peer(coordinator.socket, "first")
    first.status()
    with without_fds(coordinator):
        before = _cpu_ticks(coordinator.pid)
        late = Peer(coordinator.socket, "late")
        late.send(Status(late.next_rid()))
        assert select.select([late.channel], [], [], 0.3)[0] == []
        assert _cpu_ticks(coordinator.pid) - before < 15  # of about 30 that a spin would take
        assert first.status().sessions[0].name == "first"
    assert EMFILE_PAUSE_S < WAIT_S
    assert "late" in [s.name for s in late.expect(object).report.sessions]


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


# --- too many of one process ----------------------------------------------------------------------


def test_a_process_has_its_share_of_connections(path):
    with running(path) as coordinator:
        first = Peer(coordinator.socket, "first")
        taken, refused = crowd(path, ATTACHED_LIMIT - 1)
        assert len(taken) == ATTACHED_LIMIT - 1 and not refused
        cause = last_word(Peer.connect(path))
        assert cause is not None and cause.code == "resource"
        assert f"process {os.getpid()} is attached {ATTACHED_LIMIT} times" in cause.message
        taken[0].close()
        first.flush()
        assert len(Peer(path, "next").status().sessions) == 2


def test_sessions_left_behind_with_weights_count_as_well(path):
    """Each keeps a pidfd: connecting, mapping and going again must not take them all."""
    with running(path) as coordinator:
        coordinator.unquiet = "what has gone without a word keeps its leases"
        watcher = Peer(path, "watcher")
        watcher.publish("k")
        for _ in range(ATTACHED_LIMIT - 1):
            peer = Peer(path)
            peer.send(Acquire(peer.next_rid(), "k", None, "", WAIT_S))
            peer.expect(Grant)
            os.close(peer.fds[0])
            peer.close()
        cause = last_word(Peer.connect(path))
        assert cause is not None and cause.code == "resource"
        assert len(watcher.status().sessions) == ATTACHED_LIMIT
        assert coordinator.process.poll() is None


# --- silent connections ---------------------------------------------------------------------------


@contextmanager
def served(path: str) -> Iterator[Server]:
    """A server on a thread of the test."""
    ready = threading.Event()
    servers: list[Server] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        servers.append(Server(loop, channel.listen(path), 1 << 20))
        ready.set()
        await servers[0].stopped
        await servers[0].close()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        assert ready.wait(WAIT_S)
        yield servers[0]
    finally:
        servers[0].stopped.get_loop().call_soon_threadsafe(servers[0].exit)
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_a_connection_that_never_says_who_it_is_has_an_end(path, monkeypatch):
    """And nobody else has: a session may be silent as long as it likes."""
    monkeypatch.setattr(server, "RESUME_LIMIT_S", 0.05)
    with served(path):
        attached = Peer(path, "attached")
        silent = Peer.connect(path)
        half = Peer.connect(path)
        half.send_frame(channel._MORE + bytes(channel._PART_LIMIT_BYTES))
        for connected in (silent, half):
            cause = last_word(connected)
            assert cause is not None and cause.code == "resource", "it may come again"
            assert "was not said" in cause.message
        assert [s.name for s in attached.status().sessions] == ["attached"]
        Peer.close_all()


def test_who_has_said_who_it_is_leaves_nothing_to_wake_up_for(path):
    """A coordinator that has nothing to do sleeps."""
    with served(path) as running:
        Peer(path).status()
        timers = running.stopped.get_loop()._scheduled  # type: ignore[attr-defined]
        assert all(timer.cancelled() for timer in timers), timers
    Peer.close_all()


def test_at_its_end_the_server_tells_the_ledger_of_every_session(path):
    """Also of those that hold a ticket: nobody is left who could be handed another fill."""
    with served(path) as ended:
        Peer(path).ticket("k")
    assert not ended.ledger.requests and not ended.ledger.generations
    Peer.close_all()


# --- too many sources and segments ----------------------------------------------------------------


def test_a_source_that_is_lost_on_the_way_is_the_coordinators_shortage(coordinator, weights):
    """The kernel drops what it cannot install. The peer is told whose limit it was."""
    first, victim = Peer(coordinator.socket, "first"), Peer(coordinator.socket, "victim")
    first.status()
    victim.status()
    with without_fds(coordinator), open(weights, "rb") as file:
        victim.send(Acquire(victim.next_rid(), "k", str(weights), "", WAIT_S), [file.fileno()])
        assert blames_the_coordinator(last_word(victim.channel))
    assert [s.name for s in first.status().sessions] == ["first"]


def test_a_source_that_would_take_the_last_fds_is_refused_and_its_session_goes_on(
    coordinator, weights
):
    peer = Peer(coordinator.socket)
    refused = None
    for number in range(LIMIT):
        granted = peer.publish(f"filler-{number}")
        os.close(peer.fds[0])
        if len(fds_of(coordinator.pid)) < LIMIT - LIMIT * FOR_SOURCES // 128:
            continue
        answer = peer.load("k", weights)
        if isinstance(answer, Fail):
            refused = answer
            break
        os.close(peer.fds[0])
    assert refused is not None and blames_the_coordinator(refused.cause)
    assert refused.rid == peer.rid
    peer.send(Release(granted.gen, granted.rid))
    assert len(peer.status().sessions) == 1


def test_a_segment_without_an_fd_names_fds_and_not_memory(coordinator):
    peer = Peer(coordinator.socket)
    ticket = peer.ticket("k")
    with without_fds(coordinator):
        peer.send(Reserve(ticket.gen, 4096))
        cause = peer.expect(Fail).cause
    assert "the coordinator is out of file descriptors" in cause.message
    assert "ulimit" in cause.remedy
    assert "ulimit -n" in cause.message
    assert isinstance(peer.publish("k"), Grant)


def test_segments_leave_fds_for_children_and_refusals(coordinator):
    """Retained weights keep one each: the last published one fails, and all the rest works."""
    coordinator.unquiet = "it has no fd left for an operator"
    peer = Peer(coordinator.socket)
    for number in range(LIMIT):
        ticket = peer.ticket(f"k-{number}")
        peer.send(Reserve(ticket.gen, 4096))
        answer = peer.expect(object)
        if isinstance(answer, Fail):
            break
        os.close(peer.fds[0])
    assert "file descriptors" in answer.cause.message
    assert max(map(int, fds_of(coordinator.pid))) < LIMIT - LIMIT * FOR_SEGMENTS // 128
    assert blames_the_coordinator(last_word(Peer.connect(coordinator.socket)))


def test_a_segment_is_not_made_with_one_of_the_last_fds(monkeypatch):
    """And what was opened to find that out is closed again."""
    before = fds_of(os.getpid())
    monkeypatch.setattr("coordinator.segment_table.FOR_SEGMENTS", 128)  # all there are
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (128, 128))
    table = SegmentTable()
    with pytest.raises(OSError, match="Too many open files"):
        table.create(GEN)
    assert table.fd(GEN) is None and fds_of(os.getpid()) == before


def test_who_keeps_more_keeps_it_at_every_limit(monkeypatch):
    """Connections stop before sources, sources before segments; small limits are shared alike."""
    for limit in (16, 64, 256, 1 << 20):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, limit))
        left = [
            sum(reserved(fd, kept) for fd in range(limit - 64, limit))
            for kept in (FOR_CONNECTIONS, FOR_SOURCES, FOR_SEGMENTS)
        ]
        assert left == [min(kept, limit * kept // 128) for kept in (32, 16, 8)]
        assert left[0] <= limit // 4
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    assert not reserved(1 << 30, FOR_CONNECTIONS)
