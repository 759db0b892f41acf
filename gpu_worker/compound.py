"""Sparse tensors, legacy quantised ones, odd dtypes: the plain tensors in them, without a copy.

torch makes all of these itself, so unlike other tensors that are made of tensors they have no class
of their own, and no `__tensor_flatten__`. A dtype that the manifest has no name for, as
`torch.uint4`, is that of a view of integers of the same size.

    Note on sparse tensors
    fact: torch's kernels trust the indices in a sparse tensor, and read and write where they say
    consequence: indices that lie would reach out of the memory of what is multiplied with them
    choice: torch checks them when the tensor is made of a segment
    cost: they are read once more, each time

    Note on legacy quantised tensors
    fact: torch makes them by copying, and has no constructor over memory that is there
    consequence: each process would have its own
    choice: an empty one is set to the storage of a plain tensor of integers of the same size
    cost: those of less than a byte have no such integers, and are refused by name
"""

from __future__ import annotations

from typing import Any

import torch

from gpu_worker.dtypes import NAMES
from gpu_worker.wrappers import PLAIN_TYPES, SPARSE_PARTS, sparse_parts
from shm_store.layout import extent_elements
from shm_store.plain_values import ValueRefused

_INTEGERS = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}
_QUANTISED = (*_INTEGERS, torch.quint4x2, torch.quint2x4)
_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_PER_TENSOR = (torch.per_tensor_affine, torch.per_tensor_symmetric)


def is_sparse(tensor: torch.Tensor) -> bool:
    """Say whether a tensor has one of the sparse layouts, and is of no class of its own."""
    return tensor.layout in SPARSE_PARTS and type(tensor) in PLAIN_TYPES


def is_quantised(tensor: torch.Tensor) -> bool:
    """Say whether a tensor has a legacy quantised dtype that can be taken apart."""
    known = tensor.dtype in _INTEGERS and tensor.layout is torch.strided and not tensor.is_meta
    return tensor.is_quantized and known and type(tensor) in PLAIN_TYPES


def is_odd(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is plain, but of a dtype that the manifest has no name for."""
    plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
    held = tensor.dtype in NAMES or tensor.itemsize not in _OF_SIZE
    return plain and not held and type(tensor) in PLAIN_TYPES


def odd_made_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return what a tensor of an odd dtype is a view of."""
    integers = tensor.detach().resolve_conj().resolve_neg().view(_OF_SIZE[tensor.itemsize])
    return {"dtype": tensor.dtype, "integers": integers}


def odd(made_of: dict[Any, Any]) -> torch.Tensor:
    """Return the tensor that is such a view. What lies is TypeError, or torch's error."""
    match made_of:
        case {"dtype": torch.dtype() as dtype, "integers": torch.Tensor() as integers}:
            # torch would reinterpret several elements as one, and quantised ones have no scale.
            if dtype.itemsize == integers.itemsize and dtype not in _QUANTISED:
                return integers.view(dtype)
    raise TypeError("it is no view of integers of its size")


def sparse_made_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return what a sparse tensor is made of."""
    parts = tuple(sparse_parts(tensor.detach()))
    made_of = {"layout": tensor.layout, "size": tensor.size(), "parts": parts}
    if tensor.layout is torch.sparse_coo:
        made_of["coalesced"] = tensor.is_coalesced()
    return made_of


def sparse(made_of: dict[Any, Any]) -> torch.Tensor:
    """Return the sparse tensor that is made of this. What lies is TypeError, or torch's error."""
    match made_of:
        case {
            "layout": torch.sparse_coo,
            "size": torch.Size() as size,
            "parts": (torch.Tensor() as indices, torch.Tensor() as values),
            "coalesced": bool(coalesced),
        }:
            return torch.sparse_coo_tensor(
                indices,
                values,
                size,
                device="cpu",
                check_invariants=True,
                is_coalesced=coalesced,
            )
        case {
            "layout": torch.layout() as layout,
            "size": torch.Size() as size,
            "parts": (
                torch.Tensor() as compressed,
                torch.Tensor() as plain,
                torch.Tensor() as values,
            ),
        }:
            return torch.sparse_compressed_tensor(
                compressed, plain, values, size, layout=layout, device="cpu", check_invariants=True
            )
    raise TypeError("its parts are no tensors")


def quantised_made_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return what a legacy quantised tensor is made of.

    Raises:
        ValueRefused: its memory has been freed.
    """
    storage = tensor.untyped_storage()
    elements = tensor.storage_offset() + extent_elements(tensor.shape, tensor.stride())
    if tensor.numel() and elements * tensor.itemsize > storage.nbytes():
        raise ValueRefused("its storage has been freed or shrunk")  # `set_` would let it grow
    integers = torch.empty(0, dtype=_INTEGERS[tensor.dtype], device=tensor.device)
    integers.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    made_of: dict[str, Any] = {"dtype": tensor.dtype, "integers": integers}
    if tensor.qscheme() in _PER_TENSOR:
        made_of |= {"scale": tensor.q_scale(), "zero": tensor.q_zero_point()}
    else:
        scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        made_of |= {"scale": scales, "zero": zeros, "axis": tensor.q_per_channel_axis()}
    return made_of


def quantised(made_of: dict[Any, Any]) -> torch.Tensor:
    """Return the quantised tensor that is made of this. What lies is TypeError, or torch's."""
    match made_of:
        case {"dtype": torch.dtype() as dtype, "integers": torch.Tensor() as integers, **rest}:
            if integers.dtype is not _INTEGERS.get(dtype):
                raise TypeError("its integers are of another size")
        case _:
            raise TypeError("it has no integers")
    shape = integers.size()
    nothing = [0] * len(shape)  # what it takes itself is let go of at once
    empty: Any
    match rest:
        case {"scale": float(scale), "zero": int(zero)}:
            empty = torch._empty_affine_quantized(
                nothing, scale=scale, zero_point=zero, dtype=dtype, device="cpu"
            )
        case {
            "scale": torch.Tensor() as scales,
            "zero": torch.Tensor() as zeros,
            "axis": int(axis),
        }:
            if not 0 <= axis < len(shape) or not scales.shape == zeros.shape == shape[axis:][:1]:
                raise TypeError("it has not one scale for each channel")
            empty = torch._empty_per_channel_affine_quantized(
                nothing, scales=scales, zero_points=zeros, axis=axis, dtype=dtype, device="cpu"
            )
        case _:
            raise TypeError("it has no scale")
    empty.set_(integers.untyped_storage(), integers.storage_offset(), shape, integers.stride())
    made: torch.Tensor = empty
    return made
