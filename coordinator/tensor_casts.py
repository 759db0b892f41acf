"""Casts of tensors that torch has loaded: where each is to be, and its bytes on their way there.

What is to be cast is planned as a *placeholder*: a tensor of the dtype, shape and strides that it
will have, over a map that may not be written and takes no memory. So whoever plans a segment sees
what will be in it; later each group is converted in its place, chunk by chunk.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coordinator.casting import Converter, cannot_cast, chunks, dtype_of
from coordinator.checkpoint import shown
from shm_store.errors import SourceUnsupported
from shm_store.layout import ALIGNMENT_BYTES, extent_elements, round_up

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class CastPart:
    """One alias group that becomes another dtype.

    `elements` has one dimension if they lie as they are to lie; else they are gathered first, which
    takes the memory of this one.
    """

    elements: torch.Tensor
    to: torch.dtype
    size_bytes: int
    source: str

    def write(self, fd: int, offset_bytes: int, written: Callable[[int], object]) -> None:
        """Convert into a segment, and tell `written` of each step.

        Raises:
            SourceUnsupported: torch cannot.
        """
        try:
            flat = self.elements
            if flat.dim() != 1:
                gathered = flat.to(self.to)
                flat = gathered.as_strided((gathered.numel(),), (1,), 0)
            converter = Converter(fd, self.size_bytes)
            for first, count in chunks(flat.numel(), flat.dtype, self.to):
                at_bytes = offset_bytes + first * self.to.itemsize
                written(converter.write(flat[first : first + count], self.to, at_bytes))
        except (NotImplementedError, RuntimeError) as error:
            raise cannot_cast(self.source, str(self.elements.dtype), str(self.to)) from error


@dataclass(frozen=True, slots=True)
class _Placed:
    """A placeholder to be: of which tensors, over which elements."""

    names: Sequence[str]
    elements: torch.Tensor
    to: torch.dtype
    views: Sequence[tuple[tuple[int, ...], tuple[int, ...], int]]
    """Of each name: shape, strides and the offset in elements."""

    @property
    def size_bytes(self) -> int:
        return self.elements.numel() * self.to.itemsize


def place_casts(
    state: Mapping[str, Any], wanted: Callable[[str, str], str], source: str
) -> tuple[dict[str, Any], dict[int, CastPart]]:
    """Return `state` with placeholders for what is cast, and what fills them.

    Args:
        state: what a file holds, by its names there.
        wanted: gives the dtype of a tensor by name and dtype, as `Reading.casts`.
        source: the name of the checkpoint, for errors.

    Returns:
        The parts by the address of their placeholder's storage.

    Raises:
        SourceUnsupported: tensors that share bytes become different dtypes; or torch lacks one.
    """
    to: dict[str, torch.dtype] = {}
    for name, value in state.items():
        dtype = _castable(value)
        became = wanted(name, dtype) if dtype else dtype
        if became != dtype:
            to[name] = dtype_of(became, source)
    if not to:
        return dict(state), {}
    placed = [
        one for group in _overlapping(state) for one in _placed_group(group, state, to, source)
    ]
    return _placeholders(state, to, placed, source)


def _castable(value: object) -> str:
    """Return our name of the dtype of a plain tensor whose elements can be read; "" of all else."""
    import torch

    from gpu_worker.dtypes import NAMES

    if not isinstance(value, torch.Tensor) or type(value) not in (
        torch.Tensor,
        torch.nn.Parameter,
        torch.nn.Buffer,
    ):
        return ""
    if value.is_nested or value.is_quantized or value.layout != torch.strided or value.is_meta:
        return ""
    # What reaches beyond its storage, whoever plans the segment refuses by name.
    end_bytes = value.storage_offset() * value.itemsize + _extent_bytes(value)
    return NAMES.get(value.dtype, "") if end_bytes <= value.untyped_storage().nbytes() else ""


def _extent_bytes(tensor: torch.Tensor) -> int:
    return extent_elements(tensor.shape, tensor.stride()) * tensor.itemsize


def _overlapping(state: Mapping[str, Any]) -> list[list[str]]:
    """Return the names of tensors, those together whose bytes overlap."""
    storages: defaultdict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for name, tensor in state.items():
        if _castable(tensor) and tensor.numel():
            start = tensor.storage_offset() * tensor.itemsize
            extent = start, start + _extent_bytes(tensor), name
            storages[tensor.untyped_storage().data_ptr()].append(extent)
    groups: list[list[str]] = []
    for extents in storages.values():
        reached = 0
        for start, end, name in sorted(extents):
            if start >= reached:
                groups.append([])
            groups[-1].append(name)
            reached = max(reached, end)
    return groups


def _placed_group(
    names: Sequence[str], state: Mapping[str, Any], to: Mapping[str, torch.dtype], source: str
) -> list[_Placed]:
    """Return the placeholders of tensors that share bytes, one for each dtype that is wanted."""
    cast = [name for name in names if name in to]
    if not cast:
        return []
    first = state[names[0]]
    if all(_geometry(state[name]) == _geometry(first) for name in names):
        by_dtype: defaultdict[torch.dtype, list[str]] = defaultdict(list)
        for name in cast:
            by_dtype[to[name]].append(name)
        return [_placed_lone(alike, first, dtype) for dtype, alike in by_dtype.items()]
    alike = {(state[name].dtype, to.get(name), state[name].is_neg()) for name in names}
    if len(alike) != 1 or first.is_neg():
        raise SourceUnsupported(
            f"{source}: tensors {', '.join(map(shown, names[:4]))} share bytes, and would not if "
            "only some were cast, or to different dtypes",
            source=source,
            remedy="cast all to one dtype or none, or leave some out (name_filter=, --only)",
        )
    tensors = [state[name].detach() for name in names]
    start = min(tensor.storage_offset() for tensor in tensors)
    end = max(
        tensor.storage_offset() + extent_elements(tensor.shape, tensor.stride())
        for tensor in tensors
    )
    views = [
        (tuple(tensor.shape), tensor.stride(), tensor.storage_offset() - start)
        for tensor in tensors
    ]
    # Of one that reaches to the end, since storages at one address need not be equally long.
    whole = max(tensors, key=lambda tensor: tensor.untyped_storage().nbytes())
    elements = whole.as_strided((end - start,), (1,), start)
    return [_Placed(names, elements, to[names[0]], views)]


def _geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.is_neg()


def _placed_lone(names: Sequence[str], tensor: torch.Tensor, to: torch.dtype) -> _Placed:
    import torch

    elements = tensor.detach()
    like = torch.empty_like(elements, dtype=to, device="meta", memory_format=torch.preserve_format)
    strides = tuple(like.stride())
    if strides == elements.stride() and not elements.is_neg():
        elements = elements.as_strided((elements.numel(),), (1,), elements.storage_offset())
    return _Placed(names, elements, to, [(tuple(tensor.shape), strides, 0)] * len(names))


def _placeholders(
    state: Mapping[str, Any],
    to: Mapping[str, torch.dtype],
    placed: Sequence[_Placed],
    source: str,
) -> tuple[dict[str, Any], dict[int, CastPart]]:
    import torch

    size_bytes = sum(round_up(one.size_bytes, ALIGNMENT_BYTES) for one in placed)
    # What may not be written counts for no limit, and what is not read has no pages.
    nothing = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    became = dict(state)
    parts: dict[int, CastPart] = {}
    at_bytes = 0
    for one in placed:
        flat = torch.frombuffer(nothing, dtype=one.to, count=one.elements.numel(), offset=at_bytes)
        at_bytes += round_up(one.size_bytes, ALIGNMENT_BYTES)
        for name, (shape, strides, offset) in zip(one.names, one.views, strict=True):
            became[name] = flat.as_strided(shape, strides, offset)
        address = flat.untyped_storage().data_ptr()
        parts[address] = CastPart(one.elements, one.to, one.size_bytes, source)
    empty: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    for name, dtype in to.items():
        tensor = state[name]
        if not tensor.numel():
            key = id(tensor), dtype
            became[name] = empty.setdefault(key, torch.empty_like(tensor.detach(), dtype=dtype))
    return became, parts
