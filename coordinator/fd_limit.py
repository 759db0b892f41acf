"""How many file descriptors this process may have, and who may take the last ones.

Note on numbers
fact: a new fd gets the lowest free number
consequence: a number says that at least so many fds are open, and who never keeps one of the
highest numbers leaves as many fds to the others
choice: connections stop first, then sources, then segments; what is left then is for the pipes
and pidfds of children, and for the moment in which a peer is told that it is refused
cost: up to 32 fds lie idle; a quarter of a limit that is small
"""

from __future__ import annotations

import errno
import os
import resource

from shm_store.errors import FdsExhausted

FOR_CONNECTIONS = 32
"""So many of the highest numbers are not for a session: neither its socket nor its pidfd."""
FOR_SOURCES = 16
FOR_SEGMENTS = 8

REMEDY = (
    "raise `ulimit -n` of the coordinator, end some of the processes it serves, or "
    "`weight-cache evict --idle`"
)


def raise_fd_limit() -> None:
    """Use all the fds this process may have: one per segment, two per session, one per source."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def reserved(fd: int, kept: int) -> bool:
    """Say whether `fd` is one of the `kept` highest numbers, and so not for this use."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return False
    return fd >= limit - min(kept, limit * kept // 128)


def require_free(fd: int, kept: int) -> None:
    """Close `fd` if it is reserved.

    Raises:
        OSError: EMFILE, as if there had been no number any more.
    """
    if reserved(fd, kept):
        os.close(fd)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def exhausted(lost: str) -> FdsExhausted:
    """Return the error for a peer that had to do without `lost`. The fault is not the peer's."""
    return FdsExhausted(f"the coordinator is out of file descriptors: {lost}", remedy=REMEDY)


def out_of_fds(error: OSError) -> bool:
    """Say whether there was no fd for this process, or none on the whole system."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def described(error: OSError) -> str:
    """Return why something could not be made; if it was for want of fds, with the remedy."""
    if not out_of_fds(error):
        return error.strerror or str(error)
    return f"the coordinator is out of file descriptors ({error.strerror}): {REMEDY}"
