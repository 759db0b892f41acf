"""What the tests of the store share: a watch on this process's fds, and children to run."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

DROP_PRIVILEGES = """
import os
def drop_privileges():
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
"""


def open_fds() -> dict[int, str]:
    """Return what each fd of this process refers to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the fd that listed the directory
    return found


@pytest.fixture
def fds_flat() -> Iterator[None]:
    """Fail the test if it leaves an fd behind, or closes one that it did not open."""
    before = open_fds()
    yield
    if open_fds() != before:
        gc.collect()  # an error and its frames may hold one a little longer
    assert open_fds() == before


@pytest.fixture
def child() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs Python code in a process of its own and gives what it printed.

    The code may call `drop_privileges()` to become another user, where the tests run as root.
    """

    def run(
        code: str, *arguments: str, pass_fds: tuple[int, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", DROP_PRIVILEGES + code, *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            pass_fds=pass_fds,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    return run
