"""The session of this process: its requests and their answers, on one connection after another.

Rules
- The connection's lock orders the requests' ids and guards what is open. Nobody waits with it.
- The reader thread never touches torch and runs no user code.
- A request stays open until its final answer, even when nobody wants that any more; what then
  arrives is given back by the reader. So is the answer to one that is forgotten because an
  interrupt came into its sending: it may have left.
- A caller waits at its own request's inbox, with no lock, and may leave by any exception.
- A lost connection is not the session's end: the next one begins with all that this process has,
  and open requests are asked anew. Their askers wait on; who is at work is not disturbed.
- What was granted, `leases` looks after.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable

import msgspec

from gpu_worker.connection import CLOSED, Connection
from gpu_worker.leases import Holder, Leases
from gpu_worker.reentry import free_after_fork
from gpu_worker.request import Granted, Reply, Request, Step
from gpu_worker.request_table import RequestTable
from gpu_worker.statement import post_statement
from shm_store.channel import close_all
from shm_store.errors import (
    ConnectionLost,
    CoordinatorLost,
    Draining,
    LoadTimeout,
    ProtocolViolation,
    ResourceError,
    WeightCacheError,
    WorkerClosed,
)
from shm_store.keys import LeaseId, RequestId
from shm_store.wire import (
    VERSION,
    Abort,
    AnyMessage,
    Bye,
    Cancel,
    Done,
    Fail,
    Filling,
    Flush,
    Flushed,
    Grant,
    Report,
    Resume,
    Revoke,
    Space,
    Ticket,
    decode,
    to_session_decoder,
)

logger = logging.getLogger("gpu_worker")

LOOK_S = 1.0
"""The longest between two looks for who has waited too long in an outage."""


class Session:
    """One session, from its first frame to its end. Thread-safe; its connection's `Speaker`."""

    def __init__(
        self,
        path: str,
        workers: weakref.WeakSet[Holder],
        unused: Callable[[], object],
        patience_s: float,
    ) -> None:
        """Describe a session with the coordinator on `path`.

        Args:
            workers: those who share it.
            unused: called, from either thread, whenever this may have become of no use.
            patience_s: how long a call waits while no coordinator answers.
        """
        self.path = path
        self.patience_s = patience_s
        self.connection = Connection(path, self, patience_s)
        self.lock = self.connection.lock
        self.leases = Leases(self.connection, workers, unused)
        self.requests = RequestTable()
        self.hello = Resume(VERSION)
        """Who it is. Its token is the same on each connection, and another one in each process."""
        self.stopped = False
        self._workers = workers
        self._unused = unused
        self._handshake = RequestId(0)
        """The id of the FLUSH behind the last statement: its answer says that it was taken."""

    @property
    def over(self) -> bool:
        """Whether nothing can be asked through this any more."""
        return self.connection.closing or self.connection.lost is not None

    def introduce(self, hello: Resume) -> None:
        """Say on each connection from now on that this is `hello`, under a token of its own."""
        self.hello = msgspec.structs.replace(hello, token=os.urandom(16).hex())

    def after_fork(self) -> None:
        """In a forked child: be another session, which has what its parent's had but requests."""
        free_after_fork(self.lock)
        with self.lock:
            self.requests.after_fork()
            self.introduce(self.hello)
            self.connection.after_fork()
            if not self.connection.closing:
                self.leases.after_fork(lambda: LeaseId(self.requests.next_rid()))

    def start_after_fork(self) -> None:
        """In a forked child: have the threads of that session."""
        if self.connection.closing:
            return
        try:
            self.leases.keeper.start()
            self.connection.start_after_fork()
        except RuntimeError as error:
            # Who waited for either would wait for ever.
            self.connection.closing = True
            self.connection.lost = ResourceError(
                f"this forked child is not attached: {error}",
                remedy="allow it more threads: `ulimit -u`, or its control group's limit",
            )
            raise

    # --- asking ---------------------------------------------------------------------------------

    def round_trip(self, timeout_s: float, *, patient: bool = True) -> None:
        patience_s = self.patience_s if patient else 0.0
        request = Request(None, timeout_s, timeout_s, patience_s, kind="flush")
        try:
            self.ask(request, Flush)
            self.next(request)
        finally:
            self.put_away(request)

    def next(self, request: Request) -> Step:
        """Wait for what comes next. Who runs out of time in an outage hears of that.

        Raises:
            CoordinatorLost: it did.
            WeightCacheError: as `Request.next`.
        """
        try:
            return request.next()
        except LoadTimeout:
            if self.connection.away is None:
                raise
            raise self._outage() from None

    def _outage(self) -> CoordinatorLost:
        """Return what a caller hears that nobody answers."""
        away = self.connection.away
        if isinstance(away, CoordinatorLost):
            return copy.copy(away)
        why = "" if away is None else f": {away.message}"
        return ConnectionLost(f"the coordinator on {self.path} cannot be reached{why}")

    def ask(self, request: Request, make: Callable[[RequestId], AnyMessage]) -> None:
        """Send a request under the next id, now or as soon as somebody answers."""
        with self.lock:
            lost = self.connection.lost
            if self.connection.closing and lost is None:
                # Its end is on the way; a lease granted behind that would be nobody's to release.
                lost = WorkerClosed(CLOSED)
            if lost is None and self.connection.away is not None and not request.patience_s:
                lost = self._outage()
            if lost is None:
                request.say = make
                self.requests.add(request)
                self._post(request)
                request.sent = True
                return
        if self.stopped and threading.current_thread().daemon:
            threading.Event().wait()  # until the interpreter, which is ending, ends this thread
        raise copy.copy(lost)

    def _post(self, request: Request) -> None:
        """Ask for what a request asks for. The lock is held."""
        assert request.say is not None
        self.connection.post(request.say(request.rid), tuple(request.fds))

    def put_away(self, request: Request) -> None:
        """Its asker is through with a request; its final answer may still be to come."""
        if os.getpid() != request.pid:
            return  # its fds are closed here, and it is the parent's
        with self.lock:
            request.wanted = False
            if not request.sent:
                self.requests.remove(request.rid)  # nobody answers
        request.close()

    def give_up(self, request: Request) -> None:
        """Nobody waits any more. Before SPACE that is CANCEL, or ABORT of a ticket; then ABORT."""
        if os.getpid() != request.pid:
            return  # it is the parent's, which goes on with it
        with self.lock:
            request.wanted = False
        request.close()  # before the ABORT, or the memory would stay when the books call it free
        with self.lock:
            if not request.rid:
                return
            if not request.sent:
                # It may have left or not, so its answer cannot be counted on.
                self.requests.remove(request.rid)
            elif request not in self.requests and not request.space:
                return
            if request.gen is not None and (request.space or not request.reserved):
                # Even after a refusal: a segment that could not be sealed waits for its ABORT.
                self.connection.post(Abort(request.gen))
            else:
                self.connection.post(Cancel(request.rid))

    # --- the reader's: `connection.Speaker` -----------------------------------------------------

    def take(self, data: bytes, fds: list[int]) -> None:
        """Act on one message. Takes over its fds."""
        try:
            message = decode(to_session_decoder, data)
            charge = isinstance(message, Grant) and self._is_charge(message, fds)
            if len(fds) not in self._fds_of(message, fds):
                raise ProtocolViolation(f"{type(message).__name__} came with {len(fds)} fds")
        except ProtocolViolation:
            close_all(fds)
            raise
        match message:
            case Grant() if charge:
                self._take_charge(message, *fds)
            case Grant():
                self._take_grant(message, fds[0])
            case Revoke():
                self.leases.take_revoke(message)
            case Space():
                self._take_space(message, *fds)
            case Ticket(rid, gen, _, fingerprint):
                with self.lock:
                    request = self.requests.get(rid)
                    if request is not None:
                        request.gen, request.fingerprint = gen, fingerprint
                        request.inbox.put(message)
            case Filling(rid):
                request = self.requests.get(rid)
                if request is not None and request.progress is not None:
                    request.inbox.put(message)
            case Fail(0, cause):
                self.connection.farewell = cause.error()
            case Fail(rid, cause):
                self._answer(rid, cause.error())
            case Flushed(rid) if rid == self._handshake:
                self.connection.settle()
                self.leases.count_later()  # that coordinator may be another
                logger.info("the coordinator on %s answers again", self.path)
            case Flushed(rid):
                self._answer(rid, message)
            case Done(rid) if self.requests.get(rid) is None or self._is(rid, "invalidate"):
                self._answer(rid, message)
            case Bye():
                self.connection.farewell = Draining(
                    f"the coordinator on {self.path} has left",
                    remedy="attach again once it runs again; mapped weights stay valid",
                )
            case Done() | Report():
                raise ProtocolViolation(f"nobody asked for {type(message).__name__}")

    def _take_grant(self, message: Grant, fd: int) -> None:
        """Hand what was granted to who asked for it, or give it back."""
        request = self.requests.get(message.rid)
        wanted = request is not None and request.wanted and request.kind != "prefetch"
        reply: Granted | WeightCacheError | None = None
        try:
            buffer = self.leases.take_grant(message.gen, LeaseId(message.rid), fd, wanted)
            if buffer is not None:
                reply = Granted(message.gen, buffer)
        except WeightCacheError as error:
            reply = error
        self._answer(message.rid, reply)

    def _take_charge(self, message: Grant, fd: int = -1) -> None:
        with self.lock:
            request = self.requests.get(message.rid)
            charge = None if request is None else request.charge
            if charge is None:
                self.leases.release(message.gen, LeaseId(message.rid))
            else:
                self.leases.take_charge(charge, message.gen, LeaseId(message.rid), fd)
        self._answer(message.rid, charge)

    def _is_charge(self, message: Grant, fds: list[int]) -> bool:
        request = self.requests.get(message.rid)
        return not fds if request is None else request.kind in ("charge", "share")

    def _fds_of(self, message: AnyMessage, fds: list[int]) -> tuple[int, ...]:
        """Return how many fds may come with a message; it depends on what it answers."""
        match message:
            case Grant(rid):
                request = self.requests.get(rid)
                return (0, 1) if request is None else (int(request.kind != "charge"),)
            case Space(gen):
                filled = [request.kind for request in self.requests if request.gen == gen]
                return (int("share" not in filled),) if filled else (0, 1)
            case _:
                return (0,)

    def _is(self, rid: RequestId, kind: str) -> bool:
        request = self.requests.get(rid)
        return request is not None and request.kind == kind

    def _take_space(self, message: Space, fd: int = -1) -> None:
        """Hand the segment to its filler; with nobody there, give it back.

        Of memory on a device there is none yet.
        """
        with self.lock:
            for request in self.requests:
                if request.gen == message.gen and request.wanted:
                    request.space, request.fds = True, [] if fd < 0 else [fd]
                    request.inbox.put(message)
                    return
            if fd >= 0:
                os.close(fd)
            self.connection.post(Abort(message.gen))

    def _answer(self, rid: RequestId, reply: Reply | None) -> None:
        """Close a request with its final answer, which nobody may want."""
        with self.lock:
            request = self.requests.remove(rid)
        if request is not None and reply is not None:
            self._tell(request, reply)
        if not self._workers:
            self._unused()

    def _tell(self, request: Request, reply: Reply) -> None:
        """Tell an asker. Of a prefetch that came to nothing, tell the log."""
        request.inbox.put(reply)
        if request.kind == "prefetch" and request.wanted and isinstance(reply, WeightCacheError):
            said = functools.partial(
                logger.warning, "weight-cache: %r was not prefetched: %s", request.key, reply
            )
            self.leases.keeper.put(said)  # log handlers are other people's code

    def parted(self, fault: WeightCacheError | None) -> None:
        """There is no connection. What failed here would fail again, so who waits hears of it."""
        if fault is not None:
            self._fail_all(fault)

    def bear(self) -> float:
        """Tell those who have waited too long in an outage; return when to look again."""
        now_s = time.monotonic()
        with self.lock:
            late, next_s = self.requests.impatient(now_s, self.connection.away_since_s)
        for request in late:
            request.inbox.put(self._outage())
        if not self._workers:
            self._unused()
        return min(LOOK_S, next_s - now_s)

    def state(self) -> None:
        """Say who it is; after an outage, all that it has, and what it still asks for."""
        if not self.connection.lasting:
            self.connection.post(self.hello)
            return
        self.requests.drop_unwanted()
        fills, others = self.requests.ask_anew()
        post_statement(self.connection, self.hello, self.leases, fills)
        for request in others:
            self._post(request)
        self._handshake = self.requests.next_rid()
        self.connection.post(Flush(self._handshake))

    def ended(self, error: WeightCacheError) -> None:
        """The connection has ended: everyone who waits hears why."""
        if self.stopped:
            return
        with self.lock:
            self._fail_all(error)
        logger.info("the connection to %s has ended: %s", self.path, error.message)
        self._unused()

    def _fail_all(self, error: WeightCacheError) -> None:
        """Close every request with an error. The lock is held."""
        for request in self.requests:
            self.requests.remove(request.rid)
            self._tell(request, error)
