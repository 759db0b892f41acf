"""What a model that is on the device costs its process on the host: nothing of its own.

Note on the pin trap
fact: the driver pins pages for writing, and a page of a private writable map that is written
to, or pinned so, is copied
consequence: to upload a model out of its map can double it in memory, silently
choice: this check; what is copied has no file behind it, which the kernel counts as Anonymous
cost: none
"""

from __future__ import annotations

import gc
import os

from benchmarks import kernel
from benchmarks.device_check.checks import Found, Missed
from benchmarks.device_check.models import Large
from benchmarks.device_check.place import Place
from shm_store.report import size_text

SHARE_LIMIT = 0.01
NOISE_BYTES = 2 << 20
"""By which a Python process grows and shrinks whatever it does."""


def copies_nothing(place: Place) -> Found:
    """No page of the segment is copied by an upload, and the process has hardly more memory."""
    size_bytes = place.size_bytes
    with place.load(lambda: Large(size_bytes // 8, 100)):
        pass  # buffers are pinned, and kernels loaded, by the first
    handle = place.load(lambda: Large(size_bytes, 100))
    place.settle()
    before_bytes = kernel.private_bytes(os.getpid())
    with handle:
        gc.collect()
        grown_bytes = kernel.private_bytes(os.getpid()) - before_bytes
        copied_bytes = _copied_bytes(handle.generation)
    figures = {
        "copied_share": copied_bytes / size_bytes,
        "grown_share": grown_bytes / size_bytes,
    }
    said = f"copied {size_text(copied_bytes)}, grown by {_signed(grown_bytes)}"
    said += f", of {size_text(size_bytes)} (at most {SHARE_LIMIT:.0%})"
    limit_bytes = size_bytes * SHARE_LIMIT
    if copied_bytes > limit_bytes or grown_bytes > limit_bytes + NOISE_BYTES:
        raise Missed(said, figures)
    return Found(said, figures)


def _copied_bytes(generation: str) -> int:
    """Return what of a segment's map are pages of this process's own."""
    maps = [
        entry
        for entry in kernel.maps(os.getpid())
        if entry.path.removesuffix(" (deleted)") == kernel.SEGMENT_MARK + generation
    ]
    if not maps:
        raise Missed("the weights are not mapped where they are looked for")
    return sum(entry.sizes["Anonymous"] for entry in maps)


def _signed(size_bytes: int) -> str:
    return ("-" if size_bytes < 0 else "") + size_text(abs(size_bytes))


CHECKS = (("private memory after upload", copies_nothing),)
