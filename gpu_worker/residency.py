"""Where bytes go on a device, and in which passes. Pure: sizes in, places out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Plan:
    """What of a module stays on a device that is too small for all of it.

    Attributes:
        stay: the exact names of the modules whose tensors stay.
        beside_bytes: the room beside them in which the others take turns.
        offsets_bytes: where in that room each of the others goes.
    """

    stay: frozenset[str]
    beside_bytes: int
    offsets_bytes: dict[str, int]


def partial(parts: Sequence[tuple[str, int, int]], room_bytes: int) -> Plan | None:
    """Choose what of a module stays on a device that is too small for all of it: as much as fits.

    In module order, so that what is brought for each use is one stretch at its end. A module is in
    use inside of those around it, so these go side by side.

    Args:
        parts: of each module by itself, without its children: its exact name, the bytes that are
            not counted with an earlier one, and all of them. In module order.
        room_bytes: what may be taken in all.

    Returns:
        None if there is not even room for one at a time.
    """
    for count in range(len(parts), -1, -1):
        offsets, beside_bytes = _side_by_side(parts[count:])
        stay_bytes = sum(added_bytes for _, added_bytes, _ in parts[:count])
        if stay_bytes + beside_bytes <= room_bytes:
            return Plan(frozenset(name for name, _, _ in parts[:count]), beside_bytes, offsets)
    return None


def _side_by_side(parts: Sequence[tuple[str, int, int]]) -> tuple[dict[str, int], int]:
    """Return where each goes beside those around it, and the most that takes."""
    sizes = {name: own_bytes for name, _, own_bytes in parts}
    offsets = {
        name: sum(size_bytes for outer, size_bytes in sizes.items() if _is_around(outer, name))
        for name in sizes
    }
    most_bytes = max((offsets[name] + size_bytes for name, size_bytes in sizes.items()), default=0)
    return offsets, most_bytes


def _is_around(outer: str, name: str) -> bool:
    return outer != name and (not outer or name.startswith(f"{outer}."))
