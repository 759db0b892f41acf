"""The collapsing child: huge pages where they can be had, a reason where not."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordinator import collapsing
from coordinator.backing import EXIT_BACKED, EXIT_PARENT_GONE, EXIT_USAGE
from coordinator.collapsing import NICE, STEP_BYTES, command, said
from gpu_worker.mapping import map_segment, unmap_range
from shm_store import segment
from shm_store.layout import HUGE_PAGE_BYTES
from tests import huge_pages

pytestmark = pytest.mark.process

MIB = 1 << 20
PATIENCE_S = 30
SIZE_BYTES = STEP_BYTES + 3 * HUGE_PAGE_BYTES

BLIND = """
import sys
sys.path.append(sys.argv.pop(1))
from coordinator import backing, collapsing
backing.shortage = lambda needed_bytes: ""
sys.exit(collapsing.main(sys.argv))
"""
"""A child that does not look at the headroom, as when somebody takes it after the look."""


@pytest.fixture(autouse=True)
def _huge_pages():
    huge_pages.require()


@pytest.fixture
def fd() -> Iterator[int]:
    """A sealed memfd that says on each page which it is."""
    made = os.memfd_create("weight-cache:collapsing", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    segment.write_at(made, b"".join(page(number) for number in range(SIZE_BYTES // 4096)), 0)
    segment.freeze(made, "it")
    yield made
    os.close(made)


def page(number: int) -> bytes:
    return number.to_bytes(8, "little") * 512


def run_child(
    fd: int, size_bytes: int = SIZE_BYTES, before: Callable[[], None] | None = None, blind=False
) -> tuple[int, str]:
    """What it says; it must end with 0 and nothing on stderr."""
    line = command(fd, size_bytes)
    if blind:
        python, isolated, bare, script, *arguments = line
        root = str(Path(script).parent.parent)
        line = [python, isolated, bare, "-c", BLIND, root, *arguments]
    done = subprocess.run(
        line,
        pass_fds=(fd,),
        preexec_fn=before,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (EXIT_BACKED, "")
    told = said(done.stdout)
    assert told is not None
    return told


@contextmanager
def mapped(fd: int) -> Iterator[ctypes.Array[ctypes.c_ubyte]]:
    """A worker's map of it."""
    buffer = map_segment(fd, SIZE_BYTES)
    yield buffer
    unmap_range(ctypes.addressof(buffer), SIZE_BYTES)


def read(buffer) -> list[int]:
    """Touch every page; return what each says that it is."""
    whole = memoryview(buffer).cast("B")
    starts = range(0, SIZE_BYTES, 4096)
    return [int.from_bytes(whole[start : start + 8], "little") for start in starts]


def test_all_of_a_sealed_segment_is_in_huge_pages_with_the_same_bytes(fd):
    """Kernel truth: a worker's map has them though it was made and read before; so has a new one.

    The memory that the segment takes stays the same.
    """
    blocks = os.fstat(fd).st_blocks
    pages = list(range(SIZE_BYTES // 4096))
    with mapped(fd) as earlier:
        assert read(earlier) == pages
        assert huge_pages.mapped_bytes(os.getpid(), "collapsing") == (SIZE_BYTES, 0)
        assert run_child(fd) == (SIZE_BYTES, "")
        assert read(earlier) == pages
        assert huge_pages.mapped_bytes(os.getpid(), "collapsing") == (SIZE_BYTES, SIZE_BYTES)
        with mapped(fd) as later:
            assert read(later) == pages
            both = (2 * SIZE_BYTES, 2 * SIZE_BYTES)
            assert huge_pages.mapped_bytes(os.getpid(), "collapsing") == both
    assert os.fstat(fd).st_blocks == blocks


def test_a_map_keeps_what_was_edited_in_it(fd):
    with mapped(fd) as edited:
        edited[4096 * 3] = 77
        assert run_child(fd) == (SIZE_BYTES, "")
        assert edited[4096 * 3] == 77
        assert read(edited)[4:] == list(range(4, SIZE_BYTES // 4096))


def test_what_is_collapsed_already_is_said_to_be(fd):
    run_child(fd)
    assert run_child(fd) == (SIZE_BYTES, "")


def test_a_pinned_page_keeps_its_2_mib_as_they_are_and_no_others(fd):
    """A page in a pipe is somebody's, as one that a device reads from."""
    ours, theirs = os.pipe()
    offset = HUGE_PAGE_BYTES + 4096 * 5
    if os.splice(fd, theirs, 4096, offset_src=offset) != 4096:
        pytest.skip("this kernel splices no page of a memfd")
    assert run_child(fd) == (SIZE_BYTES - HUGE_PAGE_BYTES, "pages are pinned")
    assert os.read(ours, 4096) == page(offset // 4096)
    assert run_child(fd) == (SIZE_BYTES, "")
    os.close(ours)
    os.close(theirs)


def test_the_rest_of_a_segment_of_other_sizes_stays_as_it_is(fd):
    """None is made like that; but who restates one from elsewhere may have."""
    whole_bytes = HUGE_PAGE_BYTES * 2
    assert run_child(fd, whole_bytes + 4096) == (whole_bytes, "its last part is less than 2 MiB")


def test_it_refuses_before_a_cgroup_is_full(fd, small_cgroup):
    """Some memory stays free there: the look comes before the step."""
    cgroup = small_cgroup(40 * MIB)
    huge_bytes, why = run_child(fd, before=cgroup.enter)
    assert huge_bytes == 0
    assert "left in this memory cgroup" in why
    assert cgroup.oom_kills == 0


def test_a_full_cgroup_is_no_ones_death(fd, small_cgroup):
    """The kernel says EBUSY: what fitted is in huge pages, and nobody is killed."""
    cgroup = small_cgroup(20 * MIB)
    huge_bytes, why = run_child(fd, before=cgroup.enter, blind=True)
    assert 0 < huge_bytes < SIZE_BYTES
    assert why == "this memory cgroup is full"
    assert cgroup.oom_kills == 0
    with mapped(fd) as buffer:
        assert read(buffer) == list(range(SIZE_BYTES // 4096))


def test_it_ends_when_its_parent_is_gone(fd):
    *line, _ = command(fd, SIZE_BYTES)
    done = subprocess.run(
        [*line, str(os.getppid())], pass_fds=(fd,), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (EXIT_PARENT_GONE, "", "")
    with mapped(fd) as buffer:
        read(buffer)
        assert huge_pages.mapped_bytes(os.getpid(), "collapsing") == (SIZE_BYTES, 0)


def test_it_volunteers_for_the_killer_and_stands_back(monkeypatch):
    heard = []
    monkeypatch.setattr("coordinator.backing.volunteer", lambda: heard.append("volunteer"))
    monkeypatch.setattr(os, "nice", heard.append)
    assert collapsing.main(["it", "-1", str(SIZE_BYTES), str(os.getppid())]) == EXIT_BACKED
    assert heard == ["volunteer", NICE]


def test_wrong_arguments_are_refused():
    done = subprocess.run(
        [sys.executable, "-I", "-S", collapsing.__file__, "1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == EXIT_USAGE
    assert done.stderr.startswith("usage: ")


@pytest.mark.parametrize("line", ["", "\n", "what", "-1 why"])
def test_a_line_that_says_nothing_is_none(line):
    assert said(line) is None
