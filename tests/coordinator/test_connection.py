"""A connection on the event loop, with a peer that never stops."""

from __future__ import annotations

import asyncio
import socket

from coordinator.connection import LAST_WORDS_LIMIT, Connection
from shm_store.channel import Channel


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
            lambda gen: None,
        )
        connection.drain_input()
        connection.close()

    asyncio.run(listen())
    theirs.close()
    assert heard == [b"more"] * LAST_WORDS_LIMIT
