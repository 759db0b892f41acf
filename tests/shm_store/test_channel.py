"""Frames on a real socket pair: whole messages, their fds, and peers that break the rules."""

from __future__ import annotations

import os
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from subprocess import CompletedProcess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_store import channel
from shm_store.channel import FDS_LIMIT, FRAME_LIMIT_BYTES, MESSAGE_LIMIT_BYTES, Channel
from shm_store.errors import ConnectionLost, FdsExhausted, ProtocolViolation

PART = FRAME_LIMIT_BYTES - 1
LAST, MORE = b"\0", b"\1"
FULL = MORE + b"x" * PART

pytestmark = pytest.mark.usefixtures("fds_flat")


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    """Two connected channels."""
    left, right = map(Channel, channel.pair())
    with closing(left), closing(right):
        yield left, right


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Channel]]:
    """A peer that sends what it likes, and the channel that has to bear it."""
    peer, ours = channel.pair()
    with peer, closing(Channel(ours)) as receiving:
        yield peer, receiving


@pytest.fixture
def file(tmp_path: os.PathLike[str]) -> Iterator[int]:
    """An fd to send about. It stays open; `copies` finds the others."""
    fd = os.open(os.path.join(tmp_path, "file"), os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def copies(fd: int) -> int:
    """Return how many fds of this process refer to the file of `fd`, itself included."""
    wanted, found = os.fstat(fd), 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.path.samestat(os.fstat(int(name)), wanted)
        except OSError:
            continue  # the fd that listed the directory
    return found


def exchange(left: Channel, right: Channel, message: bytes, fds: list[int]) -> bytes:
    """Send from a thread, for what does not fit the socket buffer; check and close the fds."""
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(left.send, message, fds)
        received = right.receive()
        sending.result()
    assert received is not None
    whole, arrived = received
    assert [os.fstat(fd).st_ino for fd in arrived] == [os.fstat(fd).st_ino for fd in fds]
    channel.close_all(arrived)
    return whole


# --- whole messages -------------------------------------------------------------------------------

LENGTHS = [0, 1, PART - 1, PART, PART + 1, 2 * PART - 1, 2 * PART, 2 * PART + 1, 5 * PART]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("fds", [0, 2])
def test_a_message_of_any_length_arrives_whole(
    ends: tuple[Channel, Channel], file: int, length: int, fds: int
) -> None:
    """With its fds, in as many frames as it needs, and nothing is left behind it."""
    left, right = ends
    message = os.urandom(length)
    assert exchange(left, right, message, [file] * fds) == message
    assert exchange(left, right, b"the next one", []) == b"the next one"
    assert copies(file) == 1


@given(st.integers(0, 4 * FRAME_LIMIT_BYTES))
def test_frames_are_bounded_full_and_never_empty(length: int) -> None:
    """All but the last are full and say that more follow; only the first carries fds."""
    message = bytes(length)
    cut = list(channel.frames(message, (7,)))
    assert b"".join(frame[1:] for frame, _ in cut) == message
    assert [frame[:1] for frame, _ in cut] == [MORE] * (len(cut) - 1) + [LAST]
    assert all(len(frame) == FRAME_LIMIT_BYTES for frame, _ in cut[:-1])
    assert 1 <= len(cut[-1][0]) <= FRAME_LIMIT_BYTES
    assert len(cut) == max(1, -(-length // PART))
    assert [tuple(fds) for _, fds in cut] == [(7,)] + [()] * (len(cut) - 1)


def test_messages_keep_their_bounds_and_order(ends: tuple[Channel, Channel]) -> None:
    """Neither joined nor split, and in both directions at once."""
    left, right = ends
    for number in range(50):
        left.send(b"%d" % number)
        right.send(b"back %d" % number)
    for number in range(50):
        assert right.receive() == (b"%d" % number, [])
        assert left.receive() == (b"back %d" % number, [])


def test_the_end_of_the_peer_is_the_end_of_file(ends: tuple[Channel, Channel]) -> None:
    """After everything it had sent, and again on every further call."""
    left, right = ends
    left.send(b"last words")
    left.close()
    assert right.receive() == (b"last words", [])
    assert right.receive() is None
    assert right.receive() is None


def test_last_words_arrive_although_the_peer_did_not_listen(
    ends: tuple[Channel, Channel], file: int
) -> None:
    """It closes with a message unread, so the kernel reports a reset before its own last frames."""
    left, right = ends
    right.send(b"never read")
    left.send(b"RELEASE", [file])
    left.send(b"y" * PART + b"z")
    left.close()
    first = right.receive()
    assert first is not None
    channel.close_all(first[1])
    assert first[0] == b"RELEASE"
    assert len(first[1]) == 1
    assert right.receive() == (b"y" * PART + b"z", [])
    assert right.receive() is None


def test_sending_to_a_peer_that_is_gone_says_so(ends: tuple[Channel, Channel]) -> None:
    """As a typed error, whatever is sent."""
    left, right = ends
    right.close()
    for message, fds in ((b"short", []), (b"with an fd", [0]), (b"long" * PART, [])):
        with pytest.raises(ConnectionLost):
            left.send(message, fds)


def test_a_channel_that_is_closed_says_so(ends: tuple[Channel, Channel]) -> None:
    """Closing it again is harmless; using it is a lost connection."""
    left, _ = ends
    left.close()
    left.close()
    with pytest.raises(ConnectionLost):
        left.send(b"x")
    with pytest.raises(ConnectionLost):
        left.receive()


# --- fds ------------------------------------------------------------------------------------------


def test_an_fd_arrives_as_a_new_one_of_the_same_file(
    ends: tuple[Channel, Channel], file: int
) -> None:
    """The sender keeps its own; the new one is not inherited by children."""
    left, right = ends
    left.send(b"look", [file])
    received = right.receive()
    assert received is not None
    (arrived,) = received[1]
    assert arrived != file
    os.pwrite(file, b"hello", 0)
    assert os.pread(arrived, 5, 0) == b"hello"
    assert not os.get_inheritable(arrived)
    os.close(arrived)
    assert copies(file) == 1


def test_as_many_fds_as_are_allowed_arrive(ends: tuple[Channel, Channel], file: int) -> None:
    """Beside one frame, and beside a message of several."""
    left, right = ends
    for length in (10, 2 * PART):
        assert exchange(left, right, bytes(length), [file] * FDS_LIMIT) == bytes(length)


@pytest.mark.parametrize("count", [FDS_LIMIT + 1])
@pytest.mark.parametrize("flag", [LAST, MORE])
def test_more_fds_than_allowed_are_the_fault_of_the_peer(
    raw: tuple[socket.socket, Channel], file: int, count: int, flag: bytes
) -> None:
    """Not taken for a lack of fds here, and all of them are closed."""
    peer, receiving = raw
    socket.send_fds(peer, [(flag + bytes(PART))[:FRAME_LIMIT_BYTES]], [file] * count)
    with pytest.raises(ProtocolViolation, match=f"more than {FDS_LIMIT} fds"):
        receiving.receive()
    assert copies(file) == 1


def test_fds_behind_the_first_frame_are_refused(
    raw: tuple[socket.socket, Channel], file: int
) -> None:
    """So nobody collects them here, a few with every frame; the first frame's are closed too."""
    peer, receiving = raw
    socket.send_fds(peer, [FULL], [file])
    socket.send_fds(peer, [LAST], [file])
    with pytest.raises(ProtocolViolation, match="behind the first frame"):
        receiving.receive()
    assert copies(file) == 1


@pytest.mark.process
def test_an_fd_that_cannot_be_installed_is_a_typed_error(
    child: Callable[..., CompletedProcess[str]],
) -> None:
    """The process has room for one of three fds: it closes that one, says so, and goes on."""
    ended = child(
        """
import os, resource
from shm_store import channel
from shm_store.errors import FdsExhausted
left, right = map(channel.Channel, channel.pair())
read, write = os.pipe()
left.send(b"three fds", [read] * 3)
left.send(b"one fd", [read])
free = os.dup(read)
os.close(free)
resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, 4096))
try:
    right.receive()
except FdsExhausted as error:
    print(error)
again = os.dup(read)
print(again == free)
os.close(again)
print(right.receive() == (b"one fd", [free]))
"""
    )
    assert ended.returncode == 0, ended.stderr
    assert (
        ended.stdout
        == f"{FdsExhausted('a file descriptor sent to this process was lost')}\n" + ("True\nTrue\n")
    )


@pytest.mark.process
def test_too_many_fds_under_way_are_a_full_socket_and_no_end(
    child: Callable[..., CompletedProcess[str]],
) -> None:
    """Others of this user may be the ones who do not read. Nothing was sent, and later it can be.

    A blocking socket, which does not wait for that, says so.
    """
    ended = child(
        """
import errno, resource
from shm_store import channel
from shm_store.errors import FdsExhausted
left, right = map(channel.Channel, channel.pair())
drop_privileges()  # root may have any number
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
sent = 0
try:
    while True:
        left.send(b"%d" % sent, [0] * 16)
        sent += 1
except FdsExhausted as error:
    print(error)
left.socket.setblocking(False)
for send in (left.send, lambda data, fds: left.send_frame(b"\\0" + data, fds)):
    try:
        send(b"more", [0])
    except BlockingIOError as error:
        print(error.errno == errno.ETOOMANYREFS)
left.send(b"without an fd")
def take():
    data, fds = right.receive()
    channel.close_all(fds)
    return data
print([take() for _ in range(sent + 1)] == [b"%d" % n for n in range(sent)] + [b"without an fd"])
left.send(b"more", [0])
print(take())
"""
    )
    assert ended.returncode == 0, ended.stderr
    said = f"{FdsExhausted(channel.TOO_MANY_UNDER_WAY)}\n"
    assert ended.stdout == said + "True\nTrue\nTrue\nb'more'\n"


# --- peers that break the rules -------------------------------------------------------------------


def test_an_empty_frame_is_the_end_of_file(raw: tuple[socket.socket, Channel], file: int) -> None:
    """The kernel tells them apart from nothing; fds that came with it are closed."""
    peer, receiving = raw
    peer.send(b"")
    assert receiving.receive() is None
    socket.send_fds(peer, [b""], [file])
    assert receiving.receive() is None
    assert copies(file) == 1


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (LAST + bytes(PART + 1), "exceeds 65536 bytes"),
        (MORE + bytes(PART + 1), "exceeds 65536 bytes"),
        (LAST + bytes(2 * PART), "exceeds 65536 bytes"),
        (b"\2", "no valid flag"),
        (b"\xffgarbage", "no valid flag"),
        (b"GET / HTTP/1.1\r\n\r\n", "no valid flag"),
        (MORE, "not full"),
        (FULL[:-1], "not full"),
    ],
    ids=lambda value: f"{value[:4]!r} of {len(value)}" if isinstance(value, bytes) else "",
)
@pytest.mark.parametrize("half", [False, True], ids=["first", "behind a half message"])
def test_a_frame_that_no_correct_peer_sends_is_refused(
    raw: tuple[socket.socket, Channel], file: int, frame: bytes, text: str, half: bool
) -> None:
    """By what is wrong with it; its fds, and those of a half-received message, are closed."""
    peer, receiving = raw
    if half:
        socket.send_fds(peer, [FULL], [file])
    socket.send_fds(peer, [frame], [] if half else [file])
    with pytest.raises(ProtocolViolation, match=text):
        receiving.receive()
    assert copies(file) == 1


def test_the_largest_frame_is_taken(raw: tuple[socket.socket, Channel]) -> None:
    """One byte more is refused, see above."""
    peer, receiving = raw
    peer.send(LAST + bytes(PART))
    assert receiving.receive() == (bytes(PART), [])


def test_a_half_sent_message_ends_with_its_peer(
    raw: tuple[socket.socket, Channel], file: int
) -> None:
    """What had arrived is dropped, and its fds are closed."""
    peer, receiving = raw
    socket.send_fds(peer, [FULL], [file, file])
    peer.close()
    assert receiving.receive() is None
    assert copies(file) == 1


def test_closing_a_channel_closes_what_is_half_received(
    raw: tuple[socket.socket, Channel], file: int
) -> None:
    """As the coordinator does with a connection it gives up."""
    peer, receiving = raw
    receiving.socket.setblocking(False)
    socket.send_fds(peer, [FULL], [file])
    with pytest.raises(BlockingIOError):
        receiving.receive()
    assert copies(file) == 2
    receiving.close()
    assert copies(file) == 1


def test_a_message_up_to_the_limit_is_taken_and_no_longer_one() -> None:
    """The limit is the receiver's own; exactly that long is not too long."""
    for length, whole in ((3 * PART, True), (3 * PART + 1, False)):
        left, right = channel.pair()
        sending, receiving = Channel(left), Channel(right, limit_bytes=3 * PART)
        with closing(sending), closing(receiving), ThreadPoolExecutor(1) as pool:
            sent = pool.submit(sending.send, bytes(length))
            if whole:
                assert receiving.receive() == (bytes(length), [])
            else:
                with pytest.raises(ProtocolViolation, match=f"exceeds {3 * PART} bytes"):
                    receiving.receive()
            sent.result()


def test_a_message_without_end_is_refused_before_it_fills_the_memory(
    ends: tuple[Channel, Channel],
) -> None:
    """A peer may send for ever: what is held for it stays at the limit."""
    left, right = ends

    def flood() -> None:
        while True:
            left.send_frame(FULL)

    tracemalloc.start()
    try:
        with ThreadPoolExecutor(1) as pool:
            flooding = pool.submit(flood)
            with pytest.raises(ProtocolViolation, match=f"exceeds {MESSAGE_LIMIT_BYTES} bytes"):
                right.receive()
            peak_bytes = tracemalloc.get_traced_memory()[1]
            right.close()
            with pytest.raises(ConnectionLost):
                flooding.result()
    finally:
        tracemalloc.stop()
    assert MESSAGE_LIMIT_BYTES < peak_bytes < MESSAGE_LIMIT_BYTES + (1 << 20)


# --- non-blocking ---------------------------------------------------------------------------------


def test_without_a_frame_a_non_blocking_channel_returns_at_once(
    ends: tuple[Channel, Channel],
) -> None:
    """So that an event loop goes on; the next frame is then read as ever."""
    left, right = ends
    right.socket.setblocking(False)
    for _ in range(2):
        with pytest.raises(BlockingIOError):
            right.receive()
    left.send(b"now")
    assert right.receive() == (b"now", [])


def test_a_half_received_message_waits_for_its_rest(
    ends: tuple[Channel, Channel], file: int
) -> None:
    """Frame by frame, with its fds, however often the reader looks in between."""
    left, right = ends
    right.socket.setblocking(False)
    message = os.urandom(3 * PART + 5)
    *most, last = channel.frames(message, [file])
    for frame, fds in most:
        left.send_frame(frame, fds)
        with pytest.raises(BlockingIOError):
            right.receive()
    left.send_frame(*last)
    received = right.receive()
    assert received is not None
    assert received[0] == message
    assert len(received[1]) == 1
    channel.close_all(received[1])


def test_a_full_socket_takes_nothing_of_a_frame(ends: tuple[Channel, Channel], file: int) -> None:
    """The sender keeps the frame and sends it again later; nothing arrives twice or in part."""
    left, right = ends
    left.socket.setblocking(False)
    sent = 0
    try:
        while True:
            left.send_frame(LAST + b"%06d" % sent * 1000, [file])
            sent += 1
    except BlockingIOError:
        assert sent > 1
    for number in range(sent + 1):
        if number == 1:  # one was read, so there is room again
            left.send_frame(LAST + b"%06d" % sent * 1000, [file])
        received = right.receive()
        assert received is not None
        assert received[0] == b"%06d" % number * 1000
        channel.close_all(received[1])
    assert copies(file) == 1
