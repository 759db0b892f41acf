"""From opened files into a backed segment, as fast as the kernel moves bytes. Knows no format."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence

from coordinator.checkpoint import Copy
from shm_store.errors import SourceChanged, SourceError
from shm_store.segment import write_at

STEP_BYTES = 32 * 1024 * 1024
"""So much is copied between two looks at the clock."""

COPY_BUFFER_BYTES = 1024 * 1024
PROGRESS_PAUSE_S = 0.25


class Meter:
    """Counts copied bytes and reports them: at most every 0.25 s, and at the end."""

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

    def add(self, size_bytes: int) -> None:
        """Count `size_bytes` more. The report is a send: it fails once the coordinator is gone."""
        self.done_bytes += size_bytes
        now = self._clock()
        if now - self._reported_s >= PROGRESS_PAUSE_S:
            self._reported_s = now
            self._report(self.done_bytes, self.total_bytes)

    def finish(self) -> None:
        """Report how it ended."""
        self._report(self.done_bytes, self.total_bytes)


class Pump:
    """Copies from opened files into a backed segment. Owns no fd.

    `sendfile` first: no byte passes through this process. Where it fails, for whatever reason,
    reads and writes take over: more file systems allow them (EINVAL, ENOSYS), and they tell a
    faulty source from a fault here.
    """

    def __init__(self, files: Sequence[tuple[int, str]], segment_fd: int) -> None:
        """Copy from `files`: the fd of each, and its name for errors."""
        self._files = files
        self._segment_fd = segment_fd
        self._buffer: memoryview | None = None

    def copy(self, copies: Iterable[Copy], data_start: int, meter: Meter) -> None:
        """Do all `copies`; tensor bytes begin at `data_start` in the segment.

        Raises:
            SourceChanged: the file ended early.
            SourceError: the file could not be read.
        """
        for copy in copies:
            fd, name = self._files[copy.file]
            done = 0
            while done < copy.size_bytes:
                source_offset = copy.source_offset_bytes + done
                moved = self._move(
                    fd,
                    name,
                    source_offset,
                    data_start + copy.data_offset_bytes + done,
                    min(copy.size_bytes - done, STEP_BYTES),
                )
                if moved == 0:
                    raise SourceChanged(
                        f"{name}: ended at byte {source_offset} while it was read",
                        source=name,
                    )
                done += moved
                meter.add(moved)

    def _move(self, fd: int, name: str, source_offset: int, segment_offset: int, size: int) -> int:
        if self._buffer is None:
            try:
                # sendfile writes at the position of the fd, which the coordinator never uses.
                os.lseek(self._segment_fd, segment_offset, os.SEEK_SET)
                return os.sendfile(self._segment_fd, fd, source_offset, size)
            except OSError:
                self._buffer = memoryview(bytearray(COPY_BUFFER_BYTES))
        part = self._buffer[: min(size, COPY_BUFFER_BYTES)]
        got = read_into(fd, part, source_offset, name)
        write_at(self._segment_fd, part[:got], segment_offset)
        return got


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
