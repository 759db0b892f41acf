"""What a session says behind its RESUME that it has, and how much of that is believed.

A segment says itself what it is: its preamble is sealed. So an fd that comes along is only taken
for the generation that is named in it, whole, sealed, and with the inode of the one we have. What
no session can have by the ledger's word is refused, too, before any of it counts.
"""

from __future__ import annotations

import os
from dataclasses import replace

from coordinator.device_memory import require_memory
from coordinator.fd_limit import FOR_SEGMENTS, exhausted, reserved
from coordinator.ledger.events import Offer, Resumed
from coordinator.ledger.recovery import cannot_be
from coordinator.ledger.state import Ledger
from coordinator.segment_table import SegmentTable, offer_of
from shm_store import segment
from shm_store.channel import close_all
from shm_store.errors import ProtocolViolation, SegmentRefused
from shm_store.keys import GenerationId, LeaseId, SessionId, parse_key, version_fingerprint
from shm_store.layout import PAGE_BYTES
from shm_store.wire import Declare, Held, HeldCharge, HeldFill, HeldMap, HeldOnDevice, Resume

HELD_LIMIT = 1 << 16


class Statement:
    """A RESUME and what came behind it so far. Owns the segments that came along."""

    def __init__(self, resume: Resume, segments: SegmentTable) -> None:
        """Begin with a RESUME.

        Raises:
            ProtocolViolation: it announces more than anybody has.
        """
        if resume.held > HELD_LIMIT:
            raise ProtocolViolation(f"a session that has {resume.held} things")
        self.resume = resume
        self._segments = segments
        self._maps: list[Offer] = []
        self._fills: list[Offer] = []
        self._charges: list[HeldCharge] = []
        self._devices: list[Declare] = []
        self._fds: dict[GenerationId, int] = {}
        self.gens: set[GenerationId] = set()

    @property
    def complete(self) -> bool:
        return len(self.gens) + len(self._devices) == self.resume.held

    def take(self, held: Held, fds: list[int]) -> None:
        """Take one thing that the session has. What is kept of `fds` is taken out of it.

        Raises:
            ProtocolViolation: it is not what belongs here.
            SegmentRefused: the segment is not the one that it is said to be.
            KeyRefused: it has no key, but something else.
            FdsExhausted: there is no fd for it.
        """
        if len(fds) > isinstance(held, HeldMap | HeldFill | HeldOnDevice):
            raise ProtocolViolation(f"{len(fds)} fds came with {type(held).__name__}")
        if isinstance(held, Declare):
            self._devices.append(held)
            return
        if held.gen in self.gens:
            raise ProtocolViolation(f"{held.gen} was stated twice")
        self.gens.add(held.gen)
        match held:
            case HeldMap(gen, lease, stale):
                self._maps.append(replace(self._sealed(gen, lease, fds), stale=stale))
            case HeldOnDevice():
                parse_key(held.key)
                self._maps.append(self._on_device(held, fds))
            case HeldFill(gen, rid, key) if fds and not segment.is_sealed(fds[0]):
                parse_key(key)
                self._fills.append(self._unsealed(held, fds))
            case HeldFill(gen, rid):
                self._fills.append(self._sealed(gen, LeaseId(rid), fds))
            case HeldCharge():
                parse_key(held.key)
                self._charges.append(held)

    def check(self, ledger: Ledger, session: SessionId | None) -> None:
        """Hold all of it against the ledger.

        Args:
            session: the one that comes back; None if it is a new one.

        Raises:
            ProtocolViolation: no session can have that.
        """
        lie = cannot_be(ledger, session, self._maps, self._fills, self._charges, self._devices)
        if lie is not None:
            raise ProtocolViolation(lie)

    def event(self, session: SessionId) -> Resumed:
        """Return all of it, and hand the segments over to the table."""
        for gen, fd in self._fds.items():
            self._segments.adopt(gen, fd)
        self._fds = {}
        return Resumed(
            session,
            self.resume.name,
            self.resume.device,
            tuple(self._maps),
            tuple(self._fills),
            tuple(self._charges),
            tuple(self._devices),
        )

    def close(self) -> None:
        """Close what nobody has taken over."""
        close_all(list(self._fds.values()))
        self._fds = {}

    def _sealed(self, gen: GenerationId, lease: LeaseId, fds: list[int]) -> Offer:
        fd = self._known(gen, fds)
        try:
            offer = offer_of(fd, lease)
        except OSError as error:
            raise SegmentRefused(f"what is offered as {gen}: {error.strerror}") from error
        if offer.gen != gen:
            raise SegmentRefused(f"a segment offered as {gen} says that it is {offer.gen}")
        self._keep(gen, fd, fds)
        return offer

    def _on_device(self, held: HeldOnDevice, fds: list[int]) -> Offer:
        fd = self._known(held.gen, fds)
        try:
            require_memory(fd, held.pool, held.gen, held.size_bytes)
        except OSError as error:
            raise SegmentRefused(f"what is offered as {held.gen}: {error.strerror}") from error
        self._keep(held.gen, fd, fds)
        return Offer(
            held.gen,
            held.lease,
            held.key,
            version_fingerprint(held.copy_of),
            held.size_bytes,
            stale=held.stale,
            pool=held.pool,
        )

    def _unsealed(self, held: HeldFill, fds: list[int]) -> Offer:
        fd = self._known(held.gen, fds)
        size_bytes = os.fstat(fd).st_size
        made_here = segment.is_fixed(fd) and size_bytes and size_bytes % PAGE_BYTES == 0
        # All of its pages were there before it was handed out to be filled.
        if not made_here or segment.backed_bytes(fd) < size_bytes:
            raise SegmentRefused(f"a segment offered as {held.gen} was not made here")
        self._keep(held.gen, fd, fds)
        rid = LeaseId(held.rid)
        return Offer(held.gen, rid, held.key, held.fingerprint, size_bytes, sealed=False)

    def _known(self, gen: GenerationId, fds: list[int]) -> int:
        """Return the segment to look at: ours, which the one that came must be; or that one."""
        ours = self._segments.fd(gen)
        if not fds:
            if ours is None:
                raise ProtocolViolation(f"the segment of {gen} is unknown, and did not come along")
            return ours
        if not self._segments.is_same(gen, fds[0]):
            raise SegmentRefused(f"another segment was offered as {gen}")
        return fds[0]

    def _keep(self, gen: GenerationId, fd: int, fds: list[int]) -> None:
        """Keep the fd that came, if there is none of that segment."""
        if self._segments.fd(gen) is not None or gen in self._fds:
            return
        if reserved(fd, FOR_SEGMENTS):
            raise exhausted(f"the segment of {gen} cannot be kept")
        self._fds[gen] = fd
        fds.remove(fd)
