"""The command line, as people run it: real processes, exit codes, and what stands on stderr."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import msgspec
import pytest

from coordinator.cli import main, read_serve
from shm_store import channel, errors
from shm_store.channel import Channel
from shm_store.keys import GenerationId, Key, LeaseId, RequestId
from shm_store.report import (
    GenerationReport,
    LeaseReport,
    PoolReport,
    SessionReport,
    StatusReport,
    size_text,
)
from shm_store.wire import (
    Acquire,
    Cause,
    Done,
    Drain,
    Evict,
    Fail,
    Flush,
    Flushed,
    FromSession,
    Grant,
    Release,
    Status,
    ToSession,
    decode,
    encode,
    session_decoder,
)
from tests.processes import (
    ROOT,
    WAIT_S,
    Coordinator,
    Peer,
    running,
    write_safetensors,
)

pytestmark = pytest.mark.process

BUDGET_BYTES = 1 << 20
SIZE = 300_000


@pytest.fixture
def coordinator(path: str):
    with running(path, "--ram-budget", "1MiB") as started:
        yield started


@pytest.fixture
def weights(tmp_path: Path) -> str:
    return str(write_safetensors(tmp_path / "w.safetensors", {"w": ("U8", [SIZE], bytes(SIZE))}))


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "coordinator", *arguments]


def environment(**changes: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k != "WEIGHT_CACHE_SOCKET"}
    return {**inherited, "PYTHONPATH": str(ROOT), **changes}


def run(*arguments: str, cwd: Path = ROOT, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run one command to its end. No expected failure may leave a traceback."""
    done = subprocess.run(
        command(*arguments),
        check=False,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        cwd=cwd,
        env=environment(**changes),
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def start(*arguments: str, **changes: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(**changes),
    )


class Played:
    """A command whose coordinator is played by the test."""

    def __init__(self, path: str, *arguments: str) -> None:
        with channel.listen(path) as listener:
            listener.setblocking(True)
            self.process = start(*arguments, WEIGHT_CACHE_SOCKET=path)
            self.channel = Channel(listener.accept()[0])
        assert self.channel.receive() is not None  # RESUME

    def __enter__(self) -> Played:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        self.process.kill()
        self.process.communicate()

    def heard(self) -> FromSession:
        received = self.channel.receive()
        assert received is not None
        channel.close_all(received[1])
        return decode(session_decoder, received[0])

    def say(self, message: ToSession, *fds: int) -> None:
        self.channel.send(encode(message), fds)

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, out, err


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Run a command that starts nothing in this process, which spares an interpreter."""
    sigpipe = signal.getsignal(signal.SIGPIPE)

    def run(*arguments: str, socket: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["weight-cache", *arguments])
        monkeypatch.setenv("WEIGHT_CACHE_SOCKET", socket)
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    yield run
    signal.signal(signal.SIGPIPE, sigpipe)


def only_line(text: str) -> str:
    (line,) = text.splitlines()
    return line


def in_use_bytes(peer: Peer) -> int:
    return sum(pool.in_use_bytes for pool in peer.status().pools)


# --- arguments ----------------------------------------------------------------------------------


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
        ("evict",),
        ("evict", "k", "--idle"),
        ("evict", ""),
        ("pin", "k\n"),
        ("unpin", "x" * 513),
        ("drain", "--timeout", "-1"),
        ("launch",),
        ("launch", "--workers", "0", "true"),
        ("launch", "--ram-budget", "20G", "true"),
        ("launch", "--grace", "inf", "true"),
        ("demo", "--checkpoint-mib", "many"),
        ("launch", "--", "no-such-command"),
        ("serve", "--ram-budget", "20G"),
        ("serve", "--socket"),
        ("serve", "extra"),
    ],
    ids=" ".join,
)
def test_wrong_arguments_end_with_2_and_a_reason(arguments, path, run_here):
    code, out, err = run_here(*arguments, socket=path)
    assert (code, out) == (2, ""), (out, err)
    assert err
    assert not os.path.exists(path)


def test_help_documents_the_exit_code_of_every_error(run_here):
    code, shown, _ = run_here("--help", socket="none")
    assert code == 0
    for kind in {kind.exit_code for kind in errors.BY_CODE.values()}:
        assert f"\n    {kind}  " in shown


def test_a_second_coordinator_is_part_of_exit_code_6(run_here):
    _, shown, _ = run_here("--help", socket="none")
    assert "6  no coordinator answers, it went away, or another one has the socket\n" in shown


@pytest.mark.parametrize(
    ("name", "usage", "lines"),
    [
        ("launch", "[OPTIONS] -- CMD...", ["--workers N  ", "CMD...  The worker's command"]),
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
    assert not re.search(r"[<>{}]", shown.replace("1<=x<=4096", "")), shown


def test_a_mistyped_option_of_launch_is_no_command(run_here):
    code, out, err = run_here("launch", "--worker", "2", "--", "true", socket="none")
    assert (code, out) == (2, "")
    assert err.startswith("Usage: weight-cache launch [OPTIONS] -- CMD...\n")
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

    def run_coordinator(socket: str | None, ram_budget: str | None) -> int:
        read.append((socket, ram_budget))
        return 0

    monkeypatch.setattr(commands, "run_coordinator", run_coordinator)
    with pytest.raises(SystemExit) as ended:
        commands.app(["serve", *arguments], prog_name="weight-cache")
    assert ended.value.code == 0
    assert read == [(expected.get("--socket"), expected.get("--ram-budget"))]


# --- serve --------------------------------------------------------------------------------------


def test_serve_imports_nothing_heavy_and_stays_small(path):
    """What is imported on the way to the ready line stays in memory for the coordinator's life."""
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "coordinator", "serve", "--socket", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith(f"weight-cache: ready on {path} (ram budget ")
    status = Path(f"/proc/{process.pid}/status").read_text()
    ran_ns = int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[0])
    process.terminate()
    _, imports = process.communicate(timeout=WAIT_S)

    modules = {line.rpartition("|")[2].strip() for line in imports.splitlines()}
    assert "asyncio" in modules
    heavy = {"torch", "numpy", "typer", "click", "pydantic", "rich", "safetensors"}
    assert not {module.partition(".")[0] for module in modules} & heavy
    assert int(status.split("VmRSS:")[1].split()[0]) < 40 * 1024
    assert ran_ns < 300_000_000  # processor time: the wall clock is the machine's as well


def test_serve_makes_the_users_own_folder_where_every_command_looks(tmp_path):
    everyday = {"XDG_RUNTIME_DIR": str(tmp_path)}
    process = start("serve", **everyday)
    assert process.stdout is not None and process.stdout.readline()
    assert os.stat(tmp_path / "weight-cache").st_mode & 0o777 == 0o700
    assert run("status", **everyday).returncode == 0
    assert run("drain", **everyday).returncode == 0
    assert process.communicate(timeout=WAIT_S) == ("", "")


def test_serve_makes_no_folder_that_was_chosen(tmp_path):
    done = run("serve", "--socket", str(tmp_path / "gone" / "s"))
    assert done.returncode == 2 and "No such file" in only_line(done.stderr)
    assert not (tmp_path / "gone").exists()


def test_a_second_coordinator_is_refused_and_the_first_goes_on(coordinator):
    done = run("serve", "--socket", coordinator.socket)
    assert (done.returncode, done.stdout) == (6, "")
    assert "already serves" in only_line(done.stderr)
    assert run("status", "--socket", coordinator.socket).returncode == 0


# --- status -------------------------------------------------------------------------------------


def fields(kind: type[msgspec.Struct]) -> list[str]:
    return [field.name for field in msgspec.structs.fields(kind)]


def test_status_as_json_has_the_documented_fields_and_figures(coordinator, weights):
    holder = Peer(coordinator.socket, "holder")
    granted = holder.load("k", weights)
    holder.ticket("open", "v1")
    done = run("status", "--json", WEIGHT_CACHE_SOCKET=coordinator.socket)
    assert (done.returncode, done.stderr) == (0, "")
    assert msgspec.json.decode(done.stdout, type=StatusReport).pools == holder.status().pools

    shown = json.loads(done.stdout)
    assert list(shown) == fields(StatusReport)
    assert list(shown["pools"][0]) == fields(PoolReport)
    generation = next(g for g in shown["generations"] if g["key"] == "k")
    assert list(generation) == fields(GenerationReport)
    assert list(generation["leases"][0]) == fields(LeaseReport)
    (session,) = shown["sessions"]
    assert list(session) == fields(SessionReport)

    assert generation["generation"] == granted.gen
    assert generation["leases"][0]["pid"] == os.getpid()
    assert session["name"] == "holder" and session["waiting_for"] == ["open"]
    assert shown["pools"][0]["limit_bytes"] == BUDGET_BYTES
    assert shown["pools"][0]["leased_bytes"] == coordinator.segment_blocks()


def test_status_for_people_names_key_holder_and_socket(coordinator, weights):
    holder = Peer(coordinator.socket, "holder")
    granted = holder.load("k", weights)
    shown = run("status", "--socket", coordinator.socket).stdout
    texts = (coordinator.socket, "1.0 MiB", "300 KiB", f"pid {os.getpid()} (", "holder")
    for text in texts:
        assert text in shown
    assert granted.gen.endswith("-00000001")
    assert re.search(r"^k +1 +ready ", shown, re.MULTILINE)


def on_terminal(columns: int, *arguments: str) -> list[str]:
    """Return the lines of a command whose output is a terminal of so many columns."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    changes = {"TERM": "xterm", "COLUMNS": "", "LINES": ""}
    process = subprocess.Popen(
        command(*arguments),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env=environment(**changes),
    )
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 65536):
            shown += data
    except OSError:
        pass  # how a terminal says that nobody has its other end any more
    os.close(ours)
    process.wait(WAIT_S)
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).splitlines()


def test_tables_fit_in_80_columns(coordinator, weights):
    holder = Peer(coordinator.socket, "python serve.py")
    holder.load("stabilityai/sdxl/unet:bf16", weights)
    holder.ticket("open", "v1")
    run("pin", "stabilityai/sdxl/unet:bf16", "--socket", coordinator.socket)

    _, *status = on_terminal(80, "status", "--socket", coordinator.socket)
    assert all(len(line) <= 80 for line in status), status
    rows = [re.split(r" {2,}", line.strip()) for line in status]
    assert ["pool", "limit", "in use", "leased"] in rows
    assert ["key", "generation", "state", "size", "held by", "waiting"] in rows
    assert ["open", "2", "open", "0 B", f"pid {os.getpid()} builds it", "1"] in rows
    assert ["session", "pid", "name", "device", "waiting for"] in rows

    _, *refusal = on_terminal(
        80, "evict", "stabilityai/sdxl/unet:bf16", "--socket", coordinator.socket
    )
    refusal = [line for line in refusal if "pid" in line or "held by" in line]
    assert len(refusal) == 2 and all(len(line) <= 80 for line in refusal)
    assert "stabilityai/sdxl/unet:bf16  1           ready, pinned  300 KiB  pid" in refusal[1]


def test_output_into_a_closed_pipe_is_no_error(coordinator):
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        command("status", "--socket", coordinator.socket),
        check=False,
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        timeout=WAIT_S,
        cwd=ROOT,
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def test_an_interrupted_command_ends_with_130_and_without_a_word(path):
    """The coordinator here takes the request and never answers."""
    with Played(path, "status") as played:
        assert isinstance(played.heard(), Status)  # from here on it waits
        played.process.send_signal(signal.SIGINT)
        assert played.end() == (130, "", "")


def test_load_returns_when_its_lease_has_ended(path, weights):
    """It says so and waits for it: the end of its process would do the same, only later."""
    with Played(path, "load", "k", weights) as played:
        asked = played.heard()
        assert isinstance(asked, Acquire)
        with open(weights, "rb") as segment:
            played.say(Grant(asked.rid, GenerationId("g")), segment.fileno())
        assert played.heard() == Release(GenerationId("g"), LeaseId(asked.rid))
        flush = played.heard()
        assert isinstance(flush, Flush)
        played.say(Flushed(flush.rid))
        assert played.end()[0] == 0


@pytest.mark.parametrize(
    ("timeout", "text"),
    [
        (
            "0",
            "'k' is not loaded yet, and --timeout 0 does not wait for it "
            "(give --timeout some seconds)",
        ),
        ("5", "late (see `weight-cache status` for what it waits for, or raise --timeout)"),
    ],
)
def test_a_load_that_is_late_speaks_of_its_own_option(path, weights, timeout, text):
    with Played(path, "load", "k", weights, "--timeout", timeout) as played:
        asked = played.heard()
        assert isinstance(asked, Acquire) and asked.timeout_s == float(timeout)
        played.say(Fail(asked.rid, Cause.of(errors.LoadTimeout("late"))))
        assert played.end() == (4, "", f"weight-cache: {text}\n")


def test_evict_returns_when_the_memory_is_gone(path):
    with Played(path, "evict", "k") as played:
        asked = played.heard()
        assert isinstance(asked, Evict)
        played.say(Done(asked.rid, (Key("k"),)))
        flush = played.heard()
        assert isinstance(flush, Flush)
        played.say(Flushed(flush.rid))
        assert played.end() == (0, "evicted k\n", "")


# --- load, pin, evict ---------------------------------------------------------------------------


def test_load_leaves_the_weights_ready_and_unleased(coordinator, weights):
    peer = Peer(coordinator.socket)
    done = run("load", "k", weights, "--socket", coordinator.socket)
    assert (done.returncode, done.stderr) == (0, "")
    found = peer.generation("k")
    assert found is not None
    assert (found.state, found.leases, found.pinned) == ("ready", (), False)
    line = only_line(done.stdout)
    assert line.startswith(f"k: generation {found.generation}, 300.0 KiB, ") and line.endswith(" s")
    assert found.size_bytes == coordinator.segment_blocks() == 300 * 1024

    again = run("load", "k", weights, "--socket", coordinator.socket)
    assert found.generation in again.stdout
    assert coordinator.segment_blocks() == found.size_bytes


def test_load_with_pin_protects_until_unpin(coordinator, weights):
    socket = {"WEIGHT_CACHE_SOCKET": coordinator.socket}
    peer = Peer(coordinator.socket)
    assert run("load", "k", weights, "--pin", **socket).returncode == 0
    found = peer.generation("k")
    assert found is not None and found.pinned

    assert run("evict", "--idle", **socket).stdout == "nothing to evict\nkept 1 pinned: k\n"
    refused = run("evict", "k", **socket)
    assert refused.returncode == 2
    first, *table = refused.stderr.splitlines()
    assert first == ("weight-cache: 'k' is pinned (take the pin back with `weight-cache unpin`)")
    assert "ready, pinned" in table[-1]
    assert peer.generation("k") == found

    assert run("unpin", "k", **socket).stdout == "unpinned k\n"
    assert run("unpin", "k", **socket).stdout == "k was not pinned\n"
    assert run("evict", "k", **socket).stdout == "evicted k\n"
    assert in_use_bytes(peer) == coordinator.segment_blocks() == 0


def test_a_key_need_not_exist_in_the_terminals_encoding(coordinator):
    socket = {"WEIGHT_CACHE_SOCKET": coordinator.socket, "PYTHONIOENCODING": "ascii"}
    done = run("pin", "模型", **socket)
    assert done.returncode == 0
    assert done.stdout.startswith("pinned \\u6a21\\u578b (nothing")


def test_a_failed_load_pins_nothing(coordinator, weights, tmp_path):
    (tmp_path / "bad").write_bytes(b"no checkpoint")
    done = run("load", "k", str(tmp_path / "bad"), "--pin", "--socket", coordinator.socket)
    assert done.returncode == 3
    peer = Peer(coordinator.socket)
    peer.load("k", weights)
    found = peer.generation("k")
    assert found is not None and not found.pinned


def test_pin_before_the_weights_are_there(coordinator, weights):
    early = run("pin", "k", "--socket", coordinator.socket).stdout
    assert early == "pinned k (nothing is loaded under this key yet)\n"
    peer = Peer(coordinator.socket)
    peer.load("k", weights)
    assert run("pin", "k", "--socket", coordinator.socket).stdout == "pinned k\n"
    found = peer.generation("k")
    assert found is not None and found.pinned


def test_evict_says_what_went_and_the_memory_is_gone_on_return(coordinator, weights):
    for key in ("a", "b"):
        assert run("load", key, weights, "--socket", coordinator.socket).returncode == 0
    done = run("evict", "--idle", "--socket", coordinator.socket)
    blocks = coordinator.segment_blocks()
    assert (done.returncode, blocks) == (0, 0)
    assert sorted(done.stdout.splitlines()) == ["evicted a", "evicted b"]
    missing = run("evict", "a", "--socket", coordinator.socket)
    assert missing.returncode == 2
    assert only_line(missing.stderr) == (
        "weight-cache: there are no weights 'a' (see `weight-cache status`)"
    )


def test_evict_idle_says_what_a_pin_kept(coordinator, weights):
    for key in ("a", "b", "c"):
        run("load", key, weights, "--socket", coordinator.socket)
    for key in ("a", "c"):
        run("pin", key, "--socket", coordinator.socket)
    done = run("evict", "--idle", "--socket", coordinator.socket)
    assert (done.returncode, done.stdout) == (0, "evicted b\nkept 2 pinned: a, c\n")


def test_a_load_that_waits_for_room_says_so_once_and_goes_on(coordinator, tmp_path):
    weights = write_safetensors(tmp_path / "w", {"w": ("U8", [600_000], bytes(600_000))})
    holder = Peer(coordinator.socket)
    granted = holder.load("held", str(weights))
    process = start("load", "k", str(weights), "--socket", coordinator.socket)
    assert process.stderr is not None
    line = process.stderr.readline()
    held_bytes = coordinator.segment_blocks()
    assert line == (
        f"weight-cache: waiting for room: pool ram has {size_text(BUDGET_BYTES - held_bytes)} "
        f"free of 1.0 MiB; held by 'held' ({size_text(held_bytes)}, pid {os.getpid()})\n"
    )
    holder.send(Release(granted.gen, LeaseId(granted.rid)))
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (0, "")
    assert out.startswith("k: generation ")


def test_leased_weights_are_not_evicted_and_their_holder_is_named(coordinator, weights):
    holder = Peer(coordinator.socket)
    assert isinstance(holder.load("k", weights), Grant)
    before = holder.generation("k")
    done = run("evict", "k", "--socket", coordinator.socket)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("weight-cache: 'k' is in use (let the holders finish)\n")
    assert f"pid {os.getpid()} (" in done.stderr
    after = holder.generation("k")
    assert before is not None and after is not None
    assert (after.generation, after.state) == (before.generation, "ready")
    assert run("evict", "--idle", "--socket", coordinator.socket).stdout == "nothing to evict\n"


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("missing", 3, "No such file"),
        ("", 3, "a directory"),
        ("empty", 3, "empty"),
        ("garbage", 3, "garbage"),
        ("large", 4, "needs 4.0 MiB"),
    ],
)
def test_a_load_that_cannot_be_says_why_and_charges_nothing(
    coordinator, tmp_path, weights, name, code, text
):
    (tmp_path / "empty").touch()
    (tmp_path / "garbage").write_bytes(b"\xff" * 100)
    write_safetensors(tmp_path / "large", {"w": ("U8", [3 << 20], bytes(3 << 20))})
    run("load", "other", weights, "--socket", coordinator.socket)
    peer = Peer(coordinator.socket)
    before = peer.status()

    done = run("load", "k", str(tmp_path / name), "--socket", coordinator.socket)
    assert (done.returncode, done.stdout) == (code, "")
    assert text in done.stderr.splitlines()[0]
    assert peer.status().generations == before.generations
    if code == 4:
        assert "other" in done.stderr  # the table of those who fill the pool


def test_a_source_whose_name_is_no_text_is_refused(coordinator, tmp_path):
    name = os.fsencode(tmp_path) + b"/\xff"
    Path(os.fsdecode(name)).write_bytes(b"x")
    done = run("load", "k", os.fsdecode(name), "--socket", coordinator.socket)
    assert done.returncode == 2 and "UTF-8" in only_line(done.stderr)


# --- drain --------------------------------------------------------------------------------------


def test_drain_returns_when_the_coordinator_has_gone(path, weights):
    first = Coordinator(path)
    run("load", "k", weights, "--socket", path)
    done = run("drain", "--socket", path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the coordinator has ended\n", "")
    assert first.process.poll() == 0
    assert not os.path.exists(path)
    first.stop()


def test_a_drain_at_its_deadline_names_the_holders_and_goes_on(coordinator, weights):
    holder = Peer(coordinator.socket)
    assert isinstance(holder.load("k", weights), Grant)
    late = run("drain", "--timeout", "0.2", "--socket", coordinator.socket)
    assert (late.returncode, late.stdout) == (4, "")
    first, *table = late.stderr.splitlines()
    assert first.startswith("weight-cache: 1 generation is still held (")
    assert f"pid {os.getpid()} (" in table[-1]

    refused = run("load", "k2", weights, "--socket", coordinator.socket)
    assert refused.returncode == 6 and "draining" in only_line(refused.stderr)
    assert holder.status().draining


def test_an_interrupted_drain_ends_with_130(coordinator, weights):
    holder = Peer(coordinator.socket)
    assert isinstance(holder.load("k", weights), Grant)
    process = start("drain", "--socket", coordinator.socket)
    while not holder.status().draining:
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out, err) == (130, "", "")


def test_a_drain_that_another_one_finished_is_done(path, weights):
    first = Coordinator(path)
    holder = Peer(path)
    holder.load("k", weights)
    process = start("drain", "--socket", path)
    while not holder.status().draining:
        assert process.poll() is None
    holder.send(Drain(RequestId(holder.next_rid()), 0.0))
    assert isinstance(holder.expect(Fail), Fail)
    first.process.send_signal(signal.SIGTERM)  # it says BYE, and never answers the drain
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out, err) == (0, "the coordinator has ended\n", "")
    first.stop()


# --- demo ---------------------------------------------------------------------------------------


def test_the_demo_runs_with_its_arguments_and_not_with_what_lies_around(tmp_path):
    """`python -m` would look into the working directory first."""
    package = tmp_path / "lib" / "gpu_worker"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "demo.py").write_text("import sys; print(sys.argv[1:]); sys.exit(5)")
    decoy = tmp_path / "here" / "gpu_worker"
    decoy.mkdir(parents=True)
    (decoy / "__init__.py").write_text("raise SystemExit('the wrong package')")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "coordinator", "demo", "--json", "--checkpoint-mib", "8"],
        check=False,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        cwd=decoy.parent,
        env=environment(PYTHONPATH=f"{tmp_path / 'lib'}:{ROOT}"),
    )
    expected = "['--json', '--checkpoint-mib', '8']\n"
    assert (done.returncode, done.stdout) == (5, expected), done.stderr
