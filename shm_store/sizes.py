"""How people write sizes. Pure."""

from __future__ import annotations

from shm_store.errors import ArgumentRefused
from shm_store.wire import SIZE_LIMIT_BYTES

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
    "tib": 1024**4,
}
_DIGITS = "0123456789"
_TEXT_LIMIT = 40


def parse_size(text: str) -> int:
    """Return the bytes that `text` means: "20GiB", "512 MB", "1.5gib", "1000".

    Binary and decimal units are told apart; a bare "20G" is refused because it has been read both
    ways. A fraction of a byte is dropped.

    Raises:
        ArgumentRefused: no such size, zero, or more than 1 PiB.
    """
    shown = repr(text[:_TEXT_LIMIT])
    number = text.strip().rstrip("bBiIkKmMgGtT ")
    unit = text.strip()[len(number) :].strip().lower()
    whole, point, fraction = number.partition(".")
    digits = whole + fraction
    wrong = not whole or any(digit not in _DIGITS for digit in digits) or (point and not fraction)
    if wrong or unit not in _UNITS or len(text) > _TEXT_LIMIT:
        raise ArgumentRefused(
            f"{shown} is no size", remedy="write bytes, or a number with KiB, MiB, GiB, KB, MB, GB"
        )
    size: int = int(digits) * _UNITS[unit] // 10 ** len(fraction)
    if not 0 < size <= SIZE_LIMIT_BYTES:
        raise ArgumentRefused(f"a size of {shown} is out of range", remedy="use 1 byte to 1024 TiB")
    return size
