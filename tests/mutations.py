"""Bytes that are almost what they should be: for readers of what cannot be trusted."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator, Sequence

COUNT = int(os.environ.get("WEIGHT_CACHE_MUTATIONS", "3000"))
"""How many are tried. `WEIGHT_CACHE_MUTATIONS=100000` is for when a reader has changed."""

_NUMBERS = tuple(
    struct.pack(form, value)
    for form in ("<B", "<H", "<I", "<Q", ">Q")
    for value in (0, 1, 0x7F, 0xFF, 2 ** (8 * struct.calcsize(form)) - 1)
    if value < 2 ** (8 * struct.calcsize(form))
)
_TEXTS = (
    b"-1",
    b"1e9",
    b"18446744073709551615",
    b'"',
    b"[",
    b"{",
    b"}",
    b"null",
    b"\\ud800",
    b"\0",
)


def mutations(seeds: Sequence[bytes], seed: int, count: int = COUNT) -> Iterator[bytes]:
    """Give `count` mutations of `seeds`, the same for the same `seed`."""
    lots = random.Random(seed)
    for _ in range(count):
        data = bytearray(lots.choice(seeds))
        for _ in range(lots.choice((1, 1, 1, 2, 4))):
            _mutate(data, lots)
        yield bytes(data)


def _mutate(data: bytearray, lots: random.Random) -> None:
    at = lots.randrange(len(data) + 1)
    match lots.randrange(6):
        case 0 if at < len(data):
            data[at] ^= 1 << lots.randrange(8)
        case 1:
            number = lots.choice(_NUMBERS)
            data[at : at + len(number)] = number
        case 2:
            data[at:at] = lots.choice(_TEXTS)
        case 3:
            del data[at : at + lots.choice((1, 4, 16, len(data)))]
        case 4:
            other = lots.randrange(len(data) + 1)
            data[at:at] = data[other : other + lots.choice((1, 8, 64))]
        case _:
            data[at : at + 1] = lots.randbytes(lots.choice((1, 8)))
