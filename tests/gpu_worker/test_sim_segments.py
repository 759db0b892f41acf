"""Memory of a simulated device that processes share: made, filled, closed, opened to be read."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from gpu_worker.sim_device import Faults, SimDevice
from shm_store.errors import DeviceOutOfMemory, DeviceUnavailable, SegmentRefused
from shm_store.memfds import by_owner
from shm_store.segment import freeze
from tests.gpu_worker.blocks import PAGE, from_tensor, some_bytes

INDEX = iter(range(1000, 2000))
OWNER = "0000000000000001-00000009"


@pytest.fixture
def device():
    """A device that nobody else has, of 64 pages. All its memory is free in the end."""
    device = SimDevice(next(INDEX), 64 * PAGE)
    yield device
    device.tell(Faults())
    gc.collect()
    device.release_cached()
    assert device.allocated_bytes() == 0 and OWNER not in by_owner()


@pytest.fixture
def filled(device):
    """An fd of memory with some bytes, which its maker has closed; and the bytes."""
    made = device.make_segment(2 * PAGE, OWNER)
    data = some_bytes(2 * PAGE)
    made.fill(0, from_tensor(data))
    made.finish()
    fd = os.dup(made.fd)
    made.close()
    made.close()
    freeze(fd, OWNER)
    yield fd, data
    os.close(fd)


def test_what_one_has_filled_another_reads(device, filled):
    fd, data = filled
    block = device.open_segment(fd, 2 * PAGE)
    assert torch.equal(block.view(0, 2 * PAGE), data)
    assert device.allocated_bytes() == by_owner()[OWNER] == 2 * PAGE


def test_what_is_opened_lasts_as_long_as_a_tensor_over_it(device, filled):
    fd, data = filled
    some = device.open_segment(fd, 2 * PAGE).view(PAGE, PAGE)
    gc.collect()
    device.release_cached()
    assert torch.equal(some, data[PAGE:]) and device.allocated_bytes() == 2 * PAGE
    del some
    device.release_cached()
    assert device.allocated_bytes() == 0


@pytest.mark.parametrize("size_bytes", [PAGE, 3 * PAGE])
def test_another_size_than_is_charged_is_refused(device, filled, size_bytes):
    with pytest.raises(SegmentRefused, match=f"no {size_bytes} bytes of {device.name}"):
        device.open_segment(filled[0], size_bytes)


def test_memory_of_another_device_is_refused(device, filled):
    with pytest.raises(SegmentRefused):
        SimDevice(next(INDEX), 64 * PAGE).open_segment(filled[0], 2 * PAGE)
    fd = os.memfd_create("weight-cache:1-1")
    os.truncate(fd, 2 * PAGE)
    with pytest.raises(SegmentRefused):
        device.open_segment(fd, 2 * PAGE)
    os.close(fd)


def test_more_than_there_is_is_refused_and_nothing_is_taken(device):
    with pytest.raises(DeviceOutOfMemory):
        device.make_segment(65 * PAGE, OWNER)
    assert OWNER not in by_owner()


def test_a_device_that_fails_leaves_what_was_made_to_be_closed(device):
    made = device.make_segment(PAGE, OWNER)
    device.tell(Faults(fail_fill=1))
    with pytest.raises(DeviceUnavailable):
        made.fill(0, from_tensor(some_bytes(PAGE)))
    made.close()


def test_what_was_made_and_dropped_is_free_with_the_next_call(device):
    """As after an interrupt between the two."""
    device.make_segment(PAGE, OWNER)
    gc.collect()
    assert by_owner()[OWNER] == PAGE
    device.release_cached()
    assert OWNER not in by_owner()
