"""A coordinator spoken by hand, and a client attached to it, in one process."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from gpu_worker import registry
from gpu_worker.client import Client
from gpu_worker.request import Ask
from shm_store import channel, segment
from shm_store.errors import CoordinatorLost, WeightCacheError
from shm_store.keys import Fingerprint, GenerationId, Key, RequestId
from shm_store.report import ModelReport
from shm_store.wire import (
    Bye,
    Cause,
    Fail,
    Flush,
    Flushed,
    Grant,
    Held,
    Progress,
    Reserve,
    Resume,
    Space,
    Ticket,
    decode,
    encode,
    held_decoder,
    resume_decoder,
    session_decoder,
)
from tests.gpu_worker.sealed import seal

WAIT_S = 10.0
KEY = Key("tests/weights")


class Sharer:
    """Shares a connection, as a worker does that keeps nothing."""

    def counted(self) -> list[ModelReport]:
        return []

    def look(self, gen: GenerationId) -> None:
        return None

    def make_room(self, gen: GenerationId) -> None:
        pass

    def retire(self, gen: GenerationId) -> None:
        pass


class SpokenCoordinator:
    """Listens on `path`. Every read has a timeout; `fds` are those of the last message read.

    `gen` is a generation that nobody else in this process uses.
    """

    numbers = itertools.count(1)

    def __init__(self, path: str) -> None:
        self.path = path
        self.gen = GenerationId(f"{os.getpid()}-{next(self.numbers)}")
        self.listener = channel.listen(path)
        self.threads = ThreadPoolExecutor(16)
        self.clients: list[Client] = []
        self.sharers: list[Sharer] = []
        self.peers: list[channel.Channel] = []
        self.fds: list[int] = []
        self.progress: list[Progress] = []
        self.told_fds: dict[object, list[int]] = {}

    def close(self) -> None:
        for client in self.clients:
            client.stop()
        for peer in self.peers:
            peer.close()
        channel.close_all(self.fds)
        for fds in self.told_fds.values():
            channel.close_all(fds)
        self.listener.close()
        self.threads.shutdown()

    # --- connections ----------------------------------------------------------------------------

    def call(self, function, *arguments) -> Future:
        """Run something in another thread."""
        return self.threads.submit(function, *arguments)

    def connecting(self) -> bool:
        """Whether somebody has connected and was not accepted yet."""
        return bool(select.select([self.listener], [], [], 0)[0])

    def accept(self) -> Resume:
        """Take the next connection; `self.peer` is its channel."""
        assert select.select([self.listener], [], [], WAIT_S)[0], "nobody connects"
        connected, _ = self.listener.accept()
        connected.settimeout(WAIT_S)
        self.peer = channel.Channel(connected)
        self.peers.append(self.peer)
        received = self.peer.receive()
        assert received is not None
        return decode(resume_decoder, received[0])

    def come_back(self) -> tuple[Resume, list[Held], list]:
        """Take the next connection and answer its handshake.

        Returns:
            Its RESUME, what it states, and what it says then, up to the FLUSH behind that. The fds
            that came with each are in `told_fds`, until the end.
        """
        resume = self.accept()
        held = [self._told(held_decoder) for _ in range(resume.held)]
        asked: list = []
        while not isinstance(message := self._told(session_decoder), Flush):
            asked.append(message)
        self.send(Flushed(message.rid))
        return resume, held, asked

    def _told(self, decoder):
        received = self.peer.receive()
        assert received is not None
        message = decode(decoder, received[0])
        if received[1]:
            self.told_fds[message] = received[1]
        return message

    def die(self, client: Client) -> None:
        """End without a word, and return once `client` knows. Nobody listens any more."""
        self.listener.close()
        os.unlink(self.path)
        self.peer.close()
        with contextlib.suppress(CoordinatorLost):
            client.flush(WAIT_S, patient=False)

    def rise(self) -> None:
        """Listen again."""
        self.listener = channel.listen(self.path)

    def leave_for_good(self) -> None:
        """Say BYE, and end the connection."""
        self.send(Bye())
        self.peer.close()

    def share(self, path: str = "", patience_s: float = 0.0) -> Client:
        """Share the connection, until `leave`."""
        sharer = Sharer()
        self.sharers.append(sharer)
        return registry.share(path or self.path, "test", "cpu", sharer, patience_s)

    def leave(self, client: Client) -> None:
        """End one share."""
        registry.leave(client, self.sharers.pop())

    def attach(self, patience_s: float = 0.0) -> Client:
        """Attach this process and answer its handshake."""
        attaching = self.call(self.share, "", patience_s)
        self.accept()
        self.answer_flush()
        self.clients.append(attaching.result(WAIT_S))
        return self.clients[-1]

    # --- messages -------------------------------------------------------------------------------

    def receive(self):
        """The next message that is no progress, which goes to `progress`; None at end of file."""
        while True:
            channel.close_all(self.fds)
            self.fds = []
            received = self.peer.receive()
            if received is None:
                return None
            data, self.fds = received
            message = decode(session_decoder, data)
            if not isinstance(message, Progress):
                return message
            self.progress.append(message)

    def expect(self, kind: type):
        message = self.receive()
        assert isinstance(message, kind), message
        return message

    def send(self, message, *fds: int) -> None:
        """Send, and close the fds."""
        self.peer.send(encode(message), fds)
        channel.close_all(fds)

    def answer_flush(self) -> None:
        self.send(Flushed(self.expect(Flush).rid))

    def fail(self, rid: RequestId, error: WeightCacheError) -> None:
        self.send(Fail(rid, Cause.of(error)))

    def grant(self, rid: RequestId) -> None:
        """Grant a sealed segment whose one tensor `w` counts from 0 to 15."""
        self.send(Grant(rid, self.gen), seal({"w": torch.arange(16.0)}, self.gen))

    def ticket(self, rid: RequestId) -> None:
        self.send(Ticket(rid, self.gen, KEY, Fingerprint("build:")))

    def reservation(self, rid: RequestId) -> Reserve:
        """Give the ticket; return the RESERVE that follows."""
        self.ticket(rid)
        return self.expect(Reserve)

    def send_space(self, reserve: Reserve) -> int:
        """Send a backed segment; return an fd of it that is the test's own."""
        fd = segment.create(reserve.gen)
        os.posix_fallocate(fd, 0, reserve.size_bytes)
        self.send(Space(reserve.gen), os.dup(fd))
        return fd

    def in_step(self, client: Client) -> None:
        """Return once the client has taken everything sent so far; it must have said nothing."""
        flushing = self.call(client.flush, WAIT_S)
        self.answer_flush()
        flushing.result(WAIT_S)


def built(build=lambda: {"w": torch.ones(4)}, version: str = "") -> Ask:
    """Ask for weights that this process can build."""
    return Ask(KEY, None, build, version)


def segments_open(coordinator: SpokenCoordinator) -> list[str]:
    """This process's fds of the segment that a test plays with."""
    return fds_of(f"/memfd:weight-cache:{coordinator.gen} (deleted)")


def fds_of(target: str) -> list[str]:
    """This process's fds of one file."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}") == target:
                found.append(fd)
        except FileNotFoundError:
            pass  # the one that listed them
    return found
