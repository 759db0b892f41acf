"""The systemd unit: what it relies on is there, and says the same as `launch` does."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import signal
import subprocess

import pytest

from coordinator.cli import read_serve
from coordinator.commands import app
from coordinator.fd_store import FDS_LIMIT
from coordinator.process_host import exit_code
from coordinator.roster import Rule
from shm_store.errors import ArgumentRefused, CoordinatorRunning, PlatformUnsupported
from shm_store.paths import default_socket_path
from tests.processes import ROOT

UNIT = ROOT / "packaging" / "systemd" / "weight-cache.service"
COMMAND = "%h/.local/bin/weight-cache"
EXAMPLES = [
    block
    for block in re.findall(r"^```\n(.*?)^```$", (ROOT / "docs/launch.md").read_text(), re.M | re.S)
    if "[Service]" in block
]
"""Of the documentation: an edit of the unit, and a group."""


def read(text: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, comment_prefixes="#", strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    return parser


@pytest.fixture(scope="module")
def unit() -> configparser.ConfigParser:
    return read(UNIT.read_text())


def seconds(text: str) -> float:
    for unit, factor in (("min", 60.0), ("ms", 0.001), ("s", 1.0)):
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor
    return float(text)


def test_systemd_keeps_fds_for_the_coordinator_alone(unit):
    service = unit["Service"]
    assert service["Type"] == "notify"
    assert service["NotifyAccess"] == "main"
    assert int(service["FileDescriptorStoreMax"]) == FDS_LIMIT


def test_it_restarts_as_launch_does(unit):
    rule = Rule()
    assert unit["Service"]["Restart"] == "on-failure"
    assert seconds(unit["Service"]["RestartSec"]) == rule.first_delay_s
    assert seconds(unit["Unit"]["StartLimitIntervalSec"]) == rule.window_s
    assert int(unit["Unit"]["StartLimitBurst"]) == rule.restarts + 1  # the first start counts there
    hopeless = (ArgumentRefused, CoordinatorRunning, PlatformUnsupported)
    assert unit["Service"]["RestartPreventExitStatus"].split() == [
        str(error.exit_code) for error in hopeless
    ]


def test_it_ends_in_order_and_an_oom_kill_is_no_end(unit):
    service = unit["Service"]
    assert service["KillMode"] == "mixed"
    assert service["OOMPolicy"] == "continue"
    command, name, option, timeout = shlex.split(service["ExecStop"])
    assert (command, name, option) == (f"-{COMMAND}", "drain", "--timeout")
    assert "drain" in {info.name or info.callback.__name__ for info in app.registered_commands}
    assert seconds(service["TimeoutStopSec"]) > float(timeout)


def test_it_starts_what_there_is_where_workers_look(unit, monkeypatch, tmp_path):
    service = unit["Service"]
    command, *arguments = shlex.split(service["ExecStart"])
    assert command == COMMAND
    assert read_serve(arguments) == {}  # the default socket, and a budget of half the memory
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    expected = tmp_path / service["RuntimeDirectory"] / "coordinator.sock"
    assert default_socket_path() == str(expected)
    assert service["RuntimeDirectoryMode"] == "0700"
    assert service["RuntimeDirectoryPreserve"] == "restart"
    assert unit["Install"]["WantedBy"] == "default.target"


def test_the_group_of_the_documentation_ends_in_order():
    """Its end takes three times the grace, and a TERM that workers do not handle is no failure."""
    _, group = EXAMPLES
    service = read(group)["Service"]
    options = shlex.split(service["ExecStart"])
    grace_s = float(options[options.index("--grace") + 1])
    assert seconds(service["TimeoutStopSec"]) > 3 * grace_s
    assert int(service["SuccessExitStatus"]) == exit_code(-signal.SIGTERM)
    assert service["KillMode"] == "mixed"


@pytest.mark.process
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed here")
@pytest.mark.parametrize("what", ["the unit", "with the edit", "a group"])
def test_systemd_itself_takes_every_line(tmp_path, what):
    """What it does not know it only warns of, and then goes without."""
    edit, group = EXAMPLES
    text = {"the unit": UNIT.read_text(), "with the edit": UNIT.read_text() + edit}.get(what, group)
    for folder in (".local", "venv"):
        installed = tmp_path / folder / "bin" / "weight-cache"
        installed.parent.mkdir(parents=True)
        shutil.copy("/bin/true", installed)
    copy = tmp_path / "weight-cache.service"
    copy.write_text(text.replace("%h", str(tmp_path)))
    done = subprocess.run(
        ["systemd-analyze", "--user", "--man=no", "verify", str(copy)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    assert (done.returncode, [x for x in done.stderr.splitlines() if "weight-cache" in x]) == (
        0,
        [],
    )
