"""Names and ids. Pure: no I/O, no clock, no torch.

A *key* is the user's name for weights. A *generation id* names one life of a key's weights and is
never reused: the coordinator's start on the boot clock, then a counter, in fixed-width hexadecimal,
so that comparing two ids as text compares their ages.
"""

import re
from typing import NewType

from shm_store.errors import KeyRefused

Key = NewType("Key", str)
Fingerprint = NewType("Fingerprint", str)
GenerationId = NewType("GenerationId", str)
SessionId = NewType("SessionId", int)
RequestId = NewType("RequestId", int)
LeaseId = NewType("LeaseId", int)
"""A lease's id is the id of the request that was last granted to its session."""

_GENERATION = re.compile(r"[0-9a-f]{16}-[0-9a-f]{8}")

KEY_LIMIT_BYTES = 512
FINGERPRINT_LIMIT_BYTES = 512


def parse_key(text: object) -> Key:
    """Return `text` as a key.

    Raises:
        KeyRefused: not a string, empty, longer than 512 bytes of UTF-8, not printable, or with
            white space at an end.
    """
    if not isinstance(text, str):
        raise KeyRefused(f"a key is a string, not {type(text).__name__}")
    if not text:
        raise KeyRefused("a key must not be empty")
    if not text.isprintable() or text != text.strip():
        raise KeyRefused(
            f"key {text[:80]!r} has control characters, or white space at an end",
        )
    if len(text.encode("utf-8")) > KEY_LIMIT_BYTES:
        raise KeyRefused(f"key {text[:40]!r}... is longer than {KEY_LIMIT_BYTES} bytes")
    # A subclass of str, such as numpy's, has no place in a message.
    return Key(str.__str__(text))


def generation_id(start_ns: int, counter: int) -> GenerationId:
    """Return the id of the `counter`-th generation of the coordinator that started at `start_ns`.

    Args:
        start_ns: nanoseconds on the boot clock when the coordinator started.
        counter: 1, 2, 3 ... within that coordinator's life.
    """
    return GenerationId(f"{start_id(start_ns)}-{counter:08x}")


def was_given(gen: str, start_ns: int, counter: int) -> bool:
    """Say whether `gen` is an id that has been given: by an earlier coordinator, or by this one.

    Args:
        start_ns, counter: when this coordinator started, and how many it has given.
    """
    return bool(_GENERATION.fullmatch(gen)) and gen <= generation_id(start_ns, counter)


def start_id(start_ns: int) -> str:
    """Return what the ids of all generations of one coordinator begin with, up to the dash."""
    return f"{start_ns:016x}"


def short_generation(generation: str) -> str:
    """Return what people read: the end of the id, which tells those of one coordinator apart."""
    return "#" + (generation.rpartition("-")[2].lstrip("0") or "0")


def version_fingerprint(version: str) -> Fingerprint:
    """Return the fingerprint of weights that their asker builds, from the version it gives them."""
    return Fingerprint(f"build:{version}")
