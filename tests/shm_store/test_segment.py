"""The life of a segment, on real memfds: its bytes, its size, and that nobody changes either."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shm_store import segment
from shm_store.errors import PlatformUnsupported, SegmentRefused
from shm_store.keys import Fingerprint, Key, generation_id
from shm_store.layout import (
    HUGE_PAGE_BYTES,
    MANIFEST_LENGTH_BYTES,
    PAGE_BYTES,
    PREAMBLE_BYTES,
    data_start,
    segment_bytes,
)
from shm_store.manifest import (
    GroupEntry,
    Manifest,
    Preamble,
    TensorEntry,
    decode_preamble,
    encode_manifest,
)

pytestmark = pytest.mark.usefixtures("fds_flat")

GEN = generation_id(0x1234, 7)
PREAMBLE = Preamble(GEN, Key("sdxl/unet:bf16"), Fingerprint("file:1:2:3:4"))
MANIFEST = Manifest(
    tuple(TensorEntry(f"layer{i}.weight", "U8", (3, 4), (4, 1), 0, 0) for i in range(9)),
    (GroupEntry(0, 12),),
)
DATA = b"tensor bytes"
SIZE_BYTES = 3 * PAGE_BYTES
F_SEAL_SEAL, F_SEAL_WRITE, F_SEAL_FUTURE_WRITE = 0x01, 0x08, 0x10


@pytest.fixture
def backed() -> Iterator[int]:
    """A new segment with real pages, as its filler gets it."""
    fd = segment.create(GEN)
    os.posix_fallocate(fd, 0, SIZE_BYTES)
    yield fd
    os.close(fd)


@pytest.fixture
def sealed(backed: int) -> int:
    """A filled and sealed segment."""
    start = segment.write_manifest(backed, encode_manifest(MANIFEST))
    segment.write_at(backed, DATA, start)
    segment.seal(backed, PREAMBLE)
    return backed


def whole(fd: int) -> bytes:
    """Return every byte of a segment, and check that its size is what it was made with."""
    data = os.pread(fd, 2 * SIZE_BYTES, 0)
    assert len(data) == os.fstat(fd).st_size == SIZE_BYTES
    return data


# --- create, back, fill, seal, read ---------------------------------------------------------------


def test_what_was_filled_is_read_from_the_sealed_segment(sealed: int) -> None:
    """Preamble, manifest and tensor bytes, each at its place."""
    assert segment.is_sealed(sealed)
    assert segment.read_preamble(sealed) == PREAMBLE
    with mmap.mmap(sealed, 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as mapped:
        view = memoryview(mapped)
        manifest, start = segment.read_manifest(view)
        assert manifest == MANIFEST
        assert start == data_start(len(encode_manifest(MANIFEST)))
        assert view[start : start + len(DATA)] == DATA
        assert not any(view[start + len(DATA) :])
        view.release()


def test_a_new_segment_is_empty_private_and_named_by_its_generation() -> None:
    """It costs nothing yet, and no child inherits it."""
    fd = segment.create(GEN)
    try:
        assert GEN in os.readlink(f"/proc/self/fd/{fd}")
        assert not os.get_inheritable(fd)
        assert os.fstat(fd).st_size == 0
        assert segment.backed_bytes(fd) == 0
        assert not segment.is_sealed(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    "size_bytes",
    [PAGE_BYTES, SIZE_BYTES, segment_bytes(100, HUGE_PAGE_BYTES), 3 * HUGE_PAGE_BYTES],
)
def test_a_backed_segment_takes_its_size_to_the_page(size_bytes: int) -> None:
    """By the kernel's word: nothing before it is backed, and the same after it is sealed."""
    fd = segment.create(GEN)
    try:
        os.ftruncate(fd, size_bytes)
        assert segment.backed_bytes(fd) == 0
        os.posix_fallocate(fd, 0, size_bytes)
        assert segment.backed_bytes(fd) == size_bytes
        segment.write_at(fd, b"x", size_bytes - 1)
        segment.seal(fd, PREAMBLE)
        assert segment.backed_bytes(fd) == os.fstat(fd).st_size == size_bytes
    finally:
        os.close(fd)


def test_what_the_kernel_writes_in_parts_is_written_whole(
    backed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does with more than 2 GiB at once."""
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[:7], offset))
    data = bytes(range(256)) * 3
    segment.write_at(backed, data, 100)
    segment.write_at(backed, memoryview(data).cast("I"), 5000)
    segment.write_at(backed, b"", 0)
    assert whole(backed)[100 : 100 + len(data)] == data
    assert whole(backed)[5000 : 5000 + len(data)] == data
    assert not any(whole(backed)[:100])


def test_a_system_without_memfds_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of failing with an attribute."""
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(PlatformUnsupported):
        segment.create(GEN)


# --- nobody changes a sealed segment --------------------------------------------------------------


def map_shared(fd: int) -> None:
    mmap.mmap(fd, SIZE_BYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE).close()


CHANGES: dict[str, Callable[[int], object]] = {
    "write": lambda fd: os.pwrite(fd, b"!", 5000),
    "write over the preamble": lambda fd: os.pwrite(fd, b"!", 0),
    "write behind the end": lambda fd: os.pwrite(fd, b"!", SIZE_BYTES),
    "shrink": lambda fd: os.ftruncate(fd, PAGE_BYTES),
    "grow": lambda fd: os.ftruncate(fd, 2 * SIZE_BYTES),
    "take more pages": lambda fd: os.posix_fallocate(fd, 0, 2 * SIZE_BYTES),
    "map writable": map_shared,
    "more seals": lambda fd: fcntl.fcntl(fd, segment.F_ADD_SEALS, F_SEAL_FUTURE_WRITE),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_sealed_segment_cannot_be_changed(sealed: int, change: Callable[[int], object]) -> None:
    """Through the fd that filled it, nor through a new one opened for writing."""
    before = whole(sealed)
    again = os.open(f"/proc/self/fd/{sealed}", os.O_RDWR)
    try:
        for fd in (sealed, again):
            with pytest.raises(PermissionError):
                change(fd)
    finally:
        os.close(again)
    assert whole(sealed) == before
    assert segment.backed_bytes(sealed) == SIZE_BYTES


OLD_HOLDER = """
import ctypes, mmap, os, sys
fd, size = int(sys.argv[1]), int(sys.argv[2])
os.pwrite(fd, b"filled by the child", 8192)
print("filled", flush=True)
sys.stdin.readline()
PUNCH_AND_KEEP_SIZE = 3
libc = ctypes.CDLL(None, use_errno=True)
def punch():
    if libc.fallocate(fd, PUNCH_AND_KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(size)):
        raise OSError(ctypes.get_errno(), "fallocate")
for change in (
    lambda: os.pwrite(fd, b"!", 0),
    lambda: os.ftruncate(fd, 0),
    lambda: os.ftruncate(fd, 2 * size),
    lambda: mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
    punch,
):
    try:
        change()
        print("changed")
    except OSError as error:
        print(error.errno)
private = mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
private[8192:8198] = b"edited"
print(private[8192:8211].decode(), flush=True)
"""


@pytest.mark.process
def test_the_process_that_filled_it_cannot_change_it_either(backed: int) -> None:
    """It kept the fd from before; its private edits stay its own."""
    holder = subprocess.Popen(
        [sys.executable, "-c", OLD_HOLDER, str(backed), str(SIZE_BYTES)],
        pass_fds=[backed],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "filled\n"
        segment.seal(backed, PREAMBLE)
        before = whole(backed)
        said, _ = holder.communicate("go on\n", timeout=30)
    assert said.splitlines() == [str(errno.EPERM)] * 5 + ["edited by the child"]
    assert whole(backed) == before
    assert before[8192:8211] == b"filled by the child"


# --- before it is sealed --------------------------------------------------------------------------


def test_a_fixed_size_can_be_filled_and_sealed_but_takes_no_more_memory(backed: int) -> None:
    """A filler that writes past what was charged is stopped by the kernel."""
    segment.fix_size(backed)
    for change in ("write behind the end", "shrink", "grow", "take more pages"):
        with pytest.raises(PermissionError):
            CHANGES[change](backed)
    segment.write_at(backed, DATA, SIZE_BYTES - len(DATA))
    assert not segment.is_sealed(backed)
    segment.seal(backed, PREAMBLE)
    assert segment.is_sealed(backed)
    assert whole(backed).endswith(DATA)
    assert segment.backed_bytes(backed) == SIZE_BYTES


@pytest.mark.parametrize("protection", [mmap.PROT_READ | mmap.PROT_WRITE, mmap.PROT_READ])
def test_a_live_shared_map_keeps_a_segment_from_being_sealed(backed: int, protection: int) -> None:
    """The refusal names the generation and what to do; unmapped, the same call succeeds."""
    mapped = mmap.mmap(backed, SIZE_BYTES, mmap.MAP_SHARED, protection)
    with pytest.raises(SegmentRefused) as caught:
        segment.seal(backed, PREAMBLE)
    assert GEN in caught.value.message
    assert PREAMBLE.key in caught.value.message
    assert "unmap" in caught.value.remedy
    assert not segment.is_sealed(backed)
    os.pwrite(backed, DATA, 5000)
    mapped.close()
    segment.seal(backed, PREAMBLE)
    assert segment.is_sealed(backed)
    assert whole(backed)[5000 : 5000 + len(DATA)] == DATA


def test_a_map_that_ends_meanwhile_does_no_harm(
    backed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a process that is just dying, or a page that is pinned for a moment."""
    mapped = mmap.mmap(backed, SIZE_BYTES)
    pauses: list[float] = []

    def pause(duration_s: float) -> None:
        pauses.append(duration_s)
        if len(pauses) == 3:
            mapped.close()

    monkeypatch.setattr(time, "sleep", pause)
    segment.seal(backed, PREAMBLE)
    assert segment.is_sealed(backed)
    assert pauses == [segment.SEAL_PAUSE_S] * 3


def test_waiting_for_a_map_to_end_is_bounded(backed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of a second, after which the filler is told."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    with mmap.mmap(backed, SIZE_BYTES), pytest.raises(SegmentRefused):
        segment.seal(backed, PREAMBLE)
    assert 0.05 < sum(pauses) < 0.2


@pytest.mark.parametrize("seals", [F_SEAL_SEAL, F_SEAL_WRITE, F_SEAL_FUTURE_WRITE])
def test_a_filler_that_sets_seals_of_its_own_is_refused(backed: int, seals: int) -> None:
    """It holds the fd too; that ends its commit, typed, and nothing else."""
    fcntl.fcntl(backed, segment.F_ADD_SEALS, seals)
    with pytest.raises(SegmentRefused):
        segment.seal(backed, PREAMBLE)
    with pytest.raises(SegmentRefused):
        segment.read_preamble(backed)


def test_a_filler_that_makes_it_too_small_for_a_preamble_is_refused(backed: int) -> None:
    """And keeps it that small."""
    os.ftruncate(backed, 0)
    segment.fix_size(backed)
    with pytest.raises(SegmentRefused):
        segment.seal(backed, PREAMBLE)


def test_sealing_again_changes_nothing(sealed: int) -> None:
    """A repeated COMMIT is a no-op."""
    before = whole(sealed)
    segment.seal(sealed, PREAMBLE)
    assert whole(sealed) == before


@pytest.mark.parametrize(
    "other",
    [
        Preamble(generation_id(0x1234, 8), PREAMBLE.key, PREAMBLE.fingerprint),
        Preamble(GEN, Key("other"), PREAMBLE.fingerprint),
        Preamble(GEN, PREAMBLE.key, Fingerprint("file:1:2:3:5")),
    ],
    ids=["generation", "key", "fingerprint"],
)
def test_a_segment_that_was_sealed_as_another_is_refused(sealed: int, other: Preamble) -> None:
    """What a segment is, is fixed with its bytes."""
    with pytest.raises(SegmentRefused, match=re.escape(other.gen)):
        segment.seal(sealed, other)
    assert segment.read_preamble(sealed) == PREAMBLE


def test_a_preamble_overwritten_before_the_seals_is_refused(
    backed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a filler that writes between the coordinator's write and the seals."""
    write = os.pwrite
    forged = Preamble(generation_id(0x1234, 8), PREAMBLE.key, PREAMBLE.fingerprint)

    def raced(fd: int, data: bytes, offset: int) -> int:
        written = write(fd, data, offset)
        genuine = decode_preamble(os.pread(fd, PREAMBLE_BYTES, 0))
        write(fd, os.pread(fd, 100, 0).replace(genuine.gen.encode(), forged.gen.encode()), 0)
        return written

    monkeypatch.setattr(os, "pwrite", raced)
    with pytest.raises(SegmentRefused, match="overwritten"):
        segment.seal(backed, PREAMBLE)


# --- what is no segment ---------------------------------------------------------------------------


def test_a_segment_that_is_not_sealed_has_no_preamble_to_trust(backed: int) -> None:
    """Nor one of which only the size is sealed."""
    for _ in range(2):
        with pytest.raises(SegmentRefused, match="not sealed"):
            segment.read_preamble(backed)
        segment.fix_size(backed)


def test_a_sealed_memfd_of_somebody_else_is_refused(backed: int) -> None:
    """It has the seals, but no preamble."""
    fcntl.fcntl(backed, segment.F_ADD_SEALS, segment.SEALS)
    with pytest.raises(SegmentRefused, match="not a segment"):
        segment.read_preamble(backed)


def test_what_is_no_memfd_is_refused(tmp_path: Path) -> None:
    """A file, a pipe, a device: none can be sealed."""
    with (
        tempfile.TemporaryFile() as file,
        open("/dev/null", "rb") as device,
        open(tmp_path / "f", "wb") as other,
    ):
        for fd in (file.fileno(), device.fileno(), other.fileno()):
            assert not segment.is_sealed(fd)
            with pytest.raises(SegmentRefused, match="not sealed"):
                segment.read_preamble(fd)


def test_a_closed_fd_is_not_a_segment_that_is_merely_unsealed() -> None:
    """That is a fault of our own, and is not hidden."""
    fd = segment.create(GEN)
    os.close(fd)
    with pytest.raises(OSError, match="descriptor"):
        segment.is_sealed(fd)


def with_manifest(length: int, manifest: bytes) -> memoryview:
    return memoryview(bytes(PREAMBLE_BYTES) + length.to_bytes(8, "little") + manifest)


GOOD = encode_manifest(MANIFEST)


@pytest.mark.parametrize(
    "data",
    [
        memoryview(b""),
        memoryview(bytes(PREAMBLE_BYTES)),
        memoryview(bytes(PREAMBLE_BYTES + MANIFEST_LENGTH_BYTES - 1)),
        with_manifest(len(GOOD) + 1, GOOD),
        with_manifest(2**64 - 1, GOOD),
        with_manifest(len(GOOD) - 1, GOOD),
        with_manifest(0, GOOD),
        with_manifest(len(GOOD), bytes(len(GOOD))),
    ],
    ids=["empty", "a page", "cut off", "longer", "absurd", "shorter", "none", "zeros"],
)
def test_a_manifest_that_lies_is_refused(data: memoryview) -> None:
    """About its length, or about being one."""
    with pytest.raises(SegmentRefused):
        segment.read_manifest(data)


def test_a_manifest_that_fills_its_segment_is_read() -> None:
    """To the last byte."""
    assert segment.read_manifest(with_manifest(len(GOOD), GOOD))[0] == MANIFEST
