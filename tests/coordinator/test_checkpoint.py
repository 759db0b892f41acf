"""Where what files hold goes in a segment."""

from __future__ import annotations

from coordinator.checkpoint import Cast, Copy, Stored, lay_out
from shm_store.reading import AS_IT_IS, Reading


def test_stretches_are_joined_within_a_file_only():
    """Both sides touch; but the second one is of another file."""
    table = [
        Stored("a", "U8", (64,), 0, 64),
        Stored("b", "U8", (64,), 64, 128),
        Stored("c", "U8", (64,), 128, 192, file=1),
    ]
    assert lay_out(table, AS_IT_IS, "s").copies == (Copy(0, 0, 128), Copy(128, 128, 64, file=1))


def test_files_are_read_from_front_to_back_whatever_the_order_of_names():
    table = [
        Stored("a", "U8", (64,), 64, 128, file=2),
        Stored("b", "U8", (8,), 0, 8, file=2),
        Stored("c", "U8", (64,), 8, 72, file=1),
    ]
    checkpoint = lay_out(table, AS_IT_IS, "s")
    assert [entry.name for entry in checkpoint.manifest.tensors] == ["a", "b", "c"]
    assert [(copy.file, copy.source_offset_bytes) for copy in checkpoint.copies] == [
        (1, 8),
        (2, 0),
        (2, 64),
    ]


def test_what_is_cast_has_the_room_of_what_it_becomes():
    table = [Stored("a", "F32", (3,), 0, 12), Stored("b", "I64", (2,), 12, 28)]
    checkpoint = lay_out(table, Reading(dtypes=(("*", "BF16"),)), "s")
    assert [entry.dtype for entry in checkpoint.manifest.tensors] == ["BF16", "I64"]
    assert checkpoint.casts == (Cast(0, 0, 3, "F32", "BF16"),)
    assert checkpoint.copies == (Copy(12, 64, 16),)
    assert checkpoint.filled_bytes() == 6 + 16
    assert checkpoint.data_bytes == 64 + 16
