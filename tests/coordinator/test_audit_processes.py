"""The audit of a real coordinator: everything it finds is provoked by a process that does it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.audit import AuditReport, Finding, audit
from coordinator.kernel_facts import Use, collect
from coordinator.operator import Operator
from shm_store.errors import PlatformUnsupported
from shm_store.keys import LeaseId
from shm_store.report import StatusReport
from shm_store.wire import Acquire, Done, Evict, Grant, Release
from tests.mapper import PAGE_BYTES, Mapper, mapper
from tests.processes import ROOT, Coordinator, Peer, children_of, running

pytestmark = pytest.mark.process

SIZE_BYTES = 50 * PAGE_BYTES


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with running(str(tmp_path_factory.mktemp("shared") / "s"), "--ram-budget", "64MiB") as started:
        yield started


@pytest.fixture
def served(shared: Coordinator):
    """The coordinator, with nothing in it before and after a test."""
    yield shared
    Peer.close_all()
    wait_for_sessions(shared, 0)
    evict(shared)
    assert in_use_bytes(shared) == shared.segment_blocks() == 0


@pytest.fixture
def holder(served: Coordinator):
    with mapper(served.socket) as started:
        yield started


def look(served: Coordinator) -> AuditReport:
    with Operator.connect(served.socket, "audit") as operator:
        return audit(operator)


def status(served: Coordinator) -> StatusReport:
    return Peer(served.socket, role="operator").status()


def in_use_bytes(served: Coordinator) -> int:
    (pool,) = status(served).pools
    return pool.in_use_bytes


def wait_for_sessions(served: Coordinator, count: int) -> None:
    """The coordinator takes notice of a death by itself."""
    peer = Peer(served.socket, role="operator")
    while len(peer.status().sessions) > count:
        pass


def leased(holder: Mapper, key: str = "k") -> None:
    """Have the holder lease and map new weights, as a worker does."""
    holder.do("publish", key, SIZE_BYTES)
    holder.do("map")
    holder.do("close")


def evict(served: Coordinator) -> None:
    operator = Peer(served.socket, role="operator")
    operator.send(Evict(operator.next_rid()))
    operator.expect(Done)
    operator.flush()  # of an ended fill, too


def test_an_empty_coordinator_agrees(served):
    report = served.audit()
    assert (report.generations, report.leases, report.in_use_bytes) == (0, 0, 0)


def test_each_step_of_an_honest_life_agrees(served, holder):
    with mapper(served.socket) as second:
        holder.do("reserve", "slow", SIZE_BYTES)  # and does not commit
        served.audit()
        with mapper(served.socket) as builder:
            leased(builder)
            served.audit()
            second.do("acquire", "k")
            second.do("map")
            second.do("close")
            report = served.audit()
            assert (report.generations, report.leases) == (2, 2)
            assert report.in_use_bytes == served.segment_blocks() == in_use_bytes(served)
            second.do("unmap")
            second.do("release")
            assert served.audit().leases == 1
    wait_for_sessions(served, 1)
    served.audit()
    evict(served)
    assert served.audit().generations == 1


def test_a_child_that_outlives_its_parent_maps_without_a_lease(served, holder):
    leased(holder)
    child = int(holder.do("fork"))
    try:
        name = Path(f"/proc/{child}/comm").read_text().strip()
        ((gen, mapped_bytes),) = ((g.generation, g.size_bytes) for g in status(served).generations)
        unleased = Finding("unleased_mapping", gen, "k", child, name, kernel_bytes=mapped_bytes)
        assert look(served).differences == (unleased,)
        holder.end()
        wait_for_sessions(served, 0)
        assert look(served).differences == (unleased,)

        evict(served)
        assert in_use_bytes(served) == 0  # so the books know nothing of it any more
        gone = Finding("unleased_mapping", gen, "", child, name, kernel_bytes=mapped_bytes)
        assert look(served).differences == (gone,)
    finally:
        os.kill(child, signal.SIGKILL)


def test_another_coordinators_segments_are_none_of_its_business(served, holder, tmp_path):
    leased(holder)
    with running(str(tmp_path / "other"), "--ram-budget", "64MiB") as other:
        assert other.audit().generations == 0
    served.audit()


def test_what_only_has_the_name_of_a_segment_is_none(served, holder):
    leased(holder)
    (gen,) = (g.generation for g in status(served).generations)
    fd = os.memfd_create(f"weight-cache:{gen}")
    try:
        served.audit()
    finally:
        os.close(fd)


def test_what_the_coordinator_has_to_remember_is_no_segment():
    """It has that for a moment, on its way to whoever stores it."""
    words = os.memfd_create("weight-cache:words")
    segment = os.memfd_create(f"weight-cache:{'1' * 16}-00000001")
    try:
        found = collect(os.getpid(), "1" * 16).segments
        assert f"{'1' * 16}-00000001" in found and "words" not in found
    finally:
        os.close(words)
        os.close(segment)


def test_a_process_that_was_given_the_fd_maps_without_a_lease_and_holds_it(served):
    """The test's own lease, too: it has one and maps nothing."""
    peer = Peer(served.socket)
    grant = peer.publish("k", b"\1" * SIZE_BYTES)
    (fd,) = peer.fds
    code = (
        "import mmap, sys; m = mmap.mmap(int(sys.argv[1]), 4096, prot=mmap.PROT_READ,"
        " flags=mmap.MAP_PRIVATE); print(flush=True); sys.stdin.read()"
    )
    given = subprocess.Popen(
        [sys.executable, "-c", code, str(fd)],
        pass_fds=(fd,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    os.close(fd)
    assert given.stdout is not None and given.stdout.readline()
    found = {(found.kind, found.pid) for found in look(served).differences}
    given.communicate()
    peer.send(Release(grant.gen, LeaseId(grant.rid)))
    assert found == {
        ("unleased_mapping", given.pid),
        ("fd_held", given.pid),
        ("unmapped_lease", os.getpid()),
    }


def test_who_keeps_an_fd_longer_than_its_lease_is_named(served, holder):
    holder.do("publish", "k", SIZE_BYTES)
    holder.do("map")
    served.audit()  # it may have to state it
    holder.do("unmap")
    holder.do("release")
    (found,) = look(served).differences
    assert (found.kind, found.key, found.pid) == ("fd_held", "k", holder.pid)
    holder.do("close")
    served.audit()


def test_a_filler_that_gives_pages_back_is_found(served, holder):
    holder.do("reserve", "k", SIZE_BYTES)
    assert served.audit().differences == ()
    holder.do("punch")
    (found,) = look(served).differences
    assert (found.kind, found.books_bytes) == ("wrong_size", SIZE_BYTES)
    assert found.kernel_bytes == SIZE_BYTES - PAGE_BYTES == served.segment_blocks()


def test_copied_pages_are_charged_to_the_page_and_given_back_with_the_lease(served, holder):
    leased(holder)
    segment_bytes = in_use_bytes(served)
    holder.do("read")
    assert served.audit().copied == ()  # reading copies nothing

    holder.do("write", 3, 1)
    (copied,) = served.audit().copied
    assert (copied.kind, copied.pid) == ("copied_pages", holder.pid)
    assert (copied.books_bytes, copied.kernel_bytes) == (0, PAGE_BYTES)
    assert in_use_bytes(served) == segment_bytes + PAGE_BYTES
    assert served.audit().copied == ()  # charged once

    holder.do("write", 10, 20)
    report = served.audit()
    assert report.copied[0].books_bytes == PAGE_BYTES
    assert report.in_use_bytes == segment_bytes + 21 * PAGE_BYTES == in_use_bytes(served)

    holder.do("unmap")
    holder.do("release")
    assert in_use_bytes(served) == segment_bytes == served.segment_blocks()
    served.audit()


def test_pages_of_each_holder_are_its_own(served, holder):
    leased(holder)
    with mapper(served.socket) as second:
        second.do("acquire", "k")
        second.do("map")
        second.do("close")
        holder.do("write", 0, 2)
        second.do("write", 0, 5)
        sizes = {copied.pid: copied.kernel_bytes for copied in served.audit().copied}
        assert sizes == {holder.pid: 2 * PAGE_BYTES, second.pid: 5 * PAGE_BYTES}


def test_an_operators_lease_is_a_window(served, holder):
    leased(holder)
    operator = Peer(served.socket, role="operator")
    operator.send(Acquire(operator.next_rid(), "k", None, "", 1.0))
    grant = operator.expect(Grant)
    os.close(*operator.fds)
    report = served.audit()
    operator.send(Release(grant.gen, LeaseId(grant.rid)))
    assert [(window.kind, window.pid) for window in report.windows] == [("loading", os.getpid())]


def test_a_process_that_has_ended_but_is_there_still_is_ending(served):
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""], stdout=subprocess.PIPE)
    assert ended.stdout is not None
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert collect(served.pid, "").processes[ended.pid] == "ending"
    ended.communicate()
    assert ended.pid not in collect(served.pid, "").processes


AS_NOBODY = """
import ctypes, os, signal
from coordinator.kernel_facts import collect
from shm_store.errors import PeerForbidden

if os.getuid() == 0:  # which may look everywhere
    os.setuid(65534)
ready, done = os.pipe()
shut = os.fork()
if shut == 0:
    ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: not even its own user may look
    os.write(done, b"1")
    signal.pause()
os.read(ready, 1)
try:
    collect(shut, "")
    forbidden = "seen"
except PeerForbidden:
    forbidden = "forbidden"
sights = collect(os.getpid(), "").processes
os.kill(shut, signal.SIGKILL)
print(sights[shut], sights[os.getppid()], forbidden)
"""


def test_what_may_not_be_looked_into_is_told_by_whose_it_is():
    seen = subprocess.run(
        [sys.executable, "-c", AS_NOBODY], check=True, capture_output=True, text=True, cwd=ROOT
    )
    parent = "foreign" if os.getuid() == 0 else "read"
    assert seen.stdout.split() == ["unread", parent, "forbidden"]


def test_the_coordinators_children_are_known_as_such():
    """This process has a segment, as a coordinator has, and a child that fills it."""
    fd = os.memfd_create("weight-cache:f-1")
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", "print(flush=True); input()"],
        pass_fds=(fd,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None and child.stdout.readline()
    found = collect(os.getpid(), "f")
    child.communicate(b"\n")
    os.close(fd)
    assert found.children == {child.pid}
    assert found.uses == (Use(child.pid, "f-1", holds=True),)


def test_a_coordinator_that_has_no_pid_here_is_said():
    with pytest.raises(PlatformUnsupported, match="not in this pid namespace"):
        collect(0, "")


def test_a_coordinator_whose_pids_are_others_here_is_said():
    apart = subprocess.Popen(
        ["unshare", "--pid", "--fork", "sh", "-c", "echo; cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert apart.stdout is not None
    try:
        if not apart.stdout.readline():
            pytest.skip("this user may not make a pid namespace")
        (inside,) = children_of(apart.pid)
        with pytest.raises(PlatformUnsupported, match="not in this pid namespace"):
            collect(inside, "")
    finally:
        apart.communicate()
