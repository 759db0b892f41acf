"""What a `.gguf` file holds, from its header: the table of its tensors.

The format: magic, version, counts; metadata (a text and a typed value each); for each tensor a
name, its dimensions (the innermost first), a type and the offset of its bytes; then those, each at
a multiple of the alignment. See https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A header
is untrusted: whatever it says, the outcome is a table that can be copied as it stands, or a
`SourceError` that names the file and the tensor.

Quantised tensors are held as they are, in blocks; `gpu_worker.gguf_tensor` says what they are to a
worker. How large the blocks of a type are, the package gguf knows.

    Note on reading the header here
    fact: gguf.GGUFReader makes two arrays of every text in the metadata, those of a tokenizer too:
    of a header with 430,000 texts 550 MiB, in many seconds; and it maps the file
    consequence: a loader has not so much memory, and a map of a file on a network is no good
    choice: metadata is passed over, and tensors are read, by what the format says
    cost: this file; the tests hold it against GGUFReader
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Protocol

from coordinator.checkpoint import Stored, shown
from shm_store.errors import SourceMalformed, SourceUnsupported

MAGIC = b"GGUF"
VERSIONS = (2, 3)
HEADER_LIMIT_BYTES = 256 * 1024 * 1024
NAME_LIMIT_BYTES = 64 * 1024
DIMENSIONS_LIMIT = 8
DEPTH_LIMIT = 4
ALIGNMENT_BYTES = 32
"""Where the metadata names none."""

TENSOR_LIMIT_BYTES = 1 << 50

_WINDOW_BYTES = 1024 * 1024
_ALIGNMENT_KEY = b"general.alignment"
_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_SPLIT_KEY = b"split.count"
_UINT16, _UINT32, _TEXT, _ARRAY = 2, 4, 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

_PLAIN = {
    "F32": "F32",
    "F16": "F16",
    "BF16": "BF16",
    "F64": "F64",
    "I8": "I8",
    "I16": "I16",
    "I32": "I32",
    "I64": "I64",
}
"""The types of tensors that are plain ones to torch, too."""


class File(Protocol):
    """What is read."""

    name: str
    size_bytes: int

    def read(self, size_bytes: int, offset_bytes: int) -> bytes: ...


def read_table(file: File, number: int = 0) -> list[Stored]:
    """Return what a file holds, in the order of its header.

    A quantised tensor is of bytes, in rows as its blocks lie, and has `packed` and `size`.

    Args:
        file: begins with `MAGIC`.
        number: which of a checkpoint's files it is.

    Raises:
        SourceMalformed: truncated, or its header lies.
        SourceUnsupported: a version, a byte order or a type that is not known here.
    """
    header = _Header(file)
    header.skip(len(MAGIC))
    version = header.u32()
    if version not in VERSIONS:
        swapped = version.to_bytes(4, "big")[:2] != b"\0\0"
        what = "big-endian byte order" if swapped else f"version {version}"
        raise SourceUnsupported(
            f"{file.name}: a GGUF file of {what}, which is not read here", source=file.name
        )
    tensors, pairs = header.u64(), header.u64()
    alignment = _pass_metadata(header, pairs)
    described = [_read_tensor(header) for _ in range(header.bounded(tensors, 24))]
    data_start = -(-header.at // alignment) * alignment
    sizes = _type_sizes(file.name)
    table = []
    names = set()
    for name, dimensions, kind, offset in described:
        if name in names:
            raise header.fault(f"the name {shown(name)} occurs twice")
        names.add(name)
        if kind not in sizes:
            raise SourceUnsupported(
                f"{file.name}: tensor {shown(name)} is of type {kind}, which the installed package "
                "gguf does not know",
                source=file.name,
                remedy="install a newer gguf",
            )
        if offset % alignment:
            raise header.fault(f"tensor {shown(name)} is not aligned to {alignment} bytes")
        stored = _stored(header, name, dimensions, sizes[kind], data_start + offset, number)
        if stored.end > file.size_bytes:
            raise header.fault(
                f"tensor {shown(name)} ends at byte {stored.end} of {file.size_bytes}: truncated"
            )
        table.append(stored)
    _check_apart(header, table)
    return table


def _pass_metadata(header: _Header, pairs: int) -> int:
    """Pass over the metadata; return the alignment that it names."""
    alignment = ALIGNMENT_BYTES
    for _ in range(header.bounded(pairs, 12)):
        key = header.text()
        kind = header.u32()
        if key == _ALIGNMENT_KEY and kind == _UINT32:
            alignment = header.u32()
            if not alignment or alignment & (alignment - 1) or alignment > 1 << 20:
                raise header.fault(f"an alignment of {alignment} bytes")
        elif key == _SPLIT_KEY and kind == _UINT16:
            count = int.from_bytes(header.take(2), "little")
            if count > 1:
                raise SourceUnsupported(
                    f"{header.name}: one of {count} files that a checkpoint was split into",
                    source=header.name,
                    remedy="join them, as llama-gguf-split --merge does",
                )
        else:
            header.skip_value(kind, 0)
    return alignment


def _read_tensor(header: _Header) -> tuple[str, tuple[int, ...], int, int]:
    """Return a tensor's name, dimensions, type and offset."""
    raw = header.text()
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        raise header.fault(f"tensor {shown(raw)} has a name that is not UTF-8") from None
    count = header.u32()
    if count > DIMENSIONS_LIMIT:
        raise header.fault(f"tensor {shown(name)} has {count} dimensions")
    return name, tuple(header.u64() for _ in range(count)), header.u32(), header.u64()


def _stored(
    header: _Header,
    name: str,
    dimensions: tuple[int, ...],
    kind: tuple[str, int, int],
    start: int,
    number: int,
) -> Stored:
    """Return a tensor as a segment is to have it."""
    type_name, block, block_bytes = kind
    shape = tuple(reversed(dimensions))
    elements = 1
    for size in shape:
        elements *= size
        if elements > TENSOR_LIMIT_BYTES or size > TENSOR_LIMIT_BYTES:
            raise header.fault(f"tensor {shown(name)} has an absurd shape: {shown(shape)}")
    row = shape[-1] if shape else 1
    if row % block:
        raise header.fault(
            f"tensor {shown(name)} has rows of {row} elements, and blocks of {block} in {type_name}"
        )
    end = start + elements // block * block_bytes
    if type_name in _PLAIN:
        return Stored(name, _PLAIN[type_name], shape, start, end, number)
    blocks = (*(shape[:-1] or (1,)), row // block * block_bytes)
    return Stored(name, "U8", blocks, start, end, number, packed=type_name, size=shape)


def _check_apart(header: _Header, table: Sequence[Stored]) -> None:
    """Refuse tensors that share bytes: each is to have its own."""
    end, before = 0, ""
    for tensor in sorted(table, key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.start < end:
            raise header.fault(f"tensor {shown(tensor.name)} overlaps {shown(before)}")
        end, before = tensor.end, tensor.name


def _type_sizes(name: str) -> dict[int, tuple[str, int, int]]:
    """Return by number the name of a type, and the elements and bytes of its blocks."""
    try:
        from gguf.constants import GGML_QUANT_SIZES
    except ImportError as error:
        raise SourceUnsupported(
            f"{name}: a GGUF file is read with the package gguf, which is not installed",
            source=name,
            remedy="pip install 'shm-weight-cache[gguf]'",
        ) from error
    return {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}


class _Header:
    """Reads a file's header from front to back, a window at a time."""

    def __init__(self, file: File) -> None:
        self._file = file
        self.name = file.name
        self._window = b""
        self._start = 0
        self.at = 0

    def fault(self, text: str) -> SourceMalformed:
        return SourceMalformed(f"{self._file.name}: {text}", source=self._file.name)

    def skip(self, size: int) -> None:
        """Pass over so many bytes."""
        self.at += size
        if self.at > self._file.size_bytes:
            raise self.fault(
                f"its header goes on behind its {self._file.size_bytes} bytes: truncated"
            )
        if self.at > HEADER_LIMIT_BYTES:
            raise SourceUnsupported(
                f"{self._file.name}: its header is larger than {HEADER_LIMIT_BYTES} bytes",
                source=self._file.name,
            )

    def take(self, size: int) -> bytes:
        """Return the next bytes."""
        begin = self.at
        self.skip(size)
        if begin < self._start or self.at > self._start + len(self._window):
            left = self._file.size_bytes - begin
            self._window = self._file.read(min(max(size, _WINDOW_BYTES), left), begin)
            self._start = begin
        return self._window[begin - self._start : self.at - self._start]

    def u32(self) -> int:
        return int(_U32.unpack(self.take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack(self.take(8))[0])

    def text(self) -> bytes:
        """Return a text that is a name."""
        size = self.u64()
        if size > NAME_LIMIT_BYTES:
            raise self.fault(f"a name of {size} bytes")
        return self.take(size)

    def bounded(self, count: int, least_bytes: int) -> int:
        """Return a count of things, if they can be there at all."""
        if count * least_bytes > self._file.size_bytes:
            raise self.fault(f"it claims {count} entries, for which it is too small: truncated")
        return count

    def skip_value(self, kind: int, depth: int) -> None:
        """Pass over a value of metadata."""
        if kind in _VALUE_BYTES:
            self.skip(_VALUE_BYTES[kind])
        elif kind == _TEXT:
            self.skip(self.u64())
        elif kind == _ARRAY and depth < DEPTH_LIMIT:
            inner, count = self.u32(), self.u64()
            if inner in _VALUE_BYTES:
                self.skip(count * _VALUE_BYTES[inner])
                return
            for _ in range(self.bounded(count, 8)):
                self.skip_value(inner, depth + 1)
        else:
            raise self.fault(f"a value of metadata of type {kind}, at depth {depth}")
