"""The store of fds: what a notice may say, and what is kept, refused and given back."""

from __future__ import annotations

import os

import pytest

from coordinator.fd_store import (
    NAME_LIMIT,
    NAMES_LIMIT_BYTES,
    NOTICE_LIMIT_BYTES,
    FdStore,
    Notice,
    NoticeRefused,
    read_notice,
)


def memfd(name: str = "test") -> int:
    return os.memfd_create(name)


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.fixture
def store():
    made = FdStore(limit=4)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("data", "notice"),
    [
        (b"READY=1", Notice(ready=True)),
        (b"READY=1\nSTATUS=x = y\n", Notice(ready=True)),
        (b"STOPPING=1", Notice(stopping=True)),
        (b"BARRIER=1", Notice(barrier=True)),
        (b"BARRIER=1\n", Notice(barrier=True)),
        (b"FDSTORE=1", Notice(store=True)),
        (b"FDSTORE=1\nFDNAME=\nFDPOLL=0", Notice(store=True, name="")),
        (b"FDSTORE=1\nFDNAME=gen a-1\nFDNAME=b", Notice(store=True, name="gen a-1")),
        (b"FDNAME=a\nFDSTOREREMOVE=1", Notice(remove=True, name="a")),
        (b"READY=0\nWATCHDOG=1\nMAINPID=1\nMADE_UP=\n\n", Notice()),
    ],
)
def test_a_notice_is_read_as_systemd_reads_it(data, notice):
    assert read_notice(data) == notice


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no list"),
        (b"\n\n", "no list"),
        (b"READY", "no list"),
        (b"READY=1\ngarbage", "no list"),
        (b"READY=1\0", "no list"),
        (b"\xff=1", "not text"),
        (b"X=" + b"x" * NOTICE_LIMIT_BYTES, "longer"),
        (b"BARRIER=1\nREADY=1", "alone"),
        (b"FDSTORE=1\nFDSTOREREMOVE=1\nFDNAME=a", "at once"),
        (b"FDSTOREREMOVE=1", "nothing says which"),
        (b"FDSTORE=1\nFDNAME=a:b", "no name"),
        (b"FDSTORE=1\nFDNAME=a\tb", "no name"),
        (b"FDSTORE=1\nFDNAME=\xc3\xa4", "no name"),
        (b"FDSTORE=1\nFDNAME=" + b"x" * (NAME_LIMIT + 1), "no name"),
    ],
)
def test_what_is_none_is_refused_with_a_reason(data, why):
    with pytest.raises(NoticeRefused, match=why):
        read_notice(data)


def test_the_longest_name_is_one():
    assert read_notice(b"FDSTORE=1\nFDNAME=" + b"x" * NAME_LIMIT).name == "x" * NAME_LIMIT


def test_names_keep_their_order_and_their_fds_their_own(store):
    fds = [memfd() for _ in range(4)]
    store.keep("b", [fds[0]])
    store.keep("a", [fds[1], fds[2]])
    store.keep("b", [fds[3]])
    assert store.handover() == ([fds[0], fds[3], fds[1], fds[2]], ["b", "b", "a", "a"])
    assert len(store) == 4
    store.remove("b")
    assert store.handover() == ([fds[1], fds[2]], ["a", "a"])
    assert [is_open(fd) for fd in fds] == [False, True, True, False]


def test_removing_what_is_not_there_changes_nothing(store):
    fd = memfd()
    store.keep("a", [fd])
    store.remove("b")
    assert store.handover() == ([fd], ["a"])


def test_a_full_store_takes_nothing_of_a_message_and_closes_it(store):
    kept, new = [memfd() for _ in range(3)], [memfd() for _ in range(2)]
    store.keep("a", kept)
    with pytest.raises(NoticeRefused, match=r"'b' cannot be kept: the store is full \(4 fds\)"):
        store.keep("b", new)
    assert store.handover() == (kept, ["a"] * 3)
    assert [is_open(fd) for fd in (*kept, *new)] == [True] * 3 + [False] * 2
    store.keep("c", [last := memfd()])  # one fits
    assert store.handover()[0] == [*kept, last]


def test_what_could_not_be_handed_over_is_not_kept():
    """All names travel in one environment variable, which may not be longer than 128 KiB."""
    store, name = FdStore(), "x" * NAME_LIMIT
    fits = NAMES_LIMIT_BYTES // (NAME_LIMIT + 1)
    try:
        for _ in range(fits):
            store.keep(name, [memfd()])
        refused = memfd()
        with pytest.raises(NoticeRefused, match="of names"):
            store.keep(name, [refused])
        assert len(store) == fits and not is_open(refused)
        environment = {"LISTEN_FDNAMES": ":".join(store.handover()[1])}
        pid = os.posix_spawn("/bin/true", ["true"], environment)
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        store.close()


def test_a_file_that_is_said_again_is_kept_once(store):
    """As after an answer that was lost. Under another name it is something else."""
    fd = memfd()
    again, elsewhere, twice = os.dup(fd), os.dup(fd), os.dup(fd)
    store.keep("a", [fd])
    store.keep("a", [again, twice])
    store.keep("b", [elsewhere])
    assert store.handover() == ([fd, elsewhere], ["a", "b"])
    assert not is_open(again) and not is_open(twice)


def test_pidfds_are_never_taken_for_one_another(store):
    """On kernels before 6.9 all of them have the same inode."""
    fds = [os.pidfd_open(os.getpid()) for _ in range(2)]
    store.keep("a", fds)
    assert store.handover()[0] == fds


def test_at_the_end_everything_is_closed(store):
    fds = [memfd() for _ in range(3)]
    store.keep("a", fds)
    store.close()
    assert [is_open(fd) for fd in fds] == [False] * 3
    assert (len(store), store.handover()) == (0, ([], []))
