"""The demo as an operator of its coordinator: status, evict, drain, over a connection of its own.

`coordinator.operator` is what commands use; `gpu_worker` does not import it.
"""

from __future__ import annotations

import itertools
import select
import time
from typing import Self, TypeVar

from shm_store import channel
from shm_store.errors import ConnectionLost
from shm_store.keys import RequestId
from shm_store.report import GenerationReport, StatusReport
from shm_store.wire import (
    VERSION,
    Done,
    Drain,
    Evict,
    Fail,
    Flush,
    Flushed,
    FromOperator,
    Report,
    Resume,
    Status,
    ToSession,
    decode,
    encode,
    to_session_decoder,
)

ANSWER_LIMIT_S = 20.0

Kind = TypeVar("Kind")


class Operator:
    """A connection for one request at a time."""

    def __init__(self, path: str) -> None:
        """Connect to the coordinator that listens on `path`.

        Raises:
            NoCoordinator: nothing listens there.
        """
        self._channel = channel.connect(path)
        self._rids = itertools.count(1)
        self._channel.send(encode(Resume(VERSION, "demo", role="operator")))

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def status(self) -> StatusReport:
        """Return the whole ledger."""
        return self._ask(Status(self._rid()), Report).report

    def generations(self, key: str) -> list[GenerationReport]:
        """Return every generation of `key`."""
        return [report for report in self.status().generations if report.key == key]

    def evict_idle(self) -> tuple[str, ...]:
        """Free what nobody leases, and return its keys once the memory is gone."""
        keys = self._ask(Evict(self._rid()), Done).keys
        self._ask(Flush(self._rid()), Flushed)
        return keys

    def drain(self, timeout_s: float) -> None:
        """Have the coordinator take no new work and leave; return when nothing is held."""
        self._ask(Drain(self._rid(), timeout_s), Done)

    def _rid(self) -> RequestId:
        return RequestId(next(self._rids))

    def _ask(self, request: FromOperator | Flush, kind: type[Kind]) -> Kind:
        self._channel.send(encode(request))
        deadline_s = time.monotonic() + ANSWER_LIMIT_S
        while True:
            answer = self._receive(deadline_s)
            if isinstance(answer, Fail) and answer.rid in (0, request.rid):
                raise answer.cause.error()
            if isinstance(answer, kind):
                return answer

    def _receive(self, deadline_s: float) -> ToSession:
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
            raise ConnectionLost(
                f"the coordinator did not answer in {ANSWER_LIMIT_S:g} s", remedy=""
            )
        received = self._channel.receive()
        if received is None:
            raise ConnectionLost("the coordinator went away before it answered", remedy="")
        data, fds = received
        channel.close_all(fds)
        return decode(to_session_decoder, data)
