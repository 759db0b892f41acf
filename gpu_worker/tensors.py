"""The tensors over a mapped segment: from its manifest to a state dict, without a copy.

Rules:

- Each alias group is its own storage, so that saving or resizing a tensor touches that group only.
- Equal entries are the same tensor: what was tied is tied again.
- What is not a plain tensor is made of the plain ones and bytes, see `held_values`.
- A manifest may lie. Nothing it says reaches out of its group, nor a group out of the segment.
"""

from __future__ import annotations

from typing import Any

import torch

from gpu_worker.dtypes import torch_dtype
from gpu_worker.held_values import with_values
from gpu_worker.mapping import Buffer
from shm_store.errors import SegmentRefused
from shm_store.layout import ALIGNMENT_BYTES, ITEM_BYTES, extent_elements
from shm_store.manifest import PLAIN_KINDS, GroupEntry, Manifest, TensorEntry


def entries(buffer: Buffer) -> tuple[TensorEntry, ...]:
    """Return what the manifest says of each tensor, in state-dict order.

    Raises:
        SegmentRefused: the manifest cannot be read.
    """
    return buffer.content()[0].tensors


def data_range(buffer: Buffer) -> range:
    """Return where the bytes of all tensors are in a segment, as its manifest says.

    Raises:
        SegmentRefused: the manifest cannot be read, or lies.
    """
    manifest, start = buffer.content()
    _check_groups(manifest.groups, len(buffer) - start)
    ends = (group.offset_bytes + group.size_bytes for group in manifest.groups)
    return range(start, start + max(ends, default=0))


def tensors(buffer: Buffer) -> dict[str, Any]:
    """Return the state dict of a mapped segment: views of its bytes, in the manifest's order.

    Each alias group is one storage; equal entries are the same tensor. Every tensor, and whatever
    is made over its storage, keeps the mapping. None requires a gradient. What is not a tensor is
    made anew by each call.

    Raises:
        SegmentRefused: the manifest lies about offsets, shapes, strides, groups, dtypes or values.
        PlatformUnsupported: this torch is too old for a dtype the weights use.
        ClassUnknown: the weights hold a value of a class that this process has not imported.
    """
    manifest, start = buffer.content()
    state = plain_tensors(buffer)
    if not manifest.beyond:
        return state
    if manifest.beyond != sum(entry.kind not in PLAIN_KINDS for entry in manifest.tensors):
        raise SegmentRefused("the manifest does not know how many values it has")
    whole = memoryview(buffer).cast("B").toreadonly()

    def read(entry: TensorEntry) -> memoryview:
        begin = start + manifest.groups[entry.group].offset_bytes + entry.offset_bytes
        return whole[begin : begin + entry.shape[0]]

    with torch.inference_mode(False), torch.no_grad():
        return with_values(manifest, state, read)


def plain_tensors(buffer: Buffer) -> dict[str, torch.Tensor]:
    """Return a tensor for every entry of a mapped segment, of those that are not plain their bytes.

    That is enough, and much less, for who looks for memory and not for weights. Raises what
    `tensors` does.
    """
    manifest, start = buffer.content()
    try:
        # Whoever gets them next may not be in inference mode, and then could not edit them.
        with torch.inference_mode(False):
            state = _build(buffer, manifest, start)
    except (RuntimeError, ValueError, OverflowError) as error:
        raise SegmentRefused(f"the manifest describes no tensor: {error}") from error
    if len(state) != len(manifest.tensors):
        raise SegmentRefused("the manifest names a tensor twice")
    return state


def _build(buffer: Buffer, manifest: Manifest, start: int) -> dict[str, torch.Tensor]:
    """The loop that a warm attach spends its time in; `_AliasGroups` does what is not simple."""
    groups = manifest.groups
    _check_groups(groups, len(buffer) - start)
    state: dict[str, torch.Tensor] = {}
    lone: dict[int, TensorEntry | None] = {}
    aliases = _AliasGroups(buffer, manifest, start, state, lone)
    # Layers repeat: most entries find their shape here.
    known: dict[tuple[int, ...], _Extent] = {}
    frombuffer, as_strided, count = torch.frombuffer, torch.as_strided, len(groups)
    for entry in manifest.tensors:
        shape, strides, group = entry.shape, entry.strides, entry.group
        extent = known.get(shape)
        if extent is None or extent[0] != strides or extent[1] != entry.dtype:
            extent = known[shape] = _extent(entry)
        _, _, dtype, elements, size_bytes = extent
        if group < count and group not in lone and elements and not entry.offset_bytes:
            place = groups[group]
            if size_bytes == place.size_bytes:
                lone[group] = entry
                offset = start + place.offset_bytes
                flat = frombuffer(buffer, dtype=dtype, count=elements, offset=offset)
                state[entry.name] = flat if strides == _FLAT else as_strided(flat, shape, strides)
                continue
        state[entry.name] = aliases.tensor(entry, extent)
    return state


class _AliasGroups:
    """Makes the tensors of groups with several members, and all that is not simply a group.

    A group's storage is made once, as bytes; members are views of it, whatever their dtypes.
    """

    def __init__(
        self,
        buffer: Buffer,
        manifest: Manifest,
        start: int,
        state: dict[str, torch.Tensor],
        lone: dict[int, TensorEntry | None],
    ) -> None:
        """Share `state` and `lone` with the loop that calls.

        `lone` gives each group met so far the entry that is all of it and has made its storage, or
        None if this class made or will make the storage.
        """
        self._buffer = buffer
        self._groups = manifest.groups
        self._start = start
        self._state = state
        self._lone = lone
        self._bytes: dict[int, torch.Tensor] = {}
        self._made: dict[tuple[object, ...], torch.Tensor] = {}

    def tensor(self, entry: TensorEntry, extent: _Extent) -> torch.Tensor:
        """Return the tensor of `entry`. Equal entries get the same one."""
        if entry.group >= len(self._groups):
            raise SegmentRefused(f"tensor {entry.name!r} is in group {entry.group}, which is none")
        if entry.offset_bytes + extent[4] > self._groups[entry.group].size_bytes:
            raise SegmentRefused(f"tensor {entry.name!r} reaches out of its group")
        if entry.offset_bytes % ITEM_BYTES[entry.dtype]:
            raise SegmentRefused(f"tensor {entry.name!r} is not aligned to its elements")
        first = self._lone.setdefault(entry.group, None)
        if first is not None:
            self._made[_identity(first)] = self._state[first.name]
        identity = _identity(entry)
        made = self._made.get(identity)
        if made is None:
            made = self._made[identity] = self._make(entry, extent)
        return made

    def _make(self, entry: TensorEntry, extent: _Extent) -> torch.Tensor:
        _, _, dtype, elements, _ = extent
        if not elements:
            # torch makes no storage over no bytes, and there are none to share.
            return torch.empty_strided(entry.shape, entry.strides, dtype=dtype, device="cpu")
        item_bytes = ITEM_BYTES[entry.dtype]
        whole_bytes = self._groups[entry.group].size_bytes // item_bytes * item_bytes
        items = self._storage(entry.group)[:whole_bytes].view(dtype)
        offset = entry.offset_bytes // item_bytes
        return torch.as_strided(items, entry.shape, entry.strides, offset)

    def _storage(self, group: int) -> torch.Tensor:
        """Return the bytes of a group, as a tensor over the storage all its members share."""
        found = self._bytes.get(group)
        if found is None:
            place, entry = self._groups[group], self._lone[group]
            if entry is not None:
                first = self._state[entry.name]
                count = place.size_bytes // first.itemsize
                found = torch.as_strided(first, (count,), (1,), 0).view(torch.uint8)
            else:
                found = torch.frombuffer(
                    self._buffer,
                    dtype=torch.uint8,
                    count=place.size_bytes,
                    offset=self._start + place.offset_bytes,
                )
            self._bytes[group] = found
        return found


def _identity(entry: TensorEntry) -> tuple[object, ...]:
    return entry.group, entry.dtype, entry.shape, entry.strides, entry.offset_bytes


def _check_groups(groups: tuple[GroupEntry, ...], room_bytes: int) -> None:
    """Refuse groups that are not aligned, or not within the tensor bytes."""
    for index, group in enumerate(groups):
        offset = group.offset_bytes
        if offset % ALIGNMENT_BYTES or offset + group.size_bytes > room_bytes:
            raise SegmentRefused(f"group {index} is not aligned, or reaches out of the segment")


_FLAT = (1,)
"""The strides of a contiguous tensor of one dimension, which needs no view of its storage."""

_Extent = tuple[tuple[int, ...], str, torch.dtype, int, int]
"""Of one shape: strides, dtype, torch's dtype, and the elements and bytes from first to last."""


def _extent(entry: TensorEntry) -> _Extent:
    elements = extent_elements(entry.shape, entry.strides)
    dtype = torch_dtype(entry.dtype)
    return entry.strides, entry.dtype, dtype, elements, elements * ITEM_BYTES[entry.dtype]
