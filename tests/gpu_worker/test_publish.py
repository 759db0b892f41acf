"""From tensors to a segment and back: every bit, stride and tie survives, or is refused by name."""

import ctypes
import fcntl
import gc
import os
import re
import weakref
from collections.abc import Callable

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from gpu_worker import dtypes, publish
from gpu_worker.tensors import entries, tensors
from shm_store import segment
from shm_store.errors import ArgumentRefused, SegmentRefused, TensorRefused
from shm_store.manifest import Kind, decode_manifest
from tests.gpu_worker.sealed import GEN, bits, mapped, seal


def noise(dtype, *shape):
    """Return a tensor whose bytes are all different from zero, NaN patterns included."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = (torch.arange(count, dtype=torch.int32) * 37 % 255 + 1).to(torch.uint8)
    if dtype is torch.bool:
        return (raw % 2).view(torch.bool).reshape(shape)
    return raw.view(dtype).reshape(shape)


def data_bytes(weights):
    """Return the sizes of the groups that `weights` are planned into."""
    return [group.size_bytes for _, group in publish.plan(weights).groups]


# --- every kind comes out as it went in -----------------------------------------------------------


def big_storage():
    return torch.arange(1_000_000.0)


def tied_to_its_transpose():
    tensor = noise(torch.float32, 8, 4)
    return {"a": tensor, "b": tensor.t()}


def overlapping_views():
    tensor = noise(torch.float32, 9, 4)
    return {
        "q": tensor[:4],
        "kv": tensor[3:9],
        "all": tensor,
        "one": tensor[5],
        "column": tensor[:, 2],
    }


def interleaved_views():
    tensor = noise(torch.float64, 10)
    return {"even": tensor[::2], "odd": tensor[1::2]}


def two_dtypes_of_one_storage():
    raw = noise(torch.uint8, 12)
    return {"bytes": raw, "words": raw[4:12].view(torch.int32), "half": raw[2:8].view(torch.half)}


def conjugated_and_expanded():
    return {"t": torch.randn(1, 3, dtype=torch.complex64).conj().expand(5, 3)}


def conjugated_beside_its_base():
    tensor = torch.randn(4, dtype=torch.complex64)
    return {"base": tensor, "conjugate": tensor.conj(), "imaginary": tensor.conj().imag}


KINDS = {
    "transposed": lambda: {"t": noise(torch.float32, 6, 4).t()},
    "channels_last": lambda: {
        "t": noise(torch.float32, 2, 3, 4, 5).to(memory_format=torch.channels_last)
    },
    "channels_last_3d": lambda: {
        "t": noise(torch.float16, 2, 3, 4, 5, 2).to(memory_format=torch.channels_last_3d)
    },
    "permuted": lambda: {"t": noise(torch.int64, 3, 4, 5).permute(2, 0, 1)},
    "zero_size": lambda: {"t": torch.empty(0), "u": torch.empty(3, 0, 2), "v": torch.ones(2)},
    "zero_size_strided": lambda: {"t": torch.empty_strided((0, 3), (7, 2), dtype=torch.bfloat16)},
    "zero_dimensional": lambda: {"t": torch.tensor(3.25), "u": torch.tensor(True)},
    "odd_strides_of_single_elements": lambda: {
        "t": noise(torch.float32, 5).as_strided((1, 5), (999, 1)),
        "u": noise(torch.float32, 1).as_strided((1, 1), (7, 3)),
    },
    "expanded": lambda: {"t": noise(torch.float32, 5).expand(4, 5)},
    "expanded_scalar": lambda: {"t": torch.tensor(2.5).expand(3, 2)},
    "tied": lambda: dict.fromkeys(["a", "b", "c"], noise(torch.float32, 8, 4)),
    "tied_to_its_transpose": tied_to_its_transpose,
    "overlapping_views": overlapping_views,
    "interleaved_views": interleaved_views,
    "two_dtypes_of_one_storage": two_dtypes_of_one_storage,
    "windows": lambda: {"t": noise(torch.float32, 9).unfold(0, 3, 1)},
    "windows_with_gaps": lambda: {"t": noise(torch.float32, 9).as_strided((2, 2, 2), (1, 1, 5))},
    "conjugated": lambda: {"t": noise(torch.complex64, 4, 3).conj()},
    "conjugated_transposed": lambda: {"t": torch.randn(4, 3, dtype=torch.complex128).mH},
    "negated": lambda: {"t": torch.randn(6, dtype=torch.complex64).conj().imag},
    "conjugated_and_expanded": conjugated_and_expanded,
    "conjugated_beside_its_base": conjugated_beside_its_base,
    "real_part": lambda: {"t": torch.randn(6, dtype=torch.complex64).real},
    "parameter": lambda: {"t": torch.nn.Parameter(noise(torch.float32, 3))},
    "on_graph": lambda: {"t": torch.ones(3, requires_grad=True) * 2},
    "names": lambda: {"": torch.ones(1), "a.b/c d\n": torch.ones(2), "größe": torch.ones(3)},
    "nothing": dict,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_comes_out_as_it_went_in(kind):
    """Order, dtype, shape, strides and every bit."""
    weights = KINDS[kind]()
    with mapped(seal(weights)) as buffer:
        state = tensors(buffer)
        assert list(state) == list(weights)
        for name, tensor in weights.items():
            assert state[name].dtype is tensor.dtype
            assert state[name].shape == tensor.shape
            if not (tensor.is_conj() or tensor.is_neg() or kind == "real_part"):
                assert state[name].stride() == tensor.stride()
            assert bits(state[name]) == bits(tensor)
            assert not state[name].requires_grad


@pytest.mark.parametrize("name", dtypes.TORCH_DTYPES)
def test_every_dtype_comes_out_bit_by_bit(name):
    """Dense, with gaps between the elements, expanded, alone and as an alias."""
    dtype = dtypes.TORCH_DTYPES[name]
    whole = noise(dtype, 6, 4)
    weights = {
        "dense": noise(dtype, 3, 5),
        "gaps": noise(dtype, 6, 4)[::2, ::3],
        "expanded": noise(dtype, 1, 3).expand(4, 3),
        "scalar": noise(dtype),
        "empty": noise(dtype, 0),
        "whole": whole,
        "part": whole[2:5].t(),
    }
    with mapped(seal(weights)) as buffer:
        state = tensors(buffer)
        for each, tensor in weights.items():
            assert state[each].dtype is dtype
            assert bits(state[each]) == bits(tensor)
        assert state["part"].stride() == (1, 4)
        assert state["part"].untyped_storage().data_ptr() == state["whole"].data_ptr()


def test_a_tie_comes_out_as_one_tensor_and_costs_once():
    shared = noise(torch.float32, 8, 4)
    weights = {"a": shared, "other": torch.ones(3), "b": shared.view(8, 4), "t": shared.t()}
    assert data_bytes(weights) == [128, 12]
    with mapped(seal(weights)) as buffer:
        state = tensors(buffer)
        assert state["a"] is state["b"]
        assert state["t"].data_ptr() == state["a"].data_ptr()
        state["a"].zero_()
        assert not state["t"].any()


def test_views_that_do_not_overlap_take_their_own_bytes_only():
    storage = big_storage()
    weights = {"a": storage[10:20], "b": storage[20:25], "c": storage[999_990:]}
    assert data_bytes(weights) == [40, 20, 40]
    with mapped(seal(weights)) as buffer:
        assert len(buffer) <= 8192
        state = tensors(buffer)
        assert {tensor.untyped_storage().nbytes() for tensor in state.values()} == {40, 20}
        assert state["c"][-1] == 999_999


def test_an_alias_group_takes_only_the_bytes_between_its_ends():
    """Aligned to its widest member, so at most a few more."""
    storage = big_storage()
    weights = {"a": storage[11:20], "b": storage[15:27]}
    assert data_bytes(weights) == [64]
    words = storage.view(torch.float64)
    weights = {"floats": storage[11:20], "doubles": words[7:9]}
    assert data_bytes(weights) == [40]
    with mapped(seal(weights)) as buffer:
        state = tensors(buffer)
        for name, tensor in weights.items():
            assert bits(state[name]) == bits(tensor)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[:, ::2],
        lambda t: t[3:5, 7:9],
        lambda t: t[:, 5],
        lambda t: t.t()[::3],
        lambda t: t.view(10, 10, 1000).permute(1, 2, 0)[:, ::7, ::3],
    ],
)
def test_gaps_are_not_held(view):
    """What is alone is stored as a clone would be, whatever lies between its elements."""
    tensor = view(big_storage()[:100_000].view(100, 1000))
    clone = tensor.clone()
    assert data_bytes({"t": tensor}) == [clone.numel() * 4]
    with mapped(seal({"t": tensor})) as buffer:
        held = tensors(buffer)["t"]
        assert held.stride() == clone.stride()
        assert torch.equal(held, clone)


def test_an_expanded_column_keeps_its_expansion_but_not_its_gaps():
    tensor = big_storage()[:4096].view(64, 64)[:, 3:4].expand(64, 50)
    assert data_bytes({"t": tensor}) == [256]
    with mapped(seal({"t": tensor})) as buffer:
        held = tensors(buffer)["t"]
        assert held.stride() == (1, 0)
        assert torch.equal(held, tensor)


def test_two_storages_over_the_same_memory_are_one_group():
    raw = bytearray(range(64))
    weights = {
        "short": torch.frombuffer(raw, dtype=torch.uint8, count=16),
        "long": torch.frombuffer(raw, dtype=torch.uint8, count=64)[8:],
    }
    assert data_bytes(weights) == [64]
    with mapped(seal(weights)) as buffer:
        assert bytes(tensors(buffer)["long"].tolist()) == bytes(range(8, 64))


def test_a_module_comes_out_with_its_kinds_and_ties():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = torch.nn.Embedding(7, 4)
            self.norm = torch.nn.BatchNorm1d(4)
            self.register_buffer("table", torch.arange(6.0), persistent=False)
            self.head = torch.nn.Linear(4, 7, bias=False)
            self.head.weight = self.emb.weight
            self.again = self.norm

    model = Model()
    expected = {**model.state_dict(), "table": model.table}
    with mapped(seal(model)) as buffer:
        state = tensors(buffer)
        assert list(state) == list(expected)
        for name, tensor in expected.items():
            assert torch.equal(state[name], tensor)
        assert state["head.weight"] is state["emb.weight"]
        assert state["again.running_var"] is state["norm.running_var"]
        kinds = {entry.name: entry.kind for entry in entries(buffer)}
    assert kinds["emb.weight"] is kinds["head.weight"] is Kind.PARAMETER
    assert kinds["norm.num_batches_tracked"] is Kind.BUFFER
    assert kinds["table"] is Kind.NON_PERSISTENT_BUFFER


def test_a_state_dict_says_nothing_about_kinds():
    manifest = decode_manifest(publish.plan({"a": torch.ones(2)}).manifest)
    assert [entry.kind for entry in manifest.tensors] == [Kind.TENSOR]


def test_a_default_device_elsewhere_does_not_change_what_is_written():
    tensor = noise(torch.float32, 6, 4)[:, ::2]
    with torch.device("meta"):
        fd = seal({"t": tensor})
    with mapped(fd) as buffer:
        assert bits(tensors(buffer)["t"]) == bits(tensor)


DTYPES = st.sampled_from(
    [torch.uint8, torch.bool, torch.bfloat16, torch.int32, torch.float64, torch.complex128]
)


@st.composite
def tables(draw):
    """Draw a state dict of random views of a few storages."""
    storages = [
        noise(torch.uint8, draw(st.sampled_from([0, 16, 96, 400])))
        for _ in range(draw(st.integers(1, 3)))
    ]
    weights: dict[str, torch.Tensor] = {}
    for number in range(draw(st.integers(0, 7))):
        dtype = draw(DTYPES)
        flat = draw(st.sampled_from(storages)).view(dtype)
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        strides = draw(st.lists(st.integers(0, 6), min_size=len(shape), max_size=len(shape)))
        offset = draw(st.integers(0, 5))
        reach = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        if 0 in shape or offset + reach < flat.numel():
            tensor = flat.as_strided(shape, strides, offset if 0 not in shape else 0)
            tied = list(weights.values()) if draw(st.booleans()) else []
            weights[f"t{number}"] = draw(st.sampled_from(tied)) if tied else tensor
    return weights


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(tables())
def test_any_table_comes_out_with_its_bits_and_its_aliases(weights):
    """Whatever shares bytes before shares them after, and nothing else does."""
    with mapped(seal(weights)) as buffer:
        state = tensors(buffer)
        assert list(state) == list(weights)
        for name, tensor in weights.items():
            assert (state[name].dtype, state[name].shape) == (tensor.dtype, tensor.shape)
            assert bits(state[name]) == bits(tensor)
            for other, peer in weights.items():
                if peer is tensor:
                    assert state[name] is state[other]
        # Change a byte of each in turn, here and there: the same tensors must see it.
        for name in [name for name, tensor in weights.items() if tensor.numel()]:
            for tensor in (weights[name], state[name]):
                ctypes.c_ubyte.from_address(tensor.data_ptr()).value ^= 1
            for other, tensor in weights.items():
                assert bits(state[other]) == bits(tensor)


# --- refusals -----------------------------------------------------------------------------------


class Subclass(torch.Tensor):
    pass


def freed():
    tensor = torch.ones(1024)
    tensor.untyped_storage().resize_(0)
    return tensor


def shrunk():
    tensor = torch.ones(1024)
    tensor.untyped_storage().resize_(8)
    return tensor


def nested():
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def of_less_than_a_byte():
    return torch.quantize_per_tensor(torch.ones(4, 2), 1.0, 0, torch.quint4x2)


class Own:
    """An object that only its own process knows how to make."""


REFUSED: dict[str, tuple[Callable[[], object], str, str]] = {
    "meta": (lambda: torch.ones(3, device="meta"), "meta device", "real weights"),
    "meta_without_bytes": (lambda: torch.ones(0, device="meta"), "meta device", "real weights"),
    "sparse_on_meta": (lambda: torch.eye(3).to_sparse().to("meta"), "meta device", "real weights"),
    "mkldnn": (lambda: torch.ones(3).to_mkldnn(), "torch._mkldnn", ".to_dense()"),
    "nested": (nested, "nested", ".unbind()"),
    "quantised_below_a_byte": (
        of_less_than_a_byte,
        "legacy quantised dtype torch.quint4x2",
        ".dequantize()",
    ),
    "subclass": (lambda: torch.ones(3).as_subclass(Subclass), "subclass Subclass", "plain tensor"),
    "subclass_parameter": (
        lambda: torch.nn.Parameter(torch.ones(3).as_subclass(Subclass)),
        "subclass Subclass",
        "plain tensor",
    ),
    "uninitialised": (torch.nn.UninitializedParameter, "UninitializedParameter", "plain tensor"),
    "freed": (freed, "freed or shrunk", "gather"),
    "shrunk": (shrunk, "freed or shrunk", "gather"),
    "function": (lambda: len, "of type builtin_function_or_method", "leave it out"),
    "lambda_within": (lambda: {"a": [1, lambda: 3]}, "of type function, at ['a'][1]", "leave it"),
    "object": (Own, "of type Own", "leave it out"),
    "class": (lambda: Own, "of type type", "leave it out"),
    "meta_within": (lambda: [torch.ones(3, device="meta")], "no bytes, at [0] of it", "real wei"),
    "subclass_within": (
        lambda: (torch.ones(3).as_subclass(Subclass),),
        "subclass Subclass, at [0]",
        "plain tensor",
    ),
    "huge_stride": (
        lambda: torch.ones(1).as_strided((1, 1), (1 << 60, 1)),
        "too large",
        ".clone()",
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:.*quantize")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_segment_cannot_hold_is_refused_by_name(kind):
    make, why, remedy = REFUSED[kind]
    with pytest.raises(TensorRefused, match=re.escape(why)) as caught:
        publish.plan({"fine": torch.ones(2), "the.bad": make()})
    assert caught.value.name == "the.bad"
    assert why in caught.value.kind
    assert remedy in caught.value.remedy


def test_a_training_checkpoint_with_objects_is_refused_with_where_its_weights_are():
    checkpoint = {"epoch": 3, "optimizer": {"lr": Own()}, "model": {"w": torch.ones(2)}}
    with pytest.raises(TensorRefused, match="optimizer") as caught:
        publish.plan(checkpoint)
    assert "at ['lr'] of it" in caught.value.kind
    assert "return the inner dict of tensors, e.g. checkpoint['model']" in caught.value.remedy


@pytest.mark.parametrize("name", [3, None, b"a", "\ud800"])
def test_an_odd_name_is_refused(name):
    with pytest.raises(TensorRefused, match="name") as caught:
        publish.plan({name: torch.ones(2)})
    assert "text" in caught.value.remedy


def test_a_name_that_comes_twice_is_refused():
    class Twice(dict):
        def items(self):
            return [("a", torch.ones(1)), ("a", torch.ones(2))]

    with pytest.raises(ArgumentRefused, match="twice"):
        publish.plan(Twice())


@pytest.mark.parametrize("weights", [None, [torch.ones(2)], torch.ones(2), "model.safetensors"])
def test_what_is_neither_module_nor_state_dict_is_refused(weights):
    with pytest.raises(ArgumentRefused, match="a module or a state dict"):
        publish.plan(weights)


# --- the fill -----------------------------------------------------------------------------------


def test_a_segment_of_another_size_is_not_written_to():
    plan = publish.plan({"a": torch.ones(2)})
    fd = segment.create(GEN)
    os.posix_fallocate(fd, 0, plan.size_bytes + 4096)
    with pytest.raises(SegmentRefused, match="reserved"):
        publish.fill(fd, plan)
    assert os.pread(fd, 1 << 20, 0) == bytes(plan.size_bytes + 4096)
    os.close(fd)


@pytest.mark.parametrize("sealed", [False, True])
def test_nothing_keeps_a_source_after_the_fill(sealed):
    """Whether it succeeds or fails, and though the plan is still there."""
    tensor, gaps = torch.ones(100), torch.ones(100)[::2]
    storage = tensor.untyped_storage()
    ends: list[weakref.ref] = [weakref.ref(tensor), weakref.ref(storage), weakref.ref(gaps)]
    plan = publish.plan({"a": tensor, "view": tensor[3:], "gaps": gaps})
    fd = segment.create(GEN)
    os.posix_fallocate(fd, 0, plan.size_bytes)
    if sealed:
        fcntl.fcntl(fd, segment.F_ADD_SEALS, segment.SEALS)
        with pytest.raises(OSError, match="not permitted"):
            publish.fill(fd, plan)
    else:
        publish.fill(fd, plan)
    del tensor, storage, gaps
    gc.collect()
    assert [end() for end in ends] == [None] * 3
    assert plan.groups == []
    os.close(fd)
