"""Real coordinators that follow one that was killed: what is kept, stated, and not believed."""

from __future__ import annotations

import os
import signal
import time

import pytest

from coordinator.operator import Operator
from shm_store import segment
from shm_store.manifest import Preamble
from shm_store.wire import (
    Acquire,
    Bye,
    Commit,
    Done,
    Drain,
    Evict,
    Fail,
    Grant,
    HeldCharge,
    HeldFill,
    HeldMap,
    Invalidate,
    Pin,
    Release,
    Revoke,
)
from tests.coordinator.launched import HELLO, WAITS, Launched
from tests.processes import WAIT_S, Peer, fds_of, running

PAGE = 4096


class Group:
    """A launched coordinator that can be killed."""

    def __init__(self, launched: Launched) -> None:
        self.launched = launched
        launched.up(1)
        self.socket = launched.socket()
        self.pid = launched.coordinator

    def crash(self) -> None:
        """Kill the coordinator, and wait for the next one."""
        os.kill(self.pid, signal.SIGKILL)
        self.launched.said("it is started again")
        self.launched.said("ready on")
        deadline_s = time.monotonic() + WAIT_S
        while self.launched.group.members[0].pid in (None, self.pid):
            assert time.monotonic() < deadline_s
        self.pid = self.launched.coordinator

    def peer(self, token: str, *held) -> Peer:
        return Peer(self.socket, token, token=token, held=held)

    def stores(self, gen: str, count: int) -> None:
        """Wait until the supervisor has so many fds of a generation's segment."""
        deadline_s = time.monotonic() + WAIT_S
        while sum(gen in fd for fd in fds_of(self.launched.supervisor).values()) != count:
            assert time.monotonic() < deadline_s

    def audit(self) -> None:
        from coordinator.audit import audit

        with Operator.connect(self.socket, "audit") as operator:
            found = audit(operator)
        assert found.agree, found.differences


@pytest.fixture
def group(launch):
    started = Group(launch("--ram-budget", "1MiB", "--grace", "0.5", worker=f"{HELLO}\n{WAITS}"))
    yield started
    Peer.close_all()
    started.launched.send(signal.SIGTERM)
    started.launched.end()


def leases(peer: Peer, key: str) -> dict[int, str]:
    """Session to what was asked, for the one generation of a key."""
    found = peer.generation(key)
    assert found is not None
    return {lease.session: lease.asked for lease in found.leases}


def done(peer: Peer, message) -> None:
    peer.send(message)
    peer.expect(Done)


class TestKept:
    def test_ready_weights_pins_and_sessions_are_there_again(self, group, tmp_path):
        holder = group.peer("holder")
        held = holder.publish("held")
        (fd,) = holder.fds
        idle = holder.publish("idle")
        holder.send(Release(idle.gen, idle.rid))
        done(holder, Pin(holder.next_rid(), "idle"))
        group.crash()
        other = group.peer("other")
        (silent,) = [s for s in other.status().sessions if s.pid == os.getpid() and s.name == ""]
        assert not silent.connected
        other.send(Acquire(other.next_rid(), "idle", None, "", 5.0))
        again = other.expect(Grant)
        assert again.gen == idle.gen, "nobody has to be waited for"
        assert other.generation("idle").pinned
        back = group.peer("holder", (HeldMap(held.gen, held.rid), [fd]))
        assert leases(back, "held") == {silent.session: ""}
        back.send(Release(held.gen, held.rid))
        back.flush()
        assert leases(back, "held") == {}
        os.close(fd)

    def test_what_is_not_ready_any_more_is_not_kept(self, group):
        peer = group.peer("peer")
        first = peer.publish("a", version="1")
        group.stores(first.gen, 1)
        second = peer.publish("a", version="2")
        done(peer, Evict(peer.next_rid()))
        group.stores(first.gen, 0)
        group.stores(second.gen, 1)
        peer.send(Release(first.gen, first.rid))
        peer.send(Release(second.gen, second.rid))
        done(peer, Invalidate(peer.next_rid(), "a", 5.0))
        group.stores(second.gen, 0)

    def test_a_crash_loses_no_session_that_lives_and_keeps_none_that_ended(self, group):
        peer = group.peer("peer")
        grant = peer.publish("a")
        (fd,) = peer.fds
        for _ in range(3):
            group.crash()
            peer = group.peer("peer", (HeldMap(grant.gen, grant.rid), [fd]))
            assert len(leases(peer, "a")) == 1
        peer.send(Release(grant.gen, grant.rid))
        peer.flush()
        peer.close()
        watcher = Peer(group.socket, "watcher", role="operator")
        while watcher.status().sessions:
            watcher.flush()
        group.crash()
        watcher = Peer(group.socket, "watcher", role="operator")
        assert watcher.status().sessions == ()
        assert watcher.generation("a").leases == ()
        os.close(fd)
        group.audit()

    def test_it_goes_on_to_drain(self, group):
        holder = group.peer("holder")
        held = holder.publish("held")
        (fd,) = holder.fds
        holder.send(Drain(holder.next_rid(), 30.0))
        assert holder.expect(Revoke).asked == "stale"
        group.crash()
        back = group.peer("holder", (HeldMap(held.gen, held.rid, True), [fd]))
        back.rid = 60
        back.send(Acquire(back.next_rid(), "more", None, "", 5.0))
        assert back.expect(Fail).cause.code == "draining"
        back.send(Release(held.gen, held.rid))
        assert isinstance(back.expect(Bye), Bye)
        os.close(fd)


class TestFills:
    def test_a_fill_goes_on(self, group):
        peer = group.peer("peer")
        ticket = peer.ticket("a", "1")
        fd = peer.space(ticket.gen, PAGE * 2)
        group.crash()
        back = group.peer("peer", (HeldFill(ticket.gen, 50, "a", ticket.fingerprint), [fd]))
        back.rid = 60
        segment.write_at(fd, bytes(8), segment.write_manifest(fd, EMPTY))
        back.send(Commit(ticket.gen))
        grant = back.expect(Grant)
        assert (grant.rid, grant.gen) == (50, ticket.gen)
        assert back.generation("a").state == "ready"
        os.close(fd)

    def test_a_charge_goes_on(self, group):
        group.peer("peer")
        group.crash()
        back = group.peer("peer", (HeldCharge("1-1", 7, "ram", "mine", PAGE), []))
        assert back.status().pools[0].private_bytes == PAGE
        back.send(Release("1-1", 7))
        back.flush()
        assert back.status().pools[0].in_use_bytes == 0


EMPTY = b"\x92\x90\x90"
"""A manifest of nothing."""


def sealed(gen: str, *, manifest: bytes = EMPTY, key: str = "a") -> int:
    fd = segment.create(gen)
    os.posix_fallocate(fd, 0, PAGE * 2)
    segment.write_manifest(fd, manifest)
    segment.seal(fd, Preamble(gen, key, "build:1"))
    return fd


class TestNotBelieved:
    """A connection that states what cannot be is closed with the reason, and changes nothing."""

    @pytest.fixture
    def served(self, tmp_path):
        with running(str(tmp_path / "s"), "--ram-budget", "1MiB") as coordinator:
            yield coordinator

    def refused(self, served, *held) -> str:
        before = Peer(served.socket, "before", role="operator").status()
        peer = Peer(served.socket, "liar", token="liar", held=held)
        said = peer.receive()
        assert isinstance(said, Fail) and said.rid == 0
        assert peer.receive() is None
        after = Peer(served.socket, "after", role="operator").status()
        assert (after.pools, after.sessions) == (before.pools, before.sessions)
        assert [g.generation for g in after.generations] == [
            g.generation for g in before.generations
        ]
        peer.leases.clear()
        return said.cause.message

    def test_a_segment_that_could_still_be_changed(self, served):
        fd = segment.create("1-1")
        os.posix_fallocate(fd, 0, PAGE * 2)
        assert "not sealed" in self.refused(served, (HeldMap("1-1", 1), [fd]))
        os.close(fd)

    def test_a_segment_that_is_another_generation(self, served):
        fd = sealed("1-2")
        assert "says that it is 1-2" in self.refused(served, (HeldMap("1-1", 1), [fd]))
        os.close(fd)

    def test_another_segment_of_the_same_name(self, served):
        peer = Peer(served.socket)
        gen = peer.publish("a").gen
        fd = sealed(gen)
        assert "another segment" in self.refused(served, (HeldMap(gen, 1), [fd]))
        os.close(fd)

    def test_a_segment_whose_manifest_is_garbage(self, served):
        fd = sealed("1-1", manifest=b"\xc1garbage")
        assert "manifest" in self.refused(served, (HeldMap("1-1", 1), [fd]))
        os.close(fd)

    def test_a_segment_with_holes(self, served):
        fd = segment.create("1-1")
        os.ftruncate(fd, PAGE * 4)
        segment.write_manifest(fd, EMPTY)
        segment.seal(fd, Preamble("1-1", "a", "build:1"))
        assert "pages" in self.refused(served, (HeldMap("1-1", 1), [fd]))
        os.close(fd)

    def test_a_fill_that_was_not_made_here(self, served):
        fd = os.memfd_create("any", os.MFD_ALLOW_SEALING)
        os.posix_fallocate(fd, 0, PAGE)
        assert "not made here" in self.refused(served, (HeldFill("1-1", 1, "a", ""), [fd]))
        os.close(fd)

    def test_no_segment_at_all(self, served):
        reading, writing = os.pipe()
        os.close(writing)
        assert "not sealed" in self.refused(served, (HeldMap("1-1", 1), [reading]))
        assert "unknown" in self.refused(served, (HeldMap("1-1", 1), []))
        os.close(reading)

    def test_twice_the_same(self, served):
        fd = sealed("1-1")
        held = (HeldMap("1-1", 1), [fd])
        assert "twice" in self.refused(served, held, held)
        os.close(fd)

    def test_the_fill_of_another_session(self, served):
        peer = Peer(served.socket)
        ticket = peer.ticket("a")
        fd = peer.space(ticket.gen, PAGE)
        liar = Peer(
            served.socket, "liar", token="l", held=[(HeldFill(ticket.gen, 9, "a", ""), [fd])]
        )
        assert liar.expect(Fail).cause.code == "protocol_violation"
        os.close(fd)

    def test_a_segment_that_nobody_knows_is_counted_and_handed_to_nobody(self, served):
        """It may be of a time that is over: only right after a restart it could be READY."""
        fd = sealed("1-1")
        peer = Peer(served.socket, "late", token="late", held=[(HeldMap("1-1", 5), [fd])])
        assert peer.expect(Revoke).asked == "stale"
        assert peer.generation("a").state == "retired"
        peer.send(Release("1-1", 5))
        peer.flush()
        assert peer.generation("a") is None
        os.close(fd)
