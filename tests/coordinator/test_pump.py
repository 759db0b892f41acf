"""The pump: every byte where it belongs, however many threads; and how each fault ends it."""

import errno
import os
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator import huge_backing, pump
from coordinator.checkpoint import Copy
from coordinator.pump import Meter, Pump, ReadAhead
from shm_store.errors import ConnectionLost, SourceChanged, SourceError
from shm_store.segment import create, freeze, write_at

DATA_START = 4096 + 13
COUNT = 300


THREADS_BEFORE = 1
"""How many there are anyway: other tests may have left some in this process."""


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch) -> None:
    """Enough stretches for every thread, of several buffers each, in a few hundred KiB."""
    monkeypatch.setitem(globals(), "THREADS_BEFORE", threading.active_count())
    monkeypatch.setattr(pump, "BUFFER_BYTES", 1000)
    monkeypatch.setattr(pump, "STRETCH_BYTES", 3500)


@pytest.fixture
def segment_fd() -> Iterator[int]:
    fd = create("pump")
    os.posix_fallocate(fd, 0, 2 << 20)
    yield fd
    os.close(fd)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[list[tuple[int, str]]]:
    """Three opened files of random bytes."""
    opened = []
    for number in range(3):
        path = tmp_path / f"file-{number}"
        path.write_bytes(random.Random(number).randbytes(200_000 + 777 * number))
        opened.append((os.open(path, os.O_RDONLY), path.name))
    yield opened
    for fd, _ in opened:
        os.close(fd)


def scattered(count: int = COUNT) -> list[Copy]:
    """Copies of odd sizes, some of none and some of many buffers, out of order in their files."""
    lots = random.Random(5)
    copies, offset = [], 0
    for number in range(count):
        size = lots.choice([0, 1, 7, 999, 1000, 1001, lots.randrange(3000), 12_345])
        source = lots.randrange(200_000 - size)
        copies.append(Copy(source, offset, size, number % 3))
        offset += size + lots.randrange(64)
    return copies


def meter_of(copies: list[Copy], report=lambda done, total: None) -> Meter:
    return Meter(sum(copy.size_bytes for copy in copies), report)


@pytest.mark.parametrize("threads", [1, 2, 4, 16])
def test_every_byte_is_where_it_belongs_and_nothing_else(monkeypatch, files, segment_fd, threads):
    """Odd sizes and offsets, several files, and the bytes between the copies stay zero."""
    monkeypatch.setattr(pump, "THREADS", threads)
    copies = scattered()
    expected = bytearray(os.fstat(segment_fd).st_size)
    for copy in copies:
        start = DATA_START + copy.data_offset_bytes
        source = os.pread(files[copy.file][0], copy.size_bytes, copy.source_offset_bytes)
        expected[start : start + copy.size_bytes] = source
    reports: list[tuple[int, int]] = []
    meter = meter_of(copies, lambda done, total: reports.append((done, total)))
    Pump(files, segment_fd).copy(iter(copies), DATA_START, meter)
    meter.finish()
    assert os.pread(segment_fd, len(expected), 0) == expected
    assert meter.done_bytes == meter.total_bytes == sum(copy.size_bytes for copy in copies)
    assert reports[-1] == (meter.total_bytes, meter.total_bytes)


def test_several_threads_copy(monkeypatch, files, segment_fd):
    """As many as `THREADS`, and none of them is left. What is small takes one."""
    gate = threading.Barrier(pump.THREADS)
    seen = set()
    read_into = pump.read_into

    def together(*where):
        if threading.current_thread() not in seen:
            seen.add(threading.current_thread())
            gate.wait(10)
        return read_into(*where)

    monkeypatch.setattr(pump, "read_into", together)
    copies, before = scattered(), threading.stack_size(1 << 20)
    Pump(files, segment_fd).copy(copies, DATA_START, meter_of(copies))
    assert threading.stack_size(before) == 1 << 20, "what others start is as it was"
    assert len(seen) == pump.THREADS and threading.active_count() == THREADS_BEFORE
    gate = threading.Barrier(1)
    seen.clear()
    Pump(files, segment_fd).copy([Copy(0, 0, 3500)], DATA_START, Meter(3500, lambda *_: None))
    assert seen == {threading.current_thread()}


def test_without_more_threads_one_copies_all(monkeypatch, files, segment_fd):
    """A limit on threads, or on memory, makes it slower and nothing else."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    copies = scattered()
    meter = meter_of(copies)
    with ReadAhead(files, copies):
        Pump(files, segment_fd).copy(copies, DATA_START, meter)
    assert meter.done_bytes == meter.total_bytes


def failing(monkeypatch, files, segment_fd, kind, report=lambda done, total: None, copies=None):
    """Have the pump fail; return the error, and how many bytes were copied."""
    reports = []

    def noted(done, total):
        reports.append(done)
        report(done, total)

    copies = scattered() if copies is None else copies
    meter = Meter(sum(copy.size_bytes for copy in scattered()), noted)
    with pytest.raises(kind) as caught:
        Pump(files, segment_fd).copy(copies, DATA_START, meter)
    assert threading.active_count() == THREADS_BEFORE
    assert meter.total_bytes not in reports
    return caught.value, meter.done_bytes


def test_a_file_that_ends_early_is_told_by_name_and_place(monkeypatch, files, segment_fd, tmp_path):
    os.truncate(tmp_path / "file-1", 150_000)
    error, _ = failing(monkeypatch, files, segment_fd, SourceChanged)
    found = re.fullmatch(r"file-1: ended at byte (\d+) while it was read", error.message)
    assert error.source == "file-1" and found is not None and int(found[1]) >= 150_000


def test_a_read_that_fails_is_the_sources_fault(monkeypatch, files, segment_fd):
    """In whichever thread: the one that called hears it, of the file that failed."""
    bad, _ = files[2]
    preadv = os.preadv

    def refuse(fd, views, offset):
        if fd == bad and offset > 100_000:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", refuse)
    error, _ = failing(monkeypatch, files, segment_fd, SourceError)
    assert error.source == "file-2" and "Input/output error" in error.message and error.remedy


def test_an_fd_that_cannot_be_read_is_the_sources_fault(monkeypatch, files, segment_fd, tmp_path):
    """As the kernel refuses it, not as a test does."""
    fd = os.open(tmp_path / "file-0", os.O_WRONLY)
    try:
        error, _ = failing(monkeypatch, [(fd, "w"), *files[1:]], segment_fd, SourceError)
    finally:
        os.close(fd)
    assert error.source == "w" and "Bad file descriptor" in error.message


def test_a_write_that_fails_is_not_the_sources_fault(monkeypatch, files, segment_fd):
    read_only = os.open(f"/proc/self/fd/{segment_fd}", os.O_RDONLY)
    try:
        error, done = failing(monkeypatch, files, read_only, OSError)
    finally:
        os.close(read_only)
    assert error.errno == errno.EBADF and done == 0


def test_a_report_that_fails_ends_all_threads(monkeypatch, files, segment_fd):
    """The coordinator is gone: whoever notices, nobody copies on."""
    monkeypatch.setattr(pump, "PROGRESS_PAUSE_S", 0.0)

    def gone(done, total):
        if done > 20_000:
            raise ConnectionLost("gone")

    _, done = failing(monkeypatch, files, segment_fd, ConnectionLost, gone)
    # Each of the others notices after the buffer that it was at.
    assert 20_000 < done <= 20_000 + pump.THREADS * pump.BUFFER_BYTES


def test_the_first_fault_of_any_thread_ends_the_others_at_once(monkeypatch, files, segment_fd):
    """After it nobody begins another read; and it is the first that is told."""
    gate = threading.Barrier(pump.THREADS)
    seen, went_on = set(), []
    failed = threading.Event()
    read_into = pump.read_into
    fail = pump._Work.fail

    def noted_fail(work, error):
        fail(work, error)
        failed.set()

    def read(fd, view, offset, name):
        if threading.current_thread() not in seen:
            seen.add(threading.current_thread())
            if gate.wait(10) == 0:
                raise SourceError("the first", source=name)
            failed.wait(10)
        else:
            went_on.append(offset)
        return read_into(fd, view, offset, name)

    monkeypatch.setattr(pump._Work, "fail", noted_fail)
    monkeypatch.setattr(pump, "read_into", read)
    error, done = failing(monkeypatch, files, segment_fd, SourceError)
    assert error.message == "the first" and len(seen) == pump.THREADS and went_on == []
    assert done <= (pump.THREADS - 1) * pump.BUFFER_BYTES


def test_of_several_faults_the_first_is_told():
    """The others often come of it."""
    first, work = SourceError("first", source="a"), pump._Work(scattered(3))
    work.fail(first)
    work.fail(SourceError("second", source="b"))
    assert work.fault is first and work.take() == []


def test_copies_that_cannot_be_told_end_it(monkeypatch, files, segment_fd):
    """They may come from a file that is parsed meanwhile."""

    def told():
        yield from scattered(100)
        raise SourceError("no more of them", source="file-0")

    error, _ = failing(monkeypatch, files, segment_fd, SourceError, copies=told())
    assert error.message == "no more of them"


# --- ahead --------------------------------------------------------------------------------------


class Advice:
    """Stands where the kernel takes advice; says when so much has come."""

    def __init__(self, enough: int) -> None:
        self.given: list[tuple[int, int, int]] = []
        self.come = threading.Event()
        self._enough = enough

    def __call__(self, fd: int, offset: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        self.given.append((fd, offset, size))
        if len(self.given) >= self._enough:
            self.come.set()


def test_what_is_copied_first_is_read_ahead_in_steps_up_to_a_limit(monkeypatch, files):
    (one, _), (two, _), _ = files
    monkeypatch.setattr(pump, "AHEAD_STEP_BYTES", 1000)
    monkeypatch.setattr(pump, "AHEAD_LIMIT_BYTES", 3000)
    advice = Advice(5)
    monkeypatch.setattr(os, "posix_fadvise", advice)
    with ReadAhead(files, [Copy(5, 0, 1500), Copy(70, 2000, 400, 1), Copy(900, 4000, 90_000, 1)]):
        assert advice.come.wait(10)
    steps = [(one, 5, 1000), (one, 1005, 500), (two, 70, 400), (two, 900, 1000), (two, 1900, 1000)]
    assert advice.given == steps and threading.active_count() == THREADS_BEFORE


def test_reading_ahead_ends_with_the_wait_for_space(monkeypatch, files):
    """What is not asked for by then the copies ask for themselves."""
    monkeypatch.setattr(pump, "AHEAD_STEP_BYTES", 1)
    advice = Advice(10)
    monkeypatch.setattr(os, "posix_fadvise", advice)
    with ReadAhead(files, [Copy(0, 0, 1 << 40)]):
        assert advice.come.wait(10)
    count = len(advice.given)
    assert threading.active_count() == THREADS_BEFORE and len(advice.given) == count < 1 << 29


def test_where_no_advice_is_taken_nothing_happens():
    """A pipe stands for a file system that does not know how."""
    read, write = os.pipe()
    try:
        with ReadAhead([(read, "pipe")], [Copy(0, 0, 100)]):
            pass
    finally:
        os.close(read)
        os.close(write)
    assert threading.active_count() == THREADS_BEFORE


# --- pages of 2 MiB -----------------------------------------------------------------------------


def backed(huge: bool, size_bytes: int = 8 << 20) -> int:
    """Return a segment that is not sealed, of pages of either kind."""
    fd = create("pump")
    if huge:
        pages = huge_backing.HugePages(fd, size_bytes)
        pages.back(0, size_bytes)
        if pages.backed_bytes != size_bytes:
            os.close(fd)
            pytest.skip("this host has no huge pages to give")
    os.posix_fallocate(fd, 0, size_bytes)
    return fd


@pytest.mark.parametrize("huge", [True, False])
def test_pages_of_2_mib_are_read_into_and_small_ones_written_to(monkeypatch, tmp_path, huge):
    """The bytes are the same, and no map is left: the segment can be sealed."""
    monkeypatch.setattr(pump, "BUFFER_BYTES", 256 << 10)
    monkeypatch.setattr(pump, "STRETCH_BYTES", 1 << 20)
    path = tmp_path / "file"
    path.write_bytes(random.Random(1).randbytes(7 << 20))
    copies = [
        Copy(start, start // 64 * 64 + 64 * number, 700_001)
        for number, start in enumerate(range(0, (7 << 20) - 700_001, 700_001))
    ]
    written: list[int] = []

    def noted(fd: int, data: memoryview, offset: int) -> None:
        written.append(offset)
        write_at(fd, data, offset)

    monkeypatch.setattr(pump, "write_at", noted)
    segment_fd, source_fd = backed(huge), os.open(path, os.O_RDONLY)
    try:
        pumping = Pump([(source_fd, "file")], segment_fd)
        pumping.copy(copies, DATA_START, meter_of(copies))
        for copy in copies:
            there = os.pread(segment_fd, copy.size_bytes, DATA_START + copy.data_offset_bytes)
            assert there == os.pread(source_fd, copy.size_bytes, copy.source_offset_bytes)
        assert (written == []) is huge
        freeze(segment_fd, "it")
        del pumping  # not before: it is not its end that unmaps
    finally:
        os.close(segment_fd)
        os.close(source_fd)


def test_without_addresses_for_a_map_it_writes(monkeypatch, tmp_path):
    def refuse(*_, write):
        raise OSError(errno.ENOMEM, "no addresses")

    monkeypatch.setattr("coordinator.window.map_file", refuse)
    path = tmp_path / "file"
    path.write_bytes(b"weights")
    segment_fd, source_fd = backed(huge=True), os.open(path, os.O_RDONLY)
    copies = [Copy(0, 0, 7)]
    try:
        Pump([(source_fd, "file")], segment_fd).copy(copies, DATA_START, meter_of(copies))
        assert os.pread(segment_fd, 7, DATA_START) == b"weights"
    finally:
        os.close(segment_fd)
        os.close(source_fd)


def test_a_source_that_ends_early_is_named_though_it_is_read_into_a_map(monkeypatch, tmp_path):
    monkeypatch.setattr(pump, "THREADS", 1)
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    segment_fd, source_fd = backed(huge=True), os.open(path, os.O_RDONLY)
    copies = [Copy(0, 0, 3 << 20)]
    try:
        with pytest.raises(SourceChanged, match="file: ended at byte 100"):
            Pump([(source_fd, "file")], segment_fd).copy(copies, DATA_START, meter_of(copies))
    finally:
        os.close(segment_fd)
        os.close(source_fd)
