"""A process that acquires and releases one key as often as it is told, through one way of asking.

    python -m benchmarks.pairs wire|worker KEY SOCKET...

`wire` speaks the wire itself; `worker` attaches with `gpu_worker`, and has a state dict made and
dropped. Says `ready`; then a line `INDEX PAIRS` on standard input means so many pairs at that
socket of the list, and is answered by a line when they are done.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal, Self

from benchmarks.coordinator_process import ROOT
from benchmarks.wire_client import WireClient

Way = Literal["wire", "worker"]


class Crowd:
    """Such processes, that start together; a context manager that ends them."""

    def __init__(self, clients: int, way: Way, key: str, sockets: Sequence[str]) -> None:
        """Start them and wait until each is connected to every socket."""
        self.clients = clients
        command = [sys.executable, "-m", "benchmarks.pairs", way, key, *sockets]
        self._processes = [
            subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(clients)
        ]
        self._hear()

    def pairs_per_s(self, index: int, pairs: int) -> float:
        """Have each do so many pairs at a socket; return how many all did in a second."""
        started_s = time.perf_counter()
        for process in self._processes:
            assert process.stdin is not None
            print(index, pairs, file=process.stdin, flush=True)
        self._hear()
        return self.clients * pairs / (time.perf_counter() - started_s)

    def _hear(self) -> None:
        for process in self._processes:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise RuntimeError(f"process {process.pid} has ended")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.communicate()


def main(way: str, key: str, sockets: Sequence[str]) -> None:
    """Do pairs until standard input ends."""
    connect = _worker if way == "worker" else _wire
    doers = [connect(path, key) for path in sockets]
    print("ready", flush=True)
    for line in sys.stdin:
        index, pairs = map(int, line.split())
        do = doers[index]
        for _ in range(pairs):
            do()
        print("done", flush=True)


def _wire(path: str, key: str) -> Callable[[], object]:
    client = WireClient(path)
    return lambda: client.pair(key)


def _worker(path: str, key: str) -> Callable[[], object]:
    import gpu_worker

    worker = gpu_worker.attach(path, name="benchmark")

    def never() -> dict:
        raise AssertionError(f"{key!r} is not READY at {os.fspath(path)}")

    def pair() -> None:
        worker.state_dict(key, build=never)

    pair()  # imports what it needs
    return pair


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
