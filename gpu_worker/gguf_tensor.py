"""Quantised tensors of a GGUF file, as a state dict has them: their blocks, and of which type.

The blocks are views of the shared segment. What they are worth is worked out when it is asked for,
by the package gguf, and belongs to whoever asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gpu_worker.dtypes import NAMES, torch_dtype
from shm_store.errors import ArgumentRefused, PlatformUnsupported, SegmentRefused


class GGUFTensor(torch.Tensor):
    """A quantised tensor: `blocks` as they were in the file.

    It has the shape of what it is worth, and its dtype: operations work on `dequantize()` of it,
    each time anew. What computes with blocks directly takes those. It cannot be edited in place.

    Attributes:
        blocks: uint8; the rows of the tensor, each of as many bytes as its blocks take.
        quant_type: the name of its type in ggml, such as "Q4_K".
    """

    blocks: torch.Tensor
    quant_type: str

    @staticmethod
    def __new__(
        cls,
        blocks: torch.Tensor,
        quant_type: str,
        size: Sequence[int],
        dtype: torch.dtype = torch.float32,
    ) -> GGUFTensor:
        """Make one over `blocks`, without a copy. `dtype` is that of what it is worth."""
        made: GGUFTensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(size), dtype=dtype, device=blocks.device
        )
        made.blocks = blocks
        made.quant_type = quant_type
        return made

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, str]]:
        """Return what it is made of."""
        return ["blocks"], {"type": self.quant_type, "dtype": NAMES[self.dtype]}

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor],
        context: dict[str, str],
        size: torch.Size,
        strides: tuple[int, ...],
    ) -> GGUFTensor:
        """Return one that is made of this."""
        dtype = torch_dtype(context["dtype"])
        if not dtype.is_floating_point:
            raise SegmentRefused(f"a quantised tensor is not worth {dtype}")
        return GGUFTensor(inner["blocks"], context["type"], size, dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return what it is worth, as a plain tensor of its own on the same device.

        Args:
            dtype: of that; None is this tensor's.

        Raises:
            PlatformUnsupported: the package gguf is not installed, or does not know the type.
        """
        try:
            from gguf import GGMLQuantizationType, quants

            kind = GGMLQuantizationType[self.quant_type]
            worth = quants.dequantize(self.blocks.cpu().numpy(), kind)
        except ImportError as error:
            raise PlatformUnsupported(
                "GGUF tensors are dequantised by the package gguf, which is not installed",
                remedy="pip install 'shm-weight-cache[gguf]'",
            ) from error
        except (KeyError, NotImplementedError) as error:
            raise PlatformUnsupported(
                f"the installed package gguf cannot dequantise {self.quant_type}",
                remedy="install a newer gguf, or compute with .blocks",
            ) from error
        plain = torch.from_numpy(worth).reshape(self.shape)
        return plain.to(device=self.blocks.device, dtype=dtype or self.dtype)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Refuse it: a part of it is a copy of what that is worth."""
        raise _read_only("__setitem__")

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        """Return what it is, without its values."""
        size, dtype = tuple(self.shape), str(self.dtype).removeprefix("torch.")
        return f"GGUFTensor({self.quant_type}, size={size}, dtype={dtype}, device={self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Keep what is only passed on, and work out all else on what it is worth.

        Raises:
            ArgumentRefused: the operation would write to it.
        """
        aten, said = torch.ops.aten, kwargs or {}
        one = args[0] if args else None
        if isinstance(one, GGUFTensor):
            if func in (aten.detach.default, aten.alias.default):
                return GGUFTensor(one.blocks, one.quant_type, one.shape, one.dtype)
            if func is aten.clone.default:
                return GGUFTensor(one.blocks.clone(), one.quant_type, one.shape, one.dtype)
            dtype = said.get("dtype") or one.dtype
            if func is aten._to_copy.default and dtype.is_floating_point:
                moved = one.blocks.to(said.get("device"), copy=True)
                return GGUFTensor(moved, one.quant_type, one.shape, dtype)
        if func._schema.is_mutable:
            written = zip(func._schema.arguments, args, strict=False)
            named = [(a, said[a.name]) for a in func._schema.arguments if a.name in said]
            for argument, given in (*written, *named):
                if isinstance(given, GGUFTensor) and argument.is_write:
                    raise _read_only(str(func))
        args, kwargs = torch.utils._pytree.tree_map_only(
            GGUFTensor, GGUFTensor.dequantize, (args, said)
        )
        return func(*args, **kwargs)


def _read_only(operation: str) -> ArgumentRefused:
    return ArgumentRefused(
        f"{operation} would write to a quantised tensor of a GGUF file",
        remedy="work with what it is worth, see dequantize(), or with its .blocks",
    )
