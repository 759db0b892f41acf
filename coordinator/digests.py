"""Digests of tensor bytes: made when a segment is filled, and looked at by an audit.

One for each alias group: 64 bits of xxHash3 (https://xxhash.com), as fast as memory is read. They
tell memory that has gone bad, and no attacker: a segment says itself what its digests are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from shm_store import segment
from shm_store.errors import PlatformUnsupported, SegmentRefused
from shm_store.layout import data_start
from shm_store.manifest import GroupEntry, decode_manifest, encode_manifest

if TYPE_CHECKING:
    import xxhash

DIGEST_BYTES = 8
STEP_BYTES = 4 * 1024 * 1024


def reserve(manifest: bytes) -> bytes:
    """Return a manifest with room for digests.

    Raises:
        PlatformUnsupported: what makes them is not installed.
    """
    _library()
    table = decode_manifest(manifest)
    return encode_manifest(replace(table, digests=bytes(DIGEST_BYTES * len(table.groups))))


def write(fd: int, manifest: bytes) -> None:
    """Write the digests of a filled segment into its manifest, which had room for them."""
    table = decode_manifest(manifest)
    start = data_start(len(manifest))
    digests = b"".join(_digests(fd, table.groups, start))
    segment.write_manifest(fd, encode_manifest(replace(table, digests=digests)))


def changed(fd: int) -> list[str] | None:
    """Return the names of tensors whose bytes are not those that were written; None: unknown.

    Raises:
        SegmentRefused: this is no segment.
        PlatformUnsupported: what looks is not installed.
    """
    table, start = segment.manifest_of(fd)
    if len(table.digests) != DIGEST_BYTES * len(table.groups) or not table.digests:
        return None
    bad = {
        number
        for number, digest in enumerate(_digests(fd, table.groups, start))
        if digest != table.digests[number * DIGEST_BYTES :][:DIGEST_BYTES]
    }
    return [entry.name for entry in table.tensors if entry.group in bad]


def _digests(fd: int, groups: Sequence[GroupEntry], start: int) -> Iterator[bytes]:
    make = _library()
    buffer = memoryview(bytearray(STEP_BYTES))
    for group in groups:
        digest = make()
        at, end = start + group.offset_bytes, start + group.offset_bytes + group.size_bytes
        while at < end:
            part = buffer[: min(end - at, STEP_BYTES)]
            got = os.preadv(fd, [part], at)
            if not got:
                raise SegmentRefused(f"a segment ends at byte {at}, before its tensors do")
            digest.update(part[:got])
            at += got
        yield digest.digest()


def _library() -> type[xxhash.xxh3_64]:
    try:
        from xxhash import xxh3_64
    except ImportError as error:
        raise PlatformUnsupported(
            "digests need the package xxhash",
            remedy="pip install 'shm-weight-cache[digest]'",
        ) from error
    return xxh3_64
