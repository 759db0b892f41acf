"""A session spoken on the wire with nothing around it: what the coordinator is asked by its fastest
client. Needs no torch, so that many of them start quickly.
"""

from __future__ import annotations

from shm_store import channel
from shm_store.keys import GenerationId, Key, LeaseId, RequestId
from shm_store.wire import (
    VERSION,
    Acquire,
    Grant,
    Release,
    Resume,
    decode,
    encode,
    to_session_decoder,
)

TIMEOUT_S = 60.0


class WireClient:
    """One connection. Its segments are never mapped: each fd is closed as soon as it is here."""

    def __init__(self, path: str) -> None:
        self._channel = channel.connect(path)
        self._channel.send(encode(Resume(VERSION, "benchmark")))
        self._rid = 0

    def acquire(self, key: str) -> tuple[GenerationId, LeaseId]:
        """Lease weights that are READY; return what a RELEASE names."""
        self._rid += 1
        rid = RequestId(self._rid)
        self._channel.send(encode(Acquire(rid, Key(key), None, "", TIMEOUT_S)))
        received = self._channel.receive()
        assert received is not None, "the connection has ended"
        data, fds = received
        grant = decode(to_session_decoder, data)
        assert isinstance(grant, Grant), grant
        channel.close_all(fds)
        return grant.gen, LeaseId(rid)

    def release(self, gen: GenerationId, lease: LeaseId) -> None:
        """Give a lease back. Not answered."""
        self._channel.send(encode(Release(gen, lease)))

    def pair(self, key: str) -> None:
        """Acquire and release."""
        self.release(*self.acquire(key))

    def close(self) -> None:
        self._channel.close()
