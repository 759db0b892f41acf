"""What the commands show to people: tables, sizes, errors, progress.

rich is imported only where a table or a bar is really drawn: `serve` and quick commands do without.
Text that came from another process, or from a file name, is made plain before it is shown, so that
it cannot steer the terminal or break a line.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from shm_store.errors import WeightCacheError
from shm_store.report import GenerationReport, PoolReport, StatusReport

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from rich.table import Table

LINE_PAUSE_S = 5.0
"""How often a long load says how far it is where there is no terminal to draw a bar on."""

PIPE_COLUMNS = 240
"""How wide a table may be where no terminal says."""

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def size_text(size_bytes: int) -> str:
    """Return a size as people read it: "86.7 MiB"."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    power = (size_bytes.bit_length() - 1) // 10
    return f"{size_bytes / 1024**power:.1f} {_UNITS[power - 1]}"


def plain(text: str) -> str:
    """Return `text` on one line, with everything that is not printable spelled out."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def say(message: str) -> None:
    """Print one line of ours on standard error, if anybody still reads that."""
    try:
        print(f"weight-cache: {plain(message)}", file=sys.stderr, flush=True)
    except OSError:
        pass  # the terminal or the pipe is gone; what we do goes on


def show_error(error: WeightCacheError) -> None:
    """Say on standard error what went wrong, and in a table who holds what is in the way."""
    say(str(error))
    holders: Sequence[GenerationReport] = getattr(error, "holders", ())
    if holders:
        try:
            _draw(generations_table(holders, {}), sys.stderr)
        except OSError:
            pass  # as in `say`


def show_status(report: StatusReport, socket: str) -> None:
    """Print the whole ledger as tables."""
    state = "draining, takes no new work" if report.draining else "serving"
    print(f"coordinator on {plain(socket)}: {state}", flush=True)
    _draw(pools_table(report.pools), sys.stdout)
    if report.generations:
        names = {session.session: session.name for session in report.sessions}
        print()
        _draw(generations_table(report.generations, names), sys.stdout)
    else:
        print("no weights are held")
    if report.sessions:
        print()
        _draw(sessions_table(report), sys.stdout)
    else:
        print("no worker is attached")


def pools_table(pools: Iterable[PoolReport]) -> Table:
    """Return a table of budgets, and of what fills them."""
    kinds = ("leased", "retained", "filling", "retired", "private", "freeing")
    table = _table("pool", "limit", "in use", *kinds)
    for pool in pools:
        figures = [getattr(pool, f"{kind}_bytes") for kind in kinds]
        sizes = [pool.limit_bytes, pool.in_use_bytes, *figures]
        table.add_row(plain(pool.name), *(size_text(size) for size in sizes))
    return table


def generations_table(generations: Iterable[GenerationReport], names: dict[int, str]) -> Table:
    """Return a table of generations and who holds them.

    Args:
        names: of sessions, where they are known.
    """
    table = _table("key", "generation", "state", "size", "held by", "waiting")
    for generation in generations:
        holders = ", ".join(
            f"{plain(names.get(lease.session, ''))} pid {lease.pid} ({lease.age_s:.0f} s)".strip()
            for lease in generation.leases
        )
        table.add_row(
            plain(generation.key),
            plain(generation.generation),
            plain(generation.state) + (", pinned" if generation.pinned else ""),
            size_text(generation.size_bytes),
            holders or "-",
            str(generation.waiting),
        )
    return table


def sessions_table(report: StatusReport) -> Table:
    """Return a table of attached processes."""
    table = _table("session", "pid", "name", "device", "waiting for")
    for session in report.sessions:
        waiting = ", ".join(plain(key) for key in session.waiting_for) or "-"
        table.add_row(
            str(session.session),
            str(session.pid) + ("" if session.connected else " (not connected)"),
            plain(session.name),
            plain(session.device),
            waiting,
        )
    return table


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _draw(table: Table, stream: TextIO) -> None:
    from rich.console import Console

    # Drawn in memory: at a broken pipe rich would redirect standard output and exit. Neither
    # markup nor emoji codes: what is shown is what other processes said.
    encoding = stream.encoding or "utf-8"
    paper = io.TextIOWrapper(io.BytesIO(), encoding, "backslashreplace", newline="\n")
    on_terminal = stream.isatty()
    console = Console(
        file=paper,
        force_terminal=on_terminal,
        width=None if on_terminal else PIPE_COLUMNS,
        markup=False,
        highlight=False,
        emoji=False,
    )
    console.print(table)
    paper.seek(0)
    lines = (line.rstrip() for line in paper)
    print("\n".join(line for line in lines if line), file=stream, flush=True)


class LoadProgress:
    """Shows how far a load is: a bar on a terminal, else a line now and then. Quick ones: nothing.

    A context manager; `update` is what `Operator.acquire` calls.
    """

    def __init__(
        self,
        key: str,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._key = plain(key)
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._said_s = clock()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done_bytes: int, total_bytes: int) -> None:
        if self._stream.isatty():
            self._draw_bar(done_bytes, total_bytes)
            return
        now_s = self._clock()
        if now_s - self._said_s >= LINE_PAUSE_S:
            self._said_s = now_s
            share = done_bytes * 100 // max(total_bytes, 1)
            done, total = size_text(done_bytes), size_text(total_bytes)
            say(f"loading {self._key}: {done} of {total} ({share} %)")

    def _draw_bar(self, done_bytes: int, total_bytes: int) -> None:
        if self._bar is None or self._task is None:
            from rich import progress
            from rich.console import Console
            from rich.text import Text

            label = progress.RenderableColumn(Text(self._key))
            # No thread of its own: it is drawn when something has changed.
            self._bar = progress.Progress(
                label,
                progress.BarColumn(),
                progress.DownloadColumn(binary_units=True),
                progress.TransferSpeedColumn(),
                console=Console(file=self._stream),
                auto_refresh=False,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=total_bytes)
        self._bar.update(self._task, completed=done_bytes, total=total_bytes, refresh=True)
