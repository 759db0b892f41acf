"""The other end of torch.multiprocessing: a process that holds tensors in shared memory.

    python -m benchmarks.sender STRATEGY CHECKPOINT SOCKET

Whenever it is asked over a connection it sends them all, as a process would pass a model to another
one through a pipe or a queue.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

from benchmarks.coordinator_process import ROOT
from benchmarks.rows import Unavailable

AUTHKEY = b"benchmark"
"""Both ends need the same: torch fetches fds through a socket that asks for it."""

ALL = "all"
"""Asks for the tensors. Anything else is answered with None, once what came before is done."""


def start(strategy: str, checkpoint: Path, address: str) -> subprocess.Popen[str]:
    """Start a sender; return when it listens.

    Raises:
        Unavailable: it died of what the strategy needs.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.sender", strategy, str(checkpoint), address],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    if not process.stdout.readline():
        _, said = process.communicate()
        reason = said.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        raise Unavailable(reason[0])
    return process


def connect(address: str) -> Connection:
    """Return a connection to the sender on `address`."""
    import torch.multiprocessing  # noqa: F401  (teaches the pickler about tensors)

    multiprocessing.current_process().authkey = AUTHKEY
    return Client(address, "AF_UNIX")


def main(strategy: str, checkpoint: str, address: str) -> None:
    """Serve each connection in a thread of its own until it is closed."""
    import torch
    import torch.multiprocessing
    from safetensors.torch import load_file

    multiprocessing.current_process().authkey = AUTHKEY
    torch.multiprocessing.set_sharing_strategy(strategy)
    tensors = {
        name: tensor.clone().share_memory_() for name, tensor in load_file(checkpoint).items()
    }
    with Listener(address, "AF_UNIX") as listening:
        print("ready", flush=True)
        while True:
            accepted = listening.accept()
            threading.Thread(target=_answer, args=(accepted, tensors), daemon=True).start()


def _answer(connected: Connection, tensors: object) -> None:
    with connected:
        while True:
            try:
                wanted = connected.recv()
            except EOFError:
                return
            connected.send(tensors if wanted == ALL else None)


if __name__ == "__main__":
    main(*sys.argv[1:4])
