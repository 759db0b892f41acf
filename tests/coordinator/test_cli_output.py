"""Where the output of the command line goes, and what happens if it goes nowhere."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from tests.coordinator.command_line import command, run
from tests.processes import ROOT, WAIT_S

pytestmark = pytest.mark.process


def test_output_into_a_closed_pipe_is_no_error(coordinator):
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        command("status", "--socket", coordinator.socket),
        check=False,
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        timeout=WAIT_S,
        cwd=ROOT,
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def test_a_key_need_not_exist_in_the_terminals_encoding(coordinator):
    socket = {"WEIGHT_CACHE_SOCKET": coordinator.socket, "PYTHONIOENCODING": "ascii"}
    done = run("pin", "模型", **socket)
    assert done.returncode == 0
    assert done.stdout.startswith("pinned \\u6a21\\u578b (nothing")
