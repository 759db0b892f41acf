"""Where the command `weight-cache` begins and ends.

A plain `serve` is read right here, everything else by `commands`. An expected failure is one line
on standard error and the exit code of its error class, never a traceback.

Output that cannot be written is such a failure; a reader that has gone, as `head` does, needs no
line. What cannot be said on standard error is dropped, and changes no exit code.

    Note on the price of typer
    fact: typer, with the pydantic it needs, takes about 130 ms and 12 MB to import
    consequence: with it a coordinator needs twice the time to its ready line and half again the
    memory, for as long as it lives
    choice: the options of `serve` are read by hand; help, and what looks odd, is left to typer
    cost: they are named twice, here and in `commands`; a test compares both readings
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from shm_store.errors import WeightCacheError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

SOCKET_OPTION = "--socket"
BUDGET_OPTION = "--ram-budget"
LEAVE_OPTION = "--leave-after"
SERVE_OPTIONS = (SOCKET_OPTION, BUDGET_OPTION, LEAVE_OPTION)
NO_HUGE_PAGES = "--no-huge-pages"
"""The one option of `serve` that takes no value."""


def main() -> None:
    """Run the command line and exit."""
    open_streams()
    try:
        try:
            _run(sys.argv[1:])
        finally:
            sys.stdout.flush()  # at the end of the interpreter a failure could not be told
    except OutputLost as lost:
        # What is still buffered would fail once more, while the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(lost.__cause__, BrokenPipeError):
            sys.exit(128 + signal.SIGPIPE)
        from coordinator.display import say

        say(f"standard output cannot be written: {lost}")
        sys.exit(WeightCacheError.exit_code)


def _run(arguments: Sequence[str]) -> None:
    try:
        options = read_serve(arguments)
        if options is not None:
            huge_pages = NO_HUGE_PAGES not in options
            sys.exit(run_coordinator(*map(options.get, SERVE_OPTIONS), huge_pages=huge_pages))
        from coordinator.commands import app

        app(arguments, prog_name="weight-cache")
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
        if argument == NO_HUGE_PAGES:
            options[argument] = ""
            continue
        name, joined, value = argument.partition("=")
        if not joined:
            value = next(rest, "")
        if name not in SERVE_OPTIONS or not value or value.startswith("-"):
            return None
        options[name] = value
    return options


def run_coordinator(
    socket: str | None, ram_budget: str | None, leave_after: str | None, *, huge_pages: bool
) -> int:
    """Run a coordinator in the foreground and return its exit code."""
    from coordinator.config import Config
    from coordinator.serve import serve
    from shm_store.errors import ArgumentRefused
    from shm_store.paths import SOCKET_VARIABLE, default_socket_path, socket_path
    from shm_store.sizes import parse_size

    budget_bytes = None if ram_budget is None else parse_size(ram_budget)
    leave_after_s = None if leave_after is None else _parse_seconds(LEAVE_OPTION, leave_after)
    path = socket_path(socket)
    folder = os.path.dirname(path)
    # A directory that somebody chose is theirs to make; this one nobody else would.
    if socket is not None or path != default_socket_path():
        if not os.path.isdir(folder or "."):
            raise ArgumentRefused(
                f"there is no folder {folder} for the socket", remedy="make it, or choose another"
            )
    else:
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError as error:
            raise ArgumentRefused(
                f"{folder} cannot be made: {error.strerror}",
                remedy=f"choose a socket with {SOCKET_OPTION} or {SOCKET_VARIABLE}",
            ) from error
    config = Config(path, budget_bytes, leave_after_s=leave_after_s, huge_pages=huge_pages)
    return serve(config)


def _parse_seconds(option: str, text: str) -> float:
    from shm_store.errors import ArgumentRefused
    from shm_store.wire import TIMEOUT_LIMIT_S

    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= TIMEOUT_LIMIT_S:  # false for nan
        raise ArgumentRefused(f"{option} takes seconds, more than 0, not {text!r}")
    return seconds


# --- the standard streams -----------------------------------------------------------------------


class OutputLost(Exception):
    """Standard output cannot be written. The cause says why."""


class _Output(io.FileIO):
    """Standard output. Its failures have a class of their own, to be told from all others."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OutputLost(error.strerror) from error


class _Errors(io.FileIO):
    """Standard error. Whether anybody reads it changes nothing."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def open_streams() -> None:
    """Make `sys.stdout` and `sys.stderr` ours, unless somebody else has put theirs there."""
    # Were one of the three fds closed, the next socket or segment would get its number. Writing to
    # what is opened here fails, as it would without.
    while (fd := os.open(os.devnull, os.O_RDONLY)) <= 2:
        pass
    os.close(fd)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _text(_Output(1, "w", closefd=False), sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(_Errors(2, "w", closefd=False), sys.stderr)


def _text(raw: io.FileIO, replaced: TextIO | None) -> TextIO:
    """Return a stream over `raw` that can show every key, whatever the terminal's encoding."""
    encoding = None if replaced is None else replaced.encoding  # None where it was closed
    lines = raw.isatty() or raw.fileno() == 2
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding, "backslashreplace", line_buffering=lines
    )
