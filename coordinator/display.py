"""What the commands show to people: tables, sizes, errors, progress.

rich is imported only where a table or a bar is really drawn: `serve` and quick commands do without.
Text that came from another process, or from a file name, is made plain before it is shown, so that
it cannot steer the terminal or break a line.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from shm_store.errors import WeightCacheError, holders_text, listed
from shm_store.keys import short_generation
from shm_store.pace import Pace
from shm_store.report import (
    FillReport,
    GenerationReport,
    LeaseReport,
    ModelReport,
    PoolReport,
    SessionReport,
    StatusReport,
    size_text,
)

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from rich.table import Table
    from rich.text import Text

    from coordinator.audit import AuditReport, Finding
    from coordinator.doctor import Diagnosis

LINE_PAUSE_S = 5.0
"""How often a long load says how far it is where there is no terminal to draw a bar on."""

BAR_COLUMNS = 24

PIPE_COLUMNS = 4096
"""How wide a table may be where no terminal says: there, nothing is cut."""

NAMES_SHOWN = 3

POOL_KINDS = ("leased", "retained", "filling", "retired", "private", "freeing")
RUNNING_STATES = ("open", "reserved", "filling")

DEVICE_POOL = "vram:"
"""What the names of devices' pools begin with; in them everything is one process's own."""


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
            _draw(generations_table(holders), sys.stderr)
        except OSError:
            pass  # as in `say`


def show_status(report: StatusReport, socket: str) -> None:
    """Print the whole ledger as tables."""
    state = "draining, takes no new work" if report.draining else "serving"
    print(f"coordinator on {plain(socket)}: {state}", flush=True)
    _draw(pools_table(report.pools), sys.stdout)
    shared = [one for one in report.generations if not one.pool.startswith(DEVICE_POOL)]
    if shared:
        print()
        _draw(generations_table(shared), sys.stdout)
        for line in small_pages_lines(shared):
            print(line)
    else:
        print("no weights are held")
    for pool in report.pools:
        there = [one for one in report.generations if one.pool == pool.name]
        if there and pool.name.startswith(DEVICE_POOL):
            print(f"\non {plain(pool.name)}:", flush=True)
            _draw(generations_table(there), sys.stdout)
    loaded = {generation.key for generation in report.generations if generation.pinned}
    if early := [plain(key) for key in report.pins if key not in loaded]:
        print(f"pinned, and not loaded: {listed(early)}")
    if report.sessions:
        print()
        _draw(sessions_table(report), sys.stdout)
    else:
        print("no worker is attached")
    if any(session.models for session in report.sessions):
        print()
        _draw(models_table(report.sessions), sys.stdout)


def show_audit(report: AuditReport) -> None:
    """Print whether books and kernel agree, and in a table everything that was found."""
    figures = (
        f"{_counted(report.generations, 'generation')}, {size_text(report.in_use_bytes)}, "
        f"{_counted(report.leases, 'lease')}"
    )
    verdict = "agree" if report.agree else "differ"
    print(f"books and kernel {verdict}: {figures}", flush=True)
    found = (*report.differences, *report.windows, *report.copied)
    if found:
        print()
        _draw(findings_table(found), sys.stdout)
    if report.copied:
        print("copied pages are charged from now on, to the process that has written to them")
    if report.digested is not None:
        print(f"the bytes of {_counted(report.digested, 'generation')} with digests were looked at")
    if report.unread:
        unread = [f"pid {finding.pid} ({plain(finding.process)})" for finding in report.unread]
        names = listed(unread, NAMES_SHOWN)
        print(f"not looked into for lack of permission, and not part of the verdict: {names}")


def show_diagnosis(diagnosis: Diagnosis) -> None:
    """Print what the probes found: a table, with the remedy below each finding that has one."""
    table = _table("verdict", "probe", "found", folded=("found",))
    for finding in diagnosis.findings:
        lines = [plain(finding.found)]
        if finding.remedy:
            lines.append(f"-> {plain(finding.remedy)}")
        table.add_row(finding.verdict, finding.name, "\n".join(lines))
    _draw(table, sys.stdout)
    said = [finding.verdict for finding in diagnosis.findings]
    print(", ".join(f"{said.count(verdict)} {verdict}" for verdict in ("fail", "warn", "ok")))


def findings_table(findings: Sequence[Finding]) -> Table:
    """Return a table of what an audit found, in the order given."""
    table = _table(
        "found",
        "key",
        "generation",
        "process",
        "books",
        "kernel",
        folded=("key",),
        cut=("process",),
    )
    for finding in findings:
        sizes = (finding.books_bytes, finding.kernel_bytes)
        process = "-" if finding.pid is None else f"pid {finding.pid} ({plain(finding.process)})"
        table.add_row(
            finding.kind.replace("_", " "),
            plain(": ".join(filter(None, (finding.key, finding.tensor)))) or "-",
            plain(short_generation(finding.generation)) if finding.generation else "-",
            _cut(process),
            *("-" if size is None else _short_size(size) for size in sizes),
        )
    return table


def pools_table(pools: Sequence[PoolReport]) -> Table:
    """Return a table of budgets, and of what fills them: the kinds of which there is something."""
    kinds = [kind for kind in POOL_KINDS if any(getattr(pool, f"{kind}_bytes") for pool in pools)]
    table = _table("pool", "limit", "charged", *kinds, folded=("pool",))
    for pool in pools:
        figures = [getattr(pool, f"{kind}_bytes") for kind in kinds]
        sizes = [pool.limit_bytes, pool.in_use_bytes, *figures]
        table.add_row(plain(pool.name), *(_short_size(size) for size in sizes))
    return table


def generations_table(generations: Sequence[GenerationReport]) -> Table:
    """Return a table of generations and who holds them: pids, whose names `sessions_table` has."""
    waited_for = any(generation.waiting for generation in generations)
    columns = ["key", "generation", "state", "size", "held by"]
    # "filling ..." is long, and may go over lines.
    filling = ["state"] if any(generation.fill for generation in generations) else []
    table = _table(*columns, *(["waiting"] if waited_for else []), folded=("key", *filling))
    for generation in generations:
        holders = [_lease_text(lease) for lease in generation.leases]
        if generation.filled_by is not None:
            holders.append(f"pid {generation.filled_by} builds it")
        table.add_row(
            plain(generation.key),
            plain(short_generation(generation.generation)),
            _state_text(generation),
            _short_size(generation.size_bytes),
            "\n".join(holders) or "-",
            *([str(generation.waiting)] if waited_for else []),
        )
    return table


def small_pages_lines(generations: Sequence[GenerationReport]) -> list[str]:
    """Say of which weights not all is in huge pages, by the reason."""
    keys: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    for generation in generations:
        if why := generation.not_huge:
            keys.setdefault(why, []).append(plain(generation.key))
            sizes[why] = sizes.get(why, 0) + generation.size_bytes - generation.huge_bytes
    return [
        f"{_short_size(sizes[why])} of {listed(names, NAMES_SHOWN)} in pages of 4 KiB: {plain(why)}"
        for why, names in keys.items()
    ]


def _lease_text(lease: LeaseReport) -> str:
    copied = f", {_short_size(lease.copied_bytes)} copied" if lease.copied_bytes else ""
    return f"pid {lease.pid} ({_age_text(lease.age_s)}{copied})"


def _state_text(generation: GenerationReport) -> str:
    if generation.pool.startswith(DEVICE_POOL):
        there = "reserved" if generation.fixed else "there" if generation.private else "shared"
        words = {"open": "waits for room", "ready": there}
        return words.get(generation.state, plain(generation.state))
    marks = ["private"] if generation.private else []
    marks += ["pinned"] if generation.pinned else []
    if not generation.fill and 0 < generation.size_bytes == generation.huge_bytes:
        marks += ["huge pages"]
    state = fill_text(generation.fill) if generation.fill else plain(generation.state)
    return ", ".join([state, *marks])


def fill_text(fill: FillReport) -> str:
    """Say how far a fill is: "filling 1.2 of 4.0 GiB, 850 MiB/s, 3 s left"."""
    if not fill.total_bytes:
        return f"filling for {_age_text(fill.elapsed_s)}"
    share = _share_text(fill.done_bytes, fill.total_bytes)
    return f"filling {share}{_pace_text(fill.bytes_per_s, fill.left_s)}"


def _share_text(done_bytes: int, total_bytes: int) -> str:
    """Return a part and the whole, the unit once if it is the same: "1.2 of 4.0 GiB"."""
    done, total = size_text(done_bytes), size_text(total_bytes)
    number, unit = done.split()
    return f"{number if total.split()[1] == unit else done} of {total}"


def _pace_text(bytes_per_s: float, left_s: float | None) -> str:
    """Return what follows a share: how fast it goes, and how long it takes, as far as is known."""
    if bytes_per_s < 1:
        return ""
    left = "" if not left_s else f", {_age_text(max(1.0, left_s))} left"
    return f", {_short_size(round(bytes_per_s))}/s{left}"


def sessions_table(report: StatusReport) -> Table:
    """Return a table of attached processes."""
    table = _table(
        "session",
        "pid",
        "name",
        "device",
        "waiting for",
        folded=("waiting for",),
        cut=("name", "device"),
    )
    for session in report.sessions:
        table.add_row(
            str(session.session),
            str(session.pid) + ("" if session.connected else " (not connected)"),
            _cut(plain(session.name)),
            _cut(plain(session.device)),
            "\n".join(plain(key) for key in session.waiting_for) or "-",
        )
    return table


def models_table(sessions: Sequence[SessionReport]) -> Table:
    """Return a table of what the attached processes together have done with each model."""
    table = _table(
        *("model", "device", "processes", "hits", "misses", "moved", "waited", "moving"),
        folded=("model",),
        cut=("device",),
    )
    said: dict[tuple[str, str], list[ModelReport]] = {}
    for session in sessions:
        for model in session.models:
            said.setdefault((model.key, model.device), []).append(model)
    for (key, device), models in sorted(said.items()):
        table.add_row(
            plain(key),
            _cut(plain(device)),
            str(len(models)),
            str(sum(model.hits for model in models)),
            str(sum(model.misses for model in models)),
            _short_size(sum(model.moved_bytes for model in models)),
            _taken_text(sum(model.waited_s for model in models)),
            _taken_text(sum(model.moved_s for model in models)),
        )
    return table


def waiting_text(report: StatusReport, key: str, size_bytes: int) -> str | None:
    """Say what a load of `size_bytes` under `key` waits for; None while that cannot be told.

    The report has no queue: where the room is not enough, the load waits for room. Where it is,
    either another process has the ticket, or others are before it in the queue. What can be evicted
    counts as room, for it goes as soon as a load lacks it.
    """
    running = [g for g in report.generations if g.key == key and g.state in RUNNING_STATES]
    if not running:
        return None
    state, pool_name = running[-1].state, running[-1].pool
    if state == "reserved":
        return "waiting for the kernel to provide its memory"
    pool = next((pool for pool in report.pools if pool.name == pool_name), None)
    fill = running[-1].fill
    if fill is not None and fill.total_bytes:
        return f"waiting for another process to fill it: {fill_text(fill)}"
    if state == "filling" or pool is None:
        return "waiting for another process to fill it"
    free_bytes = max(0, pool.limit_bytes - pool.in_use_bytes)
    idle_bytes = sum(
        generation.size_bytes
        for generation in report.generations
        if generation.pool == pool.name
        and generation.state == "ready"
        and not (generation.leases or generation.pinned)
    )
    if size_bytes <= free_bytes + idle_bytes:
        if any(key in session.waiting_for for session in report.sessions):
            return "waiting for another process to fill it"
        if not any(g.state == "open" and g.key != key for g in report.generations):
            return None  # its loader is about to start
    charged = [g for g in report.generations if g.pool == pool.name and g.size_bytes > 0]
    return (
        f"waiting for room: pool {pool.name} has {size_text(free_bytes)} free of "
        f"{size_text(pool.limit_bytes)}; held by {holders_text(charged) or 'nobody'}"
    )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _short_size(size_bytes: int) -> str:
    """Return a size of at most 8 columns."""
    text = size_text(size_bytes)
    number, unit = text.split()
    return text if len(number) < 5 else f"{float(number):.0f} {unit}"


def _age_text(age_s: float) -> str:
    if age_s < 120:
        return f"{age_s:.0f} s"
    return f"{age_s / 60:.0f} min" if age_s < 7200 else f"{age_s / 3600:.0f} h"


def _taken_text(taken_s: float) -> str:
    return f"{taken_s:.1f} s" if taken_s < 100 else _age_text(taken_s)


def _cut(text: str) -> Text:
    """Return a cell that is cut where it has no room."""
    from rich.text import Text

    return Text(text, no_wrap=True, overflow="ellipsis")


def _table(*columns: str, folded: Sequence[str] = (), cut: Sequence[str] = ()) -> Table:
    """Return an empty table.

    Args:
        folded: columns that go over lines where the terminal is too narrow: keys, never cut.
        cut: columns of `_cut` cells. Every other one keeps its width.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column not in (*folded, *cut), overflow="fold")
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
        self._pace: Pace | None = None
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
        now_s = self._clock()
        if self._pace is None or done_bytes < self._pace.seen_bytes:
            self._pace = Pace(now_s, done_bytes)  # the first word, or of a fill that is begun anew
        else:
            self._pace.came_to(done_bytes, now_s)
        speed = self._pace.bytes_per_s(now_s)
        pace = _pace_text(speed, self._pace.left_s(total_bytes, now_s))
        if self._stream.isatty():
            self._draw_bar(done_bytes, total_bytes, pace)
            return
        if now_s - self._said_s >= LINE_PAUSE_S:
            self._said_s = now_s
            share = done_bytes * 100 // max(total_bytes, 1)
            done, total = size_text(done_bytes), size_text(total_bytes)
            say(f"loading {self._key}: {done} of {total} ({share} %){pace}")

    def _draw_bar(self, done_bytes: int, total_bytes: int, pace: str) -> None:
        if self._bar is None or self._task is None:
            from rich import progress
            from rich.console import Console
            from rich.text import Text

            label = progress.RenderableColumn(Text(self._key))
            # No thread of its own: it is drawn when something has changed.
            self._bar = progress.Progress(
                label,
                progress.BarColumn(bar_width=BAR_COLUMNS),
                progress.DownloadColumn(binary_units=True),
                progress.TextColumn("{task.fields[pace]}", markup=False),
                console=Console(file=self._stream),
                auto_refresh=False,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=total_bytes, pace="")
        pace = pace.removeprefix(", ")
        self._bar.update(
            self._task, completed=done_bytes, total=total_bytes, pace=pace, refresh=True
        )
