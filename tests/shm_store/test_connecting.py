"""Sockets with a path: who may connect, who does not answer, and who is at the other end."""

from __future__ import annotations

import os
import select
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from shm_store import channel
from shm_store.channel import Channel, Credentials
from shm_store.errors import (
    ArgumentRefused,
    CoordinatorLost,
    NoCoordinator,
    PeerForbidden,
    PlatformUnsupported,
)

pytestmark = pytest.mark.usefixtures("fds_flat")

CONNECT = """
import sys
from shm_store import channel
connection = channel.connect(sys.argv[1])
connection.send(b"ready")
sys.stdin.read()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name that every user may enter."""
    with tempfile.TemporaryDirectory(prefix="wc-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture
def listening(folder: Path) -> Iterator[socket.socket]:
    """A listening socket; `getsockname` says where."""
    with channel.listen(str(folder / "socket")) as listening:
        yield listening


@pytest.fixture
def connected(
    listening: socket.socket,
) -> Iterator[tuple[subprocess.Popen[bytes], Channel]]:
    """A child that has connected and lives until its input ends, and our end of its connection."""
    process = subprocess.Popen(
        [sys.executable, "-c", CONNECT, listening.getsockname()],
        env={**os.environ, "PYTHONPATH": str(Path(channel.__file__).parents[1])},
        stdin=subprocess.PIPE,
    )
    try:
        with process:
            readable, _, _ = select.select([listening], [], [], 30)
            assert readable, "the child did not connect"
            accepted, _ = listening.accept()
            with closing(Channel(accepted)) as ours:
                assert ours.receive() == (b"ready", [])
                yield process, ours
                process.kill()
    finally:
        process.kill()


def has_ended(pidfd: int, timeout_s: float) -> bool:
    """Say whether the process of `pidfd` ends within `timeout_s`."""
    return bool(select.select([pidfd], [], [], timeout_s)[0])


# --- connect and listen ---------------------------------------------------------------------------


def test_what_is_sent_over_a_path_arrives(listening: socket.socket) -> None:
    """In both directions, once accepted."""
    with closing(channel.connect(listening.getsockname())) as theirs:
        theirs.send(b"hello")
        accepted, _ = listening.accept()
        with closing(Channel(accepted)) as ours:
            assert ours.receive() == (b"hello", [])
            ours.send(b"welcome")
            assert theirs.receive() == (b"welcome", [])


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o177])
def test_a_socket_is_for_its_user_alone(folder: Path, mask: int) -> None:
    """Whatever the umask; and accepting never waits."""
    before = os.umask(mask)
    try:
        listening = channel.listen(str(folder / "socket"))
    finally:
        os.umask(before)
    with listening:
        assert stat.S_IMODE(os.stat(folder / "socket").st_mode) == 0o600
        with pytest.raises(BlockingIOError):
            listening.accept()


def test_a_path_that_exists_is_not_taken_over(folder: Path) -> None:
    """Be it a socket in use or a file."""
    (folder / "file").write_text("precious")
    with channel.listen(str(folder / "socket")):
        for name in ("file", "socket"):
            with pytest.raises(OSError, match="in use"):
                channel.listen(str(folder / name))
        channel.connect(str(folder / "socket")).close()
    assert (folder / "file").read_text() == "precious"


def stale(path: Path) -> None:
    channel.listen(str(path)).close()


def a_stream_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(path))


NOBODY: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "no folder": lambda path: path.parent.rmdir(),
    "stale": stale,
    "a file": lambda path: path.write_text("not a socket"),
    "a folder": lambda path: path.mkdir(),
    "another kind of socket": a_stream_socket,
}


@pytest.mark.parametrize("prepare", NOBODY.values(), ids=NOBODY.keys())
def test_where_nobody_answers_the_error_says_what_to_do(
    tmp_path: Path, prepare: Callable[[Path], object]
) -> None:
    """It names the path and a command that starts a coordinator, and prints as one traceback."""
    parent = tmp_path / "d"
    parent.mkdir()
    prepare(parent / "s")
    with pytest.raises(NoCoordinator) as caught:
        channel.connect(str(parent / "s"))
    assert str(parent / "s") in caught.value.message
    assert "weight-cache serve" in caught.value.remedy
    assert isinstance(caught.value, CoordinatorLost)
    assert caught.value.__suppress_context__


def test_a_path_too_long_for_a_socket_is_refused(folder: Path) -> None:
    """By either end, in bytes; the longest possible one is taken."""
    room = 107 - len(str(folder)) - 1
    longest = str(folder / ("é" * (room // 2) + "x" * (room % 2)))
    with channel.listen(longest):
        channel.connect(longest).close()
    for use in (channel.connect, channel.listen):
        with pytest.raises(ArgumentRefused) as caught:
            use(longest + "x")
        assert "107 bytes" in caught.value.message
        assert "--socket" in caught.value.remedy


@pytest.mark.process
def test_a_socket_of_another_user_is_forbidden(
    listening: socket.socket, child: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """The child is another user where the tests run as root; else the socket is nobody's."""
    if os.geteuid() != 0:
        os.chmod(listening.getsockname(), 0)
    ended = child(
        """
import sys
from shm_store import channel
from shm_store.errors import PeerForbidden
drop_privileges()
try:
    channel.connect(sys.argv[1])
except PeerForbidden as error:
    print(error)
""",
        listening.getsockname(),
    )
    forbidden = PeerForbidden(f"this user may not open {listening.getsockname()}")
    assert ended.stdout == f"{forbidden}\n", ended.stderr


def test_a_system_without_what_is_needed_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing works there; connecting, listening and making a pair do not."""
    monkeypatch.delattr(os, "pidfd_open")
    for use in (channel.connect, channel.listen):
        with pytest.raises(PlatformUnsupported):
            use(str(folder / "socket"))
    with pytest.raises(PlatformUnsupported):
        channel.pair()
    assert list(folder.iterdir()) == []


# --- who is at the other end ----------------------------------------------------------------------


def test_the_ends_of_a_pair_are_this_process() -> None:
    """By the kernel's word."""
    for end in map(Channel, channel.pair()):
        with closing(end):
            assert end.credentials() == Credentials(os.getpid(), os.geteuid(), os.getegid())


@pytest.mark.process
def test_credentials_name_the_process_that_connected(
    connected: tuple[subprocess.Popen[bytes], Channel],
) -> None:
    """Its pid and its user, not ours."""
    process, ours = connected
    assert ours.credentials() == Credentials(process.pid, os.geteuid(), os.getegid())


OLDER_KERNEL = 0x7FFF
"""No option of a socket has this number, as SO_PEERPIDFD has none before Linux 6.5."""


@pytest.mark.process
@pytest.mark.parametrize("option", [channel.SO_PEERPIDFD, OLDER_KERNEL])
def test_a_pidfd_tells_when_the_process_that_connected_dies(
    connected: tuple[subprocess.Popen[bytes], Channel],
    monkeypatch: pytest.MonkeyPatch,
    option: int,
) -> None:
    """Not before, although the connection may be lost earlier; and it is not inherited."""
    monkeypatch.setattr(channel, "SO_PEERPIDFD", option)
    process, ours = connected
    pidfd = ours.open_pidfd()
    try:
        assert not os.get_inheritable(pidfd)
        assert not has_ended(pidfd, 0)
        process.kill()
        assert has_ended(pidfd, 30)
    finally:
        os.close(pidfd)


@pytest.mark.process
@pytest.mark.parametrize("option", [channel.SO_PEERPIDFD, OLDER_KERNEL])
def test_a_process_that_has_ended_already_is_not_taken_for_alive(
    connected: tuple[subprocess.Popen[bytes], Channel],
    monkeypatch: pytest.MonkeyPatch,
    option: int,
) -> None:
    """Newer kernels give a pidfd of it, readable at once; others say that there is none."""
    monkeypatch.setattr(channel, "SO_PEERPIDFD", option)
    process, ours = connected
    process.kill()
    process.wait()
    try:
        pidfd = ours.open_pidfd()
    except ProcessLookupError:
        return
    assert option != OLDER_KERNEL
    with os.fdopen(pidfd):
        assert has_ended(pidfd, 0)
