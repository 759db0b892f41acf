"""What the command line takes, what it refuses, and what its help says."""

from __future__ import annotations

import os
import re

import pytest

from coordinator.cli import SERVE_OPTIONS, read_serve
from shm_store import errors
from shm_store.paths import socket_path
from tests.coordinator.command_line import only_line, run

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    "arguments",
    [
        ("status",),
        ("status", "--json"),
        ("load", "k", __file__),
        ("evict", "k"),
        ("evict", "--idle"),
        ("pin", "k"),
        ("unpin", "k"),
        ("drain",),
    ],
    ids=" ".join,
)
def test_without_a_coordinator_every_command_says_what_to_do(arguments, path, run_here):
    code, out, err = run_here(*arguments, socket=path)
    assert (code, out) == (6, "")
    line = only_line(err)
    assert line.startswith(f"weight-cache: no coordinator answers on {path}: ")
    assert "`weight-cache serve`" in line


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("status", "--bogus"),
        ("load", "k"),
        ("load", " k", __file__),
        ("load", "k", __file__, "--timeout", "nan"),
        ("load", "k", ""),
        ("evict",),
        ("evict", "k", "--idle"),
        ("evict", ""),
        ("pin", "k\n"),
        ("unpin", "x" * 513),
        ("drain", "--timeout", "-1"),
        ("launch", "--keep", "unet"),
        ("launch", "--keep", "=unet.safetensors"),
        ("launch", "--keep", "unet="),
        ("launch", "--keep", " unet=unet.safetensors"),
        ("launch", "--keep", f"unet={__file__}", "--keep", "unet=other"),
        ("launch", "--keep", f"unet={__file__}", "--devices", "cpu,cpu"),
        ("launch", "--keep", f"unet={__file__}", "--devices", "cpu", "--workers", "2"),
        ("launch", "--keep", f"unet={__file__}", "--", "true"),
        ("launch", "--workers", "0", "true"),
        ("launch", "--ram-budget", "20G", "true"),
        ("launch", "--grace", "inf", "true"),
        ("launch", "--devices", "", "true"),
        ("launch", "--devices", "cuda:0, cuda:1", "true"),
        ("launch", "--restart-workers", "always", "true"),
        ("launch", "--max-restarts", "-1", "true"),
        ("launch", "--limits", "/no/such/file", "true"),
        ("demo", "--checkpoint-mib", "many"),
        ("launch", "--", "no-such-command"),
        ("serve", "--ram-budget", "20G"),
        ("serve", "--ram-budget", "0"),
        ("serve", "--ram-budget", "-1"),
        ("limit", "ram", "-1"),
        ("serve", "--socket"),
        ("serve", "--leave-after", "0"),
        ("serve", "--leave-after", "nan"),
        ("serve", "--leave-after", "soon"),
        ("serve", "extra"),
    ],
    ids=" ".join,
)
def test_wrong_arguments_end_with_2_and_a_reason(arguments, path, run_here):
    code, out, err = run_here(*arguments, socket=path)
    assert (code, out) == (2, ""), (out, err)
    assert err
    assert not os.path.exists(path)


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve",),
        ("launch", "true"),
        ("status",),
        ("load", "k", __file__),
        ("evict", "k"),
        ("pin", "k"),
        ("unpin", "k"),
        ("drain",),
    ],
    ids=" ".join,
)
def test_an_empty_socket_is_refused_by_every_command(arguments, path, run_here):
    """Nobody means the name of its own choice that the kernel would bind."""
    name, *others = arguments
    code, out, err = run_here(name, "--socket", "", *others, socket=path)
    assert (code, out) == (2, "")
    assert only_line(err).startswith("weight-cache: '' is no path of a socket (leave it out")
    assert not os.path.exists(path)


@pytest.mark.parametrize("path", ["\0abstract", "/tmp/c.sock\0rest"])
def test_a_nul_in_a_socket_is_refused(path):
    """The first would be outside the file system, the second another file than it says."""
    with pytest.raises(errors.ArgumentRefused, match="is no path of a socket"):
        socket_path(path)


def test_a_folder_of_the_users_own_that_cannot_be_made_is_named(run_here, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/proc/none")
    code, out, err = run_here("serve", socket="")
    assert (code, out) == (2, "")
    assert "/proc/none/weight-cache cannot be made" in only_line(err)


def test_help_documents_the_exit_code_of_every_error(run_here):
    code, shown, _ = run_here("--help", socket="none")
    assert code == 0
    for kind in {kind.exit_code for kind in errors.BY_CODE.values()}:
        assert f"\n    {kind}  " in shown


def test_a_second_coordinator_is_part_of_exit_code_6(run_here):
    _, shown, _ = run_here("--help", socket="none")
    assert (
        "6  no coordinator answers, it drains or went away, or another one has the socket\n"
        in shown
    )


@pytest.mark.parametrize(
    ("name", "usage", "lines"),
    [
        (
            "launch",
            "[OPTIONS] [-- CMD...]",
            ["--workers N  ", "[-- CMD...]  The worker's command", "--keep KEY=SOURCE  "],
        ),
        ("load", "[OPTIONS] KEY SOURCE", ["KEY     Name of", "SOURCE  Path of", "--timeout S  "]),
        ("evict", "[OPTIONS] [KEY]", ["[KEY]  Name of", "--idle  "]),
        ("pin", "[OPTIONS] KEY", ["KEY  Name of"]),
        ("demo", "[OPTIONS]", ["--json  ", "--checkpoint-mib N  "]),
        ("status", "[OPTIONS]", ["--json  ", "--socket PATH  "]),
    ],
)
def test_help_names_arguments_plainly(name, usage, lines, run_here):
    code, shown, _ = run_here(name, "--help", socket="none")
    assert (code, shown.splitlines()[0]) == (0, f"Usage: weight-cache {name} {usage}")
    for line in lines:
        assert f"\n  {line}" in shown, shown
    ranges = ("1<=x<=4096", "x>=0")
    assert not re.search(r"[<>{}]", re.sub("|".join(ranges), "", shown)), shown


def test_a_mistyped_option_of_launch_is_no_command(run_here):
    code, out, err = run_here("launch", "--worker", "2", "--", "true", socket="none")
    assert (code, out) == (2, "")
    assert err.startswith("Usage: weight-cache launch [OPTIONS] [-- CMD...]\n")
    assert "No such option: --worker" in err and "--workers" in err


def test_a_time_that_cannot_be_is_named_with_its_option(run_here):
    _, _, err = run_here("drain", "--timeout", "-1", socket="none")
    assert only_line(err) == "weight-cache: --timeout takes seconds, 0 or more, not -1"
    _, _, err = run_here("launch", "--grace", "inf", "true", socket="none")
    assert only_line(err) == "weight-cache: --grace takes seconds, 0 or more, not inf"


def test_where_nobody_chose_a_socket_those_of_launch_are_mentioned(tmp_path, run_here, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    hint = "or give the --socket that `weight-cache launch` printed"
    code, _, err = run_here("status", socket="")
    assert code == 6
    assert str(tmp_path) in err and hint in only_line(err)
    for chosen in (
        run_here("status", socket=str(tmp_path / "s")),
        run_here("status", "--socket", str(tmp_path / "s"), socket=""),
    ):
        assert chosen[0] == 6 and hint not in chosen[2]


def test_the_version_is_printed():
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("weight-cache ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {}),
        (["--socket", "s"], {"--socket": "s"}),
        (["--socket=s", "--ram-budget=1GiB"], {"--socket": "s", "--ram-budget": "1GiB"}),
        (["--ram-budget", "1GiB", "--socket", "a=b"], {"--socket": "a=b", "--ram-budget": "1GiB"}),
        (["--socket", "a", "--socket", "b"], {"--socket": "b"}),
        (["--leave-after", "1800"], {"--leave-after": "1800"}),
        (["--no-huge-pages", "--socket", "s"], {"--no-huge-pages": "", "--socket": "s"}),
        (["--socket", "--no-huge-pages"], None),
        (["--no-huge-pages=1"], None),
        (["--help"], None),
        (["--socket"], None),
        (["--socket="], None),
        (["--socket", "--ram-budget"], None),
        (["--other", "x"], None),
        (["s"], None),
    ],
    ids=str,
)
def test_both_readings_of_serve_agree(arguments, expected, monkeypatch):
    """The quick reading takes what typer would, and leaves to typer whatever it is not sure of."""
    from coordinator import commands

    assert read_serve(["serve", *arguments]) == expected
    if expected is None:
        return
    read = []

    def run_coordinator(*options: str | None, huge_pages: bool) -> int:
        read.append((*options, huge_pages))
        return 0

    monkeypatch.setattr(commands, "run_coordinator", run_coordinator)
    with pytest.raises(SystemExit) as ended:
        commands.app(["serve", *arguments], prog_name="weight-cache")
    assert ended.value.code == 0
    assert read == [(*map(expected.get, SERVE_OPTIONS), "--no-huge-pages" not in expected)]
