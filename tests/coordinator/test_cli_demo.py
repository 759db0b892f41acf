"""`weight-cache demo`: how the command finds and starts it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.coordinator.command_line import environment
from tests.processes import ROOT, WAIT_S

pytestmark = pytest.mark.process


def test_the_demo_runs_with_its_arguments_and_not_with_what_lies_around(tmp_path):
    """`python -m` would look into the working directory first."""
    package = tmp_path / "lib" / "gpu_worker"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "demo.py").write_text("import sys; print(sys.argv[1:]); sys.exit(5)")
    decoy = tmp_path / "here" / "gpu_worker"
    decoy.mkdir(parents=True)
    (decoy / "__init__.py").write_text("raise SystemExit('the wrong package')")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "coordinator", "demo", "--json", "--checkpoint-mib", "8"],
        check=False,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        cwd=decoy.parent,
        env=environment(PYTHONPATH=f"{tmp_path / 'lib'}:{ROOT}"),
    )
    expected = "['--json', '--checkpoint-mib', '8']\n"
    assert (done.returncode, done.stdout) == (5, expected), done.stderr
