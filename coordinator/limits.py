"""The file that says what a group's pools may hold: read at the start, and again on SIGHUP.

One line for each pool, `POOL SIZE`, as `weight-cache limit` takes them. `#` begins a comment. A
device's pool may be named before anybody uses the device: it is there from then on.
"""

from __future__ import annotations

from coordinator.ledger.lifecycle import names_device
from shm_store.errors import ArgumentRefused
from shm_store.sizes import parse_size
from shm_store.wire import RAM

FILE_LIMIT_BYTES = 64 * 1024

"""The pool that every coordinator has. The others are devices'."""


def read_limits(path: str) -> dict[str, int]:
    """Return the limit of each pool that the file at `path` names.

    Raises:
        ArgumentRefused: it cannot be read, or a line is wrong. The line is named.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(FILE_LIMIT_BYTES + 1)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ArgumentRefused(f"the limits in {path} cannot be read: {reason}") from error
    if len(text) > FILE_LIMIT_BYTES:
        raise ArgumentRefused(f"{path} is longer than a file of limits ever is")
    limits: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            pool, size = words[0], " ".join(words[1:])
            if not size:
                raise ArgumentRefused(f"{pool!r} has no size", remedy="write a pool and its size")
            if pool != RAM and not names_device(pool):
                raise ArgumentRefused(
                    f"there is no pool {pool!r}",
                    remedy=f"use {RAM!r}, or 'vram:UUID' for a device, as `status` names it",
                )
            if pool in limits:
                raise ArgumentRefused(f"{pool!r} has a limit already")
            limits[pool] = parse_size(size)
        except ArgumentRefused as error:
            raise ArgumentRefused(
                f"{path}, line {number}: {error.message}", remedy=error.remedy
            ) from None
    return limits
