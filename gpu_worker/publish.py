"""From a module or a state dict to a filled segment: what goes where, then the bytes.

Rules:

- Bytes are exact, whatever the dtype; shapes, strides and ties come out as they went in.
- Tensors whose bytes overlap in one storage are an alias group and keep their strides. Any other
  tensor takes only its own bytes, however big the storage it is a view of.
- What is not a plain tensor is held as an encoded value, and the tensors in it as any other tensor,
  see `held_values`.
- What cannot be held exactly is refused by name, before anything is reserved.
- Memory is written from where it is. What must be gathered first (from another device, from between
  gaps, or because it is conjugated or negated when read) is gathered one group at a time.
- Once its bytes are written, nothing here holds a source.
"""

from __future__ import annotations

import ctypes
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gpu_worker.dtypes import NAMES
from gpu_worker.held_values import Parts, is_made_of_others
from gpu_worker.wrappers import PLAIN_TYPES
from shm_store import segment
from shm_store.errors import ArgumentRefused, SegmentRefused, TensorRefused
from shm_store.layout import extent_elements, place, segment_bytes
from shm_store.manifest import (
    NATURAL_LIMIT,
    PLAIN_KINDS,
    GroupEntry,
    Kind,
    Manifest,
    TensorEntry,
    encode_manifest,
)

STEP_BYTES = 32 * 1024 * 1024
"""So much is written between two words about it."""

Written = Callable[[int], object]
"""Hears how many bytes more are written."""

_RENAME = "name every tensor by a text"

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""By item size, a dtype to copy bits with: torch cannot copy every dtype that it can hold."""


@dataclass(frozen=True, slots=True)
class Span:
    """A group whose bytes lie in a storage just as they are to be held."""

    storage: torch.UntypedStorage
    start_bytes: int
    size_bytes: int

    def write(self, fd: int, offset_bytes: int, written: Written) -> None:
        """Write the bytes at `offset_bytes`, from where they are if this is the CPU's memory."""
        if self.storage.device.type == "cpu":
            address = self.storage.data_ptr() + self.start_bytes
            _write_memory(fd, address, self.size_bytes, offset_bytes, written)
            return
        window = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        window.set_(self.storage, self.start_bytes, (self.size_bytes,), (1,))
        local = window.cpu()
        _write_memory(fd, local.data_ptr(), self.size_bytes, offset_bytes, written)


@dataclass(frozen=True, slots=True)
class Gathered:
    """A group that is one tensor, held without the gaps between its elements."""

    tensor: torch.Tensor
    strides: tuple[int, ...]
    size_bytes: int

    def write(self, fd: int, offset_bytes: int, written: Written) -> None:
        """Copy the elements together, then write them at `offset_bytes`."""
        with torch.no_grad():
            bits = _BITS[self.tensor.itemsize]
            dense = torch.empty_strided(self.tensor.shape, self.strides, dtype=bits, device="cpu")
            dense.copy_(self.tensor.resolve_conj().resolve_neg().view(bits))
        _write_memory(fd, dense.data_ptr(), self.size_bytes, offset_bytes, written)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A group that is the bytes of an encoded value."""

    data: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def write(self, fd: int, offset_bytes: int, written: Written) -> None:
        """Write them at `offset_bytes`."""
        segment.write_at(fd, memoryview(self.data), offset_bytes)
        written(len(self.data))


Group = Span | Gathered | Encoded


@dataclass(slots=True)
class Plan:
    """What a segment will hold. `groups` keeps the source tensors until they are written."""

    manifest: bytes
    size_bytes: int
    """Of the whole segment, to be reserved."""
    groups: list[tuple[int, Group]] = field(repr=False)
    """Each with its offset in the tensor bytes."""

    @property
    def left_bytes(self) -> int:
        """What is still to be written of them."""
        return sum(group.size_bytes for _, group in self.groups)


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    tensor: torch.Tensor
    kind: Kind

    @property
    def start_bytes(self) -> int:
        """Where its first element is in its storage."""
        return int(self.tensor.storage_offset()) * self.tensor.itemsize

    @property
    def end_bytes(self) -> int:
        """Where its last element ends in its storage."""
        tensor = self.tensor
        return self.start_bytes + extent_elements(tensor.shape, tensor.stride()) * tensor.itemsize

    @property
    def geometry(self) -> tuple[object, ...]:
        """Equal for entries of one storage that are the same tensor."""
        tensor = self.tensor
        return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


@dataclass(frozen=True, slots=True)
class _Value:
    """An entry that is no plain tensor."""

    name: str
    data: bytes
    kind: Kind


_View = tuple[tuple[int, ...], int]
"""What a tensor is in its group: its strides there, and its offset in bytes."""


def plan(weights: torch.nn.Module | Mapping[str, Any]) -> Plan:
    """Decide where the tensors of `weights` go in a segment. Reads none of their bytes.

    Values that are no tensors are encoded here already.

    Args:
        weights: a module (its parameters, all its buffers and its extra state), or a state dict.
            Any device.

    Returns:
        The plan, for one `fill`. Until then it keeps the tensors, and they must not change.

    Raises:
        TensorRefused: a segment cannot hold that entry exactly; says which and why.
        ArgumentRefused: `weights` is neither a module nor a state dict.
    """
    entries = _entries(weights)
    groups, views = _grouped([entry for entry in entries if isinstance(entry, _Entry)])
    encoded: dict[bytes, int] = {}
    tensors = []
    for entry in entries:
        if isinstance(entry, _Entry):
            number, (strides, offset_bytes) = views[entry.name]
            dtype, shape = NAMES[entry.tensor.dtype], tuple(entry.tensor.shape)
        else:
            dtype, shape, strides, offset_bytes = "U8", (len(entry.data),), (1,), 0
            # By the same bytes a tensor under two names is known, and made once.
            number = encoded.setdefault(entry.data, len(groups))
            if number == len(groups):
                groups.append(Encoded(entry.data))
        tensors.append(
            TensorEntry(entry.name, dtype, shape, strides, number, offset_bytes, entry.kind)
        )
    offsets, data_bytes = place(group.size_bytes for group in groups)
    placed = list(zip(offsets, groups, strict=True))
    table = tuple(GroupEntry(at_bytes, group.size_bytes) for at_bytes, group in placed)
    beyond = sum(entry.kind not in PLAIN_KINDS for entry in entries)
    manifest = encode_manifest(Manifest(tuple(tensors), table, beyond=beyond))
    return Plan(manifest, segment_bytes(len(manifest), data_bytes), placed)


def fill(fd: int, plan: Plan, written: Written = lambda size_bytes: None) -> None:
    """Write the manifest and all tensors into the segment that was reserved for `plan`.

    Uses the plan up: each source is let go once it is written, all of them if this raises.

    Args:
        fd: the segment, backed; stays the caller's.
        written: called here, with the size of each step; what it raises ends the fill.

    Raises:
        SegmentRefused: the segment has another size than the plan; nothing was written.
        OSError: the segment was not backed, or is sealed.
    """
    try:
        actual_bytes = os.fstat(fd).st_size
        if actual_bytes != plan.size_bytes:
            raise SegmentRefused(
                f"{plan.size_bytes} bytes were reserved, but the segment has {actual_bytes}"
            )
        start = segment.write_manifest(fd, plan.manifest)
        plan.groups.reverse()
        while plan.groups:
            offset_bytes, group = plan.groups.pop()
            if group.size_bytes:
                group.write(fd, start + offset_bytes, written)
    finally:
        plan.groups.clear()


def _entries(weights: torch.nn.Module | Mapping[str, Any]) -> list[_Entry | _Value]:
    """Name everything that is to be held, in state-dict order; then non-persistent buffers.

    What values are made of is behind all that.
    """
    named = _named(weights)
    parts = Parts([name for name, _, _ in named], refusal)
    entries: list[_Entry | _Value] = []
    for name, value, kind in named:
        if isinstance(value, torch.Tensor) and not is_made_of_others(value):
            why = refusal(value)
            if why is not None:
                raise TensorRefused(name, why[0], remedy=why[1])
            entries.append(_Entry(name, value, kind))
        else:
            entries.append(_value(name, value, kind, parts, weights))
    entries += [_Entry(name, tensor, Kind.INNER) for name, tensor in parts.tensors]
    if len({entry.name for entry in entries}) != len(entries):
        raise ArgumentRefused("the state dict names a tensor twice")
    return entries


def _named(weights: torch.nn.Module | Mapping[str, Any]) -> list[tuple[str, Any, Kind]]:
    if isinstance(weights, torch.nn.Module):
        state: Mapping[str, Any] = weights.state_dict(keep_vars=True)
        parameters = dict(weights.named_parameters(remove_duplicate=False))
        buffers = dict(weights.named_buffers(remove_duplicate=False))
        kinds = dict.fromkeys(parameters, Kind.PARAMETER) | dict.fromkeys(buffers, Kind.BUFFER)
    elif isinstance(weights, Mapping):
        state, buffers, kinds = weights, {}, {}
    else:
        raise ArgumentRefused(
            f"weights are a module or a state dict, not {type(weights).__name__}",
            remedy="have build= return a torch.nn.Module or a dict of tensors",
        )
    named: list[tuple[str, Any, Kind]] = []
    for name, value in state.items():
        _check_name(name)
        named.append((name, value, kinds.get(name, Kind.TENSOR)))
    for name, tensor in buffers.items():
        if name not in state:
            named.append((name, tensor, Kind.NON_PERSISTENT_BUFFER))
    return named


def _value(
    name: str,
    value: object,
    kind: Kind,
    parts: Parts,
    weights: torch.nn.Module | Mapping[str, Any],
) -> _Value:
    """Return the entry of what is not a plain tensor.

    A refusal tells a training checkpoint's reader where to look.
    """
    if isinstance(value, torch.Tensor):
        apart = kind is Kind.NON_PERSISTENT_BUFFER
        held = Kind.NON_PERSISTENT_WRAPPED if apart else Kind.WRAPPED
        return _Value(name, parts.encode(name, value), held)
    try:
        return _Value(name, parts.encode(name, value), Kind.EXTRA)
    except TensorRefused as refused:
        inner = _inner_weights(weights)
        if inner is None:
            raise
        raise TensorRefused(
            name, refused.kind, remedy=f"return the inner dict of tensors, e.g. checkpoint[{inner}]"
        ) from refused.__cause__


def _inner_weights(weights: torch.nn.Module | Mapping[str, Any]) -> str | None:
    """Return how the dict in a training checkpoint is called that is a state dict, as code."""
    if isinstance(weights, Mapping):
        for key, held in weights.items():
            if isinstance(held, Mapping) and any(
                isinstance(inner, torch.Tensor) for inner in held.values()
            ):
                return repr(key)
    return None


def _grouped(entries: Sequence[_Entry]) -> tuple[list[Group], dict[str, tuple[int, _View]]]:
    """Return what to write, and for each entry which of that it is in, and how."""
    groups: list[Group] = []
    views: dict[str, tuple[int, _View]] = {}
    for members in _alias_groups(entries):
        group, member_views = _lay_out([entries[index] for index in members])
        for index, view in zip(members, member_views, strict=True):
            views[entries[index].name] = len(groups), view
        groups.append(group)
    return groups, views


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        kind = f"its name is of type {type(name).__name__}, not a string"
        raise TensorRefused(str(name), kind, remedy=_RENAME)
    try:
        name.encode()
    except UnicodeEncodeError as error:
        kind = f"its name is not valid Unicode: {error.reason}"
        raise TensorRefused(name, kind, remedy=_RENAME) from error


def refusal(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Say why the bytes of a tensor alone do not describe it, and what to do; None if they do."""
    if tensor.is_nested:
        return "it is nested", "hold its parts by their own names, see .unbind()"
    if type(tensor) not in PLAIN_TYPES:
        return (
            f"it is of the tensor subclass {type(tensor).__name__}",
            "make a plain tensor of it, e.g. dequantise it, or load these weights yourself",
        )
    if tensor.is_quantized:
        return (
            f"it has torch's legacy quantised dtype {tensor.dtype}",
            "call .dequantize() on it, or load these weights yourself",
        )
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}", "call .to_dense() on it"
    if tensor.is_meta:
        return (
            "it is on the meta device and has no bytes",
            "give it real weights before build= returns it",
        )
    if tensor.dtype not in NAMES:
        return f"dtype {tensor.dtype} is not supported", "convert it to another dtype with .to()"
    if max((0, *tensor.shape, *tensor.stride())) >= NATURAL_LIMIT:
        return "a size or a stride of it is too large", "call .clone() on it"
    if tensor.numel():
        end_bytes = _Entry("", tensor, Kind.TENSOR).end_bytes
        if end_bytes > tensor.untyped_storage().nbytes():
            # As a sharded wrapper leaves it behind. Reading it would end the process.
            return (
                "its storage has been freed or shrunk",
                "gather the whole module first, as a sharding wrapper can",
            )
    return None


def _alias_groups(entries: Sequence[_Entry]) -> list[list[int]]:
    """Return the indices of `entries`, grouped by bytes that overlap, in order of their first."""
    alone: defaultdict[int, list[int]] = defaultdict(list)
    storages: defaultdict[tuple[torch.device, int], list[int]] = defaultdict(list)
    for index, entry in enumerate(entries):
        tensor = entry.tensor
        if not tensor.numel() or _is_lazy(tensor):
            # Without bytes, or with bytes that are not its value, it can only be tied to itself.
            alone[id(tensor)].append(index)
        else:
            storages[tensor.device, tensor.untyped_storage().data_ptr()].append(index)
    found = list(alone.values())
    for indices in storages.values():
        end_bytes = 0
        for index in sorted(indices, key=lambda index: entries[index].start_bytes):
            entry = entries[index]
            if entry.start_bytes >= end_bytes:
                found.append([])
            found[-1].append(index)
            end_bytes = max(end_bytes, entry.end_bytes)
    return sorted((sorted(group) for group in found), key=lambda group: group[0])


def _lay_out(members: Sequence[_Entry]) -> tuple[Group, list[_View]]:
    """Return what to write for one alias group, and the view that each member is of it."""
    first = members[0]
    if any(member.geometry != first.geometry for member in members):
        start_bytes = min(member.start_bytes for member in members)
        # Offsets in a storage are multiples of the item size; so they stay after this.
        start_bytes -= start_bytes % max(member.tensor.itemsize for member in members)
        # Two storages may begin at one address; the one that reaches far enough keeps all bytes.
        last = max(members, key=lambda member: member.end_bytes)
        return (
            Span(last.tensor.untyped_storage(), start_bytes, last.end_bytes - start_bytes),
            [(member.tensor.stride(), member.start_bytes - start_bytes) for member in members],
        )
    group, strides = _lay_out_lone(first)
    return group, [(strides, 0)] * len(members)


def _lay_out_lone(entry: _Entry) -> tuple[Group, tuple[int, ...]]:
    """Return what to write for a tensor that overlaps with no other, and its strides there."""
    tensor = entry.tensor
    once = tensor.detach()
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.size(dimension) > 1:
            once = once.narrow(dimension, 0, 1)
    whole = Span(tensor.untyped_storage(), entry.start_bytes, entry.end_bytes - entry.start_bytes)
    if not tensor.numel() or (_overlaps_itself(once) and not _is_lazy(once)):
        return whole, tensor.stride()
    strides = torch.empty_like(once, device="meta", memory_format=torch.preserve_format).stride()
    if strides == once.stride() and not _is_lazy(once):
        return whole, tensor.stride()
    expanded = tuple(
        stride if once.size(dimension) == tensor.size(dimension) else 0
        for dimension, stride in enumerate(strides)
    )
    return Gathered(once, strides, once.numel() * once.itemsize), expanded


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Say whether its value is its bytes conjugated or negated."""
    return tensor.is_conj() or tensor.is_neg()


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Say whether two elements may share bytes, as in the windows of `unfold`."""
    reach = 0
    dimensions = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(pair for pair in dimensions if pair[1] > 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _write_memory(
    fd: int, address: int, size_bytes: int, offset_bytes: int, written: Written
) -> None:
    """Write this process's memory into a segment. Whoever calls keeps the memory."""
    memory = memoryview((ctypes.c_ubyte * size_bytes).from_address(address))
    for done_bytes in range(0, size_bytes, STEP_BYTES):
        step = memory[done_bytes : done_bytes + STEP_BYTES]
        segment.write_at(fd, step, offset_bytes + done_bytes)
        written(len(step))
