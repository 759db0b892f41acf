"""GGUF files: blocks and types as they are in the file, held against the package gguf."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from coordinator import gguf_file
from coordinator.checkpoint import lay_out
from gpu_worker import Source
from gpu_worker.gguf_tensor import GGUFTensor
from shm_store.errors import ArgumentRefused, SourceError, SourceMalformed, SourceUnsupported
from shm_store.reading import AS_IT_IS
from tests.gpu_worker.served import leases
from tests.mutations import mutations

QUANTISED = (Type.Q8_0, Type.Q4_0, Type.Q5_1, Type.Q4_K, Type.Q6_K, Type.IQ4_XS, Type.MXFP4)


def write(path: Path) -> Path:
    """Write a file as llama.cpp's converter does: a tokenizer, plain tensors, quantised ones."""
    lots = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([f"token {number}" for number in range(300)])
    writer.add_array("nested.flags", [True, False])
    writer.add_float32("rope.scale", 0.5)
    writer.add_tensor("plain.f32", lots.standard_normal((3, 5), dtype=np.float32))
    writer.add_tensor("plain.f16", lots.standard_normal((7,), dtype=np.float32).astype(np.float16))
    bf16 = lots.integers(0, 1 << 16, (2, 3), dtype=np.uint16)
    writer.add_tensor("plain.bf16", bf16.view(np.uint8), raw_dtype=Type.BF16)
    writer.add_tensor("plain.i32", np.arange(6, dtype=np.int32).reshape(1, 2, 3))
    for kind in QUANTISED:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        if kind in (Type.Q8_0, Type.Q4_0, Type.Q5_1):
            worth = lots.standard_normal((4, 2 * block), dtype=np.float32)
            blocks = gguf.quants.quantize(worth, kind)
        else:
            blocks = lots.integers(0, 60, (4, 2 * size), dtype=np.uint8)
        writer.add_tensor(f"packed.{kind.name}", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "model.gguf")


@pytest.mark.process
def test_a_state_dict_has_the_blocks_of_the_file(worker, operator, key, path):
    """In order, bit by bit, of the shape that they are worth, and worth the same."""
    state = worker.state_dict(key, source=path)
    there = gguf.GGUFReader(path).tensors
    assert list(state) == [tensor.name for tensor in there]
    for tensor in there:
        ours = state[tensor.name]
        assert tuple(ours.shape) == tuple(int(size) for size in reversed(tensor.shape))
        if tensor.name.startswith("packed"):
            assert isinstance(ours, GGUFTensor) and ours.quant_type == tensor.tensor_type.name
            assert ours.blocks.numpy().tobytes() == tensor.data.tobytes()
            worth = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
            assert torch.equal(ours.dequantize().nan_to_num(), worth.nan_to_num())
        else:
            assert type(ours) is torch.Tensor
            assert ours.contiguous().view(torch.uint8).numpy().tobytes() == tensor.data.tobytes()
    again = worker.state_dict(key, source=path)
    name = "packed.Q4_K"
    assert again[name].blocks.data_ptr() == state[name].blocks.data_ptr(), "shared, and no copy"
    assert leases(operator, key) == 1


@pytest.mark.process
def test_a_module_computes_with_what_its_weights_are_worth(worker, key, path):
    def skeleton():
        module = torch.nn.Module()
        module.packed = torch.nn.Module()
        module.packed.Q8_0 = torch.nn.Parameter(torch.empty(4, 64))
        return module

    with worker.use(key, skeleton=skeleton, source=Source(path, name_filter="*.Q8_0")) as module:
        weight = module.packed.Q8_0
        assert isinstance(weight, GGUFTensor)
        x = torch.randn(3, 64)
        expected = torch.nn.functional.linear(x, weight.dequantize())
        assert torch.equal(torch.nn.functional.linear(x, weight), expected)


def test_what_passes_on_keeps_the_blocks():
    blocks = torch.zeros(2, 34, dtype=torch.uint8)
    tensor = GGUFTensor(blocks, "Q8_0", (2, 32))
    detached, cloned, moved = tensor.detach(), tensor.clone(), tensor.to("cpu", copy=True)
    assert isinstance(detached, GGUFTensor) and detached.blocks.data_ptr() == blocks.data_ptr()
    assert isinstance(cloned, GGUFTensor) and cloned.blocks.data_ptr() != blocks.data_ptr()
    assert isinstance(moved, GGUFTensor) and moved.quant_type == "Q8_0"
    assert type(tensor + 1) is torch.Tensor and type(tensor.to(torch.int32)) is torch.Tensor
    text = "GGUFTensor(Q8_0, size=(2, 32), dtype=float32, device=cpu)"
    assert repr(tensor) == text


@pytest.mark.parametrize(
    "edit",
    [
        lambda tensor: tensor.add_(1),
        lambda tensor: tensor.zero_(),
        lambda tensor: tensor.copy_(torch.ones(2, 32)),
        lambda tensor: tensor.__setitem__(0, 0.0),
        lambda tensor: torch.add(torch.ones(2, 32), 1, out=tensor),
    ],
)
def test_an_edit_in_place_is_refused_and_not_lost(edit):
    with pytest.raises(ArgumentRefused, match="would write to a quantised tensor"):
        edit(GGUFTensor(torch.zeros(2, 34, dtype=torch.uint8), "Q8_0", (2, 32)))


def test_what_is_written_to_may_be_a_plain_tensor():
    ones = GGUFTensor(torch.zeros(2, 34, dtype=torch.uint8), "Q8_0", (2, 32))
    assert torch.ones(2, 32).add_(ones).sum() == 64


@pytest.mark.process
def test_a_cast_says_what_the_blocks_are_worth(worker, key, path):
    """They stay as they are; a module computes in that dtype, also after `.to` of another."""
    source = Source(path, dtype=torch.bfloat16)
    state = worker.state_dict(key, source=source)
    there = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert state["plain.f32"].dtype == torch.bfloat16
    linear = torch.nn.Linear(64, 4, bias=False)
    linear.load_state_dict({"weight": state["packed.Q8_0"]}, assign=True)
    for dtype in (torch.bfloat16, torch.float16):
        weight = linear.to(dtype).weight
        assert isinstance(weight, GGUFTensor) and weight.dtype == dtype
        assert weight.blocks.numpy().tobytes() == there["packed.Q8_0"].data.tobytes()
        x = torch.randn(3, 64, dtype=dtype)
        assert torch.equal(linear(x), torch.nn.functional.linear(x, weight.dequantize()))


# --- the header, without a coordinator -----------------------------------------------------------


@dataclass
class File:
    """What `read_table` reads, of bytes."""

    data: bytes
    name: str = "a.gguf"

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def read(self, size_bytes: int, offset_bytes: int) -> bytes:
        got = self.data[offset_bytes : offset_bytes + size_bytes]
        assert len(got) == size_bytes, "it asks only for what is there"
        return got


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(*tensors: bytes, pairs: bytes = b"", count: int = 0, version: int = 3) -> bytes:
    start = b"GGUF" + struct.pack("<IQQ", version, len(tensors), count) + pairs + b"".join(tensors)
    return start + bytes(-len(start) % 32)


def tensor(name: bytes, dimensions: list[int], kind: int, offset: int) -> bytes:
    shape = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        (b"GGUF", SourceMalformed, "truncated"),
        (header(version=1), SourceUnsupported, "version 1"),
        (header(version=3 << 24), SourceUnsupported, "big-endian"),
        (header(tensor(b"a", [4], 0, 0)), SourceMalformed, "'a' ends at byte .* truncated"),
        (header(tensor(b"a", [4], 0, 1)) + bytes(99), SourceMalformed, "not aligned"),
        (header(tensor(b"a", [4], 777, 0)) + bytes(99), SourceUnsupported, "type 777"),
        (header(tensor(b"a", [31], 2, 0)) + bytes(99), SourceMalformed, "rows of 31"),
        (header(tensor(b"a", [1 << 60, 1 << 60], 0, 0)), SourceMalformed, "absurd"),
        (header(tensor(b"\xff", [4], 0, 0)), SourceMalformed, "not UTF-8"),
        (header(tensor(b"a", [4] * 9, 0, 0)), SourceMalformed, "9 dimensions"),
        (header(*[tensor(b"a", [4], 0, 0)] * 2) + bytes(99), SourceMalformed, "twice"),
        (
            header(tensor(b"a", [16], 0, 0), tensor(b"b", [4], 0, 32)) + bytes(99),
            SourceMalformed,
            "'b' overlaps 'a'",
        ),
        (
            header(pairs=text(b"k") + struct.pack("<I", 99), count=1),
            SourceMalformed,
            "metadata of type 99",
        ),
        (
            header(pairs=text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 60), count=1),
            SourceMalformed,
            "too small",
        ),
        (
            header(pairs=text(b"k") + struct.pack("<IIQ", 9, 0, 1 << 60), count=1),
            SourceMalformed,
            "truncated",
        ),
        (
            header(pairs=text(b"general.alignment") + struct.pack("<II", 4, 0), count=1),
            SourceMalformed,
            "alignment of 0",
        ),
        (header(count=1 << 60), SourceMalformed, "too small"),
        (
            header(pairs=text(b"split.count") + struct.pack("<IH", 2, 3), count=1),
            SourceUnsupported,
            "one of 3 files",
        ),
    ],
)
def test_a_header_that_lies_is_refused_by_name(data, error, said):
    with pytest.raises(error, match=said) as refused:
        gguf_file.read_table(File(data))
    assert refused.value.source == "a.gguf"


def test_another_alignment_is_kept_to():
    pairs = text(b"general.alignment") + struct.pack("<II", 4, 64)
    data = header(tensor(b"a", [2], 0, 64), pairs=pairs, count=1)
    (stored,) = gguf_file.read_table(File(data.ljust(256, b"\0")))
    assert stored.start == -(-len(data) // 64) * 64 + 64


@pytest.mark.timeout(600)
def test_a_mutated_file_is_read_within_its_bounds_or_refused_by_name(path):
    """The tokenizer left out: it is most of the header, and all alike."""
    whole = path.read_bytes()
    there = whole.index(text(b"rope.scale"))
    small = b"GGUF" + struct.pack("<IQQ", 3, 4 + len(QUANTISED), 1) + whole[there:]
    read = 0
    for data in mutations((small[:1400],), 10):
        file = File(data.ljust(len(small), b"\0"))
        if not file.data.startswith(b"GGUF"):
            continue
        try:
            checkpoint = lay_out(gguf_file.read_table(file), AS_IT_IS, "a.gguf")
        except SourceError as error:
            assert_named(error)
            continue
        read += 1
        for copy in checkpoint.copies:
            assert copy.source_offset_bytes + copy.size_bytes <= file.size_bytes
            assert copy.data_offset_bytes + copy.size_bytes <= checkpoint.data_bytes
    assert read


def assert_named(error: SourceError) -> None:
    assert error.source == "a.gguf"


@pytest.mark.process
def test_a_process_that_knows_nothing_of_gguf_gets_the_tensors(run, path):
    """The class is found though nobody there has imported it."""
    script = f"""
    assert "gpu_worker.gguf_tensor" not in sys.modules
    print(worker.state_dict("gguf/fresh", source={str(path)!r})["packed.Q4_0"])
    """
    assert run(script) == "GGUFTensor(Q4_0, size=(4, 64), dtype=float32, device=cpu)\n"
