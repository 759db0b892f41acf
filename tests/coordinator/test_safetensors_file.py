"""The `.safetensors` header: what is read, what is refused, and that nothing else can happen."""

import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.checkpoint import Checkpoint, Copy, lay_out
from coordinator.safetensors_file import (
    FILE_LIMIT_BYTES,
    HEAD_BYTES,
    HEADER_LIMIT_BYTES,
    header_bytes,
    read_table,
)
from shm_store.errors import SourceError, SourceMalformed, SourceUnsupported
from shm_store.layout import ITEM_BYTES, contiguous_strides
from shm_store.manifest import GroupEntry, TensorEntry, decode_manifest, encode_manifest
from shm_store.reading import AS_IT_IS

SOURCE = "models/a.safetensors"
LONE_SURROGATE = "\\ud800"


def entry(dtype="U8", shape=(4,), offsets=(0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def parse(header: bytes, size_bytes: int, source: str) -> Checkpoint:
    return lay_out(read_table(header, size_bytes, source), AS_IT_IS, source)


def parsed(header: object, data_bytes: int = 4) -> Checkpoint:
    """Parse a header given as text, bytes, or what JSON makes of it."""
    text = header if isinstance(header, str | bytes) else json.dumps(header)
    raw = text.encode() if isinstance(text, str) else text
    return parse(raw, 8 + len(raw) + data_bytes, SOURCE)


def read_file(data: bytes) -> Checkpoint:
    """Do what the loader does with a whole file."""
    length = header_bytes(data[:HEAD_BYTES], len(data), SOURCE)
    return parse(data[8 : 8 + length], len(data), SOURCE)


def filled(checkpoint: Checkpoint, data: bytes) -> bytes:
    """Return the segment's tensor bytes after all copies."""
    segment = bytearray(checkpoint.data_bytes)
    for copy in checkpoint.copies:
        part = data[copy.source_offset_bytes : copy.source_offset_bytes + copy.size_bytes]
        assert len(part) == copy.size_bytes
        segment[copy.data_offset_bytes : copy.data_offset_bytes + copy.size_bytes] = part
    return bytes(segment)


def tensor_bytes(checkpoint: Checkpoint, data: bytes) -> dict[str, bytes]:
    """Return each tensor's bytes as a reader of the filled segment finds them."""
    segment = filled(checkpoint, data)
    found = {}
    for tensor in checkpoint.manifest.tensors:
        group = checkpoint.manifest.groups[tensor.group]
        found[tensor.name] = segment[group.offset_bytes : group.offset_bytes + group.size_bytes]
    return found


# --- what is read -------------------------------------------------------------------------------


def test_each_tensor_is_its_own_group_at_a_cache_line():
    """Tensors keep the header's order, groups the file's, and both sides' offsets are right."""
    header = {"b": entry("F32", (2, 3), (64, 88)), "a": entry("I64", (8,), (0, 64))}
    checkpoint = parsed(header, 88)
    assert checkpoint.manifest.tensors == (
        TensorEntry("b", "F32", (2, 3), (3, 1), 1, 0),
        TensorEntry("a", "I64", (8,), (1,), 0, 0),
    )
    assert checkpoint.manifest.groups == (GroupEntry(0, 64), GroupEntry(64, 24))
    assert checkpoint.data_bytes == 88


def test_ranges_that_touch_on_both_sides_are_one_copy():
    """Padding in the segment splits the copies, and only padding."""
    header = {
        "a": entry(shape=(64,), offsets=(0, 64)),
        "b": entry(shape=(128,), offsets=(64, 192)),
        "empty": entry(shape=(0,), offsets=(192, 192)),
        "c": entry(shape=(3,), offsets=(192, 195)),
        "d": entry(shape=(5,), offsets=(195, 200)),
    }
    start = 8 + len(json.dumps(header))
    assert parsed(header, 200).copies == (Copy(start, 0, 195), Copy(start + 195, 256, 5))


def test_a_file_without_tensors_is_read():
    checkpoint = parsed({"__metadata__": {"format": "pt"}}, 0)
    assert (checkpoint.manifest.tensors, checkpoint.copies) == ((), ())
    assert checkpoint.data_bytes == 0


def test_metadata_is_ignored_whatever_it_holds():
    """No tensor of that name appears, and its content is not looked at."""
    checkpoint = parsed({"__metadata__": [1, {"a": None}], "w": entry()})
    assert [tensor.name for tensor in checkpoint.manifest.tensors] == ["w"]


@pytest.mark.parametrize("name", ["", " ", "a\nb", "\x00", "层.0", "😀", "a" * 5000, "a/b:c", '"'])
def test_odd_names_are_kept(name):
    assert parsed({name: entry()}).manifest.tensors[0].name == name


@pytest.mark.parametrize("dtype", sorted(set(ITEM_BYTES) - {"F4", "C128"}))
def test_every_dtype_of_the_format_is_read(dtype):
    size = 6 * ITEM_BYTES[dtype]
    tensor = parsed({"w": entry(dtype, (2, 3), (0, size))}, size).manifest.tensors[0]
    assert (tensor.dtype, tensor.shape) == (dtype, (2, 3))


def test_float4_counts_pairs_as_torch_does():
    """The file counts halves of a byte, torch bytes."""
    tensor = parsed({"w": entry("F4", (3, 8), (0, 12))}, 12).manifest.tensors[0]
    assert (tensor.shape, tensor.strides) == ((3, 4), (4, 1))


def test_no_dimension_and_no_element_are_read():
    header = {
        "scalar": entry("F32", (), (0, 4)),
        "none": entry("F64", (0, 3), (4, 4)),
        "last": entry("F64", (2, 0), (4, 4)),
    }
    checkpoint = parsed(header, 4)
    by_name = {tensor.name: tensor for tensor in checkpoint.manifest.tensors}
    assert by_name["scalar"].shape == ()
    assert by_name["none"].strides == (3, 1)
    assert [group.size_bytes for group in checkpoint.manifest.groups] == [4, 0, 0]
    assert checkpoint.filled_bytes() == 4


# --- what is refused ----------------------------------------------------------------------------

MALFORMED_HEADERS = {
    "no dtype": ({"w": {"shape": [4], "data_offsets": [0, 4]}}, "has no dtype"),
    "dtype no text": ({"w": entry(dtype=7)}, "has no dtype"),
    "no shape": ({"w": {"dtype": "U8", "data_offsets": [0, 4]}}, "no valid shape"),
    "shape no list": ({"w": {**entry(), "shape": 4}}, "no valid shape"),
    "shape negative": ({"w": entry(shape=(-4,))}, "no valid shape"),
    "shape fraction": ({"w": entry(shape=(4.0,))}, "no valid shape"),
    "shape boolean": ({"w": entry(shape=(True,), offsets=(0, 1))}, "no valid shape"),
    "shape nested": ({"w": entry(shape=([4],))}, "no valid shape"),
    "no offsets": ({"w": {"dtype": "U8", "shape": [4]}}, "no valid data_offsets"),
    "one offset": ({"w": entry(offsets=(4,))}, "no valid data_offsets"),
    "three offsets": ({"w": entry(offsets=(0, 4, 4))}, "no valid data_offsets"),
    "offset negative": ({"w": entry(offsets=(-4, 0))}, "no valid data_offsets"),
    "offset boolean": ({"w": entry(shape=(1,), offsets=(False, True))}, "no valid data_offsets"),
    "offset fraction": ({"w": entry(offsets=(0, 4.0))}, "no valid data_offsets"),
    "offsets turned round": ({"w": entry(offsets=(4, 0))}, "has -4 in the file"),
    "size lies": ({"w": entry(shape=(3,))}, "takes 3 bytes by its shape and dtype, but has 4"),
    "past the end": ({"w": entry(shape=(5,), offsets=(0, 5))}, "ends at byte 5"),
    "far past the end": ({"w": entry(shape=(4,), offsets=(2**62, 2**62 + 4))}, "truncated"),
    "hole at the start": ({"w": entry(shape=(3,), offsets=(1, 4))}, "1 bytes before tensor"),
    "hole between": (
        {"v": entry(shape=(1,), offsets=(0, 1)), "w": entry(shape=(2,), offsets=(2, 4))},
        "1 bytes before tensor",
    ),
    "hole at the end": ({"w": entry(shape=(3,), offsets=(0, 3))}, "1 bytes at its end"),
    "overlap": (
        {"v": entry(shape=(3,), offsets=(0, 3)), "w": entry(shape=(2,), offsets=(2, 4))},
        "overlaps",
    ),
    "the same twice": ({"v": entry(), "w": entry()}, "overlaps"),
    "empty inside another": (
        {"v": entry(), "w": entry(shape=(0,), offsets=(2, 2))},
        "overlaps",
    ),
    "absurd size": ({"w": entry(shape=(2**49, 2**49))}, "absurd shape"),
    "absurd empty": ({"w": entry(shape=(2**49, 2**49, 0), offsets=(0, 0))}, "absurd shape"),
    "absurd dimension": ({"w": entry(shape=(0, 2**60), offsets=(0, 0))}, "absurd shape"),
    "odd float4": ({"w": entry("F4", (2, 3), (0, 3))}, "odd last dimension"),
    "float4 scalar": ({"w": entry("F4", (), (0, 1))}, "odd last dimension"),
    "entry no object": ({"w": ["U8", [4], [0, 4]]}, "not described by a JSON object"),
    "lone surrogate": (f'{{"{LONE_SURROGATE}":{{}}}}', "not valid Unicode"),
}

MALFORMED_TEXTS = {
    "duplicate name": ('{"w":%s,"w":%s}' % ((json.dumps(entry()),) * 2), "'w' occurs twice"),
    "duplicate field": ('{"w":{"dtype":"U8","dtype":"I8"}}', "'dtype' occurs twice"),
    "no JSON": ('{"w":', "cannot be read"),
    "more after it": ("{}{}", "cannot be read"),
    "NaN": ('{"w":NaN}', "NaN is no JSON number"),
    "Infinity": ('{"w":-Infinity}', "-Infinity is no JSON number"),
    "no UTF-8": (b'{"\xff":1}', "cannot be read"),
    "a list": ("[]", "no JSON object"),
    "a number": ("7", "no JSON object"),
    "endless digits": ('{"w":%s}' % ("9" * 5000), "a number of 5000 digits"),
    "control character": ('{"a\nb":1}', "cannot be read"),
}


@pytest.mark.parametrize("case", MALFORMED_HEADERS)
def test_a_lying_header_is_refused_by_name(case):
    """The error names the file and the tensor, and can travel."""
    header, text = MALFORMED_HEADERS[case]
    with pytest.raises(SourceMalformed) as caught:
        parsed(header)
    assert text in caught.value.message
    assert caught.value.source == SOURCE and caught.value.message.startswith(SOURCE + ": ")
    if "hole at the end" not in case and "surrogate" not in case:
        assert "tensor 'w'" in caught.value.message
    caught.value.message.encode("utf-8")


@pytest.mark.parametrize("case", MALFORMED_TEXTS)
def test_a_header_that_is_no_such_json_is_refused(case):
    header, text = MALFORMED_TEXTS[case]
    with pytest.raises(SourceMalformed) as caught:
        parsed(header)
    assert text in caught.value.message and caught.value.source == SOURCE


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F6_E3M2", "C128", "F128", "f32", "", "Ü" * 1000])
def test_a_dtype_without_counterpart_is_unsupported_by_name(dtype):
    """A later format's dtype is no lie; the remedy is to convert."""
    with pytest.raises(SourceUnsupported) as caught:
        parsed({"w": entry(dtype, (4,), (0, 3))}, 3)
    assert "tensor 'w'" in caught.value.message and dtype[:50] in caught.value.message
    assert len(caught.value.message) < 600 and "convert" in caught.value.remedy


HEADS = {
    "empty": (b"", 0, SourceMalformed, "is empty"),
    "seven bytes": (b"\x10" + bytes(6), 7, SourceMalformed, "7 bytes are too few"),
    "no header": (bytes(8), 8, SourceMalformed, "no JSON object"),
    "header cut": (struct.pack("<Q", 50) + b"{" * 30, 38, SourceMalformed, "truncated"),
    "header by one": (struct.pack("<Q", 3) + b"{}", 10, SourceMalformed, "truncated"),
    "header too long": (
        struct.pack("<Q", HEADER_LIMIT_BYTES + 1) + b"{",
        1 << 40,
        SourceMalformed,
        "claim a header of 100000001 bytes",
    ),
    "no brace": (struct.pack("<Q", 2) + b" {}", 11, SourceMalformed, "no JSON object"),
    "text": (b"Not found" + b" " * 55, 900, SourceMalformed, "not a .safetensors file"),
    "page": (b"\n<!DOCTYPE html>" + b" " * 48, 900, SourceMalformed, "a web page"),
    "zip": (b"PK\x03\x04\0\0\x08\x08" + bytes(56), 999, SourceUnsupported, "torch.save"),
    "tiny zip": (b"PK\x03\x04", 4, SourceUnsupported, "zip archive"),
    "old torch": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j", 999, SourceUnsupported, "pickle"),
    "pickle": (b"\x80\x04\x95\x10" + bytes(30), 999, SourceUnsupported, "pickle"),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(56), 999, SourceUnsupported, "HDF5"),
    "LFS": (b"version https://git-lfs.github.com/spec/v1\n", 130, SourceMalformed, "LFS pointer"),
    "too large": (struct.pack("<Q", 2) + b"{}", FILE_LIMIT_BYTES, SourceUnsupported, "too many"),
}


@pytest.mark.parametrize("case", HEADS)
def test_a_file_is_judged_by_its_first_bytes(case):
    head, size, kind, text = HEADS[case]
    with pytest.raises(SourceError) as caught:
        header_bytes(head, size, SOURCE)
    assert type(caught.value) is kind
    assert text in caught.value.message and caught.value.source == SOURCE and caught.value.remedy
    # What never was one is not to be saved again.
    damaged = case in ("empty", "header cut", "header by one", "LFS", "page")
    assert ("build=" in caught.value.remedy) is not damaged


def test_a_length_that_looks_like_another_format_is_still_a_length():
    """0x04034b50 is "PK.." and a possible header length: what follows decides."""
    head = b"PK\x03\x04\0\0\0\0{"
    assert header_bytes(head, 1 << 30, SOURCE) == 0x04034B50


# --- hostile sizes: linear work, bounded messages -------------------------------------------------

HOSTILE = {
    "deep": b'{"w":' + b"[" * 3_000_000,
    "deep objects": b'{"w":' * 500_000,
    "digits": b'{"w":' + b"9" * 3_000_000 + b"}",
    "large dimensions": b'{"w":{"dtype":"U8","data_offsets":[0,0],"shape":['
    + b"%d," % (2**49 - 1) * 200_000
    + b"0]}}",
    "long name": b'{"' + b"x" * 3_000_000 + b'":1}',
    "long dtype": b'{"w":{"dtype":"' + b"x" * 3_000_000 + b'","shape":[],"data_offsets":[0,1]}}',
    "duplicates": b"{" + b'"w":1,' * 300_000 + b'"w":1}',
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_costs_no_more_than_reading_it(case):
    """Quadratic work on these would take minutes; recursion would end the process."""
    with pytest.raises(SourceError) as caught:
        parsed(HOSTILE[case])
    assert len(caught.value.message) < 1000


# --- against the format's own library -------------------------------------------------------------

TORCH_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
]  # fmt: skip
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter("__metadata__".__ne__)
SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)
QUIET = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


def raw_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return a tensor of `dtype` over arbitrary bytes."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    filler = np.random.default_rng(seed).integers(0, 2, count, dtype=np.uint8)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(filler).view(dtype).reshape(shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@QUIET
@given(
    st.dictionaries(
        NAMES,
        st.tuples(
            st.sampled_from(TORCH_DTYPES),
            # float4 cannot be saved without dimensions: the file counts its halves.
            SHAPES.map(lambda shape: shape or (1,)),
            st.integers(0, 2**31),
        ),
        max_size=8,
    )
)
def test_files_of_the_torch_writer_come_out_equal(table):
    """Dtype, shape, strides and bytes of every tensor, in the order of the file's header."""
    tensors = {name: raw_tensor(*what) for name, what in table.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.safetensors")
        safetensors.torch.save_file(tensors, path)
        data = path.read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    checkpoint = read_file(data)
    assert [tensor.name for tensor in checkpoint.manifest.tensors] == list(header)
    for entry_ in checkpoint.manifest.tensors:
        tensor = tensors[entry_.name]
        assert entry_.shape == tuple(tensor.shape)
        assert entry_.strides == contiguous_strides(tensor.shape)
        if tensor.numel():
            assert entry_.strides == tensor.stride()
        assert ITEM_BYTES[entry_.dtype] == tensor.dtype.itemsize
    assert tensor_bytes(checkpoint, data) == {name: bytes_of(t) for name, t in tensors.items()}
    check_bounds(checkpoint, len(data))


@QUIET
@given(
    st.dictionaries(
        NAMES,
        st.tuples(st.sampled_from(["b1", "u1", "i2", "u4", "f2", "f8", "c8"]), SHAPES),
        max_size=8,
    ),
    # The writer (0.8) spells no tensors with empty metadata in a way its own reader refuses.
    st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=5), min_size=1, max_size=3),
)
def test_files_of_the_numpy_writer_come_out_equal(table, metadata):
    tensors = {
        name: np.ones(shape, dtype=np.dtype(dtype)) for name, (dtype, shape) in table.items()
    }
    data = safetensors.numpy.save(tensors, metadata)
    checkpoint = read_file(data)
    assert {t.name: t.shape for t in checkpoint.manifest.tensors} == {
        name: array.shape for name, array in tensors.items()
    }
    assert tensor_bytes(checkpoint, data) == {name: a.tobytes() for name, a in tensors.items()}


def check_bounds(checkpoint: Checkpoint, size_bytes: int) -> None:
    """What any accepted file guarantees: a manifest that travels, and copies that stay inside."""
    assert decode_manifest(encode_manifest(checkpoint.manifest)) == checkpoint.manifest
    assert checkpoint.filled_bytes() <= size_bytes
    end = 0
    for copy in checkpoint.copies:
        assert copy.size_bytes > 0
        assert copy.source_offset_bytes + copy.size_bytes <= size_bytes
        assert end <= copy.data_offset_bytes
        end = copy.data_offset_bytes + copy.size_bytes
    assert end <= checkpoint.data_bytes


def check_outcome(read: Callable[[], Checkpoint], size_bytes: int) -> None:
    """Either sound copies, or an error that names the file and can travel; nothing else."""
    try:
        checkpoint = read()
    except SourceError as error:
        refused = error
    else:
        check_bounds(checkpoint, size_bytes)
        return
    assert refused.source == SOURCE and refused.message.startswith(SOURCE)
    refused.message.encode("utf-8")


GOOD_FILE = safetensors.numpy.save(
    {"a.weight": np.ones((3, 5), "f4"), "b": np.ones((7,), "u1"), "e": np.ones((0, 2), "f8")},
    {"format": "pt"},
)


@settings(QUIET, max_examples=400)
@given(st.data())
def test_a_damaged_file_ends_in_a_source_error_or_in_sound_copies(data):
    """Bytes changed, removed and added anywhere; the length field often put right again."""
    damaged = bytearray(GOOD_FILE)
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(damaged) - 1))
        end = data.draw(st.integers(start, min(len(damaged), start + 4)))
        damaged[start:end] = data.draw(
            st.binary(max_size=4)
            | st.text('0123456789-.eE,:{}[]"\\utrnf ', max_size=6).map(str.encode)
        )
    if data.draw(st.booleans()):
        brace = bytes(damaged).rfind(b"}}")
        damaged[:8] = struct.pack("<Q", max(0, brace + 2 - 8))
    check_outcome(lambda: read_file(bytes(damaged)), len(damaged))


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True)
    | st.text(max_size=4)
    | st.sampled_from(["U8", "F4", "F6_E2M3"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["dtype", "shape", "data_offsets", "w"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)


@settings(QUIET, max_examples=400)
@given(
    st.dictionaries(
        NAMES,
        JSON_VALUES
        | st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["U8", "F32", "F4", "I64", "nope"]),
                "shape": st.lists(st.integers(-1, 2**52) | st.booleans(), max_size=3) | JSON_VALUES,
                "data_offsets": st.lists(st.integers(-1, 64), max_size=3) | JSON_VALUES,
            }
        ),
        max_size=4,
    ),
    st.integers(0, 64),
)
def test_any_json_ends_in_a_source_error_or_in_sound_copies(table, data_bytes):
    raw = json.dumps(table).encode()
    size_bytes = 8 + len(raw) + data_bytes
    check_outcome(lambda: parse(raw, size_bytes, SOURCE), size_bytes)
