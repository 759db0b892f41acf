"""Plans: where bytes go, in which passes, and what stays of what is too large."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.residency import ALIGNMENT_BYTES, PASS_BYTES, layout, partial, passes


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**7), max_size=20))
def test_nothing_overlaps_and_all_is_aligned(sizes):
    offsets, end = layout(sizes)
    assert all(offset % ALIGNMENT_BYTES == 0 for offset in offsets)
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    assert all(one <= other for one, other in zip(ends, [*offsets, end][1:], strict=True))


@settings(deadline=None)
@given(st.lists(st.integers(0, 3 * PASS_BYTES), max_size=8))
def test_every_byte_is_moved_once_in_bounded_passes(sizes):
    moved = [0] * len(sizes)
    for batch in passes(sizes):
        assert 0 < sum(size for _, _, size in batch) <= PASS_BYTES
        for index, begin, size in batch:
            assert begin == moved[index]
            moved[index] += size
    assert moved == sizes


PARTS = st.lists(st.integers(1, 100), min_size=1, max_size=12).map(
    lambda sizes: [(str(n), size, size) for n, size in enumerate(sizes)]
)


@settings(deadline=None)
@given(PARTS, st.integers(0, 1300))
def test_as_many_stay_as_fit_beside_the_largest_of_the_others(parts, room):
    plan = partial(parts, room)
    sizes = [own for _, _, own in parts]
    fitting = [
        count
        for count in range(len(parts) + 1)
        if sum(sizes[:count]) + max(sizes[count:], default=0) <= room
    ]
    if not fitting:
        assert plan is None
    else:
        assert plan is not None
        assert plan.stay == {str(n) for n in range(max(fitting))}
        assert plan.beside_bytes == max(sizes[max(fitting) :], default=0)


def test_what_runs_inside_of_another_goes_beside_it():
    plan = partial([("", 0, 0), ("a", 100, 100), ("a.b", 50, 50), ("ab", 120, 120)], 160)
    assert plan is not None and plan.stay == {""}
    assert plan.beside_bytes == 150 and plan.offsets_bytes == {"a": 0, "a.b": 100, "ab": 0}


def test_shared_bytes_count_with_the_first_that_has_them():
    plan = partial([("a", 100, 100), ("b", 0, 100), ("c", 150, 150)], 250)
    assert plan is not None and plan.stay == {"a", "b", "c"}
    plan = partial([("a", 100, 100), ("b", 0, 100), ("c", 100, 100), ("d", 90, 90)], 280)
    assert plan is not None and plan.stay == {"a", "b"}
