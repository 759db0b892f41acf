"""A pid that a process of the group had is somebody else's by now: he is left alone.

In a pid namespace of its own the next pid can be chosen, so that this is no matter of luck.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.processes import ROOT, WAIT_S

pytestmark = pytest.mark.process

INSIDE = r"""
import os, signal, sys
from pathlib import Path
from tests.coordinator.launched import HELLO, WAITS, Launched
from tests.processes import Peer

def take(pid):
    "Start an innocent process that has this pid."
    with open("/proc/sys/kernel/ns_last_pid", "w") as last:
        last.write(str(pid - 1))
    child = os.fork()
    if child == 0:
        signal.pause()
    assert child == pid, (child, pid)
    os.setpgid(pid, pid)  # the number is that of a process group, too

folder = Path(sys.argv[1])
launched = Launched(
    folder, "--workers", "2", "--restart-workers", "on-failure", "--grace", "0.5",
    worker=f"{HELLO}; {WAITS}",
)
workers = launched.up(2)
socket = launched.socket()
peer = Peer(socket, "here")
attached = os.fork()
if attached == 0:
    Peer(socket, "attached").publish("held")
    print("attached", flush=True)
    signal.pause()
while (held := peer.generation("held")) is None or not held.leases:
    pass
coordinator = launched.coordinator
victims = [workers[0], coordinator]
for pid in victims:
    os.kill(pid, signal.SIGKILL)
    launched.said("it is started again")  # so it was reaped
    take(pid)
os.kill(attached, signal.SIGKILL)
os.waitpid(attached, 0)
take(attached)
launched.up(1)
launched.said("ready on")
launched.send(signal.SIGTERM)
launched.process.wait(20)
for pid in (*victims, attached):
    assert os.waitpid(pid, os.WNOHANG) == (0, 0), f"{pid} was signalled"
    os.kill(pid, signal.SIGKILL)
print("all live", flush=True)
"""


def test_who_has_the_pid_of_one_that_ended_is_left_alone(tmp_path):
    """A worker's, the coordinator's and a session's: none is signalled, at any end."""
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", INSIDE, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=2 * WAIT_S,
        check=False,
    )
    if done.stderr.startswith("unshare"):
        pytest.skip(f"no pid namespace can be made here: {done.stderr.strip()}")
    assert done.returncode == 0 and done.stdout.endswith("all live\n"), done.stderr
