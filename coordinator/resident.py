"""The resident workers that `launch` starts where it is given no command: `python -m gpu_worker`.

They are processes of their own, which this package only knows by their command line: it imports
neither torch nor a driver.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from coordinator.process_host import module_command
from shm_store.checkpoint_files import open_checkpoint
from shm_store.errors import ArgumentRefused, listed
from shm_store.keep import KEEP_OPTION, parse_keep

HOPELESS = frozenset({2, 3})
"""Exit codes of a resident worker that is told what cannot be, or has no source it can use."""

LIST_TIMEOUT_S = 120.0
"""For a first import of torch from a cold disk."""


def command(keep: Sequence[str]) -> tuple[str, ...]:
    """Return the command of a resident worker, but for its device."""
    kept = [part for text in keep for part in (KEEP_OPTION, text)]
    return (*module_command("gpu_worker"), *kept)


def refuse_keep(keep: Sequence[str]) -> None:
    """Raise ArgumentRefused if something is to be kept, beside a command of the user's."""
    if keep:
        raise ArgumentRefused(
            f"{KEEP_OPTION} is for the workers that `launch` starts where it is given no command",
            remedy=f"leave CMD out, and start it beside; or leave {KEEP_OPTION} out",
        )


def check(keep: Sequence[str], devices: Sequence[str], workers: int) -> None:
    """Refuse what no resident worker could be started with, before anything is.

    Raises:
        ArgumentRefused, KeyRefused: by name.
        SourceNotOpened: one of what is to be kept.
    """
    for source in parse_keep(keep).values():
        open_checkpoint(source).close()
    twice = sorted({name for name in devices if list(devices).count(name) > 1})
    if twice:
        raise ArgumentRefused(
            f"--devices names {listed(twice)} twice, and there is one resident worker for each",
            remedy="name each device once, or give a command",
        )
    if workers > 1:
        raise ArgumentRefused(
            f"--workers {workers} goes with a command; without one, each device has one worker",
            remedy="name the devices: --devices cuda:0,cuda:1",
        )


def visible_devices() -> tuple[str, ...]:
    """Return the GPUs that processes started here would see, or else "cpu".

    Raises:
        ArgumentRefused: nobody can say.
    """
    try:
        done = subprocess.run(
            [*module_command("gpu_worker"), "--list-devices"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            check=True,
            text=True,
            timeout=LIST_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ArgumentRefused(
            f"which GPUs there are cannot be found out: {error}",
            remedy="name them: --devices cuda:0,cuda:1, or cpu",
        ) from error
    return tuple(done.stdout.split()) or ("cpu",)
