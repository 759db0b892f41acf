"""A checkpoint and how it is to be read, where a mere path does not say enough."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from shm_store.errors import ArgumentRefused
from shm_store.reading import AS_IT_IS, FLOATING, Reading

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Source:
    """Which tensors of a checkpoint are wanted, under which names and in which dtypes.

    Goes wherever `source=` does. Weights that are read another way are other weights, so give them
    a key of their own.

        unet = gpu_worker.Source(
            "sd15.safetensors",
            name_filter="model.diffusion_model.*",
            rename={"model.diffusion_model.": ""},
            dtype=torch.bfloat16,
        )
        state = worker.state_dict("sd15/unet:bf16", source=unet)

    Of what torch.save wrote, the weights are the tensors at its top. If there are none, they are
    those of the one dict that is called `state_dict`, `model`, `params`, or another name by which
    weights are known; or else `name_filter` has to say which dict is meant, and names begin with
    that of their dict: `name_filter="params_ema.*", rename={"params_ema.": ""}`.

    Attributes:
        location: a path, a folder or a URL, as `source=` takes it.
        name_filter: a pattern of names in the file, as of file names (`*`, `?`, `[seq]`), or
            several: what matches none is not read. None reads all.
        rename: by a prefix of names in the file, what is to be there instead; "" takes it away. The
            longest that fits counts.
        dtype: of floating-point tensors: a `torch.dtype`, or by a pattern of names in the file the
            dtype of what matches it, None for that of the file. The first that matches counts.
            What a cast gives is what `Tensor.to` gives. Quantised tensors of a GGUF file stay in
            their blocks, and are worth numbers of it. Other tensors stay what they are. Tensors
            that are one in the file still are; views that share bytes are cast all alike or not.
        digest: have digests of the bytes in memory made by whoever loads them, for `weight-cache
            audit --bytes`. Needs the extra `digest`.
    """

    location: str | os.PathLike[str]
    name_filter: str | Iterable[str] | None = None
    rename: Mapping[str, str] | None = None
    dtype: torch.dtype | str | Mapping[str, torch.dtype | str | None] | None = None
    digest: bool = False

    def reading(self) -> Reading:
        """Return what of this travels.

        Raises:
            ArgumentRefused: a pattern, a prefix or a dtype is none.
        """
        filters, renamed = self.name_filter, self.rename or ()
        casts = self.dtype if isinstance(self.dtype, Mapping) else {"*": self.dtype}
        rules = [] if self.dtype is None else [(name, _named(to)) for name, to in casts.items()]
        try:
            wanted = (filters,) if isinstance(filters, str) else tuple(filters or ())
            pairs = list(renamed.items() if isinstance(renamed, Mapping) else renamed)
            reading = [wanted, pairs, rules, self.digest]
            return msgspec.convert(reading, Reading) if any(reading) else AS_IT_IS
        except (msgspec.ValidationError, TypeError) as error:
            told = str(error).partition(" - at ")[0]
            raise ArgumentRefused(
                f"this is no way to read a checkpoint: {told}",
                remedy="give patterns and prefixes as texts that are not empty: at most 256, of "
                "1024 characters",
            ) from error


_SHORT = {
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "f32": "float32",
    "fp32": "float32",
}


def _named(dtype: object) -> str:
    """Return our name of a dtype to cast to; "" for None.

    Raises:
        ArgumentRefused: it is not one.
    """
    if dtype is None:
        return ""
    import torch

    from gpu_worker.dtypes import NAMES

    given = getattr(torch, _SHORT.get(dtype, dtype), None) if isinstance(dtype, str) else dtype
    name = NAMES.get(given, "") if isinstance(given, torch.dtype) else ""
    if name not in FLOATING:
        raise ArgumentRefused(
            f"dtype={dtype!r} is not a floating-point dtype",
            remedy='pass one of torch, such as torch.bfloat16, or its name, "bfloat16" or "bf16"',
        )
    return name
