"""The life of one host segment: create, back, fill, seal, read, free. Owns nothing; works on fds.

Who may do what: the coordinator creates and seals, a child of it backs, the ticket holder fills,
every lease holder reads. Mapping for tensors is the worker's (`gpu_worker.mapping`).

    Note on backing
    fact: `ftruncate` beyond what the host can give succeeds, and the first touch then dies of
    SIGBUS; `posix_fallocate` says ENOSPC instead
    consequence: a segment is backed by real pages before anyone writes to it
    choice: back in bounded steps, so that the child can notice that its parent is gone
    cost: one more pass over the pages, hidden in the price of touching them first
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time

from shm_store.errors import PlatformUnsupported, SegmentRefused
from shm_store.keys import GenerationId
from shm_store.layout import MANIFEST_LENGTH_BYTES, PREAMBLE_BYTES, data_start
from shm_store.manifest import (
    Manifest,
    Preamble,
    decode_manifest,
    decode_preamble,
    encode_preamble,
)

# From <linux/fcntl.h>, spelled out so that importing works on systems without them.
F_ADD_SEALS = 1033
F_GET_SEALS = 1034
SIZE_SEALS = 0x0002 | 0x0004
"""F_SEAL_SHRINK, GROW: bytes can still be written, but the size is what was charged."""
SEALS = 0x0001 | SIZE_SEALS | 0x0008
"""F_SEAL_SEAL, SHRINK, GROW, WRITE: nobody can ever change these bytes or this size again."""

SEAL_RETRIES = 20
SEAL_PAUSE_S = 0.005
_LENGTH = struct.Struct("<Q")


def create(gen: GenerationId) -> int:
    """Return the fd of a new empty segment, named by generation (a key may be too long).

    Raises:
        PlatformUnsupported: no memfd here.
        OSError: EMFILE or ENFILE.
    """
    if not hasattr(os, "memfd_create"):
        raise PlatformUnsupported("this system has no memfd_create")
    return os.memfd_create(f"weight-cache:{gen}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def fix_size(fd: int) -> None:
    """Forbid a backed segment to grow or shrink, before its filler gets the fd.

    A write past the end would take memory that nobody charged.
    """
    fcntl.fcntl(fd, F_ADD_SEALS, SIZE_SEALS)


def write_manifest(fd: int, manifest: bytes) -> int:
    """Write the encoded manifest into a backed segment; return where tensor bytes begin."""
    write_at(fd, _LENGTH.pack(len(manifest)) + manifest, PREAMBLE_BYTES)
    return data_start(len(manifest))


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`.

    `pwrite` into backed pages is two to three times as fast as faulting a writable map page by
    page.
    """
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def seal(fd: int, preamble: Preamble) -> None:
    """Write the preamble, seal the segment, and check that the preamble is what was sealed.

    Sealing a sealed segment of this generation again changes nothing. Takes 10 to 130 ms for
    gigabytes: not for an event loop.

    Raises:
        SegmentRefused: a writable map, a shared map or a pinned page outlived the retries, its
            filler set seals of its own, or someone wrote over the preamble. Unless it is sealed
            already, the segment is then as writable as it was.
    """
    page = encode_preamble(preamble)
    if not is_sealed(fd):
        _write_preamble(fd, page)
        freeze(fd, f"generation {preamble.gen} of {preamble.key!r}")
    if os.pread(fd, PREAMBLE_BYTES, 0) != page:
        raise SegmentRefused(f"the preamble of generation {preamble.gen} was overwritten")


def freeze(fd: int, name: str) -> None:
    """Have nobody ever change the bytes of a memfd any more, or its size. Blocks, as `seal`.

    Raises:
        SegmentRefused: a writable map, a shared map or a pinned page outlived the retries, or its
            filler set seals of its own.
    """
    for attempt in range(SEAL_RETRIES):
        try:
            fcntl.fcntl(fd, F_ADD_SEALS, SEALS)
            return
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise SegmentRefused(f"{name} cannot be sealed: {error}") from error
            if attempt == SEAL_RETRIES - 1:
                raise SegmentRefused(
                    f"{name} cannot be sealed: its filler still has a writable map of it, or a "
                    "page is pinned",
                    remedy="unmap the segment before COMMIT",
                ) from error
            time.sleep(SEAL_PAUSE_S)


def _write_preamble(fd: int, page: bytes) -> None:
    try:
        write_at(fd, page, 0)
    except OSError as error:  # the filler held the fd too, and may have set F_SEAL_WRITE itself
        raise SegmentRefused(f"the preamble cannot be written: {error}") from error


def is_sealed(fd: int) -> bool:
    """Say whether nobody can change these bytes any more. Only a memfd can be sealed."""
    return _has_seals(fd, SEALS)


def is_fixed(fd: int) -> bool:
    """Say whether this is a segment that can neither grow nor shrink, as one that is filled."""
    return _has_seals(fd, SIZE_SEALS)


def _has_seals(fd: int, seals: int) -> bool:
    try:
        return fcntl.fcntl(fd, F_GET_SEALS) & seals == seals
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False


def read_preamble(fd: int) -> Preamble:
    """Return which generation a sealed segment is.

    Raises:
        SegmentRefused: not sealed, or no preamble.
    """
    if not is_sealed(fd):
        raise SegmentRefused("the segment is not sealed")
    return decode_preamble(os.pread(fd, PREAMBLE_BYTES, 0))


def read_manifest(data: memoryview) -> tuple[Manifest, int]:
    """Return the manifest of a mapped segment, and where its tensor bytes begin.

    Raises:
        SegmentRefused: its length lies, or it cannot be read.
    """
    start = PREAMBLE_BYTES + MANIFEST_LENGTH_BYTES
    if len(data) < start:
        raise SegmentRefused(f"a segment of {len(data)} bytes has no room for a manifest")
    (length,) = _LENGTH.unpack(data[PREAMBLE_BYTES:start])
    if start + length > len(data):
        raise SegmentRefused(f"a manifest of {length} bytes exceeds its segment of {len(data)}")
    return decode_manifest(data[start : start + length]), data_start(length)


def check_manifest(fd: int) -> None:
    """Refuse a segment whose manifest is none.

    Raises:
        SegmentRefused: its length lies, or it cannot be read.
    """
    manifest_of(fd)


def manifest_of(fd: int) -> tuple[Manifest, int]:
    """Return the manifest of a segment that is not mapped, and where its tensor bytes begin.

    Raises:
        SegmentRefused: its length lies, or it cannot be read.
    """
    start = PREAMBLE_BYTES + MANIFEST_LENGTH_BYTES
    packed = os.pread(fd, MANIFEST_LENGTH_BYTES, PREAMBLE_BYTES)
    length = _LENGTH.unpack(packed)[0] if len(packed) == MANIFEST_LENGTH_BYTES else 0
    if not 0 < length <= os.fstat(fd).st_size - start:
        raise SegmentRefused(f"a manifest of {length} bytes is not in its segment")
    return decode_manifest(os.pread(fd, length, start)), data_start(length)


def backed_bytes(fd: int) -> int:
    """Return the kernel's word on how much memory the segment takes."""
    return os.fstat(fd).st_blocks * 512
