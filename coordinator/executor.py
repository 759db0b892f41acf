"""Performs the ledger's effects and reports how they came out. Decides nothing.

What takes longer than a system call (backing, sealing and freeing gigabytes) runs in a child or in
a pool thread, never on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from typing import Protocol, assert_never

from coordinator import backing, loader
from coordinator.connection import Connection
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
    LoaderEnded,
    LoaderSaid,
    Seal,
    Sealed,
    SealRefused,
    Send,
    SendSpace,
    StartLoader,
)
from coordinator.process_host import Child
from coordinator.segment_table import SegmentTable
from shm_store import channel
from shm_store.channel import Channel
from shm_store.errors import ProtocolViolation, WeightCacheError
from shm_store.keys import GenerationId, RequestId, SessionId
from shm_store.manifest import Preamble
from shm_store.segment import seal
from shm_store.wire import Fetch, ToSession, decode, encode, loader_decoder

log = logging.getLogger("coordinator")


class Sessions(Protocol):
    """The server's side of the executor: the sockets."""

    def send(self, session: SessionId, message: ToSession, segment: GenerationId | None) -> None:
        """Send to a session; a Grant or a Fail is a request's last answer."""

    def forget(self, session: SessionId) -> None:
        """Close the connection and stop watching the process."""

    def source(self, session: SessionId, rid: RequestId) -> int:
        """Return the opened source that came with an open request. It stays the server's."""

    def exit(self) -> None:
        """Stop serving."""


class Executor:
    """Owns the children and the segments."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sessions: Sessions,
        feed: Callable[[Event], None],
    ) -> None:
        self._loop = loop
        self._sessions = sessions
        self._feed = feed
        self._children: dict[GenerationId, Child] = {}
        self._links: dict[GenerationId, Connection] = {}
        self._sealing: dict[GenerationId, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._backing: dict[GenerationId, Child] = {}
        self.segments = SegmentTable()

    def perform(self, effect: Effect) -> None:
        """Begin `effect`. Its outcome comes back through `feed`, in this call or later."""
        match effect:
            case Send(session, message, segment):
                self._sessions.send(session, message, segment)
            case SendSpace(message):
                link = self._links.get(message.gen)
                if link is not None:
                    link.send(message, message.gen)
            case StartLoader():
                self._start_loader(effect)
            case Back(gen, size_bytes):
                self._run(self._back(gen, size_bytes))
            case Seal():
                self._run(self._seal(effect))
            case Free(gen):
                self._run(self._free(gen))
            case Forget(session):
                self._sessions.forget(session)
            case Exit():
                self._sessions.exit()
            case _:
                assert_never(effect)

    async def close(self) -> None:
        """End every child, wait for it, and close every segment."""
        children = [*self._children.values(), *self._backing.values()]
        for child in children:
            child.kill()
        for child in children:
            await child.ended
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self.segments.close()

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("an effect failed", exc_info=task.exception())

    # --- loaders --------------------------------------------------------------------------------

    def _start_loader(self, effect: StartLoader) -> None:
        ours, theirs = channel.pair()
        ours.setblocking(False)
        command = loader.command(theirs.fileno())
        try:
            child = Child(self._loop, command, (theirs.fileno(),))
        except OSError as error:
            ours.close()
            self._feed(LoaderEnded(effect.gen, f"could not be started: {error.strerror}"))
            return
        finally:
            theirs.close()
        link = Connection(
            self._loop, Channel(ours), self._loader_said(effect.gen), _ignore, self.segments.fd
        )
        # The socket is empty, so this cannot block; if the child is gone already, `ended` tells.
        fetch = Fetch(effect.gen, effect.key, effect.source, effect.fingerprint)
        link.send_once(encode(fetch), self._sessions.source(effect.session, effect.rid))
        self._children[effect.gen] = child
        self._links[effect.gen] = link
        self._run(self._await_loader(effect.gen, child, link))

    def _loader_said(self, gen: GenerationId) -> Callable[[Connection, bytes, list[int]], None]:
        def receive(link: Connection, data: bytes, fds: list[int]) -> None:
            channel.close_all(fds)
            try:
                message = decode(loader_decoder, data)
            except ProtocolViolation as error:
                link.close(error)
                return
            self._feed(LoaderSaid(gen, message))

        return receive

    async def _await_loader(self, gen: GenerationId, child: Child, link: Connection) -> None:
        ending = await child.ended
        link.drain_input()
        link.close()
        del self._children[gen], self._links[gen]
        self._feed(LoaderEnded(gen, str(ending)))

    # --- segments -------------------------------------------------------------------------------

    async def _back(self, gen: GenerationId, size_bytes: int) -> None:
        try:
            fd = self.segments.create(gen)
            child = Child(self._loop, backing.command(fd, size_bytes), (fd,))
        except OSError as error:
            self._feed(BackingRefused(gen, f"no segment could be made: {error.strerror}"))
            return
        self._backing[gen] = child
        ending = await child.ended
        del self._backing[gen]
        if ending.code == 0:
            self._feed(Backed(gen))
        else:
            self._feed(BackingRefused(gen, backing.reason(ending.code, ending.stderr)))

    async def _seal(self, effect: Seal) -> None:
        fd = self.segments.fd(effect.gen)
        assert fd is not None
        preamble = Preamble(effect.gen, effect.key, effect.fingerprint)
        sealing = self._loop.run_in_executor(None, seal, fd, preamble)
        self._sealing[effect.gen] = sealing
        try:
            await sealing
        except (WeightCacheError, OSError) as error:
            outcome: Event = SealRefused(effect.gen, str(error))
        else:
            outcome = Sealed(effect.gen)
        del self._sealing[effect.gen]
        self._feed(outcome)

    async def _free(self, gen: GenerationId) -> None:
        """End what still works on the segment, then give it back. Closing gigabytes takes long."""
        for child in (self._children.get(gen), self._backing.get(gen)):
            if child is not None:
                child.kill()
                await child.ended
        sealing = self._sealing.get(gen)
        if sealing is not None:
            await asyncio.wait([sealing])
        fd = self.segments.take(gen)
        if fd is not None:
            await self._loop.run_in_executor(None, os.close, fd)
        self._feed(Freed(gen))


def _ignore(link: Connection, reason: WeightCacheError | None) -> None:
    """A loader's connection ended; its process is what counts."""
