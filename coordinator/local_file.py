"""An opened file of a checkpoint, which the loader reads. Does not own its fd."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence

from coordinator.pump import read_into
from shm_store.errors import SourceChanged, SourceMalformed, SourceNotOpened
from shm_store.source import check_regular, fingerprint
from shm_store.wire import Fetch


class LocalFile:
    """A file, its size, and its name for errors."""

    __slots__ = ("fd", "name", "size_bytes")

    def __init__(self, fd: int, name: str, size_bytes: int) -> None:
        self.fd = fd
        self.name = name
        self.size_bytes = size_bytes

    def read(self, size_bytes: int, offset_bytes: int) -> bytes:
        """Return so many bytes of it.

        Raises:
            SourceMalformed: it ends before that.
            SourceError: it cannot be read.
        """
        data = bytearray(size_bytes)
        view = memoryview(data)
        done = 0
        while done < size_bytes:
            got = read_into(self.fd, view[done:], offset_bytes + done, self.name)
            if got == 0:
                at = offset_bytes + done
                raise SourceMalformed(f"{self.name}: ends at byte {at}", source=self.name)
            done += got
        return bytes(data)


def opened(fetch: Fetch, fds: Sequence[int]) -> list[LocalFile]:
    """Return the files that came with a FETCH, checked.

    Raises:
        SourceNotOpened: one is no regular file, or does not let itself be read.
        SourceChanged: one was written to, or cut, since.
    """
    files = []
    for fd, name in zip(fds, _names(fetch), strict=True):
        files.append(LocalFile(fd, name, check_regular(fd, name).st_size))
        _check_readable(fd, name)
        os.set_blocking(fd, True)
    check_unchanged(fetch, fds)
    return files


def check_unchanged(fetch: Fetch, fds: Sequence[int]) -> None:
    """Refuse what is not any more what was asked for.

    Raises:
        SourceChanged: a file was written to, or cut, since.
    """
    names = fetch.files or (fetch.source,)
    now = fingerprint([os.fstat(fd) for fd in fds], names, fetch.reading)
    if now != fetch.fingerprint:
        raise SourceChanged(
            f"{fetch.source}: it changed between being asked for and being read to the end",
            source=fetch.source,
        )


def _names(fetch: Fetch) -> list[str]:
    """Return what errors call each file."""
    if not fetch.files:
        return [fetch.source]
    folder = os.path.dirname(fetch.source)
    return [os.path.join(folder, name) for name in fetch.files]


def _check_readable(fd: int, name: str) -> None:
    """Refuse an fd that is of a file, and does not let it be read.

    Raises:
        SourceNotOpened: it was opened for writing only, or as a mere path.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if flags & os.O_PATH or flags & os.O_ACCMODE == os.O_WRONLY:
        raise SourceNotOpened(
            f"{name}: its fd was not opened for reading",
            source=name,
            remedy="open the file with O_RDONLY before you send its fd",
        )
