"""What happens to the ledger, and what it wants done. Pure values.

Events are the wire's own messages plus the few facts that come from inside; effects are messages to
send plus the few things only the executor can do. Whoever performs an effect feeds its outcome back
as an event.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shm_store.keys import Fingerprint, GenerationId, Key, LeaseId, RequestId, SessionId
from shm_store.wire import RAM, Declare, FromLoader, FromSession, HeldCharge, Space, ToSession

# --- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attached:
    """A process said RESUME. `pid` is the kernel's word, the rest its own."""

    session: SessionId
    pid: int
    name: str
    device: str
    role: Literal["worker", "operator"]


@dataclass(frozen=True, slots=True)
class Offer:
    """A segment that was found or stated, as its sealed preamble or its filler names it.

    Attributes:
        lease: of whoever states it; the request that is to be answered if it is being filled; 0 if
            it comes out of the store.
        stale: its holder has heard that it is retired.
        pool: a device's if it is memory there, which says nothing itself.
    """

    gen: GenerationId
    lease: LeaseId
    key: Key
    fingerprint: Fingerprint
    size_bytes: int
    sealed: bool = True
    stale: bool = False
    pool: str = RAM

    @property
    def home(self) -> tuple[str, Key]:
        return self.pool, self.key


@dataclass(frozen=True, slots=True)
class Recovered:
    """Another coordinator was here before, and ended without a word.

    Attributes:
        segments: those that were kept. Each was READY.
        sessions: those that live, with their pids.
        others: there may be more of them, whom nobody kept.
        patience_s: how long they are waited for.
    """

    segments: tuple[Offer, ...] = ()
    sessions: tuple[tuple[SessionId, int], ...] = ()
    others: bool = False
    patience_s: float = 0.0
    pins: tuple[Key, ...] = ()
    limits_bytes: dict[str, int] = field(default_factory=dict)
    draining: bool = False
    found_bytes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Resumed:
    """A session has said what it has, and goes on. The first time it has nothing."""

    session: SessionId
    name: str
    device: str
    maps: tuple[Offer, ...] = ()
    fills: tuple[Offer, ...] = ()
    charges: tuple[HeldCharge, ...] = ()
    devices: tuple[Declare, ...] = ()


@dataclass(frozen=True, slots=True)
class Said:
    """A session sent a message. `fingerprint` is that of the fd beside an ACQUIRE with a source."""

    session: SessionId
    message: FromSession
    fingerprint: Fingerprint = Fingerprint("")


@dataclass(frozen=True, slots=True)
class LoaderSaid:
    """The loader of `gen` sent a message."""

    gen: GenerationId
    message: FromLoader


@dataclass(frozen=True, slots=True)
class LoaderEnded:
    """The loader of `gen` ended, or could not be started; `reason` says how."""

    gen: GenerationId
    reason: str


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A session's connection is gone. The process may still map what it leases."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """A session's process ended, by its pidfd, and its last frames were read."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class Backed:
    """The segment of `gen` has all its pages."""

    gen: GenerationId


@dataclass(frozen=True, slots=True)
class BackingRefused:
    """The kernel gave no memory for the segment of `gen`. `remedy` if it is not the usual one."""

    gen: GenerationId
    reason: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class Sealed:
    """The segment of `gen` cannot be changed any more."""

    gen: GenerationId


@dataclass(frozen=True, slots=True)
class SealRefused:
    """The segment of `gen` could not be sealed."""

    gen: GenerationId
    reason: str


@dataclass(frozen=True, slots=True)
class Freed:
    """The segment of `gen`, its loader and its backing child are gone."""

    gen: GenerationId


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing else happened, but a deadline may have come."""


Event = (
    Recovered
    | Attached
    | Resumed
    | Said
    | LoaderSaid
    | LoaderEnded
    | Disconnected
    | SessionEnded
    | Backed
    | BackingRefused
    | Sealed
    | SealRefused
    | Freed
    | TimePassed
)

# --- effects ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message` to a session, with the fd of `segment` beside it."""

    session: SessionId
    message: ToSession
    segment: GenerationId | None = None


@dataclass(frozen=True, slots=True)
class SendSpace:
    """Send SPACE and the segment's fd to the loader of the generation."""

    message: Space


@dataclass(frozen=True, slots=True)
class StartLoader:
    """Start a loader for `gen`, on the opened source that came with request `rid`."""

    gen: GenerationId
    key: Key
    source: str
    fingerprint: Fingerprint
    session: SessionId
    rid: RequestId


@dataclass(frozen=True, slots=True)
class Back:
    """Create the segment of `gen` and give it real pages. Answer Backed or BackingRefused.

    On a device its owner does that, and brings it with its COMMIT.
    """

    gen: GenerationId
    size_bytes: int
    pool: str = RAM


@dataclass(frozen=True, slots=True)
class Seal:
    """Stamp and seal the segment of `gen`. Answer Sealed or SealRefused."""

    gen: GenerationId
    key: Key
    fingerprint: Fingerprint
    pool: str = RAM
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Free:
    """End the loader and the backing child of `gen`, if any; close its segment. Answer Freed.

    With `device` it is memory there: answer once the device has it back. Process `pid` has had it
    last, and has ended; or 0.
    """

    gen: GenerationId
    device: str | None = None
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Keep:
    """The segment of `gen` is READY: have it outlive this coordinator.

    On a device it does not say itself what it is: `about` does.
    """

    gen: GenerationId
    about: Offer | None = None


@dataclass(frozen=True, slots=True)
class Unkeep:
    """The segment of `gen` is not READY any more."""

    gen: GenerationId


@dataclass(frozen=True, slots=True)
class Remember:
    """Have these outlive this coordinator, instead of those before."""

    pins: tuple[Key, ...]
    limits_bytes: dict[str, int]
    draining: bool
    found_bytes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Forget:
    """The session is over: close its connection, stop watching its process."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class Exit:
    """Drained: nothing is left to own. Say BYE to every session and end."""


Effect = (
    Send | SendSpace | StartLoader | Back | Seal | Free | Keep | Unkeep | Remember | Forget | Exit
)
