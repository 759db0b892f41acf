"""Where the output of the command line goes, and what happens if it goes nowhere."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess

import pytest

from tests.coordinator.command_line import command, environment, only_line, run
from tests.processes import ROOT, WAIT_S, Peer, fds_of, running

pytestmark = pytest.mark.process


NOWHERE = {"/dev/full": "No space left on device", "&-": "Bad file descriptor"}
"""Where output may be sent in vain, as a shell writes it, and what the kernel says then."""


def redirected(
    redirection: str, *arguments: str, **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end, its streams redirected by a shell."""
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *command(*arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        cwd=ROOT,
        env=environment(**changes),
    )


@pytest.mark.parametrize("place", NOWHERE)
@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("status", "--help"),
        ("--version",),
        ("status",),
        ("status", "--json"),
        ("pin", "k"),
    ],
    ids=" ".join,
)
def test_output_that_cannot_be_written_is_an_error_of_one_line(place, arguments, coordinator):
    done = redirected(f">{place}", *arguments, WEIGHT_CACHE_SOCKET=coordinator.socket)
    assert done.returncode == 1
    said = only_line(done.stderr)
    assert said == f"weight-cache: standard output cannot be written: {NOWHERE[place]}"


def test_output_larger_than_any_buffer_is_no_other_error(coordinator):
    """It fails in the middle of a print, and not in the flush at the end."""
    holder = Peer(coordinator.socket)
    for number in range(100):
        holder.ticket(f"key {number}")
    done = redirected(">/dev/full", "status", "--json", WEIGHT_CACHE_SOCKET=coordinator.socket)
    assert done.returncode == 1
    assert NOWHERE["/dev/full"] in only_line(done.stderr)


@pytest.mark.parametrize("place", NOWHERE)
def test_a_coordinator_that_cannot_say_it_is_ready_ends_and_leaves_nothing(place, path):
    done = redirected(f">{place}", "serve", "--socket", path)
    assert done.returncode == 1
    assert NOWHERE[place] in only_line(done.stderr)
    assert os.listdir(os.path.dirname(path)) == []


@pytest.mark.parametrize("arguments", [("--help",), ("status",), ("serve",)], ids=" ".join)
def test_output_into_a_closed_pipe_ends_without_a_word(arguments, tmp_path):
    """With the code by which a shell shows the end by SIGPIPE."""
    path = str(tmp_path / "s")
    with contextlib.ExitStack() as stack:
        if arguments == ("status",):
            stack.enter_context(running(path))
        read_end, write_end = os.pipe()
        os.close(read_end)
        done = subprocess.run(
            command(*arguments),
            check=False,
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            timeout=WAIT_S,
            cwd=ROOT,
            env=environment(WEIGHT_CACHE_SOCKET=path),
        )
        os.close(write_end)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("place", NOWHERE)
@pytest.mark.parametrize(
    ("arguments", "code"),
    [(("nonsense",), 2), (("evict", "gone"), 2), (("load", "k", "/gone"), 3), (("pin", "k"), 0)],
    ids=str,
)
def test_an_error_that_cannot_be_said_keeps_its_code(place, arguments, code, coordinator):
    """And is not said on standard output instead."""
    done = redirected(f"2>{place}", *arguments, WEIGHT_CACHE_SOCKET=coordinator.socket)
    assert (done.returncode, done.stderr) == (code, "")
    assert bool(done.stdout) == (code == 0)


def test_an_error_whose_reader_has_gone_keeps_its_code(coordinator):
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        command("evict", "gone", "--socket", coordinator.socket),
        check=False,
        stderr=write_end,
        timeout=WAIT_S,
        cwd=ROOT,
    )
    os.close(write_end)
    assert done.returncode == 2


def test_a_table_of_holders_that_cannot_be_shown_is_left_out(coordinator, weights):
    Peer(coordinator.socket).load("k", weights)
    done = redirected("2>&-", "evict", "k", WEIGHT_CACHE_SOCKET=coordinator.socket)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_a_command_ends_as_it_should_with_every_stream_closed(coordinator):
    closed = redirected("<&- >&- 2>&-", "pin", "k", WEIGHT_CACHE_SOCKET=coordinator.socket)
    assert closed.returncode == 1
    refused = redirected("<&- >&- 2>&-", "evict", "k", WEIGHT_CACHE_SOCKET=coordinator.socket)
    assert refused.returncode == 2


def test_nothing_of_a_coordinator_takes_the_number_of_a_closed_stream(path):
    """Or what is written to standard error by whatever library would go into its sockets."""
    process = subprocess.Popen(
        ["sh", "-c", 'exec "$@" <&- 2>&-', "sh", *command("serve", "--socket", path)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=environment(),
    )
    try:
        assert process.stdout is not None and process.stdout.readline()
        opened = fds_of(process.pid)
        assert opened["0"] == opened["2"] == os.devnull
    finally:
        process.terminate()
        process.communicate(timeout=WAIT_S)
    assert process.returncode == 0


def test_a_key_need_not_exist_in_the_terminals_encoding(coordinator):
    socket = {"WEIGHT_CACHE_SOCKET": coordinator.socket, "PYTHONIOENCODING": "ascii"}
    done = run("pin", "模型", **socket)
    assert done.returncode == 0
    assert done.stdout.startswith("pinned \\u6a21\\u578b (nothing")
