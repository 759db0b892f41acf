"""Processes that share a device: one budget, one book, whoever comes, computes or dies there."""

from __future__ import annotations

import ctypes
import os
import signal

import pytest

from shm_store.memfds import by_owner
from tests.gpu_worker.on_device import MIB, charged
from tests.gpu_worker.served import wait_until

pytestmark = pytest.mark.process

DEVICE = "sim:0"

BUDGET_BYTES = 3 * MIB
SWITCHES = 500
"""By each of two processes."""

ON_DEVICE = """
import gc, os, sys, threading
import torch, gpu_worker

worker = gpu_worker.attach(socket, device=device, vram_budget=budget, name=name)
SIDE = 512

def skeleton():
    return torch.nn.Linear(SIDE, SIDE, bias=False)

def build(value):
    return lambda: {"weight": torch.full((SIDE, SIDE), float(value))}

def use(key, value):  # every weight is `value`
    with worker.use(key, skeleton=skeleton, build=build(value)) as module:
        with torch.inference_mode():
            assert (module(torch.ones(1, SIDE)) == value * SIDE).all()

done = 0

def use_often(key, value, times):
    global done
    for _ in range(times):
        use(key, value)
        done += 1

def in_thread(call):
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread

torch.set_num_threads(1)
"""


@pytest.fixture
def on_device(nursery, coordinator):
    """Starts a process that uses the device."""

    def start(name: str, budget_bytes: int = BUDGET_BYTES):
        process = nursery.fork()
        process.do(
            ON_DEVICE, socket=coordinator.socket, device=DEVICE, budget=budget_bytes, name=name
        )
        return process

    yield start
    nursery.end_workers()


def agree(operator) -> int:
    """Return what is on the device, of which books and kernel say the same."""
    wait_until(lambda: charged(operator, DEVICE) == taken(operator))
    return taken(operator)


def taken(operator) -> int:
    """Return what is on the device by the kernel, for generations of this coordinator."""
    start = operator.status().start
    return sum(size for owner, size in by_owner().items() if owner.startswith(f"{start}-"))


def test_one_leaves_for_another_process_when_it_is_idle(on_device, operator):
    a, b = on_device("a", 3 * MIB // 2), on_device("b")
    a.do("use('a', 1)")
    assert agree(operator) == MIB
    b.do("use('b', 2)")
    assert agree(operator) == MIB, "one at a time"
    assert a.do("[one.key for one in worker.resident()]") == []
    a.do("use('a', 1)")
    a.do("worker.shutdown()"), b.do("worker.shutdown()")
    assert agree(operator) == 0


def test_models_that_fit_only_by_turns_take_turns_a_thousand_times(on_device, operator):
    """No overshoot, no deadlock, no starvation: both come to their end, and never both fit."""
    a, b = on_device("a", 3 * MIB // 2), on_device("b")
    a.do(f"thread = in_thread(lambda: use_often('a', 1, {SWITCHES}))")
    b.do(f"thread = in_thread(lambda: use_often('b', 2, {SWITCHES}))")
    while a.do("thread.is_alive()") or b.do("thread.is_alive()"):
        there = _taken_at_once(operator, a, b)
        assert there <= 3 * MIB // 2, f"{there} bytes are on the device"
    assert a.do("done") == b.do("done") == SWITCHES
    for process in (a, b):
        process.do("worker.flush()")
    moved = [model for session in operator.status().sessions for model in session.models]
    assert {model.key for model in moved} == {"a", "b"}
    assert all(model.moved_bytes >= 2 * MIB for model in moved), "they took turns"
    for process in (a, b):
        process.do("worker.shutdown()")
    assert agree(operator) == 0


def test_what_the_dead_had_there_is_charged_until_the_device_has_it_back(on_device, operator):
    a, b = on_device("a"), on_device("b")
    a.do("use('a', 1)")
    kept = _fd_of_block(a)
    a.end(signal.SIGKILL)
    wait_until(lambda: [g.state for g in _there(operator)] == ["freeing"])
    assert charged(operator, DEVICE) == MIB == taken(operator), "somebody still has it"
    b.do("use('b', 2)")
    os.close(kept)
    wait_until(lambda: charged(operator, DEVICE) == MIB)
    assert agree(operator) == MIB and [g.key for g in _there(operator)] == ["b"]


FORK = """
import select, signal
pid = os.fork()
if not pid:
    signal.pause()
    os._exit(0)
"""


def test_a_forked_child_has_what_its_parent_had_there(on_device, operator):
    """Its memory is one, and counts until both have let go of it."""
    a = on_device("a")
    a.do("use('a', 1)")
    a.do(FORK)
    wait_until(lambda: [len(g.leases) for g in _there(operator)] == [2])
    assert agree(operator) == MIB
    assert a.do("worker.offload('a')")
    wait_until(lambda: [len(g.leases) for g in _there(operator)] == [1])
    assert agree(operator) == MIB, "the child has it"
    a.do("os.kill(pid, signal.SIGKILL)")
    a.do("os.waitpid(pid, 0)")
    assert agree(operator) == 0


FORK_IN_UPLOAD = """
from gpu_worker.sim_device import Faults, tell
slow = Faults(slow_s=60.0)
tell(device, slow)
thread = in_thread(lambda: use('a', 1))
assert slow.begun.wait(20.0)
pid = os.fork()
if not pid:
    code = 1
    try:
        tell(device, Faults())
        use('a', 1)
        code = 0
    finally:
        os._exit(code)
"""


def test_a_child_forked_in_an_upload_brings_its_module_itself(on_device, operator):
    """The thread that was at it is not there to end it."""
    a = on_device("a")
    a.do(FORK_IN_UPLOAD)
    assert a.do("os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])") == 0
    a.do("slow.go_on.set()")
    a.do("thread.join(20.0)")
    assert a.do("[one.key for one in worker.resident()]") == ["a"]
    assert agree(operator) == MIB


def _there(operator):
    name = f"vram:sim-{DEVICE.partition(':')[2]}"
    return [g for g in operator.status().generations if g.pool == name]


def _taken_at_once(operator, *processes) -> int:
    """Return what is on the device at one moment: else who gives and who takes both count."""
    for process in processes:
        process.signal(signal.SIGSTOP)
    for process in processes:
        wait_until(lambda pid=process.pid: _state(pid) == "T")
    there = taken(operator)
    for process in processes:
        process.signal(signal.SIGCONT)
    return there


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def _fd_of_block(process) -> int:
    """Take an fd of a block of a worker process, as somebody would who keeps its memory."""
    folder = f"/proc/{process.pid}/fd"
    (number,) = [
        int(fd) for fd in os.listdir(folder) if f":{DEVICE}:" in os.readlink(f"{folder}/{fd}")
    ]
    taken = ctypes.CDLL(None, use_errno=True).syscall(438, process.pidfd, number, 0)
    assert taken >= 0, os.strerror(ctypes.get_errno())
    return taken
