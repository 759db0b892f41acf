"""One coordinator in the foreground: the lock that makes it the only one, its socket, its loop.

Whoever starts it decides where it writes and what its exit code means; here is only its life.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import socket
import stat
from collections.abc import Callable

from coordinator import notify
from coordinator.config import Config
from coordinator.fd_limit import raise_fd_limit
from coordinator.memory import default_ram_budget_bytes
from coordinator.server import Server
from shm_store import channel
from shm_store.errors import ArgumentRefused, CoordinatorRunning
from shm_store.report import size_text
from shm_store.wire import RAM

log = logging.getLogger("coordinator")


def serve(
    config: Config, *, lock: int | None = None, ready: Callable[[], object] | None = None
) -> int:
    """Run a coordinator in the foreground until it is drained or told to stop.

    Prints one line to standard output when it listens. Returns the exit code.

    Args:
        lock: what `take_lock` gave to the caller; it is this function's then.
        ready: called when it listens.

    Raises:
        CoordinatorRunning: another coordinator has this socket.
        ArgumentRefused: the socket's path is too long, or something else has this name, or that
            of its lock.
    """
    logging.basicConfig(format="weight-cache: %(message)s", level=logging.INFO)
    raise_fd_limit()
    # Were it inherited as ignored, the kernel would reap our children and keep their exit codes.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if lock is None:
        lock = take_lock(config.socket)
    try:
        others = _unlink_socket(config.socket)  # we hold the lock, so whoever bound it is gone
        listener = channel.listen(config.socket)
        bound = os.lstat(config.socket)
        limit = config.ram_budget_bytes
        if limit is None:
            limit = default_ram_budget_bytes()
        try:
            asyncio.run(_serve(config, listener, limit, others, ready))
        finally:
            # Whoever cleans up /tmp may have removed either, and another coordinator made its own.
            if _is_at(bound, config.socket):
                os.unlink(config.socket)
    finally:
        if _is_at(os.fstat(lock), _lock_path(config.socket)):
            os.unlink(_lock_path(config.socket))
        os.close(lock)
    return 0


async def _serve(
    config: Config,
    listener: socket.socket,
    limit: int,
    others: bool,
    ready: Callable[[], object] | None,
) -> None:
    loop = asyncio.get_running_loop()
    server = Server(loop, listener, limit, huge_pages=config.huge_pages)
    server.recover(others, config.resume_patience_s)
    server.leave_after(config.leave_after_s)
    path = config.socket
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.exit)
    ram = server.ledger.pools[RAM].limit_bytes  # one that was set before may have come back
    print(f"weight-cache: ready on {path} (ram budget {size_text(ram)})", flush=True)
    if ready is not None:
        ready()
    _tell(notify.ready)
    await server.stopped
    _tell(notify.stopping, gone=logging.DEBUG)  # a supervisor was killed, and its front says so
    await server.close()


def _tell(what: Callable[[], bool], *, gone: int = logging.WARNING) -> None:
    """Tell the manager, if there is one that listens; `gone` is how loud it is if none does."""
    try:
        what()
    except notify.ManagerGone as error:
        log.log(gone, "%s", error)
    except notify.StoreLost as error:
        log.warning("%s", error)


def _lock_path(path: str) -> str:
    return f"{path}.lock"


def take_lock(path: str) -> int:
    """Return the fd of the lock that makes this coordinator the only one on its socket.

    Held for life; the kernel drops it with the process. Unlinking a stale socket and binding anew
    is not enough by itself: several starters at once would all believe they won.

    Raises:
        CoordinatorRunning: another has it.
        ArgumentRefused: there can be no such file.
    """
    while True:
        try:
            lock = os.open(_lock_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ArgumentRefused(
                f"{_lock_path(path)} cannot be opened: {error.strerror}",
                remedy="choose a --socket in a folder that exists and is yours",
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise CoordinatorRunning(f"a coordinator already serves {path}") from None
        if os.fstat(lock).st_size:
            os.close(lock)  # ours is empty, and is removed at the end
            raise ArgumentRefused(
                f"{_lock_path(path)} exists and is no lock", remedy="choose another --socket"
            )
        if _is_at(os.fstat(lock), _lock_path(path)):
            return lock
        os.close(lock)  # the previous owner unlinked it between our open and our lock


def _is_at(ours: os.stat_result, path: str) -> bool:
    try:
        return os.path.samestat(ours, os.stat(path))
    except FileNotFoundError:
        return False


def _unlink_socket(path: str) -> bool:
    """Remove a socket that its owner left behind, and nothing else: paths are typed by people.

    Returns:
        Whether there was one.

    Raises:
        ArgumentRefused: something that is no socket has this name.
    """
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ArgumentRefused(
                f"{path} exists and is no socket", remedy="choose another --socket"
            )
        os.unlink(path)
        return True
    except FileNotFoundError:
        return False
