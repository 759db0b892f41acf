"""Sparse and quantised tensors, every dtype and layout of torch: held to the bit, or refused."""

import pytest
import torch

from gpu_worker import dtypes, publish
from gpu_worker.tensors import tensors
from gpu_worker.wrappers import plain_parts
from shm_store.errors import TensorRefused
from tests.gpu_worker.sealed import bits, in_map, mapped, seal
from tests.gpu_worker.wrapped import scaled

# --- sparse, legacy quantised -------------------------------------------------------------------


def blocks():
    return torch.eye(4).repeat(2, 2) * torch.arange(1.0, 9)


def coo(indices, values, shape):
    return torch.sparse_coo_tensor(torch.tensor(indices), values, shape, check_invariants=True)


def uncoalesced():
    return coo([[0, 0, 2], [1, 1, 0]], torch.tensor([1.0, 2.0, 3.0]), (3, 4))


def hybrid():
    return coo([[2, 0]], torch.ones(2, 5), (3, 5))


SPARSE = {
    "coo": lambda: blocks().to_sparse(),
    "coo_uncoalesced": uncoalesced,
    "coo_hybrid": hybrid,
    "coo_empty": lambda: torch.zeros(3, 4).to_sparse(),
    "coo_bool": lambda: blocks().bool().to_sparse(),
    "coo_bf16": lambda: blocks().bfloat16().to_sparse(),
    "csr": lambda: blocks().to_sparse_csr(),
    "csc": lambda: blocks().to_sparse_csc(),
    "bsr": lambda: blocks().to_sparse_bsr((2, 2)),
    "bsc": lambda: blocks().to_sparse_bsc((2, 4)),
    "parameter": lambda: torch.nn.Parameter(blocks().to_sparse()),
}


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("kind", SPARSE)
def test_a_sparse_tensor_comes_out_as_it_was_over_the_shared_bytes(kind):
    made = SPARSE[kind]()
    with mapped(seal({"w": made})) as buffer:
        held = tensors(buffer)["w"]
        assert (held.layout, held.dtype, held.shape) == (made.layout, made.dtype, made.shape)
        assert type(held) is torch.Tensor and not held.requires_grad
        for mine, its in zip(plain_parts(held), plain_parts(made.detach()), strict=True):
            assert bits(mine) == bits(its) and mine.dtype is its.dtype
            assert in_map(buffer, mine) or not mine.numel()
        if made.layout is torch.sparse_coo:
            assert held.is_coalesced() is made.is_coalesced()


def per_tensor(dtype):
    return lambda: torch.quantize_per_tensor(torch.arange(12.0).view(3, 4) - 5, 0.25, 3, dtype)


def per_channel():
    scales, zeros = torch.tensor([0.5, 0.25, 2.0]), torch.tensor([1, 0, 2])
    return torch.quantize_per_channel(torch.ones(4, 3), scales, zeros, 1, torch.qint8)


QUANTISED = {
    "qint8": per_tensor(torch.qint8),
    "quint8": per_tensor(torch.quint8),
    "qint32": per_tensor(torch.qint32),
    "transposed": lambda: per_tensor(torch.qint8)().t(),
    "a_part": lambda: per_tensor(torch.qint8)()[1:, 1:3],
    "per_channel": per_channel,
}


@pytest.mark.filterwarnings("ignore:.*quantize")
@pytest.mark.parametrize("kind", QUANTISED)
def test_a_legacy_quantised_tensor_comes_out_as_it_was_over_the_shared_bytes(kind):
    made = QUANTISED[kind]()
    with mapped(seal({"w": made})) as buffer:
        held = tensors(buffer)["w"]
        assert torch.equal(held, made) and held.dtype is made.dtype
        assert held.qscheme() == made.qscheme()
        assert torch.equal(held.int_repr(), made.int_repr())
        assert in_map(buffer, held)


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_a_legacy_quantised_tensor_whose_memory_is_gone_is_refused():
    made = per_tensor(torch.qint8)()
    made.untyped_storage().resize_(0)
    with pytest.raises(TensorRefused, match="freed or shrunk"):
        publish.plan({"w": made})
    assert made.untyped_storage().nbytes() == 0


# --- every dtype and layout of torch ------------------------------------------------------------

ALL_DTYPES = sorted({str(one) for one in vars(torch).values() if isinstance(one, torch.dtype)})
BELOW_A_BYTE = ("torch.quint4x2", "torch.quint2x4")


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", [one for one in ALL_DTYPES if not one.startswith("torch.q")])
def test_every_dtype_of_torch_comes_out_bit_by_bit(name):
    """Those that the manifest has a name for, and all others: packed bits, 4-bit integers, ..."""
    dtype = getattr(torch, name.removeprefix("torch."))
    raw = torch.arange(32 * dtype.itemsize).to(torch.uint8)
    if dtype is torch.bool:
        raw = raw % 2
    whole = raw.view(dtype).view(8, 4)
    weights = {
        "whole": whole,
        "view": whole[2:5].t(),
        "gaps": raw.clone().view(dtype)[::3],
        "expanded": raw.clone().view(dtype)[:3].expand(2, 3),
        "scalar": raw.clone().view(dtype)[0],
        "empty": raw[:0].view(dtype),
        "parameter": torch.nn.Parameter(raw.clone().view(dtype), requires_grad=False),
    }
    with mapped(seal(weights)) as buffer:
        state = tensors(buffer)
        assert list(state) == list(weights)
        for each, tensor in weights.items():
            held = state[each]
            assert (held.dtype, held.shape) == (dtype, tensor.shape)
            assert bits(held) == bits(tensor)
            assert in_map(buffer, held) or not held.numel()
        assert state["view"].data_ptr() == state["whole"].data_ptr() + 8 * dtype.itemsize
        assert state["view"].stride() == (1, 4) and state["expanded"].stride() == (0, 1)


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_every_quantised_dtype_is_held_or_refused():
    held = {str(make().dtype) for kind, make in QUANTISED.items() if kind != "per_channel"}
    known = {one for one in ALL_DTYPES if one.startswith("torch.q")}
    assert known == held | set(BELOW_A_BYTE)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_conjugated_half_complex_tensor_comes_out_as_it_reads():
    tensor = torch.arange(16, dtype=torch.float16).view(torch.complex32).conj()
    with mapped(seal({"w": tensor})) as buffer:
        assert torch.equal(
            torch.view_as_real(tensors(buffer)["w"]), torch.view_as_real(tensor.resolve_conj())
        )


def test_every_layout_of_torch_is_held_or_refused():
    """What is not held is not made of tensors that could be named."""
    known = {one for one in vars(torch).values() if isinstance(one, torch.layout)}
    held = {torch.strided, *(make().layout for make in SPARSE.values())}
    assert {str(one) for one in known - held} == {"torch._mkldnn", "torch.jagged"}


def test_a_dtype_that_is_not_known_at_all_is_refused_by_name(monkeypatch):
    """As one of a newer torch may be."""
    monkeypatch.delitem(dtypes.NAMES, torch.float64)
    double = torch.ones(2, dtype=torch.float64)
    for value in (double, [double], scaled(layout=[double])):
        with pytest.raises(TensorRefused, match=r"dtype torch\.float64 is not supported"):
            publish.plan({"w": value})
