"""A socket path for each test, a coordinator, weights and commands."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coordinator.cli import main
from tests.coordinator.launched import Launched
from tests.memory_cgroup import MemoryCgroup, make
from tests.processes import Peer, running, write_safetensors

SIZE_BYTES = 300_000


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "c.sock")


@pytest.fixture
def coordinator(path: str):
    with running(path, "--ram-budget", "1MiB") as started:
        yield started


@pytest.fixture
def weights(tmp_path: Path) -> str:
    return str(
        write_safetensors(
            tmp_path / "w.safetensors", {"w": ("U8", [SIZE_BYTES], bytes(SIZE_BYTES))}
        )
    )


@pytest.fixture
def launch(tmp_path: Path):
    """Start a `launch` whose workers are Python code; what a failed test left is ended."""
    started: list[Launched] = []

    def launch(*options: str, **arguments) -> Launched:
        folder = tmp_path / f"g{len(started)}"
        folder.mkdir()
        started.append(Launched(folder, *options, **arguments))
        return started[-1]

    yield launch
    Peer.close_all()
    for launched in started:
        launched.clean_up()


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Run a command that starts nothing in this process, which spares an interpreter."""

    def run(*arguments: str, socket: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["weight-cache", *arguments])
        monkeypatch.setenv("WEIGHT_CACHE_SOCKET", socket)
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def torch_kept() -> Iterator[None]:
    """What a loader does to torch and to its process is undone here, where others use them."""
    import torch

    threads, limits = torch.get_num_threads(), resource.getrlimit(resource.RLIMIT_DATA)
    environment = dict(os.environ)
    yield
    torch.set_num_threads(threads)
    resource.setrlimit(resource.RLIMIT_DATA, limits)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def small_cgroup() -> Iterator[Callable[[int], MemoryCgroup]]:
    """Return a function that makes a memory cgroup with a limit, removed afterwards."""
    made: list[MemoryCgroup] = []

    def small(limit_bytes: int) -> MemoryCgroup:
        made.append(make(limit_bytes))
        return made[-1]

    yield small
    for cgroup in made:
        # Pages of a segment that is being closed leave a moment after their process.
        cgroup.remove()
