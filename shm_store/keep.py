"""Which weights a resident worker is to keep, as people write it: `KEY=SOURCE`. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from shm_store.errors import ArgumentRefused, KeyRefused
from shm_store.keys import Key, parse_key

KEEP_OPTION = "--keep"

_FORM = "write KEY=SOURCE, such as unet=unet.safetensors"


def parse_keep(texts: Iterable[str]) -> dict[Key, str]:
    """Return the source of each key, in the order given. What is before the first "=" is the key.

    Raises:
        ArgumentRefused: one is not of the form KEY=SOURCE, or a key comes twice.
        KeyRefused: a key is none that can be used.
    """
    kept: dict[Key, str] = {}
    for text in texts:
        name, joined, source = text.partition("=")
        if not joined:
            raise ArgumentRefused(f"{KEEP_OPTION} {text!r} has no '='", remedy=_FORM)
        try:
            key = parse_key(name)
        except KeyRefused as error:
            error.message = f"{KEEP_OPTION} {text!r}: {error.message}"
            raise
        if not source or "\0" in source:
            raise ArgumentRefused(f"{KEEP_OPTION} {text!r} names no file", remedy=_FORM)
        if key in kept:
            raise ArgumentRefused(
                f"{KEEP_OPTION} names {key!r} twice: {kept[key]!r} and {source!r}",
                remedy="name each key once; a key stands for the weights of one file",
            )
        kept[key] = source
    return kept
