"""`invalidate` and `limit`, as people run them."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from shm_store import channel
from shm_store.channel import Channel
from shm_store.keys import LeaseId
from shm_store.report import PoolReport, StatusReport, size_text
from shm_store.wire import (
    Ack,
    Done,
    Flush,
    Flushed,
    FromSession,
    Limit,
    Release,
    Report,
    Revoke,
    Status,
    decode,
    encode,
    session_decoder,
)
from tests.processes import Coordinator, Peer

pytestmark = pytest.mark.process

BUDGET_BYTES = 1 << 20
SIZE_BYTES = 80_000


@pytest.mark.parametrize(
    "arguments",
    [("invalidate", "k"), ("limit", "ram", "1GiB")],
    ids=" ".join,
)
def test_without_a_coordinator_they_say_what_to_do(arguments, path, run_here):
    code, out, err = run_here(*arguments, socket=path)
    assert (code, out) == (6, "")
    assert err.startswith(f"weight-cache: no coordinator answers on {path}: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ("invalidate",),
        ("invalidate", " k"),
        ("invalidate", "k", "--timeout", "nan"),
        ("limit", "ram"),
        ("limit", "ram", "20G"),
        ("limit", "ram", "0"),
    ],
    ids=" ".join,
)
def test_wrong_arguments_end_with_2_and_a_reason(arguments, path, run_here):
    code, out, err = run_here(*arguments, socket=path)
    assert (code, out) == (2, "") and err


# --- invalidate ---------------------------------------------------------------------------------


def held(peer: Peer, key: str = "k") -> Release:
    """Publish and lease; the RELEASE that ends it."""
    grant = peer.publish(key, b"\1" * SIZE_BYTES)
    os.close(*peer.fds)
    return Release(grant.gen, LeaseId(grant.rid))


def test_invalidate_frees_what_nobody_holds(coordinator: Coordinator, run_here):
    peer = Peer(coordinator.socket)
    peer.send(held(peer))
    peer.flush()
    shown = run_here("invalidate", "k", socket=coordinator.socket)
    assert shown == (0, "invalidated k\n", "")
    peer.flush()
    assert peer.generation("k") is None
    assert coordinator.segment_blocks() == 0
    again = run_here("invalidate", "k", socket=coordinator.socket)
    assert again == (0, "nothing was loaded under k\n", "")


def test_invalidate_returns_when_the_holders_know_and_names_them(
    coordinator: Coordinator, run_here
):
    peer = Peer(coordinator.socket)
    release = held(peer)

    def answer() -> None:
        revoke = peer.expect(Revoke)
        assert (revoke.gen, revoke.asked) == (release.gen, "stale")
        peer.send(Ack(revoke.gen, revoke.lease, revoke.asked))

    answering = threading.Thread(target=answer)
    answering.start()
    shown = run_here("invalidate", "k", socket=coordinator.socket)
    answering.join()
    assert shown == (0, f"invalidated k\nstill in use by pid {os.getpid()}\n", "")
    found = peer.generation("k")
    assert found is not None and found.state == "retired"
    peer.send(release)
    peer.flush()
    assert peer.generation("k") is None


def test_invalidate_fails_at_its_deadline_with_who_has_not_answered(
    coordinator: Coordinator, run_here
):
    peer = Peer(coordinator.socket)
    release = held(peer)
    code, out, err = run_here("invalidate", "k", "--timeout", "0.1", socket=coordinator.socket)
    assert (code, out) == (4, "")
    line, *table = err.splitlines()
    assert line.startswith("weight-cache: 'k' is retired, but not every process has said that ")
    assert f"pid {os.getpid()} (" in table[-1]
    peer.send(release)


# --- limit --------------------------------------------------------------------------------------


def test_a_lowered_limit_frees_what_is_idle_and_leaves_what_is_held(
    coordinator: Coordinator, run_here
):
    peer = Peer(coordinator.socket)
    peer.send(held(peer, "idle"))
    release = held(peer, "held")
    peer.flush()
    (size_bytes,) = {generation.size_bytes for generation in peer.status().generations}

    shown = run_here("limit", "ram", "64KiB", socket=coordinator.socket)
    above = "; above the limit: goes when it is idle"
    assert shown == (0, f"ram: {size_text(size_bytes)} charged of 64.0 KiB{above}\n", "")
    assert [generation.key for generation in peer.status().generations] == ["held"]
    assert coordinator.segment_blocks() == size_bytes > 64 * 1024
    peer.send(release)

    peer.flush()
    assert run_here("limit", "ram", "2 MiB", socket=coordinator.socket)[0] == 0
    (pool,) = peer.status().pools
    assert (pool.limit_bytes, pool.in_use_bytes) == (2 << 20, 0)


def test_limit_returns_when_what_went_is_gone(path, run_here):
    """The figure that it prints is what is left then."""
    heard: list[FromSession] = []
    pool = PoolReport("ram", 1, 2, 0, 0, 0, 0, 0, 0)

    def play(listener: socket.socket) -> None:
        played = Channel(listener.accept()[0])
        played.receive()  # RESUME
        answers = (Done(1), Flushed(2), Report(3, StatusReport(False, (pool,), (), ())))
        for answer in answers:
            received = played.receive()
            assert received is not None
            heard.append(decode(session_decoder, received[0]))
            played.send(encode(answer))
        played.close()

    with channel.listen(path) as listener:
        listener.setblocking(True)
        playing = threading.Thread(target=play, args=(listener,))
        playing.start()
        shown = run_here("limit", "ram", "1KiB", socket=path)
        playing.join()
    assert heard == [Limit(1, "ram", 1024), Flush(2), Status(3)]
    assert shown == (0, "ram: 2 B charged of 1.0 KiB\n", "")


def test_a_pool_that_is_not_there_is_refused(coordinator: Coordinator, run_here):
    code, out, err = run_here("limit", "rom", "1GiB", socket=coordinator.socket)
    assert (code, out) == (2, "")
    assert err == "weight-cache: there is no pool 'rom' (those there are: 'ram')\n"
    (pool,) = Peer(coordinator.socket).status().pools
    assert pool.limit_bytes == BUDGET_BYTES
