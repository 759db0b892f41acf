"""`python -m benchmarks.device_check`, which `scripts/device-check` calls.

Needs torch, accelerate, psutil and msgspec, on a GPU numpy besides (and cuda-bindings, or what is
shared is skipped, with the reason), and installs nothing: where
there is no network, wheels that were carried there do, `pip install --no-index --target DIR *.whl`
with DIR on PYTHONPATH. Exits with 1 if a promise was missed, with 2 if nothing could be checked.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from benchmarks.device_check import checks

if TYPE_CHECKING:
    from benchmarks.device_check.place import Place

NEEDED = ("torch", "accelerate", "psutil", "msgspec")
SIM_VARIABLE = "WEIGHT_CACHE_SIM_BYTES"


def main(arguments: list[str]) -> int:
    """Check, print a line for each promise, and return the exit code."""
    options = _parser().parse_args(arguments)
    # Children that compile would be forked off a process that has a device.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    size_bytes = int(options.size_mb * 1e6)
    os.environ.setdefault(SIM_VARIABLE, str(3 * size_bytes + (256 << 20)))
    if lacking := _lacking(options.device):
        _say(f"not installed: {', '.join(lacking)}")
        return 2
    from shm_store.errors import WeightCacheError

    logging.getLogger("gpu_worker").setLevel(logging.ERROR)  # what runs in part is meant to
    started_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        try:
            place = stack.enter_context(_place(options.device, size_bytes, options.rounds))
        except (WeightCacheError, RuntimeError) as error:
            _say(f"nothing can be checked: {error}")
            return 2
        facts = _facts(place)
        if not options.json:
            print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
        found = []
        for check in checks.run(place, _checks(), place.tidy):
            found.append(check)
            if not options.json:
                print(f"{check.verdict:<8} {check.name}: {check.said}", flush=True)
    took_s = time.monotonic() - started_s
    if options.json:
        shown = [
            {"name": c.name, "verdict": c.verdict, "said": c.said, "figures": dict(c.figures)}
            for c in found
        ]
        print(json.dumps({"conditions": facts, "took_s": took_s, "checks": shown}, indent=2))
    else:
        print(f"took {took_s:.0f} s", flush=True)
    return 1 if any(check.verdict == "MISSED" for check in found) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/device-check", description=__doc__)
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or sim:N")
    parser.add_argument("--size-mb", type=float, default=1000, help="of a large model")
    parser.add_argument("--rounds", type=int, default=7, help="of each way of uploading")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    return parser


def _lacking(device: str) -> list[str]:
    needed = NEEDED if device.startswith("sim") else (*NEEDED, "numpy")
    lacking = []
    for name in needed:
        try:
            importlib.import_module(name)
        except ImportError:
            lacking.append(name)
    return lacking


@contextlib.contextmanager
def _place(device: str, size_bytes: int, rounds: int) -> Iterator[Place]:
    """Give the device, with a coordinator of its own."""
    from benchmarks.coordinator_process import CoordinatorProcess
    from benchmarks.device_check.place import Place

    with tempfile.TemporaryDirectory(prefix="wc-") as folder:
        socket = f"{folder}/c.sock"
        with (
            CoordinatorProcess(socket, "--ram-budget", str(6 * size_bytes + (1 << 30))),
            Place(socket, device, size_bytes, rounds) as place,
        ):
            place.warm_up()
            yield place


def _checks() -> Iterator[checks.Named[Place]]:
    from benchmarks.device_check import books, correctness, death, private, sharing, uploads

    for part in (correctness, books, private, death, sharing, uploads):
        yield from part.CHECKS


def _facts(place: Place) -> dict[str, object]:
    """Return what a reader has to know about this machine."""
    import torch

    facts: dict[str, object] = {"device": place.device.name, "pool": place.pool}
    if not place.simulated:
        known = torch.cuda.get_device_properties(place.device.torch_device)
        facts |= {"card": known.name, "vram_gib": round(known.total_memory / 2**30, 1)}
        facts["cuda"] = torch.version.cuda or torch.version.hip
    return facts | {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 1),
        "size_mb": round(place.size_bytes / 1e6),
    }


def _say(message: str) -> None:
    print(f"device-check: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
