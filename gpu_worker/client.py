"""The session of this process with a coordinator: requests and their answers.

Rules
- The connection's lock orders the requests' ids and guards what is open. Nobody waits with it.
- The reader thread never touches torch and runs no user code.
- A request stays open until its final answer, even when nobody wants that any more; what then
  arrives is given back by the reader.
- A caller waits at its own request's inbox, with no lock, and may leave by any exception.
- What was granted, `leases` looks after.

    Note on fork
    fact: a forked child has this object, but neither thread, and any lock may be held in it for
    ever
    consequence: using it there would hang, or speak in the parent's name
    choice: refuse by pid before any lock is touched, at the start of a call and after each callback
    in it; the at-fork hook only closes fds
    cost: a few getpid() per call
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gpu_worker.connection import CLOSED, Connection
from gpu_worker.leases import Holder, Leases
from gpu_worker.reentry import owned, refuse_reentry
from gpu_worker.request import Ask, Build, Charge, Granted, Progress, Reply, Request
from gpu_worker.waits import refuse_fork, steps
from shm_store import wire
from shm_store.channel import close_all
from shm_store.errors import (
    CallerError,
    Draining,
    LoadTimeout,
    NoCoordinator,
    ProtocolViolation,
    ResourceError,
    WeightCacheError,
    WorkerClosed,
)
from shm_store.keys import Key, LeaseId, RequestId
from shm_store.layout import PAGE_BYTES, round_up
from shm_store.source import open_source
from shm_store.wire import (
    TIMEOUT_LIMIT_S,
    VERSION,
    Abort,
    Acquire,
    AnyMessage,
    Bye,
    Cancel,
    Commit,
    Done,
    Fail,
    Filling,
    Flush,
    Flushed,
    Grant,
    Invalidate,
    Report,
    Reserve,
    Resume,
    Revoke,
    Space,
    Ticket,
    decode,
    to_session_decoder,
)

if TYPE_CHECKING:
    from gpu_worker import publish

logger = logging.getLogger("gpu_worker")

DEFAULT_TIMEOUT_S = 300.0
"""What the coordinator is told when the caller names none. It runs while nothing progresses."""

GRACE_S = 0.25
"""How much longer than its timeout a caller waits, so that a refusal that says why can win."""

HANDSHAKE_TIMEOUT_S = 10.0
EXIT_TIMEOUT_S = 10.0
SOURCE_NAME_LIMIT = 4096


class Client:
    """One session and its connection. Thread-safe.

    `workers` are those who share it and live; `registry` owns that set.
    """

    def __init__(self, path: str, unused: Callable[[Client], object]) -> None:
        """Describe a session with the coordinator on `path`; `open` makes it.

        Args:
            unused: called, from either thread, whenever this may have become of no use.
        """
        self.path = path
        self.pid = os.getpid()
        self.workers: weakref.WeakSet[Holder] = weakref.WeakSet()
        self._connection = Connection(path, self._take, self._lose)
        self._lock = self._connection.lock
        self.leases = Leases(self._connection, self.workers, functools.partial(unused, self))
        self.keeper = self.leases.keeper
        self._opening = threading.RLock()
        self._opened = False
        self._unused = unused
        self._rids = itertools.count(1)
        self._requests: dict[RequestId, Request] = {}
        self._stopped = False

    # --- for workers ----------------------------------------------------------------------------

    def open(self, name: str, device: str) -> bool:
        """Connect, say who attaches, and wait until the coordinator has taken it. Happens once.

        Returns:
            Whether this call did it; another may be at it, and is then waited for.

        Raises:
            NoCoordinator: nobody answers.
            PeerForbidden: this user may not use it.
            VersionMismatch: it speaks another version.
            FdsExhausted: this process has no fd left.
            PlatformUnsupported: not Linux.
        """
        if owned(self._opening):
            refuse_reentry()
        with self._opening:
            if self._opened or self.ended:
                return False
            self._open(name, device)
            self._opened = True
            return True

    def _open(self, name: str, device: str) -> None:
        try:
            self._connection.open(Resume(VERSION, name, device))
            self.leases.start()
            self._round_trip(HANDSHAKE_TIMEOUT_S)
        except BaseException as error:
            self._connection.close(hurry=True)
            self.keeper.leave()
            if isinstance(error, LoadTimeout):
                raise NoCoordinator(
                    f"{self.path} was opened, but nobody answered in {HANDSHAKE_TIMEOUT_S:g} s"
                ) from None
            raise

    def acquire(self, ask: Ask, timeout_s: float | None, progress: Progress | None) -> Granted:
        """Return the mapped bytes of `ask.key`, made first if nobody has them yet.

        If this process gets the ticket, `ask.build` runs here, in the calling thread.

        Args:
            timeout_s: how long to wait for others; the caller's own `build` does not count. None
                leaves it to the coordinator, which waits as long as there is progress.
            progress: called while somebody else fills. What it raises gives the request up.

        Raises:
            WeightCacheError: of any branch. Whatever is raised, `build`'s own exceptions and
                KeyboardInterrupt included, the request is given up and nothing stays leased by it.
        """
        self.check_caller()
        self._refuse_recursion(ask.key)
        left_s = None if timeout_s is None else timeout_s + GRACE_S
        request = Request(ask.key, timeout_s, left_s, progress)
        try:
            self._let_go_first(request, ask.key)
            self._ask_for(request, ask)
            return self._follow(request, ask)
        except BaseException:
            self._give_up(request)
            raise

    def prefetch(self, ask: Ask) -> None:
        """Have a source loaded, and leave it to the coordinator. Nobody waits for it here."""
        self.check_caller()
        request = Request(ask.key, None, None, wanted=False, prefetch=True)
        try:
            self._ask_for(request, ask, prefetch=True)
        finally:
            self._forget_unsent(request)

    def charge(
        self, charge: Charge, key: Key, pool: str, size_bytes: int, timeout_s: float | None
    ) -> None:
        """Wait for room for private memory of this process, and have it counted.

        Args:
            charge: is made one of the coordinator's. It is the caller's to give back, by
                `leases.discharge`, whatever this raises.
            key: what it is for. For people only.

        Raises:
            BudgetExceeded: there was none in time.
            CoordinatorLost: nobody answers.
        """
        self.check_caller()
        limit_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        left_s = None if timeout_s is None else timeout_s + GRACE_S
        request = Request(key, timeout_s, left_s, kind="charge", charge=charge)
        size_bytes = round_up(size_bytes, PAGE_BYTES)
        try:
            self._ask(request, lambda rid: wire.Charge(rid, pool, key, size_bytes, limit_s))
            step = request.next()
            if step is not charge:
                raise ProtocolViolation(f"a CHARGE was answered with {step!r}")
        except BaseException:
            self._give_up(request)
            raise

    def invalidate(self, key: Key, timeout_s: float) -> bool:
        """Have what `key` is retired everywhere; say whether there was something.

        Raises:
            InvalidateIncomplete: some process has not said in time that it knows.
        """
        self.check_caller()
        request = Request(key, timeout_s, timeout_s + GRACE_S, kind="invalidate")
        try:
            self._ask(request, lambda rid: Invalidate(rid, key, timeout_s))
            match request.next():
                case Done(_, keys):
                    return bool(keys)
                case step:
                    raise ProtocolViolation(f"an INVALIDATE was answered with {step!r}")
        finally:
            self._forget_unsent(request)

    def flush(self, timeout_s: float) -> None:
        """Wait until everything this process let go of has taken effect at the coordinator.

        Raises:
            ResourceError: it did not within `timeout_s`.
            CoordinatorLost: there is no connection any more.
        """
        self.check_caller()
        started_s = time.monotonic()
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        try:
            with self._lock:
                # Together with the check: once it closes, the keeper ends behind what is queued.
                kept = not self._connection.closing
                if kept:
                    self.keeper.call_settled(functools.partial(done.put, None))
            if kept:
                self._wait_for_keeper(done, timeout_s)
            self._round_trip(max(0.0, timeout_s - (time.monotonic() - started_s)))
        except LoadTimeout:
            raise ResourceError(
                f"what was let go of had not taken effect after {timeout_s:g} s",
                remedy="see `weight-cache status`, or flush again with a longer timeout=",
            ) from None

    def check_caller(self) -> None:
        """Refuse a caller that could only hang here.

        Raises:
            ForkedProcess: a forked child with its parent's client.
            CallerError: called by a finalizer or a signal handler inside another call, or in one
                of the session's own threads.
        """
        refuse_fork(self.pid)
        if owned(self._lock) or self._connection.runs_here or self.keeper.runs_here:
            refuse_reentry()

    # --- for the registry -----------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether nothing can be asked through this any more."""
        return self._connection.closing or self._connection.lost is not None

    def close_if_unused(self) -> bool:
        """End the session if nothing of it is mapped or asked for, once everything is sent."""
        with self._lock:
            for request in self._requests.values():
                if request.prefetch:
                    # Nobody is left to profit. Told once; the answer closes it.
                    request.prefetch = False
                    self._connection.post(Cancel(request.rid))
            if self._requests or self.leases.any:
                return False
            self._connection.close()
        self.keeper.leave()
        return True

    def stop(self) -> None:
        """End both threads, whatever is still to do: the process is about to end.

        Daemon threads that wait are left to wait: woken now, they would only speak up on stderr.
        """
        self._stopped = True
        self._connection.close(hurry=True)
        self.keeper.stop(EXIT_TIMEOUT_S)
        self._connection.join(EXIT_TIMEOUT_S)

    def forget_inherited(self) -> None:
        """In a forked child: close what belongs to the parent. Touches no lock."""
        for request in list(self._requests.values()):
            request.close_space()
        self._connection.forget_inherited()

    # --- asking ---------------------------------------------------------------------------------

    def _let_go_first(self, request: Request, key: Key) -> None:
        """Give back what the coordinator has asked for of a key, before that is asked for again.

        Else the new lease would overtake the RELEASE of the old, and whoever waits for the room
        would wait for as long as this process goes on asking.
        """
        if not self.leases.leaving(key):
            return
        started_s = time.monotonic()
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        with self._lock:
            if self._connection.closing:
                return
            self.keeper.call_settled(functools.partial(done.put, None))
        self._wait_for_keeper(done, TIMEOUT_LIMIT_S if request.left_s is None else request.left_s)
        if request.left_s is not None:
            request.left_s = max(0.0, request.left_s - (time.monotonic() - started_s))

    def _ask_for(self, request: Request, ask: Ask, *, prefetch: bool = False) -> None:
        """Send an ACQUIRE, with the opened source if there is one."""
        timeout_s = DEFAULT_TIMEOUT_S if request.timeout_s is None else request.timeout_s
        if ask.source is None:
            self._ask(request, lambda rid: Acquire(rid, ask.key, None, ask.version, timeout_s))
            return
        # The name is for people, and may be cut or escaped: the fd says which file is meant.
        name = os.fsencode(ask.source).decode("utf-8", "backslashreplace")[:SOURCE_NAME_LIMIT]
        fd = open_source(ask.source)
        try:
            self._ask(
                request, lambda rid: Acquire(rid, ask.key, name, "", timeout_s, prefetch), (fd,)
            )
        finally:
            os.close(fd)

    def _follow(self, request: Request, ask: Ask) -> Granted:
        """Do what the coordinator asks for until the weights are here."""
        plan: publish.Plan | None = None
        while True:
            match request.next():
                case Granted() as granted:
                    return dataclasses.replace(granted, left_s=request.left_s)
                case Filling(_, done_bytes, total_bytes) if request.progress is not None:
                    request.progress(done_bytes, total_bytes)
                case Ticket(_, gen) if ask.build is not None:
                    plan = self._build(request, ask.build)
                    with self._lock:
                        request.reserved = True
                        self._connection.post(Reserve(gen, plan.size_bytes))
                case Space(gen) if plan is not None:
                    self._fill(request, plan)
                    with self._lock:
                        self._connection.post(Commit(gen))
                case step:
                    raise ProtocolViolation(f"an ACQUIRE was answered with {step!r}")

    def _build(self, request: Request, build: Build) -> publish.Plan:
        from gpu_worker import publish

        request.builder = threading.get_ident()
        try:
            plan = publish.plan(build())
        finally:
            request.builder = None
        refuse_fork(self.pid)
        if not plan.groups:
            logger.warning(
                "weight-cache: %r: build= returned no tensor; others get nothing either, until "
                "version= changes or it is evicted",
                request.key,
            )
        return plan

    def _fill(self, request: Request, plan: publish.Plan) -> None:
        from gpu_worker import publish

        try:
            publish.fill(request.space_fd, plan)
        finally:
            request.close_space()

    def _wait_for_keeper(self, done: queue.SimpleQueue[None], timeout_s: float) -> None:
        for step_s in steps(timeout_s, self.pid):
            try:
                return done.get(timeout=step_s)
            except queue.Empty:
                continue
        raise LoadTimeout("the keeper is not through with its queue")

    def _round_trip(self, timeout_s: float) -> None:
        request = Request(None, timeout_s, timeout_s, kind="flush")
        try:
            self._ask(request, Flush)
            request.next()
        finally:
            self._forget_unsent(request)

    def _forget_unsent(self, request: Request) -> None:
        """Close a request that an exception from outside kept from being sent: nobody answers."""
        if not request.sent:
            with self._lock:
                self._requests.pop(request.rid, None)

    def _ask(
        self, request: Request, make: Callable[[RequestId], AnyMessage], fds: Sequence[int] = ()
    ) -> None:
        """Send a request under the next id. The fds stay the caller's."""
        with self._lock:
            lost = self._connection.lost
            if self._connection.closing and lost is None:
                # Its end is on the way; a lease granted behind that would be nobody's to release.
                lost = WorkerClosed(CLOSED)
            if lost is None:
                request.rid = RequestId(next(self._rids))
                self._requests[request.rid] = request
                self._connection.post(make(request.rid), fds)
                request.sent = True
                return
        if self._stopped and threading.current_thread().daemon:
            threading.Event().wait()  # until the interpreter, which is ending, ends this thread
        raise copy.copy(lost)

    def _give_up(self, request: Request) -> None:
        """Nobody waits any more. Before SPACE that is CANCEL, or ABORT of a ticket; then ABORT."""
        if os.getpid() != self.pid:
            return  # it is the parent's, which goes on with it
        request.close_space()
        with self._lock:
            request.wanted = False
            if not request.rid:
                return
            if not request.sent:
                # It may have left or not, so its answer cannot be counted on.
                self._requests.pop(request.rid, None)
            elif request.rid not in self._requests and not request.space:
                return
            if request.gen is not None and (request.space or not request.reserved):
                # Even after a refusal: a segment that could not be sealed waits for its ABORT.
                self._connection.post(Abort(request.gen))
            else:
                self._connection.post(Cancel(request.rid))

    def _refuse_recursion(self, key: Key) -> None:
        """Refuse a `build` that asks for what it is building: it would wait for itself."""
        thread = threading.get_ident()
        with self._lock:
            for request in self._requests.values():
                if request.builder == thread and request.key == key:
                    raise CallerError(f"the build= of {key!r} asks for {key!r} itself")

    # --- the reader's ---------------------------------------------------------------------------

    def _take(self, data: bytes, fds: list[int]) -> None:
        """Act on one message. Takes over its fds."""
        try:
            message = decode(to_session_decoder, data)
            charge = isinstance(message, Grant) and self._is(message.rid, "charge")
            if len(fds) != (isinstance(message, Grant | Space) and not charge):
                raise ProtocolViolation(f"{type(message).__name__} came with {len(fds)} fds")
        except ProtocolViolation:
            close_all(fds)
            raise
        match message:
            case Grant() if charge:
                self._take_charge(message)
            case Grant():
                self._take_grant(message, fds[0])
            case Revoke():
                self.leases.take_revoke(message)
            case Space():
                self._take_space(message, fds[0])
            case Ticket(rid, gen):
                with self._lock:
                    request = self._requests.get(rid)
                    if request is not None:
                        request.gen = gen
                        request.inbox.put(message)
            case Filling(rid):
                request = self._requests.get(rid)
                if request is not None and request.progress is not None:
                    request.inbox.put(message)
            case Fail(0, cause):
                self._connection.farewell = cause.error()
            case Fail(rid, cause):
                self._answer(rid, cause.error())
            case Flushed(rid):
                self._answer(rid, message)
            case Done(rid) if self._is(rid, "invalidate"):
                self._answer(rid, message)
            case Bye():
                self._connection.farewell = Draining(
                    f"the coordinator on {self.path} has left",
                    remedy="attach again once it runs again; mapped weights stay valid",
                )
            case Done() | Report():
                raise ProtocolViolation(f"nobody asked for {type(message).__name__}")

    def _take_grant(self, message: Grant, fd: int) -> None:
        """Hand what was granted to who asked for it, or give it back."""
        request = self._requests.get(message.rid)
        wanted = request is not None and request.wanted
        reply: Granted | WeightCacheError | None = None
        try:
            buffer = self.leases.take_grant(message.gen, LeaseId(message.rid), fd, wanted)
            if buffer is not None:
                reply = Granted(message.gen, buffer)
        except WeightCacheError as error:
            reply = error
        self._answer(message.rid, reply)

    def _take_charge(self, message: Grant) -> None:
        with self._lock:
            charge = self._requests[message.rid].charge
            assert charge is not None
            self.leases.take_charge(charge, message.gen, LeaseId(message.rid))
        self._answer(message.rid, charge)

    def _is(self, rid: RequestId, kind: str) -> bool:
        request = self._requests.get(rid)
        return request is not None and request.kind == kind

    def _take_space(self, message: Space, fd: int) -> None:
        """Hand the segment to its filler; with nobody there, give it back."""
        with self._lock:
            for request in self._requests.values():
                if request.gen == message.gen and request.wanted:
                    request.space, request.space_fd = True, fd
                    request.inbox.put(message)
                    return
            os.close(fd)
            self._connection.post(Abort(message.gen))

    def _answer(self, rid: RequestId, reply: Reply | None) -> None:
        """Close a request with its final answer, which nobody may want."""
        with self._lock:
            request = self._requests.pop(rid, None)
        if request is not None and reply is not None:
            request.inbox.put(reply)
        if request is not None and request.prefetch and isinstance(reply, WeightCacheError):
            said = functools.partial(
                logger.warning, "weight-cache: %r was not prefetched: %s", request.key, reply
            )
            self.keeper.put(said)  # log handlers are other people's code
        if not self.workers:
            self._unused(self)

    def _lose(self, error: WeightCacheError) -> None:
        """The connection has ended: everyone who waits hears why."""
        with self._lock:
            requests, self._requests = list(self._requests.values()), {}
        if self._stopped:
            return
        for request in requests:
            request.inbox.put(error)
        logger.info("the connection to %s has ended: %s", self.path, error.message)
        self._unused(self)
