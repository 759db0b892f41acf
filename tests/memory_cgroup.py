"""A memory cgroup of a test's own, version 1 or 2, where one may be made."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.backing import memory_cgroups


class MemoryCgroup:
    """One that exists, until `remove`."""

    def __init__(self, folder: Path, v2: bool) -> None:
        self._folder = folder
        self._v2 = v2
        folder.mkdir()

    def limit(self, size_bytes: int) -> None:
        """Set how much memory its processes may have."""
        name = "memory.max" if self._v2 else "memory.limit_in_bytes"
        (self._folder / name).write_text(str(size_bytes))

    @property
    def enter(self) -> Callable[[], None]:
        """What a new process calls to be in it, between fork and exec."""
        procs = str(self._folder / "cgroup.procs")

        def enter() -> None:
            with open(procs, "w") as file:
                file.write(str(os.getpid()))

        return enter

    @property
    def oom_kills(self) -> int:
        """How many of its processes the kernel has killed for want of memory."""
        return self._read("memory.events" if self._v2 else "memory.oom_control")["oom_kill"]

    @property
    def active_file_bytes(self) -> int:
        """Pages of files that were read twice."""
        return self._read("memory.stat")["active_file" if self._v2 else "total_active_file"]

    def _read(self, name: str) -> dict[str, int]:
        lines = (self._folder / name).read_text().splitlines()
        return {key: int(value) for key, value in map(str.split, lines)}

    def remove(self) -> None:
        self._folder.rmdir()


def make(limit_bytes: int) -> MemoryCgroup:
    """Return one with this limit, below that of this process. Skips the test where none can be."""
    for folder, v2 in reversed(memory_cgroups()):
        parent = Path(folder)
        # Below a v2 cgroup that has processes itself nothing is limited, but for the root's.
        if v2 and "memory" not in (parent / "cgroup.subtree_control").read_text().split():
            continue
        try:
            made = MemoryCgroup(parent / f"weight-cache-test-{os.getpid()}", v2)
        except OSError:
            continue
        made.limit(limit_bytes)
        return made
    pytest.skip("no memory cgroup can be made here")
