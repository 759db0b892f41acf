"""A coordinator of the benchmark's own, on a socket of its own, as a user would start it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from coordinator.operator import Operator
from shm_store.keys import GenerationId, Key
from shm_store.source import open_source
from shm_store.wire import Acquire, Grant

ROOT = Path(__file__).parents[1]
"""Where `python -m benchmarks...` finds this package."""

STOP_LIMIT_S = 30.0
LOAD_LIMIT_S = 300.0


class CoordinatorProcess:
    """A running `serve`; a context manager that ends it.

    Attributes:
        ready_s: from just before exec to its ready line.
    """

    def __init__(self, socket: str, *options: str) -> None:
        """Start it and wait until it listens.

        Raises:
            RuntimeError: it ended instead.
        """
        self.socket = socket
        command = [sys.executable, "-m", "coordinator", "serve", "--socket", socket, *options]
        # A file, not a pipe: nobody reads while we measure, and a full pipe would stop it.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        started_s = time.perf_counter()
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self.ready_s = time.perf_counter() - started_s
        if "ready" not in line:
            self._process.wait()
            self._log.seek(0)
            said = self._log.read().decode()
            self.close()
            raise RuntimeError(f"the coordinator did not start: {line}{said}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Have it end, and wait for that."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        self._process.communicate(timeout=STOP_LIMIT_S)
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def acquire_segment(operator: Operator, key: str, source: Path) -> tuple[GenerationId, int]:
    """Have `key` loaded, lease it for this process, and return the fd, the caller's to close."""
    source_fd = open_source(source)
    try:
        request = Acquire(operator.next_rid(), Key(key), str(source), "", LOAD_LIMIT_S)
        answer = operator.request(request, (source_fd,))
    finally:
        os.close(source_fd)
    assert isinstance(answer.message, Grant)
    return answer.message.gen, answer.fds[0]
