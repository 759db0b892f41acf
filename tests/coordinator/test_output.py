"""What workers write: whole lines with a name, whatever they write and whoever reads it."""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.loop import Loop
from coordinator.output import (
    LINE_LIMIT_BYTES,
    LOST,
    OUTLET_LIMIT_BYTES,
    READ_BYTES,
    LineCutter,
    Outlet,
    OutletText,
    Source,
)
from tests.coordinator.launched import HELLO, WAITS
from tests.processes import WAIT_S

# --- lines --------------------------------------------------------------------------------------


def test_lines_come_whole_and_named():
    lines = LineCutter(b"[w] ")
    assert lines.feed(b"a\nb") == b"[w] a\n"
    assert lines.feed(b"") == b""
    assert lines.feed(b"c\n\n\xff\0") == b"[w] bc\n[w] \n"
    assert lines.end() == b"[w] \xff\0\n"
    assert lines.end() == b""


def test_a_line_without_end_is_cut():
    lines = LineCutter(b"")
    data = b"x" * (2 * LINE_LIMIT_BYTES + 1)
    assert lines.feed(data) == (b"x" * LINE_LIMIT_BYTES + b"\n") * 2
    assert lines.end() == b"x\n"


@given(st.lists(st.binary(max_size=50) | st.just(b"\n")))
def test_however_it_arrives_every_byte_goes_out_once(parts):
    lines = LineCutter(b"> ")
    out = b"".join(map(lines.feed, parts)) + lines.end()
    whole = b"".join(parts)
    expected = whole.split(b"\n")
    if expected[-1] == b"":
        expected.pop()
    assert out == b"".join(b"> " + line + b"\n" for line in expected)


# --- readers ------------------------------------------------------------------------------------


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


class Piped:
    """An outlet whose reader is the test, and a source that the test writes into."""

    def __init__(self, loop: Loop, ours: int, theirs: int) -> None:
        self.reader = ours
        self.outlet = Outlet(loop, theirs)
        os.close(theirs)
        self.source = Source(loop, self.outlet, "[w] ")
        self.worker = os.dup(self.source.theirs)
        os.set_blocking(self.worker, False)
        self.source.started()

    def fill(self, loop: Loop) -> int:
        """Write until nothing is taken any more; return how many bytes were."""
        total, refused = 0, 0
        while refused < 2:  # in a row, with a turn of the loop between them
            try:
                total += os.write(self.worker, b"0123456789abcde\n" * 1024)
                refused = 0
            except BlockingIOError:
                refused += 1
                loop.alarm("look", 0.0, lambda: None)
                loop.turn()
        return total

    def close(self) -> None:
        os.close(self.worker)
        self.source.close()
        self.outlet.close()


@pytest.fixture(params=["pipe", "socket"])
def piped(loop, request) -> Iterator[Piped]:
    if request.param == "pipe":
        made = Piped(loop, *os.pipe())
    else:
        made = Piped(loop, *(end.detach() for end in socket.socketpair()))
    yield made
    made.close()
    if made.reader >= 0:
        os.close(made.reader)


def test_a_reader_that_does_not_read_costs_a_bounded_memory_and_no_byte(loop, piped):
    """The worker waits, through its pipe; and everything comes once it is read."""
    sent = piped.fill(loop)
    assert OUTLET_LIMIT_BYTES < piped.outlet.unwritten_bytes < OUTLET_LIMIT_BYTES + 2 * READ_BYTES
    received = bytearray()
    lines = sent // 16
    while len(received) < lines * 20:
        received += os.read(piped.reader, 1 << 20)
        loop.alarm("look", 0.0, lambda: None)
        loop.turn()
    assert received == b"[w] 0123456789abcde\n" * lines
    assert piped.outlet.unwritten_bytes == 0


def test_a_reader_that_has_gone_is_gone_for_the_worker_too(loop, piped):
    os.close(piped.reader)
    piped.reader = -1
    os.write(piped.worker, b"x\n")
    loop.turn()
    assert piped.outlet.gone
    with pytest.raises(BrokenPipeError):
        os.write(piped.worker, b"x\n")
    piped.outlet.put(b"x")  # dropped
    assert piped.outlet.unwritten_bytes == 0
    late = Source(loop, piped.outlet, "")
    late.started()
    assert late.fd == -1


def test_a_full_disk_costs_lines_and_no_worker_its_pipe(loop, piped, monkeypatch):
    """What is missing is said when there is room again."""
    write, disk = piped.outlet._write, {"is full": True}

    def into_disk(data: bytes) -> int:
        if disk["is full"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(data)

    monkeypatch.setattr(piped.outlet, "_write", into_disk)
    for _ in range(2):
        os.write(piped.worker, b"lost\n")
        loop.turn()
    assert not piped.outlet.gone
    assert piped.outlet.unwritten_bytes == 0
    disk["is full"] = False
    for _ in range(2):
        os.write(piped.worker, b"seen\n")
        loop.turn()
    missing = LOST % (2 * len(b"[w] lost\n"))
    assert os.read(piped.reader, 1000) == missing + 2 * b"[w] seen\n"


def test_the_blocking_of_what_we_share_is_left_alone(loop, piped):
    theirs = os.dup(piped.worker)
    os.set_blocking(theirs, True)
    outlet = Outlet(loop, theirs)
    assert os.get_blocking(theirs)
    outlet.close()
    os.close(theirs)


def test_a_pipe_that_may_not_be_opened_anew_is_looked_at_before_each_write(loop, monkeypatch):
    """As somebody else's after `su`."""

    def refuse(*arguments: object) -> int:
        raise PermissionError

    monkeypatch.setattr("coordinator.output.os.open", refuse)
    made = Piped(loop, *os.pipe())
    try:
        made.fill(loop)
        assert made.outlet.unwritten_bytes > OUTLET_LIMIT_BYTES
    finally:
        made.close()
        os.close(made.reader)


def test_a_file_is_appended_to_where_the_others_are(loop, tmp_path):
    """Opened anew it would be written from its start."""
    file = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT)
    os.write(file, b"first\n")
    outlet = Outlet(loop, file)
    outlet.put(b"second\n")
    os.write(file, b"third\n")
    outlet.close()
    os.close(file)
    assert (tmp_path / "log").read_text() == "first\nsecond\nthird\n"


def test_what_a_worker_wrote_last_is_shown_and_its_heirs_lose_the_pipe(loop, piped):
    os.write(piped.worker, b"whole\nhalf")
    piped.source.finish()
    assert os.read(piped.reader, 100) == b"[w] whole\n[w] half\n"
    with pytest.raises(BrokenPipeError):
        os.write(piped.worker, b"x")


def test_our_own_words_go_the_same_way(loop, piped):
    text = OutletText(piped.outlet)
    assert text.writable()
    print("ours: \udcff", file=text)
    assert os.read(piped.reader, 100) == b"ours: \\udcff\n"


# --- a group ------------------------------------------------------------------------------------


FLOODS = """
signal.signal(signal.SIGTERM, signal.SIG_DFL)
while True:
    os.write(1, b"x" * 1_000_000)
"""


@pytest.mark.process
def test_a_flood_that_nobody_reads_stalls_neither_the_group_nor_its_end(launch):
    """One worker floods, the other one goes on, deaths are noticed, and TERM is obeyed."""
    launched = launch(
        "--workers",
        "2",
        "--grace",
        "0.3",
        "--restart-workers",
        "on-failure",
        worker=f"""
if os.environ["WEIGHT_CACHE_RANK"] == "0":
{"".join("    " + line + chr(10) for line in FLOODS.strip().splitlines())}
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
os.write(2, b"up\\n")
{WAITS}
""",
    )
    launched.said("[worker 1] up")
    os.kill(launched.coordinator, signal.SIGKILL)
    launched.said("ready on")
    launched.send(signal.SIGTERM)
    assert launched.process.wait(WAIT_S) == 128 + signal.SIGTERM
    assert launched.process.stdout is not None
    rest = launched.process.stdout.read()
    assert rest.startswith("[worker 0] xxx")
    assert 1000 < len(rest) < OUTLET_LIMIT_BYTES  # what the pipe held; the rest was given up


@pytest.mark.process
def test_binary_and_half_lines_pass(launch):
    launched = launch(
        text=False,
        worker="""
os.write(1, b"half")
os.write(2, b"\\xff\\0\\x1b[0m")
""",
    )
    out, err = launched.process.communicate(timeout=WAIT_S)
    assert out == b"[worker 0] half\n"
    assert b"[worker 0] \xff\0\x1b[0m\n" in err


@pytest.mark.process
def test_a_reader_that_goes_ends_a_worker_as_it_would_have_without_us(launch):
    """As `launch yes | head -1`."""
    launched = launch(
        worker="signal.signal(signal.SIGPIPE, signal.SIG_DFL); os.execvp('yes', ['yes'])"
    )
    assert launched.line() == "y"
    launched.process.stdout.close()
    assert launched.process.wait(WAIT_S) == 128 + signal.SIGPIPE


@pytest.mark.process
def test_workers_go_on_when_the_disk_is_full(launch):
    """They print, and what they print is lost."""
    with open("/dev/full", "wb", buffering=0) as full:
        launched = launch(
            worker="""
for _ in range(1000):  # far more than a pipe holds that nobody reads
    print('lost' * 250)
print('seen', file=sys.stderr)
""",
            stdout=full,
        )
        assert "[worker 0] seen" in launched.said("seen")
        assert launched.process.wait(WAIT_S) == 0


@pytest.mark.process
def test_prints_are_shown_at_once(launch):
    """Python would keep 8 KiB of them for a pipe."""
    launched = launch(worker=f"print('printed'); {WAITS}")
    assert launched.line() == "printed"
    launched.send(signal.SIGTERM)
    launched.end()


@pytest.mark.process
def test_a_terminal_shows_it_too(launch):
    ours, theirs = os.openpty()
    launched = launch(worker=HELLO, stdout=theirs)
    os.close(theirs)
    assert launched.process.wait(WAIT_S) == 0
    assert os.read(ours, 1000).startswith(b"[worker 0] up 0 ")
    os.close(ours)


@pytest.mark.process
def test_workers_keep_the_limit_of_open_files_that_they_would_have(launch):
    """We raise our own; what counts in an fd_set, as select() does, cannot follow."""
    worker = "import resource; say(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    play = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 700))
from coordinator.cli import main
main()
"""
    assert launch(worker=worker, play=play).end()[:2] == (0, ["300"])
