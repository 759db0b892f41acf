"""One sample in a fresh process: imports are done, then it connects, attaches and reads.

    python -m benchmarks.fresh CONTENDER PLACES

Prints the seconds of a `FreshSample`.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

from benchmarks.contenders import Ours, Places, contender
from benchmarks.coordinator_process import ROOT

LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class FreshSample:
    """Seconds from one fresh process.

    Attributes:
        attached_s: to connect and attach.
        read_s: that, and to read every page.
        deferred_import_s: what ours imports at its first attach; in neither of the others.
    """

    attached_s: float
    read_s: float
    deferred_import_s: float = 0.0


def sample(name: str, places: Places) -> FreshSample:
    """Return what a process of its own measured."""
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.fresh", name, json.dumps(asdict(places))],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    return FreshSample(**json.loads(ended.stdout))


def main(name: str, places: Places) -> None:
    """Take the sample and print it."""
    import torch

    from benchmarks.checkpoint import read_every_page

    torch.set_num_threads(1)
    taken = contender(name, places)
    taken.prepare()
    gc.collect()
    gc.disable()
    started_s = time.perf_counter()
    taken.connect()
    tensors = taken.attach()
    attached_s = time.perf_counter() - started_s
    read_every_page(tensors)
    read_s = time.perf_counter() - started_s
    deferred_s = taken.deferred_import_s if isinstance(taken, Ours) else 0.0
    print(json.dumps(asdict(FreshSample(attached_s, read_s, deferred_s))))


if __name__ == "__main__":
    main(sys.argv[1], Places(**json.loads(sys.argv[2])))
