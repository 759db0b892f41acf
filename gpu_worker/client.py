"""What workers ask of their coordinator: weights, room, ends. Requests themselves are `session`'s.

Rules
- Nothing waits with a lock, but in the opening of the connection.
- `build` runs in the thread that asked, which then fills the segment. A connection that is lost
  meanwhile disturbs neither.

    Note on fork
    fact: a forked child has this object, but neither thread, and any lock may be held in it for
    ever
    consequence: using it there would hang, or speak in the parent's name
    choice: the at-fork hook frees the locks and makes it a session of its own, as after an outage.
    A call that was under way is its parent's: in the child it raises, by pid, at its next step
    cost: a child that never needs it has two threads; and where processes are copied without hooks,
    a call is refused
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from gpu_worker.fill_meter import FillMeter
from gpu_worker.leases import Holder
from gpu_worker.reentry import free_after_fork, owned, refuse_reentry
from gpu_worker.request import Ask, Build, Charge, Granted, Progress, Request
from gpu_worker.session import Session
from gpu_worker.waits import refuse_fork, steps
from shm_store import wire
from shm_store.checkpoint_files import open_checkpoint
from shm_store.errors import (
    BudgetExceeded,
    CallerError,
    InvalidateIncomplete,
    LoadTimeout,
    NoCoordinator,
    ProtocolViolation,
    ResourceError,
    WeightCacheError,
)
from shm_store.keys import GenerationId, Key
from shm_store.layout import PAGE_BYTES, round_up
from shm_store.wire import (
    RAM,
    SIZE_LIMIT_BYTES,
    TIMEOUT_LIMIT_S,
    VERSION,
    Acquire,
    Cancel,
    Commit,
    Declare,
    Done,
    Filling,
    Invalidate,
    Receive,
    Reserve,
    Resume,
    Space,
    Ticket,
)

if TYPE_CHECKING:
    from gpu_worker import publish
    from gpu_worker.device import DeviceSegment
    from gpu_worker.mapping import Buffer

logger = logging.getLogger("gpu_worker")

DEFAULT_TIMEOUT_S = 300.0
"""What the coordinator is told when the caller names none. It runs while nothing progresses."""

GRACE_S = 0.25
"""How much longer than its timeout a caller waits, so that a refusal that says why can win."""

HANDSHAKE_TIMEOUT_S = 10.0
RECEIVE_TIMEOUT_S = 10.0
EXIT_TIMEOUT_S = 10.0
SOURCE_NAME_LIMIT = 4096
POSSIBLE_TIMEOUT_S = 10.0

_NOBODYS = Key("possible")


class Client:
    """One session, as those see it who share it. Thread-safe.

    `workers` are those who share it and live; `registry` owns that set.
    """

    def __init__(
        self, path: str, unused: Callable[[Client], object], patience_s: float = 0.0
    ) -> None:
        """Describe a session with the coordinator on `path`; `open` makes it.

        Args:
            unused: called, from either thread, whenever this may have become of no use.
            patience_s: how long a call waits while no coordinator answers.
        """
        self.path = path
        self.place = os.path.abspath(path)
        """Where that is, also for who changes his working directory, or is another process."""
        self.pid = os.getpid()
        self.workers: weakref.WeakSet[Holder] = weakref.WeakSet()
        self._session = Session(path, self.workers, functools.partial(unused, self), patience_s)
        self._connection = self._session.connection
        self._lock = self._session.lock
        self.leases = self._session.leases
        self.keeper = self.leases.keeper
        self._opening = threading.RLock()
        self._opened = False
        self.background = False
        """What is loaded and shared through this waits behind all others, and takes nothing from
        anybody.
        """

    # --- for workers ----------------------------------------------------------------------------

    def open(self, name: str, device: str) -> bool:
        """Connect, say who attaches, and wait until the coordinator has taken it. Happens once.

        Returns:
            Whether this call did it; another may be at it, and is then waited for.

        Raises:
            NoCoordinator: nobody answers.
            CoordinatorLost: nobody answers any more, and this process has waited for that.
            PeerForbidden: this user may not use it.
            VersionMismatch: it speaks another version.
            FdsExhausted: this process has no fd left.
            PlatformUnsupported: not Linux.
        """
        if owned(self._opening):
            refuse_reentry()
        with self._opening:
            if not self._opened and not self.ended:
                self._open(name, device)
                self._opened = True
                return True
        if self._connection.away is not None:
            try:
                self._session.round_trip(TIMEOUT_LIMIT_S)
            except WeightCacheError:
                if not self.ended:
                    raise
        return False

    def _open(self, name: str, device: str) -> None:
        self._session.introduce(Resume(VERSION, name, device))
        try:
            self._connection.open()
            self.leases.start()
            self._session.round_trip(HANDSHAKE_TIMEOUT_S)
            self._connection.lasting = True
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
            progress: called while anybody fills. What it raises gives the request up.

        Raises:
            WeightCacheError: of any branch. Whatever is raised, `build`'s own exceptions and
                KeyboardInterrupt included, the request is given up and nothing stays leased by it.
        """
        self.check_caller()
        self._refuse_recursion(ask.key)
        left_s = None if timeout_s is None else timeout_s + GRACE_S
        request = Request(ask.key, timeout_s, left_s, self._session.patience_s, progress)
        try:
            self._let_go_first(request, ask.key)
            self._ask_for(request, ask)
            return self._follow(request, ask)
        except BaseException:
            self._session.give_up(request)
            raise
        finally:
            try:
                self._session.put_away(request)
            finally:
                # In place: an exception from outside could come into a call.
                fds, request.fds = request.fds, []
                any(map(os.close, fds))

    def receive(self, gen: GenerationId, key: Key) -> Buffer:
        """Return the mapped bytes of a generation that another process has sent to this one.

        Raises:
            ResourceError: it has no generation of this name any more, or was stopped.
            CoordinatorLost: nobody answers.
        """
        self.check_caller()
        limit_s, patience_s = RECEIVE_TIMEOUT_S, self._session.patience_s
        request = Request(key, limit_s, limit_s, patience_s)
        try:
            self._let_go_first(request, key)
            self._session.ask(request, lambda rid: Receive(rid, gen))
            match self._session.next(request):
                case Granted(_, buffer):
                    return buffer
                case step:
                    raise ProtocolViolation(f"a RECEIVE was answered with {step!r}")
        except BaseException:
            self._session.give_up(request)
            raise
        finally:
            self._session.put_away(request)

    def prefetch(self, ask: Ask) -> None:
        """Have a source loaded, and leave it to the coordinator. Nobody waits for it here."""
        self.check_caller()
        request = Request(ask.key, None, None, self._session.patience_s, kind="prefetch")
        try:
            self._ask_for(request, ask)
        finally:
            if not request.sent:
                self._session.put_away(request)

    def charge(
        self,
        charge: Charge,
        key: Key,
        pool: str,
        size_bytes: int,
        timeout_s: float | None,
        *,
        patient: bool = True,
    ) -> None:
        """Wait for room for private memory of this process, and have it counted.

        Args:
            charge: is made one of the coordinator's. It is the caller's to give back, by
                `leases.discharge`, whatever this raises.
            key: what it is for. For people only.
            patient: wait for a coordinator, too, if none answers.

        Raises:
            BudgetExceeded: there was none in time.
            CoordinatorLost: nobody answers.
        """
        self.check_caller()
        limit_s = _lasting(timeout_s)
        left_s = None if timeout_s is None else timeout_s + GRACE_S
        patience_s = self._session.patience_s if patient else 0.0
        request = Request(key, timeout_s, left_s, patience_s, kind="charge", charge=charge)
        size_bytes = round_up(size_bytes, PAGE_BYTES)
        charge.key, charge.pool, charge.size_bytes = key, pool, size_bytes
        try:
            self._session.ask(
                request,
                lambda rid: wire.Charge(
                    rid, pool, key, size_bytes, limit_s(), charge.fixed, charge.copy_of
                ),
            )
            step = self._session.next(request)
            if step is not charge:
                raise ProtocolViolation(f"a CHARGE was answered with {step!r}")
        except BaseException:
            self._session.give_up(request)
            raise

    def share(
        self,
        charge: Charge,
        key: Key,
        pool: str,
        size_bytes: int,
        make: Callable[[GenerationId], DeviceSegment],
        timeout_s: float | None,
    ) -> bool:
        """Wait for a lease on memory of a device that has the bytes of `charge.copy_of`.

        Returns:
            False if something of this process has one already: it has only one.

        Args:
            charge: is made that lease, with an fd of the memory. It is the caller's to give back,
                by `leases.discharge`, whatever this raises.
            make: allocates that memory and fills it, if this is who has to. It is closed here.

        Raises:
            BudgetExceeded: there was no room in time.
            CoordinatorLost: nobody answers.
            WeightCacheError: what `make` raises; or the coordinator did not take what it made.
        """
        self.check_caller()
        limit_s = _lasting(timeout_s)
        left_s = None if timeout_s is None else timeout_s + GRACE_S
        patience_s = self._session.patience_s
        request = Request(key, timeout_s, left_s, patience_s, kind="share", charge=charge)
        charge.key, charge.pool, charge.size_bytes = key, pool, size_bytes
        made: DeviceSegment | None = None
        if self.leases.shares(charge):
            # Whoever had it may just be leaving; and who was asked for it lets go before he asks.
            self._settle_first(request)
        with self._lock:
            if not self.leases.share(charge):
                return False
        try:
            self._session.ask(
                request,
                lambda rid: Acquire(
                    rid, key, None, charge.copy_of, limit_s(), self.background, pool
                ),
            )
            while True:
                match self._session.next(request):
                    case Ticket(_, gen):
                        if made is not None:
                            made.close()  # of a fill that ended with its connection: room for this
                        with self._lock:
                            if request.gen == gen:
                                request.reserved = True
                                self._connection.post(Reserve(gen, size_bytes))
                    case Space(gen):
                        made = make(gen)
                        with self._lock:
                            # Else it has ended with its connection: another ticket comes.
                            if request.gen == gen:
                                request.committed = True
                                self._connection.post(Commit(gen), (made.fd,))
                    case Charge():
                        return True
                    case step:
                        raise ProtocolViolation(f"an ACQUIRE was answered with {step!r}")
        except BaseException:
            if made is not None:
                made.close()  # before the ABORT, as in `give_up`
            self._session.give_up(request)
            raise
        finally:
            if made is not None:
                made.close()

    def possible_bytes(self, pool: str) -> int:
        """Return the most that this process could have in a pool, as things are.

        It is what the refusal of a CHARGE says that never could be met.

        Raises:
            CoordinatorLost: nobody answers.
        """
        try:
            self.charge(
                Charge(), _NOBODYS, pool, SIZE_LIMIT_BYTES, POSSIBLE_TIMEOUT_S, patient=False
            )
        except BudgetExceeded as refusal:
            return refusal.possible_bytes
        raise ProtocolViolation(f"pool {pool!r} has room for anything")

    def declare(self, pool: str, limit_bytes: int, *, budgeted: bool) -> None:
        """Say how much of a device's memory this process may use. Not answered."""
        self.leases.declare(Declare(pool, limit_bytes, budgeted))

    def invalidate(self, key: Key, timeout_s: float) -> bool:
        """Have what `key` is retired everywhere; say whether there was something.

        It is asked again if the connection is lost, and that may find it done already.

        Raises:
            InvalidateIncomplete: some process has not said in time that it knows.
            CoordinatorLost: nobody answers.
        """
        self.check_caller()
        left_s, patience_s = timeout_s + GRACE_S, self._session.patience_s
        request = Request(key, timeout_s, left_s, patience_s, kind="invalidate")
        limit_s = _lasting(timeout_s)
        try:
            self._session.ask(request, lambda rid: Invalidate(rid, key, limit_s()))
            match self._session.next(request):
                case Done(_, keys):
                    return bool(keys)
                case step:
                    raise ProtocolViolation(f"an INVALIDATE was answered with {step!r}")
        except LoadTimeout:
            raise InvalidateIncomplete(
                f"the coordinator has not said within {timeout_s:g} s whether all know that "
                f"{key!r} is retired"
            ) from None
        finally:
            self._session.put_away(request)

    def flush(self, timeout_s: float, *, patient: bool = True) -> None:
        """Wait until everything this process let go of has taken effect at the coordinator.

        Args:
            patient: wait for a coordinator, too, if none answers.

        Raises:
            ResourceError: it did not within `timeout_s`.
            CoordinatorLost: nobody answers.
        """
        self.check_caller()
        self.leases.count()
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
            left_s = max(0.0, timeout_s - (time.monotonic() - started_s))
            self._session.round_trip(left_s, patient=patient)
        except LoadTimeout:
            raise ResourceError(
                f"what was let go of had not taken effect after {timeout_s:g} s",
                remedy="see `weight-cache status`, or flush again with a longer timeout=",
            ) from None

    def check_caller(self) -> None:
        """Refuse a caller that could only hang here.

        Raises:
            ForkedProcess: a copy of its process, made without the hooks of os.fork.
            CallerError: called by a finalizer or a signal handler inside another call, or in one
                of the session's own threads.
        """
        refuse_fork(self.pid)
        if owned(self._lock) or self._connection.runs_here or self.keeper.runs_here:
            refuse_reentry()
        if self.leases.held_up:
            refuse_reentry()

    # --- for the registry -----------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether nothing can be asked through this any more."""
        return self._session.over

    def close_if_unused(self) -> bool:
        """End the session if nothing of it is mapped or asked for, once everything is sent."""
        with self._lock:
            for request in self._session.requests:
                if request.kind == "prefetch" and request.wanted:
                    # Nobody is left to profit. Told once; the answer closes it.
                    request.wanted = False
                    self._connection.post(Cancel(request.rid))
            if not self._connection.connected:
                self._session.requests.drop_unwanted()
            if self._session.requests or self.leases.any:
                return False
            self._connection.close()
        self.keeper.leave()
        return True

    def stop(self) -> None:
        """End both threads, whatever is still to do: the process is about to end.

        Daemon threads that wait are left to wait: woken now, they would only speak up on stderr.
        """
        self._session.stopped = True
        self._connection.close(hurry=True)
        self.keeper.stop(EXIT_TIMEOUT_S)
        self._connection.join(EXIT_TIMEOUT_S)

    @property
    def at_work(self) -> tuple[threading.RLock, ...]:
        """What its two threads hold while they are at something."""
        return self.keeper.at_work, self._connection.at_work

    def after_fork(self) -> None:
        """In a forked child: have all of it as its own. Nothing runs yet."""
        self.pid = os.getpid()
        free_after_fork(self._opening)
        self.keeper.renew()
        for worker in list(self.workers):
            worker.after_fork(self.keeper)
        self._session.after_fork()

    def start_after_fork(self) -> None:
        """In a forked child: begin to say so.

        Raises:
            RuntimeError: it gets no thread. What is asked through this raises ResourceError.
        """
        self._session.start_after_fork()

    def wait_attached(self, timeout_s: float) -> bool:
        """Say whether the coordinator has counted what a forked child has."""
        return self._connection.wait_settled(timeout_s)

    # --- asking ---------------------------------------------------------------------------------

    def _let_go_first(self, request: Request, key: Key) -> None:
        """Give back what the coordinator has asked for of a key, before that is asked for again.

        Else the new lease would overtake the RELEASE of the old, and whoever waits for the room
        would wait for as long as this process goes on asking.
        """
        if self.leases.leaving(key):
            self._settle_first(request)

    def _settle_first(self, request: Request) -> None:
        """Have the keeper give back what it was asked for so far, in the time of a request."""
        started_s = time.monotonic()
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        with self._lock:
            if self._connection.closing:
                return
            self.keeper.call_settled(functools.partial(done.put, None))
        self._wait_for_keeper(done, TIMEOUT_LIMIT_S if request.left_s is None else request.left_s)
        if request.left_s is not None:
            request.left_s = max(0.0, request.left_s - (time.monotonic() - started_s))

    def _ask_for(self, request: Request, ask: Ask) -> None:
        """Send an ACQUIRE, with the opened files of the source if there is one."""
        timeout_s = DEFAULT_TIMEOUT_S if request.timeout_s is None else request.timeout_s
        if ask.source is None:
            version = ask.version
            self._session.ask(request, lambda rid: Acquire(rid, ask.key, None, version, timeout_s))
            return
        # The name is for people, and may be cut or escaped: the fd says which file is meant.
        prefetch = request.kind == "prefetch" or self.background
        opened = open_checkpoint(ask.source, request.fds)
        if opened.extra:
            logger.warning(
                "weight-cache: %s does not name %s, which is not read",
                opened.name,
                ", ".join(opened.extra),
            )
        # The name is for people, and may be cut or escaped: the fds say which files are meant.
        name = os.fsencode(opened.name).decode("utf-8", "backslashreplace")[:SOURCE_NAME_LIMIT]
        about = (ask.version, timeout_s, prefetch, RAM, opened.files, ask.reading)
        self._session.ask(request, lambda rid: Acquire(rid, ask.key, name, *about))

    def _follow(self, request: Request, ask: Ask) -> Granted:
        """Do what the coordinator asks for until the weights are here."""
        plan: publish.Plan | None = None
        while True:
            match self._session.next(request):
                case Granted() as granted:
                    return dataclasses.replace(granted, left_s=request.left_s)
                case Filling(_, done_bytes, total_bytes) if request.progress is not None:
                    request.progress(done_bytes, total_bytes)
                case Ticket(_, gen) if ask.build is not None:
                    if plan is None and request.gen == gen:
                        plan = self._build(request, ask.build)
                    with self._lock:
                        # Else it has ended with its connection: the next answer says how it goes
                        # on, and another ticket finds the plan made.
                        if plan is not None and request.gen == gen:
                            request.reserved = True
                            self._connection.post(Reserve(gen, plan.size_bytes))
                case Space(gen) if plan is not None:
                    self._fill(request, plan)
                    with self._lock:
                        request.committed = True
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
        refuse_fork(request.pid)
        if not plan.groups:
            logger.warning(
                "weight-cache: %r: build= returned no tensor; others get nothing either, until "
                "version= changes or it is evicted",
                request.key,
            )
        return plan

    def _fill(self, request: Request, plan: publish.Plan) -> None:
        from gpu_worker import publish

        meter = FillMeter(plan.left_bytes, functools.partial(self._came_to, request, request.gen))
        publish.fill(request.fds[0], plan, meter.add)
        meter.finish()

    def _came_to(
        self, request: Request, gen: GenerationId | None, done_bytes: int, total_bytes: int
    ) -> None:
        """Tell everybody how far this process has filled `gen`, who asked here first of all."""
        with self._lock:
            if gen is not None and request.gen == gen:
                self._connection.post(wire.Progress(gen, done_bytes, total_bytes))
        if request.progress is not None:
            request.progress(done_bytes, total_bytes)
            refuse_fork(request.pid)

    def _wait_for_keeper(self, done: queue.SimpleQueue[None], timeout_s: float) -> None:
        for step_s in steps(timeout_s, os.getpid()):
            try:
                return done.get(timeout=step_s)
            except queue.Empty:
                continue
        raise LoadTimeout("the keeper is not through with its queue")

    def _refuse_recursion(self, key: Key) -> None:
        """Refuse a `build` that asks for what it is building: it would wait for itself."""
        thread = threading.get_ident()
        with self._lock:
            for request in self._session.requests:
                if request.builder == thread and request.key == key:
                    raise CallerError(f"the build= of {key!r} asks for {key!r} itself")


def _lasting(timeout_s: float | None) -> Callable[[], float]:
    """Return what says how long the coordinator may wait, of what is asked once more, too.

    It is to answer first: it knows who keeps what.
    """
    if timeout_s is None:
        return lambda: DEFAULT_TIMEOUT_S
    end_s = time.monotonic() + timeout_s
    return lambda: max(0.0, end_s - time.monotonic())
