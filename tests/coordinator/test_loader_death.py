"""Loaders that die: killed at any byte, without memory, never started. The coordinator is real."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shm_store.layout import PAGE_BYTES
from shm_store.wire import Acquire, Fail, Grant, Release
from tests.coordinator.held_loaders import NEVER, PROGRAM, HeldLoaders
from tests.processes import WAIT_S, Coordinator, Peer, running, who_has, write_safetensors

pytestmark = pytest.mark.process

HALF_BYTES = 40_000
SIZE_BYTES = 2 * HALF_BYTES
BYTES = (0, 1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, HALF_BYTES, SIZE_BYTES - 1, SIZE_BYTES)
POINTS = ("before Fetch", "before Reserve", "after Reserve", *BYTES, "before Commit")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("d")


@pytest.fixture(scope="module")
def loaders(folder) -> Iterator[HeldLoaders]:
    held = HeldLoaders(folder)
    yield held
    held.close()


@pytest.fixture(scope="module")
def coordinator(folder, loaders) -> Iterator[Coordinator]:
    path = str(folder / "s")
    arguments = ("--ram-budget", "1MiB")
    with running(path, *arguments, program=PROGRAM, env=loaders.environment) as started:
        yield started


@pytest.fixture(scope="module")
def weights(folder) -> Path:
    """Two tensors that differ."""
    tensors = {
        name: ("U8", [HALF_BYTES], bytes([value]) * HALF_BYTES)
        for name, value in (("a", 1), ("b", 2))
    }
    return write_safetensors(folder / "w.safetensors", tensors)


def ask(peer: Peer, key: str, path: Path) -> None:
    with path.open("rb") as file:
        peer.send(Acquire(peer.next_rid(), key, str(path), "", WAIT_S), [file.fileno()])


def two_ask(coordinator: Coordinator, key: str, path: Path) -> list[Peer]:
    """Two sessions that wait for one loader."""
    peers = [Peer(coordinator.socket, name) for name in ("first", "second")]
    for peer in peers:
        ask(peer, key, path)
    return peers


def waited_for(coordinator: Coordinator, key: str) -> str:
    """The id of the generation that both wait for."""
    watcher = Peer(coordinator.socket, "watcher", role="operator")
    while (found := watcher.generation(key)) is None or found.waiting < 2:
        pass
    return found.generation


def gone(coordinator: Coordinator, gen: str) -> None:
    """Nothing is left of a generation, and the books say so to the page."""
    Peer(coordinator.socket, "watcher").flush()
    assert who_has(gen) == []
    assert coordinator.audit().in_use_bytes == coordinator.segment_blocks()


def granted(peer: Peer) -> str:
    """Take a grant of the whole file, give it back, and return the generation's id."""
    grant = peer.expect(Grant)
    (fd,) = peer.fds
    size_bytes = os.fstat(fd).st_size
    data = os.pread(fd, size_bytes, 0)
    assert bytes([1]) * HALF_BYTES in data and bytes([2]) * HALF_BYTES in data
    os.close(fd)
    peer.send(Release(grant.gen, grant.rid))
    return grant.gen


@pytest.mark.parametrize("point", POINTS)
def test_the_next_one_takes_over_from_one_that_was_killed(coordinator, loaders, weights, point):
    """Whoever waited gets all the bytes, of another generation; those of the dead one are gone."""
    key = f"next/{point}"
    peers = two_ask(coordinator, key, weights)
    first = loaders.next()
    first.stop_at(point)
    lost = waited_for(coordinator, key)
    first.kill()
    loaders.next().stop_at(NEVER)
    assert {granted(peer) for peer in peers} != {lost}
    gone(coordinator, lost)


def test_one_that_is_killed_after_its_commit_has_done_its_work(coordinator, loaders, weights):
    peers = two_ask(coordinator, "done", weights)
    loader = loaders.next()
    loader.stop_at("after Commit")
    gens = {granted(peer) for peer in peers}
    loader.kill()
    ask(peers[0], "done", weights)
    assert {granted(peers[0])} == gens


@pytest.mark.parametrize(
    "points",
    [
        ("before Fetch", "before Fetch"),
        ("after Reserve", 1),
        (HALF_BYTES, "before Reserve"),
        (SIZE_BYTES, "before Commit"),
    ],
)
def test_the_second_death_is_told_to_all_who_wait_and_the_next_who_asks_loads(
    coordinator, loaders, weights, points
):
    """Nobody is left waiting, and the key is none that cannot be loaded any more."""
    key = f"second/{points}"
    peers = two_ask(coordinator, key, weights)
    lost = []
    for point in points:
        loader = loaders.next()
        loader.stop_at(point)
        lost.append(waited_for(coordinator, key))
        loader.kill()
    for peer in peers:
        cause = peer.expect(Fail).cause
        assert cause.code == "fill_failed"
        by = "by SIGKILL, probably by the kernel's OOM killer"
        assert cause.message == f"the loader of {key!r} ended ({by})"
    for gen in lost:
        gone(coordinator, gen)
    assert peers[0].generation(key) is None
    ask(peers[0], key, weights)
    loaders.next().stop_at(NEVER)
    assert granted(peers[0]) not in lost


# --- without memory -------------------------------------------------------------------------------


@pytest.fixture
def alarmed(tmp_path) -> Iterator[tuple[Coordinator, HeldLoaders]]:
    """A coordinator whose standard error may say something alarming."""
    loaders = HeldLoaders(tmp_path)
    environment = loaders.environment
    started = Coordinator(str(tmp_path / "s"), program=PROGRAM, env=environment)
    yield started, loaders
    loaders.close()
    Peer.close_all()
    assert started.stop()[0] == 0


def with_long_header(path: Path) -> Path:
    """Weights whose header is more than a process has left over from its start."""
    tensor = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    header = json.dumps({"__metadata__": {"x": "y" * (48 << 20)}, "w": tensor}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\1")
    return path


def test_one_without_memory_for_the_header_says_so(alarmed, tmp_path):
    """The source's fault, or the limit's: the text fits both, and each who waits has it."""
    coordinator, loaders = alarmed
    peers = two_ask(coordinator, "k", with_long_header(tmp_path / "w"))
    loader = loaders.next()
    loader.stop_at("before Fetch")
    gen = waited_for(coordinator, "k")
    loader.run_out_of_memory(whole=False)
    for peer in peers:
        cause = peer.expect(Fail).cause
        assert cause.code == "source_unsupported"
        assert "more memory than a loader may have, which is 512 MiB at most" in cause.message
    gone(coordinator, gen)


def test_one_that_runs_out_of_memory_while_it_fills_says_so(alarmed, weights):
    """At once, and not after another one that would find no more of it. Its bytes are gone."""
    coordinator, loaders = alarmed
    peers = two_ask(coordinator, "k", weights)
    loader = loaders.next()
    loader.stop_at(0)
    gen = waited_for(coordinator, "k")
    loader.run_out_of_memory()
    for peer in peers:
        cause = peer.expect(Fail).cause
        assert cause.code == "fill_failed"
        assert cause.message == f"{weights}: the loader failed: out of memory"
    loader.ends()
    gone(coordinator, gen)
    ask(peers[0], "k", weights)
    loaders.next().stop_at(NEVER)
    assert granted(peers[0]) != gen


NO_ROOM_TO_START = """
import sys
from coordinator import loader
start = 'ulimit -v 4000 && exec "$0" -c 0'  # 4 MB: less than an interpreter
loader.command = lambda fd: ["sh", "-c", start, sys.executable]
from coordinator.cli import main
main()
"""


def test_one_that_never_starts_is_told_of_by_its_end(tmp_path, weights):
    """Under a limit of the address space; twice, as after any death."""
    coordinator = Coordinator(str(tmp_path / "s"), program=("-c", NO_ROOM_TO_START))
    peers = two_ask(coordinator, "k", weights)
    for peer in peers:
        cause = peer.expect(Fail).cause
        assert cause.code == "fill_failed"
        assert cause.message.startswith("the loader of 'k' ended (")
    peers[0].flush()
    assert coordinator.audit().generations == coordinator.segment_blocks() == 0
    Peer.close_all()
    code, stderr = coordinator.stop()
    assert code == 0 and stderr.count("the loader of generation") == 2
