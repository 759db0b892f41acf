"""Which format the files of a checkpoint have, judged by their content, and what is in them.

Each format has a reader of its own; see `Contents` for what they give.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from coordinator import casting, gguf_file
from coordinator.checkpoint import Checkpoint, Stored, check_found, lay_out
from coordinator.local_file import LocalFile
from coordinator.pump import Meter, Pump, ReadAhead
from coordinator.safetensors_file import HEAD_BYTES, LENGTH_BYTES, header_bytes, read_table
from coordinator.torch_file import is_torch_file
from shm_store.errors import SourceChanged
from shm_store.index import INDEX_LIMIT_BYTES, parse_index
from shm_store.manifest import encode_manifest
from shm_store.reading import Reading
from shm_store.segment import write_at

if TYPE_CHECKING:
    from coordinator.remote_file import RemoteFile

    File = LocalFile | RemoteFile


class Contents(Protocol):
    """What a checkpoint holds: known before a segment is there, written into it afterwards.

    Attributes:
        manifest: encoded.
        data_bytes: of the segment's tensor bytes, alignment included.
        filled_bytes: how many of them `fill` writes, for whoever waits.
    """

    @property
    def manifest(self) -> bytes: ...
    @property
    def data_bytes(self) -> int: ...
    @property
    def filled_bytes(self) -> int: ...

    def ahead(self) -> contextlib.AbstractContextManager[None]:
        """Do what filling needs and takes time, and needs no segment, while there is none yet.

        Raises:
            SourceError: it cannot be filled.
        """

    def fill(self, segment_fd: int, data_start: int, meter: Meter) -> None:
        """Write all tensor bytes; they begin at `data_start` in the segment.

        Raises:
            SourceChanged: a file ended early.
            SourceError: it could not be read.
        """


class FileContents:
    """Tensors that lie in files as they are to lie in the segment, but perhaps for their dtypes."""

    def __init__(self, checkpoint: Checkpoint, files: Sequence[LocalFile]) -> None:
        self._checkpoint = checkpoint
        self._files = [(file.fd, file.name) for file in files]
        self.manifest = encode_manifest(checkpoint.manifest)
        self.data_bytes = checkpoint.data_bytes
        self.filled_bytes = checkpoint.filled_bytes()

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """Have the kernel read what is copied, and import torch, if there is something to cast."""
        with ReadAhead(self._files, self._checkpoint.copies):
            if self._checkpoint.casts:
                casting.prepare(self._checkpoint, [name for _, name in self._files])
            yield

    def fill(self, segment_fd: int, data_start: int, meter: Meter) -> None:
        """Have the kernel copy them, and torch cast them."""
        _write_values(self._checkpoint, segment_fd, data_start, meter)
        if self._checkpoint.casts:
            casting.fill(self._checkpoint, self._files, segment_fd, data_start, meter)
            return
        Pump(self._files, segment_fd).copy(self._checkpoint.copies, data_start, meter)


class RemoteContents:
    """As `FileContents`, of files at URLs: read in ranges, several at once.

    What reads URLs is imported only here: it takes longer than a loader may for a file.

    What becomes another dtype on its way is read from copies on this host.
    """

    def __init__(self, checkpoint: Checkpoint, files: Sequence[RemoteFile]) -> None:
        self._checkpoint = checkpoint
        self._files = files
        self.manifest = encode_manifest(checkpoint.manifest)
        self.data_bytes = checkpoint.data_bytes
        self.filled_bytes = checkpoint.filled_bytes()
        if checkpoint.casts:
            self.filled_bytes += sum(file.size_bytes for file in files)

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """Import torch, if there is something to cast."""
        if self._checkpoint.casts:
            casting.prepare(self._checkpoint, [file.name for file in self._files])
        yield

    def fill(self, segment_fd: int, data_start: int, meter: Meter) -> None:
        """Fetch them."""
        from coordinator.remote_pump import RemotePump

        if self._checkpoint.casts:
            local = _on_this_host(self._files, meter)
            FileContents(self._checkpoint, local).fill(segment_fd, data_start, meter)
        else:
            _write_values(self._checkpoint, segment_fd, data_start, meter)
            RemotePump(self._files, segment_fd).copy(self._checkpoint.copies, data_start, meter)


def _write_values(checkpoint: Checkpoint, segment_fd: int, data_start: int, meter: Meter) -> None:
    for offset, value in checkpoint.values:
        write_at(segment_fd, value, data_start + offset)
        meter.add(len(value))


_NEED_FILES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""How files begin whose readers want to have them on this host."""


def read_contents(
    files: Sequence[File],
    reading: Reading,
    source: str,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Contents:
    """Return what the files of a checkpoint hold: a lone one, or an index and its shards.

    Args:
        source: the name of the checkpoint, for errors.
        report: is told how many bytes of how many are there, where they have to be fetched first.

    Raises:
        SourceError: a file cannot be read, or is not what it should be; or they do not agree.
        DiskFull: there is no room for what has to be fetched first.
    """
    local = [file for file in files if isinstance(file, LocalFile)]
    remote = [file for file in files if not isinstance(file, LocalFile)]
    if any(map(_needs_file, remote)):
        meter = Meter(sum(file.size_bytes for file in remote), report)
        return read_contents(_on_this_host(remote, meter), reading, source)
    file_of = None if len(files) == 1 else _read_index(files, source)
    if local and is_torch_file(local[0 if file_of is None else 1]):
        # Here, and not above: most loaders have no use for it.
        from coordinator.pickles import read_pickles

        return read_pickles(local if file_of is None else local[1:], file_of, reading, source)
    table = _read_table(files[0], 0) if file_of is None else _read_shards(files, file_of, source)
    checkpoint = lay_out(table, reading, source)
    if remote:
        return RemoteContents(checkpoint, remote)
    return FileContents(checkpoint, local)


def _needs_file(file: RemoteFile) -> bool:
    head = file.read(min(HEAD_BYTES, file.size_bytes), 0)
    # Its second half tells a header's length from the beginning of something else.
    return head.startswith(_NEED_FILES) and head[LENGTH_BYTES : LENGTH_BYTES + 1] != b"{"


def _on_this_host(files: Sequence[RemoteFile], meter: Meter) -> list[LocalFile]:
    from coordinator.local_copy import localized

    return [localized(file, meter) for file in files]


def _read_table(file: File, number: int) -> list[Stored]:
    head = file.read(min(HEAD_BYTES, file.size_bytes), 0)
    if head.startswith(gguf_file.MAGIC):  # as a length that is far more than one may be
        return gguf_file.read_table(file, number)
    header = file.read(header_bytes(head, file.size_bytes, file.name), LENGTH_BYTES)
    return read_table(header, file.size_bytes, file.name, number)


def _read_index(files: Sequence[File], source: str) -> dict[str, str]:
    """Return the file of each tensor, as the first of the files says it; the others are those."""
    index = files[0]
    data = index.read(min(index.size_bytes, INDEX_LIMIT_BYTES), 0)
    file_of = parse_index(data, index.name)
    shards = sorted(set(file_of.values()))
    if len(shards) != len(files) - 1 or any(
        not file.name.endswith(shard) for shard, file in zip(shards, files[1:], strict=False)
    ):
        raise SourceChanged(
            f"{source}: it names other shards than when it was opened", source=source
        )
    return file_of


def _read_shards(files: Sequence[File], file_of: Mapping[str, str], source: str) -> list[Stored]:
    """Return the tensors that an index names, each from the shard in which it says that it is."""
    by_name = zip(sorted(set(file_of.values())), files[1:], strict=True)
    found: dict[str, Stored] = {}
    for number, (shard, file) in enumerate(by_name, start=1):
        for tensor in _read_table(file, number):
            if file_of.get(tensor.name) == shard:
                found[tensor.name] = tensor
    check_found(found, file_of, source)
    return [found[name] for name in file_of]
