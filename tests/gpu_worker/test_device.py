"""Names of devices, and that each is one object; the host, on which nothing has to be moved."""

import threading

import pytest
import torch

from gpu_worker import device
from gpu_worker.device import device_named
from shm_store.errors import ArgumentRefused, DeviceUnavailable, DeviceUnknown
from tests.gpu_worker.blocks import script

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without a GPU")


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("cpu", "cpu"),
        ("cpu:0", "cpu"),
        (torch.device("cpu"), "cpu"),
        (torch.device("cpu", 0), "cpu"),
        ("sim", "sim:0"),
        ("sim:0", "sim:0"),
        ("sim:17", "sim:17"),
    ],
)
def test_a_device_has_one_name_and_one_object(name, canonical):
    assert device_named(name).name == canonical
    assert device_named(name) is device_named(canonical)


def test_devices_of_another_index_are_others():
    """A comparison of kinds alone would take one for the other."""
    one, other = device_named("sim:1"), device_named("sim:2")
    assert one is not other
    assert (one.name, other.name) == ("sim:1", "sim:2")
    assert (one.pool, other.pool) == ("vram:sim-1", "vram:sim-2")


@pytest.mark.parametrize(
    "name",
    ["", "gpu", "meta", "SIM:0", "sim:", "sim:-1", "sim:01", "sim:1000", "sim:0 ", "sim:0\n",
     "cpu:1", "cuda:x", "cuda:", "x" * 500, None, 0, torch.device("meta")],
)  # fmt: skip
def test_a_name_of_no_device_is_refused(name):
    """With a remedy, without repeating a novel, and nothing is kept of it."""
    before = dict(device._devices)
    with pytest.raises(DeviceUnknown) as caught:
        device_named(name)
    assert "sim:N" in caught.value.remedy
    assert len(str(caught.value)) < 250
    assert device._devices == before


@no_gpu
@pytest.mark.parametrize("name", ["cuda", "cuda:0", torch.device("cuda", 1)])
def test_a_gpu_that_no_driver_knows_is_unavailable_and_not_unknown(name):
    """The name is right; the system lacks it."""
    before = dict(device._devices)
    with pytest.raises(DeviceUnavailable, match="no CUDA device") as caught:
        device_named(name)
    assert "sim:N" in caught.value.remedy
    assert device._devices == before


def test_threads_that_ask_together_get_the_same_device():
    barrier = threading.Barrier(8)
    found = []

    def ask():
        barrier.wait()
        found.append(device_named("sim:33"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(map(id, found))) == 1


def test_a_size_that_is_none_is_refused_and_can_be_corrected(monkeypatch):
    monkeypatch.setenv("WEIGHT_CACHE_SIM_BYTES", "20 potatoes")
    with pytest.raises(ArgumentRefused, match="potatoes"):
        device_named("sim:34")
    monkeypatch.setenv("WEIGHT_CACHE_SIM_BYTES", "3MiB")
    assert device_named("sim:34").total_bytes() == 3 << 20
    monkeypatch.setenv("WEIGHT_CACHE_SIM_BYTES", "4MiB")
    assert device_named("sim:34").total_bytes() == 3 << 20


def test_the_host_has_no_memory_of_its_own():
    """Modules run on the shared pages there: no pool, nothing charged, nothing to allocate."""
    cpu = device_named("cpu")
    assert (cpu.pool, cpu.torch_device) == (None, torch.device("cpu"))
    assert (cpu.total_bytes(), cpu.charged_bytes(1 << 30)) == (0, 0)
    with pytest.raises(ArgumentRefused, match="shared pages"):
        cpu.allocate(4096, "1-1")
    cpu.release_cached()
    cpu.synchronize()


FORKS = """
import os, threading
from gpu_worker import device
held, forked = threading.Event(), threading.Event()
def hold():
    with device._lock:
        held.set()
        forked.wait()
threading.Thread(target=hold).start()
held.wait()
pid = os.fork()
if not pid:
    os._exit(0 if device.device_named("sim:5").name == "sim:5" else 1)
_, status = os.waitpid(pid, 0)
forked.set()
print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.process
def test_a_child_that_was_forked_while_another_thread_asked_can_ask():
    assert script(FORKS) == "0\n"
