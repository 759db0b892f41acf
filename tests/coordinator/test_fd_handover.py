"""What a coordinator stores with its supervisor comes back to the next one.

Coordinators are played: what is tested is who keeps the fds, for whom, and until when.
"""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from tests.coordinator.launched import HELLO, WAITS, Launched, runs
from tests.processes import fds_of

pytestmark = pytest.mark.process

LAUNCH = """
import os, resource, sys
from coordinator import coordinator_host
coordinator_host.module_command = lambda module: [sys.executable, "-c", COORDINATOR]
from coordinator.cli import main
main()
"""

COORDINATOR = """
import json, os, signal, sys
from coordinator import notify
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
def told(*words):
    os.write(2, (" ".join(("told", *map(str, words))) + "\\n").encode())
def memfd(text):
    fd = os.memfd_create(text)
    os.write(fd, text.encode())
    return fd
def content(fd):
    return os.pread(fd, 100, 0).decode()
found = notify.inherited()
life = len(found.get("lives", ())) + 1
notify.store("lives", [memfd(str(life))])
"""
"""Each life counts those before it."""

GOES_ON = """
notify.ready()
while True:
    signal.pause()
"""


@pytest.fixture
def played(launch):
    """A launch whose coordinators run this code, and are ready after it."""

    def played(
        code: str, *options: str, worker: str = f"{HELLO}; {WAITS}", setup: str = ""
    ) -> Launched:
        coordinator = COORDINATOR + code + GOES_ON
        play = f"COORDINATOR = {coordinator!r}\n{setup}\n{LAUNCH}"
        return launch(*options, worker=worker, play=play)

    return played


def told(launched: Launched) -> Any:
    return json.loads(launched.said("told ").removeprefix("told "))


def test_what_is_stored_comes_back_by_name_and_in_order_until_it_is_removed(played):
    launched = played(
        """
if life == 1:
    notify.store("gen-2", [memfd("two"), memfd("three")])
    notify.store("gen-1", [memfd("one")])
    notify.store("gone", [memfd("gone")])
    notify.remove("gone")
if life == 2:
    notify.remove("gen-2")
notify.barrier(20)
told(json.dumps({name: [content(fd) for fd in fds] for name, fds in found.items()}))
"""
    )
    assert told(launched) == {}
    launched.up(1)
    os.kill(launched.coordinator, signal.SIGKILL)
    assert told(launched) == {"lives": ["1"], "gen-2": ["two", "three"], "gen-1": ["one"]}
    while launched.group.members[0].pid is None:
        pass  # until the file of the group names the new one
    os.kill(launched.coordinator, signal.SIGKILL)
    assert told(launched) == {"lives": ["1", "2"], "gen-1": ["one"]}
    launched.send(signal.SIGTERM)
    launched.end()


def test_the_fds_of_a_coordinator_are_for_nobody_else(played):
    """Neither for its workers nor, once the group ends, for anybody."""
    launched = played(
        'notify.store("gen-1", [memfd("handed-over")]); told(life)',
        worker="""
targets = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")[:-1]]
say(any("handed-over" in target for target in targets), "NOTIFY_SOCKET" in os.environ)
signal.pause()
""",
    )
    assert told(launched) == 1
    assert launched.line() == "False False"
    kept = fds_of(launched.supervisor).values()
    assert sum("handed-over" in target for target in kept) == 1
    launched.send(signal.SIGTERM)
    launched.end()


def test_what_was_said_last_counts(played):
    """A coordinator that stores and dies in the same moment has stored, in however many words."""
    launched = played(
        """
told(json.dumps([content(fd) for fd in found.get("last", ())]))
if life == 1:
    def last(*_):
        for word in ("my", "last", "words"):
            notify.store("last", [memfd(word)])
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGUSR1, last)
""",
        setup="""
from coordinator.notify_socket import NotifySocket
NotifySocket.hear.__defaults__ = (1,)  # of more than it reads at once
""",
    )
    assert told(launched) == []
    launched.up(1)
    supervisor, coordinator = launched.supervisor, launched.coordinator
    os.kill(supervisor, signal.SIGSTOP)  # so that all is there when it looks
    os.kill(coordinator, signal.SIGUSR1)
    while runs(coordinator):
        pass  # until it is a zombie
    os.kill(supervisor, signal.SIGCONT)
    assert told(launched) == ["my", "last", "words"]
    launched.send(signal.SIGTERM)
    launched.end()


def test_a_store_says_how_much_it_takes_and_refuses_more(played):
    launched = played(
        """
limit = notify.limit()
many = [memfd("x") for _ in range(limit)]
notify.store("many", many)
try:
    notify.barrier(20)
except notify.StoreRefused as refused:
    told(json.dumps([limit, str(refused)]))
for fd in many:
    os.close(fd)
""",
        setup="import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (600, 600))",
    )
    limit, reason = told(launched)
    assert 100 < limit < 300
    assert reason.startswith(f"'many' cannot be kept: the store is full ({limit} fds)")
    launched.up(1)
    kept = fds_of(launched.supervisor).values()
    assert sum("memfd:" in target for target in kept) == 1  # which counts the lives
    launched.send(signal.SIGTERM)
    launched.end()


def test_a_full_store_still_starts_the_next_one(played):
    launched = played(
        """
told(json.dumps([len(fds) for fds in found.values()]))
if life == 1:
    notify.store("many", [memfd("x") for _ in range(notify.limit() - 2)])
    notify.barrier(20)
""",
        setup="import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (600, 600))",
    )
    assert told(launched) == []
    launched.up(1)
    os.kill(launched.coordinator, signal.SIGKILL)
    lives, many = told(launched)
    assert lives == 1 and many > 100
    launched.send(signal.SIGTERM)
    launched.end()


def test_a_coordinator_that_says_that_it_leaves_is_not_started_again(played):
    """Whatever then happens to it."""
    launched = played(
        """
def leave(*_):
    notify.stopping()
    os._exit(9)
signal.signal(signal.SIGUSR1, leave)
"""
    )
    launched.up(1)
    os.kill(launched.coordinator, signal.SIGUSR1)
    code, _, err = launched.end()
    assert code == 6
    assert "the coordinator was ended (exit code 9), so its workers end too" in err


def test_a_coordinator_that_never_serves_starts_no_worker(launch):
    code = "import signal; signal.pause()"
    setup = "coordinator_host.READY_LIMIT_S = 0.3"
    play = LAUNCH.replace("from coordinator.cli", f"{setup}\nfrom coordinator.cli")
    launched = launch(worker=HELLO, play=f"COORDINATOR = {code!r}\n{play}")
    code, lines, err = launched.end()
    assert (code, lines) == (6, [])
    assert "the coordinator was not ready within 0.3 s" in err


def test_a_next_coordinator_that_never_serves_is_a_failure_like_any_other(played):
    launched = played(
        """
if life == 2:
    signal.pause()
told(life)
""",
        setup="from coordinator import coordinator_host; coordinator_host.READY_LIMIT_S = 1.0",
    )
    assert told(launched) == 1
    launched.up(1)
    os.kill(launched.coordinator, signal.SIGKILL)
    launched.said("the coordinator was not ready within 1 s")
    assert "started again in 1 s" in launched.said("the coordinator ended (by SIGKILL)")
    assert told(launched) == 3
    launched.send(signal.SIGTERM)
    launched.end()


def test_a_worker_that_plays_the_coordinator_is_not_heard(launch):
    """It finds the path, and lies: nothing is kept, nothing ends, and it is named."""
    launched = launch(
        worker=f"""
os.environ["NOTIFY_SOCKET"] = os.path.dirname(os.environ["WEIGHT_CACHE_SOCKET"]) + "/notify.sock"
from coordinator import notify
notify.stopping()
for _ in range(99):
    notify.store("a", [os.memfd_create("lie")])
notify.barrier()
{HELLO}
{WAITS}
"""
    )
    worker = launched.up(1)[0]
    text = f"a notice from pid {worker} is dropped: it does not come from the coordinator"
    assert launched.said(text).endswith("coordinator")
    assert launched.said(text).endswith("10 times so far")
    assert launched.said(text).endswith("100 times so far")
    assert not any("lie" in target for target in fds_of(launched.supervisor).values())
    os.kill(launched.coordinator, signal.SIGKILL)  # it was not leaving
    launched.said("it is started again")
    launched.said("ready on")
    launched.send(signal.SIGTERM)
    launched.end()
