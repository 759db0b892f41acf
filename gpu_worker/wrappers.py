"""Tensors that are made of other tensors, as quantised weights and sparse ones are.

A wrapper is a subclass that says so by `__tensor_flatten__`, and is made anew by
`__tensor_unflatten__`. Neither it nor a sparse tensor has memory of its own, so whoever asks where
a tensor lies has to ask the plain ones in it.
"""

from __future__ import annotations

from typing import Any

import torch

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""What a tensor is of that no class changes."""

SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""The methods that return what a sparse tensor is made of."""


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is made of others."""
    return hasattr(tensor, "__tensor_flatten__")


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors with memory that a tensor is made of: itself, if it has its own."""
    if not is_wrapper(tensor):
        return sparse_parts(tensor) if tensor.layout in SPARSE_PARTS else [tensor]
    names, _ = flatten(tensor)
    return [inner for name in names for inner in plain_parts(getattr(tensor, name))]


def sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return what a sparse tensor is made of."""
    return [getattr(tensor, part)() for part in SPARSE_PARTS[tensor.layout]]


def flatten(tensor: torch.Tensor) -> tuple[list[str], object]:
    """Return the names of what a wrapper is made of, and what else it has to be told."""
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return list(names), context


def unflatten(
    kind: Any,
    inner: dict[str, torch.Tensor],
    context: object,
    size: torch.Size,
    strides: tuple[int, ...],
) -> torch.Tensor:
    """Return the wrapper of class `kind` that is made of `inner`."""
    made: torch.Tensor = kind.__tensor_unflatten__(inner, context, size, strides)
    return made
