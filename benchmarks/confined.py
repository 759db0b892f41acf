"""A whole coordinator and a worker within limits that the caller has set around this process.

    python -m benchmarks.confined CHECKPOINT [PEER ...]

Prints a `Confined`: whether every tensor arrived, of ours and of the peers.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.rows import Unavailable

KEY = "benchmark/confined"


@dataclass(frozen=True, slots=True)
class Confined:
    """What came out.

    Attributes:
        equal: how many of our tensors are bit-equal to those in the file.
        peers: how many tensors each peer got across.
        notes: what the peers failed of.
        fd_limit: of this process, in force.
        shm_bytes: the size of /dev/shm.
    """

    equal: int
    fd_limit: int
    shm_bytes: int
    peers: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def main(checkpoint: Path, peers: Sequence[str]) -> None:
    """Try ours, then the peers, and print the outcome."""
    shm = os.statvfs("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="wc-") as folder:
        found = Confined(
            equal=_ours(checkpoint, Path(folder)),
            fd_limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            shm_bytes=shm.f_blocks * shm.f_frsize,
        )
        for name in peers:
            try:
                found.peers[name] = _peer(name, checkpoint, Path(folder))
            except (Unavailable, OSError, RuntimeError) as error:
                found.peers[name] = 0
                found.notes.append(f"{name}: {str(error).splitlines()[0]}")
    print(json.dumps(asdict(found)))


def _ours(checkpoint: Path, folder: Path) -> int:
    import torch
    from safetensors.torch import load_file

    import gpu_worker
    from benchmarks.coordinator_process import CoordinatorProcess

    socket = str(folder / "c.sock")
    with CoordinatorProcess(socket), gpu_worker.attach(socket=socket) as worker:
        ours = worker.state_dict(KEY, source=str(checkpoint))
        return sum(torch.equal(ours[name], want) for name, want in load_file(checkpoint).items())


def _peer(name: str, checkpoint: Path, folder: Path) -> int:
    from benchmarks import sender
    from benchmarks.contenders import SHARING, TorchSharing

    address = str(folder / f"{SHARING[name]}.sock")
    process = sender.start(SHARING[name], checkpoint, address)
    try:
        one = TorchSharing(address)
        one.prepare()
        one.connect()
        return len(one.attach())
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
