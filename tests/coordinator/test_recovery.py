"""Real coordinators that follow one that was killed: what is kept, stated, and not believed."""

from __future__ import annotations

import os
import signal
import time

import pytest

from coordinator.operator import Operator
from shm_store import segment
from shm_store.keys import generation_id
from shm_store.manifest import Preamble
from shm_store.wire import (
    Acquire,
    Bye,
    Charge,
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
from tests.processes import WAIT_S, Peer, fds_of, running, write_safetensors

PAGE = 4096
EARLIER, OTHER = (generation_id(1, number) for number in (1, 2))
"""Ids of a coordinator that started long ago."""


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
        back = group.peer("peer", (HeldCharge(EARLIER, 7, "ram", "mine", PAGE), []))
        assert back.status().pools[0].private_bytes == PAGE
        back.send(Release(EARLIER, 7))
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
        fd = segment.create(EARLIER)
        os.posix_fallocate(fd, 0, PAGE * 2)
        assert "not sealed" in self.refused(served, (HeldMap(EARLIER, 1), [fd]))
        os.close(fd)

    def test_a_segment_that_is_another_generation(self, served):
        fd = sealed(OTHER)
        assert f"says that it is {OTHER}" in self.refused(served, (HeldMap(EARLIER, 1), [fd]))
        os.close(fd)

    def test_another_segment_of_the_same_name(self, served):
        peer = Peer(served.socket)
        gen = peer.publish("a").gen
        fd = sealed(gen)
        assert "another segment" in self.refused(served, (HeldMap(gen, 1), [fd]))
        os.close(fd)

    def test_a_segment_whose_manifest_is_garbage(self, served):
        fd = sealed(EARLIER, manifest=b"\xc1garbage")
        assert "manifest" in self.refused(served, (HeldMap(EARLIER, 1), [fd]))
        os.close(fd)

    def test_a_segment_with_holes(self, served):
        fd = segment.create(EARLIER)
        os.ftruncate(fd, PAGE * 4)
        segment.write_manifest(fd, EMPTY)
        segment.seal(fd, Preamble(EARLIER, "a", "build:1"))
        assert "pages" in self.refused(served, (HeldMap(EARLIER, 1), [fd]))
        os.close(fd)

    def test_a_fill_that_was_not_made_here(self, served):
        fd = os.memfd_create("any", os.MFD_ALLOW_SEALING)
        os.posix_fallocate(fd, 0, PAGE)
        assert "not made here" in self.refused(served, (HeldFill(EARLIER, 1, "a", ""), [fd]))
        os.close(fd)

    def test_no_segment_at_all(self, served):
        reading, writing = os.pipe()
        os.close(writing)
        assert "not sealed" in self.refused(served, (HeldMap(EARLIER, 1), [reading]))
        assert "unknown" in self.refused(served, (HeldMap(EARLIER, 1), []))
        os.close(reading)

    def test_twice_the_same(self, served):
        fd = sealed(EARLIER)
        held = (HeldMap(EARLIER, 1), [fd])
        assert "twice" in self.refused(served, held, held)
        os.close(fd)

    def test_the_fill_of_another_session(self, served):
        peer = Peer(served.socket)
        ticket = peer.ticket("a")
        fd = peer.space(ticket.gen, PAGE)
        held = HeldFill(ticket.gen, 9, "a", "")
        assert "filled by another process" in self.refused(served, (held, [fd]))
        os.close(fd)

    @pytest.mark.parametrize(
        "gen", ["", "1-1", "x\nSTOPPING=1", f"{1 << 63:016x}-00000001", EARLIER.upper() + "0"]
    )
    def test_what_is_no_id_or_one_of_the_future(self, served, gen):
        """It would be the newest for ever, or a line of its own in a notice."""
        fd = sealed(gen)
        said = self.refused(served, (HeldMap(gen, 1), [fd]))
        assert said == f"no coordinator has given the id {gen!r}"
        os.close(fd)

    @pytest.mark.parametrize("kind", [HeldMap, HeldFill, HeldCharge])
    def test_the_id_that_comes_next(self, served, kind):
        """It would be that of two generations: one would be in no book any more."""
        peer = Peer(served.socket)
        start, _, number = peer.publish("a").gen.partition("-")
        coming = f"{start}-{int(number, 16) + 1:08x}"
        fd = sealed(coming)
        held = {
            HeldMap: (HeldMap(coming, 1), [fd]),
            HeldFill: (HeldFill(coming, 1, "a", "build:1"), [fd]),
            HeldCharge: (HeldCharge(coming, 1, "ram", "a", PAGE), []),
        }
        assert "no coordinator has given the id" in self.refused(served, held[kind])
        os.close(fd)
        assert peer.publish("b").gen == coming

    @pytest.mark.parametrize("key", ["", "two\nlines", " ", "k" * 513])
    def test_what_is_no_key(self, served, key):
        fd = sealed(EARLIER, key=key)
        assert "key" in self.refused(served, (HeldMap(EARLIER, 1), [fd]))
        os.close(fd)

    @pytest.mark.parametrize("state", ["open", "filling", "ready"])
    def test_a_charge_that_is_weights(self, served, state):
        """Whatever they are at: it would be a lease on what nobody may have yet."""
        peer = Peer(served.socket)
        if state == "ready":
            gen = peer.publish("a").gen
        else:
            gen = peer.ticket("a").gen
            if state == "filling":
                os.close(peer.space(gen, PAGE))
        said = self.refused(served, (HeldCharge(gen, 1, "ram", "a", PAGE), []))
        assert said == f"{gen} is no private memory"
        assert peer.generation("a").state == state

    def test_weights_that_are_a_charge(self, served):
        peer = Peer(served.socket)
        peer.send(Charge(peer.next_rid(), "ram", "a", PAGE, WAIT_S))
        gen = peer.expect(Grant).gen
        fd = sealed(gen)
        for held in (HeldMap(gen, 1), HeldFill(gen, 1, "a", "build:1")):
            assert self.refused(served, (held, [fd])) == f"{gen} is private memory"
        os.close(fd)

    def test_a_charge_that_waits_or_is_of_no_pool(self, served):
        peer = Peer(served.socket)
        held = HeldCharge(EARLIER, 1, "nope", "a", PAGE)
        assert self.refused(served, (held, [])) == "there is no pool 'nope'"
        peer.send(Charge(peer.next_rid(), "ram", "first", 1 << 20, WAIT_S))
        peer.expect(Grant)
        peer.send(Charge(peer.next_rid(), "ram", "waits", PAGE, WAIT_S))
        waits = peer.generation("waits").generation
        held = HeldCharge(waits, 1, "ram", "waits", PAGE)
        assert self.refused(served, (held, [])) == f"{waits} was not granted yet"

    def test_a_map_of_what_has_no_bytes(self, served):
        gen = Peer(served.socket).ticket("a").gen
        fd = sealed(gen)
        assert "no bytes yet" in self.refused(served, (HeldMap(gen, 1), [fd]))
        os.close(fd)

    def test_the_segment_of_another_key(self, served):
        """Its filler has sealed it himself, as something else."""
        peer = Peer(served.socket)
        gen = peer.ticket("a").gen
        fd = peer.space(gen, PAGE * 2)
        segment.write_manifest(fd, EMPTY)
        segment.seal(fd, Preamble(gen, "b", "build:"))
        assert "another key than 'b'" in self.refused(served, (HeldMap(gen, 1), [fd]))
        os.close(fd)

    def test_a_fill_without_its_pages(self, served):
        """They would be charged, and nobody has them."""
        fd = segment.create(EARLIER)
        os.ftruncate(fd, PAGE * 4)
        segment.fix_size(fd)
        assert "not made here" in self.refused(served, (HeldFill(EARLIER, 1, "a", ""), [fd]))
        os.close(fd)

    def test_two_fills_of_one_request(self, served):
        held = [(HeldFill(gen, 1, "a", ""), [sealed(gen)]) for gen in (EARLIER, OTHER)]
        assert self.refused(served, *held) == "one request fills two generations"
        for _, (fd,) in held:
            os.close(fd)

    def test_the_fill_of_a_loader(self, served, tmp_path):
        """It waits for room here, and loads when there is some."""
        peer, other = Peer(served.socket), Peer(served.socket)
        full = peer.publish("full", bytes(900_000))
        weights = write_safetensors(tmp_path / "w", {"w": ("U8", [500_000], bytes(500_000))})
        with weights.open("rb") as file:
            other.send(Acquire(other.next_rid(), "k", str(weights), "", WAIT_S), [file.fileno()])
        while (loading := peer.generation("k")) is None:
            pass
        fd = segment.create(loading.generation)
        os.posix_fallocate(fd, 0, PAGE)
        segment.fix_size(fd)
        held = HeldFill(loading.generation, 9, "k", "")
        assert "filled by another process" in self.refused(served, (held, [fd]))
        os.close(fd)
        peer.send(Release(full.gen, full.rid))
        assert other.expect(Grant).gen == loading.generation

    def test_a_segment_that_nobody_knows_is_counted_and_handed_to_nobody(self, served):
        """It may be of a time that is over: only right after a restart it could be READY."""
        fd = sealed(EARLIER)
        peer = Peer(served.socket, "late", token="late", held=[(HeldMap(EARLIER, 5), [fd])])
        assert peer.expect(Revoke).asked == "stale"
        assert peer.generation("a").state == "retired"
        peer.send(Release(EARLIER, 5))
        peer.flush()
        assert peer.generation("a") is None
        os.close(fd)
