"""The backing child: real pages, or a refusal that comes before the out-of-memory killer does."""

import ast
import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coordinator import backing
from coordinator.backing import (
    EXIT_BACKED,
    EXIT_NO_HEADROOM,
    EXIT_NO_MEMORY,
    EXIT_PARENT_GONE,
    EXIT_REFUSED,
    EXIT_USAGE,
    STEP_BYTES,
    command,
    reason,
)
from shm_store.segment import backed_bytes

pytestmark = pytest.mark.process

MIB = 1 << 20
PATIENCE_S = 30


@pytest.fixture
def segment_fd() -> Iterator[int]:
    fd = os.memfd_create("weight-cache:test", os.MFD_CLOEXEC)
    yield fd
    os.close(fd)


def run_child(
    fd: int, size_bytes: int, before: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(fd, size_bytes),
        pass_fds=(fd,),
        preexec_fn=before,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@contextlib.contextmanager
def running(
    fd: int, size_bytes: int, before: Callable[[], None] | None = None
) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        command(fd, size_bytes),
        pass_fds=(fd,),
        preexec_fn=before,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


@contextlib.contextmanager
def held(pid: int, fd: int) -> Iterator[int]:
    """Stop a child after its first pages; yield its pidfd; let the child go on."""
    pidfd = os.pidfd_open(pid)
    try:
        while backed_bytes(fd) == 0:
            assert not ended(pidfd, 0), "it ended before it backed anything"
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        try:
            yield pidfd
        finally:
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)
    finally:
        os.close(pidfd)


def ended(pidfd: int, timeout_s: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


# --- it backs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [4096, STEP_BYTES, STEP_BYTES + 4096, 2 * STEP_BYTES + 7])
def test_every_page_is_there_and_the_size_is_right(segment_fd, size_bytes):
    """Kernel truth: blocks and size of the memfd, on both sides of a step's end."""
    run = run_child(segment_fd, size_bytes)
    assert (run.returncode, run.stdout, run.stderr) == (EXIT_BACKED, "", "")
    assert os.fstat(segment_fd).st_size == size_bytes
    assert backed_bytes(segment_fd) == -(-size_bytes // 4096) * 4096


def test_it_imports_nothing_that_costs():
    """It starts for every load, without site-packages and without the project."""
    tree = ast.parse(Path(backing.__file__).read_text())
    plain = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    assert {alias.name for node in plain for alias in node.names} == {"os", "sys"}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]


def test_it_volunteers_for_the_killer(segment_fd):
    with running(segment_fd, 512 * MIB) as child, held(child.pid, segment_fd):
        assert Path(f"/proc/{child.pid}/oom_score_adj").read_text() == "1000\n"


# --- it refuses -----------------------------------------------------------------------------------


def test_the_kernels_refusal_comes_with_its_reason(segment_fd):
    """A file size limit stops it in its second step: the code, one line, and what was given."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (STEP_BYTES, STEP_BYTES))

    run = run_child(segment_fd, 2 * STEP_BYTES, limit)
    assert run.returncode == EXIT_REFUSED
    assert run.stderr == "the kernel gave 64.0 MiB of 128.0 MiB, then: File too large\n"
    assert backed_bytes(segment_fd) == STEP_BYTES


def test_a_full_file_system_is_no_memory():
    """A real full tmpfs: one of 1 MiB, mounted in a namespace of its own."""
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); import backing\n"
        "fd = os.open('/mnt/f', os.O_RDWR | os.O_CREAT)\n"
        "sys.exit(backing.back(fd, 4 << 20, os.getppid()))"
    )
    script = 'mount -t tmpfs -o size=1m none /mnt && exec "$0" -I -S -c "$1" "$2"'
    run = subprocess.run(
        [
            "unshare",
            "-m",
            "sh",
            "-c",
            script,
            sys.executable,
            code,
            str(Path(backing.__file__).parent),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if "unshare" in run.stderr or "mount:" in run.stderr:
        pytest.skip(f"no tmpfs of one's own here: {run.stderr.strip()}")
    assert run.returncode == EXIT_NO_MEMORY
    assert run.stderr == "the kernel gave 0.0 MiB of 4.0 MiB, then: No space left on device\n"


def test_more_than_the_host_has_is_refused_before_it_is_tried(segment_fd):
    """No cgroup is needed to foresee that: nothing is backed, and nobody is killed."""

    def limit() -> None:
        # A child that does try stops here, not when the host is full.
        resource.setrlimit(resource.RLIMIT_FSIZE, (STEP_BYTES, STEP_BYTES))

    run = run_child(segment_fd, 1 << 49, limit)
    assert run.returncode == EXIT_NO_HEADROOM
    assert run.stderr.startswith("536870912.0 MiB needed, ") and " left in this " in run.stderr
    assert backed_bytes(segment_fd) == 0


@pytest.mark.parametrize("arguments", [[], ["1"], ["1", "2", "x"], ["1", "2", "3", "4"]])
def test_wrong_arguments_are_told(arguments):
    run = subprocess.run(
        [sys.executable, "-I", "-S", backing.__file__, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == EXIT_USAGE and run.stderr.startswith("usage: ")


# --- in a cgroup that is smaller than the host --------------------------------------------------


def test_a_load_that_exceeds_the_cgroup_is_refused_not_killed(small_cgroup, segment_fd):
    """Without the look at the headroom the kernel kills it (and could kill another one)."""
    cgroup = small_cgroup(100 * MIB)
    run = run_child(segment_fd, 200 * MIB, cgroup.enter)
    assert run.returncode == EXIT_NO_HEADROOM, (run.returncode, run.stderr)
    assert run.stderr.startswith("200.0 MiB needed, ")
    assert "left in this memory cgroup, of which 32.0 MiB stay free" in run.stderr
    assert (backed_bytes(segment_fd), cgroup.oom_kills) == (0, 0)


def test_a_load_that_fits_the_cgroup_is_backed(small_cgroup, segment_fd):
    cgroup = small_cgroup(100 * MIB)
    run = run_child(segment_fd, 60 * MIB, cgroup.enter)
    assert (run.returncode, run.stderr) == (EXIT_BACKED, "")
    assert backed_bytes(segment_fd) == 60 * MIB


def test_a_load_that_leaves_nothing_to_the_others_is_refused(small_cgroup, segment_fd):
    """It would fit, and the next page that anybody there touches would end in a kill."""
    cgroup = small_cgroup(100 * MIB)
    run = run_child(segment_fd, 80 * MIB, cgroup.enter)
    assert (run.returncode, backed_bytes(segment_fd)) == (EXIT_NO_HEADROOM, 0)


def test_the_cgroups_other_memory_counts(small_cgroup, segment_fd):
    """80 MiB of another segment leave too little of 160 MiB for 80 more and the spare."""
    cgroup = small_cgroup(160 * MIB)
    other = os.memfd_create("other")
    try:
        assert run_child(other, 80 * MIB, cgroup.enter).returncode == EXIT_BACKED
        assert run_child(segment_fd, 80 * MIB, cgroup.enter).returncode == EXIT_NO_HEADROOM
        assert run_child(segment_fd, 40 * MIB, cgroup.enter).returncode == EXIT_BACKED
        assert cgroup.oom_kills == 0
    finally:
        os.close(other)


def test_pages_of_a_file_that_was_read_twice_make_room(small_cgroup, segment_fd, tmp_path):
    """A second load of the same file must not be refused because the first one cached it."""
    cgroup = small_cgroup(160 * MIB)
    path = tmp_path / "checkpoint"
    with path.open("wb") as file:
        for _ in range(90):
            file.write(os.urandom(MIB))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    read_twice = (
        "import sys\nfor _ in range(3):\n with open(sys.argv[1], 'rb', 0) as f:\n"
        "  while f.read(1 << 20): pass"
    )
    subprocess.run(
        [sys.executable, "-I", "-S", "-c", read_twice, path], preexec_fn=cgroup.enter, check=True
    )
    assert cgroup.active_file_bytes > 80 * MIB
    run = run_child(segment_fd, 100 * MIB, cgroup.enter)
    assert (run.returncode, run.stderr, cgroup.oom_kills) == (EXIT_BACKED, "", 0)
    assert backed_bytes(segment_fd) == 100 * MIB


def test_headroom_is_looked_at_before_every_step(small_cgroup, segment_fd):
    """The limit falls while it backs: it stops between two steps instead of being killed."""
    cgroup = small_cgroup(1200 * MIB)
    with running(segment_fd, 1024 * MIB, cgroup.enter) as child:
        with held(child.pid, segment_fd):
            cgroup.limit(600 * MIB)
        _, stderr = child.communicate(timeout=PATIENCE_S)
        assert (child.returncode, cgroup.oom_kills) == (EXIT_NO_HEADROOM, 0), stderr
    assert STEP_BYTES <= backed_bytes(segment_fd) < 600 * MIB


# --- its parent ---------------------------------------------------------------------------------


def test_a_child_whose_parent_is_gone_backs_nothing(segment_fd):
    """PARENT_PID is not the one who started it: the coordinator ended before it could look."""
    arguments = command(segment_fd, STEP_BYTES)
    arguments[-1] = "1"
    run = subprocess.run(
        arguments, pass_fds=(segment_fd,), capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (EXIT_PARENT_GONE, "the coordinator is gone\n")
    assert backed_bytes(segment_fd) == 0


PARENT = """
import subprocess, sys
from coordinator.backing import command
fd = int(sys.argv[1])
child = subprocess.Popen(
    command(fd, 1 << 30), pass_fds=(fd,), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
)
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_parent_that_dies_stops_it_at_the_next_step(segment_fd):
    """Killed in the middle: it leaves within a step instead of taking a gigabyte for nobody."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(segment_fd)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        pass_fds=(segment_fd,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        pidfd = os.pidfd_open(pid)
        with held(pid, segment_fd):
            parent.kill()
            parent.wait()
        assert ended(pidfd, PATIENCE_S)
        os.close(pidfd)
    finally:
        parent.kill()
        parent.communicate()
    assert STEP_BYTES <= backed_bytes(segment_fd) < 1 << 30


# --- what the coordinator says of it ------------------------------------------------------------


@pytest.mark.parametrize(
    ("returncode", "stderr", "text"),
    [
        (-9, "", "the backing child was killed by SIGKILL, probably by the kernel's OOM killer"),
        (-15, "", "the backing child was killed by signal 15"),
        (EXIT_NO_MEMORY, "the kernel gave nothing\n", "the kernel gave nothing"),
        (EXIT_NO_HEADROOM, "9 MiB needed\n", "9 MiB needed"),
        (EXIT_NO_HEADROOM, "", "the backing child ended with exit code 4"),
        (
            1,
            "Traceback\n  x\nOSError: no\n",
            "the backing child ended with exit code 1: OSError: no",
        ),
    ],
)
def test_the_reason_is_one_phrase(returncode, stderr, text):
    assert reason(returncode, stderr) == text


def test_a_long_reason_is_cut():
    assert len(reason(EXIT_NO_HEADROOM, "x" * 10_000)) == 400


def test_a_killed_child_reads_as_the_killers_victim(segment_fd):
    """As the executor sees it, with a real SIGKILL."""
    with running(segment_fd, 512 * MIB) as child:
        with held(child.pid, segment_fd):
            child.kill()
        _, stderr = child.communicate(timeout=PATIENCE_S)
        assert "OOM killer" in reason(child.returncode, stderr)
