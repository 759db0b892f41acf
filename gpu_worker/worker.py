"""The public face of an attached process: state dicts and modules by key, and its device.

Rules
- What a caller passes is checked first, then who calls, and only then is anything asked or changed.
- A worker has no state of its own: its records and their lock are the table's, and the session is
  the client's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from gpu_worker import arguments, registry
from gpu_worker.callbacks import Callbacks
from gpu_worker.device import Device, device_named
from gpu_worker.handle import ModelHandle
from gpu_worker.load_lock import load_lock
from gpu_worker.record_table import RecordTable, Wish
from gpu_worker.records import ClaimId, Held
from gpu_worker.refusal import name_holders
from gpu_worker.request import Build, Progress
from gpu_worker.reservation import Reservation
from gpu_worker.residence import Resident
from shm_store.errors import (
    ArgumentRefused,
    BudgetExceeded,
    CoordinatorLost,
    InvalidateIncomplete,
    ResourceError,
    WorkerClosed,
)
from shm_store.keys import Key, parse_key
from shm_store.wire import TIMEOUT_LIMIT_S

if TYPE_CHECKING:
    import torch


logger = logging.getLogger("gpu_worker")

RESERVED = Key("reserved")
WORKING_MEMORY = Key("working memory")
"""What `status` calls memory on a device that is kept free of models."""


def check_writes() -> AbstractContextManager[object]:
    """Return a context manager in which every operation of this thread is looked at: for tests.

    Raises:
        ArgumentRefused: in it, an operation would write to weights that all processes on a device
            share (`share_vram`). Names them. Elsewhere, and by code that torch knows nothing of,
            that would end the process.
    """
    from gpu_worker.read_only import CheckWrites

    return CheckWrites()  # type: ignore[no-untyped-call]


def constructing(timeout: float | None = None) -> AbstractContextManager[None]:
    """Return a context manager in which this thread builds a module, and no other thread moves one.

    For code that uses accelerate's `init_empty_weights` itself while workers of this process are
    at work. That patches `torch.nn.Module` for the whole process: a parameter that a worker assigns
    in another thread at that time would land on the meta device. `Worker.load` needs none of it.

        with gpu_worker.constructing(), init_empty_weights():
            model = MyModel(config)

    Construct there, and read or wait for nothing: loads and moves of all threads wait meanwhile. In
    this thread they are refused, by ReentryRefused. A module that is loaded already can be had.
    What other threads build by themselves, in a `build=` too, lands on meta under that patch, as it
    does without this; so it does in a process that another thread forks meanwhile, and for ever.

    Args:
        timeout: seconds to wait for other threads that build a module, and for one pass of a move
            that is under way. None is for ever.

    Returns:
        What is entered once, and left in the thread that entered it.

    Raises:
        ArgumentRefused: a timeout that is none.
        When it is entered, with nothing taken:
        ReentryRefused: this thread builds or moves a module already, as in a skeleton.
        LoadTimeout: it was not its turn within `timeout` seconds.
        ForkedProcess: this is a forked child, and its parent waited.
    """
    return load_lock.write(arguments.timeout_s(timeout))


class Worker:
    """An attached process's weights. Made by `attach`; thread-safe; a context manager.

    A forked child has it, too, and what it holds: as an attached process of its own, before any of
    its code runs. A call during which its process was forked raises ForkedProcess there. Every
    method raises CallerError when a finalizer or a signal handler calls it in the middle of another
    call.
    """

    def __init__(
        self,
        path: str,
        name: str,
        device: Device,
        callbacks: Callbacks = Callbacks(),  # noqa: B008 (frozen)
        idle_s: float | None = None,
        patience_s: float = 0.0,
        share_vram: bool = False,
    ) -> None:
        """Share the connection to the coordinator on `path`."""
        self._table = RecordTable(path, name, device, callbacks, idle_s, patience_s)
        self._client = self._table.client
        self._device = device
        self._working_memory: Reservation | None = None
        self._share_vram = share_vram

    def _use_device(self, budget_bytes: int | None, working_bytes: int | None) -> None:
        """Have the device's memory be a pool, and part of it kept free."""
        pool = self._device.pool
        if pool is None:
            return
        if budget_bytes is None:
            limit_bytes = self._device.total_bytes()
        else:
            # What is not there cannot be budgeted: nobody would be asked for room before it fails.
            # Of all that is there: others' models count in the pool, not against its limit.
            limit_bytes = min(self._device.capacity_bytes(), budget_bytes)
        self._client.declare(pool, limit_bytes, budgeted=budget_bytes is not None)
        if working_bytes is not None:
            self._working_memory = Reservation(
                self._client, self._device, WORKING_MEMORY, working_bytes, None
            )

    # --- weights --------------------------------------------------------------------------------

    def state_dict(
        self,
        key: str,
        *,
        source: arguments.SourceLike | None = None,
        build: Build | None = None,
        version: str = "",
        timeout: float | None = None,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Return the state dict of `key`, zero-copy; made first if no process has it yet.

        Asks the coordinator each time, so a changed source is noticed. Tensors may be edited in
        place: that stays in this process. They stay valid whatever happens to coordinator, worker
        and file; the lease ends when the last of them is gone.

        Args:
            key: the name that processes share weights by.
            source: path of a checkpoint, opened by this process: a .safetensors or .gguf file, one
                of torch.save, the index of a sharded one, or a folder with one of them. Or a URL of
                one (https, hf, s3, gs), fetched by the coordinator's host with its credentials. Or
                a `Source`, which says more.
            build: or a function that returns a module or a state dict. It runs only in the process
                that has to make the weights, in this thread; what it returns is copied, not kept.
                Of a module, non-persistent buffers are shared as well, and so are in the dict.
                All processes get that first result until `version` changes or it is evicted,
                whatever a later `build` would return.
            version: with `build` or a URL: weights of another version are other weights, so change
                it whenever `build` is to run again, or the URL to be read again.
            timeout: seconds to wait for others; the time in `build` does not count. None waits as
                long as there is progress, and 300 s where there is none, as for room.
            progress: called with (bytes filled, bytes in all) while the weights are filled in, by
                whichever process: some four times a second, and when all is there. In this thread,
                and not at all where they are there already. Where a fill is begun anew, so are the
                figures. What it raises gives the request up.

        Raises:
            KeyRefused, ArgumentRefused: before anything was asked.
            SourceError: the file cannot be used. SourceUnreachable: nor can its server.
            BudgetExceeded: no room in time. It names who holds what, this process included;
                `holders` has all of them, as `status --json` does.
            LoadTimeout, BackingFailed, FillFailed: no time, no memory, or its maker ended.
            CoordinatorLost: nobody answers.
            WorkerClosed: after `shutdown`.
            Whatever `build` raises. In all cases nothing stays leased.
        """
        ask, _ = arguments.asked(key, source, build, version)
        timeout_s = arguments.timeout_s(timeout)
        arguments.callback("progress", progress)
        self._table.check_caller(waits=True)
        self._table.refuse_closed()
        self._table.refuse_in_skeleton(ask.key)
        try:
            granted = self._client.acquire(ask, timeout_s, progress)
        except BudgetExceeded as error:
            name_holders(error)
            raise
        self._table.outdate(ask.key, granted.gen)
        from gpu_worker.tensors import tensors

        granted.buffer.fault_in()
        return tensors(granted.buffer)

    def load(
        self,
        key: str,
        *,
        skeleton: Callable[[], torch.nn.Module],
        source: arguments.SourceLike | None = None,
        build: Build | None = None,
        version: str = "",
        timeout: float | None = None,
        train: bool = False,
        progress: Progress | None = None,
        private: bool = False,
        device: str | torch.device | None = None,
        keep_host: bool = True,
        share_vram: bool | None = None,
    ) -> ModelHandle:
        """Return a handle on the module of `key`: claimed now, locked when it is entered.

        The first load in this worker builds the module; later ones share it and ask nobody, until
        it is evicted, whatever `skeleton` or `build` they pass. A load of the same key from another
        source, even an identical copy, or of another version, takes its place in every process.
        Arguments and errors as `state_dict`, and:

        Args:
            skeleton: a function that makes a normal module. Its weights are left out for you while
                it runs, and then assigned.
            train: leave the module in the mode that `skeleton` built it in, instead of calling
                `eval()`. Its parameters need no gradient either way: shared weights are not to be
                trained by accident. `module.requires_grad_(True)` lets you train them: the pages
                that an optimizer writes to are copied for this process, and all that it has of
                these weights shows them; other processes see nothing of it.
            private: with `build`: keep what it returns in this process alone, as with tensors that
                cannot be shared. `build` then runs in every process, and the coordinator only
                counts the memory, until the module is gone.
            device: "cpu" keeps this module on the host, whatever device the worker has.
            keep_host: False gives the weights on the host back once the module is on its device;
                other processes may have their room. When it has left that, by whatever cause, its
                parameters have no elements until the next lock, which asks the coordinator again
                and may get newer weights. What was edited in place is lost then. A module of which
                the device has only a part keeps them. The first load decides.
            share_vram: as in `attach`, for this module. With False its weights are its own on the
                device, where they may be edited, and all processes' on the host. The first load
                decides.

        Raises:
            WeightsMissing: the weights lack some that the skeleton needs; names them.
            ArgumentRefused: the module is there already, in the other mode of `train`, or for
                another device; or `device` is neither "cpu" nor the worker's.
            ReentryRefused: it is not there, and this thread is inside `gpu_worker.constructing`.
            Whatever `skeleton` raises.
        """
        ask, origin = arguments.asked(key, source, build, version)
        timeout_s = arguments.timeout_s(timeout)
        arguments.check_factory("skeleton", skeleton)
        arguments.callback("progress", progress)
        arguments.check_flag("train", train)
        arguments.check_private(private, build)
        arguments.check_flag("keep_host", keep_host)
        where = self._device if device is None else device_named(device)
        if where.name not in ("cpu", self._device.name):
            raise ArgumentRefused(
                f"device={where.name!r} is not the worker's, {self._device.name!r}",
                remedy="attach once for each device: workers share their connection",
            )
        if not keep_host and (private or where.pool is None):
            raise ArgumentRefused(
                "keep_host=False goes with shared weights and a device with memory of its own",
                remedy="leave it out: these are the only ones there are",
            )
        shares = self._share_vram if share_vram is None else share_vram
        arguments.check_flag("share_vram", shares)
        if private:
            origin = dataclasses.replace(origin, kind="private")
        self._table.check_caller(waits=True)
        handle = ModelHandle(self._table, ask.key, ClaimId(next(self._table.ids)))
        handle._timeout_s = timeout_s
        wish = Wish(ask, origin, skeleton, train, progress, private, where, keep_host, shares)
        try:
            record = self._table.claim(handle._claim, wish, timeout_s)
        except BudgetExceeded as error:
            name_holders(error)
            raise
        residence = record.module.residence
        placed = "cpu" if residence is None else residence.device.name
        if device is not None and placed != where.name:
            handle.close()
            raise ArgumentRefused(
                f"{key!r} is loaded for device {placed!r}, and all loads share one module",
                remedy="evict it first, or load it under another key",
            )
        if record.module.train is not train:
            handle.close()
            raise ArgumentRefused(
                f"{key!r} is loaded with train={not train}, and all loads share one module",
                remedy="evict it first, or load it under another key",
            )
        wanted = shares and not private and not train
        if share_vram is not None and residence is not None and residence.is_to_share is not wanted:
            handle.close()
            raise ArgumentRefused(
                f"{key!r} is loaded with share_vram={residence.is_to_share}, and all loads share "
                "one module",
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
        source: arguments.SourceLike | None = None,
        build: Build | None = None,
        version: str = "",
        timeout: float | None = None,
        train: bool = False,
        progress: Progress | None = None,
        private: bool = False,
        device: str | torch.device | None = None,
        keep_host: bool = True,
        share_vram: bool | None = None,
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
            device=device,
            keep_host=keep_host,
            share_vram=share_vram,
        )
        try:
            with handle as module:
                yield module
        finally:
            handle.close()

    def prefetch(self, key: str, *, source: arguments.SourceLike) -> None:
        """Have the weights of `key` loaded, for whoever asks for them next. Returns at once.

        Waits for room behind every load, and takes nothing from anybody. What goes wrong after the
        file was opened is logged.

        Raises:
            KeyRefused, ArgumentRefused: before anything was asked.
            SourceNotOpened: there is no such file to open.
            CoordinatorLost: nobody answers.
            WorkerClosed: after `shutdown`.
        """
        ask, _ = arguments.asked(key, source, None, "")
        self._table.check_caller(waits=True)
        self._table.refuse_closed()
        self._client.prefetch(ask)

    # --- the device -----------------------------------------------------------------------------

    def offload(self, key: str) -> bool:
        """Take the module of `key` from the device, and say whether it is on the host now.

        Its parameters point at the shared weights again; nothing is copied but what was edited
        there. One that is locked stays. Waits for a thread that builds a module.
        """
        name = parse_key(key)
        self._table.check_caller(waits=True)
        return self._offload([name]) == ()

    def offload_all(self, keep: Iterable[str] = ()) -> tuple[str, ...]:
        """Take every module from the device but those in `keep`, and return the keys that stay.

        Those are locked, and were not to be kept. As `offload`.
        """
        kept = {parse_key(key) for key in arguments.keys("keep", keep)}
        self._table.check_caller(waits=True)
        return self._offload([key for key in self._table.residences() if key not in kept])

    def _offload(self, keys: list[Key]) -> tuple[Key, ...]:
        """Take modules from their device. Returns those that are in use there, or are none."""
        known = self._table.residences()
        stay = []
        for key in keys:
            residence = known.get(key)
            if key not in known or (residence is not None and not residence.leave()):
                stay.append(key)
        return tuple(stay)

    def resident(self) -> tuple[Resident, ...]:
        """Return what is on the device of this worker, and how much it takes there."""
        self._table.check_caller()
        return self._table.resident()

    @contextlib.contextmanager
    def session(self) -> Iterator[Self]:
        """Use the device for the length of a `with`: at its end everything idle leaves it."""
        try:
            yield self
        finally:
            self.offload_all()

    def reserve(self, size: int | str, timeout: float | None = None) -> Reservation:
        """Keep room on the device free of models, for memory that the caller takes himself.

        Idle models leave it for that, those of other processes included.

        Args:
            size: bytes, or a text such as "2GiB".
            timeout: seconds to wait for those that are in use. None waits 300 s.

        Returns:
            The reservation, the caller's: a context manager. It ends with `close`, too.

        Raises:
            ArgumentRefused: no size, or a device without memory of its own.
            BudgetExceeded: there was not enough in time. It names who has what.
            CoordinatorLost: nobody answers.
            WorkerClosed: after `shutdown`.
        """
        size_bytes = arguments.size_bytes("size", size)
        timeout_s = arguments.timeout_s(timeout)
        self._table.check_caller(waits=True)
        self._table.refuse_closed()
        try:
            return Reservation(self._client, self._device, RESERVED, size_bytes, timeout_s)
        except BudgetExceeded as error:
            name_holders(error)
            raise

    def make_room(self, size: int | str, timeout: float | None = None) -> None:
        """Have so much of the device free, for code that is about to take it by itself.

        It is free when this returns, and not kept so: models may come. Arguments and errors as
        `reserve`.
        """
        self.reserve(size, timeout).close()

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
        self._table.check_caller(waits=True)
        self._table.invalidate_private(name)
        limit_s = TIMEOUT_LIMIT_S if timeout_s is None else timeout_s
        try:
            return self._client.invalidate(name, limit_s)
        except InvalidateIncomplete as error:
            name_holders(error)
            raise

    def evict(self, key: str) -> bool:
        """Let go of the module of `key`, and say whether it is gone now.

        One that is claimed or locked is stale from now on: no load returns it, and it goes with its
        last use. The bytes are given back when the last tensor of them is gone, see `flush`.
        """
        name = parse_key(key)
        self._table.check_caller()
        return self._table.evict(name)

    def flush(self, timeout: float = 10.0) -> None:
        """Wait until everything let go of so far has taken effect at the coordinator.

        And until the host has its memory back. How long a device takes for that is not waited for.

        Raises:
            ResourceError: it has not within `timeout` seconds.
            CoordinatorLost: nobody answers.
            WorkerClosed: it was closed, after `shutdown`.
        """
        timeout_s = arguments.timeout_s(timeout)
        self._table.check_caller(waits=True)
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
        self._table.check_caller(waits=True)
        self._table.close()
        if self._working_memory is not None:
            self._working_memory.close()
        # Each time: what was dropped since is garbage in the keeper's queue, and not held.
        try:
            limit_s = TIMEOUT_LIMIT_S if timeout_s is None else timeout_s
            self._client.flush(limit_s, patient=False)
        except (CoordinatorLost, ResourceError, WorkerClosed) as error:
            logger.info("shut down without the coordinator's word: %s", error)
        registry.leave(self._client, self._table)
        return self._table.held()

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
