"""What a coordinator finds in the store and does not believe: named in its log, and let go of.

The first coordinator is played, and stores what is to be found; the next ones are real.
"""

from __future__ import annotations

import os
import signal

import pytest

from coordinator.audit import audit
from coordinator.operator import Operator
from tests.coordinator.launched import HELLO, WAITS, Launched
from tests.processes import Peer, fds_of

pytestmark = pytest.mark.process

PLAYED = """
import os, sys
from coordinator import coordinator_host
played = []
def module_command(module):
    if played:
        return [sys.executable, "-m", module]
    played.append(True)
    return [sys.executable, "-c", FIRST]
coordinator_host.module_command = module_command
from coordinator.cli import main
main()
"""

FIRST = """
import os, signal
import msgspec
from coordinator import notify
from coordinator.store import Words
from shm_store import segment
from shm_store.keys import generation_id
from shm_store.manifest import Preamble

def made(gen, *, key="a", manifest=b"\\x92\\x90\\x90", length=None, size_bytes=8192, holes=False):
    fd = segment.create(gen)
    (os.ftruncate if holes else lambda fd, size: os.posix_fallocate(fd, 0, size))(fd, size_bytes)
    start = segment.write_manifest(fd, manifest)
    if length is not None:
        segment.write_at(fd, length.to_bytes(8, "little"), 4096)
    return fd

def sealed(gen, key="a", **facts):
    fd = made(gen, key=key, **facts)
    segment.seal(fd, Preamble(gen, key, "build:1"))
    return fd

def words(pins):
    fd = os.memfd_create("weight-cache:words")
    os.write(fd, msgspec.msgpack.encode(Words(pins)))
    return fd

def plain(data):
    fd = os.memfd_create("weight-cache:lie")
    os.write(fd, data)
    return fd

def store(name, *fds):
    notify.store(name, fds)

OLD = [generation_id(1, number) for number in range(10)]
COMING = f"{1 << 63:016x}-00000001"
"""

STAYS = """
notify.barrier(20)
notify.ready()
signal.pause()
"""


@pytest.fixture
def after(launch):
    """A launch whose coordinator has found what this code stored."""

    def after(code: str, *said: tuple[str, ...]) -> Launched:
        first = FIRST + code + STAYS
        play = f"FIRST = {first!r}\n{PLAYED}"
        options = ("--ram-budget", "1MiB", "--grace", "0.5")
        launched = launch(*options, worker=f"{HELLO}\n{WAITS}", play=play)
        launched.up(1)
        os.kill(launched.coordinator, signal.SIGKILL)
        launched.said("it is started again")
        for first_words, *rest in said:
            line = launched.said(first_words)
            assert all(text in line for text in rest), line
        launched.said("ready on")
        return launched

    return after


def ends(launched: Launched) -> None:
    Peer.close_all()
    launched.send(signal.SIGTERM)
    launched.end()


def kept_by(launched: Launched) -> list[str]:
    """What the supervisor keeps, besides the words: the name of each memfd."""
    targets = fds_of(launched.supervisor).values()
    return sorted(
        target.split(":")[-1].split()[0]
        for target in targets
        if "memfd:weight-cache:" in target and "words" not in target
    )


LIES = [
    ("made(gen)", "the segment is not sealed"),
    ("sealed(gen, size_bytes=16384, holes=True)", "pages of generation"),
    ("sealed(gen, manifest=b'\\xc1garbage')", "the manifest could not be read"),
    ("sealed(gen, length=1 << 40)", "a manifest of 1099511627776 bytes is not in its segment"),
    ("sealed(gen, length=0)", "a manifest of 0 bytes is not in its segment"),
    ("sealed(OLD[0])", "it says that it is 0000000000000001-00000000"),
    ("sealed(gen, key='two\\nlines')", "has control characters"),
    ("plain(b'short')", "the segment is not sealed"),
    ("os.open('/dev/null', os.O_RDONLY)", "the segment is not sealed"),
    ("os.pipe()[0]", "the segment is not sealed"),
    ("os.open('/', os.O_PATH)", "Bad file descriptor"),
]


def test_what_is_no_whole_segment_is_named_and_dropped(after):
    """Neither charged nor kept any longer; what is whole beside it is there."""
    code, said = "store(f'segment-{OLD[9]}', sealed(OLD[9], 'whole'))\n", []
    for number, (lie, why) in enumerate(LIES, 16):
        code += f"gen = generation_id(1, {number}); store(f'segment-{{gen}}', {lie})\n"
        said.append((f"generation 0000000000000001-{number:08x} is not used", why))
    launched = after(code, *said)
    with Operator.connect(launched.socket(), "test") as operator:
        status = operator.status()
    assert [generation.key for generation in status.generations] == ["whole"]
    assert status.pools[0].in_use_bytes == 8192
    while kept_by(launched) != ["0000000000000001-00000009"]:
        pass  # until the supervisor has read that nothing else is to be kept
    ends(launched)


def test_ids_that_nobody_can_have_given_are_dropped(after):
    """One of the future would be the newest of its key for ever."""
    code = "for gen in (COMING, '', 'x'):\n    store(f'segment-{gen}', sealed(gen))\n"
    why = "no coordinator has given this id"
    coming = f"{1 << 63:016x}-00000001"
    launched = after(code, (coming, why), ("generation ", why), ("generation x ", why))
    with Operator.connect(launched.socket(), "test") as operator:
        assert operator.status().generations == ()
    ends(launched)


def test_of_two_segments_of_one_generation_one_is_kept(after):
    """In the books is what the kernel has: the other one would be memory that nobody counts."""
    launched = after(
        "store(f'segment-{OLD[1]}', sealed(OLD[1], size_bytes=8192))\n"
        "store(f'segment-{OLD[1]}', sealed(OLD[1], size_bytes=16384))\n",
        ("segment-0000000000000001-00000001", "was stored 2 times"),
    )
    while kept_by(launched) != ["0000000000000001-00000001"]:
        pass
    with Operator.connect(launched.socket(), "test") as operator:
        (generation,) = operator.status().generations
        assert (generation.key, generation.state, generation.size_bytes) == ("a", "ready", 8192)
        found = audit(operator)
        assert found.agree, found.differences
    ends(launched)


def test_the_newest_words_that_can_be_read_count(after):
    """Whatever order they come in, and after the next crash, too.

    A session whose process cannot be watched is none.
    """
    launched = after(
        "store('words-9', plain(b'garbage'))\n"
        "store('words-7', words(('seven',)))\n"
        "store('words-8', words(('eight',)))\n"
        "store('session-nobody', plain(b''))\n"
        "store('nothing-known', plain(b''))\n",
        ("what was stored of pins and limits is not used",),
    )
    peer = Peer(launched.socket(), "operator", role="operator")
    assert peer.status().sessions == ()
    os.kill(launched.coordinator, signal.SIGKILL)
    launched.said("ready on")
    peer = Peer(launched.socket(), "operator", role="operator")
    for key, pinned in (("seven", False), ("eight", True)):
        assert peer.publish(key).gen
        (fd,) = peer.fds
        os.close(fd)
        found = peer.generation(key)
        assert found is not None and found.pinned is pinned
    ends(launched)
