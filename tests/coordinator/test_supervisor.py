"""`weight-cache launch` with real processes: they start and end together, and leave nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.process_host import ending, exit_code
from shm_store.wire import Grant
from tests.coordinator.launched import HELLO, WAITS, split
from tests.processes import ROOT, WAIT_S, Peer, children_of, running, write_safetensors

pytestmark = pytest.mark.process


def test_workers_find_their_socket_rank_and_world_size(launch):
    launched = launch(
        "--workers",
        "3",
        "--ram-budget",
        "5MiB",
        worker="""
names = ("SOCKET", "RANK", "WORLD_SIZE")
import json; say(json.dumps([os.environ[f"WEIGHT_CACHE_{name}"] for name in names]))
from coordinator.operator import Operator
with Operator.connect(os.environ["WEIGHT_CACHE_SOCKET"], "test") as operator:
    assert operator.status().pools[0].limit_bytes == 5 << 20
""",
    )
    code, lines, err = launched.end()
    assert code == 0, err
    found = [json.loads(line) for line in lines]
    assert sorted(rank for _, rank, _ in found) == ["0", "1", "2"]
    assert {size for _, _, size in found} == {"3"}
    (socket,) = {socket for socket, _, _ in found}
    assert os.path.isabs(socket)
    assert f"weight-cache: ready on {socket} (ram budget 5.0 MiB)" in err


def test_workers_get_their_device_in_turn_and_no_variable_of_another_launcher(launch, monkeypatch):
    """Libraries take RANK and its like for a torch.distributed job, and would wait for peers."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "mine")
    monkeypatch.setenv("WEIGHT_CACHE_DEVICE", "mine too")
    look = """
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "WEIGHT_CACHE_DEVICE")
say(os.environ["WEIGHT_CACHE_RANK"], *(os.environ.get(name) for name in names))
"""
    launched = launch("--workers", "3", "--devices", "cuda:0,cuda:1", worker=look)
    code, lines, _ = launched.end()
    assert code == 0
    assert sorted(lines) == [
        "0 None None None mine cuda:0",
        "1 None None None mine cuda:1",
        "2 None None None mine cuda:0",
    ]
    assert launch(worker=look).end()[1] == ["0 None None None mine mine too"]


def test_the_private_socket_is_for_this_user_alone_and_groups_do_not_meet(launch):
    one = launch(worker=f"{HELLO}; {WAITS}")
    one.up(1)
    folder = os.path.dirname(one.socket())
    assert os.stat(folder).st_mode & 0o777 == 0o700
    other = launch(worker=f"{HELLO}; {WAITS}")
    other.up(1)
    assert one.socket() != other.socket()
    assert one.coordinator != other.coordinator
    for launched in (one, other):
        launched.send(signal.SIGTERM)
    for launched in (one, other):
        assert launched.process.wait(WAIT_S) == 143
    one.end(), other.end()


def test_the_first_failure_ends_the_others_and_gives_the_exit_code(launch):
    launched = launch(
        "--workers",
        "3",
        worker=f"""
def leave(*_):
    say("told")
    sys.exit(9)
signal.signal(signal.SIGTERM, leave)
if os.environ["WEIGHT_CACHE_RANK"] == "1":
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3))
else:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
{HELLO}
while True:
    hear()
""",
    )
    workers = launched.up(3)
    launched.send(signal.SIGUSR1)
    code, lines, err = launched.end()
    assert (code, lines) == (3, ["told", "told"])
    assert f"worker 1 (pid {workers[1]}) ended (exit code 3), so the group ends" in err


def test_exit_codes_are_known_although_a_parent_ignored_its_children(launch):
    """Whoever ignores CHLD hands that on, and the kernel then forgets how children end."""
    launched = launch(worker="sys.exit(3)", ignored=int(signal.SIGCHLD))
    assert launched.end()[0] == 3


def test_every_end_can_be_put_into_words():
    assert ending(3) == "exit code 3"
    assert ending(-signal.SIGKILL) == "by SIGKILL"
    assert ending(-40) == "by signal 40"  # a real-time signal: no name
    assert [exit_code(0), exit_code(3), exit_code(-9)] == [0, 3, 137]


def test_a_worker_does_not_wait_for_the_terminal(tmp_path):
    """In a process group of its own it could not read it; it finds the end of file at once."""
    terminal, stdin = os.openpty()
    done = run_launch(tmp_path, sys.executable, "-c", "import sys; sys.stdin.read()", stdin=stdin)
    os.close(terminal)
    os.close(stdin)
    assert done.returncode == 0


def test_a_death_by_signal_gives_128_and_the_signal(launch):
    launched = launch("--workers", "2", worker=f"{HELLO}; {WAITS}")
    workers = launched.up(2)
    os.kill(workers[0], signal.SIGKILL)
    code, _, err = launched.end()
    assert code == 128 + signal.SIGKILL
    assert f"worker 0 (pid {workers[0]}) ended (by SIGKILL), so the group ends" in err


def test_a_worker_that_does_not_end_is_killed_after_the_grace(launch):
    launched = launch(
        "--workers",
        "2",
        "--grace",
        "0.3",
        worker=f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(4))
{HELLO}
while True:
    hear()
""",
    )
    workers = launched.up(2)
    os.kill(workers[0], signal.SIGUSR1)
    code, _, err = launched.end()
    assert code == 4
    assert f"not ended within 0.3 s, so killed: worker 1 (pid {workers[1]})\n" in err


def test_a_worker_that_was_killed_after_the_grace_gives_137(launch):
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    launched = launch("--grace", "0.3", worker=f"{stubborn}; {HELLO}; {WAITS}")
    launched.up(1)
    launched.send(signal.SIGTERM)
    assert launched.end()[0] == 128 + signal.SIGKILL


@pytest.mark.parametrize("asked", [True, False], ids=["asked to end", "by itself"])
def test_what_a_worker_started_ends_with_it(launch, asked):
    """As `sh -c "python app.py; true"` does: TERM to the shell alone leaves Python behind."""
    launched = launch(
        "--grace",
        "2",
        worker=f"""
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print("started", child.pid, flush=True)
{WAITS if asked else "sys.exit(0)"}
""",
    )
    launched.family.add(int(launched.line().split()[1]))
    if asked:
        launched.send(signal.SIGTERM)
    assert launched.end()[0] == (128 + signal.SIGTERM if asked else 0)


def test_signals_reach_every_worker_and_a_graceful_end_is_a_success(launch):
    launched = launch(
        "--workers",
        "2",
        worker=f"""
def tell(number, _):
    say("got", signal.Signals(number).name)
for name in ("HUP", "QUIT", "USR1", "USR2", "INT"):
    signal.signal(getattr(signal, "SIG" + name), tell)
def leave(*_):
    say("got SIGTERM")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
{HELLO}
while True:
    hear()
""",
    )
    launched.up(2)
    for name in ("SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
        launched.send(getattr(signal, name))
        assert [launched.line(), launched.line()] == [f"got {name}"] * 2
    launched.send(signal.SIGTERM)
    code, lines, err = launched.end()
    assert (code, lines) == (0, ["got SIGTERM"] * 2)
    _, *rest = err.splitlines()  # the first: that it is ready
    assert rest == ["weight-cache: TERM: the group ends"]


def test_an_interrupt_ends_the_group_once(launch):
    """Workers hear INT once, also from a terminal: they are in process groups of their own."""
    launched = launch(
        "--workers",
        "2",
        worker=f"""
assert os.getpgid(0) == os.getpid()
try:
    {HELLO}
    hear()
except KeyboardInterrupt:
    sys.exit(130)
""",
    )
    launched.up(2)
    launched.send(signal.SIGINT)
    code, _, err = launched.end()
    assert code == 130
    assert "weight-cache: INT: the group ends\n" in err


def test_a_second_request_to_end_kills(launch):
    launched = launch(
        "--workers",
        "2",
        worker=f"""
def tell(*_):
    say("still here")
signal.signal(signal.SIGTERM, tell)
{HELLO}
while True:
    hear()
""",
    )
    launched.up(2)
    launched.send(signal.SIGTERM)
    assert [launched.line(), launched.line()] == ["still here"] * 2
    launched.send(signal.SIGTERM)
    code, lines, err = launched.end()
    assert (code, lines) == (128 + signal.SIGTERM, [])
    assert err.endswith(
        "TERM: the group ends\nweight-cache: TERM again: what is waited for is killed\n"
    )


def test_what_was_ignored_stays_ignored(launch):
    """As under nohup: HUP ends neither the group nor a worker."""
    launched = launch(worker=f"{HELLO}; {WAITS}", ignored=int(signal.SIGHUP))
    (pid,) = launched.up(1).values()
    launched.send(signal.SIGHUP)
    os.kill(pid, signal.SIGHUP)
    launched.send(signal.SIGTERM)
    assert launched.end()[0] == 128 + signal.SIGTERM


def test_a_lost_coordinator_that_is_not_to_be_restarted_ends_the_workers(launch):
    launched = launch(
        "--workers", "2", "--restart-coordinator", "never", worker=f"{HELLO}; {WAITS}"
    )
    launched.up(2)
    os.kill(launched.coordinator, signal.SIGKILL)
    code, _, err = launched.end()
    assert code == 128 + signal.SIGKILL
    assert "the coordinator ended (by SIGKILL), so its workers end too" in err


def test_a_coordinator_that_cannot_start_starts_no_worker(launch, tmp_path):
    with running(str(tmp_path / "c.sock"), "--ram-budget", "1MiB") as other:
        launched = launch("--socket", other.socket, worker=HELLO)
        code, lines, err = launched.end()
        assert (code, lines) == (6, [])
        assert "already serves" in err
        assert Peer(other.socket).status().pools[0].limit_bytes == 1 << 20


def test_a_given_socket_is_used_and_gone_at_the_end(launch, tmp_path):
    path = tmp_path / "c.sock"
    launched = launch("--socket", str(path), worker="print(os.environ['WEIGHT_CACHE_SOCKET'])")
    assert launched.end()[:2] == (0, [str(path)])
    assert not path.exists()


def run_launch(
    folder: Path, *command: str, stdin: int = subprocess.DEVNULL
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "coordinator", "launch", "--workers", "2", *command],
        check=False,
        stdin=stdin,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder), "XDG_RUNTIME_DIR": str(folder / "gone")},
    )
    assert "Traceback" not in done.stderr
    assert list(folder.glob("weight-cache-*")) == []
    return done


def test_a_command_that_cannot_be_started_is_the_callers_fault(tmp_path):
    """Found, executable, and still nothing the kernel can run; and one that is not there at all."""
    broken = tmp_path / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    done = run_launch(tmp_path, str(broken))
    assert done.returncode == 2 and "cannot be started: No such file" in done.stderr
    done = run_launch(tmp_path, "no-such-command")
    assert (done.returncode, done.stderr) == (
        2,
        "weight-cache: 'no-such-command' is no command that can be run: it is not found on PATH "
        "(see `echo $PATH`, or give its path)\n",
    )


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("README.md", "it is not found on PATH (for the file in this folder write ./README.md)"),
        ("./README.md", "it is not executable (`chmod +x` it, or name what runs it first"),
        ("./none", "it is not found (paths that are relative begin in the current folder)"),
        ("/no/such/command", "it is not found (see whether the path is right)"),
        ("./tests", "it is a folder (give the path of a program in it)"),
    ],
)
def test_why_it_is_no_command_is_said_and_what_to_do(tmp_path, name, why):
    done = run_launch(tmp_path, name)
    assert done.returncode == 2
    assert f"{name!r} is no command that can be run: {why}" in done.stderr


NO_COMMANDS = {
    "a folder": (lambda path: path.mkdir(), "is no command that can be run: it is a folder"),
    "not executable": (
        lambda path: path.write_text("#!/bin/sh\n"),
        "is no command that can be run: it is not executable",
    ),
    "not there": (lambda path: None, "is no command that can be run: it is not found"),
    "no program": (lambda path: path.write_text("no program"), "cannot be started: Exec format"),
    "an interpreter that is a folder": (
        lambda path: path.write_text("#!/tmp\n"),
        "cannot be started: Permission denied",
    ),
}


@pytest.mark.parametrize("what", NO_COMMANDS)
def test_what_is_no_command_starts_no_worker(tmp_path, what):
    """Whether it is seen before anything is started, or by the kernel: named, and 2."""
    path = tmp_path / "command"
    make, why = NO_COMMANDS[what]
    make(path)
    if "started" in why:
        path.chmod(0o755)
    done = run_launch(tmp_path, str(path))
    assert done.returncode == 2 and f"{str(path)!r} {why}" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("marker", [[], ["--"]], ids=["plain", "marked"])
def test_the_workers_options_are_the_workers(tmp_path, marker):
    done = run_launch(tmp_path, *marker, "echo", "--workers", "9", "--help")
    assert done.returncode == 0
    assert sorted(map(split, done.stdout.splitlines())) == [
        ("worker 0", "--workers 9 --help"),
        ("worker 1", "--workers 9 --help"),
    ]


def test_an_interrupt_while_the_coordinator_starts_ends_it(launch):
    """INT before the coordinator is ready: nothing fails, nothing is left."""
    launched = launch(worker=HELLO)
    while not (children := children_of(launched.process.pid)):
        assert launched.process.poll() is None
    launched.family |= set(children)
    launched.send(signal.SIGINT)
    code, _, err = launched.end()
    assert code == 130
    assert "worker" not in err


def test_what_an_outsider_holds_delays_the_end_by_the_grace_and_is_named(launch, tmp_path):
    """Something is left that is not the group's to end, so the exit code is not 0."""
    weights = write_safetensors(tmp_path / "w", {"w": ("U8", [5000], bytes(5000))})
    leaves = "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))"
    launched = launch("--grace", "0.3", worker=f"{leaves}; {HELLO}; {WAITS}")
    launched.up(1)
    outsider = Peer(launched.socket())
    assert isinstance(outsider.load("mine", weights), Grant)
    os.close(*outsider.fds)
    launched.send(signal.SIGUSR1)
    code, _, err = launched.end()
    assert code == 4
    assert re.search(r"1 generation is still held", err)
    assert f"pid {os.getpid()} (" in err


def test_the_code_of_a_worker_counts_before_that_of_what_is_still_held(launch, tmp_path):
    """Which is named all the same."""
    weights = write_safetensors(tmp_path / "w", {"w": ("U8", [5000], bytes(5000))})
    launched = launch("--grace", "0.3", worker=f"{HELLO}; {WAITS}")
    launched.up(1)
    outsider = Peer(launched.socket())
    assert isinstance(outsider.load("mine", weights), Grant)
    os.close(*outsider.fds)
    launched.send(signal.SIGTERM)
    code, _, err = launched.end()
    assert code == 128 + signal.SIGTERM
    assert "1 generation is still held" in err
