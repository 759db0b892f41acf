"""A model in shared memory of a GPU: worker and coordinator are real, the driver is a fake."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch

import gpu_worker
from benchmarks.device_check.models import Kinds, numbers
from gpu_worker import cuda_memory, device
from shm_store.errors import DeviceUnavailable
from shm_store.wire import Done, Evict
from tests.gpu_worker.fake_cuda import GRANULE, CUresult, FakeDevice, FakeDriver, World
from tests.gpu_worker.noting import noted
from tests.gpu_worker.served import wait_until
from tests.gpu_worker.test_cuda_memory import access

pytestmark = pytest.mark.process

POOL = "vram:a-b"


@pytest.fixture
def driver(monkeypatch) -> Iterator[FakeDriver]:
    """Of "cuda:1"."""
    noting = noted(monkeypatch)
    made = FakeDriver(World(FakeDevice("c-d"), FakeDevice("a-b")))
    monkeypatch.setattr(cuda_memory, "bindings", lambda: made)
    monkeypatch.setitem(device._devices, "cuda:1", noting.device)
    yield made
    made.fails.clear()
    gc.collect()
    noting.device.release_cached()
    wait_until(lambda: made.device(1).free_bytes == made.device(1).total_bytes)
    assert made.has_nothing and not noting.device._memories


@pytest.fixture
def worker(served, driver, operator, key) -> Iterator[gpu_worker.Worker]:
    made = gpu_worker.attach(served.socket, device="cuda:1", vram_budget="20MiB", share_vram=True)
    yield made
    made.evict(key)
    made.flush()  # or the keeper would free what is left when there is no fake any more
    made.shutdown()
    operator.flush()
    operator.send(Evict(operator.next_rid(), key))
    operator.expect(Done)


def shared(operator, key):
    found = [one for one in operator.status().generations if (one.pool, one.key) == (POOL, key)]
    return [one for one in found if not one.private]


def moved(worker: gpu_worker.Worker) -> int:
    return sum(model.moved_bytes for model in worker._table.counted())


def test_a_model_of_all_kinds_of_tensors_lies_in_it(worker, driver, operator, key):
    """Its dtypes, strides, ties and views as on the host, read-only, charged by whole granules."""
    x = numbers(2, 6)
    handle = worker.load(key, skeleton=Kinds, build=Kinds)
    with handle as module, torch.no_grad():
        assert torch.equal(module(x), Kinds()(x))
        assert module.tied is module.plain
        whole = module.turned.untyped_storage()
        assert whole.data_ptr() == module.columns.untyped_storage().data_ptr()
        for name, tensor in module.named_parameters():
            built = dict(Kinds().named_parameters())[name]
            assert (tensor.dtype, tensor.stride()) == (built.dtype, built.stride()), name
            if tensor.numel():
                assert access(tensor.data_ptr()) == "r--s", name
        (one,) = shared(operator, key)
        assert one.size_bytes == GRANULE
        in_use = driver.device(1).total_bytes - driver.device(1).free_bytes
        assert in_use == GRANULE
    del module, tensor, whole
    handle.close()


def test_it_stays_when_its_process_has_left_it_and_is_found_again(worker, driver, operator, key):
    handle = worker.load(key, skeleton=Kinds, build=Kinds)
    with handle:
        before = moved(worker)
    for _ in range(3):
        assert worker.offload(key)
        worker.flush()
        gc.collect()
        wait_until(lambda: driver.has_nothing)
        assert driver.device(1).free_bytes < driver.device(1).total_bytes
        with handle as module, torch.no_grad():
            assert torch.equal(module(numbers(2, 6)), Kinds()(numbers(2, 6)))
        del module
    handle.close()
    (one,) = shared(operator, key)
    assert driver.calls.count("cuMemCreate") == 2, "one to try it, one for all locks"
    assert moved(worker) - before < one.size_bytes, "only what is not in the checkpoint"


@pytest.mark.parametrize(
    ("call", "code", "raised"),
    [
        ("cuMemExportToShareableHandle", "CUDA_ERROR_UNKNOWN", DeviceUnavailable),
        ("cuMemSetAccess", "CUDA_ERROR_ECC_UNCORRECTABLE", DeviceUnavailable),
    ],
)
def test_a_driver_that_refuses_leaves_the_module_usable_and_nothing_there(
    worker, driver, operator, key, call, code, raised
):
    assert worker._device.shares  # tried before it goes wrong
    handle = worker.load(key, skeleton=Kinds, build=Kinds)
    driver.fail(call, CUresult[code])
    with pytest.raises(raised, match=f"{call}: {code}"), handle:
        pass
    driver.fails.clear()
    worker.flush()
    gc.collect()
    assert driver.has_nothing
    with handle as module, torch.no_grad():
        assert torch.equal(module(numbers(2, 6)), Kinds()(numbers(2, 6)))
    del module
    handle.close()


def test_what_is_no_memory_of_the_device_is_not_used_and_locks_nobody_out(
    worker, driver, operator, key, caplog
):
    """Whoever made it: each process has a copy of its own then, and the log says why."""
    assert worker._device.shares
    handle = worker.load(key, skeleton=Kinds, build=Kinds)
    driver.fail("cuMemImportFromShareableHandle", CUresult["CUDA_ERROR_INVALID_VALUE"])
    with handle as module, torch.no_grad():
        assert torch.equal(module(numbers(2, 6)), Kinds()(numbers(2, 6)))
        (one,) = shared(operator, key)
        assert one.leases == ()
    assert "a copy of its own" in caplog.text and "cuMemImportFromShareableHandle" in caplog.text
    driver.fails.clear()
    del module
    worker.offload(key)
    worker.flush()
    gc.collect()
    worker.flush()
    with handle:
        (one,) = shared(operator, key)
        assert len(one.leases) == 1, "the next lock tries it again"
    handle.close()


def test_a_forked_child_keeps_nothing_of_it(worker, driver, key):
    """It cannot use the device. Its fd would keep the memory when everybody else has left it."""

    def ends(memory) -> int:
        """Count the fds that this process has of the pipe which stands for a memory."""
        links = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
        wanted = f"pipe:[{memory.inode}]"
        return sum(os.path.islink(link) and os.readlink(link) == wanted for link in links)

    handle = worker.load(key, skeleton=Kinds, build=Kinds)
    with handle:
        (memory,) = [one for one in driver.device(1).memories if one.in_use]
        assert ends(memory) == 2, "the fake's end, and the lease's"
        pid = os.fork()
        if not pid:
            os._exit(ends(memory))
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 1
        assert ends(memory) == 2
    handle.close()


def test_where_it_cannot_be_shared_each_process_has_its_own(worker, driver, operator, key):
    driver.device(1).attributes[103] = 0
    handle = worker.load(key, skeleton=Kinds, build=Kinds)
    with handle as module, torch.no_grad():
        assert torch.equal(module(numbers(2, 6)), Kinds()(numbers(2, 6)))
        assert shared(operator, key) == [] and driver.calls.count("cuMemCreate") == 0
    del module
    handle.close()
