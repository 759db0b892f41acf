"""Performs the ledger's effects and reports how they came out. Decides nothing.

What takes longer than a system call (backing, sealing and freeing gigabytes) runs in a child or in
a pool thread, never on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Protocol, assert_never

from coordinator import backing, loader
from coordinator.connection import Connection
from coordinator.device_memory import freeze_memory, given_back, require_memory
from coordinator.fd_limit import REMEDY, described, out_of_fds
from coordinator.huge_pages import HugePages
from coordinator.ledger.events import (
    Back,
    Backed,
    BackingRefused,
    Effect,
    Event,
    Exit,
    Forget,
    Free,
    Freed,
    Keep,
    LoaderEnded,
    LoaderSaid,
    Remember,
    Seal,
    Sealed,
    SealRefused,
    Send,
    SendSpace,
    StartLoader,
    Unkeep,
)
from coordinator.places import Places
from coordinator.process_host import Child, ended, ending
from coordinator.segment_table import SegmentTable, seal
from coordinator.source_table import OpenedSource
from coordinator.store import Store, Words
from shm_store import channel
from shm_store.channel import Channel
from shm_store.errors import ProtocolViolation, SegmentRefused, WeightCacheError
from shm_store.keys import GenerationId, RequestId, SessionId
from shm_store.manifest import Preamble
from shm_store.segment import fix_size
from shm_store.wire import RAM, Fetch, Report, Reserve, ToSession, decode, loader_decoder

log = logging.getLogger("coordinator")


class Sessions(Protocol):
    """The server's side of the executor: the sockets."""

    def send(self, session: SessionId, message: ToSession, segment: GenerationId | None) -> None:
        """Send to a session; a Grant or a Fail is a request's last answer."""

    def forget(self, session: SessionId) -> None:
        """Close the connection and stop watching the process."""

    def source(self, session: SessionId, rid: RequestId) -> OpenedSource:
        """Return the opened source that came with an open request. It stays the server's."""

    def exit(self) -> None:
        """Stop serving."""


class Executor:
    """Owns the children and the segments.

    What takes time is a *job* of its generation: a task, and the child it waits for, if any.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sessions: Sessions,
        feed: Callable[[Event], None],
        *,
        huge_pages: bool = True,
    ) -> None:
        self._loop = loop
        self._sessions = sessions
        self._feed = feed
        self._links: dict[GenerationId, Connection] = {}
        self._sources: dict[GenerationId, OpenedSource] = {}
        """What a loader has still to be given, kept though the request that brought it may end."""
        self._starts = Places(loop)
        self._backings = Places(loop)
        self._devices: dict[GenerationId, asyncio.Future[None]] = {}
        """Waits for devices to have memory back. Nothing is lost with them."""
        self._jobs: dict[GenerationId, dict[asyncio.Task[None], Child | None]] = {}
        self.segments = SegmentTable()
        self._huge_pages = HugePages(loop, self.segments, self._start, wanted=huge_pages)
        self.store = Store(loop)

    def perform(self, effect: Effect) -> None:
        """Begin `effect`. Its outcome comes back through `feed`, in this call or later."""
        match effect:
            case Send(session, Report() as message, segment):
                report = self._huge_pages.report(message.report)
                self._sessions.send(session, Report(message.rid, report), segment)
            case Send(session, message, segment):
                self._sessions.send(session, message, segment)
            case SendSpace(message):
                link = self._links.get(message.gen)
                if link is not None:
                    link.send(message, message.gen)
            case StartLoader():
                self._start_loader(effect)
            case Back(gen, pool=pool) if pool != RAM:
                self._feed(Backed(gen))
            case Back(gen):
                self._backings.enter(gen, None, partial(self._start_backing, effect))
            case Seal():
                self._start(effect.gen, self._seal(effect))
            case Free(gen):
                self._backings.leave(gen)
                self._started(gen)
                self._huge_pages.drop(gen)
                # Taken now: until its jobs have ended the generation may be somebody's again, who
                # brings an fd of his own.
                jobs, fd = dict(self._jobs.get(gen, {})), self.segments.take(gen)
                self._start(gen, self._free(effect, jobs, fd))
            case Keep(gen, about):
                fd = self.segments.fd(gen)
                if fd is not None:
                    self.store.keep_segment(gen, fd, about)
                if about is None:
                    self._huge_pages.add(gen)
            case Unkeep(gen):
                self.store.forget_segment(gen)
            case Remember(pins, limits_bytes, draining, found_bytes):
                self.store.remember(Words(pins, limits_bytes, draining, found_bytes))
            case Forget(session):
                self._sessions.forget(session)
            case Exit():
                self._sessions.exit()
            case _:
                assert_never(effect)

    async def close(self) -> None:
        """End every child, wait for what is under way, and close every segment."""
        self._starts.close()
        self._backings.close()
        self._huge_pages.close()
        for waiting in list(self._devices.values()):
            waiting.cancel()
        while jobs := {task: child for work in self._jobs.values() for task, child in work.items()}:
            await _end(jobs)
        for gen in list(self._sources):
            self._started(gen)
        self.segments.close()

    def _start(
        self, gen: GenerationId, work: Coroutine[None, None, None], child: Child | None = None
    ) -> None:
        task = self._loop.create_task(work)
        self._jobs.setdefault(gen, {})[task] = child
        task.add_done_callback(partial(self._done, gen))

    def _done(self, gen: GenerationId, task: asyncio.Task[None]) -> None:
        del self._jobs[gen][task]
        if not self._jobs[gen]:
            del self._jobs[gen]
        if not task.cancelled() and task.exception() is not None:
            log.error("a job of generation %s failed", gen, exc_info=task.exception())

    # --- loaders --------------------------------------------------------------------------------

    def _start_loader(self, effect: StartLoader) -> None:
        gen = effect.gen
        self._sources[gen] = self._sessions.source(effect.session, effect.rid).share()
        self._starts.enter(gen, effect.session, partial(self._run_loader, effect))

    def _run_loader(self, effect: StartLoader) -> None:
        gen = effect.gen
        try:
            ours, theirs = channel.pair()
        except OSError as error:
            self._no_loader(gen, error)
            return
        ours.setblocking(False)
        try:
            child = Child(loader.command(theirs.fileno()), pass_fds=(theirs.fileno(),))
        except OSError as error:
            ours.close()
            self._no_loader(gen, error)
            return
        finally:
            theirs.close()
        receive = partial(self._loader_said, gen)
        link = Connection(self._loop, Channel(ours), receive, _ignore, self._fds_for_loader)
        source = self._sources[gen]
        about = (effect.key, effect.source, effect.fingerprint, source.files, source.reading)
        link.send(Fetch(gen, *about), gen)
        self._links[gen] = link
        self._start(gen, self._await_loader(gen, child, link), child)

    def _no_loader(self, gen: GenerationId, error: OSError) -> None:
        self._started(gen)
        reason = f"could not be started: {described(error)}"
        log.warning("the loader of generation %s %s", gen, reason)
        self._feed(LoaderEnded(gen, reason))

    def _fds_for_loader(self, gen: GenerationId) -> Sequence[int]:
        """Return what goes with FETCH, then what goes with SPACE."""
        source = self._sources.get(gen)
        return self.segments.fds(gen) if source is None else source.fds

    def _started(self, gen: GenerationId) -> None:
        """A loader has its source and knows its size; or it is over, or not wanted any more."""
        self._starts.leave(gen)
        source = self._sources.pop(gen, None)
        if source is not None:
            source.close()

    def _loader_said(
        self, gen: GenerationId, link: Connection, data: bytes, fds: list[int]
    ) -> None:
        channel.close_all(fds)
        try:
            message = decode(loader_decoder, data)
        except ProtocolViolation as error:
            link.close(error)
            return
        if isinstance(message, Reserve):
            self._started(gen)
        self._feed(LoaderSaid(gen, message))

    async def _await_loader(self, gen: GenerationId, child: Child, link: Connection) -> None:
        code = await ended(child)
        link.drain_input()
        link.close()
        del self._links[gen]
        self._started(gen)
        end = ending(code)
        if code == -signal.SIGKILL:
            # It waits as a volunteer, beside a backing child that may be the smaller of the two.
            end += ", probably by the kernel's OOM killer"
        elif code == -signal.SIGBUS:
            end += ": the file was cut, or its disk failed, while it was read"
        if code and code != -child.sent:
            log.warning("the loader of generation %s ended (%s)", gen, end)
        self._feed(LoaderEnded(gen, f"ended ({end})"))

    # --- segments -------------------------------------------------------------------------------

    def _start_backing(self, effect: Back) -> None:
        gen = effect.gen
        try:
            fd = self.segments.create(gen)
            command = backing.command(fd, effect.size_bytes, self._huge_pages.wanted)
            # One pipe for both, as fds may be few. It says one of the two.
            child = Child(command, pass_fds=(fd,), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        except OSError as error:
            self._backings.leave(gen)
            remedy = REMEDY if out_of_fds(error) else None
            reason = f"no segment could be made: {described(error)}"
            self._feed(BackingRefused(gen, reason, remedy))
            return
        self._start(gen, self._await_backing(gen, fd, child), child)

    async def _await_backing(self, gen: GenerationId, fd: int, child: Child) -> None:
        code = await ended(child)
        self._backings.leave(gen)
        assert child.process.stdout is not None
        with child.process.stdout as stdout:
            said = stdout.read().decode(errors="replace")
        if code:
            self._feed(BackingRefused(gen, backing.reason(code, said)))
            return
        self._huge_pages.backed(gen, backing.huge_bytes(said))
        fix_size(fd)
        self._feed(Backed(gen))

    async def _seal(self, effect: Seal) -> None:
        gen = effect.gen
        fd = self.segments.fd(gen)
        try:
            if fd is None:
                raise SegmentRefused("no memory came with its COMMIT")
            if effect.pool != RAM:
                await self._loop.run_in_executor(None, freeze_memory, fd, effect.pool, gen)
                require_memory(fd, effect.pool, gen, effect.size_bytes)
            else:
                preamble = Preamble(gen, effect.key, effect.fingerprint)
                await self._loop.run_in_executor(None, seal, fd, preamble)
        except (WeightCacheError, OSError) as error:
            if effect.pool != RAM and fd is not None:
                # Not what its owner has there: that is his to free. Another may come.
                self.segments.take(gen)
                self.segments.forget(gen)
                os.close(fd)
            self._feed(SealRefused(gen, str(error)))
        else:
            self._feed(Sealed(effect.gen))

    async def _free(
        self, effect: Free, jobs: dict[asyncio.Task[None], Child | None], fd: int | None
    ) -> None:
        """End what still works on the segment, then give it back. Closing gigabytes takes long."""
        gen = effect.gen
        earlier = self._devices.pop(gen, None)
        if earlier is not None:
            earlier.cancel()  # it was somebody's again since, and we have an fd of it, too
        await _end(jobs)
        self._huge_pages.drop(gen)  # again: a backing child may have been done all the same
        if fd is not None:
            await self._loop.run_in_executor(None, os.close, fd)
        if effect.device is not None:
            waiting = asyncio.ensure_future(given_back(effect.device, gen, effect.pid))
            self._devices[gen] = waiting
            await waiting
            self._devices.pop(gen, None)
        self._feed(Freed(gen))
        if self.segments.fd(gen) is None:  # else it is somebody's again
            self.segments.forget(gen)


async def _end(jobs: dict[asyncio.Task[None], Child | None]) -> None:
    """Kill the jobs' children and wait for the jobs."""
    for child in jobs.values():
        if child is not None:
            child.send(signal.SIGKILL)
    if jobs:
        await asyncio.wait(jobs)


def _ignore(link: Connection, reason: WeightCacheError | None) -> None:
    """A loader's connection ended; its process is what counts."""
