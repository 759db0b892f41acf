"""The program that the README names as a start."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.processes import ROOT, WAIT_S

pytestmark = pytest.mark.process


def test_the_example_runs_in_two_workers_that_share_what_one_has_made(tmp_path):
    """As its first line says; both find the same weights, and one of them made them."""
    command = ["-m", "coordinator", "launch", "--workers", "2", "--", sys.executable]
    done = subprocess.run(
        [sys.executable, *command, "examples/app.py"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=WAIT_S * 2,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("makes the weights") == 1
    answers = dict(re.findall(r"worker (\d): (\S+)$", done.stdout, re.MULTILINE))
    assert set(answers) == {"0", "1"} and len(set(answers.values())) == 1
    assert done.stdout.count("app is gone: shutdown") == 2
