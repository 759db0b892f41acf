"""What the kernel says of a private map, by either way of asking, and what is mapped at once."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from coordinator import collapsing
from gpu_worker import pages
from gpu_worker.mapping import map_segment, unmap_range
from shm_store import segment
from shm_store.layout import HUGE_PAGE_BYTES
from tests import huge_pages

SIZE = 3 << 20
LARGE = pages.STEP_BYTES + 2 * HUGE_PAGE_BYTES
"""More than one step."""


@pytest.fixture(params=["scan", "read"])
def any_own(request, monkeypatch):
    if request.param == "read":

        def old_kernel(*_: object, **__: object) -> bool:
            raise OSError

        monkeypatch.setattr(pages, "_scan", old_kernel)
    return pages.any_own


@pytest.fixture
def mapped():
    fd = os.memfd_create("test")
    os.posix_fallocate(fd, 0, SIZE)
    with mmap.mmap(fd, SIZE, mmap.MAP_PRIVATE) as private:
        first = ctypes.c_ubyte.from_buffer(private)
        yield private, ctypes.addressof(first)
        del first
    os.close(fd)


def test_what_was_read_is_the_files_and_what_was_written_is_the_processs(any_own, mapped):
    buffer, address = mapped
    assert not any_own(address, SIZE), "nothing was touched"
    assert sum(bytes(buffer)[:: mmap.PAGESIZE]) == 0
    assert not any_own(address, SIZE), "all was read"
    buffer[SIZE - 1] = 1
    assert any_own(address, SIZE)
    assert not any_own(address, SIZE - mmap.PAGESIZE), "one page before"


# --- mapping all of it at once ------------------------------------------------------------------


@contextmanager
def sealed() -> Iterator[tuple[int, ctypes.Array[ctypes.c_ubyte]]]:
    """A sealed memfd of `SIZE` that nobody has collapsed, and a worker's map of it."""
    fd = os.memfd_create("weight-cache:faulted", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, LARGE)
    segment.freeze(fd, "it")
    buffer = map_segment(fd, LARGE)
    yield fd, buffer
    unmap_range(ctypes.addressof(buffer), LARGE)
    os.close(fd)


def there() -> tuple[int, int]:
    """Bytes of that map that are mapped, and those of them in huge pages."""
    return huge_pages.mapped_bytes(os.getpid(), "faulted")


def test_small_pages_are_all_mapped_and_none_is_copied():
    with sealed() as (_, buffer):
        assert there() == (0, 0)
        pages.fault_in(ctypes.addressof(buffer), LARGE)
        assert there() == (LARGE, 0)
        assert not pages.any_own(ctypes.addressof(buffer), LARGE)


def test_in_huge_pages_it_looks_at_one_and_leaves_the_rest_to_their_readers():
    huge_pages.require()
    with sealed() as (fd, buffer):
        subprocess.run(collapsing.command(fd, LARGE), pass_fds=(fd,), check=True)
        pages.fault_in(ctypes.addressof(buffer), LARGE)
        assert there() == (HUGE_PAGE_BYTES, HUGE_PAGE_BYTES)


def test_where_the_kernel_cannot_nothing_happens(monkeypatch):
    monkeypatch.setattr(pages, "_MADV_POPULATE_READ", 0x7FFF)
    with sealed() as (_, buffer):
        pages.fault_in(ctypes.addressof(buffer), LARGE)
        assert there()[0] < LARGE
