"""`weight-cache serve`: a coordinator in the foreground."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.coordinator.command_line import only_line, run, start
from tests.processes import ROOT, WAIT_S

pytestmark = pytest.mark.process


def test_serve_imports_nothing_heavy_and_stays_small(path):
    """What is imported on the way to the ready line stays in memory for the coordinator's life."""
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "coordinator", "serve", "--socket", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith(f"weight-cache: ready on {path} (ram budget ")
    status = Path(f"/proc/{process.pid}/status").read_text()
    ran_ns = int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[0])
    process.terminate()
    _, imports = process.communicate(timeout=WAIT_S)

    modules = {line.rpartition("|")[2].strip() for line in imports.splitlines()}
    assert "asyncio" in modules
    heavy = {"torch", "numpy", "typer", "click", "pydantic", "rich", "safetensors"}
    assert not {module.partition(".")[0] for module in modules} & heavy
    assert int(status.split("VmRSS:")[1].split()[0]) < 40 * 1024
    assert ran_ns < 300_000_000  # processor time: the wall clock is the machine's as well


def test_serve_makes_the_users_own_folder_where_every_command_looks(tmp_path):
    everyday = {"XDG_RUNTIME_DIR": str(tmp_path)}
    process = start("serve", **everyday)
    assert process.stdout is not None and process.stdout.readline()
    assert os.stat(tmp_path / "weight-cache").st_mode & 0o777 == 0o700
    assert run("status", **everyday).returncode == 0
    assert run("drain", **everyday).returncode == 0
    assert process.communicate(timeout=WAIT_S) == ("", "")


def test_serve_makes_no_folder_that_was_chosen(tmp_path):
    done = run("serve", "--socket", str(tmp_path / "gone" / "s"))
    assert done.returncode == 2
    missing = f"there is no folder {tmp_path / 'gone'} for the socket (make it, or choose another)"
    assert only_line(done.stderr) == f"weight-cache: {missing}"
    assert not (tmp_path / "gone").exists()


def test_a_second_coordinator_is_refused_and_the_first_goes_on(coordinator):
    done = run("serve", "--socket", coordinator.socket)
    assert (done.returncode, done.stdout) == (6, "")
    assert "already serves" in only_line(done.stderr)
    assert run("status", "--socket", coordinator.socket).returncode == 0
