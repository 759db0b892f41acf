"""What the kernel says of a simulated device's memory."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from shm_store.memfds import PREFIX, has_block, kernel_bytes

PAGE = 4096
SIM = f"sim:{os.getpid()}"
"""No other process has a device whose index begins so."""


@pytest.fixture
def block() -> Iterator[Callable[[str, int], int]]:
    """Makes a memfd of that name and size; gives its fd."""
    fds: list[int] = []

    def make(name: str, size_bytes: int) -> int:
        fd = os.memfd_create(f"{PREFIX}{name}")
        os.posix_fallocate(fd, 0, size_bytes)
        fds.append(fd)
        return fd

    yield make
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            pass  # the test has


def test_blocks_of_one_device_are_added_up_and_of_no_other(
    block: Callable[[str, int], int],
) -> None:
    """Not of one whose name only begins so, nor host segments."""
    assert kernel_bytes(f"{SIM}71") == 0
    block(f"{SIM}71:1-1", 3 * PAGE)
    block(f"{SIM}71:1-2", PAGE)
    block(f"{SIM}711:1-1", 16 * PAGE)
    block(f"{SIM}7:1-1", 16 * PAGE)
    block("0000000000000001-00000001", 16 * PAGE)
    assert kernel_bytes(f"{SIM}71") == kernel_bytes(f"{SIM}71", os.getpid()) == 4 * PAGE


def test_a_block_counts_once_however_it_is_held(block: Callable[[str, int], int]) -> None:
    """By two fds, by a map, by the same map in a child; also by a map alone."""
    fd = block(f"{SIM}72:1-1", 2 * PAGE)
    other = os.dup(fd)
    pages = mmap.mmap(fd, 2 * PAGE)
    child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    try:
        assert kernel_bytes(f"{SIM}72") == 2 * PAGE
        assert kernel_bytes(f"{SIM}72", child) == 2 * PAGE
        os.close(other)
        os.close(fd)
        assert kernel_bytes(f"{SIM}72") == 2 * PAGE
        pages.close()
        assert kernel_bytes(f"{SIM}72", os.getpid()) == 0
        assert kernel_bytes(f"{SIM}72") == 2 * PAGE
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert kernel_bytes(f"{SIM}72") == 0


def test_what_is_mapped_without_an_fd_counts() -> None:
    fd = os.memfd_create(f"{PREFIX}{SIM}73:1-1")
    os.posix_fallocate(fd, 0, 2 * PAGE)
    ready, say = os.pipe()
    child = os.fork()
    if not child:
        pages = mmap.mmap(fd, 2 * PAGE)
        os.closerange(3, say)  # Python's map has an fd of its own before 3.13
        os.closerange(say + 1, 4096)
        os.write(say, b"." if pages else b"")
        signal.pause()
        os._exit(0)
    os.close(fd)
    os.close(say)
    try:
        assert os.read(ready, 1) == b"."
        assert not any("sim" in os.readlink(f"/proc/{child}/fd/{n}") for n in fds_of(child))
        assert kernel_bytes(f"{SIM}73", child) == 2 * PAGE
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
    assert kernel_bytes(f"{SIM}73") == 0


def fds_of(pid: int) -> list[str]:
    return os.listdir(f"/proc/{pid}/fd")


def test_a_process_that_has_ended_has_nothing() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    assert kernel_bytes(f"{SIM}74", child) == 0


def test_a_file_without_memory_is_nobodys_block() -> None:
    """It has the name of whom it is for before it has anything of the device."""
    fd = os.memfd_create(f"{PREFIX}{SIM}74:1-77")
    assert not has_block("1-77")
    os.posix_fallocate(fd, 0, PAGE)
    assert has_block("1-77")
    os.close(fd)
    assert not has_block("1-77")
