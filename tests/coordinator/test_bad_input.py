"""What nobody should send: refused with a type or passed over, and the books are as they were.

The holder is a process that maps its weights, so books and kernel can be compared throughout.
"""

from __future__ import annotations

import math
import os

import msgspec
import pytest

from shm_store import segment
from shm_store.layout import PAGE_BYTES, PREAMBLE_BYTES
from shm_store.wire import (
    Abort,
    Ack,
    Acquire,
    Cancel,
    Charge,
    Commit,
    Drain,
    Fail,
    Grant,
    Invalidate,
    Limit,
    Release,
    Reserve,
)
from tests.mapper import mapper
from tests.processes import WAIT_S, Peer, running, write_safetensors

pytestmark = pytest.mark.process

NO_GEN = "0000000000000009-00000009"


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory):
    """One for all: none of them may change what the next one finds."""
    with running(str(tmp_path_factory.mktemp("bad") / "s"), "--ram-budget", "1MiB") as started:
        yield started


@pytest.fixture(scope="module")
def holder(coordinator):
    with mapper(coordinator.socket) as started:
        started.do("publish", "held", 5000)
        started.do("map")
        started.do("close")
        yield started


@pytest.fixture
def operator(coordinator):
    return Peer(coordinator.socket, "operator", role="operator")


def books(operator: Peer):
    """What must not change, without ages."""
    report = operator.status()
    held = [
        (g.key, g.generation, g.state, g.size_bytes, [(one.pid, one.asked) for one in g.leases])
        for g in report.generations
    ]
    return held, report.pools


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(Release, id="release of a foreign lease"),
        pytest.param(lambda gen, lease: Release(gen, lease + 7), id="release of an unknown lease"),
        pytest.param(lambda gen, lease: Release(NO_GEN, lease), id="release of no generation"),
        pytest.param(lambda gen, lease: Ack(gen, lease, "stale"), id="ack of a foreign lease"),
        pytest.param(lambda gen, lease: Commit(gen), id="commit of a foreign generation"),
        pytest.param(lambda gen, lease: Abort(gen), id="abort of a foreign generation"),
        pytest.param(lambda gen, lease: Reserve(gen, PAGE_BYTES), id="reserve of a foreign one"),
        pytest.param(lambda gen, lease: Commit(NO_GEN), id="commit of no generation"),
        pytest.param(lambda gen, lease: Cancel(7), id="cancel of no request"),
    ],
)
def test_what_is_not_the_senders_is_passed_over(coordinator, holder, operator, message):
    """And its sender stays attached."""
    before = books(operator)
    peer = Peer(coordinator.socket)
    generation = operator.generation("held")
    peer.send(message(generation.generation, 1))
    peer.flush()
    assert books(operator) == before
    assert coordinator.audit().leases == 1


def test_an_ended_lease_is_not_ended_again(coordinator, holder, operator):
    """Neither twice, nor after the same process has a new one."""
    with mapper(coordinator.socket) as other:
        other.do("acquire", "held")
        other.do("map")
        other.do("close")
        assert coordinator.audit().leases == 2
        other.do("unmap")
        other.do("release")
        before = books(operator)
        other.do("release")
        assert books(operator) == before
        assert coordinator.audit().leases == 1


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(Reserve("1-1", -PAGE_BYTES), id="reserve a negative size"),
        pytest.param(Reserve("1-1", 0), id="reserve nothing"),
        pytest.param(Reserve("1-1", 1 << 63), id="reserve an absurd size"),
        pytest.param(Reserve("1-1", PAGE_BYTES + 1), id="reserve half a page"),
        pytest.param(Charge(1, "ram", "k", -PAGE_BYTES, 1.0), id="charge a negative size"),
        pytest.param(Charge(1, "ram", "k", 0, 1.0), id="charge nothing"),
        pytest.param(Charge(1, "ram", "k", 1 << 63, 1.0), id="charge an absurd size"),
        pytest.param(Acquire(1, "k", None, "", -1.0), id="a negative timeout"),
        pytest.param(Acquire(1, "k", None, "", math.nan), id="a timeout that is no number"),
        pytest.param(Acquire(1, "k", None, "", math.inf), id="an endless timeout"),
        pytest.param(Acquire(1, "k", None, "", 1e300), id="an absurd timeout"),
        pytest.param(Invalidate(1, "k", -1.0), id="invalidate in a negative time"),
        pytest.param(Limit(1, "ram", -1), id="a negative budget"),
        pytest.param(Limit(1, "ram", 1 << 63), id="an absurd budget"),
        pytest.param(Drain(1, -1.0), id="drain in a negative time"),
    ],
)
def test_an_amount_that_cannot_be_ends_its_own_connection(coordinator, holder, operator, message):
    before = books(operator)
    role = "operator" if isinstance(message, Limit | Drain) else "worker"
    peer = Peer(coordinator.socket, role=role)
    data = msgspec.msgpack.encode(message)
    peer.channel.send(data)
    answer = peer.expect(Fail)
    assert (answer.rid, answer.cause.code) == (0, "protocol_violation")
    assert peer.receive() is None
    operator.flush()
    assert books(operator) == before
    assert coordinator.audit().leases == 1


def test_a_charge_of_no_pool_is_refused(coordinator, holder, operator):
    before = books(operator)
    peer = Peer(coordinator.socket)
    peer.send(Charge(peer.next_rid(), "vram:9", "k", PAGE_BYTES, 1.0))
    assert isinstance(peer.expect(Fail | Grant), Fail)
    operator.send(Limit(operator.next_rid(), "disk:9", 0))
    assert operator.expect(Fail).cause.code == "argument_refused"
    assert books(operator) == before
    coordinator.audit()


def test_a_generation_is_committed_once(coordinator, holder, operator):
    """One answer, whatever comes behind: a second commit, an abort, another reserve."""
    peer = Peer(coordinator.socket)
    ticket = peer.ticket("twice")
    os.close(peer.space(ticket.gen, 2 * PAGE_BYTES))
    for _ in range(3):
        peer.send(Commit(ticket.gen))
    grant = peer.expect(Grant)
    os.close(*peer.fds)
    after = books(operator)
    for message in (Commit(ticket.gen), Abort(ticket.gen), Reserve(ticket.gen, PAGE_BYTES)):
        peer.send(message)
    peer.flush()  # nothing came before its answer
    assert books(operator) == after
    peer.send(Release(grant.gen, grant.rid))
    peer.flush()
    assert operator.generation("twice").state == "ready"
    assert coordinator.audit().leases == 1


@pytest.mark.parametrize("length_bytes", [0, 1 << 20, 1 << 62, (1 << 64) - 1])
def test_a_lie_about_the_size_of_a_manifest_costs_what_was_charged(
    coordinator, holder, operator, length_bytes
):
    """The segment is as large as it was said to be; readers find out by themselves."""
    peer = Peer(coordinator.socket)
    ticket = peer.ticket("lie", version=str(length_bytes))
    fd = peer.space(ticket.gen, 2 * PAGE_BYTES)
    segment.write_at(fd, length_bytes.to_bytes(8, "little"), PREAMBLE_BYTES)
    os.close(fd)
    peer.send(Commit(ticket.gen))
    grant = peer.expect(Grant)
    os.close(*peer.fds)
    peer.send(Release(grant.gen, grant.rid))
    peer.flush()
    assert operator.generation("lie").size_bytes == 2 * PAGE_BYTES
    assert operator.status().pools[0].in_use_bytes == coordinator.segment_blocks()
    assert coordinator.audit().leases == 1


@pytest.mark.parametrize("how", ["source", "build", "charge"])
def test_a_budget_smaller_than_one_model_refuses_it_at_once(tmp_path, how):
    file = write_safetensors(tmp_path / "w", {"w": ("U8", [5000], bytes(5000))})
    with running(str(tmp_path / "s"), "--ram-budget", "4KiB") as small:
        peer = Peer(small.socket)
        if how == "source":
            answer = peer.load("k", file)
        elif how == "build":
            peer.send(Reserve(peer.ticket("k").gen, 4 * PAGE_BYTES))
            answer = peer.expect(Fail)
        else:
            peer.send(Charge(peer.next_rid(), "ram", "k", 4 * PAGE_BYTES, WAIT_S))
            answer = peer.expect(Fail)
        assert answer.cause.code == "budget_exceeded"
        peer.flush()
        assert peer.status().pools[0].in_use_bytes == small.segment_blocks() == 0
        assert peer.status().generations == ()
        small.audit()
