"""Manifest and preamble: what was written is read, and anything else is refused."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_store.errors import SegmentRefused
from shm_store.keys import (
    FINGERPRINT_LIMIT_BYTES,
    KEY_LIMIT_BYTES,
    Fingerprint,
    GenerationId,
    Key,
    generation_id,
    version_fingerprint,
)
from shm_store.layout import PREAMBLE_BYTES
from shm_store.manifest import (
    GroupEntry,
    Kind,
    Manifest,
    Preamble,
    TensorEntry,
    decode_manifest,
    decode_preamble,
    encode_manifest,
    encode_preamble,
)

naturals = st.integers(0, (1 << 50) - 1)
dimensions = st.lists(naturals, max_size=6).map(tuple)
tensors = st.builds(
    TensorEntry,
    name=st.text(max_size=60),
    dtype=st.sampled_from(["F32", "BF16", "F4", "C128"]),
    shape=dimensions,
    strides=dimensions,
    group=naturals,
    offset_bytes=naturals,
    kind=st.sampled_from(Kind),
)
groups = st.builds(GroupEntry, naturals, naturals)
manifests = st.builds(
    Manifest, st.lists(tensors, max_size=8).map(tuple), st.lists(groups, max_size=8).map(tuple)
)
preambles = st.builds(
    Preamble,
    gen=st.builds(generation_id, st.integers(0, 2**63), st.integers(1, 2**32 - 1)),
    key=st.text(min_size=1, max_size=512),
    fingerprint=st.text(max_size=FINGERPRINT_LIMIT_BYTES // 4),
)
GEN = generation_id(2**64 - 1, 2**32 - 1)


@given(manifests)
def test_a_manifest_comes_back_as_it_was(manifest: Manifest) -> None:
    """Entries in their order, with every field."""
    assert decode_manifest(encode_manifest(manifest)) == manifest
    assert decode_manifest(memoryview(encode_manifest(manifest))) == manifest


@given(st.binary(max_size=200))
def test_any_bytes_are_a_manifest_or_refused(data: bytes) -> None:
    """No bytes lead to another exception."""
    try:
        manifest = decode_manifest(data)
    except SegmentRefused:
        return
    assert decode_manifest(encode_manifest(manifest)) == manifest


@given(st.binary(max_size=200))
def test_any_page_behind_the_magic_is_a_preamble_or_refused(data: bytes) -> None:
    """Whatever a hostile filler left there."""
    magic = encode_preamble(Preamble(GEN, Key("k"), Fingerprint("f")))[:16]
    try:
        preamble = decode_preamble(magic + data)
    except SegmentRefused:
        return
    assert decode_preamble(encode_preamble(preamble)) == preamble


def test_text_that_is_no_utf_8_is_refused() -> None:
    """In a manifest as in a preamble."""
    manifest = encode_manifest(Manifest((entry(name="layer"),), ()))
    with pytest.raises(SegmentRefused):
        decode_manifest(manifest.replace(b"layer", b"lay\xffr"))
    page = encode_preamble(Preamble(GEN, Key("layer"), Fingerprint("f")))
    with pytest.raises(SegmentRefused):
        decode_preamble(page.replace(b"layer", b"lay\xffr"))


def test_deep_nesting_is_refused() -> None:
    """Also where a newer version may append what this one skips."""
    with pytest.raises(SegmentRefused):
        decode_manifest(b"\x93\x90\x90" + b"\x91" * 100_000)
    body = b"\x94\xa1g\xa1k\xa1f" + b"\x91" * 4000
    magic = encode_preamble(Preamble(GEN, Key("k"), Fingerprint("f")))[:16]
    with pytest.raises(SegmentRefused):
        decode_preamble(magic + len(body).to_bytes(2, "little") + body)


def test_a_preamble_is_read_from_a_large_mapping_without_a_copy_of_it() -> None:
    """A segment has gigabytes behind its first page."""
    preamble = Preamble(GEN, Key("k"), Fingerprint("f"))
    mapping = memoryview(encode_preamble(preamble).ljust(32 << 20, b"\0"))
    tracemalloc.start()
    try:
        assert decode_preamble(mapping) == preamble
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def damaged(good: bytes, data: st.DataObject) -> bytes:
    """Return `good` with some bytes changed, dropped or added."""
    page = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(len(page) - 1, 0)))
        page[at : at + data.draw(st.integers(0, 6))] = data.draw(st.binary(max_size=6))
    return bytes(page)


@given(manifests, st.data())
def test_a_damaged_manifest_is_refused_or_still_within_its_ranges(
    manifest: Manifest, data: st.DataObject
) -> None:
    """Whatever is read has entries of the right types, and no negative or absurd number."""
    try:
        read = decode_manifest(damaged(encode_manifest(manifest), data))
    except SegmentRefused:
        return
    for tensor in read.tensors:
        assert isinstance(tensor.kind, Kind)
        for value in (*tensor.shape, *tensor.strides, tensor.group, tensor.offset_bytes):
            assert 0 <= value < 1 << 50
    for group in read.groups:
        assert 0 <= group.offset_bytes < 1 << 50
        assert 0 <= group.size_bytes < 1 << 50


def entry(**changed: Any) -> TensorEntry:
    """Return a good entry, but for what is changed."""
    fields = {
        "name": "w",
        "dtype": "F32",
        "shape": (2,),
        "strides": (1,),
        "group": 0,
        "offset_bytes": 0,
    }
    return TensorEntry(**{**fields, **changed})


BAD_ENTRIES = {
    "negative size": entry(shape=(-1,)),
    "negative stride": entry(strides=(-1,)),
    "absurd size": entry(shape=(1 << 50,)),
    "negative group": entry(group=-1),
    "negative offset": entry(offset_bytes=-64),
    "offset too large": entry(offset_bytes=1 << 63),
    "unknown kind": entry(kind=9),
    "name is a number": entry(name=7),
}


@pytest.mark.parametrize("tensor", BAD_ENTRIES.values(), ids=BAD_ENTRIES.keys())
def test_an_entry_out_of_range_is_refused(tensor: TensorEntry) -> None:
    """The reader does arithmetic only with numbers that mean something."""
    with pytest.raises(SegmentRefused):
        decode_manifest(encode_manifest(Manifest((tensor,), ())))


@pytest.mark.parametrize(
    "group", [GroupEntry(-1, 1), GroupEntry(0, -1), GroupEntry(0, 1 << 50)], ids=str
)
def test_a_group_out_of_range_is_refused(group: GroupEntry) -> None:
    """As are tensors."""
    with pytest.raises(SegmentRefused):
        decode_manifest(encode_manifest(Manifest((), (group,))))


@given(preambles)
def test_a_preamble_is_one_page_and_comes_back_as_it_was(preamble: Preamble) -> None:
    """Also inside the larger view that a mapping is."""
    page = encode_preamble(preamble)
    assert len(page) == PREAMBLE_BYTES
    assert decode_preamble(page) == preamble
    assert decode_preamble(memoryview(page + b"manifest")) == preamble


@pytest.mark.parametrize(
    "key", ["k" * KEY_LIMIT_BYTES, "🤗" * (KEY_LIMIT_BYTES // 4), "🤗" * 512], ids=len
)
def test_the_longest_names_fit_the_page(key: str) -> None:
    """Of a key, and of whatever else the wire lets through as one; beside the longest print."""
    preamble = Preamble(GEN, Key(key), Fingerprint("f" * FINGERPRINT_LIMIT_BYTES))
    assert decode_preamble(encode_preamble(preamble)) == preamble


def test_the_longest_version_is_a_fingerprint() -> None:
    """The wire takes 120 characters of a version, each of four bytes at most."""
    assert len(version_fingerprint("🤗" * 120).encode()) <= FINGERPRINT_LIMIT_BYTES


def test_a_preamble_that_does_not_fit_is_refused() -> None:
    """Instead of running into the manifest."""
    with pytest.raises(SegmentRefused):
        encode_preamble(Preamble(GEN, Key("k" * PREAMBLE_BYTES), Fingerprint("f")))


def test_a_page_of_something_else_or_of_another_version_is_refused() -> None:
    """Each byte of the magic counts, the version behind the name included."""
    page = encode_preamble(Preamble(GEN, Key("k"), Fingerprint("f")))
    assert page[:13] == b"weight-cache\0"
    for at in range(16):
        changed = bytearray(page)
        changed[at] ^= 0x03
        with pytest.raises(SegmentRefused, match="another version"):
            decode_preamble(bytes(changed))


def test_a_preamble_whose_length_lies_is_refused() -> None:
    """Too long, too short, or none at all."""
    page = encode_preamble(Preamble(GEN, Key("k"), Fingerprint("f")))
    (length,) = page[16:17]
    for lie in (0, 1, length - 1, length + 1, PREAMBLE_BYTES, 0xFFFF):
        with pytest.raises(SegmentRefused):
            decode_preamble(page[:16] + lie.to_bytes(2, "little") + page[18:])


@pytest.mark.parametrize("length", [0, 15, 16, 17, 18, 19])
def test_a_page_that_is_cut_off_is_refused(length: int) -> None:
    """As of an empty or half-written file."""
    page = encode_preamble(Preamble(GEN, Key("k"), Fingerprint("f")))
    with pytest.raises(SegmentRefused):
        decode_preamble(page[:length])


def test_a_preamble_with_a_field_of_another_type_is_refused() -> None:
    """A number is no key."""
    body = msgspec.msgpack.encode([GEN, 7, "f"])
    page = encode_preamble(Preamble(GenerationId("g"), Key("k"), Fingerprint("f")))
    page = page[:16] + len(body).to_bytes(2, "little") + body
    with pytest.raises(SegmentRefused):
        decode_preamble(page.ljust(PREAMBLE_BYTES, b"\0"))
