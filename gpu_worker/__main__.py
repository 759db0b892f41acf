"""`python -m gpu_worker --device D [--keep KEY=SOURCE ...]`: the resident worker of a device.

`weight-cache launch` starts one for each device where it is given no command.

Exit codes: 0 after INT, TERM or HUP, or when the coordinator drains; else that of the error: 2 for
arguments, 3 for a source that cannot be used and never could, 6 if no coordinator answers.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from gpu_worker.resident_worker import ResidentWorker
from shm_store.errors import Draining, WeightCacheError
from shm_store.keep import KEEP_OPTION, parse_keep
from shm_store.keys import Key

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""A hangup is no failure: a group would start it again, and outlive its terminal."""


class _Told(BaseException):
    """A signal asks this process to end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until a signal, or the end of the coordinator; return the exit code."""
    options = _options(arguments)
    if options.list_devices:
        print("\n".join(_visible_devices()))
        return 0
    try:
        keep = parse_keep(options.keep)
        _log_to_stderr()
        # In the block: else one could come between the two.
        for number in ENDING:
            if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                signal.signal(number, _leave)
        error: WeightCacheError = _run(options, keep)
    except _Told:
        return 0
    except WeightCacheError as failure:
        error = failure
    if isinstance(error, Draining):
        return 0
    print(f"weight-cache: {error}", file=sys.stderr)
    return error.exit_code


def _run(options: argparse.Namespace, keep: dict[Key, str]) -> WeightCacheError:
    """Keep what is to be kept, and return why it ends.

    Raises:
        WeightCacheError: it cannot begin.
        _Told: by a signal.
    """
    resident = ResidentWorker(options.device, keep, options.socket)
    with contextlib.closing(resident):
        return resident.wait()


def _leave(number: int, frame: FrameType | None) -> None:
    for other in ENDING:  # once is enough: what follows is the end
        signal.signal(other, signal.SIG_IGN)
    raise _Told


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gpu_worker",
        description="Keep weights on a device, for the processes that attach beside it.",
        epilog="It takes room from nobody, and gives it to whoever needs it. INT, TERM and "
        "HUP end it.",
        allow_abbrev=False,
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--device", metavar="D", help="cuda:0, sim:0, or cpu for the host alone")
    which.add_argument(
        "--list-devices", action="store_true", help="print the GPUs that are visible, and end"
    )
    parser.add_argument(
        KEEP_OPTION,
        action="append",
        default=[],
        metavar="KEY=SOURCE",
        help="weights to keep, and their checkpoint; may be repeated",
    )
    parser.add_argument("--socket", metavar="PATH", help="the coordinator's; as for `weight-cache`")
    return parser.parse_args(arguments)


def _visible_devices() -> list[str]:
    import torch

    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def _log_to_stderr() -> None:
    """Have its lines on standard error, and what else this package warns of."""
    handler = logging.StreamHandler()
    package = logging.getLogger("gpu_worker")
    package.addHandler(handler)
    package.propagate = False
    logging.getLogger(ResidentWorker.__module__).setLevel(logging.INFO)


if __name__ == "__main__":
    sys.exit(main())
