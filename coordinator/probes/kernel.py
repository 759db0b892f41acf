"""What weight-cache is built on: without these of the kernel's calls nothing of it works."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import select
import signal
import socket as sockets_of
import struct

from coordinator.fd_limit import out_of_fds
from coordinator.probes.finding import Finding, fail, ok, warn
from shm_store import channel, segment
from shm_store.channel import Channel
from shm_store.errors import FdsExhausted, PlatformUnsupported, WeightCacheError
from shm_store.keys import GenerationId

OLDEST = (5, 3)
"""pidfd_open."""

SANDBOX = "allow it in this container's seccomp profile, or run it without gVisor or its like"
_GENERATION = GenerationId("doctor")
_BYTES = b"weights"


def version() -> Finding:
    """Is the kernel new enough?"""
    release = os.uname().release
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if numbers is None:
        return warn("kernel", f"Linux {release}: not a version", "see the other findings")
    if tuple(map(int, numbers.groups())) < OLDEST:
        return fail("kernel", f"Linux {release}", PlatformUnsupported.default_remedy)
    return ok("kernel", f"Linux {release}")


def proc(root: str = "/") -> Finding:
    """Is /proc there? It has what memory is left, which peers end, and what an audit compares."""
    for file in ("proc/meminfo", "proc/self/stat", "proc/self/fdinfo"):
        if not os.access(os.path.join(root, file), os.R_OK):
            return fail("proc", f"/{file} cannot be read", "mount /proc, and let this user read it")
    return ok("proc", "mounted")


def memfd() -> Finding:
    """Can memory be shared that nobody can change, and edited without changing it for others?"""
    try:
        fd = segment.create(_GENERATION)
    except (OSError, PlatformUnsupported) as error:
        return fail("memfd", f"memfd_create: {_said(error)}", _remedy(error))
    try:
        segment.write_at(fd, _BYTES, 0)
        segment.freeze(fd, "a memfd")
        if _written_over(fd):
            return fail("memfd", "a sealed memfd can still be written to", SANDBOX)
        with mmap.mmap(fd, len(_BYTES), mmap.MAP_PRIVATE) as edited:
            edited[:1] = b"W"
            if edited[:] != b"Weights" or os.pread(fd, len(_BYTES), 0) != _BYTES:
                return fail("memfd", "an edit in a private map is lost, or seen by others", SANDBOX)
    except (OSError, WeightCacheError) as error:
        return fail(
            "memfd", f"a memfd cannot be filled, sealed and mapped: {_said(error)}", SANDBOX
        )
    finally:
        os.close(fd)
    return ok("memfd", "made, sealed, mapped; an edit stays private")


def _written_over(fd: int) -> bool:
    try:
        os.pwrite(fd, b"X", 0)
    except PermissionError:
        return False
    return True


def pidfd() -> Finding:
    """Can a process be watched without a chance that its pid becomes another's?"""
    if not hasattr(os, "pidfd_open"):
        return fail("pidfd", "this Python has no pidfd_open", PlatformUnsupported.default_remedy)
    try:
        fd = os.pidfd_open(os.getpid())
    except OSError as error:
        return fail("pidfd", f"pidfd_open: {_said(error)}", _remedy(error))
    try:
        signal.pidfd_send_signal(fd, 0)
        watched = select.poll()
        watched.register(fd, select.POLLIN)
        ended = watched.poll(0)
    except OSError as error:
        return fail("pidfd", f"a pidfd cannot be used: {_said(error)}", SANDBOX)
    finally:
        os.close(fd)
    if ended:
        return fail("pidfd", "the pidfd of a process that runs says that it has ended", SANDBOX)
    return ok("pidfd", "opened, signalled, watched")


def peer_pidfd() -> Finding:
    """Does the kernel say by a pidfd, and not only by a number, who connected?"""
    try:
        ours, theirs = channel.pair()
    except (OSError, PlatformUnsupported) as error:
        return warn("peer_pidfd", f"not tried: {_said(error)}", "see `sockets`")
    with ours, theirs:
        try:
            fd = ours.getsockopt(sockets_of.SOL_SOCKET, channel.SO_PEERPIDFD)
        except OSError as error:
            return warn(
                "peer_pidfd",
                f"no SO_PEERPIDFD ({_said(error)}): a peer is known by its pid, which could be "
                "another's by the time it is looked at",
                "run Linux 6.5 or newer",
            )
    os.close(fd)
    return ok("peer_pidfd", "SO_PEERPIDFD names who connects")


def sockets() -> Finding:
    """Do whole messages go through a Unix SEQPACKET socket, with an fd, and who sent them?"""
    try:
        first, second = map(Channel, channel.pair())
    except (OSError, PlatformUnsupported) as error:
        return fail("sockets", f"no Unix SEQPACKET sockets: {_said(error)}", _remedy(error))
    with contextlib.closing(first), contextlib.closing(second):
        try:
            first.send(_BYTES, [first.fileno()])
            received = second.receive()
            sender = second.credentials()
        except (OSError, WeightCacheError, struct.error) as error:
            return fail("sockets", f"a message with an fd: {_said(error)}", _remedy(error))
        message, fds = received or (b"", [])
        try:
            whole = message == _BYTES and [os.fstat(fd).st_ino for fd in fds] == [
                os.fstat(first.fileno()).st_ino
            ]
        finally:
            channel.close_all(fds)
    if not whole:
        return fail("sockets", "a message came without its bytes or its fd", SANDBOX)
    if (sender.pid, sender.uid) != (os.getpid(), os.geteuid()):
        return fail("sockets", f"the kernel names pid {sender.pid} as the sender", SANDBOX)
    return ok("sockets", "SEQPACKET: whole messages, with fds, and who sent them")


def _said(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return error.message if isinstance(error, WeightCacheError) else str(error)


def _remedy(error: Exception) -> str:
    """Return what to do: most often it is a sandbox that refuses such a call."""
    if isinstance(error, PlatformUnsupported):
        return error.remedy
    if isinstance(error, FdsExhausted) or (isinstance(error, OSError) and out_of_fds(error)):
        return "raise `ulimit -n`; see open_files"
    if isinstance(error, OSError) and error.errno == errno.EACCES:
        return "sysctl vm.memfd_noexec=1 (with 2 some kernels refuse every memfd), or " + SANDBOX
    return SANDBOX
