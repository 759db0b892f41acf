"""Where tensors go in a segment: sizes to offsets. Pure arithmetic.

A segment is: the preamble (one page, written by the coordinator), the manifest (its length, then
its bytes), then the tensor bytes. Tensor bytes are placed by *alias group*: all tensors that
overlap in memory form one group, every other tensor its own. Groups start at multiples of 64 bytes
(a cache line, and the widest vector load).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import mul

PREAMBLE_BYTES = 4096
MANIFEST_LENGTH_BYTES = 8
ALIGNMENT_BYTES = 64
PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 * 1024 * 1024

ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F4": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
    "C128": 16,
}
"""Bytes of one element, by dtype. The names are those of the safetensors format, and `C128`.

An `F4` element is a byte with two 4-bit floats, as torch's `float4_e2m1fn_x2` counts them (the file
format counts the halves). The format's 6-bit kinds have no torch dtype and are not here.
"""


def round_up(size: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `size`."""
    return -(-size // step) * step


def extent_elements(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the elements from a tensor's first to its last, both and the gaps between counted.

    Args:
        shape: elements per dimension.
        strides: elements, never negative; 0 in an expanded dimension.

    Raises:
        ValueError: not as many strides as dimensions.
    """
    if len(shape) != len(strides):
        raise ValueError(f"{len(shape)} dimensions with {len(strides)} strides")
    # The sum of (size - 1) * stride, in the form that is twice as fast.
    return 0 if 0 in shape else sum(map(mul, shape, strides)) - sum(strides) + 1


def extent_bytes(dtype: str, shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the bytes from a tensor's first element to the end of its last.

    Args:
        dtype: a name in `ITEM_BYTES`.
        shape: elements per dimension.
        strides: elements, as `extent_elements` takes them.
    """
    return extent_elements(shape, strides) * ITEM_BYTES[dtype]


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return torch's strides, in elements, of a contiguous tensor of `shape`."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def place(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Place regions of these sizes one after the other, each at a multiple of 64 bytes.

    Returns:
        The offset of each, and the bytes they take together. A region of no bytes takes none.
    """
    offsets = []
    end = 0
    for size in sizes:
        start = round_up(end, ALIGNMENT_BYTES)
        offsets.append(start)
        end = start + size if size else end
    return offsets, end


def data_start(manifest_bytes: int) -> int:
    """Return where tensor bytes begin in a segment whose manifest has `manifest_bytes`."""
    return round_up(PREAMBLE_BYTES + MANIFEST_LENGTH_BYTES + manifest_bytes, ALIGNMENT_BYTES)


def segment_bytes(manifest_bytes: int, data_bytes: int) -> int:
    """Return the size of a segment, in whole pages: of 2 MiB once it is larger than one of those.

    Only then can the kernel collapse all of it to huge pages.
    """
    size = data_start(manifest_bytes) + data_bytes
    return round_up(size, HUGE_PAGE_BYTES if size > HUGE_PAGE_BYTES else PAGE_BYTES)
