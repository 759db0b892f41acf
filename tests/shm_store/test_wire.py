"""Messages: what is sent arrives, and nothing else is taken for a message."""

from __future__ import annotations

import inspect
import math
import struct
import tracemalloc
import types
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_store import report, wire
from shm_store.errors import ArgumentRefused, ProtocolViolation
from shm_store.keys import GenerationId, Key, LeaseId, RequestId

DECODERS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    "resume": wire.resume_decoder,
    "held": wire.held_decoder,
    "session": wire.session_decoder,
    "loader": wire.loader_decoder,
    "to_session": wire.to_session_decoder,
    "to_loader": wire.to_loader_decoder,
}
KNOWN: dict[str, tuple[type[wire.Message], ...]] = {
    "resume": (wire.Resume,),
    "held": typing.get_args(wire.Held),
    "session": typing.get_args(wire.FromSession),
    "loader": typing.get_args(wire.FromLoader),
    "to_session": typing.get_args(wire.ToSession),
    "to_loader": typing.get_args(wire.ToLoader),
}
MESSAGES = [
    kind
    for _, kind in inspect.getmembers(wire, inspect.isclass)
    if issubclass(kind, wire.Message) and kind is not wire.Message
]

WORDS = st.text(max_size=30)
WHOLE = st.integers(0, 2**64 - 1)
BY_NAME: dict[str, st.SearchStrategy[Any]] = {
    "rid": WHOLE,
    "key": st.text(min_size=1, max_size=512),
    "version": st.text(max_size=120),
    "name": st.text(max_size=4096),
    "source": st.text(max_size=4096),
    "timeout_s": st.floats(0, wire.TIMEOUT_LIMIT_S),
    "age_s": st.floats(allow_nan=False),
    "done_bytes": st.integers(0, wire.SIZE_LIMIT_BYTES),
    "limit_bytes": st.integers(0, wire.SIZE_LIMIT_BYTES),
    "pool": st.text(max_size=4096),
    "total_bytes": st.integers(0, wire.SIZE_LIMIT_BYTES),
}
PAGES = st.integers(1, wire.SIZE_LIMIT_BYTES // 4096).map(lambda pages: 4096 * pages)
SIZES = {
    wire.Reserve: PAGES,
    wire.Charge: PAGES,
    wire.HeldCharge: PAGES,
    wire.HeldOnDevice: PAGES,
    wire.CopiedPages: PAGES,
}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for the values of an annotation, of any length and size it can have."""
    if msgspec_kind := getattr(hint, "__supertype__", None):
        return values(msgspec_kind)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        least = max(getattr(meta, "min_length", None) or 0 for meta in inner[1:])
        return st.text(min_size=least, max_size=30) if inner[0] is str else values(inner[0])
    if origin is typing.Literal:
        return st.sampled_from(inner)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values, inner))
    if origin is tuple and inner[-1] is not Ellipsis:
        return st.tuples(*map(values, inner))
    if origin is tuple:
        return st.lists(values(inner[0]), max_size=3).map(tuple)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return structs(hint)
    plain = {str: WORDS, int: WHOLE, float: st.floats(0, 1e6), bool: st.booleans()}
    return st.none() if hint is type(None) else plain[hint]


def structs(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Return a strategy for the valid instances of a struct."""
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {}
    for name in kind.__struct_fields__:
        fields[name] = values(hints[name])
        if name == "size_bytes" and kind in SIZES:
            fields[name] = SIZES[kind]
        elif name == "version" and kind is wire.Resume:
            fields[name] = WHOLE
        elif name in BY_NAME:
            optional = type(None) in typing.get_args(hints[name])
            fields[name] = st.none() | BY_NAME[name] if optional else BY_NAME[name]
    return st.builds(kind, **fields)


messages = st.sampled_from(MESSAGES).flatmap(structs)


def takers(message: wire.AnyMessage) -> list[str]:
    """Return the directions in which a message of this class may travel."""
    return [name for name, kinds in KNOWN.items() if type(message) in kinds]


def test_every_message_has_a_direction() -> None:
    """A message that no decoder knows could be sent and never read."""
    assert set(MESSAGES) == {kind for kinds in KNOWN.values() for kind in kinds}
    assert len(MESSAGES) > 20


@given(messages)
def test_what_is_sent_arrives(message: wire.AnyMessage) -> None:
    """Every message comes back equal from each decoder of its direction."""
    for name in takers(message):
        received = wire.decode(DECODERS[name], wire.encode(message))
        assert type(received) is type(message)
        assert received == message


@given(messages)
def test_a_message_of_another_direction_is_refused(message: wire.AnyMessage) -> None:
    """A worker cannot speak as the coordinator, nor a loader as a worker."""
    for name in set(DECODERS) - set(takers(message)):
        with pytest.raises(ProtocolViolation):
            wire.decode(DECODERS[name], wire.encode(message))


def read_or_refuse(data: bytes) -> None:
    """Check that `data` is a stable message for each decoder, or a protocol violation."""
    for name, decoder in DECODERS.items():
        try:
            message = wire.decode(decoder, data)
        except ProtocolViolation:
            continue
        assert type(message) in KNOWN[name]
        again = wire.encode(message)
        assert wire.encode(wire.decode(decoder, again)) == again


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_protocol_violation(data: bytes) -> None:
    """No bytes lead to another exception."""
    read_or_refuse(data)


@given(messages, st.data())
def test_a_damaged_message_is_a_message_or_a_protocol_violation(
    message: wire.AnyMessage, data: st.DataObject
) -> None:
    """Bytes changed, dropped, repeated or cut off: never another exception."""
    frame = bytearray(wire.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        if not frame:
            break
        at = data.draw(st.integers(0, len(frame) - 1))
        length = data.draw(st.integers(0, 8))
        frame[at : at + length] = data.draw(st.binary(max_size=8))
    read_or_refuse(bytes(frame))


def test_text_that_is_no_utf_8_is_refused() -> None:
    """Such as a key, or the name of the message itself."""
    for frame in (b"\x93\xa5Evict\x01\xa1\xff", b"\x92\xa5Flus\xff\x01"):
        with pytest.raises(ProtocolViolation):
            wire.decode(wire.session_decoder, frame)


def test_deep_nesting_is_refused() -> None:
    """Also where a newer peer may append what this version skips."""
    nested = b"\x91" * 100_000
    for frame in (nested, b"\x93\xa5Flush\x01" + nested):
        with pytest.raises(ProtocolViolation):
            wire.decode(wire.session_decoder, frame)


def test_a_list_that_claims_more_than_it_has_takes_no_memory() -> None:
    """Sixteen million holders are announced in a frame of some thirty bytes, and none follows."""
    cause = b"\x97\xa1c\xa1m\xa0\xa0\x00\x00\xdd" + struct.pack(">I", 1 << 24)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolViolation):
            wire.decode(wire.session_decoder, b"\x93\xa5Abort\xa1g" + cause)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


RID, GEN, KEY = RequestId(1), GenerationId("0000000000000001-00000001"), Key("k")
ABSURD = wire.SIZE_LIMIT_BYTES + 1


def acquire(**changed: Any) -> wire.Acquire:
    """Return a good request, but for what is changed."""
    fields = {"rid": RID, "key": KEY, "source": "/m.safetensors", "version": "", "timeout_s": 1.0}
    return wire.Acquire(**{**fields, **changed})


OUT_OF_RANGE: list[tuple[str, wire.AnyMessage]] = [
    *[
        ("session", wire.Reserve(GEN, size_bytes=size))
        for size in (0, -1, ABSURD, 2**63, 2**64 - 1, -(2**63))
    ],
    *[("loader", wire.Reserve(GEN, size_bytes=size)) for size in (0, -1, 4097, ABSURD)],
    *[("loader", wire.Progress(GEN, done_bytes=size, total_bytes=1)) for size in (-1, ABSURD)],
    *[("loader", wire.Progress(GEN, done_bytes=1, total_bytes=size)) for size in (-1, ABSURD)],
    *[("to_session", wire.Filling(RID, done_bytes=n, total_bytes=1)) for n in (-1, ABSURD)],
    *[
        ("session", acquire(timeout_s=timeout_s))
        for timeout_s in (math.nan, math.inf, -math.inf, -1.0, -1e-9, 1e9 + 1)
    ],
    *[("session", wire.Drain(RID, timeout_s=timeout_s)) for timeout_s in (math.nan, math.inf, -1)],
    ("session", acquire(key=Key(""))),
    ("session", acquire(key=Key("k" * 513))),
    ("session", acquire(source="s" * 4097)),
    ("session", acquire(version="v" * 121)),
    ("session", wire.Pin(RID, Key("k" * 513))),
    ("session", wire.Unpin(RID, Key("k" * 513))),
    ("session", wire.Evict(RID, Key("k" * 513))),
    ("resume", wire.Resume(1, name="n" * 4097)),
    ("resume", wire.Resume(1, device="d" * 4097)),
    ("resume", wire.Resume(1, role="coordinator")),
]


@pytest.mark.parametrize(("direction", "message"), OUT_OF_RANGE, ids=lambda value: str(value)[:60])
def test_a_field_out_of_its_range_is_refused(direction: str, message: wire.AnyMessage) -> None:
    """Such values never reach the ledger, whoever sends them."""
    with pytest.raises(ProtocolViolation):
        wire.decode(DECODERS[direction], wire.encode(message))


IN_RANGE: list[wire.AnyMessage] = [
    wire.Reserve(GEN, 4096),
    wire.Reserve(GEN, wire.SIZE_LIMIT_BYTES),
    acquire(timeout_s=0.0),
    acquire(timeout_s=wire.TIMEOUT_LIMIT_S),
    acquire(timeout_s=300),
    acquire(source=None, version="v" * 120),
    acquire(key=Key("k" * 512), source="s" * 4096),
    wire.Evict(RID),
]


@pytest.mark.parametrize("message", IN_RANGE, ids=lambda value: str(value)[:60])
def test_the_ends_of_each_range_belong_to_it(message: wire.AnyMessage) -> None:
    """The bounds themselves are good values."""
    assert wire.decode(wire.session_decoder, wire.encode(message)) == message


def test_a_newer_resume_still_gives_its_version() -> None:
    """Appended fields, of whatever shape, do not hide which version the peer speaks."""
    newer = ["Resume", 99, "trainer", "cuda:0", "worker", "token", 0, {"more": [[GEN]]}, 1.5, None]
    resume = wire.decode(wire.resume_decoder, msgspec.msgpack.encode(newer))
    assert resume == wire.Resume(99, "trainer", "cuda:0", "worker", "token")


def test_an_older_resume_still_gives_its_version() -> None:
    """What it does not have yet takes its default."""
    resume = wire.decode(wire.resume_decoder, msgspec.msgpack.encode(["Resume", 0]))
    assert resume == wire.Resume(0, "", "", "worker")


def test_text_that_has_no_utf_8_form_is_refused_before_it_is_sent() -> None:
    """As the path of a file that was named in another encoding."""
    with pytest.raises(ArgumentRefused) as caught:
        wire.encode(acquire(source="/models/caf\udce9.safetensors"))
    assert "caf" in caught.value.message
    assert caught.value.message.isascii()
    assert caught.value.remedy


def test_a_refusal_does_not_repeat_the_message_it_refuses() -> None:
    """What a hostile peer sends does not fill the log."""
    frame = wire.encode(acquire(key=Key("k" * 100_000)))
    with pytest.raises(ProtocolViolation) as caught:
        wire.decode(wire.session_decoder, frame)
    assert len(str(caught.value)) < 300
    assert "kkk" not in str(caught.value)


def test_a_report_of_a_whole_host_arrives() -> None:
    """Thousands of generations with their leases, as one message of many frames."""
    lease = report.LeaseReport(1, 4711, 0.5)
    generation = report.GenerationReport("k", GEN, "READY", 1, "ram", False, (lease,) * 8)
    whole = report.StatusReport(
        draining=False, pools=(), generations=(generation,) * 5000, sessions=()
    )
    sent = wire.encode(wire.Report(RID, whole))
    assert len(sent) > 1 << 20
    assert wire.decode(wire.to_session_decoder, sent) == wire.Report(RID, whole)


def test_lease_and_request_share_one_number() -> None:
    """A lease's id is the request id of its grant, so it crosses the wire as that number."""
    release = wire.Release(GEN, LeaseId(2**63 + 5))
    assert wire.decode(wire.session_decoder, wire.encode(release)) == release
