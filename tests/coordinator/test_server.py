"""A real coordinator process, spoken to by hand: what it promises to good peers and bad ones."""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shm_store import channel, segment
from shm_store.errors import PeerForbidden
from shm_store.wire import (
    VERSION,
    Abort,
    Acquire,
    Bye,
    Cancel,
    Commit,
    Done,
    Drain,
    Evict,
    Fail,
    Grant,
    Release,
    Reserve,
    Status,
    Ticket,
    encode,
)
from tests.processes import (
    ROOT,
    WAIT_S,
    Coordinator,
    Peer,
    children_of,
    fds_of,
    processes_with,
    running,
    write_safetensors,
)

pytestmark = pytest.mark.process


@pytest.fixture
def coordinator(path: str):
    with running(path, "--ram-budget", "64MiB") as started:
        yield started


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return write_safetensors(
        tmp_path / "w.safetensors", {"w": ("U8", [5000], bytes(range(250)) * 20)}
    )


def ledger_bytes(peer: Peer) -> int:
    return sum(pool.in_use_bytes for pool in peer.status().pools)


def test_a_file_is_loaded_once_and_the_ledger_says_what_the_kernel_says(coordinator, weights):
    a, b = Peer(coordinator.socket, "a"), Peer(coordinator.socket, "b")
    first, second = a.load("k", weights), b.load("k", weights)
    assert isinstance(first, Grant) and isinstance(second, Grant) and first.gen == second.gen
    (ours,), (theirs,) = a.fds, b.fds
    assert os.fstat(ours).st_ino == os.fstat(theirs).st_ino
    assert segment.is_sealed(ours)
    assert segment.read_preamble(ours).key == "k"
    assert ledger_bytes(a) == coordinator.segment_blocks() == os.fstat(ours).st_blocks * 512 > 0
    while children_of(coordinator.pid):
        a.status()  # the loader ends by itself, just after its COMMIT
    for peer, grant in ((a, first), (b, second)):
        peer.send(Release(grant.gen, grant.rid))
        peer.flush()
    a.send(Evict(a.next_rid()))
    a.expect(Done)
    a.flush()
    assert ledger_bytes(a) == coordinator.segment_blocks() == 0


def test_the_coordinator_never_loads_torch(coordinator, weights):
    peer = Peer(coordinator.socket)
    assert isinstance(peer.load("k", weights), Grant)
    maps = Path(f"/proc/{coordinator.pid}/maps").read_text()
    assert "msgspec" in maps
    assert "torch" not in maps and "numpy" not in maps


def test_a_published_segment_is_stamped_and_shared(coordinator):
    a, b = Peer(coordinator.socket, "a"), Peer(coordinator.socket, "b")
    grant = a.publish("built", b"\7" * 100, version="v1")
    (fd,) = a.fds
    preamble = segment.read_preamble(fd)
    assert (preamble.gen, preamble.key, preamble.fingerprint) == (grant.gen, "built", "build:v1")
    b.send(Acquire(b.next_rid(), "built", None, "v1", WAIT_S))
    assert b.expect(Grant).gen == grant.gen
    assert len(b.generation("built").leases) == 2


def test_a_builder_that_lies_about_who_it_is_is_overruled(coordinator):
    """The preamble is the coordinator's: whatever the filler wrote there is gone."""
    peer = Peer(coordinator.socket)
    ticket = peer.ticket("mine")
    fd = peer.space(ticket.gen, 8192)
    segment.write_at(fd, b"someone else's preamble", 0)
    os.close(fd)
    peer.send(Commit(ticket.gen))
    peer.expect(Grant)
    assert segment.read_preamble(peer.fds[0]).key == "mine"


def test_a_filler_cannot_grow_its_segment(coordinator):
    """What was charged is what there is: to the page, while it is filled."""
    peer = Peer(coordinator.socket)
    fd = peer.space(peer.ticket("k").gen, 8192)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 1 << 20)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 1 << 20)
    assert ledger_bytes(peer) == coordinator.segment_blocks() == 8192
    os.close(fd)


def test_a_filler_cannot_give_back_what_was_charged(coordinator):
    """A hole changes no size. Whoever read there later would need memory, or die without."""
    peer = Peer(coordinator.socket)
    ticket = peer.ticket("k")
    fd = peer.space(ticket.gen, 1 << 20)
    punch_and_keep_size = 0x02 | 0x01
    libc = ctypes.CDLL(None, use_errno=True)
    offset, length = ctypes.c_int64(1 << 19), ctypes.c_int64(4096)
    assert libc.fallocate(fd, punch_and_keep_size, offset, length) == 0, ctypes.get_errno()
    os.close(fd)
    peer.send(Commit(ticket.gen))
    cause = peer.expect(Fail).cause
    assert cause.code == "segment_refused" and "4096 bytes" in cause.message
    assert peer.generation("k").state == "filling"  # charged, until its filler lets go
    peer.send(Abort(ticket.gen))
    peer.flush()
    assert ledger_bytes(peer) == coordinator.segment_blocks() == 0


def test_an_aborted_build_gives_its_bytes_back(coordinator):
    peer = Peer(coordinator.socket)
    ticket = peer.ticket("k")
    os.close(peer.space(ticket.gen, 1 << 20))
    assert ledger_bytes(peer) == coordinator.segment_blocks() == 1 << 20
    peer.send(Abort(ticket.gen))
    assert peer.expect(Fail).cause.code == "cancelled"
    peer.flush()
    assert ledger_bytes(peer) == coordinator.segment_blocks() == 0


def test_more_than_the_budget_is_refused_at_once_with_the_holders(coordinator):
    peer = Peer(coordinator.socket)
    peer.publish("small")
    ticket = peer.ticket("large")
    peer.send(Reserve(ticket.gen, 65 << 20))
    cause = peer.expect(Fail).cause
    assert (cause.code, cause.needed_bytes) == ("budget_exceeded", 65 << 20)
    assert [holder.key for holder in cause.holders] == ["small"]


def test_the_end_of_a_process_ends_its_leases_and_nothing_else(coordinator, weights):
    """S15: by pidfd, in one event, peers undisturbed."""
    watcher = Peer(coordinator.socket, "watcher")
    watcher.load("k", weights)
    script = (
        "import sys; sys.path.insert(0, sys.argv[3])\n"
        "from tests.processes import Peer\n"
        "peer = Peer(sys.argv[1], 'victim'); grant = peer.load('k', sys.argv[2])\n"
        "print(grant.gen, flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, coordinator.socket, str(weights), str(ROOT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline().strip()
        assert len(watcher.generation("k").leases) == 2
        pidfd = os.pidfd_open(victim.pid)
        victim.send_signal(signal.SIGKILL)
        select.select([pidfd], [], [], WAIT_S)
        os.close(pidfd)
    # The coordinator's pidfd became readable with ours; each status is a later event of its loop.
    for _ in range(1000):
        leases = watcher.generation("k").leases
        if len(leases) == 1:
            break
    assert [lease.pid for lease in leases] == [os.getpid()]
    assert [s.name for s in watcher.status().sessions] == ["watcher"]


@pytest.mark.parametrize(
    "data",
    [b"", b"\0", b"\0garbage", b"\1part of a message that never ends", b"\xff" * 100],
    ids=["empty", "flag only", "garbage", "unfinished", "no flag"],
)
def test_a_bad_frame_closes_that_connection_and_no_other(coordinator, data):
    other, bad = Peer(coordinator.socket, "other"), Peer(coordinator.socket, "bad")
    grant = other.publish("k")
    assert [s.name for s in other.status().sessions] == ["other", "bad"]
    bad.channel.socket.send(data)
    bad.channel.socket.shutdown(socket.SHUT_WR)
    message = bad.receive()
    if message is not None:
        assert message.cause.code == "protocol_violation"
        assert bad.receive() is None
    assert [s.name for s in other.status().sessions] == ["other"]
    assert other.generation("k").generation == grant.gen


def test_an_oversized_frame_closes_that_connection(coordinator):
    other, bad = Peer(coordinator.socket, "other"), Peer(coordinator.socket, "bad")
    bad.channel.socket.send(b"\0" + b"x" * (channel.FRAME_LIMIT_BYTES + 1))
    assert bad.receive().cause.code == "protocol_violation"
    assert [s.name for s in other.status().sessions] == ["other"]


def test_fds_that_nobody_asked_for_close_the_connection_and_do_not_leak(coordinator):
    other = Peer(coordinator.socket, "other")
    other.status()
    before = len(fds_of(coordinator.pid))
    bad = Peer(coordinator.socket, "bad")
    read, write = os.pipe()
    bad.send(Status(bad.next_rid()), [read, write])
    assert bad.receive().cause.code == "protocol_violation"
    assert bad.receive() is None
    other.status()
    assert len(fds_of(coordinator.pid)) == before
    os.close(read)
    os.close(write)


def test_a_source_that_nobody_waits_for_any_more_is_closed(path, tmp_path):
    """A connection that goes while its request waits takes its fd with it."""
    with running(path, "--ram-budget", "1MiB") as coordinator:
        pid = coordinator.pid
        other, waiter = Peer(path, "other"), Peer(path, "waiter")
        other.publish("held", b"\1" * 1_000_000)
        before = fds_of(pid)
        large = write_safetensors(
            tmp_path / "l.safetensors", {"w": ("U8", [900000], bytes(900000))}
        )
        fd = os.open(large, os.O_RDONLY)
        waiter.send(Acquire(waiter.next_rid(), "k", str(large), "", WAIT_S), [fd])
        os.close(fd)
        while str(large) not in fds_of(pid).values():
            other.status()
        waiter.close()
        while len(other.status().sessions) > 1 or children_of(pid):
            pass
        assert str(large) not in fds_of(pid).values()
        assert len(fds_of(pid)) < len(before)


def test_freed_means_that_nothing_works_on_the_segment_any_more(path):
    """The backing child has the fd, too: FREED while it works would be a lie to the page."""
    with running(path, "--ram-budget", "600MiB") as coordinator:
        peer = Peer(path)
        ticket = peer.ticket("k")
        peer.send(Reserve(ticket.gen, 512 << 20))
        while not children_of(coordinator.pid):
            pass
        peer.send(Abort(ticket.gen))
        assert peer.expect(Fail).cause.code == "cancelled"
        peer.flush()
        assert children_of(coordinator.pid) == []
        assert ledger_bytes(peer) == coordinator.segment_blocks() == 0


def test_a_directory_behind_the_fd_is_refused_by_the_coordinator_too(coordinator, tmp_path):
    """A peer need not use our client: the check is repeated where it matters."""
    peer = Peer(coordinator.socket)
    fd = os.open(tmp_path, os.O_RDONLY)
    peer.send(Acquire(peer.next_rid(), "k", str(tmp_path), "", WAIT_S), [fd])
    os.close(fd)
    assert peer.expect(Fail).cause.code == "source_not_opened"
    assert peer.status().generations == ()


def test_a_peer_of_another_version_is_told_both(coordinator):
    peer = Peer(coordinator.socket, "newer", version=VERSION + 1)
    cause = peer.receive().cause
    assert cause.code == "version_mismatch"
    assert f"version {VERSION}," in cause.message and str(VERSION + 1) in cause.message
    assert peer.receive() is None


def test_a_peer_that_does_not_read_is_not_read_and_disturbs_nobody(coordinator):
    """Its answers wait for it; the others go on, and the coordinator does not grow."""
    stuck, other = Peer(coordinator.socket, "stuck"), Peer(coordinator.socket, "other")
    stuck.channel.socket.setblocking(False)
    sent = _send_until_full(stuck)
    assert [s.name for s in other.status().sessions] == ["stuck", "other"]
    stuck.channel.socket.settimeout(WAIT_S)
    for _ in range(sent):
        stuck.expect(object)
    assert len(stuck.status().sessions) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_peer_of_another_user_is_refused(tmp_path):
    path = "/tmp/" + f"weight-cache-test-{os.getpid()}.sock"
    script = (
        "import os, sys; sys.path.insert(0, sys.argv[2])\n"
        "from tests.processes import Peer\n"
        "from shm_store.errors import WeightCacheError\n"
        "from shm_store.wire import decode, to_session_decoder\n"
        "os.setuid(65534)\n"
        "try:\n"
        "    said, _ = Peer.connect(sys.argv[1]).receive()\n"
        "    print(decode(to_session_decoder, said).cause.code); Peer.close_all()\n"
        "except WeightCacheError as error: print(error.code)\n"
    )
    with running(path) as coordinator:
        for mode, expected in ((0o600, "peer_forbidden"), (0o666, "peer_forbidden")):
            os.chmod(path, mode)
            said = subprocess.run(
                [sys.executable, "-c", script, path, str(ROOT)],
                capture_output=True,
                text=True,
                check=True,
            )
            assert said.stdout.strip() == expected, said
        watcher = Peer(coordinator.socket)
        assert len(watcher.status().sessions) == 1
    assert issubclass(PeerForbidden, Exception)


def test_a_second_coordinator_on_the_socket_is_refused_and_the_first_goes_on(coordinator):
    second = Coordinator(coordinator.socket)
    code, stderr = second.stop()
    assert (code, second.ready_line) == (6, "")
    assert "already serves" in stderr
    assert Peer(coordinator.socket).status().sessions != ()


def test_of_many_starters_one_wins(path):
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "coordinator", "serve", "--socket", path],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )
        for _ in range(5)
    ]
    lines = [process.stdout.readline() for process in started if process.stdout]
    assert sorted(bool(line) for line in lines) == [False] * 4 + [True]
    assert len(Peer(path).status().sessions) == 1
    for process in started:
        process.terminate()
        process.communicate(timeout=WAIT_S)
    assert sorted(process.returncode for process in started) == [0, 6, 6, 6, 6]


def test_a_stale_socket_file_is_replaced_and_nothing_stays_behind(path):
    first = Coordinator(path)
    first.stop(signal.SIGKILL)
    assert os.path.exists(path)
    with running(path) as second:
        assert Peer(second.socket).status().sessions != ()
    assert not os.path.exists(path) and not os.path.exists(path + ".lock")


def test_at_its_end_it_removes_only_what_is_its_own(path):
    """Whoever cleans up /tmp removes both files of a coordinator that runs; then another starts."""
    first = Coordinator(path)
    os.unlink(path)
    os.unlink(path + ".lock")
    with running(path):
        code, stderr = first.stop()
        assert code == 0, stderr
        assert os.path.exists(path + ".lock")
        assert len(Peer(path).status().sessions) == 1
    assert not os.path.exists(path) and not os.path.exists(path + ".lock")


@pytest.mark.parametrize("what", ["socket", "lock"])
def test_files_that_are_gone_at_its_end_are_no_fault(path, what):
    coordinator = Coordinator(path)
    os.unlink(path if what == "socket" else path + ".lock")
    code, stderr = coordinator.stop()
    assert code == 0 and "Traceback" not in stderr, stderr
    assert not os.path.exists(path) and not os.path.exists(path + ".lock")


@pytest.mark.parametrize("suffix", ["", ".lock"])
def test_a_file_of_somebody_elses_is_never_removed(path, suffix):
    """Paths are typed by people: `--socket precious.txt` must cost them nothing."""
    Path(path + suffix).write_text("precious")
    code, stderr = Coordinator(path).stop()
    assert code == 2 and "Traceback" not in stderr, stderr
    assert Path(path + suffix).read_text() == "precious"
    assert os.path.exists(path) == (suffix == "")


def test_a_folder_that_does_not_exist_is_an_error_of_the_argument(path):
    code, stderr = Coordinator(os.path.join(path, "no", "c.sock")).stop()
    assert code == 2 and "Traceback" not in stderr, stderr


def test_a_child_whose_end_was_ignored_by_a_parent_is_still_seen(path, tmp_path):
    """With SIGCHLD ignored the kernel reaps children itself, and a failed one looks well."""

    def deaf() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        # Backing more than this fails, with SIGXFSZ or EFBIG.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    with running(path, preexec_fn=deaf) as coordinator:
        peer = Peer(coordinator.socket)
        ticket = peer.ticket("k")
        peer.send(Reserve(ticket.gen, 2 << 20))
        assert peer.expect(Fail).cause.code == "backing_failed"
        peer.flush()
        assert ledger_bytes(peer) == coordinator.segment_blocks() == 0


def test_terminated_it_says_bye_and_ends_its_loaders(path, tmp_path):
    """A loader that waits for room would live for ever; it is ended, and no other is started."""
    coordinator = Coordinator(path, "--ram-budget", "1MiB", env={**os.environ, "OF_TEST": path})
    peer = Peer(path)
    peer.publish("held", b"\1" * 900_000)
    weights = write_safetensors(
        tmp_path / "w.safetensors", {"w": ("U8", [500_000], bytes(500_000))}
    )
    fd = os.open(weights, os.O_RDONLY)
    peer.send(Acquire(peer.next_rid(), "k", str(weights), "", WAIT_S), [fd])
    os.close(fd)
    while not children_of(coordinator.pid):
        peer.status()
    (loader,) = children_of(coordinator.pid)
    pidfd = os.pidfd_open(loader)
    code, stderr = coordinator.stop()
    assert code == 0, stderr
    assert select.select([pidfd], [], [], WAIT_S)[0] == [pidfd]
    os.close(pidfd)
    assert processes_with("OF_TEST", path) == []
    assert peer.expect(Bye) == Bye()


def test_a_loader_that_is_killed_is_in_the_log(path, tmp_path):
    """The error says to look there. One that nobody wanted any more is no news."""
    coordinator = Coordinator(path, "--ram-budget", "1MiB")
    peer = Peer(path)
    peer.publish("held", b"\1" * 900_000)
    weights = write_safetensors(
        tmp_path / "w.safetensors", {"w": ("U8", [500_000], bytes(500_000))}
    )
    with open(weights, "rb") as file:
        for key in ("unwanted", "killed"):
            acquire = Acquire(peer.next_rid(), key, str(weights), "", WAIT_S)
            peer.send(acquire, [file.fileno()])
            if key == "unwanted":
                while not children_of(coordinator.pid):
                    peer.status()
                peer.send(Cancel(acquire.rid))
                assert peer.expect(Fail).cause.code == "cancelled"
                while children_of(coordinator.pid):
                    peer.status()
    gone: set[int] = set()
    while len(gone) < 2:
        for pid in set(children_of(coordinator.pid)) - gone:
            os.kill(pid, signal.SIGKILL)
            gone.add(pid)
    cause = peer.expect(Fail).cause
    assert cause.code == "fill_failed" and "log" in cause.remedy
    coordinator.audit_quiet()
    code, stderr = coordinator.stop()
    assert code == 0 and stderr.count("ended (by SIGKILL, probably") == 2, stderr


def test_a_worker_that_ends_while_it_fills_is_in_the_log(path):
    coordinator = Coordinator(path)
    watcher = Peer(path, "watcher")
    with builder(path) as victim:
        victim.kill()
    while watcher.status().generations:
        pass
    coordinator.audit_quiet()
    code, stderr = coordinator.stop()
    assert code == 0 and f"process {victim.pid} was lost while it filled 'k'" in stderr, stderr


def test_a_build_that_kills_whoever_runs_it_is_given_to_two_at_most(coordinator):
    """A dying process closes its socket before its pidfd tells: that is still a death."""
    watcher, last = Peer(coordinator.socket, "watcher"), Peer(coordinator.socket, "last")
    with builder(coordinator.socket) as first, builder(coordinator.socket, waits=True) as second:
        while watcher.generation("k").waiting < 2:
            pass
        last.send(Acquire(last.next_rid(), "k", None, "", WAIT_S))
        for victim in (first, second):
            assert victim.stdout.readline().startswith("Ticket")
            victim.kill()
        assert last.expect(Fail).cause.code == "fill_failed"


def test_a_builder_that_lost_its_connection_and_lives_is_replaced(coordinator):
    first, second = Peer(coordinator.socket, "first"), Peer(coordinator.socket, "second")
    first.ticket("k")
    second.send(Acquire(second.next_rid(), "k", None, "", WAIT_S))
    assert second.generation("k").waiting == 2
    first.close()
    assert isinstance(second.expect(Ticket), Ticket)


@contextmanager
def builder(path: str, *, waits: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A process that asks for the ticket of `k` and says when it has it: now, or some time."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from tests.processes import Peer\n"
        "print(Peer(sys.argv[1], 'victim').ticket('k'), flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, path, str(ROOT)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            if not waits:
                assert process.stdout is not None
                assert select.select([process.stdout], [], [], WAIT_S)[0]
            yield process
        finally:
            process.kill()


def test_drain_waits_for_the_last_lease_then_exits(path):
    coordinator = Coordinator(path)
    holder, operator = Peer(path, "holder"), Peer(path, "operator", role="operator")
    grant = holder.publish("k")
    os.close(holder.fds[0])
    operator.send(Drain(operator.next_rid(), WAIT_S))
    holder.send(Acquire(holder.next_rid(), "new", None, "", WAIT_S))
    assert holder.expect(Fail).cause.code == "draining"
    holder.send(Release(grant.gen, grant.rid))
    assert operator.expect(Done).rid == operator.rid
    assert operator.expect(Bye) == Bye() and operator.receive() is None
    assert holder.expect(Bye) == Bye()
    code, stderr = coordinator.stop()
    assert code == 0, stderr
    assert not os.path.exists(path)


def test_drain_names_what_is_left_at_its_deadline(coordinator):
    coordinator.unquiet = "it ends with the last lease"
    holder, operator = Peer(coordinator.socket, "holder"), Peer(coordinator.socket, role="operator")
    holder.publish("k")
    operator.send(Drain(operator.next_rid(), 0.0))
    cause = operator.expect(Fail).cause
    assert cause.code == "drain_incomplete"
    (left,) = cause.holders
    assert (left.key, [lease.pid for lease in left.leases]) == ("k", [os.getpid()])


def _send_until_full(peer: Peer) -> int:
    """Send until the coordinator takes no more; how many it took."""
    for sent in range(100_000):
        if not select.select([], [peer.channel], [], 0.5)[1]:
            return sent
        peer.channel.send_frame(b"\0" + encode(Status(peer.next_rid())))
    raise AssertionError("the coordinator reads without end")
