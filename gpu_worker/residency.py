"""Where bytes go on a device, and in which passes. Pure: sizes in, places out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

PASS_BYTES = 64 * 1024 * 1024
"""The most that is moved in one go. Who waits for the load lock waits for about one of these."""

ALIGNMENT_BYTES = 512
"""Of what torch's own allocator gives on a device: kernels may count on it."""


def layout(sizes_bytes: Iterable[int]) -> tuple[list[int], int]:
    """Return an offset for each of `sizes_bytes`, one behind the other, and the bytes of all."""
    offsets, end = [], 0
    for size_bytes in sizes_bytes:
        offsets.append(end)
        end += -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets, end


def passes(sizes_bytes: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield what to move in each pass: (index, offset in it, bytes), all of them in order.

    Small ones go together, large ones in parts.
    """
    batch: list[tuple[int, int, int]] = []
    left_bytes = PASS_BYTES
    for index, size_bytes in enumerate(sizes_bytes):
        begin = 0
        while begin < size_bytes:
            part_bytes = min(size_bytes - begin, left_bytes)
            batch.append((index, begin, part_bytes))
            begin += part_bytes
            left_bytes -= part_bytes
            if not left_bytes:
                yield batch
                batch, left_bytes = [], PASS_BYTES
    if batch:
        yield batch


def partial(parts: Sequence[tuple[str, int]], room_bytes: int) -> tuple[frozenset[str], int] | None:
    """Choose what of a module stays on a device that is too small for all of it.

    In module order, so that the part which is brought for each use is one stretch at its end. The
    largest sum of those that are in use at once, a module and those around it, has room beside.

    Args:
        parts: the bytes that each module has by itself, without its children, by its exact name, in
            module order; several names may share tensors, which count with the first.
        room_bytes: what may be taken in all.

    Returns:
        The names of those that stay, as many as fit, and the bytes beside them in which the others
        take turns. None if not even one at a time fits.
    """
    for count in range(len(parts), -1, -1):
        beside_bytes = _at_once_bytes(parts[count:])
        stay_bytes = layout([size_bytes for _, size_bytes in parts[:count]])[1]
        if stay_bytes + beside_bytes <= room_bytes:
            return frozenset(name for name, _ in parts[:count]), beside_bytes
    return None


def _at_once_bytes(parts: Sequence[tuple[str, int]]) -> int:
    """Return the most that is in use at once: a module runs inside of those around it."""
    sizes = {name: layout([size_bytes])[1] for name, size_bytes in parts}
    most_bytes = 0
    for name in sizes:
        around = [name[:end] for end in range(len(name)) if name[end] == "."]
        chain = [*([""] if name else []), *around, name]
        most_bytes = max(most_bytes, sum(sizes.get(one, 0) for one in chain))
    return most_bytes
