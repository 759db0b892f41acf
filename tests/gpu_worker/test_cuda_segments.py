"""Segments of a GPU as its device makes and opens them, over a driver that lets nothing pass."""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import os
import re
from collections.abc import Iterator
from queue import SimpleQueue

import pytest
import torch

from gpu_worker import cuda_memory
from gpu_worker.block import Piece
from gpu_worker.device import device_named
from gpu_worker.residence import can_share
from shm_store.errors import (
    ArgumentRefused,
    DeviceOutOfMemory,
    DeviceUnavailable,
    SegmentRefused,
    WeightCacheError,
)
from tests.gpu_worker.blocks import from_tensor, memfd, some_bytes, told
from tests.gpu_worker.fake_cuda import GRANULE, CUresult, FakeDevice, FakeDriver, World
from tests.gpu_worker.noting import noted
from tests.gpu_worker.test_cuda_memory import MAKES, OPENS, SIZE, access, state
from tests.gpu_worker.test_interrupts import interrupted


@pytest.fixture
def noting(monkeypatch):
    return noted(monkeypatch)


@pytest.fixture
def driver(noting, monkeypatch) -> Iterator[FakeDriver]:
    """Of the noting device, which is the second, and notes what its driver is asked to do."""
    made = FakeDriver(World(FakeDevice("c-d"), FakeDevice("a-b")))
    monkeypatch.setattr(cuda_memory, "bindings", lambda: made)
    made.calls = noting.notes
    yield made
    made.fails.clear()
    gc.collect()
    noting.device.release_cached()
    assert made.has_nothing and made.device(1).free_bytes == made.device(1).total_bytes
    assert not noting.device._memories


def filled(device, whole: torch.Tensor):
    segment = device.make_segment(whole.nbytes, "1-1")
    half = whole.nbytes // 2
    for start, end in ((0, half), (half, whole.nbytes)):
        segment.fill(start, from_tensor(whole[start:end]))
    segment.finish()
    return segment


def test_a_segment_is_filled_in_one_map_and_read_in_another(noting, driver):
    whole = some_bytes(3 * GRANULE + 7)
    assert noting.device.segment_bytes(whole.nbytes) == 4 * GRANULE
    segment = filled(noting.device, whole)
    block = noting.device.open_segment(segment.fd, 4 * GRANULE)
    segment.close()
    segment.close()
    view = block.view(0, whole.nbytes)
    assert torch.equal(view, whole) and access(view.data_ptr()) == "r--s"
    assert block.view(64, 8).untyped_storage().nbytes() == 8
    assert block.view(64, 8).data_ptr() == view.data_ptr() + 64
    del view
    block.free()


def test_a_block_ends_with_its_last_tensor_and_after_all_kernels(noting, driver):
    ended: SimpleQueue[str] = SimpleQueue()
    segment = filled(noting.device, some_bytes(SIZE))
    block = noting.device.open_segment(segment.fd, SIZE)
    segment.close()
    memory, part = block.memory, block.view(0, 64).view(torch.bfloat16)[3:5]
    block.watch(functools.partial(ended.put, "gone"))
    del block
    assert told(ended) == [] and driver.device(1).free_bytes < driver.device(1).total_bytes
    del part
    assert told(ended) == ["gone"]
    noting.notes.clear()
    memory.free()
    assert [note for note in noting.notes if note != "cuCtxPushCurrent"] == [
        "wait for all",
        "cuMemUnmap",
        "cuMemAddressFree",
        "cuMemRelease",
    ]
    memory.free()
    assert driver.device(1).free_bytes == driver.device(1).total_bytes


def test_a_segment_waits_for_its_copies_before_it_is_unmapped(noting, driver):
    """Also after a fill that has failed, of which some may be under way."""
    segment = noting.device.make_segment(SIZE, "1-1")
    with memfd(some_bytes(64)) as fd, pytest.raises(SegmentRefused):
        segment.fill(0, Piece(None, fd, 0, 65))
    noting.notes.clear()
    segment.close()
    assert noting.notes.index("wait for all") < noting.notes.index("cuMemUnmap")


@pytest.mark.parametrize(("offset", "size_bytes"), [(-1, 8), (SIZE - 7, 8), (SIZE, 1)])
def test_a_fill_that_reaches_out_of_a_segment_is_refused(noting, driver, offset, size_bytes):
    segment = noting.device.make_segment(SIZE, "1-1")
    with pytest.raises(ArgumentRefused, match="reach out"):
        segment.fill(offset, from_tensor(some_bytes(size_bytes)))
    segment.close()


def test_what_is_shared_is_not_filled(noting, driver):
    """It would fault, on the device."""
    segment = filled(noting.device, some_bytes(SIZE))
    block = noting.device.open_segment(segment.fd, SIZE)
    segment.close()
    with pytest.raises(ArgumentRefused, match="only read"):
        block.fill(0, from_tensor(some_bytes(8)))
    block.finish()
    block.free()


@pytest.mark.parametrize("size_bytes", [0, 1, SIZE - 1])
def test_a_size_that_no_memory_has_is_refused(noting, driver, size_bytes):
    segment = noting.device.make_segment(SIZE, "1-1")
    with pytest.raises(SegmentRefused, match="exactly"):
        noting.device.open_segment(segment.fd, size_bytes)
    segment.close()


@pytest.mark.parametrize("name", MAKES[1:])
def test_a_making_that_fails_leaves_nothing_on_the_device(noting, driver, name):
    assert noting.device.shares
    driver.fail(name, CUresult.CUDA_ERROR_UNKNOWN)
    with pytest.raises(DeviceUnavailable, match=f"cuda:1: {name}: CUDA_ERROR_UNKNOWN"):
        noting.device.make_segment(SIZE, "1-1")
    assert driver.has_nothing and not noting.device._memories


@pytest.mark.parametrize("name", OPENS[1:])
def test_an_opening_that_fails_leaves_nothing_on_the_device(noting, driver, name):
    segment = filled(noting.device, some_bytes(SIZE))
    driver.fail(name, CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(WeightCacheError):
        noting.device.open_segment(segment.fd, SIZE)
    driver.fails.clear()
    segment.close()
    assert driver.has_nothing and not noting.device._memories


def test_a_segment_that_is_dropped_is_freed_with_the_next(noting, driver):
    noting.device.make_segment(SIZE, "1-1")
    assert not driver.has_nothing
    noting.device.release_cached()
    assert driver.has_nothing


def test_closing_does_not_fail_and_what_is_left_is_freed_with_the_next(noting, driver, caplog):
    """Its caller may be at an error of his own."""
    segment = noting.device.make_segment(SIZE, "1-1")
    driver.fail("cuMemUnmap", CUresult.CUDA_ERROR_UNKNOWN)
    with caplog.at_level(logging.WARNING, "gpu_worker"):
        segment.close()
    assert "not given back yet: cuda:1: cuMemUnmap: CUDA_ERROR_UNKNOWN" in caplog.text
    driver.fails.clear()
    del segment
    noting.device.release_cached()
    assert driver.has_nothing


def test_memory_that_torch_keeps_unused_is_taken_before_there_is_none(noting, driver, monkeypatch):
    device = driver.device(1)
    total_bytes, device.total_bytes = device.total_bytes, GRANULE
    assert noting.device.shares

    def empty() -> None:
        device.total_bytes = total_bytes

    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    noting.device.make_segment(SIZE, "1-1").close()
    device.total_bytes = GRANULE
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with pytest.raises(DeviceOutOfMemory):
        noting.device.make_segment(SIZE, "1-1")
    device.total_bytes = total_bytes


@pytest.mark.parametrize("name", ["cuMemAddressReserve", "cuMemMap"])
def test_what_is_there_already_is_not_made_again_when_there_is_room(
    noting, driver, monkeypatch, name
):
    assert noting.device.shares
    driver.fail(name, CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    monkeypatch.setattr(torch.cuda, "empty_cache", driver.fails.clear)
    noting.notes.clear()
    noting.device.make_segment(SIZE, "1-1").close()
    assert noting.notes.count("cuMemCreate") == 1 and driver.has_nothing


def test_a_forked_child_closes_its_fd_and_leaves_the_rest_to_its_parent(
    noting, driver, monkeypatch
):
    """The driver must not be called there."""
    segment = noting.device.make_segment(SIZE, "1-1")
    kept = os.dup(segment.fd)
    noting.notes.clear()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        segment.close()
        assert "forked" in noting.device.why_private
    assert noting.notes == [] and not driver.has_nothing
    os.close(kept)
    segment._pages.give_back()


def test_it_is_tried_once_for_a_device(noting, driver, caplog):
    driver.device(1).attributes[103] = 0
    for _ in range(3):
        assert not noting.device.shares
    assert noting.notes.count("cuDeviceGetAttribute") == 2
    with pytest.raises(DeviceUnavailable, match=r"cuda:1 cannot share .* as an fd"):
        noting.device.make_segment(SIZE, "1-1")


def test_why_it_cannot_is_said_once(noting, driver, caplog):
    driver.device(1).attributes[102] = 0
    noting.device.name = "cuda:97"
    with caplog.at_level(logging.WARNING, "gpu_worker"):
        assert not can_share(noting.device) and not can_share(noting.device)
    (record,) = caplog.records
    assert re.search(r"cuda:97 cannot share .* its own: this device.*manages no", record.message)


def test_rocm_is_not_asked(noting, driver, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert "ROCm" in noting.device.why_private and noting.notes == []


def test_devices_that_share_say_no_reason_and_others_do():
    for name, size_bytes in (("sim:0", 4096), ("cpu", 0)):
        device = device_named(name)
        assert device.shares is not bool(device.why_private)
        assert device.segment_bytes(1) == size_bytes


def test_an_interrupt_anywhere_leaves_nothing_that_the_next_does_not_free(noting, driver):
    """In making or opening a segment, or closing it."""
    device = noting.device
    assert device.shares
    first = state(driver.device(1))
    source = filled(device, some_bytes(SIZE))
    uses = {
        "make": lambda: functools.partial(device.make_segment, SIZE, "1-1"),
        "open": lambda: functools.partial(device.open_segment, source.fd, SIZE),
        "close": lambda: device.make_segment(SIZE, "1-1").close,
    }
    for what, use in uses.items():
        for number in itertools.count(1):
            place = interrupted(number, use())
            device.release_cached()
            assert len(driver.handles) == len(driver.ranges) == 1, (what, place)
            assert len(device._memories) == 1 and not driver.stack, (what, place)
            if place is None:
                break
        assert number > 20, what
    source.close()
    assert state(driver.device(1)) == first


# --- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu_what_was_filled_is_read_and_is_free_at_its_end():
    """By the driver's word; `scripts/device-check` does it with several processes."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = device_named("cuda")
    assert device.shares, device.why_private
    device.release_cached()
    device.make_segment(1, "1-0").close()  # what the first use takes stays
    free_bytes = torch.cuda.mem_get_info(device.torch_device)[0]
    whole = some_bytes(48 << 20)
    size_bytes = device.segment_bytes(whole.nbytes)
    segment = filled(device, whole)
    taken_bytes = free_bytes - torch.cuda.mem_get_info(device.torch_device)[0]
    assert taken_bytes == pytest.approx(size_bytes, abs=2 << 20)
    block = device.open_segment(segment.fd, size_bytes)
    kept = os.dup(segment.fd)
    segment.close()
    view = block.view(0, whole.nbytes)
    assert view.device == device.torch_device and torch.equal(view.cpu(), whole)
    for wrong_bytes in (size_bytes - device.segment_bytes(1), size_bytes + device.segment_bytes(1)):
        with pytest.raises(SegmentRefused):
            device.open_segment(kept, wrong_bytes)
    os.close(kept)
    del view
    block.free()
    assert torch.cuda.mem_get_info(device.torch_device)[0] == pytest.approx(free_bytes, abs=2 << 20)
