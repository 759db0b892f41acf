"""A memory cgroup that is smaller than a load, with coordinator and worker inside: both live on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shm_store.wire import Fail, Grant, Reserve
from tests.mapper import Mapper, mapper
from tests.memory_cgroup import MemoryCgroup
from tests.processes import Coordinator, Peer, running, write_safetensors

pytestmark = pytest.mark.process

MIB = 1 << 20
LIMIT_BYTES = 256 * MIB
HELD_BYTES = 80 * MIB
"""The worker is the largest process there: without volunteers the kernel would choose it."""
TOO_MUCH_BYTES = 240 * MIB

BLIND = """
import os, sys
from coordinator import backing
child = '''
import sys
sys.path.insert(0, sys.argv.pop(1))
import backing
backing.shortage = lambda needed_bytes: ""
sys.exit(backing.main(sys.argv))
'''
folder, command = os.path.dirname(backing.__file__), backing.command
def blind(*numbers):
    python, isolated, bare, _, *arguments = command(*numbers)
    return [python, isolated, bare, "-c", child, folder, *arguments]
if sys.argv.pop(1) == "blind":
    backing.command = blind
from coordinator.cli import main
main()
"""
"""A coordinator; its backing children do not look at the headroom if they are to be `blind`, as
when somebody takes the memory right after they have looked."""

Inside = tuple[Coordinator, Mapper, MemoryCgroup]


@pytest.fixture
def inside(request, tmp_path, small_cgroup) -> Iterator[Inside]:
    cgroup = small_cgroup(LIMIT_BYTES)
    path, program = str(tmp_path / "s"), ("-c", BLIND, request.param)
    with (
        running(path, "--ram-budget", "1GiB", program=program, preexec_fn=cgroup.enter) as started,
        mapper(path, cgroup.enter) as worker,
    ):
        for step in (("publish", "held", HELD_BYTES), ("map",), ("close",), ("read",)):
            worker.do(*step)
        yield started, worker, cgroup


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """More than fits. A hole, so it costs nothing to make."""
    path = tmp_path_factory.mktemp("w") / "w.safetensors"
    write_safetensors(path, {"w": ("U8", [0], b"")})
    header = path.read_bytes()[8:].replace(b"[0]", b"[%d]" % TOO_MUCH_BYTES)
    header = header.replace(b"[0, 0]", b"[0, %d]" % TOO_MUCH_BYTES)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + TOO_MUCH_BYTES)
    return path


def exceed(peer: Peer, how: str, weights: Path) -> Fail:
    """Have more loaded than fits, by a loader or by a build; return the refusal."""
    if how == "source":
        answer = peer.load("k", weights)
        assert isinstance(answer, Fail)
        return answer
    peer.send(Reserve(peer.ticket("k").gen, TOO_MUCH_BYTES))
    return peer.expect(Fail)


def both_go_on(inside: Inside, peer: Peer) -> None:
    """The kernel has killed neither, nothing is left of what failed, and what fits is loaded."""
    coordinator, worker, _ = inside
    peer.flush()
    assert worker.do("read") == "None" and coordinator.process.poll() is None
    assert peer.generation("k") is None
    assert coordinator.audit().in_use_bytes == coordinator.segment_blocks()
    assert isinstance(peer.publish("fits", bytes(8 * MIB)), Grant)
    os.close(*peer.fds)


@pytest.mark.parametrize("inside", ["looking"], indirect=True)
@pytest.mark.parametrize("how", ["source", "build"])
def test_what_the_cgroup_has_no_room_for_is_refused_and_nobody_is_killed(inside, weights, how):
    coordinator, _, cgroup = inside
    peer = Peer(coordinator.socket)
    cause = exceed(peer, how, weights).cause
    assert cause.code == "backing_failed"
    assert "left in this memory cgroup" in cause.message
    assert cgroup.oom_kills == 0
    both_go_on(inside, peer)


@pytest.mark.parametrize("inside", ["blind"], indirect=True)
@pytest.mark.parametrize("how", ["source", "build"])
def test_whom_the_kernel_kills_has_volunteered(inside, weights, how):
    """The backing child, or the loader that waits beside it. Either way the reason is told."""
    coordinator, _, cgroup = inside
    peer = Peer(coordinator.socket)
    cause = exceed(peer, how, weights).cause
    assert cause.code in ("backing_failed", "fill_failed")
    assert "by SIGKILL, probably by the kernel's OOM killer" in cause.message
    assert cgroup.oom_kills > 0
    both_go_on(inside, peer)
