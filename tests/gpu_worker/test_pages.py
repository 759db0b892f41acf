"""What the kernel says of a private map, by either way of asking."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest

from gpu_worker import pages

SIZE = 3 << 20


@pytest.fixture(params=["scan", "read"])
def any_own(request, monkeypatch):
    if request.param == "read":

        def old_kernel(*_: object) -> bool:
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
