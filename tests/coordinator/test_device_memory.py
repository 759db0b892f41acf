"""Memory on a device whose process has ended: charged until the device has it back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from coordinator import device_memory
from coordinator.audit import audit
from coordinator.operator import Operator
from shm_store.memfds import PREFIX
from shm_store.wire import Charge, Declare, Done, Grant, HeldCharge, Limit, Release
from tests.gpu_worker.served import wait_until
from tests.processes import ROOT, WAIT_S, Peer, running

POOL = "vram:sim-5"
PAGES = 8 * 4096

PARENT = f"""
import sys
from shm_store.wire import Charge, Declare, Grant
from tests.processes import Peer

peer = Peer(sys.argv[1], "parent")
peer.send(Declare({POOL!r}, 1 << 20))
rid = peer.next_rid()
peer.send(Charge(rid, {POOL!r}, "m", {PAGES}, 10.0))
print(peer.expect(Grant).gen, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def coordinator(tmp_path):
    with running(str(tmp_path / "s")) as started:
        yield started


@pytest.fixture
def operator(coordinator) -> Peer:
    return Peer(coordinator.socket, "operator", role="operator")


@pytest.fixture
def parent(coordinator) -> Iterator[subprocess.Popen[str]]:
    """A process that has memory on a device."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, coordinator.socket],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    yield process
    process.kill()
    process.communicate(timeout=WAIT_S)


def block_of(gen: str) -> int:
    """Return an fd of memory of a simulated device that is for a generation."""
    fd = os.memfd_create(f"{PREFIX}sim:5:{gen}")
    os.posix_fallocate(fd, 0, PAGES)
    return fd


def in_use(operator: Peer) -> int:
    return next(pool.in_use_bytes for pool in operator.status().pools if pool.name == POOL)


def test_it_is_charged_until_nobody_has_it(parent, operator):
    gen = parent.stdout.readline().strip()
    kept = block_of(gen)
    parent.send_signal(signal.SIGKILL)
    wait_until(lambda: [g.state for g in operator.status().generations] == ["freeing"])
    assert in_use(operator) == PAGES
    os.close(kept)
    wait_until(lambda: in_use(operator) == 0)


def test_a_forked_child_that_was_not_attached_takes_it_over(parent, coordinator, operator):
    """It is on its way out by the books, and the child is believed: it has it."""
    gen = parent.stdout.readline().strip()
    kept = block_of(gen)
    parent.send_signal(signal.SIGKILL)
    wait_until(lambda: [g.state for g in operator.status().generations] == ["freeing"])
    held = [(HeldCharge(gen, 77, POOL, "m", PAGES), ()), (Declare(POOL, 1 << 20), ())]
    child = Peer(coordinator.socket, "child", token="c" * 32, held=held)
    child.flush()
    assert [(g.state, len(g.leases)) for g in operator.status().generations] == [("ready", 1)]
    os.close(kept)
    child.send(Release(gen, 77))
    wait_until(lambda: in_use(operator) == 0)


def test_a_coordinator_that_ends_does_not_wait_for_it(parent, coordinator, operator):
    gen = parent.stdout.readline().strip()
    kept = block_of(gen)
    parent.send_signal(signal.SIGKILL)
    wait_until(lambda: [g.state for g in operator.status().generations] == ["freeing"])
    coordinator.unquiet = "it has memory that nobody gives back"
    code, _ = coordinator.stop()
    os.close(kept)
    assert code in (0, 1, -signal.SIGTERM)


class TestAudit:
    """What is charged on a simulated device against what the kernel says is there."""

    def found(self, coordinator) -> list[tuple[str, int | None]]:
        with Operator.connect(coordinator.socket, "audit") as looking:
            return [(one.kind, one.kernel_bytes) for one in audit(looking).differences]

    def test_it_agrees_with_what_is_there_and_finds_less_and_more(self, coordinator):
        peer = Peer(coordinator.socket)
        peer.send(Declare(POOL, 1 << 20))
        peer.send(Charge(rid := peer.next_rid(), POOL, "m", PAGES, WAIT_S))
        gen = peer.expect(Grant).gen
        assert self.found(coordinator) == [("wrong_block", 0)]
        block = block_of(gen)
        assert self.found(coordinator) == []
        os.ftruncate(block, PAGES // 2)
        assert self.found(coordinator) == [("wrong_block", PAGES // 2)]
        os.close(block)
        peer.send(Release(gen, rid))
        peer.flush()

    def test_what_nobody_is_charged_for_is_found_unless_it_is_empty(self, coordinator, operator):
        """An allocation that an interrupt came into leaves an empty one."""
        start = operator.status().start
        stray = os.memfd_create(f"{PREFIX}sim:5:{start}-0000002a")
        others = os.memfd_create(f"{PREFIX}sim:5:{'f' * 16}-0000002a")
        os.posix_fallocate(others, 0, PAGES)
        assert self.found(coordinator) == []
        os.posix_fallocate(stray, 0, PAGES)
        assert self.found(coordinator) == [("uncharged_block", PAGES)]
        os.close(stray)
        os.close(others)


class TestGpu:
    """What the driver's program says of a process."""

    @pytest.fixture
    def said(self, monkeypatch, tmp_path):
        def say(text: str, code: int = 0) -> None:
            program = tmp_path / "nvidia-smi"
            program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {code}\n")
            program.chmod(0o700)
            monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

        return say

    def test_it_is_there_as_long_as_its_pid_is_listed_on_that_gpu(self, said):
        said("41, GPU-aa-bb\n42, GPU-cc-dd")
        assert device_memory._on_gpu("vram:GPU-cc-dd", 42)
        assert not device_memory._on_gpu("vram:GPU-aa-bb", 42)
        assert not device_memory._on_gpu("vram:GPU-cc-dd", 4)

    @pytest.mark.parametrize("text", ["", "No running processes found", "x, y, z"])
    def test_what_it_does_not_list_is_gone(self, said, text):
        said(text, 9)
        assert not device_memory._on_gpu("vram:GPU-aa-bb", 42)

    def test_without_it_the_end_of_the_process_has_to_do(self, monkeypatch):
        monkeypatch.setenv("PATH", "/nonexistent")
        assert not device_memory._on_gpu("vram:GPU-aa-bb", 42)


def test_a_device_may_be_limited_while_it_is_in_use(parent, operator):
    parent.stdout.readline()
    operator.send(Limit(operator.next_rid(), POOL, 4096))
    operator.expect(Done)
    pool = next(pool for pool in operator.status().pools if pool.name == POOL)
    assert (pool.limit_bytes, pool.in_use_bytes) == (4096, PAGES)
