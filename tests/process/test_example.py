"""The programs in `examples`: they run as their first lines say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, WAIT_S

pytestmark = pytest.mark.process


def launch(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "coordinator", "launch", *words],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=WAIT_S * 2,
        check=False,
    )


def test_the_example_runs_in_two_workers_that_share_what_one_has_made(tmp_path):
    """As its first line says; both find the same weights, and one of them made them."""
    done = launch(tmp_path, "--workers", "2", "--", sys.executable, "examples/app.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("makes the weights") == 1
    answers = dict(re.findall(r"worker (\d): (\S+)$", done.stdout, re.MULTILINE))
    assert set(answers) == {"0", "1"} and len(set(answers.values())) == 1
    assert done.stdout.count("app is gone: shutdown") == 2


def test_a_server_that_was_killed_finds_its_weights_on_the_device(tmp_path):
    """The first one brings them there and is killed; the next one answers the same, for nothing."""
    command = ["--restart-workers", "on-failure", "--", sys.executable, "examples/restart.py"]
    done = launch(tmp_path, *command)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("by SIGKILL") == 1
    answers = re.findall(r"the answer is (\S+)$", done.stdout, re.MULTILINE)
    assert len(answers) == 2 and len(set(answers)) == 1
    first, then = map(int, re.findall(r"moved to the device: (\d+) bytes", done.stdout))
    assert first > 8 * 1024 * 1024 * 4 and then == 0
