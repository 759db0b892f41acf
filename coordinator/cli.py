"""Where the command `weight-cache` begins and ends.

A plain `serve` is read right here, everything else by `commands`. An expected failure is one line
on standard error and the exit code of its error class, never a traceback.

    Note on the price of typer
    fact: typer, with the pydantic it needs, takes about 130 ms and 12 MB to import
    consequence: with it a coordinator needs twice the time to its ready line and half again the
    memory, for as long as it lives
    choice: the two options of `serve` are read by hand; help, and what looks odd, is left to typer
    cost: they are named twice, here and in `commands`; a test compares both readings
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from shm_store.errors import WeightCacheError

SOCKET_OPTION = "--socket"
BUDGET_OPTION = "--ram-budget"


def main() -> None:
    """Run the command line and exit."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a key need not exist in the terminal's encoding
            stream.reconfigure(errors="backslashreplace")
    try:
        options = read_serve(sys.argv[1:])
        if options is not None:
            sys.exit(run_coordinator(options.get(SOCKET_OPTION), options.get(BUDGET_OPTION)))
        from coordinator.commands import app

        app(prog_name="weight-cache")
    except WeightCacheError as error:
        from coordinator.display import show_error

        show_error(error)
        sys.exit(error.exit_code)


def read_serve(arguments: Sequence[str]) -> dict[str, str] | None:
    """Return the options of a plain `serve`; None for any other command line."""
    if arguments[:1] != ["serve"]:
        return None
    options: dict[str, str] = {}
    rest = iter(arguments[1:])
    for argument in rest:
        name, joined, value = argument.partition("=")
        if not joined:
            value = next(rest, "")
        if name not in (SOCKET_OPTION, BUDGET_OPTION) or not value or value.startswith("-"):
            return None
        options[name] = value
    return options


def run_coordinator(socket: str | None, ram_budget: str | None) -> int:
    """Run a coordinator in the foreground and return its exit code."""
    from coordinator import server
    from coordinator.config import Config
    from coordinator.memory import parse_size
    from shm_store.paths import default_socket_path, socket_path

    budget_bytes = None if ram_budget is None else parse_size(ram_budget)
    path = socket_path(socket)
    if socket is None and path == default_socket_path():
        # A directory that somebody chose is theirs to make; this one nobody else would.
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    return server.serve(Config(path, budget_bytes))
