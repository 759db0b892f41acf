"""How much memory weights may have here, and what the kernel does when it runs short."""

from __future__ import annotations

from coordinator.backing import (
    SPARE_BYTES,
    host_headroom_bytes,
    level_headroom_bytes,
    memory_cgroups,
)
from coordinator.memory import default_ram_budget_bytes, usable_bytes
from coordinator.probes.finding import Finding, fail, number_of, ok, text_of, warn
from shm_store.report import size_text

SMALL_BYTES = 1 << 30
"""Less than this is hardly room for a model."""

V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes")
V2_FILES = ("memory.max", "memory.high", "memory.current")
"""Limits, then use."""

RAISE = (
    "raise the limit (docker run --memory, resources.limits.memory, MemoryMax=), or end what uses "
    "the memory"
)


def memory_cgroup(root: str = "/") -> Finding:
    """What do the memory cgroups of this process, and those above them, still allow?"""
    name = "memory_cgroup"
    chain = memory_cgroups(root)
    if not chain:
        return ok(name, "no memory cgroup here; the host's memory is the limit")
    levels = [(level_headroom_bytes(folder, v2), folder, v2) for folder, v2 in chain]
    limited = [(max(0, left), folder, v2) for left, folder, v2 in levels if left is not None]
    kinds = " and ".join(f"v{1 + v2}" for v2 in sorted({v2 for _, v2 in chain}))
    if not limited:
        return ok(name, f"{kinds}: none of {len(chain)} levels has a limit")
    left, folder, v2 = min(limited)
    *limits, use = [number_of(folder, file) for file in (V2_FILES if v2 else V1_FILES)]
    limit = min((limit for limit in limits if limit is not None), default=None)
    found = (
        f"{size_text(left)} left in {folder} (v{1 + v2}), limit {_size(limit)}, "
        f"in use {_size(use)} with file pages, which make room"
    )
    if left <= SPARE_BYTES:
        return fail(name, f"{found}; {size_text(SPARE_BYTES)} of it always stay free", RAISE)
    return ok(name, found) if left >= SMALL_BYTES else warn(name, found, RAISE)


def memory_high(root: str = "/") -> Finding:
    """Is there a limit above which the kernel slows a process down instead of refusing?"""
    set_at = [
        (high, folder)
        for folder, v2 in memory_cgroups(root)
        if v2 and (high := number_of(folder, "memory.high")) is not None
    ]
    if not set_at:
        return ok("memory_high", "not set")
    high, folder = min(set_at)
    return warn(
        "memory_high",
        f"{size_text(high)} in {folder}: above it every allocation crawls, so it counts as a limit",
        "raise or remove it (MemoryHigh=), or keep --ram-budget well below it",
    )


def ram_budget(root: str = "/") -> Finding:
    """What would the budget of a coordinator be that was given none?"""
    usable, budget = usable_bytes(root), default_ram_budget_bytes(root)
    found = f"{size_text(budget)} by default, half of the {size_text(usable)} that may be used now"
    remedy = "end what uses the memory, or say how much it may be with --ram-budget"
    host = host_headroom_bytes(root)
    if host is not None and host <= SPARE_BYTES:
        spare = f"the host has {size_text(host)} left, of which {size_text(SPARE_BYTES)} stay free"
        return fail("ram_budget", f"{found}; {spare}", remedy)
    return ok("ram_budget", found) if budget >= SMALL_BYTES else warn("ram_budget", found, remedy)


def swap(root: str = "/") -> Finding:
    """Can weights be swapped out? They are shared memory, which the kernel swaps as any other."""
    rows = [line.split() for line in text_of(root, "proc/swaps").splitlines()[1:]]
    areas = [(row[0], int(row[2]) * 1024) for row in rows if len(row) > 2 and row[2].isdecimal()]
    if not areas:
        return ok("swap", "none: weights stay in memory")
    swappiness = number_of(root, "proc/sys/vm/swappiness")
    total = size_text(sum(size for _, size in areas))
    found = f"{total} on {', '.join(place for place, _ in areas)}, swappiness {swappiness}"
    if any(_never_swaps(folder, v2) for folder, v2 in memory_cgroups(root)):
        return ok("swap", f"{found}; not for this memory cgroup")
    return warn(
        "swap",
        f"{found}: idle weights can be swapped out, and the next use of them waits for the disk",
        "sysctl vm.swappiness=1, swapoff -a, or MemorySwapMax=0 for the coordinator's service",
    )


def _never_swaps(folder: str, v2: bool) -> bool:
    return v2 and number_of(folder, "memory.swap.max") == 0


def overcommit(root: str = "/") -> Finding:
    """Is an address range free of charge until it is written to?"""
    name = "overcommit"
    mode = number_of(root, "proc/sys/vm/overcommit_memory")
    if mode is None:
        return ok(name, "vm.overcommit_memory is not shown here")
    if mode != 2:
        return ok(name, f"vm.overcommit_memory is {mode}: maps of weights are free of charge")
    figures = {}
    for line in text_of(root, "proc/meminfo").splitlines():
        label, _, amount = line.partition(":")
        if amount.split()[:1] and amount.split()[0].isdecimal():
            figures[label] = int(amount.split()[0]) * 1024
    left = max(0, figures.get("CommitLimit", 0) - figures.get("Committed_AS", 0))
    found = (
        f"vm.overcommit_memory is 2: each process that maps weights is charged their whole size, "
        f"although it shares them; {size_text(left)} left for all"
    )
    remedy = "sysctl vm.overcommit_memory=0, or raise vm.overcommit_ratio"
    return fail(name, found, remedy) if left <= SPARE_BYTES else warn(name, found, remedy)


def _size(size: int | None) -> str:
    return "unknown" if size is None else size_text(size)
