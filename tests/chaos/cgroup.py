"""A memory cgroup for the groups of a run, where one can be made: by root, with version 1."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tests.chaos.watch import until

ROOT = "/sys/fs/cgroup/memory"
EMPTY_S = 20.0


@contextmanager
def memory_cgroup() -> Iterator[str | None]:
    """Make a cgroup for the length of a block; all of its processes must have ended by then.

    Gives None, and says why, where there can be none.
    """
    folder = os.path.join(ROOT, f"weight-cache-chaos-{os.getpid()}")
    try:
        os.mkdir(folder)
    except OSError as error:
        print(f"no cgroup can be made, so none will be full: {folder}: {error.strerror}")
        yield None
        return
    try:
        if not os.path.exists(os.path.join(folder, "memory.limit_in_bytes")):
            print(f"{ROOT} is no memory controller, so no cgroup will be full")
            yield None
        else:
            yield folder
    finally:
        until(lambda: _is_empty(folder), EMPTY_S, lambda: f"{folder} does not get empty")
        os.rmdir(folder)


def _is_empty(folder: str) -> bool:
    """Orphans of a group are reaped by others, whenever they come to it."""
    with open(os.path.join(folder, "cgroup.procs")) as processes:
        return not processes.read()
