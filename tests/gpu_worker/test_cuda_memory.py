"""Memory of a GPU that processes share, against a driver that lets nothing pass."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import sys
import threading
from collections.abc import Iterator

import pytest

from gpu_worker import cuda_driver, cuda_memory
from gpu_worker.cuda_memory import SharedMemory, Sharing, sharing
from shm_store.errors import (
    DeviceOutOfMemory,
    DeviceUnavailable,
    SegmentRefused,
)
from tests.gpu_worker.blocks import memfd, some_bytes
from tests.gpu_worker.fake_cuda import GRANULE, CUresult, FakeDevice, FakeDriver, World
from tests.gpu_worker.test_interrupts import interrupted

SIZE = 4 * GRANULE


@pytest.fixture
def world() -> World:
    return World(FakeDevice("a-b"), FakeDevice("c-d"))


@pytest.fixture
def started(monkeypatch):
    """Starts processes in a world; gives driver and sharing of each."""
    ended = []

    def start(world: World, visible: tuple[int, ...] | None = None, index: int = 0):
        driver = FakeDriver(world, visible)
        ended.append(driver)
        monkeypatch.setattr(cuda_memory, "bindings", lambda: driver)
        made = sharing(index, f"cuda:{index}")
        driver.calls.clear()
        return driver, made

    yield start
    for driver in ended:
        driver.fails.clear()
        driver.end()


@contextlib.contextmanager
def made_by(how: Sharing, size_bytes: int = SIZE) -> Iterator[SharedMemory]:
    memory = SharedMemory(how, size_bytes)
    try:
        memory.make()
        yield memory
    finally:
        memory.give_back()


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def state(device: FakeDevice) -> tuple[int, int]:
    """Return what is free of a device, and how many fds this process has."""
    free_bytes = device.free_bytes  # the fake closes its own with that
    return free_bytes, open_fds()


def write(memory: SharedMemory, data: bytes) -> None:
    ctypes.memmove(memory.address, data, len(data))


def read(memory: SharedMemory, count: int) -> bytes:
    return ctypes.string_at(memory.address, count)


def access(address: int) -> str:
    """Say what this process may do at an address, by the kernel."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if start <= address < end:
                return line.split()[1]
    return "nothing"


# --- how it is shared ---------------------------------------------------------------------------


def test_what_one_process_writes_others_read(world, started):
    """And cannot write: their map is for reading."""
    _, ours = started(world)
    _, theirs = started(world)
    with made_by(ours) as memory:
        write(memory, b"weights")
        other = SharedMemory(theirs, SIZE)
        other.open(memory.fd)
        assert read(other, 7) == b"weights"
        assert (access(memory.address), access(other.address)) == ("rw-s", "r--s")
        other.give_back()


def test_it_outlives_who_made_it_and_ends_with_its_last_map(world, started):
    """By the driver's free memory, at every step."""
    maker, ours = started(world)
    _, theirs = started(world)
    device = world.devices[0]
    before = device.free_bytes
    memory, other = SharedMemory(ours, SIZE), SharedMemory(theirs, SIZE)
    memory.make()
    write(memory, b"weights")
    kept = os.dup(memory.fd)
    maker.end()
    os.close(memory.fd)
    assert device.free_bytes == before - SIZE, "the fd alone keeps it"
    other.open(kept)
    os.close(kept)
    assert read(other, 7) == b"weights" and device.free_bytes == before - SIZE
    other.give_back()
    assert device.free_bytes == before


def test_an_fd_that_was_given_away_outlives_its_maker(world, started):
    driver, ours = started(world)
    device = world.devices[0]
    before = device.free_bytes
    with made_by(ours) as memory:
        kept = os.dup(memory.fd)
    assert driver.has_nothing and device.free_bytes == before - SIZE
    os.close(kept)
    assert device.free_bytes == before


def test_its_fd_is_not_for_programs_that_are_started(world, started):
    _, ours = started(world)
    with made_by(ours) as memory:
        assert not os.get_inheritable(memory.fd)


def test_it_is_given_back_in_order_and_once(world, started):
    driver, ours = started(world)
    with made_by(ours) as memory:
        fd = memory.fd
        driver.calls.clear()
    assert [name for name in driver.calls if name.startswith("cuMem")] == [
        "cuMemUnmap",
        "cuMemAddressFree",
        "cuMemRelease",
    ]
    with pytest.raises(OSError) as caught:
        os.fstat(fd)
    assert caught.value.errno == errno.EBADF
    driver.calls.clear()
    memory.give_back()
    assert (driver.calls, memory.fd) == ([], -1)


def test_sizes_are_whole_granules(world, started):
    _, ours = started(world)
    sizes = {0: 1, 1: 1, GRANULE: 1, GRANULE + 1: 2, 5 * GRANULE: 5}
    assert {size: ours.taken_bytes(size) // GRANULE for size in sizes} == sizes


# --- what goes wrong half-way -------------------------------------------------------------------

MAKES = (
    "cuDevicePrimaryCtxRetain",
    "cuCtxPushCurrent",
    "cuMemCreate",
    "cuMemExportToShareableHandle",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
)
OPENS = (
    "cuCtxPushCurrent",
    "cuMemImportFromShareableHandle",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
    "cuPointerGetAttribute",
)
GIVES_BACK = ("cuCtxPushCurrent", "cuMemUnmap", "cuMemAddressFree", "cuMemRelease")


@pytest.mark.parametrize("name", MAKES)
def test_making_it_that_fails_leaves_nothing(world, started, name):
    driver, ours = started(world)
    before = state(world.devices[0])
    ours.driver._context = cuda_driver.Call()
    driver.fail(name, CUresult.CUDA_ERROR_ECC_UNCORRECTABLE)
    memory = SharedMemory(ours, SIZE)
    with pytest.raises(DeviceUnavailable, match=f"cuda:0: {name}: CUDA_ERROR_ECC_UNCORRECTABLE"):
        memory.make()
    driver.fails.clear()
    memory.give_back()
    assert driver.has_nothing
    assert state(world.devices[0]) == before


@pytest.mark.parametrize("name", OPENS)
def test_opening_it_that_fails_leaves_nothing(world, started, name):
    _, ours = started(world)
    driver, theirs = started(world)
    with made_by(ours) as memory:
        before = state(world.devices[0])
        call = 2 if name == "cuMemMap" else 1
        driver.fail(name, CUresult.CUDA_ERROR_LAUNCH_FAILED, call)
        other = SharedMemory(theirs, SIZE)
        with pytest.raises(DeviceUnavailable, match="CUDA_ERROR_LAUNCH_FAILED"):
            other.open(memory.fd)
        driver.fails.clear()
        other.give_back()
        assert driver.has_nothing
        assert state(world.devices[0]) == before


@pytest.mark.parametrize("name", GIVES_BACK)
def test_what_the_driver_does_not_take_back_can_be_given_back_again(world, started, name):
    """And no step is made twice: the driver would not stand that."""
    driver, ours = started(world)
    before = state(world.devices[0])
    memory = SharedMemory(ours, SIZE)
    memory.make()
    driver.fail(name, CUresult.CUDA_ERROR_UNKNOWN)
    for _ in range(2):
        with pytest.raises(DeviceUnavailable, match=f"{name}: CUDA_ERROR_UNKNOWN"):
            memory.give_back()
    assert world.devices[0].free_bytes == before[0] - SIZE
    assert memory.fd == -1, "an fd that is not needed is not kept for it"
    driver.fails.clear()
    memory.give_back()
    assert driver.has_nothing and not driver.stack
    assert state(world.devices[0]) == before


def each_place(prepare) -> Iterator[tuple[str, str, str]]:
    """Interrupt what `prepare` gives at each point, and yield after each."""
    number = 0
    while (place := interrupted(number := number + 1, prepare())) is not None:
        yield place


def test_an_interrupt_anywhere_loses_nothing_and_gives_nothing_back_twice(world, started):
    """In making, opening and giving back; after it the rest is given back."""
    _, ours = started(world)
    driver, theirs = started(world)
    first = state(world.devices[0])
    places = set()
    with made_by(ours) as source:
        before = state(world.devices[0])
        for what in ("make", "open", "give back"):
            memory = SharedMemory(theirs, SIZE)

            def prepare(what: str = what):
                nonlocal memory
                memory.give_back()
                memory = SharedMemory(theirs, SIZE)
                if what == "give back":
                    memory.make()
                    return memory.give_back
                return memory.make if what == "make" else functools.partial(memory.open, source.fd)

            for place in each_place(prepare):
                places.add(place)
                memory.give_back()
                assert driver.has_nothing, place
                assert state(world.devices[0]) == before, place
            memory.give_back()
    assert state(world.devices[0]) == first
    assert ("cuda_driver.py", "make", "extend") in places


# --- what it is given ---------------------------------------------------------------------------


def refused(how: Sharing, fd: int, size_bytes: int = SIZE) -> str:
    memory = SharedMemory(how, size_bytes)
    with pytest.raises(SegmentRefused) as caught:
        memory.open(fd)
    memory.give_back()
    return str(caught.value)


def test_an_fd_that_is_of_no_device_is_refused(world, started):
    driver, ours = started(world)
    with memfd(some_bytes(64)) as file, open("/dev/null") as null:
        for fd in (file, null.fileno()):
            said = refused(ours, fd)
            assert "cuda:0 is none (cuMemImportFromShareableHandle: CUDA_ERROR_INVALID" in said
    assert driver.has_nothing


@pytest.mark.parametrize("size_bytes", [SIZE - GRANULE, SIZE + GRANULE])
def test_memory_of_another_size_is_refused(world, started, size_bytes):
    """Also if it is larger, which the driver does not mind."""
    _, ours = started(world)
    driver, theirs = started(world)
    with made_by(ours, size_bytes) as memory:
        assert ("larger" in refused(theirs, memory.fd)) is (size_bytes > SIZE)
        assert driver.has_nothing


@pytest.mark.parametrize("visible", [(0, 1), (0,)])
def test_memory_of_another_device_is_refused(world, started, visible):
    """Whether this process sees that device, and could reach it, or not."""
    _, ours = started(world, index=1)
    driver, theirs = started(world, visible)
    with made_by(ours) as memory:
        said = refused(theirs, memory.fd)
        assert ("cuda:1, and not of cuda:0" in said) is (len(visible) == 2)
        assert driver.has_nothing


def test_one_device_has_other_indexes_in_other_processes(world, started):
    """In containers, say: whoever opens memory does so by the index that he knows it by."""
    _, ours = started(world, (0, 1), index=0)
    driver, theirs = started(world, (1, 0), index=1)
    with made_by(ours) as memory:
        write(memory, b"weights")
        other = SharedMemory(theirs, SIZE)
        other.open(memory.fd)
        assert read(other, 7) == b"weights"
        other.give_back()
        assert driver.has_nothing


def test_more_than_there_is_is_refused_with_the_facts(world, started):
    _, ours = started(world)
    device = world.devices[0]
    memory = SharedMemory(ours, device.total_bytes + GRANULE)
    with pytest.raises(DeviceOutOfMemory, match=r"64\.0 MiB are free") as caught:
        memory.make()
    assert caught.value.needed_bytes == device.total_bytes + GRANULE
    assert caught.value.free_bytes == device.total_bytes


def test_a_device_that_is_gone_is_unavailable(world, started):
    """After a reset, or when it was taken out; also for who opens memory."""
    _, ours = started(world)
    driver, theirs = started(world)
    with made_by(ours) as source:
        driver.dead = True
        for call in (SharedMemory.make, functools.partial(SharedMemory.open, fd=source.fd)):
            with pytest.raises(DeviceUnavailable, match=r"cuda:0: .*CONTEXT_IS_DESTROYED"):
                call(SharedMemory(theirs, SIZE))


def test_threads_have_the_devices_context_in_our_calls_and_their_own_after(world, started):
    driver, ours = started(world, index=1)
    driver.stack.append(0)
    stacks = []

    def use() -> None:
        with made_by(ours):
            stacks.append(list(driver.stack))

    for thread in [threading.Thread(target=use) for _ in range(4)]:
        thread.start()
        thread.join()
    with made_by(ours):
        assert driver.stack == [0]
    assert stacks == [[]] * 4
    driver.stack.clear()


# --- whether it can be --------------------------------------------------------------------------


class Lacks:
    """A package that finds no library of the driver."""

    def cuInit(self, flags: int):  # noqa: N802
        raise RuntimeError("libcuda.so.1 is not there\nInstall it")


def why(monkeypatch, driver: object) -> str:
    monkeypatch.setattr(cuda_memory, "bindings", lambda: driver)
    with pytest.raises(DeviceUnavailable) as caught:
        sharing(0, "cuda:0")
    if isinstance(driver, FakeDriver):
        driver.fails.clear()
        assert driver.has_nothing
        driver.end()
    return str(caught.value)


def test_a_package_that_is_missing_is_the_reason_and_how_to_get_it_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(DeviceUnavailable) as caught:
        sharing(0, "cuda:0")
    assert "cuda-bindings is missing" in str(caught.value)
    assert "pip install 'shm-weight-cache[cuda]'" in str(caught.value)


def test_a_driver_that_is_missing_is_the_reason(monkeypatch):
    said = why(monkeypatch, Lacks())
    assert said.startswith("cuda:0: cuInit: libcuda.so.1 is not there (")


@pytest.mark.parametrize(("attribute", "lacks"), [(102, "virtual memory"), (103, "as an fd")])
def test_a_device_that_cannot_is_the_reason(world, monkeypatch, attribute, lacks):
    world.devices[0].attributes[attribute] = 0
    said = why(monkeypatch, FakeDriver(world))
    assert said.startswith("this device, or its driver, ") and lacks in said


@pytest.mark.parametrize("name", [*MAKES[2:], "cuMemImportFromShareableHandle"])
@pytest.mark.parametrize("code", ["NOT_PERMITTED", "OPERATING_SYSTEM"])
def test_what_forbids_one_of_the_calls_is_the_reason(world, monkeypatch, name, code):
    """That the device can do it, by its attributes, is only its word."""
    driver, before = FakeDriver(world), state(world.devices[0])
    driver.fail(name, CUresult[f"CUDA_ERROR_{code}"])
    said = why(monkeypatch, driver)
    assert "a container may forbid" in said and f"{name}: CUDA_ERROR_{code}" in said
    assert state(world.devices[0]) == before


def test_a_driver_that_maps_more_than_there_is_is_not_trusted(world, monkeypatch):
    """Nobody could tell how large what he opens is."""
    driver = FakeDriver(world)
    driver.larger_allowed = True
    assert "larger than" in why(monkeypatch, driver)


def test_a_device_without_a_free_granule_says_so(world, monkeypatch):
    world.devices[0].total_bytes = 0
    assert "not one granule is free" in why(monkeypatch, FakeDriver(world))


# --- the package itself -------------------------------------------------------------------------


def test_the_package_has_what_is_asked_of_it():
    """Its names, its structures as they are filled, its constants as the fake has them."""
    names = pytest.importorskip("cuda.bindings.driver")
    for name in [name for name in vars(FakeDriver) if name.startswith("cu")]:
        assert callable(getattr(names, name)), name
    for group in [name for name in vars(FakeDriver) if name.startswith("CU")]:
        fake = getattr(FakeDriver, group)
        constants = fake.__members__ if hasattr(fake, "__members__") else vars(fake)
        for name, value in constants.items():
            if name.startswith("CU"):
                assert getattr(getattr(names, group), name) == value, name
    assert set(cuda_driver._FAULTS_OF_MEMORY) <= set(names.CUresult.__members__)
