"""Memory of a device that processes share: one copy, whoever has it, comes, or ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import gpu_worker
from gpu_worker import sim_device
from shm_store.errors import ArgumentRefused, BudgetExceeded
from shm_store.wire import Done, Evict
from tests.gpu_worker.on_device import MIB, matrix, moved, new_device, skeleton, there
from tests.gpu_worker.served import WAIT_S, wait_until
from tests.processes import ROOT

pytestmark = pytest.mark.process

SIDE = 512
BUDGET_BYTES = 8 * MIB


class Other:
    """Another process on the device, which does what it is told, a line of Python each."""

    PROGRAM = """
import sys, torch, gpu_worker
from tests.gpu_worker.on_device import matrix, skeleton
SIDE = int(sys.argv[3])
worker = gpu_worker.attach(sys.argv[1], device=sys.argv[2], vram_budget=int(sys.argv[4]),
                           share_vram=True)
handles = {}
def lock(key):
    handles[key] = worker.load(key, skeleton=skeleton(SIDE), build=matrix(SIDE))
    return float(handles[key].__enter__()(torch.ones(1, SIDE))[0, 0])
def moved():
    return sum(model.moved_bytes for model in worker._table.counted())
for line in sys.stdin:
    print(repr(eval(line)), flush=True)
"""

    def __init__(self, socket: str, device: str) -> None:
        arguments = [socket, device, str(SIDE), str(BUDGET_BYTES)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def do(self, line: str) -> object:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return eval(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@pytest.fixture
def device() -> str:
    return new_device()


@pytest.fixture
def worker(served, device) -> Iterator[gpu_worker.Worker]:
    made = gpu_worker.attach(
        served.socket, device=device, vram_budget=BUDGET_BYTES, share_vram=True
    )
    yield made
    made.shutdown()


@pytest.fixture
def other(served, device) -> Iterator[Other]:
    started = Other(served.socket, device)
    yield started
    started.kill()


def load(worker: gpu_worker.Worker, key: str, **facts) -> gpu_worker.ModelHandle:
    return worker.load(key, skeleton=skeleton(SIDE), build=matrix(SIDE), **facts)


def right(module: torch.nn.Module) -> bool:
    return bool((module(torch.ones(1, SIDE)) == SIDE + 1.0).all())


def test_two_processes_have_one_copy(served, worker, other, operator, device, key):
    with load(worker, key) as module:
        assert right(module) and moved(worker) > 0
        assert other.do(f"lock({key!r})") == SIDE + 1.0
        assert other.do("moved()") == 0
        (one,) = there(operator, device)
        assert (one.private, len(one.leases)) == (False, 2)
        served.audit()


def test_a_process_that_is_started_again_finds_it_there(served, worker, operator, device, key):
    first = Other(served.socket, device)
    first.do(f"lock({key!r})")
    assert int(str(first.do("moved()"))) > 0
    first.kill()
    wait_until(lambda: [len(g.leases) for g in there(operator, device)] == [0])
    with load(worker, key) as module:
        assert right(module) and moved(worker) == 0
        served.audit()


def test_offloading_moves_nothing_and_the_next_lock_neither(worker, operator, device, key):
    handle = load(worker, key)
    with handle:
        pass
    before = moved(worker)
    for _ in range(5):
        assert worker.offload(key)
        assert worker.resident() == ()
        with handle as module:
            assert right(module)
    assert moved(worker) == before
    assert len(there(operator, device)) == 1


def test_what_nobody_leases_goes_when_others_lack_room(worker, other, operator, device):
    """Eight of one MiB and something do not fit."""
    for number in range(5):
        with load(worker, f"goes {number}"):
            pass
        worker.offload(f"goes {number}")
    worker.flush()
    for number in range(4):
        assert other.do(f"lock('stays {number}')") == SIDE + 1.0
    used = sum(one.size_bytes for one in there(operator, device))
    assert used <= BUDGET_BYTES
    assert {one.key for one in there(operator, device) if one.leases} == {
        f"stays {number}" for number in range(4)
    }


def test_who_has_it_idle_is_asked_and_who_uses_it_is_named(worker, other, operator, device):
    handles = [load(worker, f"mine {number}") for number in range(9)]
    for handle in handles:
        with handle:
            pass
    assert {one.key for one in worker.resident()}
    assert other.do("lock('theirs')") == SIDE + 1.0
    with pytest.raises(BudgetExceeded) as refused:
        worker.reserve(BUDGET_BYTES, timeout=0.3)
    assert "theirs" in {holder.key for holder in refused.value.holders}
    for handle in handles:
        with handle as module:
            assert right(module)


def test_an_edited_module_has_a_copy_of_its_own(worker, other, device, key):
    """What was edited on the host is this process's alone, and so is its copy there."""
    handle = load(worker, key)
    with handle as module:
        assert right(module)
    worker.offload(key)
    with torch.no_grad():
        dict(module.named_parameters())["bias"].add_(1.0)
    with handle as module:
        assert (module(torch.ones(1, SIDE)) == SIDE + 2.0).all()
        assert other.do(f"lock({key!r})") == SIDE + 1.0


def test_two_workers_of_a_process_have_one_lease(served, worker, operator, device, key):
    """The other one has a copy of its own."""
    second = gpu_worker.attach(served.socket, device=device, share_vram=True)
    with load(worker, key) as one, load(second, key) as two:
        assert right(one) and right(two)
        assert sorted(g.private for g in there(operator, device)) == [False, True]
        served.audit()
    second.shutdown()


def test_newer_weights_take_its_place(served, worker, operator, device, key):
    with load(worker, key) as module:
        assert right(module)
        newer = worker.load(key, skeleton=skeleton(SIDE), build=matrix(SIDE, 2.0), version="2")
        with newer as other:
            assert (other(torch.ones(1, SIDE)) == 2.0 * SIDE + 2.0).all()
            assert right(module)
            assert [one.private for one in there(operator, device)] == [False]
    del module, other
    worker.flush()
    wait_until(lambda: len(there(operator, device)) == 1)
    served.audit()


def test_without_the_option_nothing_is_shared(served, operator, device, key):
    with gpu_worker.attach(served.socket, device=device) as worker, load(worker, key) as module:
        assert right(module)
        assert [one.private for one in there(operator, device)] == [True]
        with load(worker, f"{key} 2", share_vram=True):
            assert sorted(g.private for g in there(operator, device)) == [False, True]


@pytest.mark.parametrize("first", [True, False])
def test_who_asks_for_what_the_first_load_did_not_is_told(worker, key, first):
    """Else an edit of what was to be this process's own would end it."""
    with load(worker, key, share_vram=first) as module:
        with pytest.raises(ArgumentRefused, match=f"loaded with share_vram={first}, and all"):
            load(worker, key, share_vram=not first)
        with load(worker, key, share_vram=first) as same, load(worker, key) as whichever:
            assert same is module is whichever


def test_what_is_not_shared_there_is_shared_on_the_host_and_can_be_edited(worker, other, key):
    with load(worker, key, share_vram=False) as module:
        with torch.no_grad():
            dict(module.named_parameters())["bias"].add_(1.0)
        assert (module(torch.ones(1, SIDE)) == SIDE + 2.0).all()
        assert other.do(f"lock({key!r})") == SIDE + 1.0


def test_the_time_of_an_upload_is_that_of_a_move(worker, device, key):
    """And no waiting. The device takes its time for each copy."""
    sim_device.tell(device, sim_device.Faults(slow_s=0.2))
    with load(worker, key):
        pass
    (model,) = worker._table.counted()
    assert model.moved_s >= 0.2 > model.waited_s


def test_an_edit_in_place_ends_the_process(other, key):
    """As on a GPU: a write to what is shared read-only is a fault."""
    other.do(f"lock({key!r})")
    assert other.process.stdin is not None
    other.process.stdin.write(f"handles[{key!r}].__enter__().weight.data.mul_(2)\n")
    other.process.stdin.close()
    assert other.process.wait(WAIT_S) < 0


def test_what_is_to_be_trained_is_not_shared(worker, operator, device, key):
    with load(worker, key, train=True) as module:
        with torch.no_grad():
            dict(module.named_parameters())["bias"].add_(1.0)
        assert [one.private for one in there(operator, device)] == [True]


def test_it_is_evicted_by_its_key(worker, operator, device, key):
    handle = load(worker, key)
    with handle:
        pass
    handle.close()
    worker.evict(key)
    worker.flush()
    operator.send(Evict(operator.next_rid(), key))
    assert operator.expect(Done).keys == (key,)
    operator.flush()
    assert there(operator, device) == []
