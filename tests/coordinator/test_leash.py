"""The leash: what a child of the supervisor finds at its start, and that it can be refused."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys

import pytest

from coordinator.process_host import Child, Leash
from tests.coordinator.test_fd_store import is_open
from tests.processes import ROOT

pytestmark = pytest.mark.process

LOOK = """
import ctypes, json, os, resource, signal, sys
number = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # PR_GET_PDEATHSIG
fds = {}
for name in os.listdir("/proc/self/fd"):
    try:
        fds[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:
        pass  # that of the listing
ignored = [line for line in open("/proc/self/status") if line.startswith("SigIgn")][0].split()[1]
print(json.dumps({
    "number": number.value,
    "fds": {fd: target for fd, target in fds.items() if fd > 2},
    "for": os.environ.get("LISTEN_PID") == str(os.getpid()),
    "pid": os.getpid(),
    "argv": sys.argv[1:],
    "limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    "ignored": int(ignored, 16),
}))
"""


def run(leash: Leash, *command: str) -> tuple[Child, dict]:
    child = Child(command, stdout=subprocess.PIPE, leash=leash, env=dict(os.environ))
    assert child.process.stdout is not None
    text = child.process.stdout.read()
    child.process.stdout.close()
    child.reap()
    return child, json.loads(text) if text else {}


@pytest.mark.parametrize("count", [0, 1, 2, 30])
def test_fds_are_found_from_3_on_in_order_and_nothing_else_is(count):
    """Whatever numbers they have here: backwards, so that many want another's place."""
    fds = [os.memfd_create(f"n{number}") for number in range(count)][::-1]
    wanted = [f"/memfd:n{number} (deleted)" for number in reversed(range(count))]
    _, found = run(Leash(signal.SIGTERM, tuple(fds)), sys.executable, "-c", LOOK)
    assert found["fds"] == {str(fd): name for fd, name in enumerate(wanted, 3)}
    assert found["for"] == bool(count)
    assert all(map(is_open, fds))
    for fd in fds:
        os.close(fd)


def test_the_command_is_what_it_would_be_without():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    child, found = run(Leash(signal.SIGKILL, (), 77), sys.executable, "-c", LOOK, "a b", "")
    assert found["pid"] == child.process.pid
    assert found["argv"] == ["a b", ""]
    assert (found["number"], found["limit"]) == (signal.SIGKILL, 77)
    plain = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, check=True, cwd=ROOT
    ).stdout
    assert found["ignored"] == json.loads(plain)["ignored"]
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)


def test_a_shell_finds_no_signal_ignored():
    """Python ignores some for itself, and whoever it starts would inherit that."""
    child = Child(
        ["sh", "-c", "grep SigIgn /proc/$$/status"],
        stdout=subprocess.PIPE,
        leash=Leash(signal.SIGKILL),
    )
    text = child.process.stdout.read().decode()
    child.process.stdout.close()
    assert child.reap() == 0
    ignored = int(text.split()[1], 16)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        assert not ignored & 1 << (number - 1)


def test_a_command_that_cannot_be_run_is_known_when_it_is_reaped(tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("no script\n")
    for command, number in (("/no/such", errno.ENOENT), (str(tmp_path), errno.EACCES)):
        child, _ = run(Leash(signal.SIGKILL), command)
        assert child.never_ran is not None and child.never_ran.errno == number
    broken.chmod(0o755)
    child, _ = run(Leash(signal.SIGKILL), str(broken))
    assert child.never_ran is not None and child.never_ran.errno == errno.ENOEXEC


def test_why_a_command_cannot_be_run_is_written_into_no_fd_of_its_own():
    """The pipe for it may have been at a number that is wanted for one of these."""
    fds = [os.memfd_create("x") for _ in range(30)]
    child, _ = run(Leash(signal.SIGKILL, tuple(fds)), "/no/such")
    assert child.never_ran is not None and child.never_ran.errno == errno.ENOENT
    assert [os.fstat(fd).st_size for fd in fds] == [0] * 30
    for fd in fds:
        os.close(fd)


def test_an_end_with_127_is_no_refusal():
    child, _ = run(Leash(signal.SIGKILL), "sh", "-c", "exit 127")
    assert child.never_ran is None


def test_nothing_stays_open_here():
    before = len(os.listdir("/proc/self/fd"))
    run(Leash(signal.SIGKILL), "true")
    run(Leash(signal.SIGKILL), "/no/such")
    assert len(os.listdir("/proc/self/fd")) == before


def test_who_comes_after_its_parent_does_not_start():
    """The kernel sends nothing for a parent that had ended before it was asked to."""
    ours, theirs = os.pipe()
    command = Leash(signal.SIGKILL).command(["echo", "started"], theirs)
    command[command.index(str(os.getpid()))] = "1"  # not its parent any more
    done = subprocess.run(command, capture_output=True, check=False, pass_fds=(theirs,))
    os.close(ours)
    os.close(theirs)
    assert (done.returncode, done.stdout) == (1, b"")
