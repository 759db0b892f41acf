"""The figures of `weight-cache status`. Pure.

One vocabulary for three readers: `status --json`, the `holders` of a refusal, and metrics. Fields
are stable; others may be added.
"""

import msgspec

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


class LeaseReport(msgspec.Struct, frozen=True):
    """One process that may have the bytes mapped."""

    session: int
    pid: int
    age_s: float
    copied_bytes: int = 0
    """Pages of the map that the process has written to, by the last audit. Charged to it."""
    asked: str = ""
    """What it was asked to let go for: "room", "stale", or nothing."""


class FillReport(msgspec.Struct, frozen=True):
    """How far a fill is."""

    done_bytes: int
    total_bytes: int
    """0 until its filler has said how far it is."""
    elapsed_s: float
    """Since it was begun."""
    bytes_per_s: int = 0
    """About, of late; 0 before anything is known."""
    left_s: float | None = None
    """Until all is there, if it goes on like that; None if that cannot be told."""


class GenerationReport(msgspec.Struct, frozen=True):
    """One generation: what it is, what it costs, and who holds it."""

    key: str
    generation: str
    state: str
    size_bytes: int
    pool: str
    pinned: bool
    leases: tuple[LeaseReport, ...]
    filled_bytes: int = 0
    waiting: int = 0
    """Requests that wait for this generation."""
    filled_by: int | None = None
    """The pid of the worker that has its ticket; None when a loader has it, or nobody."""
    private: bool = False
    """Memory of those that lease it alone, outside of any segment."""
    fixed: bool = False
    """It is never asked for: its process keeps it until it wants it no more."""
    fill: FillReport | None = None
    """How far it is, while it is filled."""
    huge_bytes: int = 0
    """Of `size_bytes`, what was in pages of 2 MiB when that was last tried. The kernel may split
    them again when memory is short."""
    not_huge: str = ""
    """Why the rest is not; nothing where there is no rest, or it was not tried (yet)."""
    collapsed_by: int | None = None
    """The pid of the coordinator's child that is about to change that."""


class PoolReport(msgspec.Struct, frozen=True):
    """One budget. `in_use_bytes` is the sum of the six kinds that follow it."""

    name: str
    limit_bytes: int
    in_use_bytes: int
    leased_bytes: int
    retained_bytes: int
    filling_bytes: int
    retired_bytes: int
    private_bytes: int
    freeing_bytes: int


class ModelReport(msgspec.Struct, frozen=True):
    """What one process has done with the modules of a key on one device, since it was attached."""

    key: str
    device: str
    hits: int = 0
    """Loads that found the module there."""
    misses: int = 0
    """Loads that had to ask the coordinator."""
    moved_bytes: int = 0
    """Brought to the device."""
    waited_s: float = 0.0
    """By locks, for room on the device and for others who move it."""
    moved_s: float = 0.0


class SessionReport(msgspec.Struct, frozen=True):
    """One attached process. `waiting_for` is the keys of its open requests.

    `models` are as the process has said itself: a second ago, or when it last flushed.
    """

    session: int
    pid: int
    name: str
    device: str
    waiting_for: tuple[str, ...]
    connected: bool
    models: tuple[ModelReport, ...] = ()


class StatusReport(msgspec.Struct, frozen=True):
    """The whole ledger at one moment."""

    draining: bool
    pools: tuple[PoolReport, ...]
    generations: tuple[GenerationReport, ...]
    sessions: tuple[SessionReport, ...]
    start: str = ""
    """What the ids of this coordinator's generations begin with, up to the dash."""
    pins: tuple[str, ...] = ()
    """Every key that is pinned, loaded or not."""


def size_text(size_bytes: int) -> str:
    """Return a size as people read it: "86.7 MiB"."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    power = (size_bytes.bit_length() - 1) // 10
    return f"{size_bytes / 1024**power:.1f} {_UNITS[power - 1]}"
