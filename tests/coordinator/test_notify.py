"""The coordinator's word to its manager: our two ends together, and each against libsystemd's."""

from __future__ import annotations

import array
import ctypes
import json
import os
import resource
import select
import socket
import subprocess
import sys
import threading

import pytest

from coordinator import notify
from coordinator.fd_store import NOTICE_LIMIT_BYTES, FdStore, Notice, NoticeRefused
from coordinator.notify import ManagerGone, StoreLost, StoreRefused
from coordinator.notify_socket import WRONG_LIMIT, Datagram, NotifySocket
from tests.coordinator.test_fd_store import is_open, memfd
from tests.gpu_worker.served import wait_until
from tests.processes import ROOT, WAIT_S


class Manager:
    """The supervisor's end, for as long as a test runs."""

    def __init__(self, path: str, limit: int = 4) -> None:
        self.said: list[str] = []
        self.store = FdStore(limit)
        self.socket = NotifySocket(path, self.store, self.said.append)
        self.heard: list[Notice] = []
        self._stop, self._told = os.pipe()
        self._thread: threading.Thread | None = None

    def hear(self, pid: int | None = None) -> Notice:
        return self.socket.hear(os.getpid() if pid is None else pid)

    def serve(self) -> None:
        """Hear this process from a thread, as the supervisor's loop would."""

        def loop() -> None:
            poll = select.poll()
            poll.register(self.socket.fileno(), select.POLLIN)
            poll.register(self._stop, select.POLLIN | select.POLLHUP)
            while all(fd != self._stop for fd, _ in poll.poll()):
                self.heard.append(self.hear())

        self._thread = threading.Thread(target=loop)
        self._thread.start()

    def close(self) -> None:
        os.close(self._told)
        if self._thread is not None:
            self._thread.join()
        os.close(self._stop)
        self.socket.close()
        self.store.close()


@pytest.fixture
def manager(tmp_path, monkeypatch):
    path = str(tmp_path / "n.sock")
    made = Manager(path)
    monkeypatch.setenv(notify.NOTIFY_SOCKET, path)
    yield made
    made.close()


@pytest.fixture
def serving(manager):
    manager.serve()
    return manager


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.delenv(notify.NOTIFY_SOCKET, raising=False)


def tell(path: str, data: bytes, *fds: int) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as telling:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
        telling.sendmsg([data], [rights] if fds else [], 0, path)


# --- our two ends -------------------------------------------------------------------------------


def test_what_is_stored_is_there_after_the_barrier_and_removed_after_the_next(serving):
    fds = [memfd("one"), memfd("two")]
    assert notify.offered()
    assert notify.store("gen-1", fds) and notify.barrier(WAIT_S)
    kept, names = serving.store.handover()
    assert names == ["gen-1"] * 2
    assert [os.fstat(fd).st_ino for fd in kept] == [os.fstat(fd).st_ino for fd in fds]
    assert notify.remove("gen-1") and notify.barrier(WAIT_S)
    assert len(serving.store) == 0
    assert all(map(is_open, fds)) and not any(map(is_open, kept))
    for fd in fds:
        os.close(fd)
    assert serving.said == []


def test_ready_and_stopping_are_heard(serving):
    # Its thread may have read the barrier together with what came before, and say so only then.
    assert notify.ready() and notify.barrier(WAIT_S)
    wait_until(lambda: Notice(ready=True) in serving.heard)
    assert notify.stopping() and notify.barrier(WAIT_S)
    wait_until(lambda: Notice(stopping=True) in serving.heard)


def test_a_barrier_tells_an_event_loop_without_waiting(manager):
    fd = notify.begin_barrier()
    assert fd is not None
    assert not readable(fd)
    manager.hear()
    assert readable(fd)
    notify.end_barrier(fd)
    assert not is_open(fd)


def test_a_full_store_refuses_and_the_next_barrier_says_so_once(serving):
    fds = [memfd() for _ in range(5)]
    notify.store("a", fds)
    notify.store("b", fds[:1])
    with pytest.raises(StoreRefused, match=r"'a' cannot be kept: the store is full \(4 fds\)"):
        notify.barrier(WAIT_S)
    assert serving.store.handover()[1] == ["b"]
    assert notify.barrier(WAIT_S)
    for fd in fds:
        os.close(fd)
    assert len(serving.said) == 1 and f"pid {os.getpid()}" in serving.said[0]


def test_many_fds_go_in_several_messages(tmp_path, monkeypatch):
    manager = Manager(str(tmp_path / "m"), limit=600)
    monkeypatch.setenv(notify.NOTIFY_SOCKET, manager.socket.path)
    manager.serve()
    try:
        fds = [memfd() for _ in range(501)]
        notify.store("a", fds)
        notify.barrier(WAIT_S)
        assert len(manager.store) == 501
        for fd in fds:
            os.close(fd)
    finally:
        manager.close()


def test_without_a_manager_nothing_is_said_and_nothing_fails(alone):
    assert not notify.offered()
    assert not any((notify.ready(), notify.stopping(), notify.store("a", [0]), notify.remove("a")))
    assert notify.barrier() is False
    assert notify.begin_barrier() is None
    assert notify.limit() is None


@pytest.mark.parametrize(("text", "limit"), [("", None), ("7", 7), ("-1", None), ("x", None)])
def test_the_managers_limit_is_known_where_it_says_so(monkeypatch, text, limit):
    monkeypatch.setenv(notify.STORE_LIMIT, text)
    assert notify.limit() == limit


def test_a_manager_that_is_gone_is_named(manager):
    manager.socket.close()
    with pytest.raises(ManagerGone, match=r"cannot be told on .*n\.sock: Connection refused"):
        notify.ready()
    os.unlink(manager.socket.path)
    with pytest.raises(ManagerGone, match="No such file"):
        notify.store("a", [0])


def test_a_manager_that_does_not_read_costs_the_time_given_and_no_more(manager):
    with pytest.raises(StoreLost, match=r"has not read what it was told within 0\.05 s"):
        notify.barrier(0.05)

    def fill_its_queue() -> None:
        while True:
            notify.remove("a", 0.05)

    with pytest.raises(StoreLost, match=r"has not read anything for 0\.05 s") as caught:
        fill_its_queue()
    assert not isinstance(caught.value, ManagerGone)


def test_a_closed_fd_is_our_own_mistake(manager):
    closed = 900  # far above what a new socket would get
    assert not is_open(closed)
    with pytest.raises(OSError) as caught:
        notify.store("a", [closed])
    assert not isinstance(caught.value, StoreLost)
    assert manager.hear() == Notice() and len(manager.store) == 0


# --- a socket on which somebody lies ------------------------------------------------------------


FOREIGN = """
import os, sys
from coordinator import notify
notify.store("a", [os.memfd_create("x")])
notify.stopping()
"""


def test_only_the_coordinator_is_heard(manager):
    """A loader has its environment too, and any process of the user may open the path."""
    process = subprocess.Popen([sys.executable, "-c", FOREIGN], cwd=ROOT)
    assert process.wait(WAIT_S) == 0
    opened = len(os.listdir("/proc/self/fd"))
    assert manager.hear() == Notice()
    assert len(manager.store) == 0 and len(os.listdir("/proc/self/fd")) == opened
    assert manager.said == [
        f"a notice from pid {process.pid} is dropped: it does not come from the coordinator"
    ]


def test_while_none_runs_nobody_is_heard(manager):
    """Nor a process outside this pid namespace, of which the kernel says that its pid is 0."""
    assert notify.store("mine", [0])
    assert manager.hear(pid=0) == Notice()
    assert len(manager.store) == 0
    with pytest.raises(NoticeRefused, match="does not come from"):
        manager.socket._heard(Datagram(0, b"READY=1", [], False), 0)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\xff\xfe\0", "not text"),
        (b"no assignment", "no list"),
        (b"READY=1\nX=" + b"x" * NOTICE_LIMIT_BYTES, "did not arrive whole"),
        (b"FDSTORE=1\nFDNAME=a:b", "no name"),
        (b"READY=1", "2 fds came without FDSTORE=1"),
        (b"FDSTOREREMOVE=1\nFDNAME=kept", "2 fds came without FDSTORE=1"),
        (b"BARRIER=1", "a barrier came with 2 fds"),
    ],
)
def test_garbage_changes_nothing_and_its_fds_are_closed(manager, data, why):
    manager.store.keep("kept", [memfd()])
    before = manager.store.handover()
    opened = len(os.listdir("/proc/self/fd"))
    mine = [memfd(), memfd()]
    tell(manager.socket.path, data, *mine)
    for fd in mine:
        os.close(fd)
    assert manager.hear() == Notice()
    assert len(manager.said) == 1 and why in manager.said[0]
    assert manager.store.handover() == before
    assert len(os.listdir("/proc/self/fd")) == opened


def test_fds_for_which_there_is_no_room_here_are_refused_whole(manager):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    mine = [memfd(), memfd()]
    tell(manager.socket.path, b"FDSTORE=1\nFDNAME=a", *mine)
    for fd in mine:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(mine), hard))  # one of the two fits
    try:
        manager.hear()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(manager.store) == 0 and not any(map(is_open, mine))
    assert "did not arrive whole" in manager.said[0]


def test_a_barrier_of_any_kind_of_fd_is_passed(manager):
    """It is closed, whatever it is; what was refused is written into pipes only."""
    tell(manager.socket.path, b"garbage")
    ours, theirs = os.pipe()
    file = memfd()
    for fd in (file, ours, theirs):
        tell(manager.socket.path, b"BARRIER=1", fd)
        tell(manager.socket.path, b"garbage")
    manager.hear()
    assert os.fstat(file).st_size == 0
    os.close(theirs)
    os.close(ours)
    os.close(file)


def test_a_flood_is_bounded_in_one_turn_and_named_at_powers_of_ten(manager):
    for _ in range(100):
        tell(manager.socket.path, b"garbage")
        manager.hear(pid=1)
    me = os.getpid()
    text = f"a notice from pid {me} is dropped: it does not come from the coordinator"
    assert manager.said == [text, f"{text}, 10 times so far", f"{text}, 100 times so far"]
    for number in range(2 * WRONG_LIMIT):
        tell(manager.socket.path, b"FDSTORE=1\nFDNAME=%d:" % number)
        manager.hear()
    assert len(manager.socket._wrong) <= WRONG_LIMIT
    for _ in range(5):
        tell(manager.socket.path, b"FDSTORE=1", 0)
    manager.socket.hear(me, at_most=2)
    assert len(manager.store) == 2
    manager.socket.hear(me, at_most=None)
    assert len(manager.store) == 4


# --- what comes with a process ------------------------------------------------------------------


CHILD = """
import fcntl, json, os, sys
os.environ["LISTEN_PID"] = os.environ["LISTEN_PID"].replace("me", str(os.getpid()))
from coordinator import notify
found = notify.inherited()
names = {name: [os.readlink(f"/proc/self/fd/{fd}") for fd in fds] for name, fds in found.items()}
open_ones = [fd for fds in found.values() for fd in fds]
print(json.dumps({
    "found": {name: [n.split(":")[1].split()[0] for n in ns] for name, ns in names.items()},
    "cloexec": all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in open_ones),
    "left": [name for name in os.environ if name.startswith("LISTEN_")],
    "again": notify.inherited(),
}))
"""


def inherit(pid: str, count: str, names: str | None) -> dict:
    """Run a child that comes with two fds, at 3 and 4."""
    fds = [memfd("one"), memfd("two")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LISTEN_PID": pid, "LISTEN_FDS": count}
    environment["LISTEN_PIDFDID"] = "1"
    if names is not None:
        environment["LISTEN_FDNAMES"] = names
    out, theirs = os.pipe()
    child = os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", CHILD],
        environment,
        file_actions=[
            (os.POSIX_SPAWN_DUP2, theirs, 1),
            *((os.POSIX_SPAWN_DUP2, fd, 60 + n) for n, fd in enumerate(fds)),
            *((os.POSIX_SPAWN_DUP2, 60 + n, 3 + n) for n in range(2)),
            *((os.POSIX_SPAWN_CLOSE, 60 + n) for n in range(2)),
        ],
    )
    for fd in (*fds, theirs):
        os.close(fd)
    with os.fdopen(out) as reading:
        text = reading.read()
    assert os.waitpid(child, 0)[1] == 0
    result = json.loads(text)
    assert (result["left"], result["again"]) == ([], {})
    return result


@pytest.mark.process
@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("a:b", {"a": ["one"], "b": ["two"]}),
        ("a:a", {"a": ["one", "two"]}),
        (None, {"unknown": ["one", "two"]}),
        ("a", {"unknown": ["one", "two"]}),
        (":", {"": ["one", "two"]}),
    ],
)
def test_fds_come_by_name_and_go_to_no_child(names, found):
    result = inherit("me", "2", names)
    assert (result["found"], result["cloexec"]) == (found, True)


@pytest.mark.process
@pytest.mark.parametrize(("pid", "count"), [("1", "2"), ("", "2"), ("me", "x"), ("me", "-1")])
def test_what_is_for_somebody_else_is_left_alone(pid, count):
    assert inherit(pid, count, "a:b")["found"] == {}


@pytest.mark.process
def test_fds_that_are_not_there_are_left_out():
    assert inherit("me", "3", "a:b:c")["found"] == {"a": ["one"], "b": ["two"]}


# --- systemd's own library ----------------------------------------------------------------------


@pytest.fixture
def libsystemd():
    try:
        return ctypes.CDLL("libsystemd.so.0", use_errno=True)
    except OSError:
        pytest.skip("libsystemd is not installed here")


def test_systemds_own_client_is_understood(serving, libsystemd):
    fd = memfd("theirs")
    fds = (ctypes.c_int * 1)(fd)
    state = b"FDSTORE=1\nFDNAME=theirs\nFDPOLL=0"
    assert libsystemd.sd_pid_notify_with_fds(0, 0, state, fds, 1) > 0
    assert libsystemd.sd_notify(0, b"FDSTORE=1") > 0  # nothing with it: nothing happens
    assert libsystemd.sd_notify(0, b"garbage") > 0  # refused, which it cannot be told
    assert libsystemd.sd_notify_barrier(0, ctypes.c_uint64(int(WAIT_S * 1e6))) > 0
    ((kept,), names) = serving.store.handover()
    assert names == ["theirs"] and os.path.sameopenfile(kept, fd)
    assert libsystemd.sd_notify(0, b"FDSTOREREMOVE=1\nFDNAME=theirs") > 0
    assert libsystemd.sd_notify_barrier(0, ctypes.c_uint64(int(WAIT_S * 1e6))) > 0
    assert len(serving.store) == 0
    os.close(fd)


def readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])
