"""What commands show: sizes, tables that other processes cannot steer, and progress."""

from __future__ import annotations

import io

import pytest

from coordinator import display
from coordinator.audit import AuditReport, Finding
from coordinator.display import (
    LoadProgress,
    fill_text,
    plain,
    show_audit,
    show_error,
    show_status,
    waiting_text,
)
from shm_store.errors import BudgetExceeded, SourceNotOpened
from shm_store.report import (
    FillReport,
    GenerationReport,
    LeaseReport,
    ModelReport,
    PoolReport,
    SessionReport,
    StatusReport,
)

SHOWN = "filling 1.2 of 4.0 GiB, 850 MiB/s, 3 s left"
FAR = "filling 1.0 MiB of 1.0 GiB, 1.0 MiB/s, 2 h left"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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
        "pool  limit    charged  leased   retained  filling\n",
        "ram   8.0 GiB  6.0 GiB  3.0 GiB  2.0 GiB   1.0 GiB\n",
        "sdxl/[bold]unet:eyes:",
        "ready, pinned",
        "pid 4321 (7 s)",
        "pid 77 (60 s)",
        "5432 (not connected)",
        "web\\x1b]0;owned\\x07",
    ):
        assert text in shown, text
    assert "\x1b" not in shown and "\x07" not in shown
    first, second = (line for line in shown.splitlines() if line.endswith(("  x", "  y")))
    assert "4321" in first and second.strip() == "y"


GIB = 1 << 30
LONG_KEY = "black-forest-labs/FLUX.1-dev/transformer:bf16"


def crowded_report() -> StatusReport:
    """Every column there is, as wide as it gets."""
    leases = (LeaseReport(1, 4194303, 7100.0), LeaseReport(2, 4194302, 1e6))
    sizes = [int(share * GIB) for share in (999.9, 800.5, 123.4, 200.1, 100.6, 160.2, 0, 216.2)]
    return StatusReport(
        draining=False,
        pools=(PoolReport("ram", *sizes),),
        generations=(
            GenerationReport(
                LONG_KEY, "00ff-0000001a", "ready", sizes[2], "ram", True, leases, waiting=12
            ),
            GenerationReport("k", "00ff-00000100", "retired", GIB, "ram", False, leases[:1]),
        ),
        sessions=(SessionReport(1, 4194303, "a name " * 9, "cuda:0", (LONG_KEY,), False),),
    )


def on_80_columns(monkeypatch, stream: str) -> Terminal:
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(f"sys.{stream}", terminal)
    return terminal


def test_on_80_columns_nothing_is_broken_but_a_key_that_is_too_long(monkeypatch):
    terminal = on_80_columns(monkeypatch, "stdout")
    show_status(crowded_report(), "s")
    lines = terminal.getvalue().splitlines()
    assert max(len(line) for line in lines) <= 80
    assert lines[1] == "pool  limit     charged  leased   retained  filling  retired  freeing"
    assert lines[3] == "ram   1000 GiB  800 GiB  123 GiB  200 GiB   101 GiB  160 GiB  216 GiB"
    heads = [line for line in lines if line.startswith(("key ", "session "))]
    words = ["key", "generation", "state", "size", "held", "by", "waiting"]
    assert heads[0].split() == words
    assert heads[1].split() == ["session", "pid", "name", "device", "waiting", "for"]
    first = lines.index(heads[0]) + 2
    rows = [" ".join(line.split()) for line in lines[first:]]
    assert rows[0].endswith(" #1a ready, pinned 123 GiB pid 4194303 (118 min) 12")
    assert rows[1].endswith(" pid 4194302 (278 h)")
    folded = [row.split()[0] for row in rows[: rows.index("")]]
    assert "".join(folded) == LONG_KEY + "k"
    assert "4194303 (not connected)" in terminal.getvalue() and "…" in terminal.getvalue()


def test_a_refusals_table_fits_in_80_columns_too(monkeypatch):
    terminal = on_80_columns(monkeypatch, "stderr")
    show_error(BudgetExceeded("full", remedy="wait", holders=crowded_report().generations))
    _, head, *rows = terminal.getvalue().splitlines()
    assert head.split() == ["key", "generation", "state", "size", "held", "by", "waiting"]
    assert max(len(line) for line in rows) <= 80
    assert " ".join(rows[-1].split()) == "k #100 retired 1.0 GiB pid 4194303 (118 min) 0"


def test_an_audit_fits_in_80_columns_and_no_process_steers_it(monkeypatch):
    gen, evil = "00ff-0000001a", "x\x1b]0;owned\x07"
    report = AuditReport(
        False,
        1,
        2,
        5 * GIB,
        (Finding("unleased_mapping", gen, LONG_KEY, 4194303, evil),),
        (Finding("freeing", gen, "k"),),
        (Finding("copied_pages", gen, "k", 77, "python", 3, 0, 3 * 4096),),
        tuple(Finding("unread", pid=pid, process=evil) for pid in range(1, 6)),
    )
    terminal = on_80_columns(monkeypatch, "stdout")
    show_audit(report)
    lines = terminal.getvalue().splitlines()
    assert lines[0] == "books and kernel differ: 1 generation, 5.0 GiB, 2 leases"
    assert max(len(line) for line in lines[:-1]) <= 80
    rows = [" ".join(line.split()) for line in lines]
    assert "found key generation process books kernel" in rows
    assert "freeing k #1a - - -" in rows
    assert "copied pages k #1a pid 77 (python) 0 B 12.0 KiB" in rows
    assert lines[-1].endswith("pid 3 (x\\x1b]0;owned\\x07), and 2 more")
    assert "\x1b" not in terminal.getvalue()


def test_what_is_no_terminal_gets_whole_lines(capsys):
    show_status(crowded_report(), "s")
    shown = capsys.readouterr().out
    assert f"\n{LONG_KEY}  #1a " in shown and f"  {LONG_KEY}\n" in shown
    assert ("a name " * 9).strip() in shown


def test_a_column_that_would_say_nothing_is_left_out(capsys):
    pools = (PoolReport("ram", GIB, 0, 0, 0, 0, 0, 0, 0),)
    generation = GenerationReport("k", "1-1", "ready", 1, "ram", False, ())
    show_status(StatusReport(False, pools, (generation,), ()), "s")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "pool  limit    charged"
    assert "key  generation  state  size  held by" in lines


GPU = "vram:5f3c0b7a-9c1d-4e7e-8a55-0d7a3a1b9c11"


def device_report() -> StatusReport:
    lease = (LeaseReport(1, 4194303, 7.0),)

    def there(number: int, key: str, state: str, size_bytes: int, **facts) -> GenerationReport:
        leases = () if state == "freeing" else lease
        gen = f"00ff-0000000{number}"
        return GenerationReport(
            key, gen, state, size_bytes, GPU, False, leases, **({"private": True} | facts)
        )

    moved = ModelReport(LONG_KEY, "cuda:0", 40, 2, 5 * GIB, 0.84, 0.26)
    return StatusReport(
        False,
        (
            PoolReport("ram", 8 * GIB, GIB, GIB, 0, 0, 0, 0, 0),
            PoolReport(GPU, 20 * GIB, 10 * GIB, 0, 0, 0, 0, 9 * GIB, GIB),
            PoolReport("vram:idle", 20 * GIB, 0, 0, 0, 0, 0, 0, 0),
        ),
        (
            GenerationReport(LONG_KEY, "00ff-00000001", "ready", GIB, "ram", False, lease),
            there(2, LONG_KEY, "ready", 5 * GIB),
            there(3, "working memory", "ready", 4 * GIB, fixed=True),
            there(4, "k", "open", 30 * GIB, waiting=1),
            there(5, "dead", "freeing", GIB),
            there(6, "all", "ready", GIB, private=False),
            there(7, "all", "retired", GIB, private=False),
        ),
        (
            SessionReport(1, 4194303, "web", "cuda:0", (), True, (moved,)),
            SessionReport(
                2,
                77,
                "web",
                "cuda:0",
                (),
                True,
                (moved, ModelReport("k\x1b", "cpu", 0, 1, 0, 4000.0, 0.0)),
            ),
        ),
    )


def test_what_is_on_a_device_is_shown_by_itself(capsys):
    """Not among the host's; what all processes share there is called so."""
    show_status(device_report(), "s")
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"{GPU} 20.0 GiB 10.0 GiB 0 B 9.0 GiB 1.0 GiB" in lines
    begin = lines.index(f"on {GPU}:")
    assert lines[begin - 2 : begin] == [f"{LONG_KEY} #1 ready 1.0 GiB pid 4194303 (7 s)", ""]
    assert lines[begin + 3 : begin + 9] == [
        f"{LONG_KEY} #2 there 5.0 GiB pid 4194303 (7 s) 0",
        "working memory #3 reserved 4.0 GiB pid 4194303 (7 s) 0",
        "k #4 waits for room 30.0 GiB pid 4194303 (7 s) 1",
        "dead #5 freeing 1.0 GiB - 0",
        "all #6 shared 1.0 GiB pid 4194303 (7 s) 0",
        "all #7 retired 1.0 GiB pid 4194303 (7 s) 0",
    ]
    assert "on vram:idle:" not in lines


def test_what_processes_have_done_with_a_model_is_added_up(capsys):
    show_status(device_report(), "s")
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    begin = lines.index("model device processes hits misses moved waited moving")
    assert lines[begin + 2 :] == [
        f"{LONG_KEY} cuda:0 2 80 4 10.0 GiB 1.7 s 0.5 s",
        "k\\x1b cpu 1 0 1 0 B 67 min 0.0 s",
    ]


def test_devices_fit_in_80_columns_with_their_figures(monkeypatch):
    """It is the name of a pool that goes over lines; above what is on it, it is whole."""
    terminal = on_80_columns(monkeypatch, "stdout")
    show_status(device_report(), "s")
    lines = terminal.getvalue().splitlines()
    assert max(len(line) for line in lines) <= 80 and f"on {GPU}:" in lines
    (figures,) = (line.split()[1:] for line in lines if line.startswith(GPU[:20]))
    assert " ".join(figures) == "20.0 GiB 10.0 GiB 0 B 9.0 GiB 1.0 GiB"


def waiting_report(*generations: GenerationReport, waits: tuple[str, ...] = ()) -> StatusReport:
    in_use = sum(generation.size_bytes for generation in generations)
    pool = PoolReport("ram", 8 * GIB, in_use, 0, 0, 0, 0, 0, 0)
    session = SessionReport(1, 4321, "web", "cpu", waits, True)
    return StatusReport(False, (pool,), generations, (session,))


LEASED = GenerationReport("a", "1-1", "ready", 6 * GIB, "ram", False, (LeaseReport(1, 4321, 1.0),))
PINNED = GenerationReport("b", "1-2", "ready", GIB, "ram", True, ())
IDLE = GenerationReport("c", "1-3", "ready", GIB, "ram", False, ())
OPEN = GenerationReport("k", "1-4", "open", 0, "ram", False, (), waiting=1)
FULL = (
    "waiting for room: pool ram has 1.0 GiB free of 8.0 GiB; "
    "held by 'a' (6.0 GiB, pid 4321), 'b' (1.0 GiB, pinned)"
)
OTHER = "waiting for another process to fill it"


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (waiting_report(LEASED, PINNED, OPEN), FULL),
        (waiting_report(LEASED, PINNED, OPEN, waits=("k",)), FULL),
        # Idle weights go as soon as a load lacks their room: so it is not room that it waits for.
        (waiting_report(LEASED, IDLE, OPEN, waits=("k",)), OTHER),
        (waiting_report(OPEN, waits=("k",)), OTHER),
        (waiting_report(OPEN, waits=("x",)), None),
        (waiting_report(), None),
        (waiting_report(IDLE), None),
        (
            waiting_report(OPEN, GenerationReport("first", "1-5", "open", 0, "ram", False, ())),
            "waiting for room: pool ram has 8.0 GiB free of 8.0 GiB; held by nobody",
        ),
        (waiting_report(GenerationReport("k", "1-4", "filling", GIB, "ram", False, ())), OTHER),
        (
            waiting_report(GenerationReport("k", "1-4", "reserved", GIB, "ram", False, ())),
            "waiting for the kernel to provide its memory",
        ),
    ],
)
def test_a_load_that_stands_still_is_explained_from_the_ledger(report, text):
    assert waiting_text(report, "k", 2 * GIB) == text


def test_only_the_largest_of_those_who_fill_a_pool_are_named():
    many = [
        GenerationReport(f"w{n}", f"1-{n}", "ready", n * GIB // 2, "ram", True, ())
        for n in range(1, 6)
    ]
    text = waiting_text(waiting_report(*many, OPEN), "k", 2 * GIB)
    assert text is not None
    held_by = "held by 'w5' (2.5 GiB, pinned), 'w4' (2.0 GiB, pinned), 'w3' (1.5 GiB, pinned)"
    assert text.endswith(f"{held_by}, and 2 more")


def test_a_pin_without_weights_is_shown_below_them(capsys):
    """Nothing else tells of a misspelt key that it protects nothing."""
    show_status(StatusReport(False, (), (PINNED, IDLE), (), pins=("b", "c", "d\ne")), "s")
    assert "\npinned, and not loaded: c, d\\ne\n" in capsys.readouterr().out
    show_status(StatusReport(False, (), (PINNED,), (), pins=("b",)), "s")
    assert "not loaded" not in capsys.readouterr().out


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
    """Neither the line nor the table is missed by anyone."""
    refused = []

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            refused.append(text)
            raise BrokenPipeError

    monkeypatch.setattr("sys.stderr", Gone())
    show_error(BudgetExceeded("full", holders=full_report().generations))
    assert "full" in refused[0] and "sdxl/" in "".join(refused[1:])


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
        "weight-cache: loading k: 2.0 KiB of 4.0 KiB (50 %), 228 B/s, 9 s left",
        "weight-cache: loading k: 4.0 KiB of 4.0 KiB (100 %), 299 B/s",
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


def test_the_bar_says_how_fast_it_is_and_what_is_left(monkeypatch):
    """From the second word on: of the first nobody knows how long it took."""
    monkeypatch.setenv("TERM", "xterm")
    terminal, times = Terminal(), iter([0.0, 1.0, 2.0])
    with LoadProgress("k", terminal, lambda: next(times)) as progress:
        progress.update(10 * 1024, 40 * 1024)
        assert "/s" not in terminal.getvalue()
        progress.update(20 * 1024, 40 * 1024)
    assert "10.0 KiB/s, 2 s left" in terminal.getvalue()


def test_the_pace_of_a_fill_that_is_begun_anew_is_its_own(capsys):
    """Its loader died: what the first had filled is no loss of speed."""
    times = iter([0.0, 1.0, 2.0, 6.0, 11.0])
    with LoadProgress("k", io.StringIO(), lambda: next(times)) as progress:
        for done_bytes in (1024, 2048, 512, 1024):
            progress.update(done_bytes, 4096)
    assert capsys.readouterr().err.splitlines() == [
        "weight-cache: loading k: 512 B of 4.0 KiB (12 %)",
        "weight-cache: loading k: 1.0 KiB of 4.0 KiB (25 %), 102 B/s, 30 s left",
    ]


@pytest.mark.parametrize(
    ("fill", "text"),
    [
        (FillReport(0, 0, 0.2), "filling for 0 s"),
        (FillReport(0, 0, 40.0), "filling for 40 s"),
        (FillReport(0, 4096, 0.5), "filling 0 B of 4.0 KiB"),
        (FillReport(1_288_490_189, 4 << 30, 1.4, 891_289_600, 3.4), SHOWN),
        (FillReport(1 << 20, 1 << 30, 1.0, 1 << 20, 7200.0), FAR),
        (FillReport(1023, 1024, 1.0, 1023, 0.001), "filling 1023 B of 1.0 KiB, 1023 B/s, 1 s left"),
        (FillReport(4096, 4096, 2.0, 2048, 0.0), "filling 4.0 of 4.0 KiB, 2.0 KiB/s"),
    ],
)
def test_a_fill_says_how_far_it_is_as_far_as_is_known(fill, text):
    assert fill_text(fill) == text


def filling_report() -> StatusReport:
    fill = FillReport(1_288_490_189, 4 << 30, 1.4, 891_289_600, 3.4)
    pool = PoolReport("ram", 8 << 30, 4 << 30, 0, 0, 4 << 30, 0, 0, 0)
    here = GenerationReport("sdxl", "00ff-00000001", "filling", 4 << 30, "ram", True, (), fill=fill)
    return StatusReport(False, (pool,), (here,), ())


def test_status_shows_how_far_a_fill_is(capsys):
    show_status(filling_report(), "/run/s")
    assert f"#1          {SHOWN}, pinned" in capsys.readouterr().out


def test_what_a_load_waits_for_says_how_far_that_is():
    said = waiting_text(filling_report(), "sdxl", 1)
    assert said == f"waiting for another process to fill it: {SHOWN}"


def test_a_load_that_is_ready_at_once_draws_nothing():
    terminal = Terminal()
    with LoadProgress("k", terminal):
        pass
    assert terminal.getvalue() == ""
