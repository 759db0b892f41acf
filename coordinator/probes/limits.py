"""Limits of a process: `ulimit`, and what the kernel sets for each.

The limits are those of this very process. A service, a container or another shell may have others,
so `doctor` is run where the coordinator and the workers are.
"""

from __future__ import annotations

import errno
import glob
import os
import resource

from coordinator.fd_limit import FOR_CONNECTIONS
from coordinator.memory import default_ram_budget_bytes
from coordinator.probes import maps
from coordinator.probes.finding import Finding, fail, number_of, ok, warn
from shm_store import segment
from shm_store.errors import WeightCacheError
from shm_store.keys import GenerationId
from shm_store.layout import HUGE_PAGE_BYTES, PAGE_BYTES
from shm_store.report import size_text

FEWEST_FDS = 32
"""With 16 a coordinator has none for a loader, with 20 it loads one file (measured)."""
FEW_FDS = 1024
FEW_MAPS = 4096
"""A process that has imported torch has 400 of its own (measured), and two for each generation."""
PINNED_BYTES = 4 * PAGE_BYTES
SMALLEST_MAP_BYTES = HUGE_PAGE_BYTES


def open_files() -> Finding:
    """How many sessions and segments can a coordinator have?"""
    name = "open_files"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return ok(name, f"soft limit {_count(soft)}, hard limit none")
    found = (
        f"soft limit {_count(soft)}, hard limit {hard}; the coordinator takes the hard one: "
        f"2 for each session, 1 for each segment, {FOR_CONNECTIONS} kept free"
    )
    remedy = "raise `ulimit -Hn` (LimitNOFILE=, docker run --ulimit nofile=65536)"
    if hard < FEWEST_FDS:
        return fail(name, found, remedy)
    return ok(name, found) if hard >= FEW_FDS else warn(name, found, remedy)


def file_size() -> Finding:
    """Does a limit on files, which counts for segments, too, leave room for one?"""
    name = "file_size"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit == resource.RLIM_INFINITY:
        return ok(name, "no limit")
    found = f"{size_text(limit)}, which no segment can exceed"
    remedy = "ulimit -f unlimited (LimitFSIZE=infinity) for the coordinator and the workers"
    fd = segment.create(GenerationId("doctor"))
    try:
        os.ftruncate(fd, HUGE_PAGE_BYTES)  # which takes no memory
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        return fail(name, found, remedy)
    finally:
        os.close(fd)
    return warn(name, found, remedy)


def data_size() -> Finding:
    """Does a limit on private memory leave room for maps of weights, which count as such?"""
    from coordinator.private_memory import MEMORY_LIMIT_BYTES

    name = "data_size"
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft == resource.RLIM_INFINITY:  # and so is the hard limit
        return ok(name, f"no limit; a loader gives itself {size_text(MEMORY_LIMIT_BYTES)}")
    remedy = "ulimit -d unlimited (LimitDATA=infinity) for the coordinator and the workers"
    if hard != resource.RLIM_INFINITY and hard < MEMORY_LIMIT_BYTES:
        less = f"{size_text(hard)}: less than the {size_text(MEMORY_LIMIT_BYTES)} of a loader"
        return warn(name, less + ", and weights count, too, where they are mapped", remedy)
    return warn(name, f"{size_text(soft)}: weights count in full where they are mapped", remedy)


def address_space() -> Finding:
    """Does a limit on addresses leave room for maps of weights?"""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return ok("address_space", "no limit")
    return warn(
        "address_space",
        f"{size_text(limit)}: weights count in full where they are mapped, and so does all that "
        "torch and CUDA reserve",
        "ulimit -v unlimited (LimitAS=infinity); bound memory by a cgroup instead",
    )


def private_map(root: str = "/") -> Finding:
    """Can a worker map as many weights as the default budget allows?"""
    name = "private_map"
    if number_of(root, "proc/sys/vm/overcommit_memory") == 2:
        return ok(name, "not tried, as others would lack it meanwhile: see overcommit")
    wanted = size = max(default_ram_budget_bytes(root), SMALLEST_MAP_BYTES)
    while size >= SMALLEST_MAP_BYTES and not maps.fits(size):
        size //= 2
    if size == wanted:
        return ok(name, f"{size_text(size)} mapped private and writable, as workers do")
    remedy = "raise `ulimit -v` and `ulimit -d`, and see overcommit"
    if size < SMALLEST_MAP_BYTES:
        return fail(name, f"not even {size_text(SMALLEST_MAP_BYTES)} can be mapped", remedy)
    return warn(name, f"only {size_text(size)} of {size_text(wanted)} can be mapped", remedy)


def map_count(root: str = "/") -> Finding:
    """How many maps may a process have?"""
    count = number_of(root, "proc/sys/vm/max_map_count")
    if count is None:
        return ok("map_count", "vm.max_map_count is not shown here")
    found = f"vm.max_map_count is {count}; each generation takes 2 in a worker"
    if count < FEW_MAPS:
        return warn("map_count", found, "sysctl vm.max_map_count=65530")
    return ok("map_count", found)


def pinning(root: str = "/") -> Finding:
    """May pages be locked in memory?

    What a GPU's driver pins is not tried: that needs the driver, and torch. `scripts/device-check`
    does it.
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    told = "no limit" if limit == resource.RLIM_INFINITY else f"limit {size_text(limit)}"
    tried = "not tried: no device"
    if has_gpu(root):
        tried = "not tried, as it needs torch: scripts/device-check does"
    try:
        with maps.sealed_map(PINNED_BYTES) as address:
            maps.lock(address, PINNED_BYTES)
    except (OSError, WeightCacheError) as error:
        said = getattr(error, "strerror", None) or str(error)
        return warn(
            "pinning",
            f"mlock of {size_text(PINNED_BYTES)}: {said} ({told}); pinning for a GPU: {tried}",
            "raise `ulimit -l` (LimitMEMLOCK=, docker run --ulimit memlock=-1); without pinned "
            "memory uploads to a GPU are slower",
        )
    return ok(
        "pinning",
        f"mlock of {size_text(PINNED_BYTES)} works ({told}); pinning for a GPU: {tried}",
    )


def has_gpu(root: str = "/") -> bool:
    """Say whether a GPU's driver shows a device here, NVIDIA's or AMD's."""
    return any(
        glob.glob(os.path.join(glob.escape(root), "dev", name)) for name in ("nvidia[0-9]*", "kfd")
    )


def _count(limit: int) -> str:
    return "none" if limit == resource.RLIM_INFINITY else str(limit)
