"""The sole owner of segment fds: one per generation, from creation to free."""

from __future__ import annotations

import os

from coordinator.fd_limit import FOR_SEGMENTS, require_free
from coordinator.ledger.events import Offer
from shm_store import segment
from shm_store.errors import SegmentRefused
from shm_store.keys import GenerationId, LeaseId, parse_key
from shm_store.manifest import Preamble


def seal(fd: int, preamble: Preamble) -> None:
    """Seal a segment, and check that all that was charged is there. Blocks, as `segment.seal`.

    Its filler could punch holes into it, which is no change of size: those who read there would
    need memory then, and die of SIGBUS without. A sealed segment cannot be punched any more.

    Raises:
        SegmentRefused: as `segment.seal`; or pages are missing, and it stays sealed.
    """
    segment.seal(fd, preamble)
    missing_bytes = os.fstat(fd).st_size - segment.backed_bytes(fd)
    if missing_bytes > 0:
        raise SegmentRefused(
            f"{missing_bytes} bytes of generation {preamble.gen} were given back by its filler"
        )


def offer_of(fd: int, lease: LeaseId = LeaseId(0)) -> Offer:  # noqa: B008 (a number)
    """Return what a sealed segment says that it is, if it is whole.

    Raises:
        SegmentRefused: it is not sealed, has no manifest, or lacks pages.
        KeyRefused: what it says is its key is none.
        OSError: it is no file that can be read.
    """
    preamble = segment.read_preamble(fd)
    parse_key(preamble.key)
    segment.check_manifest(fd)
    size_bytes = os.fstat(fd).st_size
    if segment.backed_bytes(fd) < size_bytes:
        raise SegmentRefused(f"pages of generation {preamble.gen} are missing")
    return Offer(preamble.gen, lease, preamble.key, preamble.fingerprint, size_bytes)


class SegmentTable:
    """Generation id to fd. Nobody else keeps one of these fds, or closes one."""

    def __init__(self) -> None:
        self._fds: dict[GenerationId, int] = {}
        self._files: dict[GenerationId, tuple[int, int]] = {}
        """Device and inode of what the table knew, until `forget`."""

    def create(self, gen: GenerationId) -> int:
        """Make the empty segment of `gen` and return its fd, which stays the table's.

        Raises:
            OSError: EMFILE or ENFILE; nothing was made.
        """
        fd = segment.create(gen)
        require_free(fd, FOR_SEGMENTS)
        self.adopt(gen, fd)
        return fd

    def adopt(self, gen: GenerationId, fd: int) -> None:
        """Take over the segment of a generation that another process made."""
        earlier = self._fds.get(gen)
        if earlier is not None:
            os.close(earlier)
        self._fds[gen] = fd
        stat = os.fstat(fd)
        self._files[gen] = stat.st_dev, stat.st_ino

    def is_same(self, gen: GenerationId, fd: int) -> bool:
        """Say whether an fd may be of the segment of `gen`: it is, or nobody has known that."""
        stat = os.fstat(fd)
        return self._files.get(gen, (stat.st_dev, stat.st_ino)) == (stat.st_dev, stat.st_ino)

    def forget(self, gen: GenerationId) -> None:
        """The generation is gone, and nothing is offered as it any more."""
        self._files.pop(gen, None)

    def fd(self, gen: GenerationId) -> int | None:
        """Return the fd of `gen`, or None if it has no segment (any more)."""
        return self._fds.get(gen)

    def fds(self, gen: GenerationId) -> tuple[int, ...]:
        """Return the fd of `gen` for a message: it carries none if there is none."""
        fd = self._fds.get(gen)
        return () if fd is None else (fd,)

    def take(self, gen: GenerationId) -> int | None:
        """Hand the fd of `gen` over for closing. From here on the table does not know it."""
        return self._fds.pop(gen, None)

    def close(self) -> None:
        """Close everything: the coordinator exits."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
