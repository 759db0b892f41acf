"""The front and the supervisor: either may be killed, and no process of the group outlives it."""

from __future__ import annotations

import os
import signal

import pytest

from tests.coordinator.launched import HELLO, WAITS, all_end, runs, watch
from tests.processes import WAIT_S, children_of

pytestmark = pytest.mark.process

STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
STARTS = """
import subprocess
def start(**how):
    code = "import os, signal; os.write(1, b'.'); signal.signal(15, signal.SIG_IGN); signal.pause()"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, **how)
    child.stdout.read(1)
    return child.pid
"""


def test_killing_the_front_ends_the_group_in_order_and_its_words_are_still_shown(launch):
    launched = launch(
        "--workers",
        "2",
        worker=f"""
def leave(*_):
    from coordinator.operator import Operator
    with Operator.connect(os.environ["WEIGHT_CACHE_SOCKET"], "test") as operator:
        operator.status()  # the coordinator is there until the workers have gone
    say("left in order")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
{HELLO}
while True:
    hear()
""",
    )
    workers = launched.up(2)
    pidfds = watch(launched.supervisor, launched.coordinator, *workers.values())
    launched.send(signal.SIGKILL)
    code, lines, err = launched.end(*pidfds)
    assert (code, lines) == (-signal.SIGKILL, ["left in order"] * 2)
    assert f"the process that was launched (pid {launched.process.pid}) is gone" in err
    assert "ended (" not in err  # nothing failed
    assert "TERM" not in err  # nobody sent one


def test_a_front_killed_while_the_group_ends_changes_nothing(launch):
    launched = launch(
        worker=f"""
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda number, _: say(signal.Signals(number).name))
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
{HELLO}
while True:
    hear()
"""
    )
    worker, supervisor = launched.up(1)[0], launched.supervisor
    pidfds = watch(supervisor, launched.coordinator, worker)
    launched.send(signal.SIGTERM)
    assert launched.line() == "SIGTERM"
    launched.send(signal.SIGKILL)
    launched.said("is gone")
    os.kill(supervisor, signal.SIGUSR2)  # what it does about the front comes before this
    assert launched.line() == "SIGUSR2"
    os.kill(worker, signal.SIGUSR1)
    assert launched.end(*pidfds)[1] == []  # not told again, and not killed


def test_killing_the_supervisor_leaves_no_process_of_its_session(launch):
    """Not a worker that would not end, and not what it started. Only who left on purpose stays."""
    launched = launch(
        "--grace",
        "0.3",
        worker=f"""
{STARTS}
{STUBBORN}
say("started", start(), start(process_group=0), start(start_new_session=True))
{WAITS}
""",
    )
    _, same_group, own_group, own_session = launched.line().split()
    supervisor, coordinator = launched.supervisor, launched.coordinator
    worker = launched.group.members[1].pid
    session = watch(int(own_session))[0]
    pidfds = watch(supervisor, coordinator, worker, int(same_group), int(own_group))
    launched.family |= {int(same_group), int(own_group), coordinator, worker}
    try:
        os.kill(supervisor, signal.SIGKILL)
        code, lines, err = launched.end(*pidfds)
        assert (code, lines) == (128 + signal.SIGKILL, [])
        assert f"the supervisor (pid {supervisor}) ended (by SIGKILL), so its group ends" in err
        assert "what is left of the group is killed: pid " in err
        assert runs(int(own_session))
    finally:
        signal.pidfd_send_signal(session, signal.SIGKILL)
        assert all_end(session)


def test_of_a_killed_supervisor_only_the_front_speaks(launch):
    """The coordinator finds nobody to tell what it would say, which is nothing for people."""
    launched = launch(
        worker=f"""
from tests.mapper import _Commands
worker = _Commands(os.environ["WEIGHT_CACHE_SOCKET"])
worker.publish("held", "100000")
{HELLO}
{WAITS}
"""
    )
    launched.up(1)
    supervisor, pidfds = launched.supervisor, watch(launched.coordinator)
    os.kill(supervisor, signal.SIGKILL)
    _, _, err = launched.end(*pidfds)
    _, *rest = err.splitlines()  # the first: that it is ready
    assert rest == [
        f"weight-cache: the supervisor (pid {supervisor}) ended (by SIGKILL), so its group ends"
    ]


def test_killing_both_at_once_leaves_neither_worker_nor_coordinator(launch):
    launched = launch("--workers", "2", worker=f"{STUBBORN}; {HELLO}; {WAITS}")
    workers = launched.up(2)
    supervisor, coordinator = launched.supervisor, launched.coordinator
    pidfds = watch(supervisor, coordinator, *workers.values())
    folder = os.path.dirname(launched.socket())
    os.kill(supervisor, signal.SIGSTOP)  # so that it cannot act in between
    launched.send(signal.SIGKILL)
    signal.pidfd_send_signal(pidfds[0], signal.SIGKILL)
    assert all_end(*pidfds)
    assert sorted(os.listdir(folder)) == ["coordinator.sock.group", "notify.sock"]
    assert launched.process.wait(WAIT_S) == -signal.SIGKILL


def test_a_supervisor_killed_before_the_coordinator_is_ready_leaves_nothing(launch):
    launched = launch("--grace", "5", worker=HELLO)
    while not (found := children_of(launched.process.pid)) or not children_of(found[0]):
        assert launched.process.poll() is None
    pidfds = watch(*found, *children_of(found[0]))
    os.kill(found[0], signal.SIGKILL)
    code, lines, _ = launched.end(*pidfds)
    assert (code, lines) == (128 + signal.SIGKILL, [])


def test_the_front_reaps_what_workers_leave_behind(launch):
    """As pid 1 would: their orphans become its children, and would stay as zombies."""
    launched = launch(
        worker=f"""
ours, theirs = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        os.close(theirs)
        os.read(ours, 1)
        os._exit(0)
    os._exit(0)
os.wait()
os.close(ours)
signal.signal(signal.SIGUSR1, lambda *_: os.close(theirs))  # and so the orphan ends
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(0))
{HELLO}
while True:
    hear()
"""
    )
    launched.up(1)
    (orphan,) = set(children_of(launched.process.pid)) - {launched.supervisor}
    pidfd = watch(orphan)[0]
    launched.send(signal.SIGUSR1)
    assert all_end(pidfd)
    while orphan in children_of(launched.process.pid):
        pass  # until it is reaped; the test's own limit of time ends this otherwise
    launched.send(signal.SIGUSR2)
    assert launched.end()[0] == 0


def test_signals_for_the_whole_process_group_arrive_once(launch):
    """A terminal, and a shell's `kill %1`, signal every process of the group that they know."""
    launched = launch(
        worker=f"""
for number in (signal.SIGINT, signal.SIGUSR2):
    signal.signal(number, lambda number, _: say(signal.Signals(number).name))
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
{HELLO}
while True:
    hear()
""",
        process_group=0,
    )
    worker = launched.up(1)[0]
    os.killpg(launched.process.pid, signal.SIGINT)
    assert launched.line() == "SIGINT"
    launched.send(signal.SIGUSR2)  # a second INT would kill before this is passed on
    assert launched.line() == "SIGUSR2"
    os.kill(worker, signal.SIGUSR1)
    assert launched.end()[:2] == (0, [])
