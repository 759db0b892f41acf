"""`python -m tests.exploration [--large] [--limit N]`: explore every world; say how much it was."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from concurrent.futures import ProcessPoolExecutor

from tests.exploration.explore import explore
from tests.exploration.worlds import LARGE, SMALL


def main() -> int:
    parser = argparse.ArgumentParser(prog="explore", description=__doc__)
    parser.add_argument("--large", action="store_true", help="the large worlds instead")
    parser.add_argument("--limit", type=int, default=10**9, help="visit so many states of each")
    options = parser.parse_args()
    worlds = LARGE if options.large else SMALL
    states, transitions, failed = 0, 0, False
    with ProcessPoolExecutor(os.cpu_count()) as processes:
        visit = functools.partial(explore, limit=options.limit)
        for explored in processes.map(visit, worlds):
            states += explored.states
            transitions += explored.transitions
            failed |= bool(explored.problem)
            print(
                f"{explored.world:60} {explored.states:9,} states{'' if explored.whole else '+'} "
                f"{explored.transitions:10,} transitions {explored.seconds:7.1f} s "
                f"{explored.problem}",
                flush=True,
            )
            for action in explored.path:
                print(f"    {action}")
    print(f"{len(worlds)} worlds, {states:,} states, {transitions:,} transitions")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
