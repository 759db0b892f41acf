"""Plain values: what was written is read, of the same types; anything else is refused."""

from __future__ import annotations

import io
import tracemalloc
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shm_store import plain_values
from shm_store.errors import SegmentRefused
from shm_store.plain_values import ValueRefused, decode_value, encode_value


def nothing(_: object, key: bool) -> None:
    """Take no other type apart."""


def refuse(name: str, _: object) -> object:
    raise SegmentRefused(f"there is no {name}")


def round_trip(value: object) -> Any:
    return decode_value(encode_value(value, nothing), refuse)


def seen(value: Any) -> object:
    """Return all that can be seen of a value: types, order and bits, where there is one."""
    kind = type(value).__name__
    if isinstance(value, float):
        return kind, value.hex()
    if isinstance(value, complex):
        return kind, seen(value.real), seen(value.imag)
    if isinstance(value, io.BytesIO):
        return kind, value.getvalue(), value.tell()
    if isinstance(value, dict):
        return kind, [(seen(key), seen(held)) for key, held in value.items()]
    if isinstance(value, list | tuple):
        return kind, [seen(item) for item in value]
    if isinstance(value, set | frozenset):
        return kind, sorted(repr(seen(item)) for item in value)
    return kind, value


def same(one: object, other: object) -> bool:
    return seen(one) == seen(other)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary(),
    st.binary(min_size=1020, max_size=1030),
    st.text(min_size=1020, max_size=1030),
)
hashable = st.recursive(
    scalars.filter(lambda value: value == value),
    lambda inner: st.one_of(
        st.tuples(inner, inner), st.frozensets(inner, max_size=3), st.lists(inner).map(tuple)
    ),
    max_leaves=4,
)
values = st.recursive(
    st.one_of(scalars, st.binary().map(bytearray), st.builds(io.BytesIO, st.binary())),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(hashable, inner, max_size=4),
        st.dictionaries(hashable, inner, max_size=3).map(OrderedDict),
        st.sets(hashable, max_size=4),
        st.frozensets(hashable, max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(values)
def test_a_value_comes_back_as_it_was(value: object) -> None:
    assert same(round_trip(value), value)


@pytest.mark.parametrize(
    "value",
    [
        (1 << 63) - 1,
        1 << 63,
        (1 << 64) - 1,
        1 << 64,
        -(1 << 63),
        -(1 << 63) - 1,
        10**3000,
        -(10**3000),
        float("inf"),
        float("nan"),
        -0.0,
        "",
        "a\0b",
        "ä" * 600,
        b"\xff" * 5000,
        complex(-0.0, float("inf")),
        {1: True, 1.5: "x", None: [], (1, "a"): {}, b"k": (), frozenset({3}): set()},
        {True: 1, 2: False},
        OrderedDict([("b", 1), ("a", 2)]),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_the_ends_of_each_type(value: object) -> None:
    assert same(round_trip(value), value)


def test_a_file_comes_back_at_its_position() -> None:
    """As Transformer Engine's extra state, which it rewinds itself."""
    file = io.BytesIO()
    file.write(b"x" * 3000)
    assert same(round_trip([file]), [file])
    assert round_trip(file).tell() == 3000
    assert file.tell() == 3000, "and is left where it was"


def test_each_reading_makes_a_value_of_its_own() -> None:
    data = encode_value({"a": [1], "b": bytearray(b"x"), "c": {1}}, nothing)
    first, second = decode_value(data, refuse), decode_value(data, refuse)
    first["a"].append(2)
    first["b"].extend(b"y")
    first["c"].add(2)
    assert second == {"a": [1], "b": bytearray(b"x"), "c": {1}}


def test_other_types_are_taken_apart_and_put_together_by_the_caller() -> None:
    def take_apart(value: object, key: bool) -> tuple[str, object] | None:
        return ("range", [value.start, value.stop]) if isinstance(value, range) else None

    def put_together(name: str, made_of: object) -> object:
        assert name == "range" and isinstance(made_of, list)
        return range(*made_of)

    data = encode_value([range(2, 5)], take_apart)
    assert decode_value(data, put_together) == [range(2, 5)]


@pytest.mark.parametrize(
    ("value", "keys"),
    [
        ([range(1), {1: range(1)}, (range(1),)], [False] * 3),
        ({range(1): 2, (3, range(1)): [range(1)]}, [True, True, False]),
        ([{range(1)}, {frozenset({(range(1),)}): 1}], [True, True]),
    ],
)
def test_the_caller_is_told_what_is_a_key(value: object, keys: list[bool]) -> None:
    told = []

    def take_apart(value: object, key: bool) -> tuple[str, object]:
        told.append(key)
        return "range", None

    encode_value(value, take_apart)
    assert told == keys


class Text(str):
    pass


class Number(int):
    pass


@pytest.mark.parametrize(
    ("value", "why", "path"),
    [
        (len, "of type builtin_function_or_method", ""),
        ([1, {"a": (2, object())}], "of type object", "[1]['a'][1]"),
        ({"x": {lambda: 1}}, "of type function", "['x']{...}"),
        ({(1, object()): 2}, "of type object", "[tuple][1]"),
        (Text("a"), "of type Text", ""),
        ([Number(1)], "of type Number", "[0]"),
        (Counter("aa"), "of type Counter", ""),
        (defaultdict(list), "of type defaultdict", ""),
        (range(3), "of type range", ""),
        (["\ud800"], "not valid Unicode", "[0]"),
        ({"\ud800": 1}, "not valid Unicode", "['\\ud800']"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_cannot_be_held_is_refused_with_its_place(value: object, why: str, path: str) -> None:
    """Subclasses, too: they would come back as another type."""
    with pytest.raises(ValueRefused, match=why) as caught:
        encode_value(value, nothing)
    assert caught.value.path == path


def test_a_closed_file_is_refused() -> None:
    file = io.BytesIO()
    file.close()
    with pytest.raises(ValueRefused, match="closed"):
        encode_value(file, nothing)


def test_what_is_too_deep_or_holds_itself_is_refused() -> None:
    deep: list[object] = []
    for _ in range(plain_values.DEPTH_LIMIT):
        deep = [deep]
    assert round_trip(deep) == deep
    with pytest.raises(ValueRefused, match="holds itself"):
        encode_value([deep], nothing)
    own: list[object] = []
    own.append(own)
    with pytest.raises(ValueRefused, match="holds itself"):
        encode_value(own, nothing)


def test_what_would_grow_without_end_is_refused_before_it_has(monkeypatch) -> None:
    """A list that holds one list twice, sixty times over, is 2**60 of them."""
    monkeypatch.setattr(plain_values, "NODES_LIMIT", 10_000)
    twice: list[object] = []
    for _ in range(60):
        twice = [twice, twice]
    with pytest.raises(ValueRefused, match="too many parts") as caught:
        encode_value(twice, nothing)
    assert caught.value.remedy is not None and "tensor" in caught.value.remedy


def test_a_tree_that_is_too_large_is_refused_both_ways(monkeypatch) -> None:
    """But long texts and bytes are beside it."""
    data = encode_value(list(range(100_000)), nothing)
    monkeypatch.setattr(plain_values, "TREE_LIMIT_BYTES", 100_000)
    with pytest.raises(SegmentRefused, match="a tree of"):
        decode_value(data, refuse)
    with pytest.raises(ValueRefused, match="too many parts"):
        encode_value(list(range(100_000)), nothing)
    long = ["x" * 1_000_000, b"y" * 1_000_000]
    assert round_trip(long) == long


# --- lies ---------------------------------------------------------------------------------------


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_refused(data: bytes) -> None:
    try:
        decode_value(data, refuse)
    except SegmentRefused:
        pass


trees = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 20), st.floats(), st.text(), st.binary()),
    lambda inner: st.one_of(
        st.builds(lambda tag, items: [tag, *items], st.integers(0, 14), st.lists(inner)),
        st.lists(inner),
        st.dictionaries(st.text(), inner, max_size=2),
    ),
    max_leaves=12,
)


def encoded(tree: object, apart: tuple[bytes, ...] = ()) -> bytes:
    return msgspec.msgpack.encode([tree, list(apart)])


@settings(max_examples=500, deadline=None)
@given(trees, st.lists(st.binary(max_size=8), max_size=2).map(tuple))
def test_any_tree_is_a_value_or_refused(tree: object, apart: tuple[bytes, ...]) -> None:
    """Tags that are none, wrong numbers of parts, keys that cannot be keys, places beside it."""
    try:
        value = decode_value(encoded(tree, apart), refuse)
    except SegmentRefused:
        return
    assert same(round_trip(value), value)


@pytest.mark.parametrize(
    "tree",
    [
        {"a": 1},
        [],
        ["x"],
        [99],
        [True, 1],
        [4, "key"],
        [4, "a", 1, "a", 2],
        [4, [0], 1],
        [2, 1, 1],
        [2, [0]],
        [6, "x"],
        [7, 1.0],
        [7, 1, 2],
        [9, b"x", -1],
        [9, b"x", 1 << 63],
        [9, "x", 0],
        [10, 2],
        [10, -1],
        [10, True],
        [10, 1],
        [11, "0"],
        [11, -1],
        [11, True],
        [12, "size", [0]],
        [12, 3, 4],
        msgspec.msgpack.Ext(1, b"x"),
    ],
    ids=repr,
)
def test_a_tree_that_lies_is_refused(tree: object) -> None:
    with pytest.raises(SegmentRefused):
        decode_value(encoded(tree, (b"fine", b"\xff")), refuse)


def test_a_deep_tree_is_refused() -> None:
    tree: list[object] = [0]
    for _ in range(plain_values.DEPTH_LIMIT + 1):
        tree = [0, tree]
    with pytest.raises(SegmentRefused, match="too deep"):
        decode_value(encoded(tree), refuse)
    with pytest.raises(SegmentRefused):
        decode_value(b"\x91" * 1_000_000, refuse)


def test_what_is_read_is_bounded_by_what_was_written() -> None:
    """A byte of a tree may become an empty list, and no more. Before that its length is known."""
    data = b"\x92\xdd\x7f\xff\xff\xff" + b"\x90" * 1000
    tracemalloc.start()
    try:
        with pytest.raises(SegmentRefused):
            decode_value(data, refuse)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
