"""A file from a URL as a file of this host, for readers that need one.

It has no name, so it is gone with this process however that ends; it lies in TMPDIR of the
coordinator's environment, and is no memory of ours unless that folder is.
"""

from __future__ import annotations

import errno
import os
import tempfile

from coordinator.checkpoint import Copy
from coordinator.local_file import LocalFile
from coordinator.pump import Meter
from coordinator.remote_file import RemoteFile
from coordinator.remote_pump import RemotePump
from shm_store.errors import DiskFull, SourceError
from shm_store.report import size_text


def localized(remote: RemoteFile, meter: Meter | None = None) -> LocalFile:
    """Return a copy on this host of a file at a URL. Its fd is the caller's to close.

    Args:
        meter: counts its bytes as they come, beside others that it may have counted.

    Raises:
        DiskFull: the folder for temporary files has no room for it.
        SourceError: it could not be read.
    """
    fd, folder = _made(remote)
    try:
        os.truncate(fd, remote.size_bytes)
        whole = [Copy(0, 0, remote.size_bytes)] if remote.size_bytes else []
        RemotePump([remote], fd).copy(whole, 0, meter or Meter(remote.size_bytes, lambda *_: None))
        remote.check_unchanged()
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _full(remote, folder) from error
        raise
    except BaseException:
        os.close(fd)
        raise
    return LocalFile(fd, remote.name, remote.size_bytes)


def _made(remote: RemoteFile) -> tuple[int, str]:
    """Return a new file without a name, and the folder that it is in."""
    try:
        folder = tempfile.gettempdir()
        room = os.statvfs(folder)
        if room.f_bavail * room.f_frsize < remote.size_bytes:
            raise _full(remote, folder)
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.dup(file.fileno()), folder
    except OSError as error:
        raise SourceError(
            f"{remote.name}: a file of its format is downloaded before it is read, and no file can "
            f"be made for that: {error.strerror}",
            source=remote.name,
            remedy="start the coordinator with TMPDIR set to a folder where its user may write",
        ) from error


def _full(remote: RemoteFile, folder: str) -> DiskFull:
    return DiskFull(
        f"{remote.name}: a file of its format is downloaded before it is read, and {folder} has no "
        f"room for its {size_text(remote.size_bytes)}",
        folder=folder,
    )
