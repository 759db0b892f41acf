"""A checkpoint at a URL as the loader opens it: a file, the shards of an index, a folder.

It is opened with the permissions and the credentials of the coordinator, not of who asks: both are
of one user, or root. What may be opened is in `shm_store.url`.
"""

from __future__ import annotations

import logging
import threading
import urllib.parse
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from coordinator import fsspec_file, http_file
from coordinator.remote_file import HEAD_BYTES, Patience, RemoteFile, insist
from coordinator.safetensors_file import HEADER_LIMIT_BYTES, LENGTH_BYTES
from shm_store.checkpoint_files import pick
from shm_store.errors import SourceMalformed, SourceNotOpened, SourceUnreachable
from shm_store.index import INDEX_LIMIT_BYTES, is_index, parse_index
from shm_store.url import WEB, beside, check_url, protocol_of, shown_url

THREADS = 8
OPENING_LIMIT_S = 240.0
"""All of it together, less than an asker waits by default."""

STACK_BYTES = 1024 * 1024
"""Of a thread. The 8 MiB that it would be count as memory of this process."""

Answer = TypeVar("Answer")


def open_url(url: str, patience: Patience | None = None) -> list[RemoteFile]:
    """Return the files of the checkpoint at a URL: a lone one, or an index and its shards.

    Raises:
        SourceError: it is not there, may not be read, cannot be reached, or is none.
    """
    check_url(url)
    threading.stack_size(STACK_BYTES)
    # What libraries warn of may quote a URL whole, and goes to the log of the coordinator.
    logging.getLogger().addHandler(logging.NullHandler())
    place = _Place(url, patience or Patience())
    return _within(OPENING_LIMIT_S, place.files, place.name)


def check_unchanged(files: Sequence[RemoteFile]) -> None:
    """Ask the servers again.

    Raises:
        SourceChanged: a file is another one by now.
    """
    _all(lambda file: file.check_unchanged(), files)


class _Place:
    """A URL, and what reads its protocol."""

    def __init__(self, url: str, patience: Patience) -> None:
        self.url = url
        self.name = shown_url(url)
        self._patience = patience
        self._web = protocol_of(url) in WEB

    def files(self) -> list[RemoteFile]:
        if self._web:
            fs = self._insist(lambda: http_file.web(self.url))
            return self._with_shards(fs, self._opened(fs, self.url, self.name))
        fs = self._insist(lambda: fsspec_file.file_system(self.url))
        path = self._insist(lambda: fsspec_file.path_in(fs, self.url))
        name = self.name
        if self._insist(lambda: fsspec_file.is_folder(fs, path)):
            picked = pick(sorted(self._insist(lambda: fsspec_file.names_in(fs, path))), name)
            path, name = f"{path.rstrip('/')}/{picked}", f"{name.rstrip('/')}/{picked}"
        return self._with_shards(fs, self._opened(fs, path, name))

    def _with_shards(self, fs: Any, file: RemoteFile) -> list[RemoteFile]:
        """Return a file, and the shards if it is an index, with their headers at hand."""
        if not is_index(file.name):
            return [file]
        if file.size_bytes > INDEX_LIMIT_BYTES:
            raise SourceMalformed(f"{file.name}: too large for an index", source=file.name)
        file.keep_head(file.size_bytes)
        index = parse_index(file.read(file.size_bytes, 0), file.name)
        folder = file.name.rpartition("/")[0]

        def shard(name: str) -> RemoteFile:
            quoted = urllib.parse.quote(name) if self._web else name
            path = beside(file.path, quoted)
            try:
                opened = self._opened(fs, path, f"{folder}/{name}")
            except SourceNotOpened as error:
                raise SourceNotOpened(
                    f"{file.name}: its shard {name} cannot be opened: {error.message}",
                    source=file.name,
                    remedy=error.remedy,
                ) from error
            keep_header(opened)
            return opened

        return [file, *_all(shard, sorted(set(index.values())))]

    def _opened(self, fs: Any, path: str, name: str) -> RemoteFile:
        if self._web:
            return RemoteFile(path, name, http_file.HttpTransport(fs, path, name), self._patience)
        transport = fsspec_file.FsspecTransport(fs, path, name)
        return RemoteFile(self.url, name, transport, self._patience, path)

    def _insist(self, what: Callable[[], Answer]) -> Answer:
        return insist(what, self.name, self.url, self._patience)


def keep_header(file: RemoteFile) -> None:
    """Have the header of a .safetensors file at hand, if it is one."""
    head = file.read(min(LENGTH_BYTES, file.size_bytes), 0)
    header_end = LENGTH_BYTES + int.from_bytes(head, "little")
    if HEAD_BYTES < header_end <= min(HEADER_LIMIT_BYTES, file.size_bytes):
        file.keep_head(header_end)


Item = TypeVar("Item")


def _all(what: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
    """Return what `what` returns of each, several at a time. The first failure is raised."""
    pool = ThreadPoolExecutor(THREADS)
    try:
        return list(pool.map(what, items))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _within(limit_s: float, what: Callable[[], Answer], name: str) -> Answer:
    """Return what `what` returns or raises, if it does so in time.

    Raises:
        SourceUnreachable: it does not: some libraries wait for a server as long as they like.
    """
    answers: list[Answer] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(what())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not answers:
        raise SourceUnreachable(f"{name}: not opened within {limit_s:g} s", source=name)
    return answers[0]
