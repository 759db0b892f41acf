"""Maps of segments: where they lie, whom an edit reaches, and how they and their leases end."""

import copy
import ctypes
import gc
import os
import random
import resource
import subprocess
import sys
import threading
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch

from gpu_worker import mapping
from gpu_worker.mapping import MappingTable
from gpu_worker.tensors import tensors
from shm_store import segment
from shm_store.errors import ResourceError, SegmentRefused
from shm_store.keys import GenerationId, LeaseId
from shm_store.layout import HUGE_PAGE_BYTES, PAGE_BYTES
from tests.gpu_worker.sealed import GEN, KEY, mapped, maps_of, seal


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def reserved_bytes() -> int:
    """Return the address space that this process has reserved without access."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access = line.split()[:2]
        if access == "---p":
            start, end = (int(part, 16) for part in span.split("-"))
            total += end - start
    return total


def same_map(one, other) -> bool:
    """Each grant is handed out as an object of its own."""
    return one is not other and ctypes.addressof(one) == ctypes.addressof(other)


class Keeper:
    """Does by hand what the keeper thread does."""

    def __init__(self) -> None:
        self.ended: SimpleQueue[mapping.Mapping] = SimpleQueue()
        self.table = MappingTable(self.ended)

    def grant(self, lease: int, fd: int, wanted: bool = True) -> mapping.Buffer | None:
        """Grant a duplicate of `fd`, and see it consumed: kept by a new map, else closed."""
        granted_fd = os.dup(fd)
        before = self.table._mappings.get(GEN)
        try:
            return self.table.granted(GEN, LeaseId(lease), granted_fd, wanted)
        finally:
            made = self.table._mappings.get(GEN)
            kept = made is not before and made is not None and made.fd == granted_fd
            assert is_open(granted_fd) == kept

    def release(self) -> list[int]:
        """Unmap everything that has ended; return the leases released."""
        released: list[int] = []
        while not self.ended.empty():
            released.append(end(self.table, self.ended.get()))
        return released


def end(table: MappingTable, mapping: mapping.Mapping) -> int:
    """What the client's keeper does with a mapping; returns the lease it releases."""
    table.unmap(mapping)
    return table.forget(mapping)


@pytest.fixture
def keeper():
    keeper = Keeper()
    yield keeper
    keeper.release()


@pytest.fixture
def fd():
    fd = seal({"a": torch.arange(700_000, dtype=torch.float32), "b": torch.ones(3, 5)})
    yield fd
    os.close(fd)


# --- one map ------------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [10, 700_000])
def test_a_map_is_private_writable_and_aligned_for_huge_pages(elements):
    """The bytes begin at a 2 MiB boundary, and nothing of the reservation around them is left."""
    fd = seal({"a": torch.zeros(elements)})
    before = reserved_bytes()
    with mapped(os.dup(fd)) as buffer:
        (line,) = maps_of(GEN)
        span, access = line.split()[:2]
        start, end = (int(part, 16) for part in span.split("-"))
        assert access == "rw-p"
        assert start == ctypes.addressof(buffer)
        assert start % HUGE_PAGE_BYTES == 0
        assert end - start == len(buffer) == os.fstat(fd).st_size
        assert reserved_bytes() == before
    assert maps_of(GEN) == []
    os.close(fd)


def test_a_map_costs_no_committed_memory(fd):
    """The kernel does not reserve for pages that may never be written to."""
    with mapped(os.dup(fd)) as buffer:
        text = Path("/proc/self/smaps").read_text()
        start = text.index(f"{ctypes.addressof(buffer):x}-")
        flags = next(line for line in text[start:].splitlines() if line.startswith("VmFlags"))
        assert "nr" in flags.split()


def test_an_edit_in_place_reaches_neither_a_second_map_nor_the_segment(fd):
    with mapped(os.dup(fd)) as mine, mapped(os.dup(fd)) as other:
        before = os.pread(fd, os.fstat(fd).st_size, 0)
        a = tensors(mine)["a"]
        a.mul_(-1)
        assert a[3] == -3
        assert tensors(other)["a"][3] == 3
        assert os.pread(fd, os.fstat(fd).st_size, 0) == before


def test_an_unsealed_segment_is_not_mapped():
    """Its owner could shrink it under the tensors, which would end the process."""
    fd = segment.create(GEN)
    os.posix_fallocate(fd, 0, 8192)
    with pytest.raises(SegmentRefused, match="not sealed"):
        mapping.map_segment(fd, 8192)
    os.close(fd)
    assert maps_of(GEN) == []


@pytest.mark.parametrize("size_bytes", [0, 4096, 1 << 40])
def test_a_segment_of_another_size_is_not_mapped(fd, size_bytes):
    with pytest.raises(SegmentRefused, match="bytes"):
        mapping.map_segment(fd, size_bytes)
    assert maps_of(GEN) == []


def test_what_is_no_memfd_is_refused(fd):
    """Neither a pipe, nor an fd that only names a segment and cannot read it."""
    reading, writing = os.pipe()
    naming = os.open(f"/proc/self/fd/{fd}", os.O_PATH)
    for wrong in (reading, naming):
        with pytest.raises(SegmentRefused):
            mapping.map_segment(wrong, os.fstat(fd).st_size)
    for each in (reading, writing, naming):
        os.close(each)


def test_without_address_space_a_map_is_refused_and_leaves_nothing(fd, keeper):
    status = Path("/proc/self/status").read_text()
    virtual_bytes = int(status.split("VmSize:")[1].split()[0]) * 1024
    limits = resource.getrlimit(resource.RLIMIT_AS)
    before = reserved_bytes()
    resource.setrlimit(resource.RLIMIT_AS, (virtual_bytes + 1024 * 1024, limits[1]))
    try:
        with pytest.raises(ResourceError, match="address space") as caught:
            keeper.grant(1, fd)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert "ulimit -v" in caught.value.remedy
    assert maps_of(GEN) == []
    assert reserved_bytes() == before
    assert len(keeper.table) == 0


def test_a_failed_second_step_gives_the_reservation_back(fd, monkeypatch):
    before = reserved_bytes()
    real = mapping._map

    def fail_with_fd(address, size_bytes, protection, flags, file):
        return real(address, size_bytes, protection, flags, 1 << 20 if file >= 0 else file)

    monkeypatch.setattr(mapping, "_map", fail_with_fd)
    with pytest.raises(SegmentRefused, match="cannot be mapped"):
        mapping.map_segment(fd, os.fstat(fd).st_size)
    assert reserved_bytes() == before


# --- the table ----------------------------------------------------------------------------------


def test_a_grant_is_mapped_and_ends_with_its_last_tensor(keeper, fd):
    buffer = keeper.grant(7, fd)
    assert buffer is not None
    state = tensors(buffer)
    del buffer
    assert keeper.release() == []
    assert len(maps_of(GEN)) == 1
    a = state.pop("a")
    state.clear()
    assert keeper.release() == []
    assert float(a[5]) == 5.0
    del a
    assert len(maps_of(GEN)) == 1, "a finalizer must not unmap"
    assert len(keeper.table) == 1
    mapping_ended = keeper.ended.get()
    assert (mapping_ended.gen, mapping_ended.key) == (GEN, KEY)
    assert end(keeper.table, mapping_ended) == 7
    assert maps_of(GEN) == []
    assert len(keeper.table) == 0


def test_a_second_grant_goes_to_the_mapping_that_lives(keeper, fd):
    """Rule 3: one mapping per generation and process; it takes the new lease id."""
    first = keeper.grant(7, fd)
    assert same_map(keeper.grant(9, fd), first)
    assert same_map(keeper.grant(12, fd, wanted=False), first)
    assert len(maps_of(GEN)) == 1
    del first
    assert keeper.release() == [12]


def test_an_unwanted_grant_of_what_is_not_mapped_is_the_callers_to_release(keeper, fd):
    assert keeper.grant(7, fd, wanted=False) is None
    assert maps_of(GEN) == []
    assert keeper.release() == []


def test_a_grant_after_the_last_tensor_outlives_the_bytes_still_mapped(keeper, fd):
    """The lease may end only once the old map is gone too, though nobody wants it."""
    assert keeper.grant(7, fd) is not None
    assert len(maps_of(GEN)) == 1
    keeper.grant(9, fd, wanted=False)
    assert len(maps_of(GEN)) == 2
    assert end(keeper.table, keeper.ended.get()) == 7
    assert len(maps_of(GEN)) == 1
    assert keeper.release() == [9]
    assert maps_of(GEN) == []


def test_unmapping_the_old_map_does_not_forget_the_new_one(keeper, fd):
    keeper.grant(7, fd)
    new = keeper.grant(9, fd)
    assert keeper.release() == [7]
    assert same_map(keeper.grant(11, fd, wanted=False), new)
    del new
    assert keeper.release() == [11]
    assert keeper.grant(13, fd, wanted=False) is None


def test_a_segment_of_another_generation_is_refused(keeper):
    other = seal({"a": torch.ones(3)}, gen="1-2")
    with pytest.raises(SegmentRefused, match="says it is 1-2"):
        keeper.grant(7, other)
    assert maps_of("1-2") == []
    os.close(other)


def test_a_grant_without_a_segment_is_refused(keeper, fd):
    naming = os.open(f"/proc/self/fd/{fd}", os.O_PATH)
    with pytest.raises(SegmentRefused):
        keeper.grant(7, naming)
    os.close(naming)


def test_a_collection_inside_the_table_does_not_deadlock(keeper, fd, monkeypatch):
    """Finalizers run anywhere, so they only enqueue."""
    buffer = keeper.grant(7, fd)
    cycle: list[object] = [buffer]
    cycle.append(cycle)
    del buffer, cycle
    real = segment.read_preamble

    def collect_first(granted_fd):
        gc.collect()
        return real(granted_fd)

    other = seal({"a": torch.ones(3)}, gen="1-2")
    monkeypatch.setattr(segment, "read_preamble", collect_first)
    buffer = keeper.table.granted(GenerationId("1-2"), LeaseId(9), other, True)
    assert keeper.release() == [7]
    del buffer
    assert keeper.release() == [9]


def test_leases_end_exactly_when_nothing_is_mapped_whatever_the_threads_do(keeper, fd):
    """A reader grants and drops while a keeper unmaps; the ledger's rule decides what is leased."""
    leased: dict[GenerationId, int] = {}
    books = threading.Lock()
    seed = random.randrange(1 << 32)
    draw = random.Random(seed)

    def release(lease):
        with books:
            if leased.get(GEN) == lease:
                del leased[GEN]
                # Nothing may be mapped once the lease ended; a newer grant would have replaced it.
                assert maps_of(GEN) == [], f"seed {seed}"

    def keep():
        while (ended := keeper.ended.get()) is not None:
            release(end(keeper.table, ended))

    thread = threading.Thread(target=keep)
    thread.start()
    kept = None
    for lease in range(1, 301):
        with books:
            leased[GEN] = lease
            buffer = keeper.grant(lease, fd, wanted=draw.random() < 0.6)
        if buffer is None:
            release(lease)
        elif draw.random() < 0.5:
            kept = buffer
        else:
            kept = None
        del buffer
    del kept
    keeper.ended.put(None)
    thread.join()
    assert leased == {}, f"seed {seed}"
    assert maps_of(GEN) == []


# --- what keeps a map ---------------------------------------------------------------------------

HOLDERS = {
    "tensor": lambda state: state["a"],
    "view": lambda state: state["a"][10:20].view(2, 5).t(),
    "numpy": lambda state: state["a"].numpy()[3:],
    "parameter": lambda state: torch.nn.Parameter(state["b"]),
    "detached": lambda state: torch.nn.Parameter(state["b"]).detach(),
    "storage": lambda state: state["b"].untyped_storage(),
    "module": lambda state: torch.nn.Sequential(
        torch.nn.ParameterList([torch.nn.Parameter(state["b"])])
    ),
    "autograd": lambda state: (torch.ones(5, requires_grad=True) * state["b"]).sum().grad_fn,
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_a_map_lives_exactly_as_long_as_what_uses_it(keeper, fd, kind):
    buffer = keeper.grant(7, fd)
    state = tensors(buffer)
    holder = HOLDERS[kind](state)
    del buffer
    state.clear()
    assert keeper.ended.empty()
    del holder
    assert keeper.release() == [7]


def test_copies_do_not_keep_a_map(keeper, fd):
    buffer = keeper.grant(7, fd)
    state = tensors(buffer)
    copies = [copy.deepcopy(state["b"]), state["b"].clone(), torch.nn.Parameter(state["b"] * 1)]
    del buffer
    state.clear()
    assert keeper.release() == [7]
    assert copies[0].sum() == 15


# --- the ends of processes ----------------------------------------------------------------------


def test_a_large_map_is_unmapped_in_steps(keeper, fd, monkeypatch):
    steps = []
    real = mapping._reserve

    def note(address, size_bytes):
        steps.append((address, size_bytes))
        return real(address, size_bytes)

    buffer = keeper.grant(7, fd)
    address, size_bytes = ctypes.addressof(buffer), len(buffer)
    del buffer
    monkeypatch.setattr(mapping, "UNMAP_STEP_BYTES", 1024 * 1024)
    monkeypatch.setattr(mapping, "_reserve", note)
    assert keeper.release() == [7]
    assert max(size for _, size in steps) == 1024 * 1024
    assert [start for start, _ in steps] == list(range(address, address + size_bytes, 1024 * 1024))
    assert sum(size for _, size in steps) == size_bytes


def test_the_end_of_a_buffer_runs_no_python_code(keeper, fd):
    """An interrupt could come into that, and the lease would be lost for the process's life."""
    buffer = keeper.grant(7, fd)
    calls = []
    sys.setprofile(lambda frame, event, argument: calls.append((event, frame.f_code.co_name)))
    try:
        del buffer
    finally:
        sys.setprofile(None)
    assert [name for event, name in calls if event == "call"] == []
    assert keeper.release() == [7]


def test_an_unmapping_that_a_fork_cut_short_is_done_again(keeper, fd, monkeypatch):
    """Neither what was done is undone, nor what another thread has mapped there since."""
    real, failing = mapping._reserve, [False, True]

    def reserve(address, size_bytes):
        if failing.pop(0):
            raise KeyboardInterrupt
        return real(address, size_bytes)

    monkeypatch.setattr(mapping, "UNMAP_STEP_BYTES", 1024 * 1024)
    keeper.grant(7, fd)
    ended = keeper.ended.get()
    monkeypatch.setattr(mapping, "_reserve", reserve)
    with pytest.raises(KeyboardInterrupt):
        keeper.table.unmap(ended)
    assert len(maps_of(GEN)) == 1
    monkeypatch.setattr(mapping, "_reserve", real)
    keeper.table.unmap(ended)
    assert not maps_of(GEN)
    flags = mapping._MAP_PRIVATE | mapping._MAP_ANONYMOUS | mapping._MAP_FIXED
    mapping._map(ended.address, PAGE_BYTES, mapping._PROT_READ_WRITE, flags, -1)
    ctypes.memset(ended.address, 5, 1)
    assert end(keeper.table, ended) == 7
    assert ctypes.string_at(ended.address, 1) == b"\5"
    mapping.unmap_range(ended.address, PAGE_BYTES)


SCRIPT = """
import atexit

def check():
    assert ended.empty(), "a live tensor was given up"
    print(int(state["a"].sum()))

atexit.register(check)  # so it runs after every finalizer that runs at exit

import torch
from queue import SimpleQueue
from gpu_worker import mapping
from gpu_worker.tensors import tensors
from tests.gpu_worker.sealed import seal

ended = SimpleQueue()
table = mapping.MappingTable(ended)
state = tensors(table.granted("1-1", 1, seal({"a": torch.arange(10)}), True))
"""


@pytest.mark.process
def test_interpreter_exit_gives_up_no_live_tensor():
    """Its bytes go with the process; unmapping them before would be a SIGSEGV."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
        env=os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "45\n", "")
