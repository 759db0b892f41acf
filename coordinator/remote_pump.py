"""From URLs into a backed segment: several ranges at once, each written as it arrives.

Note on threads that hang
fact: a thread that waits for a server cannot be ended, and holds what it was given
consequence: after a failure one could write to the number of a closed fd, which is another's
choice: they write through an fd of their own, which stays open while one of them runs
cost: after a failure the segment is held until this process ends, which is next
"""

from __future__ import annotations

import bisect
import os
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from coordinator.checkpoint import Copy
from coordinator.pump import Meter
from coordinator.remote_file import RemoteFile
from shm_store.errors import SourceUnreachable
from shm_store.segment import write_at

THREADS = 8
STEP_BYTES = 1024 * 1024
"""What is asked for at first where nothing is seen of a range before all of it is there."""

STEP_S = 1.0
"""So long may such a range take; its thread then asks for more or less."""

LEAST_BYTES = 8 * 1024 * 1024
"""No file is cut finer for the sake of having all threads busy."""

GAP_BYTES = 256 * 1024
"""So much that nobody wants is read rather than asking anew."""

STANDSTILL_S = 100.0
"""Of all ranges together. Some libraries try again by themselves, where nobody sees it."""

WAIT_S = 1.0
_JOIN_S = 1.0


@dataclass(slots=True)
class Span:
    """A stretch of a file of which all, but for gaps, is wanted: `copies`, by their offsets."""

    file: RemoteFile
    copies: list[Copy]
    start: int
    end: int


class Scatter:
    """Writes bytes of a span to where its copies say."""

    def __init__(self, span: Span, segment_fd: int, data_start: int) -> None:
        self._copies = span.copies
        self._starts = [copy.source_offset_bytes for copy in span.copies]
        self._segment_fd = segment_fd
        self._data_start = data_start

    def write(self, offset: int, chunk: bytes) -> int:
        """Write what is wanted of `chunk`, which begins at `offset` of the file; say how much."""
        view, end, written = memoryview(chunk), offset + len(chunk), 0
        index = max(bisect.bisect_right(self._starts, offset) - 1, 0)
        while index < len(self._copies) and self._starts[index] < end:
            copy = self._copies[index]
            start = max(copy.source_offset_bytes, offset)
            stop = min(copy.source_offset_bytes + copy.size_bytes, end)
            if stop > start:
                place = copy.data_offset_bytes + start - copy.source_offset_bytes
                write_at(
                    self._segment_fd, view[start - offset : stop - offset], self._data_start + place
                )
                written += stop - start
            index += 1
        return written


class _Work:
    """The spans that are still to be read, given out in pieces."""

    def __init__(self, spans: Iterable[Span], threads: int) -> None:
        self._left = list(spans)[::-1]
        share = sum(span.end - span.start for span in self._left) // (2 * threads)
        self._most_bytes = max(share, LEAST_BYTES)
        self._lock = threading.Lock()

    def take(self, step_bytes: int) -> tuple[Span, int, int] | None:
        """Return the next piece; one of a file that has no ranges is all of it."""
        with self._lock:
            if not self._left:
                return None
            span = self._left[-1]
            start = span.start
            if span.file.ranges:
                most = min(step_bytes, span.file.transport.step_bytes, self._most_bytes)
                span.start = min(start + most, span.end)
            else:
                span.start = span.end
            if span.start == span.end:
                self._left.pop()
            return span, start, span.start


class RemotePump:
    """Copies from files at URLs into a backed segment."""

    def __init__(
        self,
        files: Sequence[RemoteFile],
        segment_fd: int,
        threads: int = THREADS,
        standstill_s: float = STANDSTILL_S,
    ) -> None:
        self._files = files
        self._segment_fd = segment_fd
        self._threads = threads
        self._standstill_s = standstill_s
        self._news: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()
        """Of the threads: bytes that came, what went wrong, that one is done."""

    def copy(self, copies: Sequence[Copy], data_start: int, meter: Meter) -> None:
        """Do all `copies`; tensor bytes begin at `data_start` in the segment.

        Raises:
            SourceChanged: a file is another one by now.
            SourceError: it could not be read to the end, with all patience.
        """
        work = _Work(spans_of(self._files, copies), self._threads)
        segment_fd = os.dup(self._segment_fd)
        threads = [
            threading.Thread(target=self._run, args=(work, segment_fd, data_start), daemon=True)
            for _ in range(self._threads)
        ]
        try:
            for thread in threads:
                thread.start()
            self._await(len(threads), meter)
        finally:
            for file in self._files:
                file.stopped.set()
            until_s = time.monotonic() + _JOIN_S
            for thread in threads:
                if thread.ident is not None:
                    thread.join(max(until_s - time.monotonic(), 0))
            if not any(thread.is_alive() for thread in threads):
                os.close(segment_fd)
        for file in self._files:
            file.stopped.clear()

    def _await(self, running: int, meter: Meter) -> None:
        """Count what comes, until all threads are done. Only this thread talks of it."""
        came_s = time.monotonic()
        while running:
            try:
                news = self._news.get(timeout=min(WAIT_S, self._standstill_s))
            except queue.Empty:
                if time.monotonic() - came_s > self._standstill_s:
                    name = self._files[0].name
                    raise SourceUnreachable(
                        f"{name}: nothing came for {self._standstill_s:g} s", source=name
                    ) from None
                continue
            if isinstance(news, BaseException):
                raise news
            if news is None:
                running -= 1
            else:
                came_s = time.monotonic()
                meter.add(news)

    def _run(self, work: _Work, segment_fd: int, data_start: int) -> None:
        try:
            streams = all(file.transport.streams for file in self._files)
            step = self._files[0].transport.step_bytes if streams else STEP_BYTES
            while (piece := work.take(step)) is not None:
                span, start, end = piece
                scatter = Scatter(span, segment_fd, data_start)
                file = span.file

                def taken(
                    offset: int, chunk: bytes, scatter: Scatter = scatter, file: RemoteFile = file
                ) -> None:
                    if file.stopped.is_set():
                        raise SourceUnreachable("nobody waits for it any more", source=file.name)
                    self._news.put(scatter.write(offset, chunk))

                began_s = time.monotonic()
                file.fetch(start, end, taken)
                if not file.transport.streams:
                    took_s = max(time.monotonic() - began_s, 0.001)
                    step = max(STEP_BYTES, int((end - start) * min(STEP_S / took_s, 4)))
        except BaseException as error:
            self._news.put(error)
        else:
            self._news.put(None)


def spans_of(files: Sequence[RemoteFile], copies: Sequence[Copy]) -> Iterator[Span]:
    """Return the stretches to read for `copies`, which are in the order of the files.

    Of a file without ranges there is one, whatever is not wanted of it.
    """
    span: Span | None = None
    for copy in copies:
        file, start = files[copy.file], copy.source_offset_bytes
        near = span is not None and span.file is file
        if span is not None and near and (start - span.end <= GAP_BYTES or not file.ranges):
            span.copies.append(copy)
            span.end = start + copy.size_bytes
            continue
        if span is not None:
            yield span
        span = Span(file, [copy], start, start + copy.size_bytes)
    if span is not None:
        yield span
