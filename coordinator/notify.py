"""What a coordinator says to the manager above it, systemd or `weight-cache launch`, and gets back.

The protocol is systemd's: datagrams of `NAME=value` lines to $NOTIFY_SOCKET (sd_notify(3)), and
fds from number 3 on with $LISTEN_FDS (sd_listen_fds(3)). What is stored with the manager outlives
this process and comes back to the next one as `inherited`. Without a manager every call does
nothing and says so by False.

Nothing here knows what the fds are, and nothing is kept: each call opens its own socket, so they
may be made from any thread.

    Note on what a manager answers
    fact: systemd never answers; `barrier` tells that it has read what was sent before, not whether
    it kept it
    consequence: with systemd storing is best effort
    choice: under `launch` the reasons for what was not kept come back through the barrier's pipe,
    which libsystemd's own sd_notify_barrier ignores; so there a barrier is an acknowledgement
    cost: a manager that writes something else into that pipe would be taken for one that refuses
"""

from __future__ import annotations

import array
import errno
import fcntl
import logging
import os
import select
import socket
import time
from collections.abc import Sequence

from shm_store.errors import ResourceError

NOTIFY_SOCKET = "NOTIFY_SOCKET"
STORE_LIMIT = "FDSTORE"
LISTEN_PID = "LISTEN_PID"
LISTEN_FDS = "LISTEN_FDS"
LISTEN_FDNAMES = "LISTEN_FDNAMES"
LISTEN_PIDFDID = "LISTEN_PIDFDID"
"""Newer systemd's word against a reused pid; only taken out of the environment here."""

FIRST_FD = 3
FDS_PER_MESSAGE = 250
"""The kernel's own bound is 253 (SCM_MAX_FD)."""

UNNAMED = "unknown"
"""The name of what came without one, as sd_listen_fds_with_names(3) calls it."""

TIMEOUT_S = 5.0
REFUSALS_LIMIT_BYTES = 4096

log = logging.getLogger("coordinator")


class StoreRefused(ResourceError):
    """The manager has not kept something. It holds nothing of that message."""

    code = "store_refused"
    default_remedy = "raise FileDescriptorStoreMax= of the unit, or `ulimit -n` for `launch`"


class StoreLost(ResourceError):
    """The manager cannot be reached, or does not read. What was said may not have arrived."""

    code = "store_lost"
    default_remedy = "see whether the process that started this coordinator is alive"


class ManagerGone(StoreLost):
    """Nobody has its socket any more. A supervisor that was killed; the front says so."""

    code = "manager_gone"


# --- saying -------------------------------------------------------------------------------------


def offered() -> bool:
    """Say whether there is a manager to talk to."""
    return bool(os.environ.get(NOTIFY_SOCKET))


def limit() -> int | None:
    """Return how many fds the manager keeps, if it says so (systemd does since version 254)."""
    text = os.environ.get(STORE_LIMIT, "")
    return int(text) if text.isascii() and text.isdigit() else None


def ready() -> bool:
    """Say that this coordinator serves."""
    return _send("READY=1")


def stopping() -> bool:
    """Say that this coordinator leaves on purpose: it is not to be started again."""
    return _send("STOPPING=1")


def store(name: str, fds: Sequence[int], timeout_s: float = TIMEOUT_S) -> bool:
    """Have the manager keep `fds` under `name`, beside those it has under it. They stay ours too.

    Kept until `remove`, also when the other end of one hangs up.

    Raises:
        StoreLost: they may not have arrived.
    """
    sent = False
    for first in range(0, len(fds), FDS_PER_MESSAGE):
        some = fds[first : first + FDS_PER_MESSAGE]
        sent = _send(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", some, timeout_s)
    return sent


def remove(name: str, timeout_s: float = TIMEOUT_S) -> bool:
    """Have the manager close everything it keeps under `name`.

    Raises:
        StoreLost: it may not have heard.
    """
    return _send(f"FDSTOREREMOVE=1\nFDNAME={name}", (), timeout_s)


def barrier(timeout_s: float = TIMEOUT_S) -> bool:
    """Return once the manager has done all that was said before, by whatever thread.

    Raises:
        StoreRefused: some of it was not kept. Only `launch` says so; see the note.
        StoreLost: it was not done in time.
    """
    deadline_s = time.monotonic() + timeout_s
    fd = begin_barrier(timeout_s)
    if fd is None:
        return False
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
            raise StoreLost(f"the manager has not read what it was told within {timeout_s:g} s")
    except StoreLost:
        os.close(fd)
        raise
    end_barrier(fd)
    return True


def begin_barrier(timeout_s: float = TIMEOUT_S) -> int | None:
    """Return an fd for `end_barrier`, readable once all that was said before is done.

    For an event loop. The fd is the caller's: to give to `end_barrier`, or to close.

    Raises:
        StoreLost: the manager cannot be reached.
    """
    ours, theirs = os.pipe()
    try:
        sent = _send("BARRIER=1", (theirs,), timeout_s)
    except StoreLost:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    if not sent:
        os.close(ours)
        return None
    return ours


def end_barrier(fd: int) -> None:
    """Close a readable fd of `begin_barrier`.

    Raises:
        StoreRefused: some of what was said before was not kept.
    """
    try:
        refusals = os.read(fd, REFUSALS_LIMIT_BYTES)
    finally:
        os.close(fd)
    if refusals:
        raise StoreRefused(refusals.decode(errors="replace").strip())


def _send(text: str, fds: Sequence[int] = (), timeout_s: float = TIMEOUT_S) -> bool:
    path = os.environ.get(NOTIFY_SOCKET)
    if not path:
        return False
    address = "\0" + path[1:] if path.startswith("@") else path
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as telling:
            telling.settimeout(timeout_s)
            # Only a connected one can wait for room: the others are always "writable".
            telling.connect(address)
            telling.sendmsg([text.encode()], rights)
    except TimeoutError as error:
        raise StoreLost(f"the manager has not read anything for {timeout_s:g} s") from error
    except OSError as error:
        if error.errno == errno.EBADF:
            raise  # our own mistake: one of these fds is closed
        kind = ManagerGone if error.errno in (errno.ECONNREFUSED, errno.ENOENT) else StoreLost
        raise kind(f"the manager cannot be told on {path}: {error.strerror}") from error
    return True


# --- getting back -------------------------------------------------------------------------------


def inherited() -> dict[str, list[int]]:
    """Return the fds that came with this process, by name, and take what says so out of environ.

    They are the caller's, and no child inherits them. Nothing, the second time, and where they
    were meant for another process. What the environment says and is not there is left out.
    """
    pid = os.environ.pop(LISTEN_PID, "")
    count = os.environ.pop(LISTEN_FDS, "")
    names = os.environ.pop(LISTEN_FDNAMES, "").split(":")
    os.environ.pop(LISTEN_PIDFDID, None)
    if pid != str(os.getpid()) or not (count.isascii() and count.isdigit()):
        return {}
    if len(names) != int(count):
        names = [UNNAMED] * int(count)
    found: dict[str, list[int]] = {}
    for fd, name in enumerate(names, FIRST_FD):
        try:
            flags = fcntl.fcntl(fd, fcntl.F_GETFD)
        except OSError:
            log.warning("fd %d (%s) did not come with this process, although it was said", fd, name)
            continue
        fcntl.fcntl(fd, fcntl.F_SETFD, flags | fcntl.FD_CLOEXEC)
        found.setdefault(name, []).append(fd)
    return found
