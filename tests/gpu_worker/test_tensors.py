"""From a manifest to tensors: each group its own storage, and no lie reaches out of it."""

import copy
import ctypes
import io
import os
import pickle

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from gpu_worker import dtypes
from gpu_worker.tensors import entries, tensors
from shm_store import segment
from shm_store.errors import PlatformUnsupported, SegmentRefused
from shm_store.layout import ITEM_BYTES, contiguous_strides
from shm_store.manifest import GroupEntry, Kind, TensorEntry
from tests.gpu_worker.sealed import GEN, PREAMBLE, bits, mapped, seal, seal_manifest


def entry(name="a", dtype="F32", shape=(4,), strides=(1,), group=0, offset_bytes=0):
    return TensorEntry(name, dtype, shape, strides, group, offset_bytes)


def storage_of(tensor):
    """Return the identity of its storage: two storages over the same bytes differ."""
    return tensor.untyped_storage()._cdata


# --- dtypes -------------------------------------------------------------------------------------


def test_every_dtype_of_a_segment_has_one_of_torch_and_back():
    """Complete both ways on the tested torch, and of the same size."""
    assert set(dtypes.TORCH_DTYPES) == set(ITEM_BYTES)
    for name, dtype in dtypes.TORCH_DTYPES.items():
        assert dtype.itemsize == ITEM_BYTES[name]
        assert dtypes.NAMES[dtype] == name
        assert dtypes.torch_dtype(name) is dtype
    assert len(dtypes.NAMES) == len(ITEM_BYTES)


def test_a_dtype_that_an_older_torch_lacks_is_refused_by_name(monkeypatch):
    monkeypatch.delitem(dtypes.TORCH_DTYPES, "F4")
    with (
        mapped(seal_manifest([entry(dtype="F4")], [GroupEntry(0, 4)])) as buffer,
        pytest.raises(PlatformUnsupported, match="float4_e2m1fn_x2") as caught,
    ):
        tensors(buffer)
    assert caught.value.remedy == "install a newer torch"


def test_an_unknown_dtype_is_refused():
    with pytest.raises(SegmentRefused, match="F6_E2M3"):
        dtypes.torch_dtype("F6_E2M3")


# --- storages -----------------------------------------------------------------------------------


@pytest.fixture
def small_and_big():
    """A tensor of 1.5 KB beside one of 8 MB."""
    weights = {"small": torch.arange(384.0), "big": torch.ones(2_000_000), "last": torch.ones(7)}
    with mapped(seal(weights)) as buffer:
        yield buffer


def test_saving_or_copying_a_small_tensor_takes_its_own_bytes_only(small_and_big):
    small = tensors(small_and_big)["small"]
    saved = io.BytesIO()
    torch.save(small, saved)
    assert len(saved.getvalue()) < 4096
    assert len(pickle.dumps(small)) < 4096
    assert copy.deepcopy(small).untyped_storage().nbytes() == 1536
    assert torch.equal(pickle.loads(pickle.dumps(small)), small)


def test_each_tensor_is_the_whole_of_its_storage(small_and_big):
    for tensor in tensors(small_and_big).values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * 4
        assert tensor.storage_offset() == 0
        assert tensor.data_ptr() % 64 == 0
        assert not tensor.requires_grad
        assert tensor.is_leaf


def test_tensors_lie_in_the_map(small_and_big):
    address = ctypes.addressof(small_and_big)
    for tensor in tensors(small_and_big).values():
        assert tensor.data_ptr() in range(address, address + len(small_and_big))


def test_growing_a_tensor_does_not_walk_over_its_neighbour(small_and_big):
    state = tensors(small_and_big)
    with pytest.raises(RuntimeError):
        state["small"].resize_(500)
    assert torch.equal(state["big"], torch.ones(2_000_000))


def test_sharing_a_tensor_moves_it_alone(small_and_big):
    """As torch.multiprocessing does with what it sends."""
    state = tensors(small_and_big)
    state["small"].share_memory_()
    assert state["small"].is_shared()
    assert state["small"].untyped_storage().nbytes() == 1536
    assert torch.equal(state["small"], torch.arange(384.0))
    assert not state["big"].is_shared()


def test_tensors_made_in_inference_mode_can_be_edited_outside_of_it(small_and_big):
    """They may be cached, and handed to a caller that is not in that mode."""
    with torch.inference_mode():
        state = tensors(small_and_big)
    assert not state["small"].is_inference()
    state["small"].add_(1)
    assert state["small"][0] == 1


def test_a_default_device_does_not_move_the_weights():
    with mapped(seal({"none": torch.empty(0, 3), "a": torch.ones(2, 2)})) as buffer:
        with torch.device("meta"):
            state = tensors(buffer)
        assert {tensor.device.type for tensor in state.values()} == {"cpu"}


def test_entries_say_what_each_tensor_was():
    module = torch.nn.BatchNorm1d(3)
    module.register_buffer("scratch", torch.ones(2), persistent=False)
    with mapped(seal(module)) as buffer:
        kinds = {entry.name: entry.kind for entry in entries(buffer)}
        assert list(kinds) == list(tensors(buffer))
        assert entries(buffer) is entries(buffer)
    assert kinds == {
        "weight": Kind.PARAMETER,
        "bias": Kind.PARAMETER,
        "running_mean": Kind.BUFFER,
        "running_var": Kind.BUFFER,
        "num_batches_tracked": Kind.BUFFER,
        "scratch": Kind.NON_PERSISTENT_BUFFER,
    }


# --- alias groups -------------------------------------------------------------------------------


def test_members_of_a_group_share_one_storage_whatever_their_dtypes():
    """A group of 12 bytes holds floats, their bytes, one double, and the same floats again."""
    entries = [
        entry("floats", "F32", (3,), (1,)),
        entry("bytes", "U8", (2, 4), (4, 1), 0, 4),
        entry("double", "F64", (), (), 0, 0),
        entry("again", "F32", (3,), (1,)),
        entry("tail", "F32", (2,), (1,), 0, 4),
        entry("expanded", "F32", (5, 2), (0, 1), 0, 4),
    ]
    with mapped(seal_manifest(entries, [GroupEntry(64, 12)])) as buffer:
        state = tensors(buffer)
        assert len({storage_of(tensor) for tensor in state.values()}) == 1
        assert {tensor.untyped_storage().nbytes() for tensor in state.values()} == {12}
        assert state["again"] is state["floats"]
        assert state["tail"] is not state["floats"]
        raw = bytes(range(64, 76))
        assert bits(state["floats"]) == raw
        assert bits(state["bytes"]) == raw[4:]
        assert bits(state["double"]) == raw[:8]
        assert bits(state["expanded"]) == raw[4:] * 5
        assert state["expanded"].stride() == (0, 1)
        state["bytes"].zero_()
        assert bits(state["floats"]) == raw[:4] + bytes(8)


def test_a_group_that_begins_with_a_part_of_it_is_one_storage_too():
    entries = [entry("part", "F32", (2,), (2,)), entry("whole", "F32", (4,), (1,))]
    with mapped(seal_manifest(entries, [GroupEntry(0, 16)])) as buffer:
        state = tensors(buffer)
        assert storage_of(state["part"]) == storage_of(state["whole"])
        state["part"].fill_(1.5)
        assert state["whole"][::2].tolist() == [1.5, 1.5]
        assert state["part"].untyped_storage().nbytes() == 16


# --- lies ---------------------------------------------------------------------------------------

LIES = {
    "group_beyond_the_segment": ([entry()], [GroupEntry(1 << 20, 16)]),
    "group_longer_than_the_segment": (
        [entry(shape=(1 << 20,))],
        [GroupEntry(0, 4 << 20)],
    ),
    "unused_group_beyond_the_segment": ([entry()], [GroupEntry(0, 16), GroupEntry(1 << 45, 1)]),
    "group_not_aligned": ([entry()], [GroupEntry(4, 16)]),
    "tensor_longer_than_its_group": ([entry(shape=(5,))], [GroupEntry(0, 16)]),
    "strides_out_of_its_group": ([entry(strides=(2,))], [GroupEntry(0, 16)]),
    "strides_beyond_64_bits": (
        [entry(shape=(2, 2, 2), strides=(1 << 49, 1 << 49, 1))],
        [GroupEntry(0, 16)],
    ),
    "sizes_and_strides_beyond_64_bits": (
        [entry(shape=(1 << 40,), strides=(1 << 24,))],
        [GroupEntry(0, 16)],
    ),
    "elements_beyond_64_bits": (
        [entry(shape=(1 << 49, 1 << 49), strides=(0, 0))],
        [GroupEntry(0, 4)],
    ),
    "offset_beyond_its_group": ([entry(offset_bytes=4)], [GroupEntry(0, 16)]),
    "offset_beyond_its_group_in_an_alias": (
        [entry(), entry("b", shape=(1,), offset_bytes=16)],
        [GroupEntry(0, 16)],
    ),
    "offset_of_an_empty_tensor_beyond_its_group": (
        [entry(shape=(0,), offset_bytes=64)],
        [GroupEntry(0, 16)],
    ),
    "misaligned_view": (
        [entry(), entry("b", shape=(1,), offset_bytes=2)],
        [GroupEntry(0, 16)],
    ),
    "misaligned_view_of_a_larger_dtype": (
        [entry(), entry("b", "F64", (1,), (1,), 0, 4)],
        [GroupEntry(0, 16)],
    ),
    "more_strides_than_dimensions": ([entry(strides=(1, 1))], [GroupEntry(0, 16)]),
    "fewer_strides_than_dimensions": ([entry(shape=(2, 2))], [GroupEntry(0, 16)]),
    "empty_with_more_strides": ([entry(shape=(0,), strides=(1, 1))], [GroupEntry(0, 0)]),
    "no_such_group": ([entry(group=1)], [GroupEntry(0, 16)]),
    "no_such_group_for_an_empty_tensor": ([entry(shape=(0,), group=3)], [GroupEntry(0, 0)]),
    "unknown_dtype": ([entry(dtype="F31")], [GroupEntry(0, 16)]),
    "two_of_one_name": ([entry(), entry(group=1)], [GroupEntry(0, 16), GroupEntry(64, 16)]),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_refused(lie):
    with mapped(seal_manifest(*LIES[lie])) as buffer, pytest.raises(SegmentRefused):
        tensors(buffer)


def test_a_manifest_longer_than_its_segment_is_refused():
    fd = segment.create(GEN)
    os.posix_fallocate(fd, 0, 8192)
    segment.write_at(fd, (1 << 40).to_bytes(8, "little"), 4096)
    segment.seal(fd, PREAMBLE)
    with mapped(fd) as buffer, pytest.raises(SegmentRefused, match="exceeds its segment"):
        tensors(buffer)


NEAR = st.sampled_from([0, 1, 2, 3, 4, 5, 8, 15, 16, 17, 64, 1 << 20, (1 << 50) - 1])
TABLES = st.tuples(
    st.lists(
        st.builds(
            TensorEntry,
            name=st.sampled_from("abcdef"),
            dtype=st.sampled_from([*ITEM_BYTES, "F31"]),
            shape=st.lists(NEAR, max_size=3).map(tuple),
            strides=st.lists(NEAR, max_size=3).map(tuple),
            group=st.integers(0, 3),
            offset_bytes=NEAR,
        ),
        max_size=4,
        unique_by=lambda entry: entry.name,
    ),
    st.lists(
        st.builds(
            GroupEntry,
            offset_bytes=st.sampled_from([0, 0, 64, 128, 4096 - 64, 4, 1 << 40]),
            size_bytes=st.sampled_from([0, 4, 16, 12, 64, 4096, 1 << 40]),
        ),
        max_size=3,
    ),
)


def repair(table):
    """Make most entries of a random table plausible, so that what is accepted is tried too."""
    entries, groups = table
    repaired = []
    for each in entries:
        strides = each.strides
        if len(strides) != len(each.shape) and each.offset_bytes != 17:
            strides = tuple(min(step, (1 << 50) - 1) for step in contiguous_strides(each.shape))
        repaired.append(
            TensorEntry(each.name, each.dtype, each.shape, strides, each.group, each.offset_bytes)
        )
    return repaired, groups


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(TABLES.map(repair))
def test_whatever_a_manifest_says_no_tensor_leaves_its_group(table):
    """It is refused, or every tensor lies within its group, and says the shape it was given."""
    entries, groups = table
    with mapped(seal_manifest(entries, groups)) as buffer:
        try:
            state = tensors(buffer)
        except SegmentRefused:
            return
        start = ctypes.addressof(buffer) + buffer.content()[1]
        storages: dict[int, int] = {}
        for each in entries:
            tensor = state[each.name]
            assert tuple(tensor.shape) == each.shape
            assert tensor.stride() == each.strides
            assert dtypes.NAMES[tensor.dtype] == each.dtype
            if tensor.numel():
                group = groups[each.group]
                low = start + group.offset_bytes
                reach = sum(
                    (n - 1) * step for n, step in zip(each.shape, each.strides, strict=True)
                )
                assert tensor.data_ptr() == low + each.offset_bytes
                end = tensor.data_ptr() + (reach + 1) * tensor.itemsize
                assert end <= low + group.size_bytes <= start + len(buffer)
                assert tensor.untyped_storage().data_ptr() == low
                assert storages.setdefault(each.group, storage_of(tensor)) == storage_of(tensor)
                assert tensor.untyped_storage().nbytes() == group.size_bytes
