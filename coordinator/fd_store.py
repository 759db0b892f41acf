"""The fds that a group keeps for its coordinator while there is none, and what is said of them.

`read_notice` is pure: one datagram of systemd's protocol. `FdStore` owns the fds: each is here
until its name is removed, or the group ends. It keeps anything; what it is, the next coordinator
checks.

    Note on the names' room
    fact: the kernel takes no environment variable longer than 128 KiB, and all names travel in one
    consequence: with long names a coordinator could store what can never be handed to the next one,
    which then could not start at all
    choice: the names' bytes are bounded beside the number of fds
    cost: none at the lengths that are used
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shm_store.channel import close_all

NOTICE_LIMIT_BYTES = 4096
NAME_LIMIT = 255
NAMES_LIMIT_BYTES = 120 * 1024
FDS_LIMIT = 8192

DEFAULT_NAME = "stored"
"""What systemd calls an fd that was stored without a name."""


class NoticeRefused(Exception):
    """What was said is not of the protocol, or cannot be done. The text says why."""


@dataclass(frozen=True, slots=True)
class Notice:
    """One datagram. What is none of the protocol's words was ignored, as the protocol wants it."""

    ready: bool = False
    stopping: bool = False
    barrier: bool = False
    store: bool = False
    remove: bool = False
    name: str | None = None


def read_notice(data: bytes) -> Notice:
    """Return what a datagram says.

    Raises:
        NoticeRefused: it is no list of assignments, or contradicts itself.
    """
    if len(data) > NOTICE_LIMIT_BYTES:
        raise NoticeRefused(f"it is longer than {NOTICE_LIMIT_BYTES} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise NoticeRefused("it is not text") from error
    lines = [line for line in text.split("\n") if line]
    if not lines or any("=" not in line or "\0" in line for line in lines):
        raise NoticeRefused("it is no list of assignments")
    names = [line.removeprefix("FDNAME=") for line in lines if line.startswith("FDNAME=")]
    notice = Notice(
        ready="READY=1" in lines,
        stopping="STOPPING=1" in lines,
        barrier="BARRIER=1" in lines,
        store="FDSTORE=1" in lines,
        remove="FDSTOREREMOVE=1" in lines,
        name=names[0] if names else None,
    )
    if notice.barrier and len(lines) > 1:
        raise NoticeRefused("a barrier comes alone")
    if notice.store and notice.remove:
        raise NoticeRefused("it stores and removes at once")
    if notice.remove and notice.name is None:
        raise NoticeRefused("nothing says which fds are to be removed")
    if notice.name is not None:
        _check_name(notice.name)
    return notice


def _check_name(name: str) -> None:
    """Names as systemd takes them: printable ASCII without a colon, which separates them."""
    if len(name) > NAME_LIMIT or any(not " " <= letter <= "~" or letter == ":" for letter in name):
        raise NoticeRefused(f"{name[:NAME_LIMIT]!r} is no name for an fd")


class FdStore:
    """The kept fds, in the order of their names' first coming."""

    def __init__(self, limit: int = FDS_LIMIT) -> None:
        self.limit = limit
        self._kept: dict[str, list[int]] = {}

    def keep(self, name: str, fds: Iterable[int]) -> None:
        """Take over `fds`: all of them, or none, and then they are closed.

        A file that is kept under this name already is not kept twice: a coordinator that had no
        answer says it again.

        Raises:
            NoticeRefused: there is no room.
        """
        kept = self._kept.get(name, [])
        new: list[int] = []
        for fd in fds:
            if any(_same_file(fd, other) for other in (*kept, *new)):
                os.close(fd)
            else:
                new.append(fd)
        count = sum(map(len, self._kept.values())) + len(new)
        names_bytes = sum((len(n) + 1) * len(kept) for n, kept in self._kept.items())
        if count > self.limit or names_bytes + (len(name) + 1) * len(new) > NAMES_LIMIT_BYTES:
            close_all(new)
            room = f"{self.limit} fds" if count > self.limit else f"{NAMES_LIMIT_BYTES} of names"
            raise NoticeRefused(f"{name!r} cannot be kept: the store is full ({room})")
        if new:
            self._kept.setdefault(name, []).extend(new)

    def remove(self, name: str) -> None:
        """Close what is kept under `name`, if anything is."""
        close_all(self._kept.pop(name, ()))

    def handover(self) -> tuple[Sequence[int], Sequence[str]]:
        """Return every fd and its name, for the next coordinator. They stay the store's."""
        pairs = [(fd, name) for name, fds in self._kept.items() for fd in fds]
        return [fd for fd, _ in pairs], [name for _, name in pairs]

    def close(self) -> None:
        """Close everything."""
        for name in list(self._kept):
            self.remove(name)

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))


def _same_file(one: int, other: int) -> bool:
    """Say whether both are the same memfd or file. Pidfds are not told apart by older kernels."""
    ours, theirs = os.fstat(one), os.fstat(other)
    return stat.S_ISREG(ours.st_mode) and os.path.samestat(ours, theirs)
