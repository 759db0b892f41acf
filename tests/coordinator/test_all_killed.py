"""`kill -9` of a whole group in one moment, while it loads, fills and computes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from shm_store.wire import Acquire, HeldMap, Release
from tests.coordinator.held_loaders import PROGRAM, HeldLoaders
from tests.coordinator.launched import HELLO, WAITS, all_end, descendants_of, watch
from tests.mapper import mapper
from tests.processes import WAIT_S, Coordinator, Peer, who_has, write_safetensors

pytestmark = pytest.mark.process

PLAYED = f"""
import sys
from coordinator import coordinator_host
coordinator_host.module_command = lambda module: [sys.executable, "-c", {PROGRAM[1]!r}]
from coordinator.cli import main
main()
"""

WORKER = f"""
from tests.mapper import _Commands
worker = _Commands(os.environ["WEIGHT_CACHE_SOCKET"])
if os.environ["WEIGHT_CACHE_RANK"] == "0":
    worker.publish("held", "100000")
    worker.map()
    worker.read()
else:
    worker.reserve("half", "65536")
{HELLO}
{WAITS}
"""


@pytest.mark.parametrize("order", ["from the front", "from the leaves"])
def test_nothing_is_left_and_the_next_start_is_clean(launch, tmp_path, order):
    """Front, supervisor, coordinator, a loader half-way, a worker with weights mapped, one that
    fills, and one from outside; all stopped first, so that none does anything about another's end.
    """
    path, loaders = str(tmp_path / "c.sock"), HeldLoaders(tmp_path)
    weights = write_safetensors(tmp_path / "w", {"w": ("U8", [50_000], bytes(50_000))})
    os.environ["HELD_LOADERS"] = loaders.path
    try:
        launched = launch("--socket", path, "--workers", "2", worker=WORKER, play=PLAYED)
    finally:
        del os.environ["HELD_LOADERS"]
    launched.socket_path = path
    launched.up(2)
    with mapper(path) as outsider:
        outsider.do("acquire", "held")
        outsider.do("map")
        watcher = Peer(path, "watcher")
        with weights.open("rb") as file:
            watcher.send(
                Acquire(watcher.next_rid(), "k", str(weights), "", WAIT_S), [file.fileno()]
            )
        loader = loaders.next()
        loader.stop_at(25_000)
        everybody = [launched.process.pid, *sorted(descendants_of(launched.process.pid))]
        everybody.append(outsider.pid)
        gens = [generation.generation for generation in watcher.status().generations]
        assert len(gens) == 3 and all(who_has(gen) for gen in gens)
        assert {loader.pid, launched.coordinator, launched.supervisor} < set(everybody)
        Peer.close_all()
        pidfds = watch(*everybody)
        for pidfd in pidfds:
            signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        for pidfd in pidfds if order == "from the front" else reversed(pidfds):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        launched.process.wait(WAIT_S)
        assert all_end(*pidfds)
    assert [who_has(gen) for gen in gens] == [[], [], []]
    loaders.close()
    again = launch("--socket", path, worker="say('here')")
    code, lines, stderr = again.end()
    assert (code, lines) == (0, ["here"])
    (only,) = stderr.splitlines()
    assert only.startswith(f"weight-cache: ready on {path} ")
    assert not list(Path(tmp_path).glob("c.sock*"))


def test_without_a_store_what_nobody_has_mapped_is_lost_and_that_is_said(tmp_path):
    """What somebody has mapped comes back with him, as the generation that it was."""
    path = str(tmp_path / "c.sock")
    killed = Coordinator(path)
    peer = Peer(path, "holder", token="t" * 32)
    held = peer.publish("held")
    (fd,) = peer.fds
    idle = peer.publish("idle")
    os.close(*peer.fds)
    peer.send(Release(idle.gen, idle.rid))
    peer.flush()
    _, stderr = killed.stop(signal.SIGKILL)
    assert stderr == ""
    Peer.close_all()
    assert who_has(idle.gen) == [] and who_has(held.gen) == [os.getpid()]
    again = Coordinator(path)
    back = Peer(path, "holder", token="t" * 32, held=[(HeldMap(held.gen, held.rid), [fd])])
    os.close(fd)
    assert [(g.key, g.generation, g.state) for g in back.status().generations] == [
        ("held", held.gen, "ready")
    ]
    back.send(Release(held.gen, held.rid))
    back.flush()
    again.audit()
    code, stderr = again.stop()
    assert code == 0
    assert stderr == (
        "weight-cache: nothing was stored: weights that no process has mapped are lost\n"
    )
