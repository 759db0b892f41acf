"""Every probe, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from coordinator.probes import folders, huge_pages, kernel, limits, memory, packages
from coordinator.probes.finding import Finding, warn

Probe = Callable[[], Finding]


def probes(root: str = "/", socket: str | None = None) -> dict[str, Probe]:
    """Return every probe by the name of its finding, in the order in which they are shown.

    Args:
        socket: the coordinator's, as `shm_store.paths.socket_path` takes it.
    """
    made: dict[str, Probe] = {
        "kernel": kernel.version,
        "proc": partial(kernel.proc, root),
        "memfd": kernel.memfd,
        "pidfd": kernel.pidfd,
        "peer_pidfd": kernel.peer_pidfd,
        "sockets": kernel.sockets,
        "socket_folder": partial(folders.socket_folder, socket),
        "dev_shm": partial(folders.dev_shm, root),
        "memory_cgroup": partial(memory.memory_cgroup, root),
        "memory_high": partial(memory.memory_high, root),
        "ram_budget": partial(memory.ram_budget, root),
        "swap": partial(memory.swap, root),
        "overcommit": partial(memory.overcommit, root),
        "huge_pages": partial(huge_pages.huge_pages, root),
        "collapse": huge_pages.collapse,
        "open_files": limits.open_files,
        "file_size": limits.file_size,
        "data_size": limits.data_size,
        "address_space": limits.address_space,
        "private_map": partial(limits.private_map, root),
        "map_count": partial(limits.map_count, root),
        "pinning": partial(limits.pinning, root),
        "torch": packages.torch,
        "torchao": packages.torchao,
    }
    for extra in packages.EXTRAS:
        made[f"extra_{extra.name}"] = partial(packages.installed, extra, root)
    return made


def found_by(name: str, probe: Probe) -> Finding:
    """Return what `probe` finds; where it could not look, a warning that says so."""
    try:
        return probe()
    except OSError as error:
        return warn(
            name,
            f"could not be found out: {error}",
            "see what keeps this process from looking: a seccomp filter, /proc hidden, no fds left",
        )
