"""The simulated device: what it allocates, copies and refuses, how its blocks end, what can fail.

Beside what the device says of its memory stands what the kernel says.
"""

import contextlib
import ctypes
import functools
import gc
import os
import random
import threading
import time
from queue import SimpleQueue

import pytest
import torch

from gpu_worker import mapping, sim_device
from gpu_worker.block import Piece
from gpu_worker.device import device_named
from gpu_worker.sim_device import Faults, SimDevice
from shm_store.errors import (
    ArgumentRefused,
    DeviceOutOfMemory,
    DeviceUnavailable,
    DeviceUnknown,
    InUse,
    SegmentRefused,
)
from shm_store.memfds import kernel_bytes
from tests.gpu_worker.blocks import PAGE, from_tensor, memfd, script, some_bytes, told

MIB = 1 << 20
OWNER = "0000000000000001-00000007"
INDEX = iter(range(100, 1000))


@pytest.fixture
def device():
    """A device that nobody else has, of 64 pages. All its memory is free in the end."""
    device = SimDevice(next(INDEX), 64 * PAGE)
    yield device
    device.tell(Faults())
    device.release_cached()
    if device.allocated_bytes():  # an error that was caught keeps frames
        gc.collect()
        device.release_cached()
    assert taken(device) == (0, 0)


def taken(device: SimDevice) -> tuple[int, int]:
    """Return what the device says it has allocated, and what the kernel says."""
    return device.allocated_bytes(), kernel_bytes(device.name, os.getpid())


@pytest.fixture
def block(device):
    block = device.allocate(8 * PAGE, OWNER)
    yield block
    with contextlib.suppress(InUse):
        block.free()


def content(block) -> torch.Tensor:
    return block.view(0, block.size_bytes).clone()


# --- allocation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [0, 1, PAGE, PAGE + 1, 5 * PAGE])
def test_a_block_takes_what_is_charged_for_it(device, size_bytes):
    """Whole pages, in the books and in the kernel, from when it is there to when it was freed."""
    block = device.allocate(size_bytes, OWNER)
    charged_bytes = device.charged_bytes(size_bytes)
    assert charged_bytes % PAGE == 0 and charged_bytes >= max(size_bytes, PAGE)
    assert block.size_bytes == block.memory.size_bytes == charged_bytes
    assert taken(device) == (charged_bytes, charged_bytes)
    block.free()
    assert taken(device) == (0, 0)


def test_the_kernel_shows_whose_a_block_is(device, block):
    """By device and generation, for whoever looks into /proc."""
    assert os.readlink(f"/proc/self/fd/{block._pages.fd}") == (
        f"/memfd:weight-cache:{device.name}:{OWNER} (deleted)"
    )


def test_an_owner_with_a_long_name_gets_a_block(device):
    """The kernel refuses a name of more than 249 bytes."""
    device.allocate(PAGE, "x" * 300).free()


def test_the_device_is_used_up_to_its_last_page_and_not_beyond(device):
    """A refusal takes nothing, and says what was needed and what is free."""
    blocks = [device.allocate(32 * PAGE, "1-1"), device.allocate(30 * PAGE, "1-2")]
    with pytest.raises(DeviceOutOfMemory) as caught:
        device.allocate(2 * PAGE + 1, "1-3")
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (3 * PAGE, 2 * PAGE)
    assert taken(device) == (62 * PAGE, 62 * PAGE)
    blocks.append(device.allocate(2 * PAGE, "1-4"))
    assert taken(device) == (64 * PAGE, 64 * PAGE)
    for block in blocks:
        block.free()


def test_a_host_without_memory_is_a_device_without_memory(device, monkeypatch):
    """Nothing stays allocated, and no fd."""

    def full(fd, start, size_bytes):
        raise OSError(28, "No space left on device")

    fds = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DeviceOutOfMemory, match="the host"):
        device.allocate(PAGE, OWNER)
    assert len(os.listdir("/proc/self/fd")) == len(fds)
    assert taken(device) == (0, 0)


def test_nobody_can_change_the_size_of_a_block(device, block):
    """A page that is not there any more would end the process with SIGBUS."""
    with pytest.raises(PermissionError):
        os.ftruncate(block._pages.fd, 0)


# --- filling and viewing ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memfd", "file", "tensor"])
@pytest.mark.parametrize(
    ("start", "offset_bytes", "size_bytes"),
    [(0, 0, 8 * PAGE), (0, 0, 1), (64, 4032, 2 * PAGE), (1, 3, PAGE - 1), (PAGE, PAGE, 0)],
)
def test_what_is_filled_is_there_to_the_bit_and_nothing_else(
    block, tmp_path, kind, start, offset_bytes, size_bytes
):
    """From a segment, a file of another file system, or memory; at any offset of both."""
    source = some_bytes(9 * PAGE)
    expected = torch.zeros(8 * PAGE, dtype=torch.uint8)
    expected[offset_bytes : offset_bytes + size_bytes] = source[start : start + size_bytes]
    with contextlib.ExitStack() as stack:
        if kind == "tensor":
            piece = Piece(source[start : start + size_bytes], None, 0, size_bytes)
        elif kind == "memfd":
            piece = Piece(None, stack.enter_context(memfd(source)), start, size_bytes)
        else:
            (tmp_path / "w").write_bytes(bytes(source.tolist()))
            file = stack.enter_context((tmp_path / "w").open("rb"))
            piece = Piece(None, file.fileno(), start, size_bytes)
        block.fill(offset_bytes, piece)
        source.zero_()
    block.finish()
    assert torch.equal(content(block), expected)


def test_what_was_filled_is_in_the_map(block):
    """The first use of a model on a device waits for no page."""
    block.fill(100, from_tensor(some_bytes(5 * PAGE)))
    start = f"{block._pages.address:x}-"
    with open("/proc/self/smaps") as file:
        lines = iter(file.read().partition("\n" + start)[2].splitlines())
    kib = next(line.split()[1] for line in lines if line.startswith("Rss:"))
    assert int(kib) * 1024 >= 6 * PAGE


def test_a_file_is_read_rather_than_a_tensor(block):
    """So that a segment need not be mapped, or its map not be touched."""
    other = torch.zeros(PAGE, dtype=torch.uint8)
    with memfd(some_bytes(PAGE)) as fd:
        block.fill(0, Piece(other, fd, 0, PAGE))
    assert torch.equal(content(block)[:PAGE], some_bytes(PAGE))


@pytest.mark.parametrize("kind", ["memfd", "file"])
def test_a_source_that_ends_early_is_refused(block, tmp_path, kind):
    with contextlib.ExitStack() as stack:
        if kind == "memfd":
            fd = stack.enter_context(memfd(some_bytes(PAGE)))
        else:
            (tmp_path / "w").write_bytes(bytes(PAGE))
            fd = stack.enter_context((tmp_path / "w").open("rb")).fileno()
        with pytest.raises(SegmentRefused, match=str(PAGE)):
            block.fill(0, Piece(None, fd, 0, PAGE + 1))


@pytest.mark.parametrize(("offset_bytes", "size_bytes"), [(-1, 1), (0, -1), (0, 9), (8, 1), (9, 0)])
def test_nothing_reaches_out_of_a_block(device, block, offset_bytes, size_bytes):
    """It raises, and no byte of it, nor the memory it takes, has changed."""
    offset_bytes, size_bytes = offset_bytes * PAGE, size_bytes * PAGE
    with pytest.raises(ArgumentRefused, match="out of a block"):
        block.view(offset_bytes, size_bytes)
    with memfd(some_bytes(9 * PAGE)) as fd, pytest.raises(ArgumentRefused, match="out of a block"):
        block.fill(offset_bytes, Piece(None, fd, 0, size_bytes))
    assert not content(block).any()
    assert taken(device) == (8 * PAGE, 8 * PAGE)


def test_a_view_is_a_storage_of_its_own_over_the_same_bytes(block):
    """As alias groups are on the host: what is saved or resized is this group."""
    block.fill(0, from_tensor(some_bytes(8 * PAGE)))
    one, other = block.view(64, 100), block.view(64, 200)
    assert one.untyped_storage().nbytes() == 100
    assert one.data_ptr() == other.data_ptr()
    assert one.untyped_storage()._cdata != other.untyped_storage()._cdata
    one.fill_(7)
    assert torch.equal(other[:100], torch.full((100,), 7, dtype=torch.uint8))
    assert torch.equal(other[100:], some_bytes(8 * PAGE)[164:264])
    assert one.view(torch.float32).shape == (25,)


def test_a_view_of_no_bytes_is_a_tensor(block):
    assert block.view(8 * PAGE, 0).shape == (0,)
    assert block.view(0, 0).dtype == torch.uint8


def test_a_view_that_is_made_in_inference_mode_is_none_of_its_tensors(block):
    """Whoever gets it later could not save it for a backward pass."""
    with torch.inference_mode():
        view, nothing = block.view(0, 64), block.view(0, 0)
    assert not view.is_inference() and not nothing.is_inference()


# --- how a block ends ---------------------------------------------------------------------------


@pytest.fixture
def ended():
    return SimpleQueue()


def test_the_end_is_told_once_when_the_last_tensor_is_gone(device, ended):
    """Not before: the block, a view, a view of a view, and a parameter each keep it."""
    block = device.allocate(PAGE, OWNER)
    memory = block.memory
    block.watch(functools.partial(ended.put, "gone"))
    view = block.view(0, 64)
    parameter = torch.nn.Parameter(block.view(64, 64).view(torch.float32), requires_grad=False)
    del block
    part = view[3:5]
    del view
    assert told(ended) == []
    del part
    assert told(ended) == [] and memory.in_use
    del parameter
    assert told(ended) == ["gone"] and not memory.in_use
    assert taken(device) == (PAGE, PAGE)  # it is the keeper's to free
    memory.free()
    assert taken(device) == (0, 0)
    assert told(ended) == []


def test_the_block_itself_keeps_its_memory(device, ended):
    block = device.allocate(PAGE, OWNER)
    memory = block.memory
    block.watch(functools.partial(ended.put, "gone"))
    block.view(0, 8)
    assert told(ended) == []
    del block
    assert told(ended) == ["gone"]
    memory.free()


def test_the_end_is_told_in_whatever_thread_it_comes(device, ended):
    block = device.allocate(PAGE, OWNER)
    memory = block.memory
    block.watch(functools.partial(ended.put, "gone"))
    kept = [block.view(0, 8)]
    del block
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()
    assert told(ended) == ["gone"]
    memory.free()


def test_the_end_is_told_when_a_cycle_is_collected(device, ended):
    block = device.allocate(PAGE, OWNER)
    memory = block.memory
    block.watch(functools.partial(ended.put, "gone"))
    cycle = {"view": block.view(0, 8), "block": block}
    cycle["self"] = cycle
    del block, cycle
    gc.collect()
    assert told(ended) == ["gone"]
    memory.free()


def test_only_the_last_who_watches_is_told(device, ended):
    """A forked child has other queues, and asks for what it inherited."""
    block = device.allocate(PAGE, OWNER)
    memory = block.memory
    block.watch(functools.partial(ended.put, "first"))
    assert memory.watch(functools.partial(ended.put, "second"))
    del block
    assert told(ended) == ["second"]
    assert not memory.watch(functools.partial(ended.put, "too late"))
    memory.free()
    assert told(ended) == []


def test_memory_is_not_freed_under_a_live_tensor(device, block):
    """The process would end at the next touch."""
    block.fill(0, from_tensor(some_bytes(8 * PAGE)))
    view = block.view(0, 8 * PAGE)
    with pytest.raises(AssertionError):
        block.memory.free()
    assert torch.equal(view, some_bytes(8 * PAGE))
    assert taken(device) == (8 * PAGE, 8 * PAGE)


def test_a_block_that_is_freed_by_hand_is_of_no_use_and_nobody_is_told(device, block, ended):
    block.watch(functools.partial(ended.put, "gone"))
    block.free()
    assert taken(device) == (0, 0)
    for use in (
        lambda: block.view(0, 8),
        lambda: block.fill(0, from_tensor(some_bytes(8))),
        block.finish,
    ):
        with pytest.raises(ArgumentRefused, match="freed"):
            use()
    block.free()
    assert told(ended) == []


@pytest.mark.parametrize("watched", [True, False])
def test_a_block_is_not_freed_by_hand_while_a_tensor_over_it_is_left(device, ended, watched):
    """It is watched as before. What nobody watched the device frees later."""
    block = device.allocate(PAGE, OWNER)
    memory = block.memory
    if watched:
        block.watch(functools.partial(ended.put, "gone"))
    view = block.view(0, 8)
    with pytest.raises(InUse, match="tensor"):
        block.free()
    view.fill_(3)
    assert taken(device) == (PAGE, PAGE)
    del view
    assert told(ended) == (["gone"] if watched else [])
    if watched:
        memory.free()
    device.release_cached()
    assert taken(device) == (0, 0)


def test_freeing_twice_frees_nothing_of_others(device):
    """A child that was forked while its parent's keeper was at it does it again."""
    one = device.allocate(PAGE, OWNER)
    one.free()
    other = device.allocate(PAGE, OWNER)
    view = other.view(0, PAGE)
    one.memory.free()
    one.free()
    view.fill_(1)
    assert taken(device) == (PAGE, PAGE)
    del view
    other.free()


def test_a_block_that_is_freed_by_hand_is_not_freed_by_the_device_too(device, monkeypatch):
    """The second unmapping would hit what another thread has mapped there since."""
    begun, go_on, discarded = threading.Event(), threading.Event(), []

    def discard(address, size_bytes):
        discarded.append(address)
        begun.set()
        go_on.wait(20)

    block = device.allocate(PAGE, OWNER)
    with monkeypatch.context() as patch:
        patch.setattr(mapping, "discard", discard)
        freeing = threading.Thread(target=block.free)
        freeing.start()
        assert begun.wait(20)
        go_on.set()
        device.release_cached()
        freeing.join()
    assert len(discarded) == 1


def test_a_block_that_was_dropped_unwatched_is_freed_when_room_is_needed(device):
    """As by an interrupt, before anybody had noted it."""
    device.allocate(64 * PAGE, OWNER)
    assert taken(device) == (64 * PAGE, 64 * PAGE)
    device.allocate(64 * PAGE, OWNER)
    assert taken(device) == (64 * PAGE, 64 * PAGE)
    device.release_cached()
    assert taken(device) == (0, 0)


def test_a_block_that_is_watched_is_left_to_who_watches(device, ended):
    block = device.allocate(PAGE, OWNER)
    memory = block.memory
    block.watch(functools.partial(ended.put, "gone"))
    del block
    device.release_cached()
    assert taken(device) == (PAGE, PAGE)
    memory.free()


# --- what it is told to do wrong ----------------------------------------------------------------


def test_the_fill_that_was_to_fail_fails_and_no_other(device, block):
    """The block can be freed then, though the traceback holds it."""
    device.tell(Faults(fail_fill=3))
    piece = from_tensor(some_bytes(PAGE))
    block.fill(0, piece)
    block.fill(PAGE, piece)
    with pytest.raises(DeviceUnavailable, match="as it was told") as caught:
        block.fill(2 * PAGE, piece)
    block.fill(3 * PAGE, piece)
    assert torch.equal(content(block)[: 2 * PAGE], some_bytes(PAGE).repeat(2))
    assert not content(block)[2 * PAGE : 3 * PAGE].any()
    block.free()
    assert taken(device) == (0, 0)
    del caught


@pytest.mark.parametrize("kind", ["memfd", "file"])
def test_a_block_can_be_freed_while_the_error_of_its_fill_is_kept(device, tmp_path, kind):
    """A frame of the traceback that held the bytes would keep them from being freed."""
    block = device.allocate(2 * PAGE, OWNER)
    with contextlib.ExitStack() as stack:
        if kind == "memfd":
            fd = stack.enter_context(memfd(some_bytes(PAGE)))
        else:
            (tmp_path / "w").write_bytes(bytes(PAGE))
            fd = stack.enter_context((tmp_path / "w").open("rb")).fileno()
        with pytest.raises(SegmentRefused) as caught:
            block.fill(0, Piece(None, fd, 0, 2 * PAGE))
    block.free()
    assert taken(device) == (0, 0)
    del caught


def test_waiting_for_copies_can_fail(device, block):
    device.tell(Faults(fail_finish=1))
    with pytest.raises(DeviceUnavailable):
        block.finish()
    block.finish()


def test_memory_that_the_device_did_not_take_back_is_still_there_and_counted(device, block):
    device.tell(Faults(fail_free=1))
    with pytest.raises(DeviceUnavailable):
        block.free()
    assert taken(device) == (8 * PAGE, 8 * PAGE)
    block.memory.free()
    assert taken(device) == (0, 0)


def test_a_fragmented_device_has_room_and_no_block(device):
    device.tell(Faults(largest_block_bytes=8 * PAGE))
    with pytest.raises(DeviceOutOfMemory, match="pieces") as caught:
        device.allocate(8 * PAGE + 1, OWNER)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (9 * PAGE, 64 * PAGE)
    assert taken(device) == (0, 0)
    device.allocate(8 * PAGE, OWNER).free()


def test_a_slow_device_is_slow_until_it_is_let_go_on(device, block):
    """So a test can stand in the middle of a pass."""
    faults = Faults(slow_s=float("inf"))
    device.tell(faults)
    filling = threading.Thread(target=block.fill, args=(0, from_tensor(some_bytes(PAGE))))
    filling.start()
    assert faults.begun.wait(20)
    assert not content(block).any()
    assert filling.is_alive()
    faults.go_on.set()
    filling.join(20)
    assert torch.equal(content(block)[:PAGE], some_bytes(PAGE))


def test_a_slow_device_takes_its_time_for_each_pass(device, block):
    device.tell(Faults(slow_s=0.05))
    start_s = time.monotonic()
    for number in range(3):
        block.fill(number * PAGE, from_tensor(some_bytes(PAGE)))
    assert time.monotonic() - start_s >= 0.15


def test_a_device_is_told_by_its_name():
    device = device_named("sim:97")
    sim_device.tell("sim:97", Faults(largest_block_bytes=PAGE))
    with pytest.raises(DeviceOutOfMemory):
        device.allocate(2 * PAGE, OWNER)
    sim_device.tell("sim:97", Faults())
    device.allocate(2 * PAGE, OWNER).free()
    with pytest.raises(DeviceUnknown):
        sim_device.tell("cpu", Faults())


# --- many threads, and forked children ----------------------------------------------------------


def test_threads_never_have_more_than_there_is_and_leave_nothing(device):
    """Whenever all stand still, what the device says is what the kernel says."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    threads, rounds = 4, 25
    still = threading.Barrier(threads + 1, timeout=30)
    wrong: list[str] = []

    def use(number: int) -> None:
        lots = random.Random(seed + number)
        kept = []
        for _ in range(rounds):
            for _ in range(lots.randrange(1, 8)):
                size_bytes = lots.randrange(1, 40 * PAGE)
                try:
                    block = device.allocate(size_bytes, f"{number}")
                except DeviceOutOfMemory:
                    continue
                expected = some_bytes(size_bytes, lots.randrange(200))
                block.fill(0, from_tensor(expected))
                view = block.view(0, size_bytes)
                if not torch.equal(view, expected):
                    wrong.append(f"the bytes of thread {number}")
                del view
                match lots.randrange(4):
                    case 0:
                        kept = [block]
                    case 1:
                        pass  # dropped
                    case _:
                        block.free()
                del block
            still.wait()
            still.wait()
        assert kept is not None

    using = [threading.Thread(target=use, args=(number,)) for number in range(threads)]
    for thread in using:
        thread.start()
    for _ in range(rounds):
        still.wait()
        books, kernel = taken(device)
        if books != kernel or books > 64 * PAGE:
            wrong.append(f"{books} in the books, {kernel} in the kernel")
        still.wait()
    for thread in using:
        thread.join()
    assert wrong == []
    device.release_cached()
    assert taken(device) == (0, 0)


FORKS = """
import ctypes, functools, os, threading
from queue import SimpleQueue
import torch
from gpu_worker.block import Piece
from gpu_worker.sim_device import Faults, SimDevice
from shm_store.memfds import kernel_bytes

PAGE = 4096
device = SimDevice(os.getpid(), 16 * PAGE)  # no other process has it
block = device.allocate(4 * PAGE, "1-1")
block.fill(0, Piece(torch.full((PAGE,), 5, dtype=torch.uint8), None, 0, PAGE))
view, memory = block.view(0, PAGE), block.memory
memory.watch(lambda _: print("the parent's", flush=True))
held, forked = threading.Event(), threading.Event()

def hold():
    with device._lock:
        held.set()
        forked.wait()

threading.Thread(target=hold).start()
held.wait()
pid = os.fork()
if not pid:
    assert device.allocated_bytes() == 4 * PAGE == kernel_bytes(device.name, os.getpid())
    assert int(view.sum()) == 5 * PAGE
    block.fill(PAGE, Piece(torch.full((PAGE,), 6, dtype=torch.uint8), None, 0, PAGE))
    other = device.allocate(12 * PAGE, "1-2")
    other.free()
    ended = SimpleQueue()
    memory.watch(functools.partial(ended.put, "gone"))
    del block, view
    assert ended.get_nowait() == "gone"
    memory.free()
    assert device.allocated_bytes() == 0 == kernel_bytes(device.name, os.getpid())
    os._exit(0)
_, status = os.waitpid(pid, 0)
forked.set()
assert status == 0
assert kernel_bytes(device.name) == 4 * PAGE
assert int(block.view(PAGE, PAGE).sum()) == 6 * PAGE
assert int(view.sum()) == 5 * PAGE
memory.claim()
print("whole")
"""


@pytest.mark.process
def test_a_forked_child_has_the_blocks_and_its_parent_keeps_them():
    """It reads, fills, allocates and frees there; what it frees is still the parent's."""
    assert script(FORKS) == "whole\n"


def test_memory_that_a_child_frees_again_costs_it_nothing_else(device, block):
    """The parent's keeper may have been in the middle of it: some steps done, nothing noted."""
    pages = block._pages
    address, size_bytes = pages.address, pages.size_bytes
    mapping.discard(address, size_bytes)  # as far as the parent has got
    block.free()
    assert taken(device) == (0, 0)
    other = torch.frombuffer((ctypes.c_ubyte * PAGE)(), dtype=torch.uint8)
    block.memory._there.add(block.memory)  # nobody has noted that it was freed
    block.memory.free()
    assert not other.any()
