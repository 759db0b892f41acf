"""GPUs. What needs none runs everywhere; the rest is marked `gpu`, and runs where one is."""

import ctypes
import functools
import gc
import logging
import os
import weakref
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch

from gpu_worker import cuda_device, cuda_uploads
from gpu_worker.block import Piece
from gpu_worker.cuda_device import _driver, _Range, charged_bytes
from gpu_worker.cuda_uploads import Registration, Uploads
from gpu_worker.device import device_named
from shm_store.errors import DeviceOutOfMemory, DeviceUnavailable, DeviceUnknown, SegmentRefused
from tests.gpu_worker.blocks import PAGE, from_tensor, memfd, script, some_bytes, told
from tests.gpu_worker.noting import noted

MIB = 1 << 20


@pytest.fixture
def ended():
    return SimpleQueue()


# --- what needs no GPU --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size_bytes", "charged"), [(0, 10), (1, 10), (10 * MIB, 10), (10 * MIB + 1, 12)]
)
def test_a_block_is_charged_as_the_allocator_takes_it(size_bytes, charged):
    """2 MiB at a time, and never so little that it would share a segment with others."""
    assert charged_bytes(size_bytes) == charged * MIB


def test_memory_that_the_allocator_has_not_is_our_error_with_its_own_as_cause():
    with (
        pytest.raises(DeviceOutOfMemory, match=r"of 5\.0 MiB") as caught,
        _driver("cuda:0", 5 * MIB),
    ):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate")
    assert caught.value.needed_bytes == 5 * MIB
    assert isinstance(caught.value.__cause__, torch.cuda.OutOfMemoryError)


def test_a_device_that_fails_is_our_error_with_the_drivers_as_cause():
    """Its first line: torch adds advice on how to debug kernels."""
    with pytest.raises(DeviceUnavailable) as caught, _driver("cuda:0"):
        raise RuntimeError("CUDA error: device is gone\nCUDA kernel errors might be ...")
    assert caught.value.message == "cuda:0: CUDA error: device is gone"
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_our_own_errors_are_left_as_they_are():
    with pytest.raises(DeviceUnknown), _driver("cuda:0"):
        raise DeviceUnknown("no")


def test_a_child_that_cannot_use_cuda_is_told_so(monkeypatch):
    """As torch tells its own callers: after the parent had used it."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(DeviceUnavailable, match="forked") as caught:
        device_named("cuda:0")
    assert "spawn" in caught.value.remedy


def test_a_range_keeps_its_block_and_says_where_it_is():
    """torch keeps the range as long as a tensor over it is there."""

    class Hold:
        pass

    hold = Hold()
    place = _Range(hold, 0x7000, 96)
    assert place.__cuda_array_interface__ == {
        "shape": (96,),
        "typestr": "|u1",
        "data": (0x7000, False),
        "strides": None,
        "version": 3,
    }
    gone = weakref.ref(hold)
    del hold
    assert gone() is not None
    del place
    assert gone() is None


def test_a_tensor_that_is_not_where_it_was_to_be_is_no_view(monkeypatch):
    """torch copies what it takes for memory of another device."""
    monkeypatch.setattr(torch, "as_tensor", lambda place, device: torch.zeros(8))
    with pytest.raises(DeviceUnavailable, match="copied"), _driver("cuda:0"):
        cuda_device._over(torch.device("cuda:0"), 0x7000, 64, 8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host on which nothing can be pinned")
def test_what_cannot_be_pinned_is_used_unpinned_with_one_warning(caplog, monkeypatch):
    monkeypatch.setattr(cuda_uploads, "_warned", False)
    with caplog.at_level(logging.WARNING, "gpu_worker"):
        made = [cuda_uploads.buffers("cuda:0", 2, 3 * PAGE) for _ in range(2)]
    assert [len(some) for some in made] == [2, 2]
    assert all(buffer.nbytes == 3 * PAGE for some in made for buffer in some)
    (record,) = caplog.records
    assert "cannot be pinned" in record.message and "cuda:0" in record.message


# --- ways of uploading, to a target in memory ----------------------------------------------------


class Libcuda:
    """The driver's library, as far as it pins memory."""

    def __init__(self, supported: int = 1, fails: tuple[str, ...] = ()) -> None:
        self.supported = supported
        self.fails = fails
        self.pinned: dict[int, int] = {}
        self.ever: list[int] = []

    def cuDeviceGet(self, device, index):  # noqa: N802
        device._obj.value = 40 + index
        return 100 if "get" in self.fails else 0

    def cuDeviceGetAttribute(self, value, attribute, device):  # noqa: N802
        assert (attribute, device.value) == (113, 43)
        value._obj.value = self.supported
        return 101 if "attribute" in self.fails else 0

    def cuMemHostRegister_v2(self, address, size, flags):  # noqa: N802
        assert flags.value == 0x08
        assert address.value % PAGE == size.value % PAGE == 0
        if "register" in self.fails:
            return 801
        self.pinned[address.value] = size.value
        self.ever.append(size.value)
        return 0

    def cuMemHostUnregister(self, address):  # noqa: N802
        del self.pinned[address.value]
        return 0


class Stream:
    """Copies at once, and asks `libcuda` from where: that decides how long it takes."""

    def __init__(self, libcuda: Libcuda, registered_s: float) -> None:
        self.libcuda = libcuda
        self.registered_s = registered_s
        self.clock_s = 0.0

    def wait_for(self, event):
        pass

    def start(self, target, source):
        target.copy_(source)
        address = source.data_ptr()
        pinned = any(at <= address < at + size for at, size in self.libcuda.pinned.items())
        self.clock_s += self.registered_s if pinned else 1.0
        return SimpleNamespace(synchronize=lambda: None)

    def finish(self):
        pass


class Upload:
    """Uploads to memory, through four small buffers."""

    def __init__(self, libcuda: Libcuda, registered_s: float = 0.1) -> None:
        self.libcuda = libcuda
        stream = Stream(libcuda, registered_s)
        registration = cuda_uploads.registration(3, libcuda)
        buffers = [torch.zeros(8 * MIB, dtype=torch.uint8) for _ in range(4)]
        self.uploads = Uploads(stream, buffers, registration, lambda: stream.clock_s)

    def __call__(self, piece: Piece) -> torch.Tensor:
        whole = torch.zeros(piece.size_bytes, dtype=torch.uint8)
        self.uploads.send(lambda offset, length: whole[offset : offset + length], piece)
        return whole


LARGE = cuda_uploads.PROBE_BYTES + 12345


@pytest.fixture(scope="module")
def weights():
    whole = some_bytes(2 * LARGE)
    fd = os.memfd_create("weights")
    os.posix_fallocate(fd, 0, whole.nbytes)
    os.pwrite(fd, whole.numpy(), 0)
    yield whole, fd
    os.close(fd)


def upload_twice(upload: Upload, weights) -> None:
    """From an offset that is none of a page; then again, from another, as chosen by then."""
    whole, fd = weights
    for start in (PAGE + 64, 12):
        assert torch.equal(upload(Piece(None, fd, start, LARGE)), whole[start : start + LARGE])
    assert upload.libcuda.pinned == {}


def maps_of_weights() -> int:
    with open("/proc/self/maps") as file:
        return file.read().count("/memfd:weights")


def test_weights_go_through_the_buffers_where_nothing_can_be_registered(weights):
    """And nothing of the segment is mapped for it."""
    upload = Upload(Libcuda(supported=0))
    upload_twice(upload, weights)
    assert upload.libcuda.ever == []
    assert torch.equal(upload(from_tensor(weights[0])), weights[0])


def test_registration_is_used_where_it_is_faster(weights):
    """The first upload measures both ways; every one is right to the bit."""
    upload = Upload(Libcuda())
    upload_twice(upload, weights)
    assert len(upload.libcuda.ever) == 2
    upload_twice(upload, weights)
    assert len(upload.libcuda.ever) == 4
    assert all(size >= LARGE for size in upload.libcuda.ever)
    assert maps_of_weights() == 0


def test_registration_is_not_used_again_where_it_is_not_clearly_faster(weights):
    upload = Upload(Libcuda(), registered_s=2.9)
    upload_twice(upload, weights)
    assert len(upload.libcuda.ever) == 1
    assert maps_of_weights() == 0


def test_pages_that_cannot_be_registered_go_through_the_buffers(weights):
    """At first, or later: the driver may have no room for them."""
    upload = Upload(Libcuda(fails=("register",)))
    upload_twice(upload, weights)
    assert upload.libcuda.ever == []
    upload = Upload(Libcuda())
    upload_twice(upload, weights)
    upload.libcuda.fails = ("register",)
    upload_twice(upload, weights)
    assert len(upload.libcuda.ever) == 2


def test_a_segment_is_read_rather_than_its_map(weights):
    """So that who needs it on the device only need not map it, nor touch the map."""
    whole, fd = weights
    upload = Upload(Libcuda(supported=0))
    assert torch.equal(upload(Piece(torch.zeros_like(whole), fd, 0, whole.nbytes)), whole)


def test_what_has_no_file_or_is_small_is_not_measured_by(weights):
    """It would say nothing of which way is faster."""
    whole, fd = weights
    upload = Upload(Libcuda())
    assert torch.equal(upload(from_tensor(whole)), whole)
    assert torch.equal(upload(Piece(None, fd, 0, PAGE)), whole[:PAGE])
    assert upload.libcuda.ever == []


@pytest.mark.parametrize("fails", ["get", "attribute"])
def test_a_driver_that_cannot_say_supports_no_registration(fails):
    assert cuda_uploads.registration(3, Libcuda(fails=(fails,))) is None


def test_a_library_that_lacks_the_calls_supports_no_registration():
    assert cuda_uploads.registration(0, ctypes.CDLL(None)) is None


def test_pages_are_unpinned_when_the_copy_fails():
    libcuda = Libcuda()
    with pytest.raises(OSError, match="no"), Registration(libcuda).pinned(PAGE, PAGE):
        raise OSError("no")
    assert libcuda.ever == [PAGE] and libcuda.pinned == {}


# --- the order of things, on a device that only notes them ---------------------------------------


@pytest.fixture
def noting(monkeypatch):
    return noted(monkeypatch)


def test_the_index_that_is_there_is_used_and_no_other(noting):
    assert (cuda_device.usable_index(None), cuda_device.usable_index(0)) == (1, 0)
    with pytest.raises(DeviceUnknown, match="sees 2"):
        cuda_device.usable_index(2)
    assert (noting.device.name, noting.device.pool) == ("cuda:1", "vram:a-b")


def test_what_others_use_at_first_is_not_to_be_budgeted(noting, monkeypatch):
    """What this process has in its own cache is. Later it is still that."""
    assert noting.device.total_bytes() == 7 * MIB
    assert noting.device.capacity_bytes() == 20 * MIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 20 * MIB))
    assert noting.device.total_bytes() == 7 * MIB
    assert noting.device.capacity_bytes() == 20 * MIB


def test_copies_wait_for_the_allocating_stream_and_finish_waits_for_them(noting):
    """Once; and what a view shows is what was filled."""
    block = noting.device.allocate(MIB, "1-1")
    for start in (0, 512):
        block.fill(start, from_tensor(some_bytes(512)))
    assert noting.notes == ["copies waits for current", "over", "over"]
    block.finish()
    assert noting.notes[3:] == ["wait for copies"]
    assert torch.equal(block.view(0, 1024), some_bytes(512).repeat(2))
    block.free()


def test_memory_goes_back_when_everything_that_could_read_it_is_over(noting, ended):
    """And from torch's cache to the device."""
    block = noting.device.allocate(MIB, "1-1")
    storage = weakref.ref(block._held.memory)
    memory, view = block.memory, block.view(0, 8)
    block.watch(functools.partial(ended.put, "gone"))
    del block
    assert told(ended) == []
    del view
    assert told(ended) == ["gone"] and storage() is not None
    before = len(noting.notes)
    memory.free()
    assert noting.notes[before:] == ["wait for all", "empty the cache"]
    assert storage() is None and not noting.device._memories
    memory.free()
    assert len(noting.notes) == before + 2


def test_a_device_that_fails_while_it_is_waited_for_keeps_the_memory(noting, monkeypatch):
    """It may still be read; and it is told as our error."""

    def fail(_):
        raise RuntimeError("CUDA error: unspecified launch failure")

    block = noting.device.allocate(MIB, "1-1")
    storage = weakref.ref(block._held.memory)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", fail)
        with pytest.raises(DeviceUnavailable, match="launch failure"):
            block.free()
    assert storage() is not None
    block.memory.free()
    assert storage() is None


def test_a_fill_that_fails_leaves_nothing_that_keeps_the_memory(noting):
    """Though its traceback is kept."""
    block = noting.device.allocate(MIB, "1-1")
    storage = weakref.ref(block._held.memory)
    with memfd(some_bytes(64)) as fd, pytest.raises(SegmentRefused) as caught:
        block.fill(0, Piece(None, fd, 0, 65))
    block.free()
    assert storage() is None
    del caught


def test_memory_of_the_parent_is_left_to_it(noting, monkeypatch):
    block = noting.device.allocate(MIB, "1-1")
    noting.notes.clear()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    block.free()
    assert noting.notes == []


def test_blocks_that_were_dropped_unwatched_are_freed_with_the_next(noting):
    noting.device.allocate(MIB, "1-1")
    noting.device.allocate(MIB, "1-2")
    assert len(noting.device._memories) == 1
    noting.device.release_cached()
    assert not noting.device._memories


# --- on a GPU -----------------------------------------------------------------------------------

gpu = pytest.mark.gpu


@pytest.fixture
def device():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = device_named("cuda")
    device.release_cached()
    yield device
    gc.collect()
    device.release_cached()


def free_bytes(device) -> int:
    return torch.cuda.mem_get_info(device.torch_device)[0]


@gpu
def test_the_current_gpu_is_one_device_under_all_its_names(device):
    assert device_named("cuda:0") is device_named(torch.device("cuda", 0))
    assert device is device_named(device.name)
    assert device.pool.startswith("vram:") and len(device.pool) > 20
    assert 0 < device.total_bytes() <= torch.cuda.mem_get_info(device.torch_device)[1]
    with pytest.raises(DeviceUnknown):
        device_named("cuda:99")


@gpu
@pytest.mark.parametrize("kind", ["fd", "tensor"])
def test_what_is_filled_is_on_the_gpu_to_the_bit(device, kind):
    """In passes, at offsets of no alignment; the segment is not mapped for it."""
    whole = some_bytes(48 * MIB + 77)
    with memfd(whole[:MIB]) as fd:
        os.pwrite(fd, whole.numpy(), 0)
        block = device.allocate(whole.nbytes, "1-1")
        for start in range(0, whole.nbytes, 20 * MIB):
            size_bytes = min(20 * MIB, whole.nbytes - start)
            part = whole[start : start + size_bytes]
            piece = Piece(None, fd, start, size_bytes) if kind == "fd" else from_tensor(part)
            block.fill(start, piece)
        assert maps_of_weights() == 0
        block.finish()
    view = block.view(0, whole.nbytes)
    assert view.device == device.torch_device
    assert torch.equal(view.cpu(), whole)
    assert block.view(64, 100).untyped_storage().nbytes() == 100
    assert block.view(0, 0).device == device.torch_device
    del view
    block.free()


@gpu
def test_a_block_takes_what_is_charged_and_gives_it_back(device, ended):
    """By the driver's word, from the end of the last tensor to the end of `free`."""
    before = free_bytes(device)
    block = device.allocate(300 * MIB + 1, "1-1")
    memory = block.memory
    assert block.size_bytes == 302 * MIB
    assert before - free_bytes(device) == pytest.approx(302 * MIB, abs=2 * MIB)
    block.watch(functools.partial(ended.put, "gone"))
    view = block.view(0, MIB)
    part = view.view(torch.float32)[7:9]
    del block, view
    assert told(ended) == []
    del part
    assert told(ended) == ["gone"]
    memory.free()
    assert free_bytes(device) == pytest.approx(before, abs=2 * MIB)


@gpu
def test_a_kernel_that_still_reads_has_read_before_its_block_is_free(device):
    """Also one of a stream that the allocator knows nothing of."""
    block = device.allocate(64 * MIB, "1-1")
    block.fill(0, from_tensor(torch.full((64 * MIB,), 3, dtype=torch.uint8)))
    block.finish()
    stream = torch.cuda.Stream(device.torch_device)
    view = block.view(0, 64 * MIB)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        result = view.to(torch.int64).sum()
    del view
    block.free()
    torch.full((64 * MIB,), 9, dtype=torch.uint8, device=device.torch_device)
    stream.synchronize()
    assert int(result) == 3 * 64 * MIB


@gpu
def test_more_than_the_gpu_has_is_refused_with_the_facts(device):
    with pytest.raises(DeviceOutOfMemory) as caught:
        device.allocate(1 << 50, "1-1")
    assert caught.value.needed_bytes == 1 << 50
    assert 0 < caught.value.free_bytes < 1 << 50
    assert isinstance(caught.value.__cause__, torch.cuda.OutOfMemoryError)


FORKS = """
import os
import torch
from gpu_worker.device import device_named
from shm_store.errors import DeviceUnavailable
device = device_named("cuda")
block = device.allocate(1 << 20, "1-1")
pid = os.fork()
if not pid:
    again = lambda: device_named("cuda")
    for use in (again, lambda: device.allocate(1, "1-2"), device.synchronize):
        try:
            use()
        except DeviceUnavailable as error:
            assert "forked" in str(error)
        else:
            os._exit(1)
    block.free()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
block.view(0, 8).fill_(1)
block.free()
"""


@gpu
@pytest.mark.process
def test_a_forked_child_is_told_and_its_parent_goes_on(device):
    assert script(FORKS) == "0\n"
