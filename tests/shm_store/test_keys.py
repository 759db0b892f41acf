"""Names and ids: what is a key, and the order of generation ids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_store.errors import KeyRefused
from shm_store.keys import (
    KEY_LIMIT_BYTES,
    RequestId,
    generation_id,
    parse_key,
    short_generation,
)
from shm_store.wire import Evict, decode, encode, session_decoder

ODD_BUT_GOOD = [
    "sdxl/unet:bf16",
    "a",
    "two words",
    "../../etc/passwd",
    "日本語/模型",
    "🤗" * (KEY_LIMIT_BYTES // 4),
    "k" * KEY_LIMIT_BYTES,
    "'; DROP TABLE weights --",
    "%s {} \\",
]

REFUSED = {
    "empty": "",
    "leading space": " k",
    "trailing space": "k ",
    "only a space": " ",
    "newline": "a\nb",
    "NUL": "a\0b",
    "escape": "\x1b[31mred",
    "no-break space": "a\u00a0b",
    "right-to-left override": "a\u202eb",
    "lone surrogate": "a\udcffb",
    "one byte too long": "k" * (KEY_LIMIT_BYTES + 1),
    "too long only in bytes": "🤗" * (KEY_LIMIT_BYTES // 4 + 1),
}


@pytest.mark.parametrize("text", ODD_BUT_GOOD)
def test_a_key_is_any_printable_text(text: str) -> None:
    """What is printable and short enough comes back unchanged."""
    assert parse_key(text) == text


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_name_is_refused(text: str) -> None:
    """A key that cannot be shown or would not fit is refused, with a remedy."""
    with pytest.raises(KeyRefused) as caught:
        parse_key(text)
    assert caught.value.remedy
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("value", [None, 7, b"bytes", ["k"]], ids=repr)
def test_what_is_no_string_is_refused_by_its_type(value: object) -> None:
    """The error names the type, not the value."""
    with pytest.raises(KeyRefused, match=type(value).__name__):
        parse_key(value)


@given(st.text(max_size=600))
def test_every_text_is_a_key_or_refused(text: str) -> None:
    """No text leads to another error, and every key can travel."""
    try:
        key = parse_key(text)
    except KeyRefused:
        return
    assert key == text
    assert len(key.encode()) <= KEY_LIMIT_BYTES
    message = Evict(RequestId(1), key)
    assert decode(session_decoder, encode(message)) == message


def test_a_subclass_of_str_becomes_a_plain_key_that_can_travel() -> None:
    """Such as numpy's strings, which the wire does not take."""

    class Text(str):
        __slots__ = ()

        def __str__(self) -> str:
            return "something else"

    key = parse_key(Text("sdxl/vae"))
    assert type(key) is str
    assert key == "sdxl/vae"


ids = st.tuples(st.integers(0, 2**64 - 1), st.integers(1, 2**32 - 1))


@given(ids, ids)
def test_generation_ids_compare_by_age(one: tuple[int, int], other: tuple[int, int]) -> None:
    """As text, by the coordinator's start and then by the counter; equal only for the same."""
    first, second = generation_id(*one), generation_id(*other)
    assert (first < second) == (one < other)
    assert (first == second) == (one == other)


@pytest.mark.parametrize(
    ("generation", "short"),
    [
        ("0000068e9fa334ad-0000001a", "#1a"),
        ("00ff-00000100", "#100"),
        ("x-0000", "#0"),
        ("g7", "#g7"),
    ],
)
def test_a_generation_is_told_by_the_end_of_its_id(generation: str, short: str) -> None:
    assert short_generation(generation) == short
