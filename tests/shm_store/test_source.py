"""Opening a checkpoint: what may be one, and when it counts as another."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from shm_store.errors import SourceNotOpened
from shm_store.keys import FINGERPRINT_LIMIT_BYTES
from shm_store.source import check_regular, fingerprint, open_source

pytestmark = pytest.mark.usefixtures("fds_flat")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may enter."""
    with tempfile.TemporaryDirectory(prefix="wc-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture
def file(folder: Path) -> Path:
    """A file to open."""
    path = folder / "model.safetensors"
    path.write_bytes(b"weights")
    return path


def opened_fingerprint(path: Path) -> str:
    """Return the fingerprint of what is at `path` now."""
    fd = open_source(path)
    try:
        return fingerprint([check_regular(fd, str(path))])
    finally:
        os.close(fd)


def refused(path: str) -> SourceNotOpened:
    """Return the error that opening `path` raises."""
    with pytest.raises(SourceNotOpened) as caught:
        open_source(path)
    assert caught.value.source == path
    assert caught.value.message.startswith(f"{path}: ")
    assert caught.value.remedy
    return caught.value


def test_a_file_is_opened_for_reading_and_not_inherited(file: Path) -> None:
    """As text or as a path; through a link too."""
    link = file.with_name("link")
    link.symlink_to(file)
    for path in (file, str(file), link):
        fd = open_source(path)
        try:
            assert os.read(fd, 100) == b"weights"
            assert not os.get_inheritable(fd)
            with pytest.raises(OSError, match="descriptor"):
                os.write(fd, b"x")
        finally:
            os.close(fd)


def test_a_file_that_is_missing_is_named(folder: Path) -> None:
    """With the system's own reason."""
    assert "No such file" in refused(str(folder / "nothing")).message
    (folder / "dangling").symlink_to(folder / "nothing")
    assert "No such file" in refused(str(folder / "dangling")).message
    assert "No such file" in refused("").message


def test_a_folder_is_no_source(folder: Path) -> None:
    """And is called a directory, the commonest mistake."""
    error = refused(str(folder))
    assert "a directory" in error.message
    assert error.remedy == "give the .safetensors file in it"


@pytest.mark.timeout(20)
def test_a_pipe_is_refused_at_once(folder: Path) -> None:
    """Although nobody writes to it, for which a plain open would wait."""
    os.mkfifo(folder / "pipe")
    assert "not a regular file" in refused(str(folder / "pipe")).message


def test_a_device_and_a_socket_are_no_sources(folder: Path) -> None:
    """Only a regular file has bytes that stay."""
    assert "not a regular file" in refused("/dev/zero").message
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "socket"))
        refused(str(folder / "socket"))


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "a/" * 3000], ids=["NUL", "long", "deep"])
def test_what_cannot_be_a_path_is_refused(folder: Path, name: str) -> None:
    """Typed, whatever the system or Python says to it."""
    refused(f"{folder}/{name}")


@pytest.mark.process
def test_a_file_that_may_not_be_read_is_refused(
    file: Path, child: Callable[..., CompletedProcess[str]]
) -> None:
    """For another user where the tests run as root; what that user may read is opened."""
    secret = file.with_name("secret")
    secret.write_bytes(b"secret")
    secret.chmod(0)
    ended = child(
        """
import sys
from shm_store.errors import SourceNotOpened
from shm_store.source import open_source
drop_privileges()
print(os.read(open_source(sys.argv[1]), 100))
try:
    open_source(sys.argv[2])
except SourceNotOpened as error:
    print(error.message, error.source == sys.argv[2])
""",
        str(file),
        str(secret),
    )
    assert ended.stdout == f"{b'weights'!r}\n{secret}: Permission denied True\n", ended.stderr


def test_a_file_that_is_renamed_or_linked_keeps_its_fingerprint(file: Path) -> None:
    """It is the same bytes under another name."""
    before = opened_fingerprint(file)
    moved = file.rename(file.with_name("moved"))
    assert opened_fingerprint(moved) == before
    os.link(moved, file)
    assert opened_fingerprint(file) == before
    file.chmod(0o600)
    assert opened_fingerprint(file) == before


def test_a_file_that_is_written_to_gets_another_fingerprint(file: Path) -> None:
    """By its size, or at the same size by the time it was written."""
    seen = [opened_fingerprint(file)]
    modified_ns = file.stat().st_mtime_ns
    file.write_bytes(b"more weights")
    os.utime(file, ns=(modified_ns, modified_ns))
    seen.append(opened_fingerprint(file))
    file.write_bytes(b"same weights")
    os.utime(file, ns=(modified_ns, modified_ns + 1))
    seen.append(opened_fingerprint(file))
    assert len(set(seen)) == 3


def test_a_file_that_is_replaced_gets_another_fingerprint(file: Path) -> None:
    """Even by one of the same size and time."""
    before = opened_fingerprint(file)
    modified_ns = file.stat().st_mtime_ns
    other = file.with_name("other")
    other.write_bytes(b"WEIGHTS")
    os.utime(other, ns=(modified_ns, modified_ns))
    other.replace(file)
    assert opened_fingerprint(file) != before


def test_a_fingerprint_describes_what_was_opened(file: Path) -> None:
    """Not what has come to the same path since."""
    before = opened_fingerprint(file)
    fd = open_source(file)
    try:
        file.unlink()
        file.write_bytes(b"another file")
        assert fingerprint([check_regular(fd, str(file))]) == before
    finally:
        os.close(fd)
    assert opened_fingerprint(file) != before


def test_the_longest_fingerprint_fits_a_preamble() -> None:
    """Whatever numbers a file system gives."""
    largest = 2**64 - 1
    status = os.stat_result((0o100644, largest, largest, 1, 0, 0, largest, 0, 0, 0))
    assert len(fingerprint([status]).encode()) <= FINGERPRINT_LIMIT_BYTES
