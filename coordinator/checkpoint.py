"""What a checkpoint holds, whatever its format, and where that goes in a segment. Pure.

A reader of a format gives the table of what its files have; here it becomes a manifest, and the
stretches of the files that fill the segment.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from shm_store.errors import SourceMalformed
from shm_store.layout import ITEM_BYTES, contiguous_strides, place
from shm_store.manifest import GroupEntry, Kind, Manifest, TensorEntry
from shm_store.plain_values import encode_value
from shm_store.reading import Reading


class Stored(msgspec.Struct, frozen=True):
    """One tensor as a file has it: contiguous, from byte `start` of the file to `end`.

    `file` is which of the checkpoint's files that is. A `packed` one is blocks of a quantised
    tensor of that type in GGUF, which is of `size`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    file: int = 0
    packed: str = ""
    size: tuple[int, ...] = ()


class Copy(msgspec.Struct, frozen=True):
    """One stretch of a file that goes to one stretch of the segment.

    `source_offset_bytes` counts from the start of the file, `data_offset_bytes` from the start of
    the segment's tensor bytes. `file` is which of a checkpoint's files it is.
    """

    source_offset_bytes: int
    data_offset_bytes: int
    size_bytes: int
    file: int = 0


class Cast(msgspec.Struct, frozen=True):
    """One tensor that becomes another dtype on its way. Offsets as in `Copy`."""

    source_offset_bytes: int
    data_offset_bytes: int
    elements: int
    dtype: str
    """Of the file."""
    to: str
    file: int = 0


class Checkpoint(msgspec.Struct, frozen=True):
    """A manifest, and what fills the segment, in the order of the files."""

    manifest: Manifest
    data_bytes: int
    """The segment's tensor bytes, alignment included."""
    copies: tuple[Copy, ...]
    casts: tuple[Cast, ...] = ()
    values: tuple[tuple[int, bytes], ...] = ()
    """What no file has: encoded values, each with its offset in the tensor bytes."""

    def filled_bytes(self) -> int:
        """Return how many bytes are written in all."""
        cast = sum(cast.elements * ITEM_BYTES[cast.to] for cast in self.casts)
        values = sum(len(value) for _, value in self.values)
        return cast + values + sum(copy.size_bytes for copy in self.copies)


def lay_out(table: Sequence[Stored], reading: Reading, source: str) -> Checkpoint:
    """Return how to make a segment of what files hold.

    Tensors keep the table's order. Each is an alias group of its own (files have no aliases), and
    groups lie in the order of the files, so that each is read from front to back.

    Args:
        table: in the order of the state dict; as a reader has checked it.
        reading: which of them are wanted, and as what.
        source: the name of the checkpoint, for errors.

    Raises:
        SourceMalformed: nothing is wanted of what is there, or two tensors have one name.
    """
    wanted, names = select(table, [tensor.name for tensor in table], reading, source)
    cast = reading.casts()
    dtypes = [cast(tensor.name, tensor.dtype) for tensor in wanted]
    order = sorted(
        range(len(wanted)),
        key=lambda index: (wanted[index].file, wanted[index].start, wanted[index].end),
    )
    group_of = {index: group for group, index in enumerate(order)}
    entries = [
        TensorEntry(
            names[index],
            dtypes[index],
            tensor.shape,
            contiguous_strides(tensor.shape),
            group_of[index],
            0,
        )
        for index, tensor in enumerate(wanted)
    ]
    values = _wrap(entries, wanted, [cast(tensor.name, "F32") for tensor in wanted])
    sizes = [*(_size_bytes(wanted[index], dtypes[index]) for index in order), *map(len, values)]
    offsets, data_bytes = place(sizes)
    kept: list[tuple[Stored, int]] = []
    casts: list[Cast] = []
    for index, at in zip(order, offsets, strict=False):
        tensor = wanted[index]
        if dtypes[index] == tensor.dtype:
            kept.append((tensor, at))
        elif tensor.end > tensor.start:
            casts.append(_cast(tensor, at, dtypes[index]))
    return Checkpoint(
        Manifest(tuple(entries), tuple(map(GroupEntry, offsets, sizes)), beyond=2 * len(values)),
        data_bytes,
        _join(kept),
        tuple(casts),
        tuple(zip(offsets[len(order) :], values, strict=True)),
    )


GGUF_TENSOR = "gpu_worker.gguf_tensor:GGUFTensor"
"""The class of what is packed, where it is read. Its state is `context` below."""


def _wrap(
    entries: list[TensorEntry], tensors: Sequence[Stored], worth: Sequence[str]
) -> list[bytes]:
    """Have each packed tensor be made of its blocks, as a worker would have published it.

    Args:
        worth: the dtype of what each is worth, if it is packed.

    Returns:
        The encoded values that say so. Their groups come behind those of the files.
    """
    values: list[bytes] = []
    for index, tensor in enumerate(tensors):
        if tensor.packed:
            blocks, number = entries[index], len(entries)
            value = _packed_value(tensor, worth[index], number)
            entries[index] = TensorEntry(
                blocks.name, "U8", (len(value),), (1,), len(tensors) + len(values), 0, Kind.WRAPPED
            )
            entries.append(replace(blocks, name=f"{blocks.name}\0{number}", kind=Kind.INNER))
            values.append(value)
    return values


def _packed_value(tensor: Stored, worth: str, number: int) -> bytes:
    """Return how a packed tensor is made of the tensor of this number in the manifest."""
    whole, blocks, size = object(), object(), object()
    made_of = {
        "class": GGUF_TENSOR,
        "inner": {"blocks": blocks},
        "context": {"type": tensor.packed, "dtype": worth},
        "size": size,
        "strides": contiguous_strides(tensor.size),
        "parameter": False,
    }
    parts: dict[object, tuple[str, object]] = {
        whole: ("wrapper", made_of),
        blocks: ("tensor", [number, False]),
        size: ("size", list(tensor.size)),
    }
    return encode_value(whole, lambda part, _: parts.get(part))


Tensor = TypeVar("Tensor")


def select(
    tensors: Sequence[Tensor], names: Sequence[str], reading: Reading, source: str
) -> tuple[list[Tensor], list[str]]:
    """Return those tensors that are wanted, and the names that they are to have.

    Raises:
        SourceMalformed: as `lay_out`.
    """
    keeps, renamed = reading.keeps(), reading.renames()
    kept = [(tensor, name) for tensor, name in zip(tensors, names, strict=True) if keeps(name)]
    if not kept and tensors:
        raise SourceMalformed(
            f"{source}: name_filter (--only) matches none of its {len(tensors)} tensors",
            source=source,
            remedy=f"write patterns for names such as {shown(names[0])}",
        )
    became: dict[str, str] = {}
    for _, name in kept:
        other = became.setdefault(renamed(name), name)
        if other != name:
            raise SourceMalformed(
                f"{source}: {shown(other)} and {shown(name)} are both to be named "
                f"{shown(renamed(name))}",
                source=source,
                remedy="rename fewer prefixes, or leave one out with name_filter= (--only)",
            )
    return [tensor for tensor, _ in kept], list(became)


def check_found(found: Container[str], file_of: Mapping[str, str], source: str) -> None:
    """Refuse shards that lack what their index names.

    Raises:
        SourceMalformed: so they do.
    """
    missing = [name for name in file_of if name not in found]
    if missing:
        name, more = missing[0], f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise SourceMalformed(
            f"{source}: by this index {file_of[name]} has tensor {shown(name)}, but it has none of "
            f"that name{more}",
            source=source,
            remedy="download or save all files of the checkpoint again, the index too",
        )


_SHOWN_CHARACTERS = 200


def shown(value: object) -> str:
    """Return `value` for a message: one line, bounded, and text that can be encoded."""
    # A name can be as long as the header; repr() escapes what is not printable.
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def _size_bytes(tensor: Stored, dtype: str) -> int:
    size = tensor.end - tensor.start
    return size // ITEM_BYTES[tensor.dtype] * ITEM_BYTES[dtype]


def _cast(tensor: Stored, offset: int, to: str) -> Cast:
    elements = (tensor.end - tensor.start) // ITEM_BYTES[tensor.dtype]
    return Cast(tensor.start, offset, elements, tensor.dtype, to, tensor.file)


def _join(placed: Sequence[tuple[Stored, int]]) -> tuple[Copy, ...]:
    """Return the copies of tensors to offsets, those that touch on both sides made one."""
    joined: list[list[int]] = []
    for tensor, offset in placed:
        size = tensor.end - tensor.start
        if size == 0:
            continue
        last = joined[-1] if joined else None
        if (
            last
            and last[3] == tensor.file
            and last[0] + last[2] == tensor.start
            and last[1] + last[2] == offset
        ):
            last[2] += size
        else:
            joined.append([tensor.start, offset, size, tensor.file])
    return tuple(Copy(*copy) for copy in joined)
