"""Where tensors go: aligned, apart, and as torch counts them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shm_store import layout
from shm_store.layout import (
    ALIGNMENT_BYTES,
    HUGE_PAGE_BYTES,
    ITEM_BYTES,
    MANIFEST_LENGTH_BYTES,
    PAGE_BYTES,
    PREAMBLE_BYTES,
)

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F4": torch.float4_e2m1fn_x2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "C128": torch.complex128,
}

sizes = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 1 << 40)), max_size=40)
shapes = st.lists(st.integers(0, 6), max_size=5)


@given(sizes)
def test_regions_are_aligned_in_order_and_apart(sizes: list[int]) -> None:
    """Each starts at a multiple of 64 bytes, behind the end of the one before it."""
    offsets, total = layout.place(sizes)
    assert len(offsets) == len(sizes)
    end = 0
    for offset, size in zip(offsets, sizes, strict=True):
        assert offset % ALIGNMENT_BYTES == 0
        assert end <= offset < end + ALIGNMENT_BYTES
        end = offset + size if size else end
    assert total == end


@given(sizes)
def test_regions_of_no_bytes_cost_nothing(sizes: list[int]) -> None:
    """They have a place inside the segment, and the others lie as if they were not there."""
    offsets, total = layout.place(sizes)
    filled = [offset for offset, size in zip(offsets, sizes, strict=True) if size]
    assert layout.place(size for size in sizes if size) == (filled, total)
    assert all(offset <= layout.round_up(total, ALIGNMENT_BYTES) for offset in offsets)


@given(st.sampled_from(sorted(ITEM_BYTES)), shapes, st.data())
def test_extents_are_those_of_torch(dtype: str, shape: list[int], data: st.DataObject) -> None:
    """A tensor of any shape and strides, expanded ones included, reaches as far as torch says."""
    strides = data.draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    tensor = torch.empty_strided(shape, strides, dtype=TORCH_DTYPES[dtype], device="meta")
    assert layout.extent_bytes(dtype, shape, strides) == tensor.untyped_storage().nbytes()


@given(shapes)
def test_contiguous_strides_are_those_of_torch(shape: list[int]) -> None:
    """Also with dimensions of no or of one element, and with no dimension."""
    assert layout.contiguous_strides(shape) == torch.empty(shape, device="meta").stride()


@pytest.mark.parametrize(
    ("view", "elements"),
    [
        (torch.empty(2, 3, 4, device="meta").permute(2, 0, 1), 24),
        (torch.empty(1, device="meta").expand(1000), 1),
        (torch.empty(8, 8, device="meta")[:, 2], 57),
        (torch.empty(8, 8, device="meta")[::2], 56),
        (torch.empty(2, 3, 5, 7, device="meta").to(memory_format=torch.channels_last), 210),
        (torch.empty((), device="meta"), 1),
        (torch.empty(3, 0, device="meta"), 0),
    ],
    ids=["permuted", "expanded", "column", "every other row", "channels last", "0-d", "empty"],
)
def test_the_extent_of_a_view_is_from_its_first_element_to_its_last(
    view: torch.Tensor, elements: int
) -> None:
    """Not the product of its shape."""
    assert layout.extent_bytes("F32", view.shape, view.stride()) == elements * 4


def test_strides_must_fit_the_shape() -> None:
    """A caller that mixes up two tensors is told."""
    with pytest.raises(ValueError):
        layout.extent_bytes("F32", (2, 3), (1,))


def test_every_dtype_has_the_size_that_torch_gives_it() -> None:
    """All a safetensors file can hold and torch knows, and complex128."""
    assert {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()} == ITEM_BYTES


@given(st.integers(0, 1 << 40))
def test_tensor_bytes_begin_aligned_right_behind_the_manifest(manifest_bytes: int) -> None:
    """At the first multiple of 64 after preamble, length and manifest."""
    end = PREAMBLE_BYTES + MANIFEST_LENGTH_BYTES + manifest_bytes
    start = layout.data_start(manifest_bytes)
    assert start % ALIGNMENT_BYTES == 0
    assert end <= start < end + ALIGNMENT_BYTES


@given(
    st.integers(0, 1 << 20),
    st.one_of(
        st.integers(0, 1 << 45),
        st.integers(HUGE_PAGE_BYTES - 3 * PAGE_BYTES, HUGE_PAGE_BYTES + PAGE_BYTES),
    ),
)
def test_a_segment_is_the_fewest_whole_pages_that_hold_it(manifest: int, data: int) -> None:
    """Pages of 4 KiB, or of 2 MiB once it is larger than one of those."""
    needed = layout.data_start(manifest) + data
    size = layout.segment_bytes(manifest, data)
    page = PAGE_BYTES if needed <= HUGE_PAGE_BYTES else HUGE_PAGE_BYTES
    assert size % page == 0
    assert needed <= size < needed + page


def test_the_step_to_huge_pages() -> None:
    """One of them exactly is still one; a byte more takes two."""
    room = HUGE_PAGE_BYTES - layout.data_start(0)
    assert layout.segment_bytes(0, room) == HUGE_PAGE_BYTES
    assert layout.segment_bytes(0, room + 1) == 2 * HUGE_PAGE_BYTES
    assert layout.segment_bytes(0, 0) == 2 * PAGE_BYTES


@given(sizes, st.integers(0, 5000))
def test_every_region_lies_inside_its_segment(sizes: list[int], manifest_bytes: int) -> None:
    """Regions of no bytes too: a view at their offset is inside the mapping."""
    offsets, total = layout.place(sizes)
    size = layout.segment_bytes(manifest_bytes, total)
    start = layout.data_start(manifest_bytes)
    for offset, length in zip(offsets, sizes, strict=True):
        assert start + offset + length <= size


@given(st.integers(0, 1 << 60), st.integers(1, 1 << 30))
def test_rounding_up_is_exact(size: int, step: int) -> None:
    """In whole numbers, however large."""
    assert 0 <= layout.round_up(size, step) - size < step
    assert layout.round_up(size, step) % step == 0
