"""How a connection ends, and what everyone who waits on it hears."""

from __future__ import annotations

import os
import resource
import threading
import weakref

import pytest

from gpu_worker import registry
from gpu_worker.keeper import Keeper
from gpu_worker.request import Ask
from shm_store import channel, segment
from shm_store.errors import (
    CallerError,
    ConnectionLost,
    Draining,
    FdsExhausted,
    LoadTimeout,
    NoCoordinator,
    PeerForbidden,
    ProtocolViolation,
    VersionMismatch,
    WorkerClosed,
)
from shm_store.keys import GenerationId, LeaseId, RequestId
from shm_store.wire import VERSION, Cause, Done, Fail, Flush, Flushed, Grant, Release, encode
from tests.gpu_worker.sealed import maps_of
from tests.gpu_worker.spoken import KEY, WAIT_S, Sharer, built, fds_of, segments_open


class TestEnd:
    def test_everyone_who_waits_hears_of_it_and_so_do_later_callers(
        self, coordinator, client, asked
    ):
        """Each gets an exception of its own, so that no traceback shows another caller's frames."""
        askings = [asked()[0] for _ in range(3)]
        coordinator.peer.close()
        errors = [asking.exception(WAIT_S) for asking in askings]
        assert {type(error) for error in errors} == {ConnectionLost}
        assert len({id(error) for error in errors}) == 3
        for call in (lambda: client.flush(WAIT_S), lambda: client.acquire(built(), None, None)):
            with pytest.raises(ConnectionLost, match="went away"):
                call()

    def test_it_ends_once(self, coordinator, client, tmp_path):
        """As when Ctrl-C comes while the reader starts: caller and reader both end it."""
        connection = client._connection
        before = set(os.listdir("/proc/self/fd"))
        coordinator.leave_for_good()
        with pytest.raises(Draining):
            client.flush(WAIT_S)
        connection.join(WAIT_S)
        freed = len(before - set(os.listdir("/proc/self/fd")))
        files = [(tmp_path / str(number)).open("w") for number in range(freed)]
        connection._lose(ConnectionLost("again"))
        for file in files:
            with file:
                file.write("still open")

    def test_it_leaves_no_fd_behind(self, coordinator, client, tmp_path):
        """Not even those of frames that were still to be sent."""
        before = len(fds_of("anon_inode:[eventfd]"))
        path = tmp_path / "w.safetensors"
        path.write_bytes(b"unsent")
        for lease in range(1, 3001):
            client.leases.release(coordinator.gen, LeaseId(lease))
        with pytest.raises(LoadTimeout):
            client.acquire(Ask(KEY, str(path), None), 0.0, None)
        assert len(fds_of(str(path))) == 1
        coordinator.leave_for_good()
        with pytest.raises(Draining):
            client.flush(WAIT_S)
        client._connection.join(WAIT_S)
        assert fds_of(str(path)) == []
        assert len(fds_of("anon_inode:[eventfd]")) == before - 1

    def test_a_frame_that_cannot_be_sent_ends_it(self, coordinator, client, monkeypatch):
        """Its asker would else wait for ever: the coordinator never heard of it."""

        def refuse(frame, fds=()):
            raise ConnectionLost("too many fds in flight")

        monkeypatch.setattr(client._connection._channel, "send_frame", refuse)
        with pytest.raises(ConnectionLost, match="in flight"):
            client.acquire(built(), None, None)
        assert coordinator.receive() is None

    def test_after_bye_it_is_a_drain(self, coordinator, client, asked):
        asking, _ = asked()
        coordinator.leave_for_good()
        with pytest.raises(Draining):
            asking.result(WAIT_S)
        assert not coordinator.connecting()

    def test_a_refusal_of_the_connection_reaches_everyone_as_it_is(self, coordinator, asked):
        asking, _ = asked()
        coordinator.send(Fail(RequestId(0), Cause.of(ProtocolViolation("flooded"))))
        coordinator.peer.close()
        with pytest.raises(ProtocolViolation, match="flooded"):
            asking.result(WAIT_S)

    def test_what_is_mapped_outlives_it(self, coordinator, client, asked):
        """And is unmapped when it is let go of, although nobody is there to be told."""
        asking, rid = asked()
        coordinator.grant(rid)
        granted = asking.result(WAIT_S)
        del asking
        coordinator.peer.close()
        with pytest.raises(ConnectionLost):
            client.flush(WAIT_S)
        assert len(maps_of(coordinator.gen)) == 1
        assert bytes(granted.buffer[:12]) == b"weight-cache"
        del granted
        with pytest.raises(ConnectionLost):
            client.flush(WAIT_S)
        assert maps_of(coordinator.gen) == []

    @pytest.mark.parametrize(
        "frame",
        [
            pytest.param(b"\0\xc1", id="garbage"),
            pytest.param(b"\0" + encode(Flush(RequestId(1))), id="the wrong way round"),
            pytest.param(
                b"\0" + encode(Grant(RequestId(2), GenerationId("1-1"))), id="without its fd"
            ),
            pytest.param(b"\0" + encode(Done(RequestId(2))), id="that nobody asked for"),
            pytest.param(b"\7flag", id="without a flag"),
        ],
    )
    def test_a_frame_that_no_coordinator_sends_ends_it(self, coordinator, client, asked, frame):
        asking, _ = asked()
        coordinator.peer.socket.send(frame)
        with pytest.raises(ProtocolViolation):
            asking.result(WAIT_S)
        assert coordinator.receive() is None
        with pytest.raises(ConnectionLost, match="cannot be reached: "):
            client.flush(WAIT_S)

    def test_fds_that_belong_to_no_frame_are_closed(self, coordinator, client):
        fd = segment.create(coordinator.gen)
        coordinator.send(Flushed(RequestId(9)), fd)
        assert coordinator.receive() is None
        with pytest.raises(ConnectionLost, match="came with 1 fds"):
            client.flush(WAIT_S)
        assert segments_open(coordinator) == []

    def test_an_fd_lost_to_a_full_table_is_said_to_be_that(self, coordinator, client, asked):
        """The lease of the lost grant cannot be told apart, so the connection ends."""
        asking, rid = asked()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        fds = [segment.create(coordinator.gen)]
        data = encode(Grant(rid, coordinator.gen))
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            coordinator.peer.send(data, fds)
            error = asking.exception(WAIT_S)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            channel.close_all(fds)
        assert isinstance(error, FdsExhausted)
        assert coordinator.receive() is None

    def test_a_reader_that_fails_leaves_nobody_waiting(
        self, coordinator, client, asked, monkeypatch, caplog
    ):
        """S20: its end is noticed, and said."""

        def granted(gen, lease, fd, wanted):
            os.close(fd)
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(client.leases._mappings, "granted", granted)
        asking, rid = asked()
        coordinator.grant(rid)
        with pytest.raises(ConnectionLost, match="a bug"):
            asking.result(WAIT_S)
        assert coordinator.receive() is None
        assert "the reader" in caplog.text


class TestHandshake:
    def test_it_says_who_attaches(self, coordinator):
        attaching = coordinator.call(registry.share, coordinator.path, "prog", "cpu", Sharer())
        resume = coordinator.accept()
        assert (resume.version, resume.name, resume.device, resume.role) == (
            VERSION,
            "prog",
            "cpu",
            "worker",
        )
        coordinator.answer_flush()
        coordinator.clients.append(attaching.result(WAIT_S))

    @pytest.mark.parametrize("kind", [VersionMismatch, PeerForbidden])
    def test_a_refusal_surfaces_at_attach(self, coordinator, kind):
        attaching = coordinator.call(coordinator.share)
        coordinator.accept()
        coordinator.send(Fail(RequestId(0), Cause.of(kind("go away"))))
        coordinator.peer.close()
        with pytest.raises(kind, match="go away"):
            attaching.result(WAIT_S)

    def test_a_coordinator_that_never_answers_is_none(self, coordinator, monkeypatch):
        monkeypatch.setattr("gpu_worker.client.HANDSHAKE_TIMEOUT_S", 0.05)
        attaching = coordinator.call(coordinator.share)
        coordinator.accept()
        with pytest.raises(NoCoordinator):
            attaching.result(WAIT_S)
        coordinator.expect(Flush)
        assert coordinator.receive() is None

    def test_without_a_coordinator_the_error_says_what_to_do(self, tmp_path):
        with pytest.raises(NoCoordinator, match="weight-cache serve"):
            registry.share(str(tmp_path / "none"), "test", "cpu", Sharer())

    @pytest.mark.parametrize("free", [0, 1])
    def test_without_enough_free_fds_it_is_said(self, coordinator, free):
        """And the one it got is closed again."""
        before = len(os.listdir("/proc/self/fd"))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + free, hard))
        try:
            with pytest.raises(FdsExhausted):
                coordinator.share()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert len(os.listdir("/proc/self/fd")) == before


def test_nothing_is_asked_of_a_connection_that_closes(coordinator, client, monkeypatch):
    """A lease that is granted behind its end would be counted until the process ends."""
    alert = client._connection._alert
    monkeypatch.setattr(client._connection, "_alert", lambda: None)
    coordinator.leave(client)
    assert client.ended
    with pytest.raises(WorkerClosed):
        client.acquire(built(), 0.0, None)
    alert()
    assert coordinator.receive() is None


class TestCallers:
    """Calls that could only hang are refused, and change nothing."""

    @pytest.mark.parametrize("whose", ["session", "mappings"])
    def test_inside_another_call_of_the_same_thread(self, coordinator, client, whose):
        """As a finalizer does, when a garbage collection starts in there."""
        with {"session": client._lock, "mappings": client.leases._mappings._lock}[whose]:
            for call in (lambda: client.flush(WAIT_S), lambda: client.acquire(built(), None, None)):
                with pytest.raises(CallerError, match="finalizer"):
                    call()
        coordinator.in_step(client)

    def test_in_the_keeper_and_in_the_reader(self, coordinator, client, monkeypatch):
        errors = []

        def try_it() -> None:
            try:
                client.flush(WAIT_S)
            except CallerError as error:
                errors.append(error)

        client.keeper.put(try_it)
        coordinator.in_step(client)
        assert len(errors) == 1
        taken = client._session.take

        def take(data: bytes, fds: list[int]) -> None:
            try_it()
            taken(data, fds)

        monkeypatch.setattr(client._session, "take", take)
        coordinator.in_step(client)
        assert len(errors) == 2

    def test_a_thread_with_the_id_of_one_that_ended_is_not_taken_for_it(
        self, coordinator, client, monkeypatch
    ):
        """Ids are used again at once."""
        coordinator.leave_for_good()
        with pytest.raises(Draining):
            client.flush(WAIT_S)
        client._connection.join(WAIT_S)
        ended = client._connection._reader
        monkeypatch.setattr(threading, "get_ident", lambda: ended.ident)
        with pytest.raises(Draining):
            client.flush(WAIT_S)


class TestKeeper:
    """S20, S22: nothing that a task does keeps the rest of the queue from being done."""

    @pytest.mark.parametrize("kind", [RuntimeError, SystemExit, KeyboardInterrupt])
    def test_a_task_that_raises_is_logged(self, coordinator, client, caplog, kind):
        def fail():
            raise kind("in a destructor")

        client.keeper.put(fail)
        coordinator.in_step(client)
        assert "in a destructor" in caplog.text

    def test_who_waits_for_it_is_told_though_it_leaves_meanwhile(self):
        """Both are queued, and in the one order in which waiting means to queue again."""
        keeper, done = Keeper(lambda _: None), threading.Event()
        keeper.put(keeper.leave)
        keeper.call_settled(done.set)
        keeper.leave()
        keeper.start()
        keeper._thread.join(WAIT_S)
        assert done.is_set() and not keeper._thread.is_alive()

    def test_what_is_done_is_not_kept(self, client):
        """A task may be the last to hold a module; the keeper then waits for the next one."""
        gone = threading.Event()

        class Task:
            def __call__(self):
                pass

        task = Task()
        weakref.finalize(task, gone.set)
        client.keeper.put(task)
        del task
        assert gone.wait(WAIT_S)

    @pytest.mark.parametrize("kind", [OSError, SystemExit])
    def test_a_log_handler_that_raises_is_survived(self, coordinator, client, monkeypatch, kind):
        def error(*arguments, **keywords):
            raise kind("the log is full")

        def fail():
            raise RuntimeError

        monkeypatch.setattr("gpu_worker.callbacks.logger.error", error)
        client.keeper.put(fail)
        coordinator.in_step(client)

    def test_a_map_that_cannot_be_unmapped_is_not_released(
        self, coordinator, client, asked, monkeypatch
    ):
        """The books must not call free what is mapped; the next one is released as ever."""
        asking, rid = asked()
        coordinator.grant(rid)
        asking.result(WAIT_S)
        unmap = client.leases._mappings.unmap

        def refuse(ended):
            raise OSError("munmap")

        monkeypatch.setattr(client.leases._mappings, "unmap", refuse)
        del asking
        coordinator.in_step(client)
        monkeypatch.setattr(client.leases._mappings, "unmap", unmap)
        again, later = asked()
        coordinator.grant(later)
        again.result(WAIT_S)
        del again
        assert coordinator.receive() == Release(coordinator.gen, LeaseId(later))
