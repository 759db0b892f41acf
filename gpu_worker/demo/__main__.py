"""`python -m gpu_worker.demo [--json]`, which `weight-cache demo` runs.

Exit codes: 0 if every claim held; 1 if one did not, or the demo could not go on; 2 for wrong
arguments; 128 + N if signal N ended it. Whatever ends it, nothing is left behind.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import time
from importlib import metadata
from types import FrameType

import msgspec

from gpu_worker.demo.claims import Claims
from gpu_worker.demo.figures import Figures, Machine, Outcome
from gpu_worker.demo.process import ENDING, DemoFailed
from gpu_worker.demo.stage import Stage
from gpu_worker.demo.story import Story
from gpu_worker.demo.telling import Narrator, Silence, Unheard, write
from shm_store.errors import WeightCacheError

CHECKPOINT_MIB = 1024
CHECKPOINT_LIMIT_MIB = 64 * 1024


def main() -> int:
    """Run the demo; return its exit code."""
    arguments = _arguments()
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, _leave)
    try:
        outcome = run(arguments.checkpoint_mib, Silence() if arguments.json else Narrator())
        if arguments.json:
            write(msgspec.json.format(msgspec.json.encode(outcome), indent=2).decode())
    except Unheard as unheard:
        print(f"weight-cache demo: {unheard}", file=sys.stderr)
        return 1
    return 0 if outcome.ok else 1


def run(checkpoint_mib: int, teller: Narrator | Silence) -> Outcome:
    """Run the demo and return how it went, claims and figures included."""
    started_s = time.monotonic()
    claims = Claims(teller.claim)
    figures = Figures(_machine())
    error = None
    try:
        with Stage(checkpoint_mib) as stage:
            error = _tell(stage, Story(stage, teller, claims, figures))
    except DemoFailed as failure:
        error = str(failure)
    outcome = Outcome(
        ok=claims.hold and error is None,
        error=error,
        duration_s=time.monotonic() - started_s,
        claims=tuple(claims.made),
        figures=figures,
    )
    teller.end(outcome)
    return outcome


def _tell(stage: Stage, story: Story) -> str | None:
    """Tell the story; return why it has no end, with the last words of the processes, or None."""
    try:
        story.tell()
    except (DemoFailed, WeightCacheError, OSError) as failure:
        return f"{failure}\n{stage.last_words()}".strip()
    return None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="weight-cache demo",
        description="Show two processes that share one copy of a real model.",
    )
    parser.add_argument("--json", action="store_true", help="print claims and figures as JSON")
    parser.add_argument(
        "--checkpoint-mib",
        type=int,
        default=CHECKPOINT_MIB,
        metavar="N",
        help="size of the generated checkpoint (default: %(default)s)",
    )
    arguments = parser.parse_args()
    if not 4 <= arguments.checkpoint_mib <= CHECKPOINT_LIMIT_MIB:
        parser.error(f"--checkpoint-mib takes 4 to {CHECKPOINT_LIMIT_MIB}")
    return arguments


def _machine() -> Machine:
    return Machine(
        kernel=platform.release(),
        cpus=len(os.sched_getaffinity(0)),
        python=platform.python_version(),
        torch=_version("torch"),
        transformers=_version("transformers"),
    )


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _leave(number: int, frame: FrameType | None) -> None:
    """End as after Ctrl-C: everything that was begun is ended on the way out."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
