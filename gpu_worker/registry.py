"""The connections of this process: one for each coordinator's socket, shared by its workers.

Knows their number, their end, and what becomes of them at fork and at interpreter exit.

    Note on what a thread has in its hands
    fact: a forked child has no other threads, but what those referred to is never let go of in it
    consequence: a keeper that looks at a module, or a reader that hands weights over, at the moment
    of a fork would keep those weights in the child, idle and leased, until that ends; and who waits
    for the room would wait for that
    choice: a fork waits until neither is at anything, 50 ms at most: a keeper may be in other
    people's code, which may wait for the thread that forks. What callers' threads refer to stays
    cost: a lock around each task and each message, and the wait
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable

from gpu_worker.callbacks import report
from gpu_worker.client import Client
from gpu_worker.leases import Holder
from gpu_worker.reentry import free_after_fork, owned
from shm_store.errors import ConnectionLost

logger = logging.getLogger("gpu_worker")

_registry = threading.RLock()
"""Guards `_clients` and every `Client.workers`. Held for a few lines, never while waiting."""

FORK_WAIT_S = 0.2
"""The longest that a fork is held up in the child."""

FORK_PATIENCE_S = 0.05
"""The longest that it is held up in the parent; see the note."""

_clients: dict[str, Client] = {}
_alive: weakref.WeakSet[Client] = weakref.WeakSet()


def share(path: str, name: str, device: str, worker: Holder, patience_s: float = 0.0) -> Client:
    """Return the connection to the coordinator on `path`, made by the first who asks.

    `worker` shares it until it leaves or is gone, by whatever exception. What it is made with, name
    and `patience_s`, are the first's.

    Raises:
        WeightCacheError: as `Client.open`.
    """
    place = os.path.abspath(path)
    while True:
        with _registry:
            client = _clients.get(place)
            if client is None or client.ended:
                client = _clients[place] = Client(path, _close_if_unused, patience_s)
                _alive.add(client)
            _add(worker, client)
        try:
            # Whoever comes first opens it, and not whoever made it: that one may be gone by now,
            # by an exception from outside.
            mine = client.open(name, device)
        except BaseException:
            leave(client, worker)
            raise
        if not client.ended:
            return client
        leave(client, worker)
        if mine:
            raise ConnectionLost(f"the coordinator on {path} went away while attaching")


def clients() -> list[Client]:
    """Return every connection of this very process, ended ones with maps included."""
    return [client for client in list(_alive) if client.pid == os.getpid()]


def leave(client: Client, worker: Holder) -> None:
    """Stop sharing `client`. Without workers it ends when nothing of it is mapped any more."""
    with _registry:
        client.workers.discard(worker)
    _close_if_unused(client)


def held_up() -> bool:
    """Say whether the calling thread is in a call here, which keepers would have to wait for."""
    return owned(_registry)


def _add(worker: Holder, client: Client) -> None:
    """Have `worker` share `client`, which is looked after when that is gone without leaving."""
    check = functools.partial(_close_if_unused, client)
    weakref.finalize(worker, client.keeper.queue.put, check).atexit = False
    # Behind it: of the callbacks of weak references, the newest is called first.
    client.workers.add(worker)


def _close_if_unused(client: Client) -> None:
    with _registry:
        if not client.workers and client.close_if_unused():
            for place in [place for place, known in _clients.items() if known is client]:
                del _clients[place]


def _stop_all() -> None:
    """Stop every thread before the interpreter goes; the process's end gives everything back."""
    for client in list(_alive):
        if client.pid == os.getpid():
            client.stop()


class _Forking(threading.local):
    """What the calling thread holds while it forks."""

    def __init__(self) -> None:
        self.held: list[threading.RLock] = []


_forking = _Forking()


def _before_fork() -> None:
    deadline_s = time.monotonic() + FORK_PATIENCE_S
    for client in list(_alive):
        for at_work in client.at_work:
            if at_work.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
                _forking.held.append(at_work)


def _after_fork_in_parent() -> None:
    while _forking.held:
        _forking.held.pop().release()


def _after_fork() -> None:
    """In a forked child: have every session counted that it has now, before anything else runs.

    Without a coordinator that answers at once, the child goes on: it is counted as soon as one
    does.
    """
    deadline_s = time.monotonic() + FORK_WAIT_S
    _forking.held.clear()  # everybody has others
    clients = list(_alive)
    free_after_fork(_registry)
    if not clients:
        return
    for client in clients:
        _attempt(functools.partial(_take_over, client))
    for client in clients:
        _attempt(client.start_after_fork)
    late = [one for one in clients if not one.wait_attached(deadline_s - time.monotonic())]
    for client in late:
        logger.info("the coordinator on %s has not answered a forked child yet", client.path)


def _take_over(client: Client) -> None:
    """In a forked child: have a session as its own, and those who share it."""
    client.after_fork()
    for worker in list(client.workers):
        client.workers.discard(worker)
        _add(worker, client)  # anew: its keeper has another queue


def _attempt(step: Callable[[], object]) -> None:
    """Do one step of `_after_fork`, and have the others done whatever becomes of it."""
    try:
        step()
    except Exception as error:  # it would be printed where nobody looks for it
        report("a forked child could not be attached", error)


atexit.register(_stop_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork,
    )
