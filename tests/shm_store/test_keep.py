"""How people write what a resident worker is to keep."""

from __future__ import annotations

import pytest

from shm_store.errors import ArgumentRefused, KeyRefused
from shm_store.keep import parse_keep


def test_each_key_has_its_source_in_the_order_given() -> None:
    """What follows the first "=" is a path, whatever is in it."""
    kept = parse_keep(["sdxl/unet:bf16=u.safetensors", "b=x=y", "a= spaced .safetensors"])
    assert list(kept.items()) == [
        ("sdxl/unet:bf16", "u.safetensors"),
        ("b", "x=y"),
        ("a", " spaced .safetensors"),
    ]
    assert parse_keep([]) == {}


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["unet"], "--keep 'unet' has no '='"),
        ([""], "--keep '' has no '='"),
        (["unet="], "--keep 'unet=' names no file"),
        (["a=\0"], "names no file"),
        (["a=x", "b=y", "a=z"], "--keep names 'a' twice: 'x' and 'z'"),
    ],
)
def test_what_is_none_is_refused_by_name(texts: list[str], said: str) -> None:
    with pytest.raises(ArgumentRefused) as refused:
        parse_keep(texts)
    assert said in refused.value.message and refused.value.remedy


@pytest.mark.parametrize("text", ["=x", " a=x", "a\n=x", "k" * 513 + "=x"])
def test_a_key_that_is_none_is_refused_with_its_option(text: str) -> None:
    with pytest.raises(KeyRefused, match=r"--keep '.*': .*key"):
        parse_keep([text])
