"""Weights sent to other processes through `torch.multiprocessing`: by name, and not copied.

Rules

- What travels is the generation and where in it the bytes are. Who receives it leases that very
  generation, retired or not, and has the tensor over a map of its own.
- The sender keeps what is under way until the receiver has it, or says that it cannot have it.
  So the books never miss a generation, and nothing is freed that was sent.
- A storage with pages that were written to is not what the segment has: it travels as a copy.
- A process has one map of a generation: what it has edited there it also finds in what is sent to
  it later, as if it had asked for the weights again.
- Whoever cannot lease it gets a copy of the bytes that he was sent, from the segment itself.

    Note on reducers
    fact: a ForkingPickler asks a reducer for each object of a type, knows each object once in a
    message, and torch's for a storage moves its bytes to /dev/shm, in place: the sender's tensor
    is then another copy, in no book, where there may be 64 MB in all
    consequence: the sender's copy of the weights would be lost by sending them
    choice: only the reducer of storages is replaced, and only for those over our maps: tensors,
    parameters, views and ties are torch's own doing. All storages of a generation refer to one
    `Parcel`, so a message has one of it, however many tensors are in it
    cost: an edit by the receiver stays in the receiver, as any edit of weights does. With torch's
    own reducer the sender would see it

    Note on the sharer
    fact: `multiprocessing` passes resources on by a thread of the sender, which hands out each once
    consequence: what nobody ever receives is kept until the sender ends, as torch's fds are
    choice: that same thread, asked once for each message, and with no fd until somebody needs one
    cost: its registry has no public name; torch relies on it by `DupFd`
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import logging
import os
import weakref
from collections.abc import Callable
from multiprocessing import AuthenticationError, reduction
from multiprocessing.resource_sharer import _resource_sharer  # type: ignore[attr-defined]
from typing import TYPE_CHECKING, Any

import torch
import torch.multiprocessing  # registers its reducers when it is imported: before ours

from gpu_worker import registry
from gpu_worker.arguments import program_name
from gpu_worker.pages import any_own
from shm_store.errors import ResourceError, SegmentRefused, WeightCacheError
from shm_store.keys import GenerationId, Key
from shm_store.layout import PAGE_BYTES, round_up

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from gpu_worker.keeper import Keeper
    from gpu_worker.leases import Leases, Seen
    from gpu_worker.mapping import Buffer
    from shm_store.report import ModelReport

logger = logging.getLogger("gpu_worker")

PATIENCE_S = 30.0
"""How long to wait for a coordinator that does not answer, where nothing has said that."""

ANSWER_S = 1.0
"""How long the sharer's thread, which others need too, waits for one who has called it."""

Ident = tuple[Any, int]
"""What the sharer calls something that was registered: its address, and a number."""

Rebuild = tuple[Callable[..., object], tuple[Any, ...]]
"""What an object is made anew by."""


@functools.cache
def register() -> None:
    """Have storages over maps of this process sent by name from now on. All others as before."""
    global _others
    _others = reduction.ForkingPickler(io.BytesIO()).dispatch_table[torch.UntypedStorage]
    reduction.ForkingPickler.register(torch.UntypedStorage, _reduce)


_others: Callable[[torch.UntypedStorage], Any]
"""How storages are sent that are not ours."""

# --- the sender's -------------------------------------------------------------------------------

_under_way: dict[int, Buffer] = {}
"""What was sent, and not received yet."""

_numbers = itertools.count()


def _reduce(storage: torch.UntypedStorage) -> Any:
    """Say how to send a storage. Called in whatever thread a queue has for that."""
    size_bytes = storage.nbytes()
    if storage.device.type != "cpu" or not size_bytes:
        return _others(storage)
    address = storage.data_ptr()
    for client in registry.clients():
        found = client.leases.around(address, size_bytes)
        if found is None:
            continue
        if _edited(address, size_bytes):
            # A copy of it, because torch would move the sender's own bytes.
            return _others(storage.clone())  # type: ignore[no-untyped-call]
        mapping, buffer = found
        place = (client.place, mapping.gen)
        parcel = _parcels.get(place)
        if parcel is None:
            parcel = _parcels[place] = Parcel(*place, mapping.key, client.leases, buffer)
        return _storage, (parcel, address - mapping.address, size_bytes)
    return _others(storage)


def _edited(address: int, size_bytes: int) -> bool:
    """Say whether pages of these bytes are this process's own."""
    first = address // PAGE_BYTES * PAGE_BYTES
    try:
        return any_own(first, round_up(address + size_bytes - first, PAGE_BYTES))
    except OSError:
        return True  # nobody can say


class Parcel:
    """A generation in a message that is being pickled. `buffer` is the sender's, for one more use.

    It is unpickled as a `Received`.
    """

    __slots__ = ("__weakref__", "_buffer", "_gen", "_key", "_leases", "_path")

    def __init__(
        self, path: str, gen: GenerationId, key: Key, leases: Leases, buffer: Buffer
    ) -> None:
        self._path, self._gen, self._key = path, gen, key
        self._leases, self._buffer = leases, buffer

    def __reduce__(self) -> Rebuild:
        """Begin to keep it for the receiver: called once for each message."""
        return _receive, (self._path, self._gen, self._key, self._keep())

    def _keep(self) -> Ident | None:
        number = next(_numbers)
        _under_way[number] = self._buffer
        hand_over = functools.partial(_hand_over, self._leases, self._gen)
        try:
            ident: Ident = _resource_sharer.register(
                hand_over, functools.partial(_under_way.pop, number, None)
            )
        except (OSError, RuntimeError):
            # No fd or no thread for the sharer. Who receives it may still find it leased.
            del _under_way[number]
            return None
        return ident


_parcels: weakref.WeakValueDictionary[tuple[str, GenerationId], Parcel] = (
    weakref.WeakValueDictionary()
)
"""Those that are being pickled: a pickler keeps what it has met until its message is made."""


def _hand_over(leases: Leases, gen: GenerationId, peer: Connection, pid: int) -> None:
    """Hear from a receiver that it has what was sent; or give it an fd of the segment."""
    # Without an answer the peer is gone, and nothing raised here would be seen by anybody.
    with contextlib.suppress(OSError, EOFError):
        if not peer.poll(ANSWER_S) or peer.recv_bytes() != _FD:
            return
        fd = leases.dup_fd(gen)
        if fd is not None:
            try:
                reduction.send_handle(peer, fd, pid)
            finally:
                os.close(fd)


_DONE, _FD = b"done", b"fd"
"""What a receiver says: that it needs nothing more, or an fd."""

# --- the receiver's -----------------------------------------------------------------------------


class Received:
    """A generation that came in one message: its map, or an fd of its segment."""

    __slots__ = ("__weakref__", "_buffer", "_fd")

    def __init__(self, buffer: Buffer | None, fd: int) -> None:
        """Take over `fd`, which is -1 if there is a map."""
        self._buffer, self._fd = buffer, fd
        if fd >= 0:
            weakref.finalize(self, os.close, fd).atexit = False

    def storage(self, offset_bytes: int, size_bytes: int) -> torch.UntypedStorage:
        """Return some bytes of it, as they were sent.

        Raises:
            SegmentRefused: there are none.
        """
        source = self._buffer
        whole_bytes = os.fstat(self._fd).st_size if source is None else len(source)
        if not 0 < size_bytes <= whole_bytes - offset_bytes or offset_bytes < 0:
            raise SegmentRefused("what was sent reaches out of its segment")
        if source is None:
            copied, offset = bytearray(size_bytes), 0
            while offset < size_bytes:
                offset += os.preadv(self._fd, [memoryview(copied)[offset:]], offset_bytes + offset)
            return torch.frombuffer(copied, dtype=torch.uint8).untyped_storage()
        flat = torch.frombuffer(source, dtype=torch.uint8, count=size_bytes, offset=offset_bytes)
        return flat.untyped_storage()


def _storage(received: Received, offset_bytes: int, size_bytes: int) -> torch.UntypedStorage:
    return received.storage(offset_bytes, size_bytes)


def _receive(path: str, gen: GenerationId, key: Key, kept: Ident | None) -> Received:
    """Have what was sent: by a lease of this process, or for want of one by an fd of it.

    Raises:
        ResourceError: neither is to be had.
    """
    word = _DONE
    try:
        return Received(_lease(path, gen, key), -1)
    except (WeightCacheError, OSError, RuntimeError) as error:  # or there is no fd or thread left
        refused = error
        word = _FD
    finally:
        fd = _answer(kept, word)
    if fd < 0:
        raise ResourceError(
            f"{key!r} was sent to this process, and cannot be had: {refused}",
            remedy="have the sender live until it was received",
        ) from refused
    _warn_once(key, refused)
    return Received(None, fd)


def _lease(path: str, gen: GenerationId, key: Key) -> Buffer:
    for client in registry.clients():
        if client.place == path:
            buffer = client.leases.hand_out(gen)
            if buffer is not None:
                return buffer
    receiver = _Receiver()
    client = registry.share(path, program_name(), "cpu", receiver, PATIENCE_S)
    try:
        return client.receive(gen, key)
    finally:
        registry.leave(client, receiver)


def _answer(kept: Ident | None, word: bytes) -> int:
    """Tell the sender that this has it, or have an fd of it; -1 where there is none."""
    if kept is None:
        return -1
    try:
        with _resource_sharer.get_connection(kept) as sender:
            sender.send_bytes(word)
            return reduction.recv_handle(sender) if word == _FD else -1
    except (OSError, EOFError, RuntimeError, AuthenticationError):
        return -1  # who sent it is gone, or no relative of this process, or there is no fd left


_warned: list[bool] = []


def _warn_once(key: Key, error: Exception) -> None:
    if not _warned:
        _warned.append(True)
        logger.warning(
            "weight-cache: %r was sent to this process, which has a copy of its own of that now, "
            "because it could not lease it: %s",
            key,
            error,
        )


class _Receiver:
    """Shares a session for as long as it takes to receive something, and has no records."""

    def look(self, gen: GenerationId) -> Seen | None:
        return None

    def make_room(self, gen: GenerationId) -> None:
        pass

    def keep(self, gen: GenerationId) -> None:
        pass

    def retire(self, gen: GenerationId) -> None:
        pass

    def counted(self) -> list[ModelReport]:
        return []

    def after_fork(self, keeper: Keeper) -> None:
        pass


if hasattr(os, "register_at_fork"):
    # It is the parent's. Behind the registry's hook: what ends here is leased by then.
    os.register_at_fork(after_in_child=_under_way.clear)
