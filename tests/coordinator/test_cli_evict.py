"""`weight-cache evict`, and the pins that stand in its way."""

from __future__ import annotations

import os
import re

import pytest

from shm_store.keys import Key
from shm_store.wire import Charge, Done, Evict, Flush, Flushed, Grant
from tests.coordinator.command_line import Played, only_line, run
from tests.processes import Peer

pytestmark = pytest.mark.process


def test_evict_returns_when_the_memory_is_gone(path):
    with Played(path, "evict", "k") as played:
        asked = played.heard()
        assert isinstance(asked, Evict)
        played.say(Done(asked.rid, (Key("k"),)))
        flush = played.heard()
        assert isinstance(flush, Flush)
        played.say(Flushed(flush.rid))
        assert played.end() == (0, "evicted k\n", "")


def test_pin_before_the_weights_are_there(coordinator, weights):
    early = run("pin", "k", "--socket", coordinator.socket).stdout
    assert early == "pinned k (nothing is loaded under this key yet)\n"
    peer = Peer(coordinator.socket)
    assert peer.status().pins == ("k",)
    peer.load("k", weights)
    assert run("pin", "k", "--socket", coordinator.socket).stdout == "pinned k\n"
    found = peer.generation("k")
    assert found is not None and found.pinned


def test_evict_says_what_went_and_the_memory_is_gone_on_return(coordinator, weights):
    for key in ("a", "b"):
        assert run("load", key, weights, "--socket", coordinator.socket).returncode == 0
    done = run("evict", "--idle", "--socket", coordinator.socket)
    blocks = coordinator.segment_blocks()
    assert (done.returncode, blocks) == (0, 0)
    assert sorted(done.stdout.splitlines()) == ["evicted a", "evicted b"]
    missing = run("evict", "a", "--socket", coordinator.socket)
    assert missing.returncode == 2
    assert only_line(missing.stderr) == (
        "weight-cache: there are no weights 'a' (see `weight-cache status`)"
    )


def test_what_is_private_is_said_to_be_its_processs_own(coordinator):
    """No command reaches it; that none of them says it did keeps people from looking elsewhere."""
    holder = Peer(coordinator.socket)
    holder.send(Charge(holder.next_rid(), "ram", "own", 4096, 5.0))
    granted = holder.expect(Grant)
    pid = os.getpid()
    refused = run("evict", "own", "--socket", coordinator.socket)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"weight-cache: 'own' is private to pid {pid} (retire it")
    pinned = run("pin", "own", "--socket", coordinator.socket)
    note = f"nothing shared is loaded under this key yet; what is private to pid {pid} is not"
    assert pinned.stdout == f"pinned own ({note} protected)\n"
    retired = run("invalidate", "own", "--socket", coordinator.socket)
    assert retired.stdout == (
        "nothing shared was loaded under own\n"
        f"private to pid {pid}: retire it there, by `worker.evict` or `worker.invalidate`\n"
    )
    shown = run("status", "--socket", coordinator.socket).stdout
    assert re.search(r"^own .* ready, private +4.0 KiB +pid", shown, re.MULTILINE)
    found = holder.generation("own")
    assert found is not None and found.generation == granted.gen and found.leases


def test_evict_idle_says_what_a_pin_kept(coordinator, weights):
    for key in ("a", "b", "c"):
        run("load", key, weights, "--socket", coordinator.socket)
    for key in ("a", "c"):
        run("pin", key, "--socket", coordinator.socket)
    done = run("evict", "--idle", "--socket", coordinator.socket)
    assert (done.returncode, done.stdout) == (0, "evicted b\nkept 2 pinned: a, c\n")


def test_leased_weights_are_not_evicted_and_their_holder_is_named(coordinator, weights):
    holder = Peer(coordinator.socket)
    assert isinstance(holder.load("k", weights), Grant)
    before = holder.generation("k")
    done = run("evict", "k", "--socket", coordinator.socket)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("weight-cache: 'k' is in use (retire it, so that it goes ")
    assert f"pid {os.getpid()} (" in done.stderr
    after = holder.generation("k")
    assert before is not None and after is not None
    assert (after.generation, after.state) == (before.generation, "ready")
    assert run("evict", "--idle", "--socket", coordinator.socket).stdout == "nothing to evict\n"
