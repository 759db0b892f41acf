"""The loader as a process: the test plays the coordinator at the other end of its socket."""

import contextlib
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from coordinator import loader, private_memory
from coordinator.pump import Meter
from shm_store import segment
from shm_store.channel import Channel, pair
from shm_store.errors import ConnectionLost
from shm_store.keys import Fingerprint, GenerationId, Key
from shm_store.layout import PREAMBLE_BYTES, data_start, segment_bytes
from shm_store.manifest import decode_manifest
from shm_store.source import fingerprint, open_source
from shm_store.wire import (
    Abort,
    Cause,
    Commit,
    Fetch,
    Message,
    Progress,
    Reserve,
    Space,
    decode,
    encode,
    loader_decoder,
)

pytestmark = pytest.mark.process

GEN = GenerationId("0000000000000001-00000001")
KEY = Key("k")
PATIENCE_S = 30
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}

TENSORS = {
    "a.weight": np.arange(1000, dtype="f4").reshape(10, 100),
    "b": np.array(7, dtype="i8"),
    "c": np.zeros((0, 4), dtype="f2"),
    "d": np.arange(13, dtype="u1"),
}


Contents = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Dtype, shape and bytes of each tensor."""


@dataclass
class Played:
    """The coordinator's side: what the loader said, and the segment it was given."""

    channel: Channel
    process: subprocess.Popen[str]
    segment_fd: int = -1
    said: list[Message] = field(default_factory=list)
    found: Contents = field(default_factory=dict)

    def next(self) -> Message | None:
        received = self.channel.receive()
        if received is None:
            return None
        data, fds = received
        assert fds == []
        message = decode(loader_decoder, data)
        self.said.append(message)
        return message

    def fetch(self, source_fd: int, name: str = "a.safetensors") -> None:
        asked = fingerprint([os.fstat(source_fd)])
        self.channel.send(encode(Fetch(GEN, KEY, name, asked)), [source_fd])

    def await_reserve(self) -> Reserve:
        message = self.next()
        assert isinstance(message, Reserve), message
        assert message.gen == GEN
        return message

    def give_space(self, size_bytes: int) -> None:
        self.segment_fd = segment.create(GEN)
        os.posix_fallocate(self.segment_fd, 0, size_bytes)
        self.channel.send(encode(Space(GEN)), [self.segment_fd])

    def await_end(self) -> tuple[Message, int, str]:
        """Return the last message, the exit code and what stands on stderr."""
        while self.next():
            pass
        _, stderr = self.process.communicate(timeout=PATIENCE_S)
        return self.said[-1], self.process.returncode, stderr

    def await_cause(self, exit_code: int = 0) -> Cause:
        """Return the cause of the ABORT that has to be the last word."""
        last, code, stderr = self.await_end()
        assert isinstance(last, Abort) and last.gen == GEN and last.cause is not None, last
        assert code == exit_code
        assert (stderr == "") == (exit_code == 0), stderr
        return last.cause

    def read_back(self) -> Contents:
        """Return what the segment holds."""
        start = PREAMBLE_BYTES
        (length,) = struct.unpack("<Q", os.pread(self.segment_fd, 8, start))
        manifest = decode_manifest(os.pread(self.segment_fd, length, start + 8))
        found = {}
        for tensor in manifest.tensors:
            group = manifest.groups[tensor.group]
            place = data_start(length) + group.offset_bytes
            data = os.pread(self.segment_fd, group.size_bytes, place)
            found[tensor.name] = (tensor.dtype, tensor.shape, data)
        return found


@contextlib.contextmanager
def started(command: list[str] | None = None) -> Iterator[Played]:
    """Start a loader, or `command` with the fd appended."""
    ours, theirs = pair()
    ours.settimeout(PATIENCE_S)
    fd = theirs.fileno()
    process = subprocess.Popen(
        [*command, str(fd)] if command else loader.command(fd),
        env=ENVIRONMENT,
        pass_fds=(fd,),
        # Whatever started the tests may have made it deaf to SIGINT, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    theirs.close()
    played = Played(Channel(ours), process)
    try:
        yield played
    finally:
        process.kill()
        process.communicate()
        played.channel.close()
        if played.segment_fd >= 0:
            os.close(played.segment_fd)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = open_source(path)
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file(TENSORS, path)
    return path


def expected(tensors: dict[str, np.ndarray]) -> Contents:
    names = {"f4": "F32", "i8": "I64", "f2": "F16", "u1": "U8"}
    return {
        name: (names[array.dtype.str[1:]], array.shape, array.tobytes())
        for name, array in tensors.items()
    }


def fill(path: Path, command: list[str] | None = None) -> tuple[Played, int, str]:
    """Load `path` to the end; return the talk, and the exit code and stderr."""
    with started(command) as played, opened(path) as source_fd:
        played.fetch(source_fd)
        reserve = played.await_reserve()
        played.give_space(reserve.size_bytes)
        last, code, stderr = played.await_end()
        assert isinstance(last, Commit), last
        played.found = played.read_back()
        return played, code, stderr


# --- good files ---------------------------------------------------------------------------------


def test_a_file_fills_the_segment_it_asked_for(checkpoint):
    """RESERVE, PROGRESS, COMMIT, exit 0, nothing on stderr; every tensor's bytes are the file's."""
    with started() as played, opened(checkpoint) as source_fd:
        played.fetch(source_fd)
        reserve = played.await_reserve()
        played.give_space(reserve.size_bytes)
        last, code, stderr = played.await_end()
        assert (last, code, stderr) == (Commit(GEN), 0, "")
        assert played.said[1:] == [Progress(GEN, 4021, 4021), Commit(GEN)]
        assert played.read_back() == expected(TENSORS)
        (length,) = struct.unpack("<Q", os.pread(played.segment_fd, 8, PREAMBLE_BYTES))
        assert reserve.size_bytes == segment_bytes(length, 8 + 56 + 4000 + 32 + 13)
        assert os.fstat(played.segment_fd).st_size == reserve.size_bytes
        # The preamble is the coordinator's, and nothing of the loader's keeps the seal off.
        assert os.pread(played.segment_fd, PREAMBLE_BYTES, 0) == bytes(4096)


def test_a_file_of_several_steps_arrives_whole(tmp_path):
    """Longer than two steps, with a step's end inside a tensor."""
    block = np.random.default_rng(7).integers(0, 256, 1 << 20, dtype=np.uint8)
    tensors = {"x": np.tile(block, 69), "y": np.arange(5, dtype="u1")}
    safetensors.numpy.save_file(tensors, tmp_path / "big")
    played, code, stderr = fill(tmp_path / "big")
    assert (code, stderr) == (0, "")
    assert played.found == expected(tensors)


def test_the_name_does_not_matter_the_content_does(checkpoint):
    """A .safetensors file under the name of a pickle is read."""
    renamed = checkpoint.with_name("pytorch_model.bin")
    checkpoint.rename(renamed)
    played, code, _ = fill(renamed)
    assert code == 0 and played.found == expected(TENSORS)


def test_a_file_without_tensors_is_committed(tmp_path):
    (tmp_path / "none").write_bytes(struct.pack("<Q", 2) + b"{}")
    played, code, _ = fill(tmp_path / "none")
    assert code == 0 and played.said[-2:] == [Progress(GEN, 0, 0), Commit(GEN)]


def test_a_file_replaced_by_renaming_is_no_change(checkpoint, tmp_path):
    """The way in which checkpoints ought to be replaced: the old one is read to its end."""
    newer = tmp_path / "newer"
    newer.write_bytes(b"something else")
    with started() as played, opened(checkpoint) as source_fd:
        played.fetch(source_fd)
        reserve = played.await_reserve()
        newer.rename(checkpoint)
        played.give_space(reserve.size_bytes)
        assert played.await_end() == (Commit(GEN), 0, "")
        assert played.read_back() == expected(TENSORS)


UNREADABLE = """
import errno, os, sys
sys.argv = sys.argv[:1] + sys.argv[2:]
def refuse(*_):
    raise OSError(errno.EIO, os.strerror(errno.EIO))
os.preadv = refuse
from coordinator import loader, private_memory
sys.exit(loader.main(sys.argv))
"""

NOTES_ADVICE = """
import os, sys
sys.argv = sys.argv[:1] + sys.argv[2:]
os.posix_fadvise = lambda fd, *what: os.write(2, b"%d %d %d\\n" % what)
from coordinator import loader, private_memory
sys.exit(loader.main(sys.argv))
"""


def test_the_disk_is_at_work_while_the_segment_gets_its_pages(tmp_path):
    """What is to be copied first is asked for before SPACE comes."""
    path, size = tmp_path / "a", 1_000_000
    safetensors.numpy.save_file({"a": np.zeros(size, dtype="u1")}, path)
    with started([sys.executable, "-c", NOTES_ADVICE, "-"]) as played, opened(path) as source_fd:
        played.fetch(source_fd)
        reserve = played.await_reserve()
        assert played.process.stderr is not None
        asked = played.process.stderr.readline().split()
        assert asked == [str(path.stat().st_size - size), str(size), str(os.POSIX_FADV_WILLNEED)]
        played.give_space(reserve.size_bytes)
        assert played.await_end() == (Commit(GEN), 0, "")


# --- bad files ----------------------------------------------------------------------------------


def torch_zip() -> bytes:
    return b"PK\x03\x04\0\0\x08\x08" + bytes(100)


BAD_FILES = {
    "empty": (b"", "source_malformed", "is empty"),
    "short": (b"abc", "source_malformed", "too few"),
    "header cut": (struct.pack("<Q", 100) + b"{" * 9, "source_malformed", "truncated"),
    "no JSON": (struct.pack("<Q", 4) + b"{..}", "source_malformed", "cannot be read"),
    "data cut": (safetensors.numpy.save(TENSORS)[:-1], "source_malformed", "truncated"),
    "data added": (safetensors.numpy.save(TENSORS) + b"x", "source_malformed", "at its end"),
    "zip": (torch_zip(), "source_malformed", "a zip archive, as torch.save writes it, but damaged"),
    "pickle": (b"\x80\x04\x95" + bytes(50), "source_unsupported", "pickle"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_given_back_with_its_cause(tmp_path, case):
    """ABORT before anything was reserved, exit 0 (the loader did its work), clean stderr."""
    data, code, text = BAD_FILES[case]
    (tmp_path / "model.safetensors").write_bytes(data)
    with started() as played, opened(tmp_path / "model.safetensors") as source_fd:
        played.fetch(source_fd, "nice/model.safetensors")
        cause = played.await_cause()
        assert (cause.code, cause.source) == (code, "nice/model.safetensors")
        assert text in cause.message and cause.remedy
        assert len(played.said) == 1


def pipe_end() -> int:
    read, write = os.pipe()
    os.close(write)
    return read


def socket_end() -> int:
    ours, theirs = pair()
    theirs.close()
    return ours.detach()


def deleted_and_cut(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY)
    path.unlink()
    os.truncate(f"/proc/self/fd/{fd}", 20)
    return fd


ODD_FDS: dict[str, tuple[Callable[[Path], int], str, str]] = {
    "directory": (lambda p: os.open(p.parent, os.O_RDONLY), "source_not_opened", "a directory"),
    "path": (lambda p: os.open(p, os.O_PATH), "source_not_opened", "not opened for reading"),
    "path of a directory": (
        lambda p: os.open(p.parent, os.O_PATH),
        "source_not_opened",
        "a directory",
    ),
    "write only": (lambda p: os.open(p, os.O_WRONLY), "source_not_opened", "for reading"),
    "pipe": (lambda p: pipe_end(), "source_not_opened", "not a regular file"),
    "socket": (lambda p: socket_end(), "source_not_opened", "not a regular file"),
    "device": (
        lambda p: os.open("/dev/zero", os.O_RDONLY),
        "source_not_opened",
        "not a regular file",
    ),
    "eventfd": (lambda p: os.eventfd(1), "source_not_opened", "not a regular file"),
    "memfd": (lambda p: os.memfd_create("empty"), "source_malformed", "is empty"),
    "memory": (lambda p: os.open("/proc/self/mem", os.O_RDONLY), "source_malformed", "is empty"),
    "namespace": (lambda p: os.open("/proc/self/ns/mnt", os.O_RDONLY), "source_", ""),
    "pidfd": (lambda p: os.pidfd_open(os.getpid()), "source_", ""),
    "kernel file": (
        lambda p: os.open("/sys/kernel/mm/transparent_hugepage/enabled", os.O_RDONLY),
        "source_",
        "",
    ),
    "deleted and cut": (deleted_and_cut, "source_malformed", "truncated"),
}


@pytest.mark.parametrize("case", ODD_FDS)
def test_an_fd_of_anything_else_is_given_back_with_its_cause(checkpoint, case):
    """Whatever a peer sends as its source: the source's fault, exit 0, no traceback."""
    make, code, text = ODD_FDS[case]
    try:
        fd = make(checkpoint)
    except FileNotFoundError:
        pytest.skip("this system has no such thing")
    with started() as played:
        played.fetch(fd)
        os.close(fd)
        cause = played.await_cause()
        assert cause.code.startswith(code) and text in cause.message, cause
        assert cause.source == "a.safetensors" and cause.remedy
        assert len(played.said) == 1


def test_a_source_that_cannot_be_read_is_the_sources_fault(checkpoint):
    """Its loader did its work: exit 0, and nothing on stderr."""
    command = [sys.executable, "-c", UNREADABLE, "-"]
    with started(command) as played, opened(checkpoint) as source_fd:
        played.fetch(source_fd)
        cause = played.await_cause()
        assert cause.code == "source" and "reading at byte 0 failed" in cause.message


LOADS_AND_SAYS_WHAT_IT_TOOK = """
import sys
from coordinator import loader, private_memory
code = loader.main(sys.argv)
(peak,) = (line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:"))
sys.exit(f"{code} {peak}")
"""
"""Of its own memory: what wait4 tells begins with that of the process that forked it."""


def test_a_header_made_to_take_memory_is_refused(tmp_path):
    """28 MB of nested nothing would take 0.8 GB; the loader ends at its limit, with the cause."""
    header = b'{"__metadata__":[' + b",".join([b"{}"] * 9_500_000) + b"]}"
    (tmp_path / "a").write_bytes(struct.pack("<Q", len(header)) + header)
    program = [sys.executable, "-c", LOADS_AND_SAYS_WHAT_IT_TOOK]
    with started(program) as played, opened(tmp_path / "a") as source_fd:
        played.fetch(source_fd)
        message = played.next()
        assert isinstance(message, Abort) and message.cause is not None
        assert message.cause.code == "source_unsupported" and "memory" in message.cause.message
        assert played.process.stderr is not None
        code, peak_kib = played.process.stderr.readline().split()
    assert int(code) == 0
    assert (
        2 * len(header)
        < int(peak_kib) * 1024
        < private_memory.MEMORY_LIMIT_BYTES + 64 * 1024 * 1024
    )


def touched(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")


def grown(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def grown_secretly(path: Path) -> None:
    before = path.stat()
    grown(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def shrunk(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 20)


def cut_before_the_data(path: Path) -> None:
    os.truncate(path, 10)


def test_a_source_that_changed_since_it_was_asked_for_is_refused(checkpoint):
    """Its bytes would be held under the fingerprint of the old ones."""
    with started() as played, opened(checkpoint) as source_fd:
        stale = fingerprint([os.fstat(source_fd)])
        touched(checkpoint)
        played.channel.send(encode(Fetch(GEN, KEY, "a.safetensors", stale)), [source_fd])
        assert played.await_cause().code == "source_changed"


@pytest.mark.parametrize("change", [touched, grown, grown_secretly, shrunk, cut_before_the_data])
def test_a_source_that_changes_while_it_is_read_is_refused(checkpoint, change):
    """Changed between the header and the last byte: never COMMIT, whatever the change."""
    with started() as played, opened(checkpoint) as source_fd:
        played.fetch(source_fd)
        reserve = played.await_reserve()
        change(checkpoint)
        played.give_space(reserve.size_bytes)
        cause = played.await_cause()
        assert cause.code == "source_changed" and cause.source == "a.safetensors"
        assert not any(isinstance(message, Commit) for message in played.said)


# --- its own faults -----------------------------------------------------------------------------


def test_an_unexpected_failure_is_told_and_logged(checkpoint, tmp_path):
    """Here a segment that cannot be written: ABORT with fill_failed, exit 1, a trace on stderr."""
    (tmp_path / "sink").write_bytes(bytes(100_000))
    with started() as played, opened(checkpoint) as source_fd, opened(tmp_path / "sink") as sink_fd:
        played.fetch(source_fd)
        played.await_reserve()
        played.channel.send(encode(Space(GEN)), [sink_fd])
        last, code, stderr = played.await_end()
        assert isinstance(last, Abort) and last.cause is not None
        assert last.cause.code == "fill_failed" and "OSError" in last.cause.message
        assert code == 1 and "Traceback" in stderr


@pytest.mark.parametrize(
    "frame",
    [b"\xc1", encode(Space(GEN)), encode(Fetch(GEN, KEY, "no fd", Fingerprint("file:")))],
    ids=repr,
)
def test_a_coordinator_that_talks_nonsense_ends_it(frame, checkpoint):
    """Nothing was fetched, so there is nothing to give back: exit 1, and stderr says why."""
    with started() as played, opened(checkpoint) as source_fd:
        played.channel.send(frame, [] if b"no fd" in frame else [source_fd])
        assert played.next() is None
        _, stderr = played.process.communicate(timeout=PATIENCE_S)
        assert played.process.returncode == 1 and "ProtocolViolation" in stderr


# --- how it ends --------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["before FETCH", "before SPACE"])
def test_it_ends_when_the_coordinator_closes(checkpoint, stage):
    """End of file ends it at once and silently: nobody is there to be told."""
    with started() as played, opened(checkpoint) as source_fd:
        if stage == "before SPACE":
            played.fetch(source_fd)
            played.await_reserve()
        played.channel.close()
        _, stderr = played.process.communicate(timeout=PATIENCE_S)
        assert (played.process.returncode, stderr) == (1, "")


def test_it_ends_when_progress_cannot_be_sent(checkpoint):
    """SPACE arrived and then the coordinator went: the next send notices."""
    with started() as played, opened(checkpoint) as source_fd:
        played.fetch(source_fd)
        reserve = played.await_reserve()
        os.kill(played.process.pid, signal.SIGSTOP)
        played.give_space(reserve.size_bytes)
        played.channel.close()
        os.kill(played.process.pid, signal.SIGCONT)
        _, stderr = played.process.communicate(timeout=PATIENCE_S)
        assert (played.process.returncode, stderr) == (1, "")


def test_killed_it_leaves_end_of_file_and_no_word(checkpoint):
    with started() as played, opened(checkpoint) as source_fd:
        played.fetch(source_fd)
        played.await_reserve()
        played.process.kill()
        assert played.next() is None
        assert played.process.wait(timeout=PATIENCE_S) == -signal.SIGKILL


def test_it_volunteers_and_outlives_ctrl_c(checkpoint):
    """First for the out-of-memory killer; SIGINT to the terminal's group does not end a fill."""
    with started() as played, opened(checkpoint) as source_fd:
        played.fetch(source_fd)
        reserve = played.await_reserve()
        assert Path(f"/proc/{played.process.pid}/oom_score_adj").read_text() == "1000\n"
        played.process.send_signal(signal.SIGINT)
        played.give_space(reserve.size_bytes)
        assert played.await_end() == (Commit(GEN), 0, "")


# --- what it imports, what it counts ------------------------------------------------------------


IMPORTS = """
import runpy, sys
try:
    runpy.run_module("coordinator.loader", run_name="__main__")
except IndexError:
    print(*sys.modules)  # it was told no fd
"""


def test_it_imports_little():
    """It starts for every file, so nothing heavy, and never torch."""
    command = [sys.executable, "-c", IMPORTS]
    run = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    heavy = {"torch", "numpy", "safetensors", "asyncio", "logging", "subprocess", "psutil", "typer"}
    # Of standard ones those that take as long as all of ours together.
    heavy |= {"dataclasses", "inspect", "typing_extensions"}
    modules = set(run.stdout.split())
    assert "coordinator.pump" in modules and heavy & modules == set()


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_progress_comes_at_most_every_quarter_second_and_at_the_end():
    clock = Clock()
    reports: list[tuple[int, int]] = []
    meter = Meter(100, lambda done, total: reports.append((done, total)), clock)
    for now_s, size in ((100.0, 10), (100.24, 10), (100.26, 10), (100.5, 10), (100.52, 10)):
        clock.now_s = now_s
        meter.add(size)
    meter.finish()
    assert reports == [(30, 100), (50, 100), (50, 100)]


def test_a_report_that_fails_stops_the_fill():
    """The meter hides nothing: it doubles as the look at whether the coordinator lives."""

    def gone(done: int, total: int) -> None:
        raise ConnectionLost("gone")

    clock = Clock()
    meter = Meter(10, gone, clock)
    clock.now_s += 1
    with pytest.raises(ConnectionLost):
        meter.add(1)


REWRITES = """
import os, sys
sys.argv = sys.argv[:1] + sys.argv[2:]
from coordinator import formats, loader
read = formats._read_table
def rewritten(file, number):
    os.truncate(f"/proc/self/fd/{file.fd}", 20)
    return read(file, number)
formats._read_table = rewritten
sys.exit(loader.main(sys.argv))
"""


def test_a_file_that_changes_while_its_header_is_read_is_not_called_damaged(checkpoint):
    with started([sys.executable, "-c", REWRITES, "-"]) as played, opened(checkpoint) as source_fd:
        played.fetch(source_fd)
        abort, code, said = played.await_end()
    assert isinstance(abort, Abort) and abort.cause is not None
    assert (abort.cause.code, code, said) == ("source_changed", 0, "")
