"""Quantised tensors of a GGUF file, as a state dict has them: their blocks, and of which type.

The blocks are views of the shared segment. What they are worth is worked out when it is asked for,
by the package gguf, and belongs to whoever asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from shm_store.errors import PlatformUnsupported


class GGUFTensor(torch.Tensor):
    """A quantised tensor: `blocks` as they were in the file, read-only to all but copies.

    It has the shape that it is worth, and reads as float32: operations work on `dequantize()` of
    it, each time anew. What computes with blocks directly takes those.

    Attributes:
        blocks: uint8; the rows of the tensor, each of as many bytes as its blocks take.
        quant_type: the name of its type in ggml, such as "Q4_K".
    """

    blocks: torch.Tensor
    quant_type: str

    @staticmethod
    def __new__(cls, blocks: torch.Tensor, quant_type: str, size: Sequence[int]) -> GGUFTensor:
        """Make one over `blocks`, without a copy."""
        made: GGUFTensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(size), dtype=torch.float32, device=blocks.device
        )
        made.blocks = blocks
        made.quant_type = quant_type
        return made

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, str]]:
        """Return what it is made of."""
        return ["blocks"], {"type": self.quant_type}

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor],
        context: dict[str, str],
        size: torch.Size,
        strides: tuple[int, ...],
    ) -> GGUFTensor:
        """Return one that is made of this."""
        return GGUFTensor(inner["blocks"], context["type"], size)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return what it is worth, as a plain tensor of its own on the same device.

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
        return plain.to(device=self.blocks.device, dtype=dtype)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        """Return what it is, without its values."""
        return f"GGUFTensor({self.quant_type}, size={tuple(self.shape)}, device={self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Keep what is only passed on, and work out all else on what it is worth."""
        aten = torch.ops.aten
        one = args[0] if args else None
        if isinstance(one, GGUFTensor):
            if func in (aten.detach.default, aten.alias.default):
                return GGUFTensor(one.blocks, one.quant_type, one.shape)
            if func is aten.clone.default:
                return GGUFTensor(one.blocks.clone(), one.quant_type, one.shape)
            said = kwargs or {}
            if func is aten._to_copy.default and said.get("dtype") in (None, one.dtype):
                moved = one.blocks.to(said.get("device"), copy=True)
                return GGUFTensor(moved, one.quant_type, one.shape)
        worth = torch.utils._pytree.tree_map_only(GGUFTensor, GGUFTensor.dequantize, (args, kwargs))
        return func(*worth[0], **(worth[1] or {}))
