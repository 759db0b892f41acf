"""A command's connection to the coordinator: one request at a time, and its one final answer.

Synchronous, for the command line and the supervisor. Workers have a client of their own, with many
requests under way at once.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

from shm_store import channel
from shm_store.channel import Channel
from shm_store.checkpoint_files import Opened
from shm_store.errors import (
    ConnectionLost,
    CoordinatorLost,
    DrainIncomplete,
    Draining,
    ProtocolViolation,
)
from shm_store.keys import GenerationId, Key, LeaseId, RequestId
from shm_store.reading import Reading
from shm_store.report import GenerationReport, StatusReport
from shm_store.wire import (
    RAM,
    VERSION,
    Acquire,
    AnyMessage,
    Bye,
    Copied,
    CopiedPages,
    Done,
    Drain,
    Evict,
    Fail,
    Filling,
    Flush,
    Flushed,
    FromSession,
    Grant,
    Invalidate,
    Limit,
    Pin,
    Release,
    Report,
    Resume,
    Status,
    ToSession,
    Unpin,
    decode,
    encode,
    to_session_decoder,
)

ANSWER_LIMIT_S = 20.0
"""What can be answered at once is answered in microseconds; by a stopped coordinator, never."""

EXIT_LIMIT_S = 20.0
"""How long a drained coordinator may take to close gigabytes and end."""

QUIET_S = 1.0
"""How long a load may stand still before its coordinator is asked why."""

POLL_LIMIT_MS = 2**31 - 1

FilledBytes = Callable[[int, int], None]
"""Called with the bytes filled so far, and all of them."""

Waits = Callable[[StatusReport], bool]
"""Called with the ledger while a load has not begun; says whether it has heard enough."""

Kind = TypeVar("Kind", Done, Report, Flushed, Grant)


@dataclass(frozen=True, slots=True)
class Answer:
    """A final answer. Its fds (a Grant's one) are the caller's to close."""

    message: Done | Report | Flushed | Grant
    fds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Granted:
    """A lease of this process, until `release`. The segment's fd is closed already."""

    gen: GenerationId
    lease: LeaseId
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Known:
    """What there is of a key: whether anything is shared, who leases that, and who has its own.

    What is private to a process is never matched by key: no command reaches it.
    """

    shared: bool
    holders: tuple[int, ...]
    private_to: tuple[int, ...]


class Operator:
    """A connection of role `operator`. Not thread-safe; a context manager that closes it."""

    def __init__(self, connected: Channel, command: str) -> None:
        """Take over `connected` and say RESUME on it.

        A refusal of this connection (version, user) comes with the first request.
        """
        self._channel = connected
        self._last_rid = 0
        self.left = False
        """The coordinator said BYE: the end of file that follows is final."""
        try:
            self.send(Resume(VERSION, name=f"weight-cache {command}", role="operator"))
        except ConnectionLost:
            pass  # what it said before it went, if anything, is read with the first request

    @classmethod
    def connect(cls, path: str, command: str) -> Self:
        """Return a connection to the coordinator on `path`, for `weight-cache COMMAND`.

        Raises:
            NoCoordinator: nothing listens there.
            PeerForbidden: this user may not use it.
            ArgumentRefused: the path is too long for a socket.
            PlatformUnsupported: not Linux.
        """
        return cls(channel.connect(path), command)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Leases end with this process, if they were not released."""
        self._channel.close()

    def fileno(self) -> int:
        return self._channel.fileno()

    # --- messages -------------------------------------------------------------------------------

    def next_rid(self) -> RequestId:
        """Return an id for the next request: they must be sent in the order they were taken."""
        self._last_rid += 1
        return RequestId(self._last_rid)

    def send(self, message: AnyMessage, fds: Sequence[int] = ()) -> None:
        """Send without waiting for an answer. The fds stay the caller's.

        Raises:
            ConnectionLost: the coordinator is gone.
        """
        self._channel.send(encode(message), fds)

    def receive(self, timeout_s: float | None = None) -> tuple[ToSession, list[int]] | None:
        """Return the next message and its fds, which are then the caller's; None at end of file.

        Args:
            timeout_s: how long to wait for it; None waits for ever.

        Raises:
            CoordinatorLost: nothing came in time.
            ConnectionLost: the connection broke.
            ProtocolViolation: this is no coordinator, or one of another version.
        """
        if timeout_s is not None and not _readable(self.fileno(), timeout_s):
            raise CoordinatorLost(
                f"the coordinator did not answer within {timeout_s:g} s",
                remedy="look whether its process is stopped or starved",
            )
        received = self._channel.receive()
        if received is None:
            return None
        data, fds = received
        try:
            message = decode(to_session_decoder, data)
        except ProtocolViolation:
            channel.close_all(fds)
            raise
        self.left = self.left or isinstance(message, Bye)
        return message, fds

    def request(
        self,
        message: FromSession,
        fds: Sequence[int] = (),
        on_filling: FilledBytes | None = None,
        on_wait: Waits | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Send `message` and return its final answer.

        Args:
            message: with a `rid` from `next_rid`.
            fds: travel with it, and stay the caller's.
            on_filling: hears how far the fill is that this request waits for.
            on_wait: hears every QUIET_S why there is no fill yet, until it has heard enough.
            timeout_s: how long the coordinator may be silent; None waits for ever.

        Raises:
            WeightCacheError: the typed cause of a refusal; of this connection, too.
            Draining: the coordinator left on purpose before it answered.
            ConnectionLost: it went away otherwise.
            CoordinatorLost: it was silent for too long.
        """
        assert not isinstance(message, Release) and hasattr(message, "rid")
        lost: ConnectionLost | None = None
        try:
            self.send(message, fds)
        except ConnectionLost as error:
            lost = error  # why it closed the connection may still be there to read
        asked: RequestId | None = None
        while True:
            if on_wait and asked is None and not _readable(self.fileno(), QUIET_S):
                asked = self._ask_status()
            received = self.receive(timeout_s)
            if received is None:
                raise self._end_of_file(lost)
            answer, arrived = received
            mine = getattr(answer, "rid", None) == message.rid
            if isinstance(answer, Grant) and mine:
                if len(arrived) == 1:
                    return Answer(answer, tuple(arrived))
                channel.close_all(arrived)
                raise ProtocolViolation(f"a GRANT came with {len(arrived)} fds")
            channel.close_all(arrived)
            match answer:
                case Fail(rid, cause) if mine or rid == 0:
                    raise cause.error()
                case Done() | Report() | Flushed() if mine:
                    return Answer(answer)
                case Report(rid, report) if on_wait and rid == asked:
                    asked = None
                    on_wait = None if on_wait(report) else on_wait
                case Filling(_, done_bytes, total_bytes) if mine and on_filling is not None:
                    on_wait = None
                    on_filling(done_bytes, total_bytes)
                case _:
                    pass  # BYE, and answers to requests that were given up

    def _ask_status(self) -> RequestId:
        rid = self.next_rid()
        try:
            self.send(Status(rid))
        except ConnectionLost:
            pass  # the end of file that follows says it
        return rid

    def _end_of_file(self, lost: ConnectionLost | None) -> CoordinatorLost:
        if self.left:
            return Draining("the coordinator has ended", remedy="start it again")
        return lost or ConnectionLost(
            "the coordinator went away before it answered", remedy="see its log, and try again"
        )

    def _ask(self, message: FromSession, kind: type[Kind], timeout_s: float | None) -> Kind:
        answer = self.request(message, timeout_s=timeout_s).message
        if not isinstance(answer, kind):
            raise ProtocolViolation(f"a {type(answer).__name__} came instead of {kind.__name__}")
        return answer

    # --- what operators ask for -----------------------------------------------------------------

    def status(self) -> StatusReport:
        """Return the whole ledger."""
        return self._ask(Status(self.next_rid()), Report, ANSWER_LIMIT_S).report

    def known(self, key: Key) -> Known:
        """Return what there is of `key`, or will be: somebody is loading it."""
        found = [g for g in self.status().generations if g.key == key and g.state != "freeing"]
        return Known(
            shared=any(not generation.private for generation in found),
            holders=_pids(generation for generation in found if not generation.private),
            # What is on a device is a copy of one or the other.
            private_to=_pids(g for g in found if g.private and g.pool == RAM),
        )

    def pinned_idle(self) -> tuple[str, ...]:
        """Return the keys of what nobody leases and a pin protects."""
        found = self.status().generations
        return tuple(g.key for g in found if g.pinned and not g.leases)

    def pin(self, key: Key) -> None:
        """Protect `key` from eviction."""
        self._ask(Pin(self.next_rid(), key), Done, ANSWER_LIMIT_S)

    def unpin(self, key: Key) -> bool:
        """Take a pin back; say whether there was one."""
        return bool(self._ask(Unpin(self.next_rid(), key), Done, ANSWER_LIMIT_S).keys)

    def evict(self, key: Key | None = None) -> tuple[Key, ...]:
        """Free the retained generation of `key`, or every one that is not pinned; return the keys.

        The memory is gone once `flush` returns.

        Raises:
            ArgumentRefused: there are no weights of that key.
            InUse: they are leased, filling, or pinned.
        """
        return self._ask(Evict(self.next_rid(), key), Done, ANSWER_LIMIT_S).keys

    def invalidate(self, key: Key, timeout_s: float) -> None:
        """Retire what `key` is now; return once every process has ceased to hand it out.

        Raises:
            InvalidateIncomplete: some process has not said so in time. It is retired all the same.
        """
        self._ask(Invalidate(self.next_rid(), key, timeout_s), Done, timeout_s + ANSWER_LIMIT_S)

    def limit(self, pool: str, limit_bytes: int) -> None:
        """Set the limit of a pool. What is above it goes when it is idle.

        Raises:
            ArgumentRefused: there is no such pool.
        """
        self._ask(Limit(self.next_rid(), pool, limit_bytes), Done, ANSWER_LIMIT_S)

    def copied(self, pages: Sequence[CopiedPages]) -> None:
        """Have pages that processes have written to in their maps charged to them."""
        self._ask(Copied(self.next_rid(), tuple(pages)), Done, ANSWER_LIMIT_S)

    def coordinator_pid(self) -> int:
        """Return the pid of the coordinator; 0 if it has none in this pid namespace."""
        return self._channel.credentials().pid

    def flush(self) -> None:
        """Return once everything sent before has taken effect, freeing included."""
        self._ask(Flush(self.next_rid()), Flushed, None)

    def acquire(
        self,
        key: Key,
        source: Opened,
        reading: Reading,
        timeout_s: float,
        on_filling: FilledBytes | None = None,
        on_wait: Waits | None = None,
    ) -> Granted:
        """Have `key` loaded from the opened `source`, unless it is, and return a lease on it.

        Args:
            source: its files stay the caller's.
            reading: what to make of it.
            timeout_s: how long the load may stand still.
            on_filling, on_wait: as for `request`.

        Raises:
            SourceError: the checkpoint cannot be used.
            ResourceError: no room, no memory, or no progress in time.
        """
        about = ("", timeout_s, False, RAM, source.files, reading)
        message = Acquire(self.next_rid(), key, source.name, *about)
        answer = self.request(message, source.fds, on_filling, on_wait)
        if not isinstance(answer.message, Grant):
            raise ProtocolViolation(f"a {type(answer.message).__name__} came instead of Grant")
        (fd,) = answer.fds
        try:
            size_bytes = os.fstat(fd).st_size
        finally:
            os.close(fd)
        return Granted(answer.message.gen, LeaseId(answer.message.rid), size_bytes)

    def release(self, granted: Granted) -> None:
        """End a lease. `flush` tells when that has taken effect."""
        self.send(Release(granted.gen, granted.lease))

    def drain(self, timeout_s: float) -> None:
        """Have the coordinator take no new work and leave; return once its process has ended.

        Raises:
            DrainIncomplete: something is still held at the deadline, or the process lingers.
        """
        pidfd = self._open_pidfd()
        try:
            try:
                self._ask(Drain(self.next_rid(), timeout_s), Done, timeout_s + ANSWER_LIMIT_S)
            except Draining:
                if not self.left:
                    raise
            if not self._ended(pidfd):
                raise DrainIncomplete(
                    "nothing is held any more, but the coordinator's process still runs",
                    remedy="see its log",
                )
        finally:
            if pidfd is not None:
                os.close(pidfd)

    def _open_pidfd(self) -> int | None:
        """Return a pidfd of the coordinator, if there is one to have."""
        try:
            return self._channel.open_pidfd()
        except OSError:
            return None  # it has ended, or is in another pid namespace of an old kernel

    def _ended(self, pidfd: int | None) -> bool:
        """Wait for the coordinator's end: first of its connection, then of its lock and process."""
        while _readable(self.fileno(), EXIT_LIMIT_S):
            received = self.receive()
            if received is None:
                return pidfd is None or _readable(pidfd, EXIT_LIMIT_S)
            channel.close_all(received[1])
        return False


def _pids(generations: Iterable[GenerationReport]) -> tuple[int, ...]:
    return tuple(sorted({lease.pid for generation in generations for lease in generation.leases}))


def _readable(fd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(min(timeout_s * 1000, POLL_LIMIT_MS)))
