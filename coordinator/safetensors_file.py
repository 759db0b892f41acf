"""What a `.safetensors` file holds, from its size and its header. Pure: bytes in, values out.

The format: 8 bytes that give the header's length (little endian), the header (a JSON object: name
to dtype, shape and the range of its bytes), then the tensor bytes, without hole and overlap. See
https://github.com/huggingface/safetensors#format. A header is an untrusted text: whatever it says,
the outcome is a table that can be copied as it stands, or a `SourceError` that names the file and
the tensor. The work is linear in the header's length.

Must not know: fds, segments, torch. The loader reads and copies.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from coordinator.checkpoint import Stored, shown
from shm_store.errors import SourceMalformed, SourceUnsupported
from shm_store.layout import ITEM_BYTES

LENGTH_BYTES = 8
HEAD_BYTES = 64
"""How much of a file's beginning `header_bytes` wants to see."""

HEADER_LIMIT_BYTES = 100_000_000
"""The format's own limit."""

FILE_LIMIT_BYTES = 1 << 50
"""No segment can be larger, and no number in a manifest."""

_INTEGER_LIMIT_DIGITS = 20

_FILE_DTYPES = frozenset(ITEM_BYTES) - {"C128"}
"""The manifest knows one dtype that no file can hold."""

_OTHER_FORMATS = (
    (b"PK\x03\x04", "a zip archive, as torch.save writes it"),
    (b"\x80\x02", "a Python pickle, as torch.save wrote it before 1.6"),
    (b"\x80\x03", "a Python pickle"),
    (b"\x80\x04", "a Python pickle"),
    (b"\x80\x05", "a Python pickle"),
    (b"\x89HDF", "an HDF5 file"),
)
_NO_CHECKPOINT = "name a .safetensors file, or load it yourself with build="
"""What helps where nothing speaks for a damaged one."""

_LFS_POINTER = b"version https://git-lfs"
_PAGE = (b"<!doctype html", b"<html")


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
    if is_header(head, size_bytes):
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
    if length > size_bytes - LENGTH_BYTES:
        raise _malformed(
            source,
            f"a header of {length} bytes does not fit the {size_bytes} of the file: truncated",
        )
    text = "its header is no JSON object: not a .safetensors file, or damaged"
    raise _malformed(source, text, _NO_CHECKPOINT)


def is_header(head: bytes, size_bytes: int) -> bool:
    """Say whether a file begins as this format does: with a length that fits, and `{`."""
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    fits = length <= min(HEADER_LIMIT_BYTES, size_bytes - LENGTH_BYTES)
    return fits and head[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{"


def read_table(header: bytes, size_bytes: int, source: str, file: int = 0) -> list[Stored]:
    """Return what the file with this header holds, in the header's order.

    Args:
        header: as long as `header_bytes` said.
        size_bytes: the size of the file.
        source: its name, for errors.
        file: which of a checkpoint's files it is.

    Raises:
        SourceMalformed: the header is no such table, or does not cover the file exactly.
        SourceUnsupported: a tensor of a dtype that has no counterpart in torch.
    """
    data_start = LENGTH_BYTES + len(header)
    tensors = [
        _read_entry(name, entry, source, file, data_start)
        for name, entry in _read_object(header, source).items()
        if name != "__metadata__"
    ]
    in_order = sorted(tensors, key=lambda tensor: (tensor.start, tensor.end))
    _check_cover(in_order, data_start, size_bytes, source)
    return tensors


def _malformed(source: str, text: str, remedy: str | None = None) -> SourceMalformed:
    return SourceMalformed(f"{source}: {text}", source=source, remedy=remedy)


def _refuse_other_format(head: bytes, source: str) -> None:
    if head.startswith(_LFS_POINTER):
        raise SourceMalformed(
            f"{source}: a Git LFS pointer, not the file itself",
            source=source,
            remedy="run `git lfs pull` in its repository",
        )
    if head.lstrip().lower().startswith(_PAGE):
        raise SourceMalformed(
            f"{source}: a web page, and no checkpoint",
            source=source,
            remedy="name the file itself, or its index: folders of the web are not read",
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
                raise ValueError(f"the name {shown(name)} occurs twice")
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


def _read_entry(name: str, entry: object, source: str, file: int, data_start: int) -> Stored:
    def fault(text: str) -> SourceMalformed:
        return _malformed(source, f"tensor {shown(name)} {text}")

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
        raise fault(f"has no valid shape: {shown(entry.get('shape'))}")
    if offsets is None or len(offsets) != 2:
        raise fault(f"has no valid data_offsets: {shown(entry.get('data_offsets'))}")
    if dtype not in _FILE_DTYPES:
        raise SourceUnsupported(
            f"{source}: tensor {shown(name)} has dtype {shown(dtype)}, which torch does not have",
            source=source,
        )
    if dtype == "F4":
        if not shape or shape[-1] % 2:
            raise fault(f"has dtype F4 and an odd last dimension: {shown(shape)}")
        shape = (*shape[:-1], shape[-1] // 2)
    size = _checked_bytes(shape, ITEM_BYTES[dtype])
    if size is None:
        raise fault(f"has an absurd shape: {shown(shape)}")
    start, end = offsets
    if end - start != size:
        raise fault(f"takes {size} bytes by its shape and dtype, but has {end - start} in the file")
    return Stored(name, dtype, shape, data_start + start, data_start + end, file)


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


def _check_cover(tensors: Iterable[Stored], data_start: int, size_bytes: int, source: str) -> None:
    """Refuse tensors, given in the order of the file, that do not cover its bytes exactly."""
    end = data_start
    for tensor in tensors:
        if tensor.end > size_bytes:
            raise _malformed(
                source,
                f"tensor {shown(tensor.name)} ends at byte {tensor.end - data_start} of the tensor "
                f"bytes, of which the file has {size_bytes - data_start}: truncated",
            )
        if tensor.start < end:
            raise _malformed(source, f"tensor {shown(tensor.name)} overlaps another one")
        if tensor.start > end:
            raise _malformed(
                source,
                f"{tensor.start - end} bytes before tensor {shown(tensor.name)} are nobody's",
            )
        end = tensor.end
    if end != size_bytes:
        raise _malformed(source, f"{size_bytes - end} bytes at its end belong to no tensor")
