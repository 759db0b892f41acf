"""Holds the disk to a speed, for this process and all that it starts: a disk that is not this one.

By the control group's throttle of reads, version 1 or 2; it takes root.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from benchmarks.rows import Unavailable

V1 = Path("/sys/fs/cgroup/blkio")
V2 = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def held_to(bytes_per_s: int, file: Path) -> Iterator[None]:
    """Have nobody of us read faster than that from the disk that `file` is on; 0 changes nothing.

    Raises:
        Unavailable: it cannot be held here.
    """
    if not bytes_per_s:
        yield
        return
    device = _disk(os.stat(file).st_dev)
    root, limit, text = (
        (V1, "blkio.throttle.read_bps_device", f"{device} {bytes_per_s}")
        if V1.is_dir()
        else (V2, "io.max", f"{device} rbps={bytes_per_s}")
    )
    group = root / f"benchmark-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(text)
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        raise Unavailable(f"the disk cannot be held to a speed: {error}") from error
    try:
        yield
    finally:
        (root / "cgroup.procs").write_text(str(os.getpid()))
        with contextlib.suppress(OSError):  # a child that has not ended is in it
            group.rmdir()


def _disk(device: int) -> str:
    """Return the number of the whole disk that a device is, or is a part of."""
    place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    whole = place.parent if (place / "partition").exists() else place
    return (whole / "dev").read_text(encoding="ascii").strip()
