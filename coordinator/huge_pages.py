"""Has segments collapsed to huge pages, one after the other, once nobody can change them any more.

Most were backed by such pages from the start, by `coordinator.backing`, and need nothing. The rest
has another try, and so has what was backed under an earlier coordinator.

What is here is no state of the ledger, and nothing waits for it: a segment is READY, granted,
mapped and freed in the same way before, meanwhile and after. FREE ends the child and waits for it,
as for every job of a generation. See `coordinator.collapsing` for what the child does.

    Note on one at a time
    fact: collapsing copies every byte, on one processor, within the memory's bandwidth
    consequence: two at once slow each other and everybody else down
    choice: a queue, in the order in which segments became READY. No place lapses, as a child ends
    by itself and waits for nobody
    cost: the second of two large models is collapsed seconds later
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from msgspec.structs import replace

from coordinator import collapsing
from coordinator.fd_limit import described
from coordinator.process_host import Child, ended, ending
from coordinator.segment_table import SegmentTable
from shm_store.keys import GenerationId
from shm_store.layout import HUGE_PAGE_BYTES
from shm_store.report import GenerationReport, StatusReport, size_text
from shm_store.segment import backed_bytes
from shm_store.wire import RAM

log = logging.getLogger("coordinator")

OFF = "turned off by --no-huge-pages"

Start = Callable[[GenerationId, Coroutine[None, None, None], Child], None]
"""Makes a job of a generation: who frees it kills the child and waits for the coroutine."""


@dataclass(slots=True)
class _Pages:
    """What is known of one segment: bytes in huge pages when it was last looked at, and why not."""

    huge_bytes: int = 0
    why_not: str = ""


class HugePages:
    """Which segments are in huge pages, and the one child that works on that."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, segments: SegmentTable, start: Start, *, wanted: bool
    ) -> None:
        self._loop = loop
        self._segments = segments
        self._start = start
        self.wanted = wanted
        """Whether segments are to have huge pages."""
        self._known: dict[GenerationId, _Pages] = {}
        self._waiting: dict[GenerationId, None] = {}
        """In their order."""
        self._at: tuple[GenerationId, Child] | None = None

    def backed(self, gen: GenerationId, huge_bytes: int) -> None:
        """A segment has its pages, not yet filled. If all are huge, nothing is left to be done."""
        fd = self._segments.fd(gen)
        if fd is not None and 0 < backed_bytes(fd) <= huge_bytes:
            self._known[gen] = _Pages(huge_bytes)

    def add(self, gen: GenerationId) -> None:
        """A segment is READY: have it collapsed, later, if it is large enough and not huge yet.

        One that an earlier coordinator has had backed or collapsed costs a look.
        """
        fd = self._segments.fd(gen)
        if fd is None or gen in self._known or backed_bytes(fd) < HUGE_PAGE_BYTES:
            return
        self._known[gen] = _Pages(why_not="" if self.wanted else OFF)
        if self.wanted:
            self._waiting[gen] = None
            # Not from here: the GRANT goes out first.
            self._loop.call_soon(self._next)

    def drop(self, gen: GenerationId) -> None:
        """A segment is being freed. A child that works on it is the caller's to end."""
        self._known.pop(gen, None)
        self._waiting.pop(gen, None)

    def close(self) -> None:
        """Start nothing any more."""
        self._known.clear()
        self._waiting.clear()

    def report(self, books: StatusReport) -> StatusReport:
        """Return the ledger's report with what is known here."""
        return replace(books, generations=tuple(map(self._report, books.generations)))

    def _report(self, generation: GenerationReport) -> GenerationReport:
        gen = GenerationId(generation.generation)
        pages = self._known.get(gen)
        child = self._at[1] if self._at is not None and self._at[0] == gen else None
        if generation.pool != RAM or (pages is None and child is None):
            return generation
        pages = pages or _Pages()
        return replace(
            generation,
            huge_bytes=pages.huge_bytes,
            not_huge=pages.why_not,
            collapsed_by=None if child is None else child.process.pid,
        )

    def _next(self) -> None:
        while self._at is None and self._waiting:
            gen = next(iter(self._waiting))
            del self._waiting[gen]
            fd = self._segments.fd(gen)
            if fd is None:
                continue
            command = collapsing.command(fd, backed_bytes(fd))
            try:
                child = Child(command, pass_fds=(fd,), stdout=subprocess.PIPE)
            except OSError as error:
                self._tried(gen, f"no child could be started: {described(error)}")
                continue
            self._at = gen, child
            self._start(gen, self._wait(gen, child), child)

    async def _wait(self, gen: GenerationId, child: Child) -> None:
        code = await ended(child)
        assert child.process.stdout is not None
        with child.process.stdout as stdout:
            said = collapsing.said(stdout.read().decode(errors="replace"))
        self._at = None
        self._loop.call_soon(self._next)
        if gen not in self._known:
            return  # it is being freed
        huge_bytes, why = said or (0, f"the collapsing child ended ({ending(code)})")
        self._known[gen].huge_bytes = huge_bytes
        self._tried(gen, why)

    def _tried(self, gen: GenerationId, why: str) -> None:
        pages = self._known[gen]
        pages.why_not = why
        if why:
            huge = size_text(pages.huge_bytes)
            log.info("generation %s: %s in huge pages, not all: %s", gen, huge, why)
