"""The backing child: real pages, or a refusal that comes before the out-of-memory killer does."""

import ast
import contextlib
import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coordinator import backing, huge_backing, huge_map
from coordinator.backing import (
    EXIT_BACKED,
    EXIT_NO_HEADROOM,
    EXIT_NO_MEMORY,
    EXIT_PARENT_GONE,
    EXIT_REFUSED,
    EXIT_USAGE,
    HUGE_PAGE_BYTES,
    STEP_BYTES,
    command,
    huge_bytes,
    reason,
)
from gpu_worker.mapping import map_segment, unmap_range
from shm_store import layout, segment
from shm_store.segment import backed_bytes
from tests import huge_pages

pytestmark = pytest.mark.process

MIB = 1 << 20
PATIENCE_S = 30


@pytest.fixture
def segment_fd() -> Iterator[int]:
    fd = os.memfd_create("weight-cache:backing", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    yield fd
    os.close(fd)


@pytest.fixture(params=[False, True], ids=["small", "huge"])
def huge(request) -> bool:
    """What the child is to do, where both have to come to the same."""
    if request.param:
        huge_pages.require()
    return request.param


def run_child(
    fd: int, size_bytes: int, before: Callable[[], None] | None = None, huge: bool = True
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(fd, size_bytes, huge),
        pass_fds=(fd,),
        preexec_fn=before,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@contextlib.contextmanager
def running(
    fd: int, size_bytes: int, before: Callable[[], None] | None = None, huge: bool = True
) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        command(fd, size_bytes, huge),
        pass_fds=(fd,),
        preexec_fn=before,
        stdout=subprocess.DEVNULL,
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
def test_every_page_is_there_and_the_size_is_right(segment_fd, size_bytes, huge):
    """Kernel truth: blocks and size of the memfd, on both sides of a step's end."""
    run = run_child(segment_fd, size_bytes, huge=huge)
    assert (run.returncode, run.stderr) == (EXIT_BACKED, "")
    assert os.fstat(segment_fd).st_size == size_bytes
    assert backed_bytes(segment_fd) == -(-size_bytes // 4096) * 4096


def test_it_imports_nothing_that_costs():
    """It starts for every load, without site-packages and, if that is small, the project."""
    tree = ast.parse(Path(backing.__file__).read_text())
    plain = [node for node in tree.body if isinstance(node, ast.Import)]
    assert {alias.name for node in plain for alias in node.names} == {"os", "sys"}
    assert not [node for node in tree.body if isinstance(node, ast.ImportFrom)]


def test_it_volunteers_for_the_killer(segment_fd):
    with running(segment_fd, 512 * MIB) as child, held(child.pid, segment_fd):
        assert Path(f"/proc/{child.pid}/oom_score_adj").read_text() == "1000\n"


# --- in huge pages ------------------------------------------------------------------------------

HUGE_STEP_BYTES = huge_backing.STEP_BYTES
LARGE_BYTES = STEP_BYTES + HUGE_STEP_BYTES + HUGE_PAGE_BYTES

OTHERWISE = """
import os, sys
sys.path.append(sys.argv.pop(1))
from coordinator import backing
{}
code = backing.main(sys.argv)
{}
sys.exit(code)
"""
"""The child, where something is otherwise before or after its work."""


PATIENT = "import time; time.monotonic = lambda: 0.0\n"
"""However loaded the machine is."""


def otherwise(fd: int, before: str, after: str, size_bytes: int = LARGE_BYTES) -> list[str]:
    python, isolated, bare, script, *arguments = command(fd, size_bytes, True)
    root = str(Path(script).parent.parent)
    return [python, isolated, bare, "-c", OTHERWISE.format(before, after), root, *arguments]


def run_otherwise(fd: int, before: str, after: str = "", size_bytes: int = LARGE_BYTES) -> str:
    """What it says; it must end with 0, and the segment have exactly the pages it is to have."""
    line = otherwise(fd, before, after, size_bytes)
    run = subprocess.run(line, pass_fds=(fd,), capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (EXIT_BACKED, "")
    assert os.fstat(fd).st_size == backed_bytes(fd) == size_bytes
    return run.stdout


def huge_when_read(fd: int, size_bytes: int) -> int:
    """How much is in huge pages, in a map as a worker's of which every page was read."""
    buffer = map_segment(fd, size_bytes)
    for start in range(0, size_bytes, 4096):
        assert buffer[start] == 0
    mapped, in_huge = huge_pages.mapped_bytes(os.getpid(), "backing")
    assert mapped == size_bytes
    unmap_range(ctypes.addressof(buffer), size_bytes)
    return in_huge


def test_the_size_of_a_huge_page_is_the_stores():
    assert HUGE_PAGE_BYTES == huge_map.HUGE_PAGE_BYTES == layout.HUGE_PAGE_BYTES


def test_all_of_a_large_segment_is_in_huge_pages_from_the_start(segment_fd):
    """Kernel truth, by the map of a reader, and no write to it changes that."""
    huge_pages.require()
    assert huge_bytes(run_otherwise(segment_fd, PATIENT)) == LARGE_BYTES
    os.pwrite(segment_fd, bytes(MIB), 3 * MIB)
    segment.freeze(segment_fd, "it")
    assert huge_when_read(segment_fd, LARGE_BYTES) == LARGE_BYTES


def test_what_is_not_to_be_huge_is_small_and_said_to_be(segment_fd):
    assert run_child(segment_fd, LARGE_BYTES, huge=False).stdout == "0\n"
    segment.freeze(segment_fd, "it")
    assert huge_when_read(segment_fd, LARGE_BYTES) == 0


def test_the_rest_that_is_less_than_a_huge_page_is_small(segment_fd):
    huge_pages.require()
    size_bytes = LARGE_BYTES + 3 * 4096
    said = run_otherwise(segment_fd, PATIENT, size_bytes=size_bytes)
    assert huge_bytes(said) == LARGE_BYTES


def test_a_small_segment_does_not_pay_for_it(segment_fd):
    """`ctypes` is a quarter of what the child takes for one."""
    says = 'print("ctypes" in sys.modules)'
    small = run_otherwise(segment_fd, "", says, HUGE_PAGE_BYTES - 4096)
    assert small == "0\nFalse\n"
    assert run_otherwise(segment_fd, "", says, HUGE_PAGE_BYTES).endswith("True\n")


FAILS = """
from coordinator import huge_map
collapse, codes, calls = huge_map.collapse, {codes}, []
def fails(address, size_bytes):
    calls.append(size_bytes)
    half = size_bytes // 2 // backing.HUGE_PAGE_BYTES * backing.HUGE_PAGE_BYTES
    code = codes.pop(0) if codes else 0
    collapse(address, half if code else size_bytes)
    return code
huge_map.collapse = fails
"""
"""Some calls collapse a half, and say an errno."""


@pytest.mark.parametrize("code", [11, 12, 16, 22], ids=["EAGAIN", "ENOMEM", "EBUSY", "EINVAL"])
def test_where_the_kernel_refuses_all_is_backed_with_small_pages(segment_fd, code):
    """After some tries it is asked no more."""
    codes = [code] * 100
    said = run_otherwise(segment_fd, PATIENT + FAILS.format(codes=codes), "print(len(calls))")
    assert said == f"0\n{huge_backing.FAILURES}\n"


def test_where_it_fails_once_the_rest_is_huge(segment_fd):
    huge_pages.require()
    said = run_otherwise(segment_fd, PATIENT + FAILS.format(codes=[0, 11]))
    assert huge_bytes(said) == LARGE_BYTES - HUGE_STEP_BYTES
    segment.freeze(segment_fd, "it")
    assert huge_when_read(segment_fd, LARGE_BYTES) == LARGE_BYTES - HUGE_STEP_BYTES // 2


@pytest.mark.parametrize("s_per_step", [0.055, 1.0], ids=["quick", "slow"])
def test_where_it_is_slow_the_rest_is_small(segment_fd, s_per_step):
    """A clock that goes on by so much each time that it is looked at."""
    huge_pages.require()
    clock = f"import itertools, time; ticks = itertools.count(step={s_per_step})\n"
    said = run_otherwise(segment_fd, clock + "time.monotonic = lambda: next(ticks)")
    assert huge_bytes(said) == (LARGE_BYTES if s_per_step < 0.1 else HUGE_STEP_BYTES)


@pytest.mark.parametrize(
    "lacks",
    [
        'sys.modules["ctypes"] = None',
        "from coordinator import huge_map\n"
        "def refuse(fd, size_bytes): raise OSError(12, 'no map')\n"
        "huge_map.map_file = refuse",
    ],
    ids=["ctypes", "a map"],
)
def test_without_what_it_takes_all_is_small(segment_fd, lacks):
    assert run_otherwise(segment_fd, lacks) == "0\n"


def test_its_map_is_in_nobodys_way(segment_fd):
    """The segment is sealed while the child still has it: as when its memory goes slowly."""
    waits = "sys.stdout.flush(); sys.stdin.read()"
    with subprocess.Popen(
        otherwise(segment_fd, "", waits),
        pass_fds=(segment_fd,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout
        assert child.stdout.readline()
        assert "memfd:weight-cache:backing" in Path(f"/proc/{child.pid}/maps").read_text()
        segment.freeze(segment_fd, "it")


# --- it refuses -----------------------------------------------------------------------------------


def test_the_kernels_refusal_comes_with_its_reason(segment_fd, huge):
    """A file size limit stops it in its second step: the code, one line, and what was given."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (STEP_BYTES, STEP_BYTES))

    run = run_child(segment_fd, 2 * STEP_BYTES, limit, huge)
    assert run.returncode == EXIT_REFUSED
    assert run.stderr == "the kernel gave 64.0 MiB of 128.0 MiB, then: File too large\n"
    assert backed_bytes(segment_fd) == STEP_BYTES


def test_a_full_file_system_is_no_memory(huge):
    """A real full tmpfs: one of 1 MiB, mounted in a namespace of its own."""
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); import backing\n"
        "fd = os.open('/mnt/f', os.O_RDWR | os.O_CREAT)\n"
        "sys.exit(backing.back(fd, 4 << 20, os.getppid(), bool(int(sys.argv[2]))))"
    )
    script = 'mount -t tmpfs -o size=1m none /mnt && exec "$0" -I -S -c "$1" "$2" "$3"'
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
            str(int(huge)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if "unshare" in run.stderr or "mount:" in run.stderr:
        pytest.skip(f"no tmpfs of one's own here: {run.stderr.strip()}")
    assert run.returncode == EXIT_NO_MEMORY
    assert run.stderr == "the kernel gave 0.0 MiB of 4.0 MiB, then: No space left on device\n"


def test_more_than_the_host_has_is_refused_before_it_is_tried(segment_fd, huge):
    """No cgroup is needed to foresee that: nothing is backed, and nobody is killed."""

    def limit() -> None:
        # A child that does try stops here, not when the host is full.
        resource.setrlimit(resource.RLIMIT_FSIZE, (STEP_BYTES, STEP_BYTES))

    run = run_child(segment_fd, 1 << 49, limit, huge)
    assert run.returncode == EXIT_NO_HEADROOM
    assert run.stderr.startswith("536870912.0 MiB needed, ") and " left in this " in run.stderr
    assert backed_bytes(segment_fd) == 0


@pytest.mark.parametrize("arguments", [[], ["1"], ["1", "2", "0", "x"], ["1", "2", "0", "4", "5"]])
def test_wrong_arguments_are_told(arguments):
    run = subprocess.run(
        [sys.executable, "-I", "-S", backing.__file__, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == EXIT_USAGE and run.stderr.startswith("usage: ")


# --- in a cgroup that is smaller than the host --------------------------------------------------


def test_a_load_that_exceeds_the_cgroup_is_refused_not_killed(small_cgroup, segment_fd, huge):
    """Without the look at the headroom the kernel kills it (and could kill another one)."""
    cgroup = small_cgroup(100 * MIB)
    run = run_child(segment_fd, 200 * MIB, cgroup.enter, huge)
    assert run.returncode == EXIT_NO_HEADROOM, (run.returncode, run.stderr)
    assert run.stderr.startswith("200.0 MiB needed, ")
    assert "left in this memory cgroup, of which 32.0 MiB stay free" in run.stderr
    assert (backed_bytes(segment_fd), cgroup.oom_kills) == (0, 0)


def test_a_load_that_fits_the_cgroup_is_backed(small_cgroup, segment_fd, huge):
    cgroup = small_cgroup(100 * MIB)
    run = run_child(segment_fd, 60 * MIB, cgroup.enter, huge)
    assert (run.returncode, run.stderr) == (EXIT_BACKED, "")
    assert backed_bytes(segment_fd) == 60 * MIB


def test_a_load_that_leaves_nothing_to_the_others_is_refused(small_cgroup, segment_fd, huge):
    """It would fit, and the next page that anybody there touches would end in a kill."""
    cgroup = small_cgroup(100 * MIB)
    run = run_child(segment_fd, 80 * MIB, cgroup.enter, huge)
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


def test_headroom_is_looked_at_before_every_step(small_cgroup, segment_fd, huge):
    """The limit falls while it backs: it stops between two steps instead of being killed."""
    cgroup = small_cgroup(1200 * MIB)
    with running(segment_fd, 1024 * MIB, cgroup.enter, huge) as child:
        with held(child.pid, segment_fd):
            cgroup.limit(600 * MIB)
        _, stderr = child.communicate(timeout=PATIENCE_S)
        assert (child.returncode, cgroup.oom_kills) == (EXIT_NO_HEADROOM, 0), stderr
    assert STEP_BYTES <= backed_bytes(segment_fd) < 600 * MIB


# --- its parent ---------------------------------------------------------------------------------


def test_a_child_whose_parent_is_gone_backs_nothing(segment_fd, huge):
    """PARENT_PID is not the one who started it: the coordinator ended before it could look."""
    arguments = command(segment_fd, STEP_BYTES, huge)
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
    command(fd, 1 << 30, True), pass_fds=(fd,), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
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


@pytest.mark.parametrize("said", ["", "0\n", "a warning\n4096\n", "-1"])
def test_what_it_says_besides_is_no_huge_page(said):
    assert huge_bytes(said) == 0


def test_a_long_reason_is_cut():
    assert len(reason(EXIT_NO_HEADROOM, "x" * 10_000)) == 400


def test_a_killed_child_reads_as_the_killers_victim(segment_fd):
    """As the executor sees it, with a real SIGKILL."""
    with running(segment_fd, 512 * MIB) as child:
        with held(child.pid, segment_fd):
            child.kill()
        _, stderr = child.communicate(timeout=PATIENCE_S)
        assert "OOM killer" in reason(child.returncode, stderr)
