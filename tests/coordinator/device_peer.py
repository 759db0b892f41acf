"""A session on a simulated device, spoken by hand, and memory there."""

from __future__ import annotations

import os

from coordinator.audit import audit
from coordinator.operator import Operator
from shm_store.memfds import PREFIX
from shm_store.wire import (
    Acquire,
    Commit,
    Declare,
    Grant,
    Reserve,
    Space,
    Ticket,
)
from tests.processes import WAIT_S, Peer

POOL = "vram:sim-7"
SIZE = 4 * 4096
LIMIT = 3 * SIZE


class Worker(Peer):
    """A session on the device, which has the weights `k` on the host."""

    def __init__(self, coordinator, name: str = "worker", **facts) -> None:
        super().__init__(coordinator.socket, name, **facts)
        if not facts:
            self.send(Declare(POOL, LIMIT))

    def host(self, key: str = "k") -> Grant:
        rid = self.next_rid()
        self.send(Acquire(rid, key, None, "", WAIT_S))
        answer = self.expect((Ticket, Grant))
        if isinstance(answer, Ticket):
            raise AssertionError("publish it first")
        os.close(*self.fds)
        return answer

    def ask(self, gen: str, key: str = "k", timeout_s: float = WAIT_S) -> int:
        """ACQUIRE the copy of a generation on the device."""
        rid = self.next_rid()
        self.send(Acquire(rid, key, None, gen, timeout_s, pool=POOL))
        return rid

    def reserve(self, gen: str, key: str = "k") -> str:
        self.ask(gen, key)
        there = self.expect(Ticket).gen
        self.send(Reserve(there, SIZE))
        self.expect(Space)
        assert self.fds == []
        return there

    def upload(self, gen: str, key: str = "k") -> Grant:
        """Allocate it, and have it shared. The fd that comes back is in `fds`."""
        there = self.reserve(gen, key)
        fd = memory(there)
        self.send(Commit(there), [fd])
        os.close(fd)
        return self.expect(Grant)

    def expect(self, kind):
        message = super().expect(kind if isinstance(kind, type) else object)
        assert isinstance(message, kind), message
        return message


def memory(gen: str, size: int = SIZE, device: str = "sim:7") -> int:
    fd = os.memfd_create(f"{PREFIX}{device}:{gen}", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, size)
    os.pwrite(fd, b"weights", 0)
    return fd


def in_use(operator: Peer) -> int:
    return next((pool.in_use_bytes for pool in operator.status().pools if pool.name == POOL), 0)


def there(operator: Peer):
    return [g for g in operator.status().generations if g.pool == POOL]


def published(coordinator, key: str = "k", version: str = "") -> tuple[Worker, str]:
    worker = Worker(coordinator)
    grant = worker.publish(key, version=version)
    os.close(*worker.fds)
    return worker, grant.gen


def agree(coordinator) -> None:
    with Operator.connect(coordinator.socket, "audit") as looking:
        found = audit(looking)
    # No peer maps what it leases and has an fd of.
    kinds = {one.kind for one in found.differences}
    assert kinds <= {"unmapped_lease", "fd_held"}, found.differences
