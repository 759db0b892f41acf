"""Plain Python values as bytes, and back: equal, and of the same types. Pure.

What a state dict holds beside its tensors. Types that are not Python's own are left to whoever
calls, who takes them apart into values that are held here.

Rules
- No pickle: nothing that is read here names code, or makes anything but the types of this file.
- Types match exactly: what is a subclass of one of them would come back as another type.
- Containers are arrays that begin with a tag, so that a tuple stays a tuple. Long texts and bytes
  lie beside the tree: so the tree is small, and what it can grow to when it is read is bounded.
- Bytes may lie: whatever they are, they are a value or SegmentRefused.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import msgspec

from shm_store.errors import SegmentRefused

DEPTH_LIMIT = 64
TREE_LIMIT_BYTES = 8 * 1024 * 1024
"""When it is read each byte of a tree may become an empty list, which takes 64."""

NODES_LIMIT = 2_000_000
"""A list that holds one list twice, and so on, would be too large long before it is written."""

APART_BYTES = 1024
"""Texts and bytes from this size on lie beside the tree."""

TakeApart = Callable[[object, bool], tuple[str, object] | None]
"""What a value of another type is called and made of; None if it cannot be held.

It is told whether the value is a key, or in a set: one that equals only itself is none afterwards.
"""

PutTogether = Callable[[str, object], object]
"""The other way round. Raises SegmentRefused, or another of our errors, as it likes."""

(
    _LIST,
    _TUPLE,
    _SET,
    _FROZENSET,
    _DICT,
    _ORDERED_DICT,
    _INT,
    _COMPLEX,
    _BYTEARRAY,
    _BYTES_IO,
    _TEXT_APART,
    _BYTES_APART,
    _OTHER,
) = range(13)

_SEQUENCES: dict[type, int] = {list: _LIST, tuple: _TUPLE, set: _SET, frozenset: _FROZENSET}
_MAPPINGS: dict[type, int] = {dict: _DICT, OrderedDict: _ORDERED_DICT}
_MADE = {tag: kind for kind, tag in (*_SEQUENCES.items(), *_MAPPINGS.items())}
_LEAVES = frozenset({type(None), bool, int, float, str, bytes})


class _Encoded(msgspec.Struct, frozen=True, array_like=True):
    tree: msgspec.Raw
    apart: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=NODES_LIMIT)] = ()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Encoded)
_tree_decoder = msgspec.msgpack.Decoder()


class ValueRefused(Exception):
    """A value cannot be held. `path` says where in it, as Python would be asked for it."""

    def __init__(self, why: str, *, remedy: str | None = None) -> None:
        super().__init__(why)
        self.why = why
        self.remedy = remedy
        self.path = ""

    def within(self, step: str) -> ValueRefused:
        """Return this, once it is known what it was in."""
        self.path = step + self.path
        return self


def encode_value(value: object, take_apart: TakeApart) -> bytes:
    """Return the bytes of `value`.

    Args:
        value: anything of this file's types, to any depth; and what `take_apart` knows.
        take_apart: asked for what is of another type.

    Raises:
        ValueRefused: it cannot be held, or is too deep or too large.
        Whatever `take_apart` raises.
    """
    writer = _Writer(take_apart)
    tree = _encoder.encode(writer.node(value, 0))
    if len(tree) > TREE_LIMIT_BYTES:
        raise _too_large()
    return _encoder.encode(_Encoded(msgspec.Raw(tree), tuple(writer.apart)))


def decode_value(data: bytes | memoryview, put_together: PutTogether) -> Any:
    """Return the value in `data`, which shares nothing with that of another call.

    Raises:
        SegmentRefused: these bytes are none.
        Whatever `put_together` raises.
    """
    try:
        encoded = _decoder.decode(data)
        if len(encoded.tree) > TREE_LIMIT_BYTES:
            raise SegmentRefused(f"an encoded value has a tree of {len(encoded.tree)} bytes")
        return _Reader(encoded.apart, put_together).value(_tree_decoder.decode(encoded.tree), 0)
    # What a lie leads to: no msgpack, a wrong tag, a list as a key, a surrogate, a huge position.
    except (msgspec.DecodeError, RecursionError, TypeError, ValueError, OverflowError) as error:
        raise SegmentRefused(f"an encoded value could not be read: {error}") from error


def _too_large() -> ValueRefused:
    return ValueRefused(
        "it has too many parts, or holds itself",
        remedy="hold many numbers as a tensor, and what is text as one string or bytes",
    )


class _Writer:
    """Makes the tree of one value. `apart` is what lies beside it."""

    def __init__(self, take_apart: TakeApart) -> None:
        self.apart: list[bytes] = []
        self._take_apart = take_apart
        self._nodes = 0

    def node(self, value: object, depth: int, key: bool = False) -> object:
        """Return what msgpack writes for `value`, which is a key or in one."""
        self._nodes += 1
        if self._nodes > NODES_LIMIT or depth > DEPTH_LIMIT:
            raise _too_large()
        kind = type(value)
        tag = _SEQUENCES.get(kind)
        if tag is not None:
            assert isinstance(value, list | tuple | set | frozenset)
            return [tag, *self._items(value, depth, key or kind in (set, frozenset))]
        tag = _MAPPINGS.get(kind)
        if tag is not None:
            assert isinstance(value, dict)
            return [tag, *self._pairs(value, depth)]
        if kind in _LEAVES or kind in (complex, bytearray, io.BytesIO):
            return self._leaf(value)
        taken = self._take_apart(value, key)
        if taken is None:
            raise ValueRefused(f"it is of type {kind.__name__}")
        name, made_of = taken
        return [_OTHER, name, self.node(made_of, depth + 1, key)]

    def _items(self, items: Iterable[object], depth: int, key: bool) -> Iterable[object]:
        for index, item in enumerate(items):
            try:
                yield self.node(item, depth + 1, key)
            except ValueRefused as refused:
                step = "{...}" if isinstance(items, set | frozenset) else f"[{index}]"
                raise refused.within(step) from refused.__cause__

    def _pairs(self, pairs: dict[object, object], depth: int) -> Iterable[object]:
        for key, value in pairs.items():
            try:
                yield self.node(key, depth + 1, key=True)
                yield self.node(value, depth + 1)
            except ValueRefused as refused:
                raise refused.within(f"[{_shown(key)}]") from refused.__cause__

    def _leaf(self, value: object) -> object:
        match value:
            case bool():
                return value
            case int() if not -(1 << 63) <= value < 1 << 64:
                size_bytes = value.bit_length() // 8 + 1
                return [_INT, self._bytes(value.to_bytes(size_bytes, "little", signed=True))]
            case str():
                return self._text(value)
            case bytes():
                return self._bytes(value)
            case complex():
                return [_COMPLEX, value.real, value.imag]
            case bytearray():
                return [_BYTEARRAY, self._bytes(bytes(value))]
            case io.BytesIO():
                if value.closed:
                    raise ValueRefused("it is a closed io.BytesIO")
                return [_BYTES_IO, self._bytes(value.getvalue()), value.tell()]
        return value

    def _text(self, text: str) -> object:
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise ValueRefused(f"it is a text that is not valid Unicode: {error.reason}") from error
        if len(data) < APART_BYTES:
            return text
        self.apart.append(data)
        return [_TEXT_APART, len(self.apart) - 1]

    def _bytes(self, data: bytes) -> object:
        if len(data) < APART_BYTES:
            return data
        self.apart.append(data)
        return [_BYTES_APART, len(self.apart) - 1]


class _Reader:
    """Makes one value of its tree."""

    def __init__(self, apart: tuple[bytes, ...], put_together: PutTogether) -> None:
        self._apart = apart
        self._put_together = put_together

    def value(self, node: object, depth: int) -> object:
        """Return what `node` stands for."""
        if type(node) in _LEAVES:
            return node
        if type(node) is not list or not node or type(node[0]) is not int:
            raise _lies()
        if depth > DEPTH_LIMIT:
            raise SegmentRefused("an encoded value is too deep")
        tag = node[0]
        if tag in (_DICT, _ORDERED_DICT):
            return self._mapping(tag, node, depth + 1)
        if tag in _MADE:
            items = [self.value(one, depth + 1) for one in node[1:]]
            made = _MADE[tag](items)
            if len(made) != len(items):
                raise SegmentRefused("an encoded set has an element twice")
            return made
        match node:
            case [int(), str(name), made_of] if tag == _OTHER:
                return self._put_together(name, self.value(made_of, depth + 1))
            case [int(), float(real), float(imaginary)] if tag == _COMPLEX:
                return complex(real, imaginary)
            case [int(), data, int(position)] if tag == _BYTES_IO:
                file = io.BytesIO(self._bytes(data))
                file.seek(position)
                return file
            case [int(), data]:
                return self._short(tag, data)
        raise _lies()

    def _short(self, tag: int, data: object) -> object:
        if tag == _INT:
            return int.from_bytes(self._bytes(data), "little", signed=True)
        if tag == _BYTEARRAY:
            return bytearray(self._bytes(data))
        if tag == _TEXT_APART:
            return self._beside(data).decode()
        if tag == _BYTES_APART:
            return self._beside(data)
        raise _lies()

    def _mapping(self, tag: int, node: list[object], depth: int) -> object:
        if len(node) % 2 != 1:
            raise _lies()
        made = _MADE[tag]()
        for at in range(1, len(node), 2):
            made[self.value(node[at], depth)] = self.value(node[at + 1], depth)
        if len(made) != len(node) // 2:
            raise SegmentRefused("an encoded dict has a key twice")
        return made

    def _bytes(self, node: object) -> bytes:
        match node:
            case bytes():
                return node
            case [tag, index] if tag == _BYTES_APART:
                return self._beside(index)
        raise _lies()

    def _beside(self, index: object) -> bytes:
        if type(index) is not int or not 0 <= index < len(self._apart):
            raise _lies()
        return self._apart[index]


def _lies() -> SegmentRefused:
    return SegmentRefused("an encoded value is none that was written here")


def _shown(key: object) -> str:
    shown = repr(key) if type(key) in _LEAVES else type(key).__name__
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
