"""Requests over one connection: what is asked, what comes, and what nobody wants any more."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
import weakref
from ctypes import addressof

import pytest
import torch

from gpu_worker import mapping
from gpu_worker.client import DEFAULT_TIMEOUT_S, GRACE_S
from gpu_worker.request import Ask, Charge
from gpu_worker.tensors import tensors
from shm_store import segment
from shm_store.errors import (
    BudgetExceeded,
    CallerError,
    Cancelled,
    InvalidateIncomplete,
    LoadTimeout,
    ProtocolViolation,
    SegmentRefused,
    SourceNotOpened,
    TensorRefused,
)
from shm_store.keys import Fingerprint, Key, LeaseId, RequestId
from shm_store.manifest import Preamble
from shm_store.report import GenerationReport
from shm_store.wire import (
    Abort,
    Acquire,
    Cancel,
    Commit,
    Done,
    Filling,
    Flush,
    Flushed,
    Grant,
    Invalidate,
    Release,
    Reserve,
    Space,
)
from tests.gpu_worker.sealed import maps_of
from tests.gpu_worker.spoken import KEY, WAIT_S, built, fds_of, segments_open


class TestGrants:
    def test_a_source_is_opened_here_and_travels_as_an_fd(self, coordinator, client, tmp_path):
        """The asker's permissions and working directory apply, and the very file it meant."""
        path = tmp_path / "w.safetensors"
        path.write_bytes(b"as it is now")
        asking = coordinator.call(client.acquire, Ask(KEY, str(path), None), 7.0, None)
        acquire = coordinator.expect(Acquire)
        assert (acquire.key, acquire.source, acquire.timeout_s) == (KEY, str(path), 7.0)
        path.unlink()
        assert os.pread(coordinator.fds[0], 100, 0) == b"as it is now"
        coordinator.grant(acquire.rid)
        assert asking.result(WAIT_S).gen == coordinator.gen

    def test_a_source_that_cannot_be_opened_is_not_asked_for(self, coordinator, client, tmp_path):
        with pytest.raises(SourceNotOpened) as caught:
            client.acquire(Ask(KEY, str(tmp_path), None), None, None)
        assert caught.value.source == str(tmp_path)
        coordinator.in_step(client)

    def test_a_path_that_is_no_text_still_names_its_source(self, coordinator, client, tmp_path):
        """A file name is bytes: what has no UTF-8 form must not end the connection."""
        path = os.fsencode(tmp_path) + b"/\xff\xfe.safetensors"
        with open(path, "wb") as file:
            file.write(b"bytes")
        asking = coordinator.call(client.acquire, Ask(KEY, os.fsdecode(path), None), None, None)
        acquire = coordinator.expect(Acquire)
        assert acquire.source.endswith("/\\xff\\xfe.safetensors")
        assert os.pread(coordinator.fds[0], 100, 0) == b"bytes"
        coordinator.grant(acquire.rid)
        asking.result(WAIT_S)

    def test_without_a_timeout_the_coordinator_gets_the_default(self, coordinator, client):
        asking = coordinator.call(client.acquire, built(version="v2"), None, None)
        acquire = coordinator.expect(Acquire)
        assert (acquire.source, acquire.version) == (None, "v2")
        assert acquire.timeout_s == DEFAULT_TIMEOUT_S
        coordinator.grant(acquire.rid)
        asking.result(WAIT_S)

    def test_the_lease_is_released_once_the_bytes_are_unmapped(self, coordinator, client, asked):
        """Law 5: not when the last tensor dies, and not before the map is gone."""
        asking, rid = asked()
        coordinator.grant(rid)
        state = tensors(asking.result(WAIT_S).buffer)
        del asking
        assert torch.equal(state["w"], torch.arange(16.0))
        coordinator.in_step(client)
        assert len(maps_of(coordinator.gen)) == 1
        del state
        assert coordinator.receive() == Release(coordinator.gen, LeaseId(rid))
        assert maps_of(coordinator.gen) == []

    def test_the_connection_stays_until_that_release_is_sent(
        self, coordinator, client, asked, monkeypatch
    ):
        """Closed in between, the lease would last as long as this process."""
        asking, rid = asked()
        coordinator.grant(rid)
        closed = []
        unmap = mapping.MappingTable.unmap

        def unmap_and_look(table, ended):
            unmap(table, ended)
            closed.append(client.close_if_unused())

        monkeypatch.setattr(mapping.MappingTable, "unmap", unmap_and_look)
        asking.result(WAIT_S)
        del asking
        assert coordinator.receive() == Release(coordinator.gen, LeaseId(rid))
        assert closed == [False]

    def test_a_second_grant_shares_the_map_and_replaces_the_lease(self, coordinator, asked):
        """Rules 2 and 3: one mapping per generation, and the release names the last grant."""
        first, rid = asked()
        coordinator.grant(rid)
        second, later = asked()
        coordinator.grant(later)
        assert addressof(first.result(WAIT_S).buffer) == addressof(second.result(WAIT_S).buffer)
        assert len(maps_of(coordinator.gen)) == 1
        del first, second
        assert coordinator.receive() == Release(coordinator.gen, LeaseId(later))

    def test_what_is_no_segment_is_given_back_and_refused(self, coordinator, client, asked):
        """The waiter gets the typed error, the lease ends, and the connection goes on."""
        asking, rid = asked()
        fd = segment.create(coordinator.gen)
        os.posix_fallocate(fd, 0, 4096)
        coordinator.send(Grant(rid, coordinator.gen), fd)
        with pytest.raises(SegmentRefused):
            asking.result(WAIT_S)
        assert coordinator.receive() == Release(coordinator.gen, LeaseId(rid))
        coordinator.in_step(client)

    def test_a_refusal_carries_its_facts(self, coordinator, asked):
        asking, rid = asked()
        holder = GenerationReport(
            key="big", generation="0-1", state="ready", size_bytes=9, pool="ram", pinned=False,
            leases=(),
        )  # fmt: skip
        error = BudgetExceeded("no room", needed_bytes=8, free_bytes=1, holders=(holder,))
        coordinator.fail(rid, error)
        with pytest.raises(BudgetExceeded) as caught:
            asking.result(WAIT_S)
        assert (caught.value.needed_bytes, caught.value.holders) == (8, (holder,))


class TestOrder:
    def test_ids_rise_in_the_order_of_frames(self, coordinator, client):
        """Rule 4: the coordinator drops what is not above all before it."""
        futures = [coordinator.call(client.flush, WAIT_S) for _ in range(12) for _ in range(20)]
        rids: list[RequestId] = []
        while len(rids) < 240:
            rids.append(coordinator.expect(Flush).rid)
            coordinator.send(Flushed(rids[-1]))
        for future in futures:
            future.result(WAIT_S)
        assert rids == sorted(set(rids))

    def test_a_coordinator_that_does_not_read_stops_nobody(self, coordinator, client, tmp_path):
        """Frames wait here, in order and with their fds, and callers leave at their timeout."""
        path = tmp_path / "w.safetensors"
        path.write_bytes(b"late")
        for lease in range(1, 3001):
            client.leases.release(coordinator.gen, LeaseId(lease))
        started_s = time.monotonic()
        with pytest.raises(LoadTimeout):
            client.acquire(Ask(KEY, str(path), None), 0.0, None)
        assert time.monotonic() - started_s < GRACE_S + 1
        for lease in range(1, 3001):
            assert coordinator.receive() == Release(coordinator.gen, LeaseId(lease))
        rid = coordinator.expect(Acquire).rid
        assert os.pread(coordinator.fds[0], 100, 0) == b"late"
        assert coordinator.receive() == Cancel(rid)
        coordinator.in_step(client)
        assert fds_of(str(path)) == []
        assert not select.select([client._connection._wake], [], [], 0)[0], "the reader would spin"

    def test_nothing_overtakes_what_waits(self, coordinator, client):
        """Not even when the socket has room again."""
        with client._lock:  # keeps the reader from sending
            for lease in range(1, 3001):
                client.leases.release(coordinator.gen, LeaseId(lease))
            read = [coordinator.receive() for _ in range(100)]
            client.leases.release(coordinator.gen, LeaseId(3001))
        read += [coordinator.receive() for _ in range(2901)]
        assert read == [Release(coordinator.gen, LeaseId(lease)) for lease in range(1, 3002)]


class TestTimeouts:
    def test_the_caller_returns_at_its_own_timeout(self, coordinator, client):
        """Even if the coordinator says nothing; and it hears that nobody waits."""
        started_s = time.monotonic()
        with pytest.raises(LoadTimeout):
            client.acquire(built(), 0.1, None)
        assert 0.1 <= time.monotonic() - started_s < 0.1 + GRACE_S + 1
        rid = coordinator.expect(Acquire).rid
        assert coordinator.receive() == Cancel(rid)

    def test_a_refusal_just_after_the_timeout_still_wins(self, coordinator, asked):
        """It says why, and who holds the room; a bare timeout does not."""
        asking, rid = asked(timeout_s=0.0)
        coordinator.fail(rid, BudgetExceeded("no room", needed_bytes=8))
        with pytest.raises(BudgetExceeded):
            asking.result(WAIT_S)

    def test_the_time_of_ones_own_build_does_not_count(self, coordinator, client):
        """It takes until a request of the same timeout, made after it began, is late."""
        building, late = threading.Event(), threading.Event()

        def build():
            building.set()
            assert late.wait(WAIT_S)
            return {"w": torch.ones(4)}

        asking = coordinator.call(client.acquire, built(build), 0.0, None)
        rid = coordinator.expect(Acquire).rid
        coordinator.ticket(rid)
        assert building.wait(WAIT_S)
        with pytest.raises(LoadTimeout):
            client.acquire(Ask(Key("other"), None, build, ""), 0.0, None)
        other = coordinator.expect(Acquire).rid
        assert coordinator.receive() == Cancel(other)
        late.set()
        os.close(coordinator.send_space(coordinator.expect(Reserve)))
        coordinator.expect(Commit)
        coordinator.grant(rid)
        assert asking.result(WAIT_S).gen == coordinator.gen


class TestProgress:
    def test_it_is_called_in_the_thread_that_waits(self, coordinator, asked):
        seen = []
        asking, rid = asked(progress=lambda *figures: seen.append((threading.get_ident(), figures)))
        coordinator.send(Filling(rid, 1, 4))
        coordinator.send(Filling(rid, 3, 4))
        coordinator.grant(rid)
        asking.result(WAIT_S)
        assert [figures for _, figures in seen] == [(1, 4), (3, 4)]
        assert {thread for thread, _ in seen}.isdisjoint({threading.get_ident()})

    def test_nobody_who_did_not_ask_for_it_is_disturbed(self, coordinator, asked):
        asking, rid = asked()
        coordinator.send(Filling(rid, 1, 4))
        coordinator.grant(rid)
        assert asking.result(WAIT_S).gen == coordinator.gen

    def test_what_it_raises_gives_the_request_up(self, coordinator, client, asked):
        asking, rid = asked(progress=lambda done, total: {}[done])
        coordinator.send(Filling(rid, 1, 4))
        with pytest.raises(KeyError):
            asking.result(WAIT_S)
        assert coordinator.receive() == Cancel(rid)
        coordinator.fail(rid, Cancelled("given up"))
        coordinator.in_step(client)


class TestBuild:
    def test_the_ticket_holder_builds_fills_and_commits(self, coordinator, client):
        """In the calling thread; what was built is gone at COMMIT, its segment with the answer."""
        weights = {"w": torch.arange(1000.0)}
        alive = weakref.ref(weights["w"])
        threads = []

        def build():
            threads.append(threading.get_ident())
            return {"w": weights.pop("w")}

        asking = coordinator.call(client.acquire, built(build), None, None)
        rid = coordinator.expect(Acquire).rid
        reserve = coordinator.reservation(rid)
        assert reserve.gen == coordinator.gen and reserve.size_bytes % 4096 == 0
        mine = coordinator.send_space(reserve)
        assert coordinator.receive() == Commit(coordinator.gen)
        assert alive() is None
        segment.seal(mine, Preamble(coordinator.gen, KEY, Fingerprint("test")))
        coordinator.send(Grant(rid, coordinator.gen), mine)
        state = tensors(asking.result(WAIT_S).buffer)
        assert torch.equal(state["w"], torch.arange(1000.0))
        assert len(segments_open(coordinator)) == 1, "that of the map"
        assert threads and threads[0] != threading.get_ident()

    def test_what_it_raises_returns_the_ticket_and_comes_out_unchanged(self, coordinator, asked):
        error = RuntimeError("no such model")

        def build():
            raise error

        asking, rid = asked(built(build))
        coordinator.ticket(rid)
        assert coordinator.receive() == Abort(coordinator.gen)
        assert asking.exception(WAIT_S) is error

    def test_what_cannot_be_shared_is_refused_before_it_is_reserved(self, coordinator, asked):
        asking, rid = asked(built(lambda: {"w": torch.ones(2, device="meta")}))
        coordinator.ticket(rid)
        assert coordinator.receive() == Abort(coordinator.gen)
        with pytest.raises(TensorRefused):
            asking.result(WAIT_S)

    def test_without_room_there_is_nothing_to_abort(self, coordinator, client, asked):
        asking, rid = asked()
        coordinator.reservation(rid)
        coordinator.fail(rid, BudgetExceeded("no room"))
        with pytest.raises(BudgetExceeded):
            asking.result(WAIT_S)
        coordinator.in_step(client)

    def test_a_segment_that_could_not_be_sealed_is_aborted(self, coordinator, asked):
        """It stays charged until its filler says that it lets go."""
        asking, rid = asked()
        os.close(coordinator.send_space(coordinator.reservation(rid)))
        assert coordinator.receive() == Commit(coordinator.gen)
        coordinator.fail(rid, SegmentRefused("somebody maps it"))
        assert coordinator.receive() == Abort(coordinator.gen)
        with pytest.raises(SegmentRefused):
            asking.result(WAIT_S)

    def test_a_fill_that_fails_closes_the_segment_and_aborts(self, coordinator, asked, monkeypatch):
        def fill(fd, plan, written):
            raise MemoryError("half-way")

        monkeypatch.setattr("gpu_worker.publish.fill", fill)
        asking, rid = asked()
        os.close(coordinator.send_space(coordinator.reservation(rid)))
        assert coordinator.receive() == Abort(coordinator.gen)
        assert segments_open(coordinator) == []
        with pytest.raises(MemoryError):
            asking.result(WAIT_S)

    def test_a_space_that_is_not_used_any_more_is_closed_and_aborted(self, coordinator, client):
        """Its asker leaves between SPACE and the first byte."""
        waiting, go_on = threading.Event(), threading.Event()

        def interrupted(done_bytes, total_bytes):
            waiting.set()
            go_on.wait(WAIT_S)
            raise KeyboardInterrupt

        asking = coordinator.call(client.acquire, built(), None, interrupted)
        rid = coordinator.expect(Acquire).rid
        reserve = coordinator.reservation(rid)
        coordinator.send(Filling(rid, 0, 4))
        assert waiting.wait(WAIT_S)
        os.close(coordinator.send_space(reserve))
        coordinator.in_step(client)
        go_on.set()
        assert coordinator.receive() == Abort(coordinator.gen)
        assert segments_open(coordinator) == []
        assert isinstance(asking.exception(WAIT_S), KeyboardInterrupt)

    def test_a_build_that_asks_for_itself_is_refused(self, coordinator, client, asked):
        """It would wait for itself until its deadline."""
        inner = built()
        asking, rid = asked(built(lambda: client.acquire(inner, None, None)))
        coordinator.ticket(rid)
        assert coordinator.receive() == Abort(coordinator.gen)
        with pytest.raises(CallerError, match="itself"):
            asking.result(WAIT_S)

    def test_a_ticket_for_a_source_is_no_answer(self, coordinator, client, tmp_path):
        path = tmp_path / "w.safetensors"
        path.write_bytes(b"")
        asking = coordinator.call(client.acquire, Ask(KEY, str(path), None), None, None)
        coordinator.ticket(coordinator.expect(Acquire).rid)
        with pytest.raises(ProtocolViolation):
            asking.result(WAIT_S)
        assert coordinator.receive() == Abort(coordinator.gen)


class TestUnwanted:
    """What arrives after its asker gave up is given back, and the request stays until its end."""

    @pytest.fixture
    def cancelled(self, coordinator, client):
        """Makes a request that was given up, and returns its id."""

        def cancel() -> int:
            with pytest.raises(LoadTimeout):
                client.acquire(built(), 0.0, None)
            rid = coordinator.expect(Acquire).rid
            assert coordinator.receive() == Cancel(rid)
            return rid

        return cancel

    def test_a_grant_is_released_unmapped(self, coordinator, client, cancelled):
        rid = cancelled()
        held = threading.Event()
        client.keeper.put(held.wait)  # so nothing could be unmapped
        coordinator.grant(rid)
        assert coordinator.receive() == Release(coordinator.gen, LeaseId(rid))
        assert maps_of(coordinator.gen) == []
        held.set()
        assert segments_open(coordinator) == []

    def test_a_grant_that_nobody_ever_asked_for_is_released(self, coordinator, client):
        coordinator.grant(77)
        assert coordinator.receive() == Release(coordinator.gen, LeaseId(77))

    def test_a_grant_of_what_is_mapped_hands_over_its_lease(
        self, coordinator, client, asked, cancelled
    ):
        """Releasing it would end the lease of tensors that live."""
        asking, first = asked()
        coordinator.grant(first)
        granted = asking.result(WAIT_S)
        del asking
        rid = cancelled()
        coordinator.grant(rid)
        coordinator.in_step(client)
        del granted
        assert coordinator.receive() == Release(coordinator.gen, LeaseId(rid))

    def test_a_space_is_closed_and_aborted(self, coordinator, client):
        with pytest.raises(LoadTimeout):
            self.give_up_while_reserving(coordinator, client)
        os.close(coordinator.send_space(self.reserve))
        assert coordinator.receive() == Abort(coordinator.gen)
        assert segments_open(coordinator) == []
        coordinator.fail(self.rid, Cancelled("aborted"))
        coordinator.in_step(client)

    def give_up_while_reserving(self, coordinator, client) -> None:
        """From RESERVE to SPACE a request is given up by CANCEL."""
        asking = coordinator.call(client.acquire, built(), 0.0, None)
        self.rid = coordinator.expect(Acquire).rid
        self.reserve = coordinator.reservation(self.rid)
        assert coordinator.receive() == Cancel(self.rid)
        asking.result(WAIT_S)

    def test_a_space_of_nobody_is_aborted(self, coordinator, client):
        fd = segment.create(coordinator.gen)
        coordinator.send(Space(coordinator.gen), fd)
        assert coordinator.receive() == Abort(coordinator.gen)
        assert segments_open(coordinator) == []

    def test_a_ticket_needs_no_answer(self, coordinator, client, cancelled):
        """CANCEL was the answer."""
        rid = cancelled()
        coordinator.ticket(rid)
        coordinator.fail(rid, Cancelled("given up"))
        coordinator.in_step(client)

    def test_an_invalidate_without_an_answer_is_incomplete(self, coordinator, client):
        """A coordinator that is stopped: no weights were asked for, so no load was late."""
        with pytest.raises(InvalidateIncomplete, match="has not said"):
            client.invalidate(KEY, 0.0)
        coordinator.expect(Invalidate)

    @pytest.fixture
    def interrupted(self, coordinator, client, monkeypatch):
        """Interrupts a call just behind its request, which is on its way; returns the request."""
        post = client._connection.post

        def post_and_be_interrupted(message, fds=()) -> None:
            monkeypatch.undo()
            post(message, fds)
            raise KeyboardInterrupt

        def interrupt(call, *arguments):
            monkeypatch.setattr(client._connection, "post", post_and_be_interrupted)
            with pytest.raises(KeyboardInterrupt):
                call(*arguments)
            return coordinator.receive()

        return interrupt

    def test_the_answer_to_what_an_interrupt_gave_up_fails_nobody_else(
        self, coordinator, client, interrupted
    ):
        """Whether that had left could not be known, so it was forgotten."""
        rid = interrupted(client.invalidate, KEY, WAIT_S).rid
        coordinator.send(Done(rid, (KEY,)))
        coordinator.in_step(client)

    def test_a_charge_that_an_interrupt_gave_up_is_released(self, coordinator, client, interrupted):
        rid = interrupted(client.charge, Charge(), KEY, "ram", 4096, None).rid
        assert coordinator.receive() == Cancel(rid)
        coordinator.send(Grant(rid, coordinator.gen))
        assert coordinator.receive() == Release(coordinator.gen, LeaseId(rid))
        coordinator.in_step(client)

    @pytest.fixture
    def _interruptible(self):
        """A job in the background of a shell is started with SIGINT ignored."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
        signal.signal(signal.SIGINT, before)

    @pytest.mark.usefixtures("_interruptible")
    def test_an_interrupt_gives_up_and_leaks_nothing(self, coordinator, client):
        """S23: KeyboardInterrupt in the wait. The grant that crosses it is released."""
        main = threading.get_ident()

        def interrupt() -> tuple[int, list[object]]:
            rid = coordinator.expect(Acquire).rid
            signal.pthread_kill(main, signal.SIGINT)
            messages = [coordinator.receive()]
            coordinator.grant(rid)
            return rid, [*messages, coordinator.receive()]

        interrupting = coordinator.call(interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.acquire(built(), None, None)
        rid, messages = interrupting.result(WAIT_S)
        assert messages == [Cancel(rid), Release(coordinator.gen, LeaseId(rid))]
        assert maps_of(coordinator.gen) == []
        coordinator.in_step(client)
