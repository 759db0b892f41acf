"""A checkpoint file, as the process that asks for it opens it.

The asker opens the path, so its permissions, working directory and mount namespace apply; the
coordinator reads the fingerprint from that very fd, so it describes what will be read.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import stat
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from shm_store.errors import SourceNotOpened
from shm_store.keys import Fingerprint
from shm_store.reading import AS_IT_IS, Reading

PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
"""Of files that torch wrote, by their names. What they are, their content says."""


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


def fingerprint(
    statuses: Sequence[os.stat_result], names: Sequence[str] = (), reading: Reading = AS_IT_IS
) -> Fingerprint:
    """Return what is read from files, as far as their inodes say: device, inode, size, mtime.

    A file that is renamed keeps it; one that is written to, or replaced, does not. It covers how
    the files are read, and the version of torch, where that makes the bytes.

    Args:
        statuses: of each opened file.
        names: of the files; those of several count, too.
        reading: what is to be made of them.
    """
    stamps = [
        f"{status.st_dev:x}:{status.st_ino:x}:{status.st_size}:{status.st_mtime_ns}"
        for status in statuses
    ]
    if len(stamps) == 1:
        base = f"file:{stamps[0]}"
    else:
        base = f"files:{len(stamps)}:{_digest([names, stamps])}"
    return Fingerprint(base + _options(reading, names))


def fingerprint_of(
    fds: Sequence[int], name: str, files: Sequence[str], reading: Reading, version: str = ""
) -> Fingerprint:
    """Return the fingerprint of what was asked for: of opened files, or of a URL.

    A URL stands for itself. That there is something new now, its `version` has to say.
    """
    if not fds:
        return Fingerprint(f"url:{_digest([name, version])}{_options(reading, (name,))}")
    return fingerprint([os.fstat(fd) for fd in fds], files or (name,), reading)


def is_url(place: str) -> bool:
    """Say whether a source is read by URL, by the loader, instead of opened by who asks."""
    return _URL.match(place) is not None


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def _options(reading: Reading, names: Sequence[str]) -> str:
    """Return what a fingerprint says of how files are read; nothing for one read as it is."""
    reading = replace(reading, digest=False)
    pickled = any(name.endswith(PICKLE_SUFFIXES) for name in names)
    if reading == AS_IT_IS and not pickled:
        return ""
    made_by = _torch_version() if reading.dtypes or pickled else ""
    return f";{_digest([reading, made_by])}"


@functools.cache
def _torch_version() -> str:
    # Its metadata alone: whoever asks here must not import torch. Most never ask.
    import importlib.metadata

    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _digest(what: object) -> str:
    return hashlib.blake2b(msgspec.msgpack.encode(what), digest_size=16).hexdigest()
