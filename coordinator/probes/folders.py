"""Folders: the socket's, and /dev/shm, which is not ours."""

from __future__ import annotations

import os
import socket as sockets_of
import stat

from coordinator.probes.finding import Finding, fail, ok, warn
from shm_store import paths
from shm_store.channel import PATH_LIMIT_BYTES
from shm_store.errors import ArgumentRefused
from shm_store.report import size_text

DATA_LOADER_BYTES = 1 << 30
"""A container has 64 MiB of /dev/shm where nobody says more, and a DataLoader soon fills that."""

CHOOSE = f"choose another with --socket or {paths.SOCKET_VARIABLE}"


def socket_folder(chosen: str | None = None) -> Finding:
    """Can the coordinator bind its socket where workers will look for it?"""
    name = "socket_folder"
    try:
        path = paths.socket_path(chosen)
    except ArgumentRefused as error:
        return fail(name, error.message, error.remedy)
    size = len(os.fsencode(path))
    if size > PATH_LIMIT_BYTES:
        return fail(
            name,
            f"{path} has {size} bytes; a socket's path has {PATH_LIMIT_BYTES} at most",
            "choose a shorter --socket or " + paths.SOCKET_VARIABLE,
        )
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        return _missing(name, path, folder)
    try:
        _bind_in(folder)
    except OSError as error:
        return fail(name, f"no socket can be made in {folder}: {error.strerror}", CHOOSE)
    status = os.stat(folder)
    mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
    if status.st_uid not in (0, os.geteuid()):
        owner = f"{folder} belongs to user {status.st_uid}, who could put another socket there"
        return warn(name, owner, CHOOSE)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return warn(
            name,
            f"{folder} has {mode}: other users could be the first to use the socket's name",
            f"choose a folder of your own, with mode 0700, by --socket or {paths.SOCKET_VARIABLE}",
        )
    return ok(name, f"a socket was made in {folder}, {mode}")


def _missing(name: str, path: str, folder: str) -> Finding:
    """Say whether `serve` would make the folder, which it does for the default one only."""
    above = folder
    while not os.path.exists(above):
        above = os.path.dirname(above)
    if path != paths.default_socket_path():
        return fail(name, f"there is no folder {folder}", f"make it, or {CHOOSE}")
    if not os.path.isdir(above) or not os.access(above, os.W_OK | os.X_OK):
        why = f"{above} is no folder, or may not be written to"
        return fail(name, f"{folder} cannot be made: {why}", CHOOSE)
    return ok(name, f"{folder} is not there yet; `serve` makes it, with mode 0700")


def _bind_in(folder: str) -> None:
    """Make a socket under a name of its own, and remove it."""
    # By the folder's fd: this name is longer than the real one, and its path may be too long.
    opened = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        by_fd = f"/proc/self/fd/{opened}"
        place = os.path.join(by_fd if os.path.exists(by_fd) else folder, f".doctor-{os.getpid()}")
        with sockets_of.socket(sockets_of.AF_UNIX, sockets_of.SOCK_SEQPACKET) as bound:
            bound.bind(place)
            os.unlink(place)
    finally:
        os.close(opened)


def dev_shm(root: str = "/") -> Finding:
    """Is /dev/shm, where a DataLoader's processes put their batches, large enough?"""
    uses = "weight-cache does without it; torch's DataLoader and multiprocessing do not"
    remedy = "docker run --shm-size=8g or --ipc=host; in Kubernetes, an emptyDir with medium Memory"
    try:
        figures = os.statvfs(os.path.join(root, "dev/shm"))
    except OSError as error:
        return warn("dev_shm", f"no /dev/shm ({error.strerror}): {uses}", remedy)
    size, free = figures.f_blocks * figures.f_frsize, figures.f_bavail * figures.f_frsize
    found = f"{size_text(size)}, {size_text(free)} free; {uses}"
    if free < DATA_LOADER_BYTES:
        return warn("dev_shm", found, remedy)
    return ok("dev_shm", found)
