"""What a segment's memory and its bytes cost: backed by a child, then filled from the page cache.

Processor time, of the child too: on a machine that has others to serve that says more than a clock.
The floor is `posix_fallocate` in place, and the same `sendfile`.
"""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.rows import Row, interleave, medians
from coordinator import backing
from shm_store.layout import HUGE_PAGE_BYTES

STEP_BYTES = 1 << 24


def row(file: Path, rounds: int) -> Row:
    """Measure with the bytes of a file."""
    size_bytes = os.path.getsize(file) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    parts: list[float] = []
    floor, huge, small = "floor", "pages of 2 MiB", "pages of 4 KiB"
    backs: dict[str, Callable[[int], object]] = {
        floor: lambda fd: os.posix_fallocate(fd, 0, size_bytes),
        huge: lambda fd: parts.append(_child(fd, size_bytes, True) / size_bytes),
        small: lambda fd: _child(fd, size_bytes, False),
    }
    with file.open("rb") as source:
        samples = {
            name: partial(_sample, back, source.fileno(), size_bytes)
            for name, back in backs.items()
        }
        middle = medians(interleave(rounds, samples))
    return Row(
        "backing by a child and filling, processor time",
        "s",
        middle[huge],
        middle[floor],
        {small: middle[small]},
        beside={"part in huge pages": min(parts)},
    )


def _sample(back: Callable[[int], object], source: int, size_bytes: int) -> float:
    began_s = _used_s()
    fd = os.memfd_create("weight-cache:filling", os.MFD_CLOEXEC)
    try:
        back(fd)
        done = 0
        while done < size_bytes:
            done += os.sendfile(fd, source, done, min(STEP_BYTES, size_bytes - done))
        return _used_s() - began_s
    finally:
        os.close(fd)


def _child(fd: int, size_bytes: int, huge: bool) -> int:
    """Have a child back it; return how much is in huge pages."""
    command = backing.command(fd, size_bytes, huge)
    done = subprocess.run(command, pass_fds=(fd,), stdout=subprocess.PIPE, text=True, check=True)
    return backing.huge_bytes(done.stdout)


def _used_s() -> float:
    """Return the processor time of this process and of its children that have ended."""
    uses = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)
