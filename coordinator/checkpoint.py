"""What a `.safetensors` file holds, from its size and its header. Pure: bytes in, values out.

The format: 8 bytes that give the header's length (little endian), the header (a JSON object: name
to dtype, shape and the range of its bytes), then the tensor bytes, without hole and overlap. See
https://github.com/huggingface/safetensors#format. A header is an untrusted text: whatever it says,
the outcome is a `Checkpoint` that can be copied as it stands, or a `SourceError` that names the
file and the tensor. The work is linear in the header's length.

Must not know: fds, segments as a whole, torch. The loader reads and copies.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from shm_store.errors import SourceMalformed, SourceUnsupported
from shm_store.layout import ITEM_BYTES, contiguous_strides, place
from shm_store.manifest import GroupEntry, Manifest, TensorEntry

LENGTH_BYTES = 8
HEAD_BYTES = 64
"""How much of a file's beginning `header_bytes` wants to see."""

HEADER_LIMIT_BYTES = 100_000_000
"""The format's own limit."""

FILE_LIMIT_BYTES = 1 << 50
"""No segment can be larger, and no number in a manifest."""

_INTEGER_LIMIT_DIGITS = 20
_SHOWN_CHARACTERS = 200

_FILE_DTYPES = frozenset(ITEM_BYTES) - {"C128"}
"""The manifest knows one dtype that no file can hold."""

_OTHER_FORMATS = (
    (b"PK\x03\x04", "a zip archive, as torch.save writes it"),
    (b"\x80\x02", "a Python pickle, as torch.save wrote it before 1.6"),
    (b"\x80\x03", "a Python pickle"),
    (b"\x80\x04", "a Python pickle"),
    (b"\x80\x05", "a Python pickle"),
    (b"GGUF", "a GGUF file"),
    (b"\x89HDF", "an HDF5 file"),
)
_NO_CHECKPOINT = "name a .safetensors file, or load it yourself with build="
"""What helps where nothing speaks for a damaged one."""

_LFS_POINTER = b"version https://git-lfs"


class Copy(msgspec.Struct, frozen=True):
    """One stretch of a file that goes to one stretch of the segment.

    `source_offset_bytes` counts from the start of the file, `data_offset_bytes` from the start of
    the segment's tensor bytes. `file` is which of a checkpoint's files it is.
    """

    source_offset_bytes: int
    data_offset_bytes: int
    size_bytes: int
    file: int = 0


class Checkpoint(msgspec.Struct, frozen=True):
    """A file's manifest, and the copies that fill the segment, in the order of the file."""

    manifest: Manifest
    data_bytes: int
    """The segment's tensor bytes, alignment included."""
    copies: tuple[Copy, ...]

    def copied_bytes(self) -> int:
        """Return how many bytes the copies move in all."""
        return sum(copy.size_bytes for copy in self.copies)


class _Stored(msgspec.Struct, frozen=True):
    """One tensor as the header has it. `start` and `end` count from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def header_bytes(head: bytes, size_bytes: int, source: str) -> int:
    """Return the length of the header that follows the first 8 bytes of a file.

    Args:
        head: the first `HEAD_BYTES` of the file, or all of a shorter one.
        size_bytes: the size of the file.
        source: its name, for errors.

    Raises:
        SourceMalformed: empty, truncated, or its length field lies.
        SourceUnsupported: by its content another format, or too large.
    """
    if size_bytes == 0:
        raise _malformed(source, "the file is empty")
    if size_bytes >= FILE_LIMIT_BYTES:
        raise SourceUnsupported(f"{source}: {size_bytes} bytes are too many", source=source)
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    fits = length <= min(HEADER_LIMIT_BYTES, size_bytes - LENGTH_BYTES)
    if fits and head[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{":
        return length
    # Only what cannot be a header is looked at as something else: "PK" is also a possible length.
    _refuse_other_format(head, source)
    if size_bytes < LENGTH_BYTES:
        text = f"{size_bytes} bytes are too few for a .safetensors file"
        raise _malformed(source, text, _NO_CHECKPOINT)
    if length > HEADER_LIMIT_BYTES:
        raise _malformed(
            source,
            f"its first bytes claim a header of {length} bytes, the format allows "
            f"{HEADER_LIMIT_BYTES}: not a .safetensors file, or damaged",
            _NO_CHECKPOINT,
        )
    if not fits:
        raise _malformed(
            source,
            f"a header of {length} bytes does not fit the {size_bytes} of the file: truncated",
        )
    text = "its header is no JSON object: not a .safetensors file, or damaged"
    raise _malformed(source, text, _NO_CHECKPOINT)


def parse(header: bytes, size_bytes: int, source: str) -> Checkpoint:
    """Return what the file with this header holds, and how to copy it into a segment.

    Tensors keep the header's order. Each is an alias group of its own (a file has no aliases), and
    groups lie in the order of the file, so that it is read from front to back.

    Args:
        header: as long as `header_bytes` said.
        size_bytes: the size of the file.
        source: its name, for errors.

    Raises:
        SourceMalformed: the header is no such table, or does not cover the file exactly.
        SourceUnsupported: a tensor of a dtype that has no counterpart in torch.
    """
    tensors = [
        _read_entry(name, entry, source)
        for name, entry in _read_object(header, source).items()
        if name != "__metadata__"
    ]
    order = sorted(
        range(len(tensors)), key=lambda index: (tensors[index].start, tensors[index].end)
    )
    data_start = LENGTH_BYTES + len(header)
    _check_cover([tensors[index] for index in order], size_bytes - data_start, source)
    sizes = [tensors[index].end - tensors[index].start for index in order]
    offsets, data_bytes = place(sizes)
    group_of = {index: group for group, index in enumerate(order)}
    return Checkpoint(
        Manifest(
            tuple(
                TensorEntry(
                    tensor.name,
                    tensor.dtype,
                    tensor.shape,
                    contiguous_strides(tensor.shape),
                    group_of[index],
                    0,
                )
                for index, tensor in enumerate(tensors)
            ),
            tuple(map(GroupEntry, offsets, sizes)),
        ),
        data_bytes,
        _join([data_start + tensors[index].start for index in order], offsets, sizes),
    )


def _malformed(source: str, text: str, remedy: str | None = None) -> SourceMalformed:
    return SourceMalformed(f"{source}: {text}", source=source, remedy=remedy)


def _shown(value: object) -> str:
    """Return `value` for a message: one line, bounded, and text that can be encoded."""
    # A name can be as long as the header; repr() escapes what is not printable.
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def _refuse_other_format(head: bytes, source: str) -> None:
    if head.startswith(_LFS_POINTER):
        raise SourceMalformed(
            f"{source}: a Git LFS pointer, not the file itself",
            source=source,
            remedy="run `git lfs pull` in its repository",
        )
    for magic, kind in _OTHER_FORMATS:
        if head.startswith(magic):
            raise SourceUnsupported(f"{source}: {kind}, not a .safetensors file", source=source)


# --- the JSON text ------------------------------------------------------------------------------


def _read_object(header: bytes, source: str) -> dict[str, Any]:
    try:
        table = json.loads(
            header.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_int=_integer,
            parse_constant=_constant,
        )
    except RecursionError:
        raise _malformed(source, "its header is nested too deep") from None
    except ValueError as error:
        raise _malformed(source, f"its header cannot be read: {error}") from None
    if not isinstance(table, dict):
        raise _malformed(source, "its header is no JSON object")
    return table


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the name {_shown(name)} occurs twice")
            seen.add(name)
    return table


def _integer(text: str) -> int:
    # int() takes time that is quadratic in the digits.
    if len(text) > _INTEGER_LIMIT_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")


# --- one tensor ---------------------------------------------------------------------------------


def _read_entry(name: str, entry: object, source: str) -> _Stored:
    def fault(text: str) -> SourceMalformed:
        return _malformed(source, f"tensor {_shown(name)} {text}")

    if not name.isascii() and not _is_unicode(name):
        raise fault("has a name that is not valid Unicode")
    if not isinstance(entry, dict):
        raise fault("is not described by a JSON object")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str):
        raise fault("has no dtype")
    shape = _naturals(entry.get("shape"))
    offsets = _naturals(entry.get("data_offsets"))
    if shape is None:
        raise fault(f"has no valid shape: {_shown(entry.get('shape'))}")
    if offsets is None or len(offsets) != 2:
        raise fault(f"has no valid data_offsets: {_shown(entry.get('data_offsets'))}")
    if dtype not in _FILE_DTYPES:
        raise SourceUnsupported(
            f"{source}: tensor {_shown(name)} has dtype {_shown(dtype)}, which torch does not have",
            source=source,
        )
    if dtype == "F4":
        if not shape or shape[-1] % 2:
            raise fault(f"has dtype F4 and an odd last dimension: {_shown(shape)}")
        shape = (*shape[:-1], shape[-1] // 2)
    size = _checked_bytes(shape, ITEM_BYTES[dtype])
    if size is None:
        raise fault(f"has an absurd shape: {_shown(shape)}")
    start, end = offsets
    if end - start != size:
        raise fault(f"takes {size} bytes by its shape and dtype, but has {end - start} in the file")
    return _Stored(name, dtype, shape, start, end)


def _is_unicode(name: str) -> bool:
    """Say whether `name` has no lone surrogate, which JSON can spell and UTF-8 cannot."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _naturals(value: object) -> tuple[int, ...] | None:
    """Return a JSON list of integers that are not negative, or None. `true` is no integer."""
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    return None


def _checked_bytes(shape: Sequence[int], item_bytes: int) -> int | None:
    """Return the size of a contiguous tensor, or None if it, or a stride, is out of bounds.

    Dimensions of no size count as one, so that strides are bounded too; leaving at the bound keeps
    a list of many large dimensions from growing huge integers.
    """
    reach = item_bytes
    for size in shape:
        reach *= size or 1
        if reach >= FILE_LIMIT_BYTES:
            return None
    return 0 if 0 in shape else reach


# --- all of them --------------------------------------------------------------------------------


def _check_cover(tensors: Iterable[_Stored], data_bytes: int, source: str) -> None:
    """Refuse tensors, given in the order of the file, that do not cover its bytes exactly."""
    end = 0
    for tensor in tensors:
        if tensor.end > data_bytes:
            raise _malformed(
                source,
                f"tensor {_shown(tensor.name)} ends at byte {tensor.end} of the tensor bytes, of "
                f"which the file has {data_bytes}: truncated",
            )
        if tensor.start < end:
            raise _malformed(source, f"tensor {_shown(tensor.name)} overlaps another one")
        if tensor.start > end:
            raise _malformed(
                source,
                f"{tensor.start - end} bytes before tensor {_shown(tensor.name)} are nobody's",
            )
        end = tensor.end
    if end != data_bytes:
        raise _malformed(source, f"{data_bytes - end} bytes at its end belong to no tensor")


def _join(sources: list[int], offsets: list[int], sizes: list[int]) -> tuple[Copy, ...]:
    """Return the copies, those that touch each other on both sides made one."""
    joined: list[list[int]] = []
    for source, offset, size in zip(sources, offsets, sizes, strict=True):
        if size == 0:
            continue
        last = joined[-1] if joined else None
        if last and last[0] + last[2] == source and last[1] + last[2] == offset:
            last[2] += size
        else:
            joined.append([source, offset, size])
    return tuple(Copy(*copy) for copy in joined)
