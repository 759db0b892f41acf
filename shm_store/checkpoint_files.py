"""A checkpoint as the process that asks for it opens it: a file, the shards of an index, a folder.

The asker opens everything, so its permissions, working directory and mount namespace apply. What
is at a URL the loader opens.
"""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass

from shm_store.errors import SourceError, SourceMalformed, SourceNotOpened
from shm_store.hub_cache import cached
from shm_store.index import INDEX_LIMIT_BYTES, extra_shards, is_index, is_numbered, parse_index
from shm_store.source import PICKLE_SUFFIXES, is_url, open_source
from shm_store.url import check_url, protocol_of

_BEST = (
    "model.safetensors.index.json",
    "model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
)
"""What a folder is read as, before all else in it."""

_SUFFIXES = ((".safetensors",), (".gguf",), PICKLE_SUFFIXES)
"""What else it can be, in this order."""

_NOT_WEIGHTS = frozenset(("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt"))

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Opened:
    """What a source is: its name for people, the fds of its files, and their names.

    Attributes:
        fds: the caller's to close, the list that it gave; empty for a URL.
        files: the names of several files, the index first. A lone file has only `name`.
        extra: files that look like shards and are not read, because the index names them not.
    """

    name: str
    fds: Sequence[int]
    files: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()

    def close(self) -> None:
        """Close its files."""
        for fd in self.fds:
            os.close(fd)


def open_checkpoint(place: str | os.PathLike[str], fds: list[int] | None = None) -> Opened:
    """Return the opened files of a source: of a path, a folder, an index or a URL.

    Args:
        fds: an empty list, into which each comes as soon as it is opened: an exception from outside
            may come at any time, and whoever catches it closes what is there. All others leave it
            empty.

    Raises:
        SourceNotOpened: missing, not permitted, no regular file, or a folder without just one.
        SourceMalformed, SourceUnsupported: the index is none, or a shard of it is missing.
    """
    name, fds = os.fspath(place), [] if fds is None else fds
    if is_url(name):
        if not name.lower().startswith("file://"):
            check_url(name)
            return _open_cached(name, fds) or Opened(name, fds)
        parts = urllib.parse.urlsplit(name)
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise SourceNotOpened(
                f"{name}: names no file of this host",
                source=name,
                remedy="write file:///folder/file, or the path itself",
            )
        name = urllib.parse.unquote(parts.path)
    if os.path.isdir(name):
        name = _checkpoint_in(name)
    return _open_files(name, fds)


def _open_cached(url: str, fds: list[int]) -> Opened | None:
    """Return the files that Hugging Face's cache has of a URL, if it has all of them."""
    place = cached(url) if protocol_of(url) == "hf" else None
    if place is None:
        return None
    try:
        if os.path.isdir(place):
            names = os.listdir(place)
            # Of anything else one cannot know that the Hub has nothing better.
            place = os.path.join(place, next(best for best in _BEST if best in names))
        return _open_files(place, fds)
    except (SourceError, StopIteration, OSError):
        return None  # some are missing; the loader sees what the Hub says


def _open_files(path: str, fds: list[int]) -> Opened:
    if is_index(path):
        return _open_shards(path, fds)
    fds.append(open_source(path))
    return Opened(path, fds)


def _open_shards(index: str, fds: list[int]) -> Opened:
    try:
        fds.append(open_source(index))
        folder = os.path.dirname(index)
        shards = sorted(set(parse_index(read_index(fds[0], index), index).values()))
        for shard in shards:
            try:
                fds.append(open_source(os.path.join(folder, shard)))
            except SourceNotOpened as error:
                raise SourceNotOpened(
                    f"{index}: its shard {shard} cannot be opened: {error.message}", source=index
                ) from error
        extra = extra_shards(os.listdir(folder or "."), set(shards))
    except BaseException:
        while fds:
            os.close(fds.pop())
        raise
    return Opened(index, fds, (os.path.basename(index), *shards), tuple(extra))


def read_index(fd: int, name: str) -> bytes:
    """Return the bytes of an index.

    Raises:
        SourceMalformed: they are too many.
        SourceNotOpened: they cannot be read.
    """
    if os.fstat(fd).st_size > INDEX_LIMIT_BYTES:
        raise SourceMalformed(f"{name}: too large for an index", source=name)
    try:
        return os.pread(fd, INDEX_LIMIT_BYTES, 0)
    except OSError as error:
        raise SourceNotOpened(f"{name}: {error.strerror}", source=name) from error


def _checkpoint_in(folder: str) -> str:
    """Return the path of the one checkpoint in a folder, of Hugging Face's cache too."""
    folder = _snapshot_in(folder)
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise SourceNotOpened(f"{folder}: {error.strerror}", source=folder) from error
    return os.path.join(folder, pick(names, folder))


def pick(names: Sequence[str], folder: str) -> str:
    """Return which of the files in a folder is the one checkpoint there. Pure.

    Args:
        folder: its name, for errors.

    Raises:
        SourceNotOpened: none is, or several are.
    """
    for best in _BEST:
        if best in names:
            return best
    for suffixes in _SUFFIXES:
        found = [name for name in names if is_index(name) and _indexed(name).endswith(suffixes)]
        if not found:
            found = [name for name in names if name.endswith(suffixes) and name not in _NOT_WEIGHTS]
        if found and all(is_numbered(name) for name in found):
            raise SourceNotOpened(
                f"{folder}: shards of a checkpoint ({found[0]} ...), and no index of them",
                source=folder,
                remedy="download the index, such as model.safetensors.index.json, too",
            )
        if len(found) == 1:
            return found[0]
        if found:
            shown = ", ".join(found[:_SHOWN]) + (", ..." if len(found) > _SHOWN else "")
            raise SourceNotOpened(
                f"{folder}: {len(found)} checkpoints: {shown}",
                source=folder,
                remedy="name one of them",
            )
    raise SourceNotOpened(
        f"{folder}: no checkpoint in this folder",
        source=folder,
        remedy="name the folder with model.safetensors, or the file itself",
    )


def _indexed(index: str) -> str:
    """Return what an index is of: `model.safetensors` for `model.safetensors.index.json`."""
    return index[: index.rindex(".index")]


def _snapshot_in(folder: str) -> str:
    """Return the folder of the snapshot, if this is a repository in Hugging Face's cache."""
    snapshots = os.path.join(folder, "snapshots")
    if not os.path.isdir(snapshots):
        return folder
    try:
        with open(os.path.join(folder, "refs", "main"), encoding="ascii") as file:
            return os.path.join(snapshots, file.read(256).strip())
    except (OSError, ValueError):
        pass  # no main revision: then there may be only one
    revisions = sorted(os.listdir(snapshots))
    if len(revisions) == 1:
        return os.path.join(snapshots, revisions[0])
    raise SourceNotOpened(
        f"{folder}: {len(revisions)} snapshots, and no main revision",
        source=folder,
        remedy="name the folder of one snapshot",
    )
