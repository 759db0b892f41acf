"""Pages of 2 MiB for weights: by themselves, or on request.

They change no byte and no budget. With them a process maps, reads and gives back gigabytes with
fewer page faults.
"""

from __future__ import annotations

import glob
import os
import re

from coordinator.backing import shortage
from coordinator.probes import maps
from coordinator.probes.finding import Finding, ok, text_of, warn
from shm_store.errors import WeightCacheError
from shm_store.layout import HUGE_PAGE_BYTES, PAGE_BYTES
from shm_store.report import size_text

TRIED_BYTES = 2 * HUGE_PAGE_BYTES
SETTINGS = "sys/kernel/mm/transparent_hugepage"
OF_2_MIB = "hugepages-2048kB/shmem_enabled"
WITHIN_SIZE = f"as root: echo within_size > /{SETTINGS}/shmem_enabled; then run this again"
"""Not `always`: that makes small segments large."""

_CHOSEN = re.compile(r"\[(\w+)\]")


def huge_pages(root: str = "/") -> Finding:
    """Does a new segment have huge pages, as this host is set?"""
    name = "huge_pages"
    said = _settings(root)
    if not said:
        return warn(name, "this kernel has no transparent huge pages", "run one that has")
    if lacking := shortage(TRIED_BYTES):
        return warn(name, f"{said}; not tried: {lacking}", "see memory_cgroup and ram_budget")
    try:
        small_bytes = maps.taken_by_one_page()
        with maps.sealed_map(TRIED_BYTES) as address:
            maps.touch(address, TRIED_BYTES)
            got = maps.huge_bytes(address)
    except (OSError, WeightCacheError) as error:
        return _not_tried(name, error)
    if small_bytes > PAGE_BYTES:
        return warn(
            name,
            f"a segment of {size_text(PAGE_BYTES)} takes {size_text(small_bytes)}, more than is "
            f"charged for it: {said}",
            WITHIN_SIZE,
        )
    if got is None:
        return warn(name, f"{said}; this system does not say what maps are made of", "see collapse")
    if got == TRIED_BYTES:
        return ok(name, f"a new segment has them: {said}")
    return warn(
        name,
        f"of a new segment of {size_text(TRIED_BYTES)} {size_text(got)} are huge: {said}",
        WITHIN_SIZE,
    )


def _settings(root: str) -> str:
    """Return what transparent huge pages are set to; "" where there are none.

    Of the sizes, those that shared memory may have, and 2 MiB.
    """
    parts = []
    folder = os.path.join(root, SETTINGS)
    sizes = sorted(glob.glob("hugepages-*kB/shmem_enabled", root_dir=folder))
    for file in ("enabled", "shmem_enabled", *sizes):
        chosen = _CHOSEN.search(text_of(folder, file))
        if chosen and (chosen.group(1) != "never" or file not in sizes or file == OF_2_MIB):
            parts.append(f"{file} {chosen.group(1)}")
    return ", ".join(parts)


def collapse() -> Finding:
    """Can the pages of a sealed segment be made huge afterwards?"""
    name = "collapse"
    if lacking := shortage(TRIED_BYTES):
        return warn(name, f"not tried: {lacking}", "see memory_cgroup and ram_budget")
    try:
        with maps.sealed_map(TRIED_BYTES) as address:
            maps.touch(address, TRIED_BYTES)
            refused = _refused(address)
            got = maps.huge_bytes(address)
    except (OSError, WeightCacheError) as error:
        return _not_tried(name, error)
    if refused:
        return warn(
            name,
            f"MADV_COLLAPSE of a sealed segment: {refused}",
            "run Linux 6.1 or newer; where memory is fragmented, "
            "as root: echo 1 > /proc/sys/vm/compact_memory",
        )
    if got == 0:
        return warn(name, "MADV_COLLAPSE changed nothing", "run another kernel")
    made = TRIED_BYTES if got is None else got  # where nobody shows it, its word has to do
    return ok(name, f"MADV_COLLAPSE made {size_text(made)} of sealed pages huge")


def _refused(address: int) -> str:
    try:
        maps.collapse(address, TRIED_BYTES)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _not_tried(name: str, error: OSError | WeightCacheError) -> Finding:
    said = error.strerror if isinstance(error, OSError) else error.message
    return warn(
        name,
        f"not tried: {size_text(TRIED_BYTES)} cannot be backed, sealed and mapped: {said}",
        "see memfd, file_size and address_space",
    )
