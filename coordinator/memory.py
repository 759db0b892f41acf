"""How much memory this process may really use.

The cgroup reader lives in `coordinator.backing`, which has to run by itself.
"""

from __future__ import annotations

from coordinator.backing import cgroup_headroom_bytes


def usable_bytes(root: str = "/") -> int:
    """Return what this process could use now: what its cgroups allow and the host has available.

    Args:
        root: where /proc and the cgroups are looked for; for tests.
    """
    # 20 ms to import, and a coordinator with --ram-budget never needs it.
    import psutil

    available: int = psutil.virtual_memory().available
    headroom = cgroup_headroom_bytes(root)
    return available if headroom is None else min(available, headroom)


def default_ram_budget_bytes(root: str = "/") -> int:
    """Return the RAM budget of a coordinator that was given none: half of what it may use."""
    return usable_bytes(root) // 2
