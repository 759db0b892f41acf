"""Processes of a group that die: who is started again, how often, and what the others notice."""

from __future__ import annotations

import os
import signal

import pytest

from coordinator.operator import Operator
from shm_store.wire import Grant
from tests.coordinator.launched import HELLO, WAITS
from tests.processes import Peer, running, write_safetensors

pytestmark = pytest.mark.process

ENDS = "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))"
FAILS = "signal.signal(signal.SIGUSR2, lambda *_: sys.exit(3))"


def ready_again(launched) -> None:
    launched.said("it is started again")
    launched.said("ready on")


def test_a_lost_coordinator_is_started_again_while_the_workers_go_on(launch):
    launched = launch("--workers", "2", "--ram-budget", "5MiB", worker=f"{ENDS}; {HELLO}; {WAITS}")
    workers = launched.up(2)
    first = launched.coordinator
    os.kill(first, signal.SIGKILL)
    line = launched.said("the coordinator ended (by SIGKILL)")
    assert "it is started again in 0.5 s, and the workers go on" in line
    launched.said("ready on")
    assert launched.coordinator != first
    with Operator.connect(launched.socket(), "test") as operator:
        assert operator.status().pools[0].limit_bytes == 5 << 20
    group = launched.group
    assert {member.name: member.pid for member in group.members[1:]} == {
        "worker 0": workers[0],
        "worker 1": workers[1],
    }
    assert (group.members[0].restarts, group.members[0].last_end) == (1, "by SIGKILL")
    launched.send(signal.SIGUSR1)
    assert launched.end()[:2] == (0, [])


def test_the_default_budget_is_the_same_for_every_coordinator(launch):
    """What is kept meanwhile would count as used, and the next one would get less."""
    launched = launch(worker=f"{ENDS}; {HELLO}; {WAITS}")
    launched.up(1)
    with Operator.connect(launched.socket(), "test") as operator:
        limit_bytes = operator.status().pools[0].limit_bytes
    os.kill(launched.coordinator, signal.SIGKILL)
    ready_again(launched)
    with Operator.connect(launched.socket(), "test") as operator:
        assert operator.status().pools[0].limit_bytes == limit_bytes
    launched.send(signal.SIGUSR1)
    assert launched.end()[0] == 0


def test_a_worker_that_fails_is_started_again_with_its_rank(launch):
    launched = launch(
        "--workers", "2", "--restart-workers", "on-failure", worker=f"{ENDS}; {HELLO}; {WAITS}"
    )
    workers = launched.up(2)
    os.kill(workers[1], signal.SIGKILL)
    line = launched.said("worker 1")
    assert f"worker 1 (pid {workers[1]}) ended (by SIGKILL); it is started again in 0.5 s" in line
    (again,) = launched.up(1).items()
    assert again[0] == 1 and again[1] != workers[1]
    group = launched.group
    assert [member.restarts for member in group.members] == [0, 0, 1]
    assert group.members[2].last_end == "by SIGKILL"
    launched.send(signal.SIGUSR1)
    assert launched.end()[0] == 0


def test_a_worker_that_is_done_is_not_started_again(launch):
    launched = launch(
        "--workers", "2", "--restart-workers", "on-failure", worker=f"{ENDS}; {HELLO}; {WAITS}"
    )
    workers = launched.up(2)
    os.kill(workers[0], signal.SIGUSR1)
    os.kill(workers[1], signal.SIGKILL)
    launched.up(1)
    assert [member.state for member in launched.group.members] == ["running", "finished", "running"]
    launched.send(signal.SIGUSR1)
    code, lines, _ = launched.end()
    assert (code, lines) == (0, [])


@pytest.mark.parametrize("role", ["worker", "coordinator"])
def test_a_crash_loop_ends_the_group_with_its_exit_code(launch, role):
    options = ("--restart-workers", "on-failure", "--max-restarts", "1")
    if role == "worker":  # exits at once, every time
        launched = launch(*options, worker="sys.exit(3)")
        expected = 3
    else:
        launched = launch(*options, worker=f"{ENDS}; {HELLO}; {WAITS}")
        launched.up(1)
        os.kill(launched.coordinator, signal.SIGKILL)
        ready_again(launched)
        os.kill(launched.coordinator, signal.SIGKILL)
        expected = 128 + signal.SIGKILL
    code, lines, err = launched.end()
    assert (code, lines) == (expected, [])
    assert "it was restarted 1 time in 10 minutes" in err


def test_a_worker_that_fails_while_there_is_no_coordinator_waits_for_one(launch):
    """Its first call would fail otherwise. It waits half a second, this coordinator a whole one."""
    launched = launch(
        "--restart-workers",
        "on-failure",
        worker=f"""
from coordinator.operator import Operator
Operator.connect(os.environ["WEIGHT_CACHE_SOCKET"], "test").close()
{ENDS}; {HELLO}; {WAITS}""",
    )
    worker = launched.up(1)[0]
    os.kill(launched.coordinator, signal.SIGKILL)
    ready_again(launched)
    os.kill(launched.coordinator, signal.SIGKILL)
    assert "started again in 1 s" in launched.said("it is started again")
    os.kill(worker, signal.SIGKILL)
    launched.up(1)
    assert [member.restarts for member in launched.group.members] == [2, 1]
    launched.send(signal.SIGUSR1)
    assert launched.end()[0] == 0


def test_an_end_does_not_wait_for_restarts_and_starts_nobody(launch):
    launched = launch(
        "--workers",
        "2",
        "--restart-workers",
        "on-failure",
        worker=f"""
import time
def leave(*_):
    time.sleep(0.8)  # longer than the other one would wait to be started again
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
{HELLO}
{WAITS}
""",
    )
    workers = launched.up(2)
    os.kill(workers[0], signal.SIGKILL)
    launched.said("it is started again")
    launched.send(signal.SIGTERM)
    assert launched.end()[:2] == (0, [])


def test_workers_that_end_are_asked_once_whatever_else_fails(launch):
    launched = launch(
        "--restart-coordinator",
        "never",
        worker=f"""
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: say(signal.Signals(number).name))
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(0))
{HELLO}
while True:
    hear()
""",
    )
    worker = launched.up(1)[0]
    launched.send(signal.SIGTERM)
    assert launched.line() == "SIGTERM"
    os.kill(launched.coordinator, signal.SIGKILL)
    launched.said("so its workers end too")
    for _ in range(2):  # a second TERM would be heard by the second of these
        os.kill(worker, signal.SIGUSR1)
        assert launched.line() == "SIGUSR1"
    os.kill(worker, signal.SIGUSR2)
    assert launched.end()[:2] == (128 + signal.SIGKILL, [])


def test_a_coordinator_lost_while_workers_end_comes_back_for_them(launch):
    """They may need it to finish. Then it is drained as always."""
    launched = launch(
        worker=f"""
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
signal.signal(signal.SIGTERM, lambda *_: say("ending"))
{HELLO}
while True:
    hear()
"""
    )
    worker = launched.up(1)[0]
    launched.send(signal.SIGTERM)
    assert launched.line() == "ending"
    assert launched.group.ending
    os.kill(launched.coordinator, signal.SIGKILL)
    ready_again(launched)
    os.kill(worker, signal.SIGUSR1)
    assert launched.end()[:2] == (0, [])


def test_a_coordinator_that_was_ended_by_somebody_is_not_started_again(launch):
    """By `weight-cache drain`, or a TERM: that was meant."""
    launched = launch(worker=f"{HELLO}; {WAITS}")
    launched.up(1)
    os.kill(launched.coordinator, signal.SIGTERM)
    code, _, err = launched.end()
    assert code == 6
    assert "the coordinator was ended (exit code 0), so its workers end too" in err


def test_a_coordinator_lost_in_its_last_drain_is_not_started_again(launch, tmp_path):
    weights = write_safetensors(tmp_path / "w", {"w": ("U8", [5000], bytes(5000))})
    launched = launch(worker=f"{ENDS}; {HELLO}; {WAITS}")
    launched.up(1)
    outsider = Peer(launched.socket())
    assert isinstance(outsider.load("mine", weights), Grant)
    os.close(*outsider.fds)
    coordinator = launched.coordinator
    launched.send(signal.SIGUSR1)
    while not launched.group.ending:
        pass  # until the drain waits for the outsider
    os.kill(coordinator, signal.SIGKILL)
    code, _, err = launched.end()
    assert code == 128 + signal.SIGKILL
    assert "the coordinator ended (by SIGKILL) before it was drained" in err


def test_a_stopped_coordinator_does_not_stop_the_end(launch):
    launched = launch("--grace", "0.2", worker=f"{HELLO}; {WAITS}")
    launched.up(1)
    os.kill(launched.coordinator, signal.SIGSTOP)
    launched.send(signal.SIGTERM)
    code, _, err = launched.end()
    assert code == 128 + signal.SIGTERM
    assert "the coordinator did not answer within 2.2 s" in err


def test_two_launches_on_one_socket(launch, tmp_path):
    """The second one is turned away at once, also while the first has no coordinator."""
    path = str(tmp_path / "c.sock")
    first = launch("--socket", path, worker=f"{ENDS}; {HELLO}; {WAITS}")
    first.socket_path = path
    first.up(1)

    def second() -> None:
        code, lines, err = launch("--socket", path, worker=HELLO).end()
        assert (code, lines) == (6, [])
        assert f"another `weight-cache launch` (pid {first.process.pid}) has {path}" in err

    second()
    os.kill(first.coordinator, signal.SIGKILL)
    first.said("it is started again")
    second()
    first.said("ready on")
    assert first.group.pid == first.process.pid
    first.send(signal.SIGUSR1)
    assert first.end()[0] == 0
    assert not list(tmp_path.glob("c.sock*"))


def test_a_socket_that_somebody_took_meanwhile_is_named_and_ends_the_group(launch, tmp_path):
    path = str(tmp_path / "c.sock")
    launched = launch("--socket", path, "--max-restarts", "1", worker=f"{HELLO}; {WAITS}")
    launched.socket_path = path
    launched.up(1)
    os.kill(launched.coordinator, signal.SIGKILL)
    launched.said("it is started again")
    with running(path):
        code, _, err = launched.end()
    assert code == 6
    assert f"a coordinator already serves {path}" in err
    assert "it was restarted 1 time in 10 minutes" in err
