"""Our server with as many READY keys as one likes, and other sessions that lease them.

    python -m benchmarks.full_server SOCKET KEYS     (its end is ours: SIGTERM)

Server, connections, wire and ledger are the real ones. Every generation went through its life by
the ledger's own events, but has no segment of its own: ten thousand would need as many children to
back them. One memfd stands in for all, so that each GRANT carries an fd as always.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from benchmarks.coordinator_process import ROOT
from benchmarks.wire_client import WireClient
from coordinator.fd_limit import raise_fd_limit
from coordinator.ledger import apply
from coordinator.ledger.events import Attached, Backed, Event, Said, Sealed, SessionEnded
from coordinator.ledger.invariants import violations
from coordinator.ledger.state import State
from coordinator.segment_table import SegmentTable
from coordinator.server import ATTACHED_LIMIT, Server
from shm_store import channel, segment
from shm_store.keys import GenerationId, Key, RequestId, SessionId
from shm_store.layout import PAGE_BYTES
from shm_store.wire import RAM, Acquire, Commit, Reserve

LEASES = 10
"""Of each session that only holds."""

_BUILDER = SessionId(1)


def key(number: int) -> str:
    """Return the name of a key, as long as keys are."""
    return f"benchmark/scale/{number:05}:bf16"


@contextmanager
def full_server(path: str, keys: int, holders: int) -> Iterator[None]:
    """Run one, with so many sessions of other processes."""
    with ExitStack() as stack:
        stack.enter_context(_process("server", path, str(keys)))
        # One process may not have more connections than that.
        for first in range(0, holders, ATTACHED_LIMIT):
            last = min(holders, first + ATTACHED_LIMIT)
            stack.enter_context(_process("holders", path, str(keys), str(first), str(last)))
        yield


@contextmanager
def _process(*words: str) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.full_server", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("a process of the full server has ended")
        yield
    finally:
        process.terminate()
        process.communicate()


class _OneSegment(SegmentTable):
    """A table in which every generation has the same segment."""

    def __init__(self) -> None:
        super().__init__()
        self._fd = segment.create(GenerationId("stand-in"))

    def fd(self, gen: GenerationId) -> int | None:
        return self._fd


async def _serve(path: str, keys: int) -> None:
    raise_fd_limit()
    loop = asyncio.get_running_loop()
    server = Server(loop, channel.listen(path), 2 * keys * PAGE_BYTES)
    server._executor.segments = _OneSegment()
    server._last_session = _BUILDER
    _publish(server, loop, keys)
    print("ready", flush=True)
    await loop.create_future()


def _publish(server: Server, loop: asyncio.AbstractEventLoop, keys: int) -> None:
    """Take every key through OPEN, RESERVED and FILLING to READY; then its builder ends."""

    def happen(event: Event) -> None:
        apply(server.ledger, event, loop.time())

    happen(Attached(_BUILDER, os.getpid(), "builder", "cpu", "worker"))
    for number in range(keys):
        rid = RequestId(number + 1)
        happen(Said(_BUILDER, Acquire(rid, Key(key(number)), None, "", 60.0)))
        gen = server.ledger.by_home[RAM, Key(key(number))][0].id
        for event in (
            Said(_BUILDER, Reserve(gen, PAGE_BYTES)),
            Backed(gen),
            Said(_BUILDER, Commit(gen)),
            Sealed(gen),
        ):
            happen(event)
    happen(SessionEnded(_BUILDER))
    assert all(known.state is State.READY for known in server.ledger.generations.values())
    assert len(server.ledger.generations) == keys
    assert not violations(server.ledger)


def _hold(path: str, keys: int, numbers: range) -> None:
    """Have a session for each number, each with leases of its own, until the process ends."""
    clients = []
    for number in numbers:
        client = WireClient(path)
        for lease in range(LEASES):
            client.acquire(key((number * LEASES + lease) % keys))
        clients.append(client)
    print("ready", flush=True)
    while True:
        time.sleep(3600)


def main(words: Sequence[str]) -> None:
    match words:
        case ["server", path, keys]:
            asyncio.run(_serve(path, int(keys)))
        case ["holders", path, keys, first, last]:
            _hold(path, int(keys), range(int(first), int(last)))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
