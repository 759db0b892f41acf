"""The public face: attach, then state dicts and modules by key.

Rules
- One lock per worker, held for a few lines around its records; never while anything waits, and
  never while a module is built, moved or destroyed.
- One load per key at a time: the others wait for it and share its module, or go on by themselves
  if it fails.
- A handle has its claim before anyone could take the record away: lookup and claim are one step.
- What a call leaves half done, by whatever exception, its handle's finalizer ends. That only
  enqueues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from gpu_worker import arguments, registry
from gpu_worker.callbacks import Callbacks
from gpu_worker.client import Client
from gpu_worker.flights import Flight, Flights
from gpu_worker.handle import ModelHandle
from gpu_worker.keeper import Keeper
from gpu_worker.leases import Seen
from gpu_worker.records import ClaimId, Held, LockId, Origin, Record, Records
from gpu_worker.reentry import owned, refuse_reentry
from gpu_worker.request import Ask, Build, Charge, Progress
from gpu_worker.waits import refuse_fork
from shm_store.errors import (
    ArgumentRefused,
    CallerError,
    CoordinatorLost,
    ResourceError,
    WorkerClosed,
    listed,
)
from shm_store.keys import GenerationId, parse_key
from shm_store.paths import socket_path
from shm_store.wire import TIMEOUT_LIMIT_S

if TYPE_CHECKING:
    import torch

    from gpu_worker.module import Assembled

logger = logging.getLogger("gpu_worker")

DEVICES = ("cpu",)
IDLE_STEP_S = 0.02
"""The least between two looks for what was unused for `idle_timeout`."""

RAM = "ram"
"""The pool that private weights are charged to."""


def attach(
    socket: str | os.PathLike[str] | None = None,
    device: str | torch.device = "cpu",
    name: str | None = None,
    *,
    idle_timeout: float | None = None,
    on_evict: Callable[[str, str, str], object] | None = None,
    on_hit: Callable[[str, str], object] | None = None,
    on_miss: Callable[[str], object] | None = None,
) -> Worker:
    """Attach this process to a coordinator.

    Workers of one process and socket share one connection. Each has its own records.

    Args:
        socket: the coordinator's socket; else what WEIGHT_CACHE_SOCKET says, else the default of
            `weight-cache serve`.
        device: where modules are to run. This version knows "cpu".
        name: how `weight-cache status` calls this process, if it is the first to attach; else the
            program's name.
        idle_timeout: seconds after which a module that nobody uses is evicted. None keeps it
            until it is evicted, replaced, or the coordinator needs its room.
        on_evict, on_hit, on_miss: see `gpu_worker.callbacks.Callbacks`. Called in whatever thread
            it happens, with no lock held. Let them return soon: while one runs in the thread that
            gives things back, nothing more is given back.

    Raises:
        ArgumentRefused: an unknown device, a name that cannot be sent, no path, or a time that is
            none.
        NoCoordinator: nobody answers on the socket.
        PeerForbidden: this user may not use that coordinator.
        VersionMismatch: it speaks another version.
        PlatformUnsupported: not Linux.
    """
    if str(device) not in DEVICES:
        raise ArgumentRefused(
            f"device {str(device)!r} is none of those this version has: {', '.join(DEVICES)}",
            remedy='attach with device="cpu" and move the module yourself',
        )
    if name is None:
        name = arguments.program_name()
    else:
        name = arguments.text("name", name, arguments.NAME_LIMIT)
    if socket is not None:
        socket = arguments.path("socket", socket)
    callbacks = Callbacks(
        arguments.callback("on_evict", on_evict),
        arguments.callback("on_hit", on_hit),
        arguments.callback("on_miss", on_miss),
    )
    idle_s = arguments.timeout_s(idle_timeout, "idle_timeout")
    return Worker(socket_path(socket), name, str(device), callbacks, idle_s)


_this_pid = os.getpid()
"""As getpid() says, without the system call, for locks alone: it costs as much as half of one."""


def _note_fork() -> None:
    global _this_pid
    _this_pid = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


class _Caller(threading.local):
    """The calling thread, looked up once: that costs as much as a bare lock."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()


_caller = _Caller()


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What a record keeps: a module, the mode it was loaded in, and the names it does not use.

    `weights` are the mapped bytes, if they are shared. The module may not use them any more, as
    after `half()`; but as long as it is handed out, its lease goes on, or nobody would tell that it
    is retired.
    """

    module: torch.nn.Module
    train: bool
    unexpected: tuple[str, ...]
    weights: object


@dataclass(frozen=True, slots=True)
class _Wish:
    """What a load is to make."""

    ask: Ask
    origin: Origin
    skeleton: Callable[[], torch.nn.Module]
    train: bool
    progress: Progress | None
    private: bool


class Worker:
    """An attached process's weights. Made by `attach`; thread-safe; a context manager.

    Every method raises ForkedProcess in a forked child, and CallerError when a finalizer or a
    signal handler calls it in the middle of another call.
    """

    def __init__(
        self,
        path: str,
        name: str,
        device: str,
        callbacks: Callbacks = Callbacks(),  # noqa: B008 (frozen)
        idle_s: float | None = None,
    ) -> None:
        """Share the connection to the coordinator on `path`."""
        self._lock = threading.RLock()
        self._records: Records[_Loaded] = Records()
        self._flights = Flights(self._lock)
        self._ids: Iterator[Any] = itertools.count(1)
        """Of claims and locks; to name their types would be a call at each lock."""
        self._callbacks = callbacks
        self._idle_s = idle_s
        # Last: from here on the coordinator's requests arrive.
        self._client: Client = registry.share(path, name, device, self)
        if idle_s is not None:
            self._client.keeper.put_at(time.monotonic() + idle_s, _expiring(self))

    # --- weights --------------------------------------------------------------------------------

    def state_dict(
        self,
        key: str,
        *,
        source: str | os.PathLike[str] | None = None,
        build: Build | None = None,
        version: str = "",
        timeout: float | None = None,
        progress: Progress | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the state dict of `key`, zero-copy; made first if no process has it yet.

        Asks the coordinator each time, so a changed source is noticed. Tensors may be edited in
        place: that stays in this process. They stay valid whatever happens to coordinator, worker
        and file; the lease ends when the last of them is gone.

        Args:
            key: the name that processes share weights by.
            source: path of a .safetensors file, opened by this process.
            build: or a function that returns a module or a state dict. It runs only in the process
                that has to make the weights, in this thread; what it returns is copied, not kept.
                All processes get that first result until `version` changes or it is evicted,
                whatever a later `build` would return.
            version: with `build`: weights of another version are other weights, so change it
                whenever `build` is to run again.
            timeout: seconds to wait for others; the time in `build` does not count. None waits as
                long as there is progress.
            progress: called with (bytes filled, bytes in all) while another process fills. What it
                raises gives the request up.

        Raises:
            KeyRefused, ArgumentRefused: before anything was asked.
            SourceError: the file cannot be used.
            BudgetExceeded, LoadTimeout, BackingFailed, FillFailed: no room, or no time.
            CoordinatorLost: nobody answers.
            WorkerClosed: after `shutdown`.
            Whatever `build` raises. In all cases nothing stays leased.
        """
        ask, _ = arguments.asked(key, source, build, version)
        timeout_s = arguments.timeout_s(timeout)
        arguments.callback("progress", progress)
        self._check_caller(waits=True)
        if self._records.closed:
            raise WorkerClosed("the worker was shut down")
        with self._lock:
            self._flights.refuse_in_skeleton(ask.key)
        granted = self._client.acquire(ask, timeout_s, progress)
        with self._lock:
            gone = self._records.outdate(ask.key, granted.gen)
        self._let_go(gone)
        from gpu_worker.tensors import tensors

        return tensors(granted.buffer)

    def load(
        self,
        key: str,
        *,
        skeleton: Callable[[], torch.nn.Module],
        source: str | os.PathLike[str] | None = None,
        build: Build | None = None,
        version: str = "",
        timeout: float | None = None,
        train: bool = False,
        progress: Progress | None = None,
        private: bool = False,
    ) -> ModelHandle:
        """Return a handle on the module of `key`: claimed now, locked when it is entered.

        The first load in this worker builds the module; later ones share it and ask nobody, until
        it is evicted. A load of the same key from another source, or of another version, takes its
        place. Arguments and errors as `state_dict`, and:

        Args:
            skeleton: a function that makes a normal module. Its weights are left out for you while
                it runs, and then assigned.
            train: leave the module as `skeleton` built it, instead of calling `eval()`.
            private: with `build`: keep what it returns in this process alone, as with tensors that
                cannot be shared. `build` then runs in every process, and the coordinator only
                counts the memory, until the module is gone.

        Raises:
            WeightsMissing: the weights lack some that the skeleton needs; names them.
            ArgumentRefused: the module is there already, in the other mode of `train`.
            Whatever `skeleton` raises.
        """
        ask, origin = arguments.asked(key, source, build, version)
        timeout_s = arguments.timeout_s(timeout)
        arguments.check_factory("skeleton", skeleton)
        arguments.callback("progress", progress)
        arguments.check_flag("train", train)
        arguments.check_private(private, build)
        if private:
            origin = dataclasses.replace(origin, kind="private")
        self._check_caller(waits=True)
        handle = ModelHandle(self, ask.key, ClaimId(next(self._ids)))
        wish = _Wish(ask, origin, skeleton, train, progress, private)
        record = self._claim(handle._claim, wish, timeout_s)
        if record.module.train is not train:
            handle.close()
            raise ArgumentRefused(
                f"{key!r} is loaded with train={not train}, and all loads share one module",
                remedy="evict it first, or load it under another key",
            )
        handle.generation = record.generation
        handle.unexpected = record.module.unexpected
        return handle

    @contextlib.contextmanager
    def use(
        self,
        key: str,
        *,
        skeleton: Callable[[], torch.nn.Module],
        source: str | os.PathLike[str] | None = None,
        build: Build | None = None,
        version: str = "",
        timeout: float | None = None,
        train: bool = False,
        progress: Progress | None = None,
        private: bool = False,
    ) -> Iterator[torch.nn.Module]:
        """Load and lock, for the length of a `with`. Arguments and errors as `load`."""
        handle = self.load(
            key,
            skeleton=skeleton,
            source=source,
            build=build,
            version=version,
            timeout=timeout,
            train=train,
            progress=progress,
            private=private,
        )
        try:
            with handle as module:
                yield module
        finally:
            handle.close()

    def prefetch(self, key: str, *, source: str | os.PathLike[str]) -> None:
        """Have the weights of `key` loaded, for whoever asks for them next. Returns at once.

        Waits for room behind every load, and takes nothing from anybody. What goes wrong is logged.
        """
        ask, _ = arguments.asked(key, source, None, "")
        self._check_caller(waits=True)
        if self._records.closed:
            raise WorkerClosed("the worker was shut down")
        self._client.prefetch(ask)

    # --- ends -----------------------------------------------------------------------------------

    def invalidate(self, key: str, timeout: float = 30.0) -> bool:
        """Retire the weights of `key` in every process, and say whether there were any.

        Whoever uses them may go on; once this returns, every later load gets new ones. Private
        ones are retired in this worker alone: those of others are theirs.

        Raises:
            InvalidateIncomplete: some process has not answered within `timeout` seconds. What is
                retired stays retired.
            CoordinatorLost: nobody answers.
            WorkerClosed: after `shutdown`.
        """
        name = parse_key(key)
        timeout_s = arguments.timeout_s(timeout)
        self._check_caller(waits=True)
        with self._lock:
            if self._records.closed:
                raise WorkerClosed("the worker was shut down")
            gone = self._records.evict_private(name)
        self._let_go(gone)
        return self._client.invalidate(name, TIMEOUT_LIMIT_S if timeout_s is None else timeout_s)

    def evict(self, key: str) -> bool:
        """Let go of the module of `key`, and say whether it is gone now.

        One that is claimed or locked is stale from now on: no load returns it, and it goes with its
        last use. The bytes are given back when the last tensor of them is gone, see `flush`.
        """
        name = parse_key(key)
        self._check_caller()
        with self._lock:
            gone = self._records.evict(name)
        evicted = bool(gone)
        self._let_go(gone)
        return evicted

    def flush(self, timeout: float = 10.0) -> None:
        """Wait until everything let go of so far has taken effect at the coordinator.

        Raises:
            ResourceError: it has not within `timeout` seconds.
            CoordinatorLost: the connection is gone.
            WorkerClosed: it was closed, after `shutdown`.
        """
        timeout_s = arguments.timeout_s(timeout)
        self._check_caller(waits=True)
        self._client.flush(TIMEOUT_LIMIT_S if timeout_s is None else timeout_s)

    def shutdown(self, timeout: float = 10.0) -> tuple[Held, ...]:
        """Load no more, evict what is idle, and return what is still held, and by which threads.

        What is held goes stale: it can be used through its handles and leaves with the last of
        them, loads in flight included. The connection closes when nothing of it is mapped any more.
        May be called again; never raises for a coordinator that is gone or does not answer.

        Args:
            timeout: seconds to wait until what was given back has taken effect.
        """
        timeout_s = arguments.timeout_s(timeout)
        self._check_caller(waits=True)
        with self._lock:
            gone = self._records.close()
        self._let_go(gone)
        # Each time: what was dropped since is garbage in the keeper's queue, and not held.
        try:
            self._client.flush(TIMEOUT_LIMIT_S if timeout_s is None else timeout_s)
        except (CoordinatorLost, ResourceError, WorkerClosed) as error:
            logger.info("shut down without the coordinator's word: %s", error)
        registry.leave(self._client, self)
        with self._lock:
            held = self._records.held()
            used = {(one.key, thread) for one in held for thread in one.threads}
            loading = self._flights.held()
        # One that has its record is still about to land.
        return (*held, *(one for one in loading if (one.key, *one.threads) not in used))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if os.getpid() == self._client.pid:
            self.shutdown()

    # --- loading --------------------------------------------------------------------------------

    def _claim(self, claim: ClaimId, wish: _Wish, timeout_s: float | None) -> Record[_Loaded]:
        """Put `claim` on the record of a key, made by this thread or by one that is at it."""
        key, whose = wish.ask.key, _caller.thread
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        mine = Flight(key)
        record: Record[_Loaded] | None = None
        try:
            while True:
                with self._lock:
                    if self._records.closed:
                        raise WorkerClosed("the worker was shut down")
                    record = self._records.claim(key, wish.origin, claim, whose)
                    if record is None:
                        self._flights.refuse_in_skeleton(key)
                        flight = self._flights.board(mine)
                if record is not None:
                    self._callbacks.hit(key, record.generation)
                    return record
                left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
                if flight is mine:
                    return self._load(claim, wish, left_s, mine)
                self._flights.wait(flight, left_s)
        finally:
            mine.over = True  # first, see the note in `flights`
            self._flights.land(mine)

    def _load(
        self, claim: ClaimId, wish: _Wish, timeout_s: float | None, flight: Flight
    ) -> Record[_Loaded]:
        """Ask the coordinator, and make the record unless there is one of that generation."""
        key, whose = wish.ask.key, _caller.thread
        self._callbacks.miss(key)
        from gpu_worker import module

        weights: object = None
        if wish.private:
            gen, assembled = self._load_private(wish, timeout_s)
        else:
            granted = self._client.acquire(wish.ask, timeout_s, wish.progress)
            gen, weights = granted.gen, granted.buffer
            with self._lock:
                record = self._records.adopt(key, gen, wish.origin, claim, whose)
            if record is not None:
                return record
            flight.in_skeleton = True
            assembled = module.assemble(
                key, wish.skeleton, granted.buffer, wish.train, granted.left_s
            )
        refuse_fork(self._client.pid)
        if assembled.unexpected:
            logger.info(
                "weight-cache: %r: the weights have %d tensor(s) that the skeleton does not use: "
                "%s",
                key,
                len(assembled.unexpected),
                listed(assembled.unexpected),
            )
        loaded = _Loaded(assembled.module, wish.train, assembled.unexpected, weights)
        record = Record(key, gen, wish.origin, loaded)
        with self._lock:
            # What the coordinator asks from now on finds the record.
            gone = self._records.admit(record, claim, self._client.leases.asked(gen), whose)
        self._let_go(gone)
        return record

    def _load_private(self, wish: _Wish, timeout_s: float | None) -> tuple[GenerationId, Assembled]:
        """Build the weights in this process alone, and have their memory counted."""
        from gpu_worker import module

        key = wish.ask.key
        assert wish.ask.build is not None
        assembled = module.private(wish.ask.build, wish.train)
        size_bytes = max(1, module.held_bytes(assembled.module))
        charge = Charge()
        # Its tensors go with it, unless somebody keeps one, which nobody could count.
        end = weakref.finalize(assembled.module, self._client.leases.discharge, charge)
        end.atexit = False
        self._client.charge(charge, key, RAM, size_bytes, timeout_s)
        return charge.gen, assembled

    # --- for handles ----------------------------------------------------------------------------

    @property
    def _finalizers(self) -> Keeper:
        """Takes what a finalizer wants done: anything that is called with no argument."""
        return self._client.keeper

    def _lock_module(self, claim: ClaimId, lock: LockId) -> torch.nn.Module:
        """Lock the module that `claim` is on, and return it. Raises WorkerClosed if it ended."""
        if _this_pid != self._client.pid or owned(self._lock):
            self._check_caller()  # says which
        with self._lock:
            return self._records.lock(claim, lock, _caller.thread).module

    def _unlock_module(self, lock: LockId) -> None:
        """End a lock, if it is one."""
        self._settle(functools.partial(self._records.unlock, lock, time.monotonic()))

    def _unlock_last(self, claim: ClaimId, chosen: list[LockId]) -> None:
        """End the newest lock made through `claim`. Raises CallerError if there is none.

        `chosen` is empty, and gets that lock; called again with it, this ends no other one.
        As `_settle`, but spelt out: this and `_lock_module` are in the user's hot path.
        """
        if _this_pid != self._client.pid:
            return
        if owned(self._lock):
            self._client.keeper.put(functools.partial(self._unlock_last, claim, chosen))
            return
        with self._lock:
            if not chosen:
                lock = self._records.last_lock(claim)
                if lock is None:
                    raise CallerError("the handle is left more often than it was entered")
                chosen.append(lock)
            gone = self._records.unlock(chosen[0], time.monotonic())
        if gone:
            self._let_go(gone)

    def _end_claim(self, claim: ClaimId) -> None:
        """End a claim, if it is one."""
        self._settle(functools.partial(self._records.end_claim, claim, time.monotonic()))

    def _settle(self, end: Callable[[], list[Record[_Loaded]]]) -> None:
        """End a use of a record. What is let go of is destroyed after the lock is free."""
        if os.getpid() != self._client.pid:
            return  # what a forked child inherited is its parent's to end
        if owned(self._lock):
            # Inside another call of this thread, as by a finalizer: the keeper does it after that.
            self._client.keeper.put(functools.partial(self._settle, end))
            return
        with self._lock:
            gone = end()
        self._let_go(gone)

    def _let_go(self, gone: list[Record[_Loaded]], *, later: bool = False) -> None:
        """Destroy what was evicted, then tell of it. Runs other people's code: no lock is held.

        Of what is idle, and watched, only the client is told.

        Args:
            later: tell in the keeper, behind the unmapping and the RELEASE.
        """
        if not gone:
            return
        told = [(r.key, r.generation, r.going) for r in gone if r.going is not None]
        idle = [(r.generation, id(r)) for r in gone]
        gone.clear()
        for gen, record in idle:
            self._client.leases.idle(gen, record)
        asked_for = [gen for _, gen, cause in told if cause == "room"]
        if asked_for:
            self._client.leases.collect_if_kept(asked_for)
        if later:
            self._client.keeper.put(functools.partial(self._callbacks.evicted, told))
        else:
            self._callbacks.evicted(told)

    # --- for the keeper -------------------------------------------------------------------------

    def _retire(self, gen: GenerationId) -> None:
        """Hand a generation out no more."""
        with self._lock:
            gone = self._records.retire(gen)
        self._let_go(gone, later=True)

    def _look(self, gen: GenerationId) -> Seen | None:
        """Say what this worker has of a generation."""
        with self._lock:
            seen = self._records.look(gen)
        return None if seen is None else Seen(id(seen[0]), seen[0].module.weights, seen[1])

    def _make_room(self, gen: GenerationId) -> None:
        """Let go of a generation as soon as it is idle."""
        with self._lock:
            gone = self._records.make_room(gen)
        self._let_go(gone, later=True)

    def _expire(self) -> None:
        """Evict what was unused for `idle_timeout`, and come again when more could be."""
        assert self._idle_s is not None
        now_s = time.monotonic()
        with self._lock:
            gone = self._records.expire(now_s - self._idle_s)
            since_s = self._records.unused_since_s()
            closed = self._records.closed
        if not closed:
            next_s = (now_s if since_s is None else since_s) + self._idle_s
            self._client.keeper.put_at(max(next_s, now_s + IDLE_STEP_S), _expiring(self))
        self._let_go(gone, later=True)

    def _check_caller(self, *, waits: bool = False) -> None:
        """Refuse a caller that could only hang, or that this worker does not belong to."""
        if waits:
            self._client.check_caller()
        else:
            refuse_fork(self._client.pid)
        if owned(self._lock):
            refuse_reentry()


def _expiring(worker: Worker) -> Callable[[], None]:
    """Return a task that expires what `worker` keeps, if it is still there."""
    known = weakref.ref(worker)

    def expire() -> None:
        alive = known()
        if alive is not None:
            alive._expire()

    return expire
