"""Whether this kernel collapses memfds, and what it says of maps of segments."""

from __future__ import annotations

import functools
import os
import subprocess

import pytest

from benchmarks import kernel
from coordinator import collapsing
from shm_store.layout import HUGE_PAGE_BYTES


def require() -> None:
    """Skip the test where no memfd can be in huge pages."""
    if _try():
        pytest.skip(f"no huge pages here: {_try()}")


@functools.cache
def _try() -> str:
    fd = os.memfd_create("weight-cache:try")
    os.posix_fallocate(fd, 0, HUGE_PAGE_BYTES)
    command = collapsing.command(fd, HUGE_PAGE_BYTES)
    done = subprocess.run(command, pass_fds=(fd,), capture_output=True, text=True, check=True)
    os.close(fd)
    said = collapsing.said(done.stdout)
    assert said is not None
    return said[1]


def mapped_bytes(pid: int, name: str) -> tuple[int, int]:
    """Return what a process has mapped of a memfd by that name, and how much of it in huge pages.

    Only what it has read counts for either.
    """
    found = [one.sizes for one in kernel.maps(pid) if f"memfd:weight-cache:{name}" in one.path]
    huge = sum(sizes["ShmemPmdMapped"] + sizes["FilePmdMapped"] for sizes in found)
    return sum(sizes["Rss"] for sizes in found), huge
