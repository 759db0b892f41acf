"""How the demo is told: as text while it happens, or in silence, for `--json`."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gpu_worker.demo.claims import Claim
from gpu_worker.demo.figures import Outcome, Row

PIPE_COLUMNS = 100
"""How wide the text is where no terminal says."""

INDENT = 3

WAYS = {"shared": "weight-cache", "plain": "plain"}
"""What the table calls the two ways."""


class Unheard(Exception):
    """Standard output takes no more."""


def write(text: str) -> None:
    """Write `text` on standard output, at once.

    Raises:
        Unheard: it cannot be written.
    """
    if sys.stdout is None:
        raise Unheard("standard output is closed")
    try:
        print(text, flush=True)
    except OSError as error:
        # What is left in the buffer would be tried, and complained of, once more at exit.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise Unheard(f"standard output cannot be written: {error.strerror}") from error


class Silence:
    """Tells nothing."""

    def title(self, text: str) -> None:
        """Nothing."""

    def act(self, title: str) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def claim(self, claim: Claim) -> None:
        """Nothing."""

    def table(self, rows: Sequence[Row], notes: Sequence[str]) -> None:
        """Nothing."""

    def end(self, outcome: Outcome) -> None:
        """Nothing."""


class Narrator:
    """Tells the story on standard output, for people."""

    def __init__(self) -> None:
        terminal = sys.stdout is not None and sys.stdout.isatty()
        self._drawn = io.StringIO()
        self._console = Console(
            file=self._drawn,
            width=shutil.get_terminal_size().columns if terminal else PIPE_COLUMNS,
            force_terminal=terminal,
            highlight=False,
            markup=False,
            emoji=False,
        )
        self._act = 0

    def title(self, text: str) -> None:
        self._print(Text(text))

    def act(self, title: str) -> None:
        self._act += 1
        self._print(Text(f"\n{self._act}. {title}", style="bold"))

    def say(self, text: str) -> None:
        self._print(Text(text), INDENT)

    def claim(self, claim: Claim) -> None:
        mark = Text("PASS", style="green") if claim.held else Text("FAIL", style="bold red")
        line = Text.assemble(mark, "  ", claim.claim)
        if not claim.held:
            line.append(f": {claim.seen}")
        self._print(line, INDENT)

    def table(self, rows: Sequence[Row], notes: Sequence[str]) -> None:
        self._print(table(rows))
        for note in notes:
            self._print(Text(note, style="dim"), INDENT)

    def end(self, outcome: Outcome) -> None:
        if outcome.error is not None:
            self._print(Text(f"\nThe demo could not go on: {outcome.error}", style="red"))
        held = sum(claim.held for claim in outcome.claims)
        self._print(
            Text(f"\n{held} of {len(outcome.claims)} claims held, {outcome.duration_s:.1f} s.")
        )

    def _print(self, what: Text | Table, indent: int = 0) -> None:
        self._drawn.seek(0)
        self._drawn.truncate()
        self._console.print(Padding(what, (0, 0, 0, indent), expand=False))
        write("\n".join(line.rstrip() for line in self._drawn.getvalue().splitlines()))


def table(rows: Sequence[Row]) -> Table:
    """Return the figures of both ways, two lines to each kind of weights."""
    # Two spaces between columns and no more, so that it fits a terminal of 80.
    drawn = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    drawn.add_column("weights", no_wrap=True)
    drawn.add_column("loaded by", no_wrap=True)
    for title in (
        "model ready\ns 1st/2nd",
        "first answer\ns 1st/2nd",
        "private\nMiB each",
        "shared\nMiB each",
        "both\nMiB",
    ):
        drawn.add_column(title, justify="right", no_wrap=True)
    for number, row in enumerate(rows):
        second = number % 2
        drawn.add_row(
            row.weights.split(", ")[second],
            WAYS[row.way],
            "/".join(_seconds(ready_s) for ready_s in row.ready_s),
            "/".join(_seconds(answer_s) for answer_s in row.first_answer_s),
            "/".join(_mib(size_bytes) for size_bytes in row.private_bytes),
            "/".join(_mib(size_bytes) for size_bytes in row.shared_bytes),
            _mib(row.total_bytes),
            end_section=second == 1,
        )
    return drawn


def _seconds(time_s: float) -> str:
    return f"{time_s:.3f}" if time_s < 1 else f"{time_s:.2f}"


def _mib(size_bytes: int) -> str:
    return str(round(size_bytes / 2**20))
