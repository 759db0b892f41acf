"""What starts a coordinator in the background, by its parts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from coordinator import detached
from coordinator.group_file import GroupFile, GroupReport
from coordinator.serve import take_lock
from shm_store.errors import ArgumentRefused, StartFailed
from tests.processes import ROOT, WAIT_S


@pytest.fixture
def start(monkeypatch, tmp_path, path):
    """Wants a coordinator at once, and would not know what to do with a chance to start one."""
    monkeypatch.setattr(detached, "START_LIMIT_S", 0.0)

    def run(*_: object) -> None:
        raise AssertionError("it was started")

    monkeypatch.setattr(detached, "_run", run)
    return lambda: detached.start(path, str(tmp_path / "log"), 1.0, apart=True)


def test_a_lock_that_another_has_is_waited_for_and_then_named(start, path):
    lock = take_lock(path)
    with pytest.raises(StartFailed, match=r"another process has .* but nobody answers"):
        start()
    os.close(lock)
    with pytest.raises(AssertionError, match="it was started"):
        start()


def test_the_socket_of_a_group_is_left_to_it(start, path):
    """Its coordinator is started again; another on the socket would be in its way."""
    with GroupFile(path) as group:
        group.write(GroupReport(77, False, ()))
        with pytest.raises(StartFailed, match=r"`launch` \(pid 77\) has .* but nobody answers"):
            start()
        assert not os.path.exists(f"{path}.lock")
    with pytest.raises(AssertionError, match="it was started"):
        start()


def test_a_socket_that_may_not_be_made_is_refused(start, path):
    with open(f"{path}.lock", "w") as other:
        other.write("no lock")
    with pytest.raises(ArgumentRefused, match="is no lock"):
        start()


def test_a_folder_or_a_log_that_cannot_be_made_is_named(monkeypatch, path):
    with pytest.raises(StartFailed, match="/proc/none cannot be made"):
        detached.start("/proc/none/s", "/proc/none/log", 1.0, apart=True)
    lock = take_lock(path)
    with pytest.raises(StartFailed, match="its log /proc/none/log cannot be opened"):
        detached._run(path, lock, "/proc/none/log", 1.0, apart=True)
    os.close(lock)


PLAYED = """
import os, signal, sys, time
import coordinator.serve
from coordinator import detached
detached.START_LIMIT_S = float(sys.argv[3])

def serve(config, lock, ready):
    {serve}

coordinator.serve.serve = serve
sys.exit(detached.main([*sys.argv[1:3], "9", "within"]))
"""


@pytest.fixture
def played(tmp_path, path):
    """Start a coordinator that does as the test says; return the exit code and what was said."""

    def run(serve: str, limit_s: float = WAIT_S) -> tuple[int, str]:
        code = PLAYED.format(serve=serve)
        done = subprocess.run(
            [sys.executable, "-c", code, path, str(tmp_path / "log"), str(limit_s)],
            check=False,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            timeout=WAIT_S,
        )
        return done.returncode, done.stderr

    return run


@pytest.mark.process
class TestEnds:
    def test_one_that_says_nothing_is_told_of_by_its_end(self, played, tmp_path):
        """And not by what one before it had to say."""
        (tmp_path / "log").write_text("weight-cache: something else\n")
        code, said = played("os.kill(os.getpid(), signal.SIGKILL)")
        assert (code, said) == (6, "weight-cache: it ended (by SIGKILL)\n")

    def test_the_last_line_of_its_log_is_the_reason(self, played):
        code, said = played("os.write(2, b'one\\ntwo\\n')")
        assert (code, said) == (6, "weight-cache: two\n")

    def test_one_that_is_not_ready_in_time_is_ended(self, played, tmp_path):
        pid = tmp_path / "pid"
        code, said = played(
            f"open({str(pid)!r}, 'w').write(str(os.getpid())); signal.pause()", limit_s=2.0
        )
        assert (code, said) == (6, "weight-cache: it was not ready within 2 s\n")
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)

    def test_one_whose_starters_were_all_killed_goes_on(self, played, tmp_path):
        went_on = tmp_path / "went on"
        os.mkfifo(went_on)
        code, _ = played(
            "starter = os.getppid(); os.kill(starter, signal.SIGKILL)\n"
            "    while os.getppid() == starter: pass\n"
            f"    ready(); open({str(went_on)!r}, 'w').write(str(lock))"
        )
        assert code == -9
        assert int(went_on.read_text()) > 2


@pytest.mark.process
def test_the_log_is_bounded_and_has_all_of_standard_error(tmp_path):
    """Also what a child writes, after it began anew."""
    log = tmp_path / "log"
    code = """
import logging, os, sys
from coordinator import detached
detached.LOG_LIMIT_BYTES = 1000
handler = detached._open_log(sys.argv[1])
handler.follow()
logging.basicConfig(handlers=[handler])
for number in range(200):
    logging.warning("line %d", number)
    os.system(f"echo child {number} >&2")
"""
    subprocess.run([sys.executable, "-c", code, str(log)], check=True, cwd=ROOT, timeout=WAIT_S)
    assert sorted(os.listdir(tmp_path)) == ["log", "log.1"]
    kept = [(tmp_path / name).read_text() for name in ("log.1", "log")]
    assert all(len(text) < 1100 for text in kept)
    lines = "".join(kept).splitlines()
    assert lines[-2:] == ["WARNING:root:line 199", "child 199"]
    first = int(lines[0].split()[-1])
    assert first < 190
    said = [line.split()[-1] for line in lines if line.startswith("child")]
    assert said == [str(number) for number in range(200 - len(said), 200)]
