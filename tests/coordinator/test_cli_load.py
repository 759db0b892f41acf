"""`weight-cache load`: weights that are ready before anybody asks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shm_store import errors
from shm_store.keys import GenerationId, LeaseId
from shm_store.report import PoolReport, StatusReport, size_text
from shm_store.wire import (
    Acquire,
    Cause,
    Fail,
    Flush,
    Flushed,
    Grant,
    Release,
    Report,
    Status,
)
from tests.coordinator.command_line import BUDGET_BYTES, Played, in_use_bytes, only_line, run, start
from tests.processes import WAIT_S, Peer, write_safetensors

pytestmark = pytest.mark.process


def test_load_returns_when_its_lease_has_ended(path, weights):
    """It says so and waits for it: the end of its process would do the same, only later."""
    with Played(path, "load", "k", weights) as played:
        asked = played.heard()
        assert isinstance(asked, Acquire)
        with open(weights, "rb") as segment:
            played.say(Grant(asked.rid, GenerationId("g")), segment.fileno())
        assert played.heard() == Release(GenerationId("g"), LeaseId(asked.rid))
        flush = played.heard()
        assert isinstance(flush, Flush)
        played.say(Flushed(flush.rid))
        assert played.end()[0] == 0


@pytest.mark.parametrize(
    ("timeout", "text"),
    [
        (
            "0",
            "'k' is not loaded yet, and --timeout 0 does not wait for it "
            "(give --timeout some seconds)",
        ),
        ("5", "late (see `weight-cache status` for what it waits for, or raise --timeout)"),
    ],
)
def test_a_load_that_is_late_speaks_of_its_own_option(path, weights, timeout, text):
    with Played(path, "load", "k", weights, "--timeout", timeout) as played:
        asked = played.heard()
        assert isinstance(asked, Acquire) and asked.timeout_s == float(timeout)
        played.say(Fail(asked.rid, Cause.of(errors.LoadTimeout("late"))))
        if timeout == "0":  # it asks whether its file can fit
            status = played.heard()
            assert isinstance(status, Status)
            pool = PoolReport("ram", 1 << 20, 0, 0, 0, 0, 0, 0, 0)
            played.say(Report(status.rid, StatusReport(False, (pool,), (), ())))
        assert played.end() == (4, "", f"weight-cache: {text}\n")


def test_a_load_that_never_fits_says_so_even_if_it_is_not_to_wait(path, weights):
    """Its size is known by then only here: more seconds, as for others, would not help."""
    with Played(path, "load", "k", weights, "--timeout", "0") as played:
        asked = played.heard()
        assert isinstance(asked, Acquire)
        played.say(Fail(asked.rid, Cause.of(errors.LoadTimeout("late"))))
        status = played.heard()
        assert isinstance(status, Status)
        pool = PoolReport("ram", 64 << 10, 0, 0, 0, 0, 0, 0, 0)
        played.say(Report(status.rid, StatusReport(False, (pool,), (), ())))
        code, out, err = played.end()
    assert (code, out) == (4, "")
    assert only_line(err).endswith(
        "; that is more than all of pool 'ram', 64.0 KiB "
        "(raise the limit: `weight-cache limit ram SIZE`)"
    )


def test_load_leaves_the_weights_ready_and_unleased(coordinator, weights):
    peer = Peer(coordinator.socket)
    done = run("load", "k", weights, "--socket", coordinator.socket)
    assert (done.returncode, done.stderr) == (0, "")
    found = peer.generation("k")
    assert found is not None
    assert (found.state, found.leases, found.pinned) == ("ready", (), False)
    line = only_line(done.stdout)
    assert line.startswith("k: generation #1, 300.0 KiB, ") and line.endswith(" s")
    assert found.size_bytes == coordinator.segment_blocks() == 300 * 1024

    again = run("load", "k", weights, "--socket", coordinator.socket)
    assert "generation #1, " in again.stdout
    assert coordinator.segment_blocks() == found.size_bytes


def test_load_with_pin_protects_until_unpin(coordinator, weights):
    socket = {"WEIGHT_CACHE_SOCKET": coordinator.socket}
    peer = Peer(coordinator.socket)
    assert run("load", "k", weights, "--pin", **socket).returncode == 0
    found = peer.generation("k")
    assert found is not None and found.pinned

    assert run("evict", "--idle", **socket).stdout == "nothing to evict\nkept 1 pinned: k\n"
    refused = run("evict", "k", **socket)
    assert refused.returncode == 2
    first, *table = refused.stderr.splitlines()
    assert first == ("weight-cache: 'k' is pinned (take the pin back: `weight-cache unpin k`)")
    assert "ready, pinned" in table[-1]
    assert peer.generation("k") == found

    assert run("unpin", "k", **socket).stdout == "unpinned k\n"
    assert run("unpin", "k", **socket).stdout == "k was not pinned\n"
    assert run("evict", "k", **socket).stdout == "evicted k\n"
    assert in_use_bytes(peer) == coordinator.segment_blocks() == 0


def test_a_failed_load_pins_nothing(coordinator, weights, tmp_path):
    (tmp_path / "bad").write_bytes(b"no checkpoint")
    done = run("load", "k", str(tmp_path / "bad"), "--pin", "--socket", coordinator.socket)
    assert done.returncode == 3
    peer = Peer(coordinator.socket)
    peer.load("k", weights)
    found = peer.generation("k")
    assert found is not None and not found.pinned


def test_a_load_that_waits_for_room_says_so_once_and_goes_on(coordinator, tmp_path):
    weights = write_safetensors(tmp_path / "w", {"w": ("U8", [600_000], bytes(600_000))})
    holder = Peer(coordinator.socket)
    granted = holder.load("held", str(weights))
    process = start("load", "k", str(weights), "--socket", coordinator.socket)
    assert process.stderr is not None
    line = process.stderr.readline()
    held_bytes = coordinator.segment_blocks()
    assert line == (
        f"weight-cache: waiting for room: pool ram has {size_text(BUDGET_BYTES - held_bytes)} "
        f"free of 1.0 MiB; held by 'held' ({size_text(held_bytes)}, pid {os.getpid()})\n"
    )
    holder.send(Release(granted.gen, LeaseId(granted.rid)))
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (0, "")
    assert out.startswith("k: generation ")


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("missing", 3, "No such file"),
        ("folder", 3, "no checkpoint in this folder"),
        ("empty", 3, "empty"),
        ("garbage", 3, "garbage"),
        ("large", 4, "needs 4.0 MiB"),
    ],
)
def test_a_load_that_cannot_be_says_why_and_charges_nothing(
    coordinator, tmp_path, weights, name, code, text
):
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "garbage").write_bytes(b"\xff" * 100)
    write_safetensors(tmp_path / "large", {"w": ("U8", [3 << 20], bytes(3 << 20))})
    run("load", "other", weights, "--socket", coordinator.socket)
    peer = Peer(coordinator.socket)
    before = peer.status()

    done = run("load", "k", str(tmp_path / name), "--socket", coordinator.socket)
    assert (done.returncode, done.stdout) == (code, "")
    assert text in done.stderr.splitlines()[0]
    assert peer.status().generations == before.generations
    if code == 4:
        assert "other" in done.stderr  # the table of those who fill the pool


def test_a_source_whose_name_is_no_text_is_refused(coordinator, tmp_path):
    name = os.fsencode(tmp_path) + b"/\xff"
    Path(os.fsdecode(name)).write_bytes(b"x")
    done = run("load", "k", os.fsdecode(name), "--socket", coordinator.socket)
    assert done.returncode == 2 and "UTF-8" in only_line(done.stderr)
