"""The index of a sharded checkpoint: what is read, and what is refused."""

from __future__ import annotations

import json

import pytest

from shm_store.errors import SourceMalformed, SourceUnsupported
from shm_store.index import SHARDS_LIMIT, extra_shards, is_index, parse_index


def index_of(weight_map: object) -> bytes:
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode()


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("model.safetensors.index.json", True),
        ("diffusion_pytorch_model.safetensors.index.fp16.json", True),
        ("pytorch_model.bin.index.json", True),
        ("config.json", False),
        ("index.json", False),
        ("model.index.json.safetensors", False),
    ],
)
def test_an_index_is_known_by_its_name(name: str, found: bool) -> None:
    assert is_index(name) is found


def test_it_says_which_file_has_which_tensor() -> None:
    assert parse_index(index_of({"a": "1.safetensors", "b": "sub/2.safetensors"}), "i") == {
        "a": "1.safetensors",
        "b": "sub/2.safetensors",
    }


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b"[" * 100_000,
        index_of({}),
        index_of([]),
        index_of({"a": 1}),
        index_of({"a": ""}),
        index_of({"a": "/etc/passwd"}),
        index_of({"a": "../up.safetensors"}),
        index_of({"a": "sub/../../up.safetensors"}),
        index_of({"a": "nul\0.safetensors"}),
    ],
)
def test_what_is_no_index_or_leads_out_of_its_folder_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(SourceMalformed, match=r"^model\.index\.json: ") as refused:
        parse_index(data, "model.index.json")
    assert refused.value.source == "model.index.json"


def test_more_shards_than_can_travel_are_refused() -> None:
    within = {str(number): f"{number}.safetensors" for number in range(SHARDS_LIMIT)}
    assert len(parse_index(index_of(within), "i")) == SHARDS_LIMIT
    with pytest.raises(SourceUnsupported, match=f"{SHARDS_LIMIT + 1} shards"):
        parse_index(index_of({**within, "more": "more.safetensors"}), "i")


def test_what_looks_like_a_shard_and_is_none_is_named() -> None:
    files = ["m-00001-of-00002.bin", "m-00001-of-00002.st", "m-00003-of-00002.st", "m.st"]
    assert extra_shards(files, {"m-00001-of-00002.st", "m-00002-of-00002.st"}) == [
        "m-00003-of-00002.st"
    ]
