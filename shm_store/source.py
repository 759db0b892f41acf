"""A checkpoint file, as the process that asks for it opens it.

The asker opens the path, so its permissions, working directory and mount namespace apply; the
coordinator reads the fingerprint from that very fd, so it describes what will be read.
"""

from __future__ import annotations

import os
import stat

from shm_store.errors import SourceNotOpened
from shm_store.keys import Fingerprint


def open_source(path: str | os.PathLike[str]) -> int:
    """Return an fd of the checkpoint at `path`, the caller's to close.

    Raises:
        SourceNotOpened: missing, not permitted, or not a regular file.
    """
    name = os.fspath(path)
    try:
        # O_NONBLOCK: opening a FIFO must not wait for a writer. It means nothing to a regular file.
        fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SourceNotOpened(f"{name}: {reason}", source=name) from error
    try:
        check_regular(fd, name)
    except SourceNotOpened:
        os.close(fd)
        raise
    return fd


def check_regular(fd: int, name: str) -> os.stat_result:
    """Return the status of an opened source.

    Raises:
        SourceNotOpened: it is a directory, a device, a pipe or a socket.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        if stat.S_ISDIR(status.st_mode):
            remedy = "give the .safetensors file in it"
            raise SourceNotOpened(f"{name}: a directory", source=name, remedy=remedy)
        raise SourceNotOpened(f"{name}: not a regular file", source=name)
    return status


def fingerprint(status: os.stat_result) -> Fingerprint:
    """Return what the bytes of a file are, as far as its inode says: device, inode, size, mtime.

    A file that is renamed keeps it; one that is written to, or replaced, does not.
    """
    return Fingerprint(
        f"file:{status.st_dev:x}:{status.st_ino:x}:{status.st_size}:{status.st_mtime_ns}"
    )
