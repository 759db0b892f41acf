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
from typing import TYPE_CHECKING, Literal

from gpu_worker.records import Asked
from gpu_worker.waits import steps
from shm_store.errors import LoadTimeout, WeightCacheError
from shm_store.keys import GenerationId, Key, LeaseId, RequestId
from shm_store.wire import Done, Filling, Flushed, Space, Ticket

if TYPE_CHECKING:
    import torch

    from gpu_worker.mapping import Buffer

Build = Callable[[], "torch.nn.Module | Mapping[str, torch.Tensor]"]
"""Makes the weights, in the thread that loads them, if this process is the one that has to."""

Progress = Callable[[int, int], object]
"""Called with the bytes filled so far and in all, in the thread that waits."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What is wanted: a key, and either the path of a source or a callable that builds it."""

    key: Key
    source: str | None
    build: Build | None
    version: str = ""


@dataclass(frozen=True, slots=True)
class Granted:
    """A generation and its mapped bytes. The lease ends with the last use of `buffer`.

    `left_s` is what its asker may still wait; None is for ever.
    """

    gen: GenerationId
    buffer: Buffer
    left_s: float | None = None


_NONE = GenerationId("")
_NOT_YET = LeaseId(0)


@dataclass(slots=True, eq=False)
class Charge:
    """Private memory that the coordinator counts. Made before it is asked for, by who frees it.

    Attributes:
        gen, lease: what the coordinator calls it, once it was granted.
        asked: what the coordinator has asked of it since; `letting_go` while that is being done.
        collected: garbage was, because of that.
        over: its memory is free, or was never needed.
    """

    gen: GenerationId = _NONE
    lease: LeaseId = _NOT_YET
    asked: Asked = ""
    letting_go: bool = False
    collected: bool = False
    over: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """An open request and what has become of it. The client's lock guards all but `inbox`.

    Attributes:
        timeout_s: how long its asker waits in all, and `left_s` from now on; None is for ever.
        rid: 0 until it has an id; `sent` once it is on its way.
        gen: the generation to build, once a ticket came.
        space: SPACE came; `space_fd` is its segment until that is filled.
        builder: the thread that runs the asker's `build`.
        prefetch: nobody waits for it, and its grant goes back at once.
        kind: what it is; the grant of a charge has no segment, and goes to `charge`.
    """

    key: Key | None
    timeout_s: float | None
    left_s: float | None
    progress: Progress | None = None
    inbox: queue.SimpleQueue[Reply] = field(default_factory=queue.SimpleQueue)
    rid: RequestId = RequestId(0)
    sent: bool = False
    wanted: bool = True
    gen: GenerationId | None = None
    reserved: bool = False
    space: bool = False
    space_fd: int = -1
    builder: int | None = None
    prefetch: bool = False
    kind: Literal["acquire", "charge", "invalidate", "flush"] = "acquire"
    charge: Charge | None = None
    pid: int = field(default_factory=os.getpid)

    def next(self) -> Step:
        """Wait for what comes next, and return it; raise the error that is the final answer.

        Raises:
            LoadTimeout: the time is up, and nothing has come.
            ForkedProcess: this is a forked child, where nothing will come.
        """
        started_s = time.monotonic()
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
        if self.left_s is not None:
            self.left_s = max(0.0, self.left_s - (time.monotonic() - started_s))
        if isinstance(reply, WeightCacheError):
            # A copy: several askers may raise the same one, each with its own traceback.
            raise copy.copy(reply)
        return reply

    def close_space(self) -> None:
        """Close the segment to fill, if it is here."""
        fd, self.space_fd = self.space_fd, -1
        if fd >= 0:
            os.close(fd)


Step = Granted | Charge | Ticket | Space | Filling | Flushed | Done
Reply = Step | WeightCacheError
