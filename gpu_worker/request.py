"""A request to the coordinator, from its asker's side: what is asked, and what comes of it.

The asker waits at the request's own inbox. The reader thread fills that, and nobody's lock is held.
"""

from __future__ import annotations

import copy
import os
import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from gpu_worker.records import Asked
from gpu_worker.waits import steps
from shm_store.errors import LoadTimeout, WeightCacheError
from shm_store.keys import Fingerprint, GenerationId, Key, LeaseId, RequestId
from shm_store.reading import AS_IT_IS, Reading
from shm_store.wire import NO_GENERATION, AnyMessage, Done, Filling, Flushed, Space, Ticket

if TYPE_CHECKING:
    import torch

    from gpu_worker.block import Memory
    from gpu_worker.mapping import Buffer
    from gpu_worker.residence import Residence

Build = Callable[[], "torch.nn.Module | Mapping[str, Any]"]
"""Makes the weights, in the thread that loads them, if this process is the one that has to."""

Progress = Callable[[int, int], object]
"""Called with the bytes filled so far and in all, in the thread that waits or fills."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What is wanted: a key, and either a source, read so, or a callable that builds it."""

    key: Key
    source: str | None
    build: Build | None
    version: str = ""
    reading: Reading = AS_IT_IS


@dataclass(frozen=True, slots=True)
class Granted:
    """A generation and its mapped bytes. The lease ends with the last use of `buffer`.

    `left_s` is what its asker may still wait; None is for ever.
    """

    gen: GenerationId
    buffer: Buffer
    left_s: float | None = None


_NO_KEY = Key("")
_NOT_YET = LeaseId(0)


@dataclass(slots=True, eq=False)
class Charge:
    """Private memory that the coordinator counts. Made before it is asked for, by who frees it.

    Attributes:
        residence: what is on a device by it, and can leave that; see there.
        memory: the device's, for which it is; `block_end` gives both back.
        forks: a forked child has it, too.
        fixed: it is never asked for.
        copy_of: the generation that is in it, if this process leases that no more.
        key, pool, size_bytes: what it was asked for as.
        gen, lease: what the coordinator calls it, once it was granted.
        asked: what the coordinator has asked of it since; `letting_go` while that is being done.
        collected: garbage was, because of that.
        over: its memory is free, or was never needed.
        shared: it is no private memory, but a lease on memory of a device, whose fd is `fd`.
    """

    residence: Callable[[], Residence | None] | None = None
    memory: Memory | None = None
    block_end: Callable[[], object] | None = None
    forks: bool = True
    fixed: bool = False
    copy_of: GenerationId = NO_GENERATION
    key: Key = _NO_KEY
    pool: str = ""
    size_bytes: int = 0
    gen: GenerationId = NO_GENERATION
    lease: LeaseId = _NOT_YET
    asked: Asked = ""
    letting_go: bool = False
    collected: bool = False
    over: bool = False
    shared: bool = False
    fd: int = -1


@dataclass(slots=True, eq=False)
class Request:
    """An open request and what has become of it. The client's lock guards all but `inbox`.

    Attributes:
        timeout_s: how long its asker waits in all, and `left_s` from now on; None is for ever.
        patience_s: how long while no coordinator answers; `waits_since_s` is when it began to.
        rid: 0 until it has an id, and another one on each connection; `sent` once it is on its way.
        wanted: it was not given up.
        say: makes the message that asks for it, by its id.
        fds: the opened source, to be asked for again: by then its path may lead elsewhere. Or the
            segment to fill. Once it is not `wanted`, its asker closes them.
        gen, fingerprint: the generation to build, once a ticket came; `reserved` after RESERVE.
        space: SPACE came. After COMMIT it is `committed`.
        builder: the thread that runs the asker's `build`.
        kind: what it is. Nobody waits for a prefetch, and its grant goes back at once; the grant of
            a charge has no segment, and goes to `charge`; that of a share is memory of a device.
    """

    key: Key | None
    timeout_s: float | None
    left_s: float | None
    patience_s: float = 0.0
    progress: Progress | None = None
    waits_since_s: float | None = None
    inbox: queue.SimpleQueue[Reply] = field(default_factory=queue.SimpleQueue)
    rid: RequestId = RequestId(0)
    sent: bool = False
    wanted: bool = True
    say: Callable[[RequestId], AnyMessage] | None = None
    fds: list[int] = field(default_factory=list)
    gen: GenerationId | None = None
    fingerprint: Fingerprint = Fingerprint("")
    reserved: bool = False
    space: bool = False
    committed: bool = False
    builder: int | None = None
    kind: Literal["acquire", "prefetch", "charge", "share", "invalidate", "flush"] = "acquire"
    charge: Charge | None = None
    pid: int = field(default_factory=os.getpid)

    def next(self) -> Step:
        """Wait for what comes next, and return it; raise the error that is the final answer.

        Raises:
            LoadTimeout: the time is up, and nothing has come.
            ForkedProcess: this is a forked child, where nothing will come.
        """
        self.waits_since_s = started_s = time.monotonic()
        for step_s in steps(self.left_s, self.pid):
            try:
                reply = self.inbox.get(timeout=step_s)
                break
            except queue.Empty:
                continue
        else:
            raise LoadTimeout(
                f"{self.key!r} was not ready after {self.timeout_s:g} s, and the coordinator has "
                "not said why"
            )
        self.waits_since_s = None
        if self.left_s is not None:
            self.left_s = max(0.0, self.left_s - (time.monotonic() - started_s))
        if isinstance(reply, WeightCacheError):
            # A copy: several askers may raise the same one, each with its own traceback.
            raise copy.copy(reply)
        return reply

    def close(self) -> None:
        """Close its fds, if it has any."""
        fds, self.fds = self.fds, []
        any(map(os.close, fds))  # in one call: nothing comes in between two of them


Step = Granted | Charge | Ticket | Space | Filling | Flushed | Done
Reply = Step | WeightCacheError
