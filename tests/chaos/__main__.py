"""Kills, stops and starves the processes of a real group under load, and checks all that must hold.

    python -m tests.chaos --minutes 10 --seed 1

Prints a line for each fault, and a table at the end. The first thing that must not be ends it with
exit code 1, and everything that is known of it; the folder of the run then stays.
"""

from __future__ import annotations

import argparse
import os
import sys

from tests.chaos import weights
from tests.chaos.run import chaos


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, metavar="M")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--workers", type=int, default=3, metavar="N")
    parser.add_argument("--faults", type=int, metavar="N", help="end after so many")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only faults with TEXT in their line"
    )
    parser.add_argument(
        "--private", action="store_true", help="share nothing on the device (share_vram=False)"
    )
    told = parser.parse_args(arguments)
    os.environ[weights.PRIVATE_VARIABLE] = "1" if told.private else ""
    return chaos(told.minutes * 60, told.seed, told.workers, told.faults, told.only)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
