"""From opened files into a backed segment, as fast as the kernel moves bytes. Knows no format.

Rules. It never maps a file. A fault of a source is told from a fault here. Of many threads only the
one that calls returns or raises, and then the others have ended, and no map of the segment is left.

    Note on threads
    fact: writes to one segment take turns (the kernel locks the inode), reads of the sources do
    not; a buffer that was just read is still in the processor's cache when it is written
    consequence: one thread reads while another writes. On two idle processors that takes 0.75 of
    the time of one `sendfile`, which copies under that lock: with it, a second thread gains nothing
    choice: a few threads that read and write small buffers; more than two, because a disk is fast
    only when several reads are under way
    cost: half a MiB of memory for each; where one processor is free, it is as fast as `sendfile`

Into pages of 2 MiB it reads without a buffer of its own, see `window`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from coordinator.checkpoint import Copy
from coordinator.window import PART_BYTES, Window
from shm_store.errors import SourceChanged, SourceError
from shm_store.segment import write_at

THREADS = 4
"""That copy at once, where there is enough for each."""

STRETCH_BYTES = 32 * 1024 * 1024
"""So much of the copies, one after the other, is for one thread: disks like what is in order."""

BUFFER_BYTES = 256 * 1024
"""Read and written at once: it fits into a processor's own cache."""

STACK_BYTES = 256 * 1024
"""Of each thread but the first; by default it counts with 8 MiB against the limit on memory."""

PROGRESS_PAUSE_S = 0.25

AHEAD_STEP_BYTES = 4 * 1024 * 1024
"""Asked for at once: the kernel drops what goes beyond its own limit, which is often that."""

AHEAD_LIMIT_BYTES = 512 * 1024 * 1024
"""Of what is read ahead: who waits for room must not fill the page cache meanwhile."""


class Meter:
    """Counts bytes copied by any thread; reports them at most every 0.25 s, and at the end."""

    def __init__(
        self,
        total_bytes: int,
        report: Callable[[int, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self._report = report
        self._clock = clock
        self._reported_s = clock()
        self._lock = threading.Lock()

    def add(self, size_bytes: int) -> None:
        """Count `size_bytes` more. The report is a send: it fails once the coordinator is gone."""
        with self._lock:
            self.done_bytes += size_bytes
            now = self._clock()
            if now - self._reported_s >= PROGRESS_PAUSE_S:
                self._reported_s = now
                self._report(self.done_bytes, self.total_bytes)

    def finish(self) -> None:
        """Report how it ended."""
        self._report(self.done_bytes, self.total_bytes)


class Pump:
    """Copies from opened files into a backed segment, with several threads. Owns no fd."""

    def __init__(self, files: Sequence[tuple[int, str]], segment_fd: int) -> None:
        """Copy from `files`: the fd of each, and its name for errors."""
        self._files = files
        self._segment_fd = segment_fd
        self._window: Window | None = None

    def copy(self, copies: Iterable[Copy], data_start: int, meter: Meter) -> None:
        """Do all `copies`; tensor bytes begin at `data_start` in the segment.

        When it returns or raises no thread of it is left: the first fault of any of them ends all,
        each after the buffer it is at.

        Raises:
            SourceChanged: the file ended early.
            SourceError: the file could not be read.
        """
        work = _Work(copies)
        useful = -(-meter.total_bytes // STRETCH_BYTES)
        copy_all = partial(self._copy_all, work, data_start, meter)
        with Window(self._segment_fd) as self._window, _helpers(min(THREADS, useful) - 1, copy_all):
            copy_all()
        if work.fault is not None:
            raise work.fault

    def _copy_all(self, work: _Work, data_start: int, meter: Meter) -> None:
        """Do stretches until there are no more, or somebody has failed."""
        try:
            buffer = memoryview(bytearray(BUFFER_BYTES))
            assert self._window is not None
            while stretch := work.take():
                huge = self._window.is_huge(data_start + stretch[0].data_offset_bytes)
                for copy in stretch:
                    self._copy_one(copy, None if huge else buffer, data_start, work, meter)
        except BaseException as error:  # it ends the others, then `copy`
            work.fail(error)

    def _copy_one(
        self, copy: Copy, buffer: memoryview | None, data_start: int, work: _Work, meter: Meter
    ) -> None:
        fd, name = self._files[copy.file]
        done = 0
        while done < copy.size_bytes and work.fault is None:
            source_offset = copy.source_offset_bytes + done
            segment_offset = data_start + copy.data_offset_bytes + done
            size = min(copy.size_bytes - done, BUFFER_BYTES if buffer else PART_BYTES)
            moved = self._move(buffer, fd, name, source_offset, segment_offset, size)
            if moved == 0:
                raise SourceChanged(
                    f"{name}: ended at byte {source_offset} while it was read", source=name
                )
            done += moved
            meter.add(moved)

    def _move(
        self,
        buffer: memoryview | None,
        fd: int,
        name: str,
        source_offset: int,
        segment_offset: int,
        size: int,
    ) -> int:
        if buffer is None:
            assert self._window is not None
            return read_into(fd, self._window.part(segment_offset, size), source_offset, name)
        got = read_into(fd, buffer[:size], source_offset, name)
        write_at(self._segment_fd, buffer[:got], segment_offset)
        return got


class _Work:
    """The copies that are left, in stretches for any thread to take; and the first fault."""

    def __init__(self, copies: Iterable[Copy]) -> None:
        self.fault: BaseException | None = None
        self._copies = iter(copies)
        self._rest: Copy | None = None
        self._lock = threading.Lock()

    def take(self) -> list[Copy]:
        """Return copies of `STRETCH_BYTES` together, or what is left; nothing after a fault."""
        stretch: list[Copy] = []
        room = STRETCH_BYTES
        with self._lock:
            while room > 0 and self.fault is None:
                copy = self._rest or next(self._copies, None)
                if copy is None:
                    break
                self._rest = None
                if copy.size_bytes > room:
                    copy, self._rest = _cut(copy, room)
                stretch.append(copy)
                room -= copy.size_bytes
        return stretch

    def fail(self, error: BaseException) -> None:
        """Have everybody stop. The first one tells why."""
        with self._lock:
            if self.fault is None:
                self.fault = error


def _cut(copy: Copy, size_bytes: int) -> tuple[Copy, Copy]:
    """Return the first `size_bytes` of a longer copy, and the rest of it."""
    source, data, whole = copy.source_offset_bytes, copy.data_offset_bytes, copy.size_bytes
    return (
        Copy(source, data, size_bytes, copy.file),
        Copy(source + size_bytes, data + size_bytes, whole - size_bytes, copy.file),
    )


@contextlib.contextmanager
def _helpers(count: int, work: Callable[[], None]) -> Iterator[None]:
    """Have up to `count` more threads do `work`; wait for them in the end."""
    helpers: list[threading.Thread] = []
    before = threading.stack_size(STACK_BYTES)
    try:
        for _ in range(count):
            helper = threading.Thread(target=work)
            helper.start()
            helpers.append(helper)
    except RuntimeError:
        pass  # No more threads for this user, or no memory for one. Fewer do it, too.
    finally:
        threading.stack_size(before)
    try:
        yield
    finally:
        for helper in helpers:
            helper.join()


class ReadAhead:
    """Has the kernel read the first of the sources into its page cache; a context manager.

    For the time in which the segment gets its pages, so that the disk does not idle. It maps
    nothing and waits for no bytes; where the kernel, or a file system, does not do that, nothing
    happens.
    """

    def __init__(self, files: Sequence[tuple[int, str]], copies: Iterable[Copy]) -> None:
        """Begin with what `copies` name first."""
        self._files = files
        self._ended = threading.Event()
        self._helper = _helpers(1, lambda: self._read(copies))

    def _read(self, copies: Iterable[Copy]) -> None:
        left = AHEAD_LIMIT_BYTES
        for copy in copies:
            fd, _ = self._files[copy.file]
            for start in range(0, copy.size_bytes, AHEAD_STEP_BYTES):
                if left <= 0 or self._ended.is_set():
                    return
                size = min(AHEAD_STEP_BYTES, copy.size_bytes - start)
                try:
                    offset = copy.source_offset_bytes + start
                    os.posix_fadvise(fd, offset, size, os.POSIX_FADV_WILLNEED)
                except OSError:
                    return  # no advice is taken here, and none is needed
                left -= size

    def __enter__(self) -> None:
        self._helper.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._helper.__exit__(None, None, None)


def read_into(fd: int, view: memoryview, offset: int, name: str) -> int:
    """Read into `view` from `offset` on; return how many bytes came, 0 at the end.

    Raises:
        SourceError: the disk, or the file server, failed.
    """
    try:
        return os.preadv(fd, [view], offset)
    except OSError as error:
        raise SourceError(
            f"{name}: reading at byte {offset} failed: {error.strerror}",
            source=name,
            remedy="check the disk or the file server that holds it",
        ) from error
