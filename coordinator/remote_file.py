"""A file at a URL, which the loader reads in ranges and does not have on this host.

What reads its protocol is a `Transport`; here is what is the same for all: patience, and looking
whether it is still the same file. A range that broke off goes on where it ended.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from coordinator import remote_faults
from shm_store.errors import SourceChanged, SourceMalformed, WeightCacheError

HEAD_BYTES = 128 * 1024
"""Of each file, kept: most headers are in it, so that they cost no request of their own."""

Sink = Callable[[int, bytes], None]
"""Takes bytes and where in the file they are. They come in order, and not twice."""


@dataclass(frozen=True, slots=True)
class About:
    """What a server says of a file. `identity`: what makes it this one, as far as is known.

    `ranges`: parts of it can be asked for.
    """

    size_bytes: int
    identity: str
    ranges: bool = field(default=True, compare=False)


class Transport(Protocol):
    """Reads one file. Its methods raise whatever the library beneath does."""

    step_bytes: int
    """So much is asked for at once, at most."""
    streams: bool
    """Bytes come as they arrive, not only when all of a range have."""

    def open(self) -> tuple[About, bytes]:
        """Return what the server says of it, and the first bytes of it: `HEAD_BYTES`, or all."""

    def look(self) -> About:
        """Return what the server says of it now."""

    def fetch(self, start: int, end: int, sink: Sink) -> None:
        """Have `sink` take the bytes from `start` to `end`, or fewer of them.

        Raises:
            SourceChanged: they are of another file by now.
        """


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a server is waited for.

    Attributes:
        opening_s: until the first answer, over several tries.
        idle_s: of one range, without a byte of it. Less than an asker waits by default.
        tries: of one range in all; a server that breaks off more often is not worth it.
        first_pause_s, longest_pause_s: between two tries; each is twice the one before.
    """

    opening_s: float = 10.0
    idle_s: float = 60.0
    tries: int = 100
    first_pause_s: float = 0.2
    longest_pause_s: float = 8.0


Answer = TypeVar("Answer")


def insist(
    what: Callable[[], Answer],
    name: str,
    url: str,
    patience: Patience,
    progress: Callable[[], int] = lambda: 0,
    limit_s: float | None = None,
    stopped: threading.Event | None = None,
) -> Answer:
    """Return what `what` returns; what may pass is tried again, until nothing comes for long.

    Args:
        name: of the source, as it may be shown.
        progress: grows when something comes, and then patience begins anew.
        limit_s: without progress; as for a first answer, if none is given.
        stopped: set once nobody wants it any more.

    Raises:
        SourceError: it went wrong to the end.
    """
    stopped = stopped or threading.Event()
    limit_s = patience.opening_s if limit_s is None else limit_s
    pause_s = patience.first_pause_s
    came, since_s = progress(), time.monotonic()
    for left in reversed(range(patience.tries)):
        try:
            return what()
        except Exception as error:
            if isinstance(error, WeightCacheError | MemoryError):
                raise
            if progress() > came:
                came, since_s = progress(), time.monotonic()
                pause_s = patience.first_pause_s
            over = time.monotonic() + pause_s - since_s > limit_s
            if not left or over or stopped.is_set() or not remote_faults.passing(error):
                raise remote_faults.described(error, name, url) from error
        # Those who were dropped together are not to come again together.
        stopped.wait(pause_s * random.uniform(0.5, 1))
        pause_s = min(2 * pause_s, patience.longest_pause_s)
    raise AssertionError("the last try either returns or raises")


class RemoteFile:
    """A file, its size, and its name for errors."""

    def __init__(
        self,
        url: str,
        name: str,
        transport: Transport,
        patience: Patience | None = None,
        path: str = "",
    ) -> None:
        """Open it.

        Args:
            url: of the checkpoint that it is a file of.
            name: as it may be shown.
            path: what its transport calls it; if that is not `url`.

        Raises:
            SourceError: it is not there, may not be read, or its server does not answer.
        """
        self.url = url
        self.name = name
        self.path = path or url
        self.transport = transport
        self.patience = patience or Patience()
        self.stopped = threading.Event()
        """Set once nobody wants any more of it."""
        self._about, self._head = insist(transport.open, name, url, self.patience)
        self.size_bytes = self._about.size_bytes

    @property
    def ranges(self) -> bool:
        """Whether parts of it can be asked for; else it is read from its beginning each time."""
        return self._about.ranges

    def read(self, size_bytes: int, offset_bytes: int) -> bytes:
        """Return so many bytes of it.

        Raises:
            SourceMalformed: it ends before that.
            SourceError: it cannot be read.
        """
        end = offset_bytes + size_bytes
        if end > self.size_bytes:
            raise SourceMalformed(f"{self.name}: ends at byte {self.size_bytes}", source=self.name)
        data = bytearray(self._head[offset_bytes:end])
        if len(data) < size_bytes:
            self.fetch(offset_bytes + len(data), end, lambda _, chunk: data.extend(chunk))
        return bytes(data)

    def keep_head(self, size_bytes: int) -> None:
        """Have the first bytes at hand for `read`."""
        if len(self._head) < size_bytes:
            self._head = self.read(size_bytes, 0)

    def fetch(self, start: int, end: int, sink: Sink) -> None:
        """Have `sink` take the bytes from `start` to `end`, in order and none twice.

        What it raises ends this.

        Raises:
            SourceChanged: the file is another one by now.
            SourceError: it could not be read to the end, with all patience.
        """
        done = start
        failed: Exception | None = None

        def taken(offset: int, chunk: bytes) -> None:
            nonlocal done, failed
            try:
                sink(offset, chunk)
            except Exception as error:
                failed = error
                raise
            done = offset + len(chunk)

        def rest() -> None:
            try:
                self.transport.fetch(done, end, taken)
            except Exception:
                if failed is None:
                    raise
                return  # not the server's fault
            if done < end:
                raise remote_faults.EndedEarly(f"ended at byte {done}, before byte {end}")

        self._insist(rest, lambda: done)
        if failed is not None:
            raise failed

    def check_unchanged(self) -> None:
        """Ask the server again.

        Raises:
            SourceChanged: it is another file by now.
            SourceError: it cannot be asked.
        """
        if self._insist(self.transport.look) != self._about:
            raise SourceChanged(f"{self.name}: it changed while it was read", source=self.name)

    def _insist(
        self, what: Callable[[], Answer], progress: Callable[[], int] = lambda: 0
    ) -> Answer:
        about = (self.name, self.url, self.patience, progress, self.patience.idle_s)
        return insist(what, *about, self.stopped)
