"""Every message, and one version. Pure: values and their bytes, no sockets.

These are the ledger's own requests and replies: there is no second vocabulary between the socket
and the heart. Messages are msgspec Structs, tagged by class name and sent as msgpack arrays; file
descriptors travel beside a message (SCM_RIGHTS), never inside it.

Directions: `FromWorker`, `FromLoader`, `FromOperator` reach the coordinator; `ToWorker`, `ToLoader`
leave it. A worker's connection opens with `Resume`, always. Nothing is sent to it before that was
read.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec

from shm_store.errors import ArgumentRefused, ProtocolViolation, WeightCacheError, rebuild
from shm_store.keys import (
    KEY_LIMIT_BYTES,
    Fingerprint,
    GenerationId,
    Key,
    LeaseId,
    RequestId,
    SessionId,
)
from shm_store.layout import PAGE_BYTES
from shm_store.reading import AS_IT_IS, Reading
from shm_store.report import GenerationReport, ModelReport, StatusReport

VERSION = 1
"""The protocol's version. Peers of different versions refuse each other by name."""

SIZE_LIMIT_BYTES = 1 << 50
MODELS_LIMIT = 1024
NO_GENERATION = GenerationId("")
RAM = "ram"
"""The pool of the host's memory. The others are devices'."""
TIMEOUT_LIMIT_S = 1e9

Name = Annotated[str, msgspec.Meta(max_length=4096)]
FileName = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Files = Annotated[tuple[FileName, ...], msgspec.Meta(max_length=251)]
"""Of several files that travel with a message, in the order of their fds. A lone one has none."""
AnyKey = Annotated[Key, msgspec.Meta(min_length=1, max_length=KEY_LIMIT_BYTES)]
"""Short enough for a preamble. Only `parse_key` says whether it is a key."""
Version = Annotated[str, msgspec.Meta(max_length=120)]
SizeBytes = Annotated[int, msgspec.Meta(gt=0, le=SIZE_LIMIT_BYTES, multiple_of=PAGE_BYTES)]
"""In whole pages: the kernel gives no less, and the books say what it gives."""
PagesBytes = Annotated[int, msgspec.Meta(ge=0, le=SIZE_LIMIT_BYTES, multiple_of=PAGE_BYTES)]
CountBytes = Annotated[int, msgspec.Meta(ge=0, le=SIZE_LIMIT_BYTES)]
TimeoutS = Annotated[float, msgspec.Meta(ge=0, le=TIMEOUT_LIMIT_S)]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The root of every message."""


class Cause(msgspec.Struct, frozen=True, array_like=True):
    """Why a request failed, as it travels. `error()` gives the exception it stands for."""

    code: str
    message: str
    remedy: str = ""
    source: str = ""
    needed_bytes: int = 0
    free_bytes: int = 0
    holders: tuple[GenerationReport, ...] = ()
    possible_bytes: int = 0

    @classmethod
    def of(cls, error: WeightCacheError) -> Cause:
        """Describe `error`. Facts that have no field here stay in its message."""
        facts = {
            name: getattr(error, name)
            for name in ("source", "needed_bytes", "free_bytes", "holders", "possible_bytes")
            if hasattr(error, name)
        }
        return cls(error.code, error.message, error.remedy, **facts)

    def error(self) -> WeightCacheError:
        """Return the typed exception, with the fields of this cause as its attributes."""
        return rebuild(
            self.code,
            self.message,
            {
                "remedy": self.remedy,
                "source": self.source,
                "needed_bytes": self.needed_bytes,
                "free_bytes": self.free_bytes,
                "holders": self.holders,
                "possible_bytes": self.possible_bytes,
            },
        )


# --- worker -> coordinator ----------------------------------------------------------------------


class Resume(Message, frozen=True):
    """The first frame of a connection: who attaches, or comes back.

    `token` is chosen by a session for its whole life, and says which one comes back over another
    connection, to this coordinator or to one that was started since. Behind it come `held`
    messages, one for everything that the session has: `HeldMap`, `HeldOnDevice`, `HeldFill`,
    `HeldCharge`, and `Declare` for its devices. What they do not name, it has no more. Requests
    that are open are asked anew, with new ids.

    Fields may only be appended, and keep what they may hold, so that every version can read the
    version of any other.
    """

    version: int
    name: Name = ""
    device: Name = ""
    role: Literal["worker", "operator"] = "worker"
    token: Name = ""
    held: Annotated[int, msgspec.Meta(ge=0)] = 0


class HeldMap(Message, frozen=True):
    """The session has mapped `gen`, on this lease. The segment travels with it, if it has an fd.

    `stale`: it has heard that this is retired.
    """

    gen: GenerationId
    lease: LeaseId
    stale: bool = False


class HeldOnDevice(Message, frozen=True):
    """As `HeldMap`, of memory on a device, which travels with this, and does not say what it is.

    `copy_of` is the generation whose bytes it has.
    """

    gen: GenerationId
    lease: LeaseId
    pool: Name
    key: AnyKey
    copy_of: GenerationId
    size_bytes: SizeBytes
    stale: bool = False


class HeldFill(Message, frozen=True):
    """The session fills `gen`, whose segment travels with this, or has asked for its COMMIT.

    `rid` is the request that is to be answered; 0 if nobody waits, and ABORT will follow.
    """

    gen: GenerationId
    rid: RequestId
    key: AnyKey
    fingerprint: Fingerprint


class HeldCharge(Message, frozen=True):
    """The session has private memory, counted under this lease. The rest as in `Charge`."""

    gen: GenerationId
    lease: LeaseId
    pool: Name
    key: AnyKey
    size_bytes: SizeBytes
    fixed: bool = False
    copy_of: GenerationId = NO_GENERATION


class Declare(Message, frozen=True):
    """The session can use a device's memory, and this much of it: the pool is there from now on.

    Never answered; said again behind each RESUME; what a session said last counts, as long as it
    is there. The limit is the least that sessions budget; where none does, the most that one has
    ever found; and what an operator sets, once one did.
    """

    pool: Name
    limit_bytes: CountBytes
    budgeted: bool = False


class Acquire(Message, frozen=True):
    """Ask for a lease on `key`.

    With `source`, the opened file travels as an fd, or all `files` do, and a loader fills the
    segment if nobody has it yet, by `reading` them; what is at a URL it opens itself, and `version`
    says which. With `source=None` the asker itself can build the weights, of version `version`.
    `timeout_s` runs only while nothing progresses. A `prefetch` waits behind every load and takes
    nothing from anybody.

    In the `pool` of a device it is for memory there that all its processes share: who gets the
    ticket allocates it, and COMMITs it with an fd of it, which travels with every GRANT. `version`
    is then the generation whose bytes it has.
    """

    rid: RequestId
    key: AnyKey
    source: Name | None
    version: Version
    timeout_s: TimeoutS
    prefetch: bool = False
    pool: Name = RAM
    files: Files = ()
    reading: Reading = AS_IT_IS


class Receive(Message, frozen=True):
    """Ask for a lease on `gen`, which another process has mapped, and has sent to this one.

    GRANT answers at once, of what is retired, too; or FAIL, if nobody has it any more.
    """

    rid: RequestId
    gen: GenerationId


class Charge(Message, frozen=True):
    """Ask for room for private memory of this process. `key` is for people and never matched.

    The GRANT that answers has no fd, and its lease is the charge: RELEASE ends it. A `fixed` one is
    never asked for: it is kept until the process wants it no more. `copy_of` is the generation that
    is in it, which the process may not lease any more: it is to hear when that is retired.
    """

    rid: RequestId
    pool: Name
    key: AnyKey
    size_bytes: SizeBytes
    timeout_s: TimeoutS
    fixed: bool = False
    copy_of: GenerationId = NO_GENERATION


class Counts(Message, frozen=True):
    """What the session has done with its models so far. Replaces what it said before."""

    models: Annotated[tuple[ModelReport, ...], msgspec.Meta(max_length=MODELS_LIMIT)]


class Cancel(Message, frozen=True):
    """Give up an open request. It still gets its one final answer."""

    rid: RequestId


class Reserve(Message, frozen=True):
    """The owner of an OPEN generation knows its size: charge it, back it, give me the fd."""

    gen: GenerationId
    size_bytes: SizeBytes


class Commit(Message, frozen=True):
    """The owner has filled the segment and holds no writable map of it any more.

    An fd travels with it if it is memory of a device.
    """

    gen: GenerationId


class Abort(Message, frozen=True):
    """The owner gives its ticket back. A loader's `cause` is the source's fault."""

    gen: GenerationId
    cause: Cause | None = None


class Release(Message, frozen=True):
    """The bytes are unmapped. Ends the lease only if it still has this id. Never answered."""

    gen: GenerationId
    lease: LeaseId


Asked = Literal["idle", "room", "stale", "keep"]
"""What a REVOKE asks: tell me when nothing of yours uses this; let it go once nothing does, because
room is short; it is retired, so hand it out no more; never mind, for nobody needs the room now."""


class Ack(Message, frozen=True):
    """The answer to a REVOKE of a lease that goes on: it was heard, and something holds it.

    With `idle` nothing uses it. Who was asked for that says so at once, or first that it is used,
    and later when it is not. `asked` as in the REVOKE: another one may be on its way by now.
    """

    gen: GenerationId
    lease: LeaseId
    asked: Asked
    idle: bool = False


class Invalidate(Message, frozen=True):
    """Retire what `key` is now, everywhere. DONE once no process hands it out any more."""

    rid: RequestId
    key: AnyKey
    timeout_s: TimeoutS


class Flush(Message, frozen=True):
    """Ask to be told when everything before this frame has taken effect, freeing included."""

    rid: RequestId


class Progress(Message, frozen=True):
    """So many bytes of the segment are filled. From the owner; passed on to others who wait."""

    gen: GenerationId
    done_bytes: CountBytes
    total_bytes: CountBytes


# --- operator -> coordinator, each answered -------------------------------------------------------


class Pin(Message, frozen=True):
    """Protect the READY generation of `key` from eviction, now and in future generations."""

    rid: RequestId
    key: AnyKey


class Unpin(Message, frozen=True):
    """Take a pin back."""

    rid: RequestId
    key: AnyKey


class Evict(Message, frozen=True):
    """Free the retained generation of `key`; with no key, every retained one that is not pinned."""

    rid: RequestId
    key: AnyKey | None = None


class Limit(Message, frozen=True):
    """Set the limit of a pool. Below what is in use, everything idle is asked for."""

    rid: RequestId
    pool: Name
    limit_bytes: CountBytes


class CopiedPages(msgspec.Struct, frozen=True, array_like=True):
    """So many bytes of a leased map are pages of the process's own: it wrote to them."""

    session: SessionId
    gen: GenerationId
    size_bytes: PagesBytes


class Copied(Message, frozen=True):
    """What an audit has read in the kernel. Charges it; what an earlier one said is replaced."""

    rid: RequestId
    pages: tuple[CopiedPages, ...]


class Drain(Message, frozen=True):
    """Take no new work, wait until nothing is held, then exit. Fails at the deadline."""

    rid: RequestId
    timeout_s: TimeoutS


class Status(Message, frozen=True):
    """Ask for a StatusReport."""

    rid: RequestId


# --- coordinator -> worker or operator ------------------------------------------------------------


class Ticket(Message, frozen=True):
    """You build this generation: RESERVE its bytes when you know them."""

    rid: RequestId
    gen: GenerationId
    key: AnyKey
    fingerprint: Fingerprint


class Space(Message, frozen=True):
    """The reserved segment, backed by real pages; its fd travels with this. Fill it."""

    gen: GenerationId


class Grant(Message, frozen=True):
    """The final answer: a lease with id `rid` on `gen`. Its fd travels with this, if it has one."""

    rid: RequestId
    gen: GenerationId


class Revoke(Message, frozen=True):
    """Others need the room of this lease, or its generation is retired: see `Asked`.

    A lease that goes on for now is answered ACK, one that ends RELEASE; another lease id means that
    a newer grant has overtaken this.
    """

    gen: GenerationId
    lease: LeaseId
    asked: Asked


class Fail(Message, frozen=True):
    """The final answer: no. With `rid` 0 it is about the connection, which then closes."""

    rid: RequestId
    cause: Cause


class Filling(Message, frozen=True):
    """How far the fill of another is that request `rid` waits for."""

    rid: RequestId
    done_bytes: CountBytes
    total_bytes: CountBytes


class Flushed(Message, frozen=True):
    """Everything before the FLUSH has taken effect."""

    rid: RequestId


class Done(Message, frozen=True):
    """An operator's request was carried out; `keys` are those it touched."""

    rid: RequestId
    keys: tuple[Key, ...] = ()


class Report(Message, frozen=True):
    """The answer to STATUS."""

    rid: RequestId
    report: StatusReport


class Bye(Message, frozen=True):
    """The coordinator leaves on purpose: the end of file that follows is final."""


# --- coordinator -> loader (beside Space) ---------------------------------------------------------


class Fetch(Message, frozen=True):
    """A loader's ticket: fill `gen` from the source whose opened files travel with this.

    `fingerprint` is of the files that were asked for: what has another by now is refused.
    """

    gen: GenerationId
    key: AnyKey
    source: Name
    fingerprint: Fingerprint
    files: Files = ()
    reading: Reading = AS_IT_IS


Held = HeldMap | HeldOnDevice | HeldFill | HeldCharge | Declare
FromWorker = (
    Declare
    | Counts
    | Acquire
    | Receive
    | Charge
    | Cancel
    | Reserve
    | Progress
    | Commit
    | Abort
    | Release
    | Ack
    | Flush
)
FromOperator = Pin | Unpin | Evict | Invalidate | Limit | Copied | Drain | Status
FromLoader = Reserve | Progress | Commit | Abort
FromSession = FromWorker | FromOperator
"""What a connection may say after its RESUME: operators load too, so the two are read as one."""

ToSession = Ticket | Space | Grant | Revoke | Fail | Filling | Flushed | Done | Report | Bye
ToLoader = Fetch | Space

AnyMessage = Resume | Held | FromSession | FromLoader | ToSession | ToLoader

Kind = TypeVar("Kind")

_encoder = msgspec.msgpack.Encoder()

resume_decoder = msgspec.msgpack.Decoder(Resume)
held_decoder = msgspec.msgpack.Decoder(Held)
session_decoder = msgspec.msgpack.Decoder(FromSession)
loader_decoder = msgspec.msgpack.Decoder(FromLoader)
to_session_decoder = msgspec.msgpack.Decoder(ToSession)
to_loader_decoder = msgspec.msgpack.Decoder(ToLoader)


def encode(message: AnyMessage) -> bytes:
    """Return the bytes of `message`.

    Raises:
        ArgumentRefused: a text in it has no UTF-8 form, as the path of a file named otherwise.
    """
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError as error:
        raise ArgumentRefused(
            f"{error.object!r} cannot be sent: {error.reason}", remedy="use names in UTF-8"
        ) from error


def decode(decoder: msgspec.msgpack.Decoder[Kind], data: bytes | memoryview) -> Kind:
    """Return the message in `data`, of the kinds that `decoder` knows.

    Raises:
        ProtocolViolation: not such a message, or a field out of its range.
    """
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolViolation(
            f"a message of {len(data)} bytes could not be read: {error}"
        ) from None
