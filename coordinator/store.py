"""What outlives this coordinator: its READY segments, its sessions' pidfds, and a few words.

Kept by whoever manages this process, systemd or `weight-cache launch` (see `notify`); without one
nothing is, and each call does nothing. In the store means READY: a segment comes in before anybody
is told that it is, and leaves before anybody is told that it is not any more.

Pins, limits, and that it drains, are in a memfd of their own. A change makes a new one, which is
stored before the old is removed, so that whenever we end one of them is whole.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from dataclasses import dataclass, field

import msgspec

from coordinator import notify
from coordinator.device_memory import require_memory
from coordinator.kernel_facts import ABOUT, WORDS
from coordinator.ledger.events import Offer
from coordinator.notify import ManagerGone, StoreLost
from coordinator.segment_table import offer_of
from shm_store import segment
from shm_store.channel import close_all
from shm_store.errors import SegmentRefused, WeightCacheError
from shm_store.keys import Fingerprint, GenerationId, Key, LeaseId, parse_key, was_given
from shm_store.memfds import PREFIX, memfd_name

log = logging.getLogger("coordinator")

RETRY_S = 0.1
"""Between two attempts to tell a manager that does not read."""

WORDS_LIMIT_BYTES = 1 << 26


class About(msgspec.Struct, frozen=True):
    """What memory on a device is, which says nothing itself. In a memfd behind it."""

    pool: str
    key: Key
    fingerprint: Fingerprint
    size_bytes: int


class Words(msgspec.Struct, frozen=True):
    """What is remembered beside fds."""

    pins: tuple[Key, ...] = ()
    limits_bytes: dict[str, int] = {}
    draining: bool = False
    found_bytes: dict[str, int] = {}


@dataclass(slots=True)
class Found:
    """What an earlier coordinator has stored. The fds are the caller's.

    Attributes:
        segments: by generation, each checked.
        sessions: pidfds of processes that live, by the token of the session.
    """

    segments: dict[GenerationId, tuple[int, Offer]] = field(default_factory=dict)
    sessions: dict[str, int] = field(default_factory=dict)
    words: Words = field(default_factory=Words)


class Store:
    """Tells the manager, in order, and never waits for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._unsaid: deque[tuple[str, tuple[int, ...]]] = deque()
        self._number = 0
        self._on_device: set[GenerationId] = set()
        """What is stored of devices. Stored again, it would have two memfds that say what it is."""

    def keep_segment(self, gen: GenerationId, fd: int, about: Offer | None = None) -> None:
        """Store a segment. On a device with what it is `about`: neither is of any use alone."""
        if about is None:
            self._say(f"segment-{gen}", fd)
            return
        if gen in self._on_device:
            return
        said = About(about.pool, about.key, about.fingerprint, about.size_bytes)
        try:
            words = _memfd(ABOUT, said)
        except OSError as error:
            log.warning("generation %s is not stored: %s", gen, error.strerror)
            return
        self._on_device.add(gen)
        self._say(f"segment-{gen}", fd, words)
        os.close(words)

    def forget_segment(self, gen: GenerationId) -> None:
        self._on_device.discard(gen)
        self._say(f"segment-{gen}")

    def keep_session(self, token: str, pidfd: int) -> None:
        self._say(f"session-{token}", pidfd)

    def forget_session(self, token: str) -> None:
        self._say(f"session-{token}")

    def remember(self, words: Words) -> None:
        """Store words instead of those that were stored before."""
        if not notify.offered():
            return
        try:
            fd = _memfd(WORDS, words)
        except OSError as error:
            log.warning("pins and limits are not stored: %s", error.strerror)
            return
        self._number += 1
        self._say(f"words-{self._number}", fd)
        self._say(f"words-{self._number - 1}")
        os.close(fd)

    def recover(self, start_ns: int) -> Found | None:
        """Return what came with this process and can be believed; None if nothing did.

        Args:
            start_ns: when this coordinator started: all that it finds was given its id before.
        """
        inherited = notify.inherited()
        if not inherited:
            return None
        found = Found()
        numbers, read = [0], 0
        for name, fds in inherited.items():
            kind, _, what = name.partition("-")
            kept, once = False, 1
            if kind == "segment":
                fds.sort(key=_says)  # which comes first is for the manager to choose
                about = _read_about(fds[-1]) if _says(fds[-1]) else None
                if about is not None:
                    once = 2
                    fds.insert(1, fds.pop())
                kept = self._recover_segment(found, GenerationId(what), fds[0], about, start_ns)
            elif kind == "session":
                kept = not _has_ended(fds[0])
                if kept:
                    found.sessions[what] = fds[0]
            elif kind == "words" and what.isdigit():
                words = _read_words(fds[0])
                if words is not None and int(what) > read:
                    found.words, read = words, int(what)
                numbers.append(int(what))
            if len(fds) > once:
                log.warning("%s was stored %d times: one is used", name, len(fds) // once)
            if kind != "words" and (not kept or len(fds) > once):
                self._say(name)
                if kept:
                    self._say(name, *fds[:once])
            close_all(fds[kept:])
        self._number = max(numbers)
        if read < self._number:
            self.remember(found.words)  # the newest are none: it is for these to be found next
        for number in sorted(set(numbers) - {0, self._number}):
            self._say(f"words-{number}")
        return found

    def _recover_segment(
        self, found: Found, gen: GenerationId, fd: int, about: About | None, start_ns: int
    ) -> bool:
        try:
            if about is None:
                offer = offer_of(fd)
            else:
                require_memory(fd, about.pool, gen, about.size_bytes)
                facts = (parse_key(about.key), about.fingerprint, about.size_bytes)
                offer = Offer(gen, LeaseId(0), *facts, pool=about.pool)
            if offer.gen != gen:
                raise SegmentRefused(f"it says that it is {offer.gen}")
            if not was_given(gen, start_ns, 0):
                raise SegmentRefused("no coordinator has given this id")
        except (WeightCacheError, OSError) as error:
            log.warning("what was stored as generation %s is not used: %s", gen, error)
            return False
        found.segments[gen] = fd, offer
        if about is not None:
            self._on_device.add(gen)
        return True

    def _say(self, name: str, *fds: int) -> None:
        """Store fds, which stay the caller's, or remove a name."""
        if not notify.offered():
            return
        if not fds and self._unsay(name):
            return
        if self._unsaid or not self._tell(name, fds, first=True):
            if not self._unsaid:
                self._loop.call_later(RETRY_S, self._tell_the_rest)
            self._unsaid.append((name, tuple(map(os.dup, fds))))

    def _unsay(self, name: str) -> bool:
        """Take back that something is to be stored, if that was not told; say whether it was so.

        Its fd would keep memory that is free by the books.
        """
        for waiting in self._unsaid:
            if waiting[0] == name and waiting[1]:
                self._unsaid.remove(waiting)
                close_all(list(waiting[1]))
                return True
        return False

    def _tell(self, name: str, fds: tuple[int, ...], *, first: bool = False) -> bool:
        """Return whether it could be told; if not, the log says so the first time.

        One that is gone has been killed, and this coordinator ends with it: whoever is left of the
        group has said so, in words for people.
        """
        try:
            if not fds:
                notify.remove(name, 0.0)
            else:
                notify.store(name, fds, 0.0)
        except ManagerGone as error:
            log.debug("%s", error)
            return False
        except StoreLost:
            if first:
                log.warning("what started this coordinator does not read what it is to store")
            return False
        return True

    def _tell_the_rest(self) -> None:
        while self._unsaid:
            name, fds = self._unsaid[0]
            if not self._tell(name, fds):
                self._loop.call_later(RETRY_S, self._tell_the_rest)
                return
            self._unsaid.popleft()
            close_all(list(fds))


def _memfd(name: str, said: Words | About) -> int:
    """Return a memfd that says this."""
    fd = os.memfd_create(f"{PREFIX}{name}", os.MFD_CLOEXEC)
    segment.write_at(fd, msgspec.msgpack.encode(said), 0)
    return fd


def _says(fd: int) -> bool:
    """Say whether this says what memory on a device is."""
    return memfd_name(fd) == f"{PREFIX}{ABOUT}"


def _read_about(fd: int) -> About | None:
    """Return what memory on a device is; None if this does not say."""
    try:
        return msgspec.msgpack.decode(os.pread(fd, WORDS_LIMIT_BYTES, 0), type=About)
    except (msgspec.DecodeError, OSError):
        return None


def _has_ended(pidfd: int) -> bool:
    return pid_of(pidfd) <= 0


def pid_of(pidfd: int) -> int:
    """Return the pid of the process that a pidfd is of, as we see it; -1 once it has ended."""
    with open(f"/proc/self/fdinfo/{pidfd}") as lines:
        for line in lines:
            if line.startswith("Pid:"):
                return int(line.split()[1])
    return -1


def _read_words(fd: int) -> Words | None:
    try:
        return msgspec.msgpack.decode(os.pread(fd, WORDS_LIMIT_BYTES, 0), type=Words)
    except (msgspec.DecodeError, OSError) as error:
        log.warning("what was stored of pins and limits is not used: %s", error)
        return None
