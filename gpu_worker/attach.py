"""Attaching this process to a coordinator: the first call of everybody."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from gpu_worker import arguments
from gpu_worker.autostart import attach_or_start
from gpu_worker.callbacks import Callbacks
from gpu_worker.device import device_named
from gpu_worker.worker import Worker
from shm_store.errors import ArgumentRefused, CoordinatorLost
from shm_store.paths import SOCKET_VARIABLE, socket_path

if TYPE_CHECKING:
    import torch

PATIENCE_S = 30.0
RETRY_S = 0.05

RANK_VARIABLE = "WEIGHT_CACHE_RANK"
"""Of every worker of `weight-cache launch`."""


def attach(
    socket: str | os.PathLike[str] | None = None,
    device: str | torch.device = "cpu",
    name: str | None = None,
    *,
    vram_budget: int | str | None = None,
    working_memory: int | str | None = None,
    share_vram: bool = False,
    idle_timeout: float | None = None,
    patience: float = PATIENCE_S,
    on_evict: Callable[[str, str, str], object] | None = None,
    on_hit: Callable[[str, str], object] | None = None,
    on_miss: Callable[[str], object] | None = None,
    autostart: bool = False,
) -> Worker:
    """Attach this process to a coordinator.

    Workers of one process and socket share one connection. Each has its own records.

    Args:
        socket: the coordinator's socket; else what WEIGHT_CACHE_SOCKET says, else the default of
            `weight-cache serve`.
        device: where modules run: "cpu", on the shared weights themselves; "cuda:0", whose memory
            they are brought to when they are locked; or "sim:0", a simulated device for tests.
        vram_budget: how much of that device's memory models may take in all, of every process, in
            bytes or as "20GiB". None takes what the device has. Of the budgets of the processes
            that are attached the least counts, and what `weight-cache limit` sets before all; in
            one process, that of who attached last.
        working_memory: how much of it to keep free for what this process computes with. Waits
            until there is as much.
        share_vram: have weights on the device in memory that all processes there share, read-only:
            one copy for all, which also outlives a process that ends. An edit in place of such
            weights ends the process, so load with `private=True` what is to be edited. Modules
            loaded with `train=True` are not shared, nor what was edited before.
        name: how `weight-cache status` calls this process, if it is the first to attach; else the
            program's name.
        idle_timeout: seconds after which a module that nobody uses is evicted. None keeps it
            until it is evicted, replaced, or the coordinator needs its room.
        patience: seconds that a call waits while no coordinator answers, before it raises
            CoordinatorLost: one that died and is started again is not noticed. Modules and tensors
            that are loaded need none. As with `name`, the first to attach decides. In a group of
            `weight-cache launch` attaching waits as long, too.
        on_evict: called as `on_evict(key, generation, cause)` once for every module that is gone
            from this worker. `cause` is an `EvictCause`:
            "evicted": by `Worker.evict`;
            "replaced": this worker itself was granted newer weights of the key;
            "invalidated": retired everywhere, because another process has newer ones of the key, by
            `Worker.invalidate`, `weight-cache invalidate` or a drain;
            "room": the coordinator asked for it, for those who lack room;
            "unused": `idle_timeout`;
            "shutdown": by `Worker.shutdown`.
            Newer weights can make it either of the second and third: what is heard first counts.
        on_hit: called as `on_hit(key, generation)` when a load finds its module in this worker.
        on_miss: called as `on_miss(key)` when a load has to ask the coordinator.
            All are called in whatever thread it happens, with no lock held. Let them return soon:
            while one runs in the thread that gives things back, nothing more is given back. What
            they raise is logged.
        autostart: start a coordinator in the background if nobody answers on the socket. It is
            nobody's child, and shared by all who come: of many that try at once, one is started. It
            ends when no process has been attached for half an hour.

    Raises:
        ArgumentRefused: an unknown device, a name that cannot be sent, no path, no size, or a time
            that is none.
        DeviceUnavailable: there is no such device here, or it cannot be used.
        BudgetExceeded: no room on it for `working_memory`.
        NoCoordinator: nobody answers on the socket.
        StartFailed: with `autostart`: so it is, and none could be started.
        CoordinatorLost: this process is attached already, and nobody answers any more.
        PeerForbidden: this user may not use that coordinator.
        VersionMismatch: it speaks another version.
        PlatformUnsupported: not Linux.
    """
    budget_bytes = None if vram_budget is None else arguments.size_bytes("vram_budget", vram_budget)
    working_bytes = (
        None if working_memory is None else arguments.size_bytes("working_memory", working_memory)
    )
    where = device_named(device)
    if where.pool is None and (budget_bytes or working_bytes):
        raise ArgumentRefused(
            f"device {where.name!r} has no memory of its own to budget",
            remedy="leave vram_budget= and working_memory= out",
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
    patience_s = arguments.patience_s(patience)
    arguments.check_flag("autostart", autostart)
    arguments.check_flag("share_vram", share_vram)
    place = socket_path(socket)
    make = functools.partial(Worker, place, name, where, callbacks, idle_s, patience_s, share_vram)
    if autostart:
        worker = attach_or_start(place, make)
    else:
        worker = _attach_in_time(make, patience_s if _is_launched(place) else 0.0)
    try:
        worker._use_device(budget_bytes, working_bytes)
    except BaseException:
        worker.shutdown(timeout=0.0)
        raise
    return worker


def _is_launched(place: str) -> bool:
    """Say whether a supervisor minds the coordinator there, and will start another one."""
    ours = os.environ.get(SOCKET_VARIABLE) == place
    return ours and RANK_VARIABLE in os.environ


def _attach_in_time(make: Callable[[], Worker], patience_s: float) -> Worker:
    """Attach, though there may be no coordinator for so long.

    Raises:
        WeightCacheError: as `attach`.
    """
    end_s = time.monotonic() + patience_s
    while True:
        try:
            return make()
        except CoordinatorLost:
            if time.monotonic() >= end_s:
                raise
        time.sleep(RETRY_S)
