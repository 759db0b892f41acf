"""What commands show: sizes, tables that other processes cannot steer, and progress."""

from __future__ import annotations

import io

import pytest

from coordinator import display
from coordinator.display import LoadProgress, plain, show_error, show_status, size_text
from shm_store.errors import BudgetExceeded, SourceNotOpened
from shm_store.report import (
    GenerationReport,
    LeaseReport,
    PoolReport,
    SessionReport,
    StatusReport,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2, "1.0 MiB"),
        (20 * 1024**3, "20.0 GiB"),
        (1 << 50, "1.0 PiB"),
    ],
)
def test_sizes_are_binary_and_say_so(size, text):
    assert size_text(size) == text


def test_text_from_elsewhere_stays_on_its_line():
    assert plain("naïve/模型:bf16") == "naïve/模型:bf16"
    assert plain("a\nb\x1b[31mc\udcff") == "a\\nb\\x1b[31mc\\udcff"


def full_report() -> StatusReport:
    gib = 1024**3
    return StatusReport(
        draining=True,
        pools=(PoolReport("ram", 8 * gib, 6 * gib, 3 * gib, 2 * gib, gib, 0, 0, 0),),
        generations=(
            GenerationReport(
                "sdxl/[bold]unet:eyes:",
                "00ff-00000001",
                "ready",
                3 * gib,
                "ram",
                True,
                (LeaseReport(1, 4321, 7.4), LeaseReport(9, 77, 60.0)),
                waiting=2,
            ),
        ),
        sessions=(
            SessionReport(1, 4321, "web\x1b]0;owned\x07", "cuda:0", ("x", "y"), True),
            SessionReport(2, 5432, "", "cpu", (), False),
        ),
    )


def test_status_names_every_figure_holder_and_waiter(capsys):
    show_status(full_report(), "/run/c.sock")
    shown = capsys.readouterr().out
    for text in (
        "coordinator on /run/c.sock: draining",
        "8.0 GiB   6.0 GiB",
        "sdxl/[bold]unet:eyes:",
        "ready, pinned",
        "pid 4321 (7 s), pid 77 (60 s)",
        "5432 (not connected)",
        "x, y",
        "web\\x1b]0;owned\\x07",
    ):
        assert text in shown, text
    assert "\x1b" not in shown and "\x07" not in shown


def test_an_empty_ledger_is_said_in_words(capsys):
    show_status(StatusReport(False, (), (), ()), "s")
    shown = capsys.readouterr().out
    assert "serving" in shown
    assert "no weights are held" in shown and "no worker is attached" in shown


def test_an_error_is_one_line_and_its_holders_a_table(capsys):
    show_error(SourceNotOpened("a\nb: No such file", source="a\nb"))
    assert capsys.readouterr().err.splitlines() == [
        "weight-cache: a\\nb: No such file (check the path and its permissions in the process "
        "that asks)"
    ]
    show_error(BudgetExceeded("full", remedy="wait", holders=full_report().generations))
    first, *table = capsys.readouterr().err.splitlines()
    assert first == "weight-cache: full (wait)"
    assert "sdxl/[bold]unet:eyes:" in table[2] and "pid 4321" in table[2]


def test_a_reader_that_went_away_stops_nothing(monkeypatch):
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stderr", Gone())
    show_error(BudgetExceeded("full", holders=full_report().generations))


def test_a_terminal_that_cannot_draw_lines_gets_letters():
    class Latin(io.StringIO):
        encoding = "latin-1"

    stream = Latin()
    display._draw(display.pools_table(full_report().pools), stream)
    assert "8.0 GiB" in stream.getvalue()
    stream.getvalue().encode("latin-1")


def test_a_long_load_says_a_line_now_and_then_where_there_is_no_terminal(capsys):
    times = iter([0.0, 1.0, 5.5, 6.0, 11.0])
    with LoadProgress("k", io.StringIO(), lambda: next(times)) as progress:
        for done in (1, 2, 3, 4):
            progress.update(done * 1024, 4096)
    assert capsys.readouterr().err.splitlines() == [
        "weight-cache: loading k: 2.0 KiB of 4.0 KiB (50 %)",
        "weight-cache: loading k: 4.0 KiB of 4.0 KiB (100 %)",
    ]


def test_a_terminal_gets_a_bar_without_a_thread(monkeypatch):
    import threading

    terminal = Terminal()
    threads = threading.active_count()
    monkeypatch.setenv("TERM", "xterm")
    with LoadProgress("[red]k", terminal) as progress:
        progress.update(1024, 4096)
        progress.update(4096, 4096)
        assert threading.active_count() == threads
    assert "[red]k" in terminal.getvalue()
    assert "4.0/4.0 KiB" in terminal.getvalue() or "4.1/4.1 kB" in terminal.getvalue()


def test_a_load_that_is_ready_at_once_draws_nothing():
    terminal = Terminal()
    with LoadProgress("k", terminal):
        pass
    assert terminal.getvalue() == ""
