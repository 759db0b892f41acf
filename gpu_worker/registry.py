"""The connections of this process: one for each coordinator's socket, shared by its workers.

Knows their number, their end, and what becomes of them at fork and at interpreter exit.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref

from gpu_worker.client import Client
from shm_store.errors import ConnectionLost

_registry = threading.RLock()
"""Guards `_clients` and every `Client.workers`. Held for a few lines, never while waiting."""

_clients: dict[str, Client] = {}
_alive: weakref.WeakSet[Client] = weakref.WeakSet()


def share(path: str, name: str, device: str) -> Client:
    """Return the connection to the coordinator on `path`, made by the first who asks.

    The caller counts as one of its workers until it calls `leave`.

    Raises:
        WeightCacheError: as `Client.open`.
    """
    place = os.path.abspath(path)
    while True:
        with _registry:
            client = _clients.get(place)
            if client is None or client.ended:
                client = _clients[place] = Client(path, _close_if_unused)
                _alive.add(client)
            client.workers += 1
        try:
            # Whoever comes first opens it, and not whoever made it: that one may be gone by now,
            # by an exception from outside.
            mine = client.open(name, device)
        except BaseException:
            leave(client)
            raise
        if not client.ended:
            return client
        leave(client)
        if mine:
            raise ConnectionLost(f"the coordinator on {path} went away while attaching")


def leave(client: Client) -> None:
    """Stop sharing `client`. Without workers it ends when nothing of it is mapped any more."""
    with _registry:
        client.workers -= 1
    _close_if_unused(client)


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


def _forget_all() -> None:
    """In a forked child: start with no connection and an unheld lock."""
    global _registry
    _registry = threading.RLock()
    for client in list(_clients.values()):
        client.forget_inherited()
    _clients.clear()


atexit.register(_stop_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
