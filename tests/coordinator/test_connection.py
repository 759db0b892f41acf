"""A connection on the event loop, with a peer that never stops."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence

from coordinator.connection import IN_FLIGHT_PAUSE_S, LAST_WORDS_LIMIT, Connection
from shm_store.channel import Channel, close_all
from shm_store.keys import GenerationId, RequestId
from shm_store.wire import Bye, Grant, decode, to_session_decoder

GEN = GenerationId("0000000000000001-00000001")


class Endless(Channel):
    """There is always one more message, as when a forked child floods its parent's socket."""

    def receive(self) -> tuple[bytes, list[int]] | None:
        return b"more", []


def test_last_words_have_an_end():
    """The end of a process must not wait for whoever inherited its socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    heard = []

    async def listen() -> None:
        loop = asyncio.get_running_loop()
        connection = Connection(
            loop,
            Endless(ours),
            lambda _, data, fds: heard.append(data),
            lambda _, reason: None,
            lambda gen: (),
        )
        connection.drain_input()
        connection.close()

    asyncio.run(listen())
    theirs.close()
    assert heard == [b"more"] * LAST_WORDS_LIMIT


class Crowded(Channel):
    """Too many fds are in flight for the first attempts to send one."""

    def __init__(self, connected: socket.socket, refusals: int) -> None:
        super().__init__(connected)
        self.refusals = refusals

    def send_frame(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        if fds and self.refusals:
            self.refusals -= 1
            raise BlockingIOError(errno.ETOOMANYREFS, "too many references")
        super().send_frame(frame, fds)


def test_too_many_fds_in_flight_delay_a_message_and_end_no_connection():
    """Others' unread fds count for the whole user. The answer comes later, in order, unspun."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.settimeout(20)
    peer = Channel(theirs)
    heard = asyncio.Event()

    async def talk() -> list[tuple[type, int]]:
        loop = asyncio.get_running_loop()
        ours.setblocking(False)
        crowded = Crowded(ours, refusals=3)
        connection = Connection(
            loop, crowded, lambda *_: heard.set(), lambda _, reason: None, lambda gen: (0,)
        )
        started_s = loop.time()
        connection.send(Grant(RequestId(1), GEN), GEN)
        connection.send(Bye())
        assert crowded.refusals == 2  # the second message does not try again
        peer.send(b"something")
        answers = []
        for _ in range(2):
            received = await loop.run_in_executor(None, peer.receive)
            assert received is not None
            data, fds = received
            answers.append((type(decode(to_session_decoder, data)), len(fds)))
            close_all(fds)
        assert loop.time() - started_s >= 3 * IN_FLIGHT_PAUSE_S
        await asyncio.wait_for(heard.wait(), 20)  # and it is read again
        connection.close()
        return answers

    assert asyncio.run(talk()) == [(Grant, 1), (Bye, 0)]
    peer.close()
