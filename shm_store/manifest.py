"""What a segment holds: the manifest, and the preamble that says which generation it is. Pure.

The manifest is written by whoever fills the segment, the preamble by the coordinator when it seals.
A reader trusts the preamble (the coordinator compared it after sealing) and nothing else: offsets
are checked against the mapping when tensors are made.
"""

from __future__ import annotations

import enum
import struct
from typing import Annotated

import msgspec

from shm_store.errors import SegmentRefused
from shm_store.keys import Fingerprint, GenerationId, Key
from shm_store.layout import PREAMBLE_BYTES

NATURAL_LIMIT = 1 << 50
Natural = Annotated[int, msgspec.Meta(ge=0, lt=NATURAL_LIMIT)]


class Kind(enum.IntEnum):
    """What an entry is, and what a tensor was in the module it came from."""

    TENSOR = 0
    """An entry of a state dict or a file; its skeleton knows what it is."""
    PARAMETER = 1
    BUFFER = 2
    NON_PERSISTENT_BUFFER = 3
    EXTRA = 4
    """Not a tensor: the bytes of an encoded value, see `plain_values`."""
    INNER = 5
    """A tensor that values are made of. It has a number, its place in the manifest, and a name that
    no user gave it. It is behind all that the state dict names.
    """
    WRAPPED = 6
    """A tensor that is made of others: an encoded value, as EXTRA, that says how."""
    NON_PERSISTENT_WRAPPED = 7


PLAIN_KINDS = frozenset({Kind.TENSOR, Kind.PARAMETER, Kind.BUFFER, Kind.NON_PERSISTENT_BUFFER})
"""Entries that are a tensor of the state dict, and need no second look."""

NON_PERSISTENT = frozenset({Kind.NON_PERSISTENT_BUFFER, Kind.NON_PERSISTENT_WRAPPED})
"""Entries that are no part of the module's own state dict."""

WRAPPED = frozenset({Kind.WRAPPED, Kind.NON_PERSISTENT_WRAPPED})
"""Entries that are a tensor which is made of others."""


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor: a view into its alias group.

    `shape` and `strides` count elements; `offset_bytes` counts from the start of the group. Entries
    cannot be part of a cycle, so the collector need not know them: a third of the decoding time.
    """

    name: str
    dtype: str
    shape: tuple[Natural, ...]
    strides: tuple[Natural, ...]
    group: Natural
    offset_bytes: Natural
    kind: Kind = Kind.TENSOR


class GroupEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One alias group. `offset_bytes` counts from the start of the tensor bytes."""

    offset_bytes: Natural
    size_bytes: Natural


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """Everything needed to rebuild the state dict, in its order.

    `digests` are of the groups' bytes, one after the other, where they were asked for.

    `beyond` counts the entries that are not of `PLAIN_KINDS`: most weights have none, and to look
    at each of a thousand entries would cost as much as to decode them.
    """

    tensors: tuple[TensorEntry, ...]
    groups: tuple[GroupEntry, ...]
    digests: bytes = b""
    beyond: Natural = 0


class Preamble(msgspec.Struct, frozen=True, array_like=True):
    """Which generation a sealed segment is. The id orders generations, see `keys`."""

    gen: GenerationId
    key: Key
    fingerprint: Fingerprint


_MAGIC = b"weight-cache\0\0\0\1"
_LENGTH = struct.Struct("<H")
_encoder = msgspec.msgpack.Encoder()
_manifest_decoder = msgspec.msgpack.Decoder(Manifest)
_preamble_decoder = msgspec.msgpack.Decoder(Preamble)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of `manifest`."""
    return _encoder.encode(manifest)


def decode_manifest(data: bytes | memoryview) -> Manifest:
    """Return the manifest in `data`.

    Raises:
        SegmentRefused: these bytes are no manifest.
    """
    try:
        return _manifest_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SegmentRefused(f"the manifest could not be read: {error}") from None


def encode_preamble(preamble: Preamble) -> bytes:
    """Return the first page of a segment.

    Key and fingerprint are bounded (see `keys`), so it always fits.
    """
    body = _encoder.encode(preamble)
    page = _MAGIC + _LENGTH.pack(len(body)) + body
    if len(page) > PREAMBLE_BYTES:
        raise SegmentRefused(f"a preamble of {len(page)} bytes does not fit its page")
    return page.ljust(PREAMBLE_BYTES, b"\0")


def decode_preamble(page: bytes | memoryview) -> Preamble:
    """Return the preamble in the first page of a segment.

    Raises:
        SegmentRefused: the page is not a preamble of this version.
    """
    page = bytes(page[:PREAMBLE_BYTES])
    start = len(_MAGIC) + _LENGTH.size
    if len(page) < start or not page.startswith(_MAGIC):
        raise SegmentRefused("this is not a segment of weight-cache, or of another version")
    (length,) = _LENGTH.unpack_from(page, len(_MAGIC))
    try:
        return _preamble_decoder.decode(page[start : start + length])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SegmentRefused(f"the preamble could not be read: {error}") from None
