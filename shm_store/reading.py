"""How a checkpoint is to be read: which of its tensors, under which names, in which dtypes. Pure.

Part of what is asked for, so it travels with an ACQUIRE, and other options are other weights.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Iterable
from typing import Annotated

import msgspec

Pattern = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Prefix = Annotated[str, msgspec.Meta(max_length=1024)]
DtypeName = Annotated[str, msgspec.Meta(max_length=16)]

RULES_LIMIT = 256
"""So many of each kind, so that what is asked for stays a small message."""

_Rules = msgspec.Meta(max_length=RULES_LIMIT)

FLOATING = frozenset(
    (
        "F8_E4M3",
        "F8_E5M2",
        "F8_E8M0",
        "F8_E4M3FNUZ",
        "F8_E5M2FNUZ",
        "F16",
        "BF16",
        "F32",
        "F64",
    )
)
"""The dtypes that a cast applies to, and casts to. `F4` packs two numbers into one element."""


class Reading(msgspec.Struct, frozen=True, array_like=True):
    """What to make of a source. Patterns are of file names: `*`, `?`, `[seq]`, and see letter case.

    Attributes:
        name_filter: a tensor is read if its name in the file matches one of these; with none, all.
        rename: pairs of a prefix of names and what is to be there instead. The longest that fits
            counts.
        dtypes: pairs of a pattern of names in the file and a dtype, or "" for that of the file. The
            first that matches counts, for floating-point tensors; others keep what they are.
        digest: have digests of the bytes in memory made, for `weight-cache audit --bytes`. Whether
            there are any makes no other weights.
    """

    name_filter: Annotated[tuple[Pattern, ...], _Rules] = ()
    rename: Annotated[tuple[tuple[Prefix, Prefix], ...], _Rules] = ()
    dtypes: Annotated[tuple[tuple[Pattern, DtypeName], ...], _Rules] = ()
    digest: bool = False

    def keeps(self) -> Callable[[str], bool]:
        """Return what says whether a tensor of the file is wanted."""
        if not self.name_filter:
            return lambda name: True
        return _matcher(self.name_filter)

    def renames(self) -> Callable[[str], str]:
        """Return what gives the name that a tensor of the file is to have."""
        rules = sorted(self.rename, key=lambda rule: len(rule[0]), reverse=True)

        def renamed(name: str) -> str:
            for old, new in rules:
                if name.startswith(old):
                    return new + name[len(old) :]
            return name

        return renamed

    def casts(self) -> Callable[[str, str], str]:
        """Return what gives the dtype that a tensor of the file is to have, by name and dtype."""
        rules = [(_matcher((pattern,)), dtype) for pattern, dtype in self.dtypes]

        def cast(name: str, dtype: str) -> str:
            if dtype in FLOATING:
                for matches, wanted in rules:
                    if matches(name):
                        return wanted or dtype
            return dtype

        return cast


AS_IT_IS = Reading()


def _matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    match = _compiled(tuple(patterns))
    return lambda name: match(name) is not None


@functools.lru_cache(maxsize=64)
def _compiled(patterns: tuple[str, ...]) -> Callable[[str], re.Match[str] | None]:
    # Each translated pattern ends where the name does.
    return re.compile("|".join(map(fnmatch.translate, patterns))).match
