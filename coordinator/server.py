"""The coordinator's event loop: sockets and pidfds in, ledger events out, and back.

One thread. Nothing here waits, and nothing here decides: what a frame means is the ledger's, what
an effect does is the executor's.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import time
from dataclasses import dataclass

from coordinator import notify
from coordinator.connection import Connection
from coordinator.executor import Executor
from coordinator.fd_limit import (
    FOR_CONNECTIONS,
    FOR_SEGMENTS,
    FOR_SOURCES,
    exhausted,
    out_of_fds,
    require_free,
    reserved,
)
from coordinator.ledger import apply, new_ledger, next_deadline_s
from coordinator.ledger.events import (
    Attached,
    Disconnected,
    Event,
    Recovered,
    Said,
    SessionEnded,
    TimePassed,
)
from coordinator.ledger.state import Request, State
from coordinator.program import UNKNOWN, program
from coordinator.source_table import OpenedSource, SourceTable
from coordinator.statement import Statement
from coordinator.store import Found, pid_of
from shm_store import channel, source
from shm_store.channel import Channel
from shm_store.errors import (
    PeerForbidden,
    PlatformUnsupported,
    ProtocolViolation,
    ResourceError,
    VersionMismatch,
    WeightCacheError,
)
from shm_store.keys import GenerationId, RequestId, SessionId
from shm_store.wire import (
    RAM,
    VERSION,
    Acquire,
    Bye,
    Cause,
    Commit,
    Fail,
    FromSession,
    Grant,
    Resume,
    ToSession,
    decode,
    held_decoder,
    resume_decoder,
    session_decoder,
)

log = logging.getLogger("coordinator")

EMFILE_PAUSE_S = 1.0
MESSAGE_LIMIT_BYTES = 1 << 20
"""What a session may say at once: far more than it has to."""

RESUME_LIMIT_S = 10.0
"""A connection that has not said who it is holds an fd for nobody."""

FIRST_LOOK_S = 0.01
LONGEST_LOOK_S = 60.0
"""Between two looks whether a process that was lost runs another program by now."""

OTHERS_PATIENCE_S = 2.0
"""How long those are waited for of whom nobody knows whether they are there."""

ATTACHED_LIMIT = 64
"""Connections of one process, and sessions it left behind with weights mapped. An honest one has
one of either; each takes two fds."""


@dataclass(slots=True)
class Peer:
    """A session's socket and process, as the server sees them."""

    connection: Connection | None
    pid: int
    pidfd: int
    token: str
    program: int


@dataclass(slots=True)
class Silent:
    """A connection whose session is not known: its process, and what ends it if it never is."""

    pid: int
    timer: asyncio.TimerHandle
    statement: Statement | None = None


class Server:
    """Everything of one coordinator that touches a socket."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        limit: int,
        *,
        huge_pages: bool = True,
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._peers: dict[SessionId, Peer] = {}
        self._silent: dict[Connection, Silent] = {}
        """Accepted, but who it is has not come, or what it has; with the pid that connected."""
        self._session_of: dict[Connection, SessionId] = {}
        self._tokens: dict[str, SessionId] = {}
        """By what sessions call themselves."""
        self._sources = SourceTable()
        self._last_session = 0
        self._events: list[Event] = []
        self._feeding = False
        self._timer: asyncio.TimerHandle | None = None
        self._leave_after_s: float | None = None
        self._leaving: asyncio.TimerHandle | None = None
        """Set while nobody is here: when this coordinator ends."""
        self._allowed_uids = (os.geteuid(), 0)
        self._executor = Executor(loop, self, self.feed, huge_pages=huge_pages)
        self.ledger = new_ledger(time.clock_gettime_ns(time.CLOCK_BOOTTIME), {"ram": limit})
        self.stopped: asyncio.Future[None] = loop.create_future()
        loop.add_reader(listener.fileno(), self._accept)

    # --- the heart ------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        """Give one event to the ledger and perform what it wants done.

        An effect may report its outcome at once; that event takes its turn after this one.
        """
        self._events.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._events:
                for effect in apply(self.ledger, self._events.pop(0), self._loop.time()):
                    self._executor.perform(effect)
        finally:
            self._feeding = False
        self._arm()

    def _arm(self) -> None:
        """Set the one timer to the ledger's next deadline. Without one the process sleeps."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ledger = self.ledger
        # Looking for it costs half of what a hit does; without any of these there is none.
        waits = ledger.requests or ledger.running or ledger.drains or ledger.invalidations
        if waits or ledger.awaited:
            deadline_s = next_deadline_s(ledger)
            if deadline_s is not None:
                self._timer = self._loop.call_at(deadline_s, self.feed, TimePassed())
        self._mind_leaving()

    # --- unused ---------------------------------------------------------------------------------

    def leave_after(self, unused_s: float | None) -> None:
        """End once nobody has been here for so long. None: never."""
        self._leave_after_s = unused_s
        self._mind_leaving()

    def _mind_leaving(self) -> None:
        """Have the time run while nobody is here, and stop it when somebody is."""
        if self._leave_after_s is None:
            return
        if self._peers or self._silent or self.ledger.awaited:
            if self._leaving is not None:
                self._leaving.cancel()
                self._leaving = None
        elif self._leaving is None:
            self._leaving = self._loop.call_later(self._leave_after_s, self._leave)

    def _leave(self) -> None:
        log.info("no session for %g s, so it ends", self._leave_after_s)
        self.exit()

    # --- what the executor needs (executor.Sessions) ----------------------------------------------

    def send(self, session: SessionId, message: ToSession, segment: GenerationId | None) -> None:
        if isinstance(message, Grant | Fail):
            self._sources.close(session, message.rid)
        peer = self._peers.get(session)
        if peer is not None and peer.connection is not None:
            peer.connection.send(message, segment)

    def forget(self, session: SessionId) -> None:
        peer = self._peers.pop(session, None)
        if peer is None:
            return
        if self._tokens.get(peer.token) == session:
            del self._tokens[peer.token]
        self._loop.remove_reader(peer.pidfd)
        os.close(peer.pidfd)
        if peer.token:
            self._executor.store.forget_session(peer.token)
        if peer.connection is not None:
            self._session_of.pop(peer.connection, None)
            peer.connection.close()

    def source(self, session: SessionId, rid: RequestId) -> OpenedSource:
        return self._sources[session, rid]

    def exit(self) -> None:
        if not self.stopped.done():
            self.stopped.set_result(None)

    # --- a coordinator before this one ----------------------------------------------------------

    def recover(self, others: bool, patience_s: float) -> None:
        """Take over what an earlier coordinator has left, if there was one.

        Args:
            others: it has left its socket behind, so that some may have been attached to it.
        """
        found = self._executor.store.recover(self.ledger.start_ns)
        if found is None and (notify.offered() or not others):
            return
        found = found or Found()
        for gen, (fd, _) in found.segments.items():
            self._executor.segments.adopt(gen, fd)
        sessions = []
        for token, pidfd in found.sessions.items():
            pid = pid_of(pidfd)
            sessions.append((self._watch(pid, pidfd, token), pid))
        kept = found.segments or found.sessions
        if not kept:
            log.warning("nothing was stored: weights that no process has mapped are lost")
        self.feed(
            Recovered(
                tuple(offer for _, offer in found.segments.values()),
                tuple(sessions),
                not kept,
                patience_s if kept else min(patience_s, OTHERS_PATIENCE_S),
                found.words.pins,
                found.words.limits_bytes,
                found.words.draining,
                found.words.found_bytes,
            )
        )

    # --- connections ----------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                # The listener would stay readable and spin. Those who wait stay in its backlog.
                log.warning("out of file descriptors: no new connections for a moment")
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(EMFILE_PAUSE_S, self._listen_again)
            return
        accepted.setblocking(False)
        connection = Connection(
            self._loop,
            Channel(accepted, limit_bytes=MESSAGE_LIMIT_BYTES),
            self._received,
            self._lost,
            self._executor.segments.fds,
        )
        try:
            pid = self._allowed_pid(connection.channel)
        except WeightCacheError as error:
            log.warning("a connection is refused: %s", error)
            connection.close(error)
            return
        timer = self._loop.call_later(RESUME_LIMIT_S, self._end_silence, connection)
        self._silent[connection] = Silent(pid, timer)
        self._mind_leaving()

    def _allowed_pid(self, accepted: Channel) -> int:
        """Return the pid of a peer that may attach.

        Raises:
            PeerForbidden: another user.
            FdsExhausted: what is left is for those who are attached.
            ResourceError: this process has its share. One that has no pid here, in a namespace of
                its own, cannot be told from others and is not counted.
        """
        peer = accepted.credentials()
        if peer.uid not in self._allowed_uids:
            raise PeerForbidden(f"user {peer.uid} may not use this coordinator")
        if reserved(accepted.fileno(), FOR_CONNECTIONS):
            raise exhausted("no connection can be taken")
        if peer.pid and self._attached(peer.pid) >= ATTACHED_LIMIT:
            raise ResourceError(
                f"process {peer.pid} is attached {ATTACHED_LIMIT} times already",
                remedy="attach once per process, and let go of tensors of workers that were closed",
            )
        return peer.pid

    def _attached(self, pid: int) -> int:
        silent = sum(silent.pid == pid for silent in self._silent.values())
        return silent + sum(peer.pid == pid for peer in self._peers.values())

    def _end_silence(self, connection: Connection) -> None:
        """Who was stopped in the middle of it comes again: that is no fault of his."""
        late = f"who this is was not said within {RESUME_LIMIT_S:g} s"
        connection.close(ResourceError(late, remedy="connect again"))

    def _spoke(self, connection: Connection) -> None:
        """Stop waiting for a connection's session. Without its timer the process can sleep."""
        silent = self._silent.pop(connection, None)
        if silent is not None:
            silent.timer.cancel()
            if silent.statement is not None:
                silent.statement.close()
        self._mind_leaving()

    def _listen_again(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _received(self, connection: Connection, data: bytes, fds: list[int]) -> None:
        """Take one message. A malformed one ends its connection, and nothing else."""
        session = self._session_of.get(connection)
        try:
            if session is None:
                self._resume(connection, data, fds)
            else:
                self._said(session, decode(session_decoder, data), fds)
        except WeightCacheError as error:
            log.warning("a connection is closed: %s", error)
            connection.close(error)
        finally:
            channel.close_all(fds)

    def _resume(self, connection: Connection, data: bytes, fds: list[int]) -> None:
        """Take a RESUME, or what comes behind it. Once all of it is here, the session goes on."""
        silent = self._silent[connection]
        statement = silent.statement
        if statement is None:
            resume = decode(resume_decoder, data)
            if resume.version != VERSION:
                raise VersionMismatch(
                    f"the coordinator speaks protocol version {VERSION}, the peer {resume.version}"
                )
            statement = silent.statement = Statement(resume, self._executor.segments)
        else:
            statement.take(decode(held_decoder, data), fds)
        if statement.complete:
            self._refuse_what_goes(statement)
            session = self._session(connection, silent.pid, statement.resume)
            if session is not None:
                # First, as long as nothing can fail: from here on the ledger counts what it has.
                event = statement.event(session)
                self._spoke(connection)
                self._peers[session].connection = connection
                self._session_of[connection] = session
                self.feed(event)

    def _refuse_what_goes(self, statement: Statement) -> None:
        """Have a session come again that states a segment which is being freed: it was not awaited.

        Not for what is on a device: that is freed once nobody has it, and this session does.

        Raises:
            ResourceError: it does.
            ProtocolViolation: it states what no session can have.
        """
        for generation in self.ledger.generations.values():
            freeing = generation.state is State.FREEING and generation.pool == RAM
            if freeing and generation.id in statement.gens:
                raise ResourceError(f"generation {generation.id} is just being freed")
        statement.check(self.ledger, self._tokens.get(statement.resume.token))

    def _session(self, connection: Connection, pid: int, resume: Resume) -> SessionId | None:
        """Return the session that comes back, or a new one. None if its process has ended."""
        known = self._tokens.get(resume.token)
        if known is not None:
            peer = self._peers[known]
            if peer.pid != pid:
                raise PeerForbidden(f"this session is that of process {peer.pid}")
            if peer.connection is not None:
                peer.connection.close()  # its end has not arrived yet
            if known in self._peers:
                return known
        try:
            pidfd = connection.channel.open_pidfd()
            require_free(pidfd, FOR_CONNECTIONS)
        except ProcessLookupError:
            connection.close()
            return None
        except OSError as error:
            if out_of_fds(error):
                raise exhausted("there is none to watch the peer's process with") from error
            raise PlatformUnsupported(
                f"the peer's process cannot be watched: {error.strerror}"
            ) from error
        session = self._watch(pid, pidfd, resume.token)
        if resume.token and resume.role == "worker":
            self._executor.store.keep_session(resume.token, pidfd)
        self.feed(Attached(session, pid, resume.name, resume.device, resume.role))
        return session

    def _watch(self, pid: int, pidfd: int, token: str) -> SessionId:
        """Begin a session of a process. Takes over its pidfd."""
        self._last_session += 1
        session = SessionId(self._last_session)
        self._peers[session] = Peer(None, pid, pidfd, token, program(pid))
        if token:
            self._tokens[token] = session
        self._loop.add_reader(pidfd, self._process_ended, session)
        return session

    def _said(self, session: SessionId, message: FromSession, fds: list[int]) -> None:
        """Pass a message on. An ACQUIRE brings its opened source, and a COMMIT of a device's."""
        if isinstance(message, Commit) and fds:
            self._deposit(session, message.gen, fds)
        expected = _files_of(message)
        if len(fds) != expected:
            raise ProtocolViolation(f"{len(fds)} fds came with {type(message).__name__}")
        if not isinstance(message, Acquire) or message.source is None:
            self.feed(Said(session, message))
            return
        # Whether they are files at all, their loader says.
        fingerprint = source.fingerprint_of(
            fds, message.source, message.files, message.reading, message.version
        )
        request = (session, message.rid)
        if request in self._sources:
            return  # a replay: its first copy has not been answered yet
        if any(reserved(fd, FOR_SOURCES) for fd in fds):
            refusal = exhausted(f"the source of {message.key!r} cannot be kept")
            self.send(session, Fail(message.rid, Cause.of(refusal)), None)
            return
        opened = OpenedSource(fds, message.files, message.reading)
        fds.clear()
        self._sources.add(request, fingerprint, opened)
        self.feed(Said(session, message, fingerprint))
        if request not in self.ledger.requests:
            self._sources.close(*request)

    def _deposit(self, session: SessionId, gen: GenerationId, fds: list[int]) -> None:
        """Keep the memory that comes with a COMMIT, the first time. Without an fd it is refused.

        Raises:
            ProtocolViolation: this is not how that is filled.
        """
        filled = self.ledger.running.get(gen)
        if len(fds) > 1 or (filled is not None and filled.pool == RAM):
            raise ProtocolViolation(f"{len(fds)} fds came with the COMMIT of {gen}")
        owner = None if filled is None else filled.owner
        owned = isinstance(owner, Request) and owner.session == session
        begun = filled is not None and filled.state is State.FILLING
        segments = self._executor.segments
        if owned and begun and segments.fd(gen) is None and not reserved(fds[0], FOR_SEGMENTS):
            segments.adopt(gen, fds.pop())
        channel.close_all(fds)
        fds.clear()

    def _process_ended(self, session: SessionId) -> None:
        """A pidfd is readable. The process's last words come first, then its end, once."""
        connection = self._peers[session].connection
        if connection is not None:
            connection.drain_input()
        if session in self._peers:
            self._log_unfinished(session)
            self._sources.close_all(session)
            self.feed(SessionEnded(session))

    def _log_unfinished(self, session: SessionId) -> None:
        for generation in self.ledger.owned_by(session):
            # A doomed one was said already, or is of no use to anybody.
            if not (generation.sealing or generation.doomed):
                pid = self._peers[session].pid
                log.warning("process %d was lost while it filled %r", pid, generation.key)

    def _lost(self, connection: Connection, reason: WeightCacheError | None) -> None:
        """A connection is over. Its process may go on, and goes on being watched."""
        self._spoke(connection)
        session = self._session_of.pop(connection, None)
        if session is not None:
            peer = self._peers[session]
            peer.connection = None
            self._log_unfinished(session)
            self._sources.close_all(session)
            self.feed(Disconnected(session))
            self._look_for_exec(session, FIRST_LOOK_S)

    def _look_for_exec(self, session: SessionId, next_s: float) -> None:
        """End a session whose program was replaced. Until it comes back, look again and again.

        What its process has closed by itself, it may have closed long before it executes another.
        """
        peer = self._peers.get(session)
        if peer is None or peer.connection is not None or peer.program == UNKNOWN:
            return
        if program(peer.pid) not in (UNKNOWN, peer.program):
            self.feed(SessionEnded(session))
            return
        later_s = min(2 * next_s, LONGEST_LOOK_S)
        self._loop.call_later(next_s, self._look_for_exec, session, later_s)

    async def close(self) -> None:
        """Say BYE, end the children, free everything."""
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for peer in list(self._peers.values()):
            if peer.connection is not None:
                peer.connection.send(Bye())
        for connection in [*self._silent, *self._session_of]:
            connection.close()
        for session in list(self._peers):
            self.forget(session)
        if self._timer is not None:
            self._timer.cancel()
        await self._executor.close()


def _files_of(message: FromSession) -> int:
    """Return how many fds a message has to bring."""
    if not isinstance(message, Acquire) or message.source is None:
        return 0
    return len(message.files) or int(not source.is_url(message.source))
