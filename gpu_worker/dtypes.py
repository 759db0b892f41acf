"""Our dtype names and torch's dtypes, one table, both ways. Pure, but for knowing torch.

The names are those of `shm_store.layout.ITEM_BYTES`. A dtype that an older torch lacks is missing
from both tables, and is refused by name when weights need it.
"""

from __future__ import annotations

import torch

from shm_store.errors import PlatformUnsupported, SegmentRefused

_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F4": "float4_e2m1fn_x2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
    "C128": "complex128",
}

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, torch_name)
    for name, torch_name in _TORCH_NAMES.items()
    if hasattr(torch, torch_name)
}
"""The dtypes this torch has, by our name. torch 2.6 lacks `F8_E8M0` (2.7) and `F4` (2.8)."""

NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""Our name of each dtype that can be held in a segment."""


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of this name.

    Raises:
        PlatformUnsupported: the installed torch is too old to have it.
        SegmentRefused: no such dtype.
    """
    found = TORCH_DTYPES.get(name)
    if found is not None:
        return found
    if name in _TORCH_NAMES:
        raise PlatformUnsupported(
            f"torch {torch.__version__} has no dtype {_TORCH_NAMES[name]}, which the weights use",
            remedy="install a newer torch",
        )
    raise SegmentRefused(f"the manifest names an unknown dtype {name[:40]!r}")
