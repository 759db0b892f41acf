"""Which tensors of a file are wanted, under which names, in which dtypes."""

from __future__ import annotations

import pytest

from shm_store.reading import AS_IT_IS, Reading


def test_without_options_everything_stays_as_it_is() -> None:
    assert AS_IT_IS.keeps()("any.name")
    assert AS_IT_IS.renames()("any.name") == "any.name"
    assert AS_IT_IS.casts()("any.name", "F32") == "F32"


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("unet.in.weight", True),
        ("vae.mid.0", True),
        ("vae.mid.12", False),
        ("Unet.in.weight", False),
        ("my.unet.in", False),
        ("unet.\nin", True),
    ],
)
def test_a_name_is_kept_if_a_whole_pattern_fits_it(name: str, kept: bool) -> None:
    assert Reading(name_filter=("unet.*", "vae.mid.?")).keeps()(name) is kept


def test_the_longest_prefix_is_what_is_replaced() -> None:
    renamed = Reading(rename=(("a.", "x."), ("a.b.", ""), ("", "all."))).renames()
    assert [renamed(name) for name in ("a.w", "a.b.w", "c")] == ["x.w", "w", "all.c"]


def test_the_first_rule_that_fits_casts_what_is_floating_point() -> None:
    cast = Reading(dtypes=(("*.norm.*", ""), ("*.head", "F32"), ("*", "BF16"))).casts()
    assert cast("a.norm.b", "F16") == "F16"
    assert cast("a.head", "F16") == "F32"
    assert cast("w", "F64") == "BF16" and cast("w", "F8_E4M3") == "BF16"
    for whole in ("I64", "BOOL", "U8", "C64", "F4"):
        assert cast("w", whole) == whole
