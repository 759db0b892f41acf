"""`python -m tests.exploration [--large]`: explore every world, and print how much there was."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ProcessPoolExecutor

from tests.exploration.explore import explore
from tests.exploration.worlds import LARGE, SMALL


def main() -> int:
    worlds = SMALL + (LARGE if "--large" in sys.argv else [])
    states, transitions, failed = 0, 0, False
    with ProcessPoolExecutor(os.cpu_count()) as processes:
        for explored in processes.map(explore, worlds):
            states += explored.states
            transitions += explored.transitions
            failed |= bool(explored.problem)
            print(
                f"{explored.world:60} {explored.states:9,} states {explored.transitions:10,} "
                f"transitions {explored.seconds:7.1f} s {explored.problem}",
                flush=True,
            )
            for action in explored.path:
                print(f"    {action}")
    print(f"{len(worlds)} worlds, {states:,} states, {transitions:,} transitions")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
