"""`launch` without a command: a resident worker for each device."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from tests.coordinator.command_line import only_line
from tests.coordinator.launched import Launched
from tests.processes import WAIT_S, Peer

pytestmark = pytest.mark.process


def sessions(launched: Launched) -> dict[str, int]:
    """Name to pid of every resident worker that is attached."""
    found = Peer(launched.socket(), role="operator").status().sessions
    return {one.name: one.pid for one in found if one.name.startswith("resident ")}


def leased_pools(launched: Launched) -> list[str]:
    """Where there is something that somebody leases."""
    report = Peer(launched.socket(), role="operator").status()
    return sorted(one.pool for one in report.generations if one.leases)


def members(launched: Launched) -> dict[str, int | None]:
    return {member.name: member.pid for member in launched.group.members}


def test_each_device_has_one_and_they_end_together(launch, weights):
    launched = launch("--devices", "sim:41,sim:42", "--keep", f"w={weights}", worker=None)
    lines = sorted(launched.said("'w' #") for _ in range(2))
    assert [line.partition(" weight-cache: 'w' #")[0] for line in lines] == [
        "[resident sim:41]",
        "[resident sim:42]",
    ]
    found = sessions(launched)
    assert sorted(found) == ["resident sim:41", "resident sim:42"]
    assert {"coordinator": launched.coordinator, **found} == members(launched)
    launched.family |= set(found.values())
    launched.send(signal.SIGTERM)
    code, _, err = launched.end()
    assert code == 0, err


def test_one_that_is_killed_is_started_again_and_moves_nothing(launch, weights):
    launched = launch("--devices", "sim:43", "--keep", f"w={weights}", worker=None)
    assert "293.0 KiB moved" in launched.said("'w' #")
    first = sessions(launched)["resident sim:43"]
    os.kill(first, signal.SIGKILL)
    assert "; it is started again in 0.5 s" in launched.said(f"resident sim:43 (pid {first}) ended")
    assert ", 0 B moved" in launched.said("'w' #")
    assert sessions(launched)["resident sim:43"] != first
    launched.send(signal.SIGTERM)
    assert launched.end()[0] == 0


def test_a_coordinator_that_is_killed_finds_what_they_keep(launch, weights):
    launched = launch("--devices", "sim:44", "--keep", f"w={weights}", worker=None)
    launched.said("'w' #")
    before = sessions(launched)
    os.kill(launched.coordinator, signal.SIGKILL)
    launched.said("ready on")
    deadline_s = time.monotonic() + WAIT_S
    while leased_pools(launched) != ["ram", "vram:sim-44"]:  # it comes back by itself, soon
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.01)
    assert sessions(launched) == before
    launched.send(signal.SIGTERM)
    assert launched.end()[0] == 0


def test_where_no_gpu_is_visible_it_is_the_host(launch, weights, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    launched = launch("--keep", f"w={weights}", worker=None)
    launched.said("[resident cpu] weight-cache: it has no memory of its own")
    assert "is on the host: 293.0 KiB" in launched.said("'w' #")
    launched.send(signal.SIGTERM)
    assert launched.end()[0] == 0


def test_what_is_no_checkpoint_ends_the_group_with_its_reason(launch, tmp_path):
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(b"no checkpoint")
    options = ["--devices", "sim:45", "--restart-workers", "never", "--keep", f"w={torn}"]
    code, _, err = launch(*options, worker=None).end()
    assert code == 3
    assert "[resident sim:45] weight-cache: 'w' cannot be kept: " in err


def test_a_source_that_is_missing_starts_nothing(run_here, path, tmp_path):
    missing = f"w={tmp_path / 'missing'}"
    code, out, err = run_here("launch", "--devices", "cpu", "--keep", missing, socket=path)
    assert (code, out) == (3, "")
    assert "missing: No such file" in only_line(err)


def test_its_command_is_the_same_python_and_not_a_folder_of_the_users(launch, weights, tmp_path):
    """A folder `gpu_worker` where `launch` was started is not what runs."""
    (tmp_path / "gpu_worker").mkdir()
    (tmp_path / "gpu_worker" / "__main__.py").write_text("raise SystemExit(9)")
    (tmp_path / "gpu_worker" / "__init__.py").write_text("")
    play = "import os, sys\nfrom coordinator.cli import main\n"
    play += f"os.chdir({str(tmp_path)!r})\nmain()"
    launched = launch("--devices", "cpu", "--keep", f"w={weights}", worker=None, play=play)
    launched.said("'w' #")
    launched.send(signal.SIGTERM)
    assert launched.process.wait(WAIT_S) == 0
    launched.end()
