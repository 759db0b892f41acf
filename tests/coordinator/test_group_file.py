"""The file of a group: one group for a socket, and what it says is true or nothing."""

from __future__ import annotations

import fcntl
import json
import os
import signal

import pytest

from coordinator.group_file import (
    GroupFile,
    GroupReport,
    MemberReport,
    group_lines,
    group_path,
    read_group,
)
from shm_store.errors import ArgumentRefused, CoordinatorRunning
from tests.coordinator.command_line import run
from tests.coordinator.launched import HELLO, WAITS

GROUP = GroupReport(
    7,
    False,
    (
        MemberReport("coordinator", "running", 8, 1, "by SIGKILL"),
        MemberReport("worker 0", "running", 9, 0),
        MemberReport("worker 1", "restarting", None, 2, "exit code 3"),
    ),
)


def test_what_is_written_is_read_while_it_is_held(path):
    assert read_group(path) is None
    with GroupFile(path) as file:
        assert read_group(path) is None  # it has not said anything yet
        file.write(GROUP)
        assert read_group(path) == GROUP
        shorter = GroupReport(7, True, ())
        file.write(shorter)
        assert read_group(path) == shorter
    assert read_group(path) is None
    assert not os.path.exists(group_path(path))


def test_what_is_read_while_it_is_written_is_one_or_the_other(path):
    other = GroupReport(1234567, True, (MemberReport("worker 0", "ended", None, 9, "by SIGTERM"),))
    with GroupFile(path) as file:
        file.write(GROUP)
        writer = os.fork()
        if not writer:
            while True:
                file.write(other)
                file.write(GROUP)
        try:
            found = [read_group(path) for _ in range(20_000)]
        finally:
            os.kill(writer, signal.SIGKILL)
            os.waitpid(writer, 0)
    assert all(one in (GROUP, other) for one in found)
    assert GROUP in found and other in found


def test_there_is_one_group_for_a_socket(path):
    with GroupFile(path) as file:
        with pytest.raises(CoordinatorRunning, match=f"another `weight-cache launch` has {path}"):
            GroupFile(path)
        file.write(GROUP)
        with pytest.raises(CoordinatorRunning, match=r"launch` \(pid 7\) has"):
            GroupFile(path)
        assert read_group(path) == GROUP


def test_a_file_that_was_left_behind_means_nothing_and_is_used_again(path):
    file = GroupFile(path)
    file.write(GROUP)
    os.close(file._fd)  # as a SIGKILL does
    assert os.path.exists(group_path(path))
    assert read_group(path) is None
    with GroupFile(path):
        assert read_group(path) is None, "what the next group has not said yet, it has not said"
    assert not os.path.exists(group_path(path))


def test_a_file_of_somebody_else_is_left_alone(path):
    """Whoever cleans up may have removed ours, and another group made its own."""
    file = GroupFile(path)
    os.unlink(group_path(path))
    with GroupFile(path) as other:
        other.write(GROUP)
        file.close()
        assert read_group(path) == GROUP


def test_a_file_removed_between_open_and_lock_is_not_taken(path, monkeypatch):
    lock = fcntl.fcntl
    times: list[int] = []

    def locked_late(fd, command, *rest):
        if command == fcntl.F_OFD_SETLK and not times:
            times.append(fd)
            os.unlink(group_path(path))
        return lock(fd, command, *rest)

    monkeypatch.setattr("coordinator.group_file.fcntl.fcntl", locked_late)
    with GroupFile(path) as file:
        file.write(GROUP)
        assert read_group(path) == GROUP


@pytest.mark.parametrize("text", [b"", b"{", b"[]\n", b"\xff\n", b'{"pid": "x"}\n'])
def test_a_file_of_garbage_says_nothing(path, text):
    with GroupFile(path) as file:
        os.pwrite(file._fd, text, 0)
        assert read_group(path) is None


def test_a_folder_that_is_not_there_is_the_callers_fault(tmp_path):
    with pytest.raises(ArgumentRefused, match="cannot be opened: No such file"):
        GroupFile(str(tmp_path / "no" / "c.sock"))


def test_people_read_who_runs_and_who_failed():
    assert group_lines(GROUP) == [
        "group of `weight-cache launch` (pid 7): running",
        "  coordinator: running, pid 8, restarted 1 time, last ended by SIGKILL",
        "  worker 0: running, pid 9",
        "  worker 1: restarting, restarted 2 times, last ended exit code 3",
    ]


def test_who_finds_no_coordinator_hears_that_it_comes_back(path, run_here):
    with GroupFile(path) as file:
        file.write(GROUP)
        code, _, err = run_here("status", socket=path)
        assert code == 6 and "`weight-cache launch` (pid 7) starts it again: try again" in err
        file.write(GroupReport(7, True, ()))
        code, _, err = run_here("status", socket=path)
        assert code == 6 and "try again" not in err


@pytest.mark.process
def test_status_shows_the_group(launch):
    launched = launch("--workers", "2", worker=f"{HELLO}; {WAITS}")
    workers = launched.up(2)
    lines = run("status", "--socket", launched.socket()).stdout.splitlines()
    assert lines[-4:] == [
        f"group of `weight-cache launch` (pid {launched.process.pid}): running",
        f"  coordinator: running, pid {launched.coordinator}",
        f"  worker 0: running, pid {workers[0]}",
        f"  worker 1: running, pid {workers[1]}",
    ]
    shown = json.loads(run("status", "--json", "--socket", launched.socket()).stdout)["group"]
    assert shown["pid"] == launched.process.pid and not shown["ending"]
    assert shown["members"][2] == {
        "name": "worker 1",
        "state": "running",
        "pid": workers[1],
        "restarts": 0,
        "last_end": "",
    }
    launched.send(signal.SIGTERM)
    launched.end()
