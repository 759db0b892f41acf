"""How a checkpoint is to be read, as the command line has it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shm_store.errors import ArgumentRefused
from shm_store.reading import FLOATING, Reading

DTYPES = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float16": "F16",
    "fp16": "F16",
    "half": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "fp32": "F32",
    "float": "F32",
    "float64": "F64",
}
"""Names that people know, beside our own (`bf16`, `f16`)."""


def parse_reading(
    only: Iterable[str], rename: Iterable[str], dtype: Iterable[str], digest: bool
) -> Reading:
    """Return what the options of `weight-cache load` ask for.

    Args:
        only: patterns of names.
        rename: `OLD=NEW`, of prefixes.
        dtype: `DTYPE` or `PATTERN=DTYPE`.

    Raises:
        ArgumentRefused: one of them is none.
    """
    renamed = [_cut("--rename", text, "OLD=NEW") for text in rename]
    casts = [_cut("--dtype", text if "=" in text else f"*={text}", "DTYPE") for text in dtype]
    reading = [list(only), renamed, [(pattern, _dtype(name)) for pattern, name in casts], digest]
    try:
        return msgspec.convert(reading, Reading)
    except msgspec.ValidationError as error:
        told = str(error).partition(" - at ")[0]
        raise ArgumentRefused(
            f"these options are no way to read a checkpoint: {told}",
            remedy="write patterns that are not empty: at most 256, of 1024 characters",
        ) from error


def _cut(option: str, text: str, form: str) -> tuple[str, str]:
    before, joined, after = text.rpartition("=") if option == "--dtype" else text.partition("=")
    if not joined:
        raise ArgumentRefused(f"{option} {text!r} has no '='", remedy=f"write {option} {form}")
    return before, after


def _dtype(name: str) -> str:
    if name.lower() == "keep":
        return ""
    known = DTYPES.get(name.lower(), name.upper())
    if known not in FLOATING:
        raise ArgumentRefused(
            f"--dtype {name!r} is no floating-point dtype", remedy="write bf16, f16, f32 or keep"
        )
    return known
