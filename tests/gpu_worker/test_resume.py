"""A lost connection is not the session's end: what is said on the next one, frame by frame."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from gpu_worker.request import Ask, Charge
from gpu_worker.tensors import tensors
from shm_store import segment
from shm_store.errors import (
    Cancelled,
    ConnectionLost,
    CoordinatorLost,
    Draining,
    FdsExhausted,
    LoadTimeout,
    PeerForbidden,
    ResourceError,
    VersionMismatch,
    WorkerClosed,
)
from shm_store.keys import Fingerprint, Key, LeaseId, RequestId
from shm_store.manifest import Preamble
from shm_store.report import ModelReport
from shm_store.wire import (
    Ack,
    Acquire,
    Commit,
    Counts,
    Done,
    Flush,
    Flushed,
    Grant,
    HeldCharge,
    HeldFill,
    HeldMap,
    Invalidate,
    Release,
    Reserve,
    Revoke,
)
from shm_store.wire import Charge as ChargeMessage
from tests.gpu_worker.sealed import maps_of
from tests.gpu_worker.served import wait_until
from tests.gpu_worker.spoken import KEY, WAIT_S, built, fds_of, segments_open

BUILT = Fingerprint("build:")


@pytest.fixture
def client(coordinator):
    """Patient, as workers are."""
    return coordinator.attach(WAIT_S)


@pytest.fixture
def granted(coordinator, asked):
    """Has a generation granted; gives what its asker got, and the lease."""

    def grant():
        asking, rid = asked()
        coordinator.grant(rid)
        return asking.result(WAIT_S), LeaseId(rid)

    return grant


def same_file(fd: int, other: int) -> bool:
    return os.path.samestat(os.fstat(fd), os.fstat(other))


class TestStatement:
    def test_a_session_with_nothing_says_only_who_it_is(self, coordinator):
        attaching = coordinator.call(coordinator.share)
        first = coordinator.accept()
        coordinator.answer_flush()
        coordinator.clients.append(attaching.result(WAIT_S))
        coordinator.peer.close()
        again, held, said = coordinator.come_back()
        assert again == first and len(first.token) == 32 and (held, said) == ([], [])

    def test_another_session_has_another_token(self, coordinator, client, tmp_path):
        coordinator.peer.close()
        token = coordinator.come_back()[0].token
        coordinator.leave_for_good()
        with pytest.raises(Draining):
            client.flush(WAIT_S)
        attaching = coordinator.call(coordinator.share)
        assert coordinator.accept().token != token
        coordinator.answer_flush()
        coordinator.clients.append(attaching.result(WAIT_S))

    def test_what_was_counted_is_told_to_the_next_coordinator_too(self, coordinator, client):
        """Nobody else knows it."""
        report = ModelReport("k", "sim:0", hits=3)
        coordinator.sharers[0].counted = lambda: [report]
        client.leases.count()
        assert coordinator.expect(Counts).models == (report,)
        coordinator.peer.close()
        coordinator.come_back()
        assert coordinator.expect(Counts).models == (report,)

    def test_each_map_comes_with_its_present_lease_and_its_segment(
        self, coordinator, client, granted
    ):
        """Of two grants of one generation the second counts, and one fd is kept."""
        first, _ = granted()
        second, lease = granted()
        assert len(segments_open(coordinator)) == 1
        coordinator.peer.close()
        resume, held, said = coordinator.come_back()
        stated = HeldMap(coordinator.gen, lease)
        assert (resume.held, held, said) == (1, [stated], [])
        (fd,) = coordinator.told_fds[stated]
        assert segment.read_preamble(fd).gen == coordinator.gen
        assert bytes(first.buffer[:4096]) == bytes(second.buffer[:4096]) == os.pread(fd, 4096, 0)
        coordinator.in_step(client)

    def test_the_fd_is_closed_with_the_map_before_its_release(
        self, coordinator, client, granted, monkeypatch
    ):
        """Else the memory would stay where the books call it free."""
        weights, lease = granted()
        open_then = []
        forget = client.leases._mappings.forget

        def look(mapping):
            open_then.append(len(segments_open(coordinator)))
            return forget(mapping)

        monkeypatch.setattr(client.leases._mappings, "forget", look)
        del weights
        assert coordinator.receive() == Release(coordinator.gen, lease)
        assert open_then == [0]

    def test_what_is_still_mapped_is_stated_though_nothing_uses_it(
        self, coordinator, client, granted
    ):
        """Its RELEASE comes once it is unmapped, with the same lease."""
        weights, lease = granted()
        go_on = threading.Event()
        client.keeper.put(go_on.wait)
        del weights
        coordinator.peer.close()
        assert coordinator.come_back()[1:] == ([HeldMap(coordinator.gen, lease)], [])
        go_on.set()
        assert coordinator.receive() == Release(coordinator.gen, lease)

    def test_what_was_just_unmapped_is_not_stated(self, coordinator, client, granted, monkeypatch):
        """Its fd is closed; the RELEASE that follows finds nothing to end."""
        weights, lease = granted()
        unmap, unmapped, go_on = client.leases._mappings.unmap, threading.Event(), threading.Event()

        def unmap_and_wait(mapping):
            unmap(mapping)
            unmapped.set()
            assert go_on.wait(WAIT_S)

        monkeypatch.setattr(client.leases._mappings, "unmap", unmap_and_wait)
        del weights
        assert unmapped.wait(WAIT_S)
        coordinator.peer.close()
        assert coordinator.come_back()[1:] == ([], [])
        go_on.set()
        assert coordinator.receive() == Release(coordinator.gen, lease)

    def test_what_ended_in_the_outage_is_not_stated_nor_released(
        self, coordinator, client, granted
    ):
        """S16: a release that names the old lease could only come too late."""
        weights, _ = granted()
        coordinator.die(client)
        del weights
        with pytest.raises(LoadTimeout):
            client._wait_for_keeper(settled(client), 0.0)
        client._wait_for_keeper(settled(client), WAIT_S)
        assert maps_of(coordinator.gen) == []
        coordinator.rise()
        assert coordinator.come_back()[1:] == ([], [])
        coordinator.in_step(client)

    def test_what_was_not_sent_yet_goes_with_its_connection(self, coordinator, client):
        for lease in range(1, 3001):
            client.leases.release(coordinator.gen, LeaseId(lease))
        coordinator.peer.close()
        assert coordinator.come_back()[1:] == ([], [])
        coordinator.in_step(client)

    def test_a_charge_is_stated_as_it_was_asked_for(self, coordinator, client):
        charge = charged(coordinator, client)
        coordinator.peer.close()
        held = [HeldCharge(coordinator.gen, charge.lease, "ram", Key("private"), 8192)]
        assert coordinator.come_back()[1:] == (held, [])
        client.leases.discharge(charge)
        assert coordinator.receive() == Release(coordinator.gen, charge.lease)

    def test_what_the_coordinator_asked_of_a_lease_stays_noted(self, coordinator, client, granted):
        """What is retired stays so, whoever says it again."""
        weights, lease = granted()
        coordinator.send(Revoke(coordinator.gen, lease, "stale"))
        coordinator.expect(Ack)
        coordinator.peer.close()
        assert coordinator.come_back()[1] == [HeldMap(coordinator.gen, lease, stale=True)]
        coordinator.in_step(client)
        assert client.leases.asked(weights.gen) == "stale"

    def test_more_than_the_socket_takes_is_sent_when_it_is_read(self, coordinator, client):
        """With its fds, which are closed again."""
        before = len(os.listdir("/proc/self/fd"))
        charge = charged(coordinator, client)
        charges = {f"{coordinator.gen}-{number}": charge for number in range(1000)}
        client.leases._charges.update(charges)
        coordinator.peer.close()
        resume, held, _ = coordinator.come_back()
        assert (resume.held, len(held)) == (1001, 1001)
        client.leases._charges.clear()
        coordinator.in_step(client)
        assert len(os.listdir("/proc/self/fd")) == before


def settled(client):
    """A queue that the keeper puts something into once it is through with its own."""
    import queue

    done: queue.SimpleQueue[None] = queue.SimpleQueue()
    client.keeper.call_settled(lambda: done.put(None))
    return done


def charged(coordinator, client) -> Charge:
    """A charge of two pages."""
    charge = Charge()
    charging = coordinator.call(client.charge, charge, Key("private"), "ram", 5000, None)
    coordinator.send(Grant(coordinator.expect(ChargeMessage).rid, coordinator.gen))
    charging.result(WAIT_S)
    return charge


class TestRequests:
    def test_a_source_is_asked_for_again_by_its_fd(self, coordinator, client, tmp_path):
        """With another id. By now its path may lead to another file, or to none."""
        path = tmp_path / "w.safetensors"
        path.write_bytes(b"as asked")
        asking = coordinator.call(client.acquire, Ask(KEY, str(path), None), None, None)
        first = coordinator.expect(Acquire)
        path.unlink()
        coordinator.peer.close()
        _, held, (again,) = coordinator.come_back()
        assert held == [] and again.rid > first.rid
        assert (again.key, again.source, again.timeout_s) == (
            first.key,
            first.source,
            first.timeout_s,
        )
        assert os.pread(coordinator.told_fds[again][0], 100, 0) == b"as asked"
        coordinator.grant(again.rid)
        assert asking.result(WAIT_S).gen == coordinator.gen
        mine = [*coordinator.told_fds[again], *coordinator.fds]
        assert set(fds_of(f"{path} (deleted)")) == {str(fd) for fd in mine}

    def test_what_was_given_up_is_not_asked_again(self, coordinator, client):
        """Given up before the loss, and in the outage."""
        with pytest.raises(LoadTimeout):
            client.acquire(built(), 0.0, None)
        waiting = coordinator.call(client.acquire, built(), 1.0, None)
        coordinator.expect(Acquire)
        coordinator.die(client)
        assert isinstance(waiting.exception(WAIT_S), CoordinatorLost)
        coordinator.rise()
        assert coordinator.come_back()[1:] == ([], [])
        coordinator.leave(client)
        assert coordinator.receive() is None, "no answer to them is waited for"

    def test_an_answer_of_the_earlier_connection_counts_if_it_was_read(self, coordinator, asked):
        asking, rid = asked()
        coordinator.grant(rid)
        coordinator.peer.close()
        assert coordinator.come_back()[1:] == ([HeldMap(coordinator.gen, LeaseId(rid))], [])
        assert asking.result(WAIT_S).gen == coordinator.gen

    def test_charges_invalidations_and_flushes_are_asked_anew(self, coordinator, client):
        charge = Charge()
        calls = [
            coordinator.call(client.charge, charge, KEY, "ram", 4096, WAIT_S),
            coordinator.call(client.invalidate, KEY, WAIT_S),
            coordinator.call(client.flush, WAIT_S),
        ]
        first = [coordinator.receive() for _ in calls]
        coordinator.peer.close()
        resume = coordinator.accept()
        assert resume.held == 0
        again = [coordinator.receive() for _ in calls]
        assert {type(message) for message in again} == {ChargeMessage, Invalidate, Flush}
        assert min(m.rid for m in again) > max(m.rid for m in first)
        left_s, begun_s = (
            {type(m): m.timeout_s for m in messages if not isinstance(m, Flush)}
            for messages in (again, first)
        )
        assert all(left_s[kind] < begun_s[kind] for kind in begun_s), "the time runs on"
        coordinator.answer_flush()
        for message in again:
            match message:
                case ChargeMessage(rid):
                    coordinator.send(Grant(rid, coordinator.gen))
                case Invalidate(rid):
                    coordinator.send(Done(rid, (KEY,)))
                case Flush(rid):
                    coordinator.send(Flushed(rid))
        assert [call.result(WAIT_S) for call in calls] == [None, True, None]
        assert charge.lease in {message.rid for message in again}
        client.leases.discharge(charge)
        coordinator.expect(Release)

    def test_a_prefetch_is_asked_for_anew(self, coordinator, client, tmp_path):
        path = tmp_path / "w.safetensors"
        path.write_bytes(b"ahead")
        client.prefetch(Ask(KEY, str(path), None))
        coordinator.expect(Acquire)
        coordinator.peer.close()
        (again,) = coordinator.come_back()[2]
        assert again.prefetch and os.pread(coordinator.told_fds[again][0], 9, 0) == b"ahead"
        coordinator.grant(again.rid)
        assert coordinator.receive() == Release(coordinator.gen, LeaseId(again.rid))
        coordinator.in_step(client)
        assert len(fds_of(str(path))) == 1, "the test's own"


class TestFills:
    def test_a_ticket_without_bytes_is_asked_for_and_a_plan_is_kept(self, coordinator, client):
        """It is built once; a RESERVE names the generation of the new ticket."""
        built_times = []

        def build():
            built_times.append(1)
            return {"w": torch.ones(4)}

        asking = coordinator.call(client.acquire, built(build), None, None)
        first = coordinator.reservation(coordinator.expect(Acquire).rid)
        coordinator.peer.close()
        _, held, (again,) = coordinator.come_back()
        assert held == [] and isinstance(again, Acquire)
        coordinator.gen = type(coordinator.gen)(f"{coordinator.gen}-again")
        reserve = coordinator.reservation(again.rid)
        assert reserve == Reserve(coordinator.gen, first.size_bytes)
        os.close(coordinator.send_space(reserve))
        coordinator.expect(Commit)
        coordinator.grant(again.rid)
        assert asking.result(WAIT_S).gen == coordinator.gen
        assert built_times == [1]

    def test_a_plan_is_dropped_if_somebody_else_was_faster(self, coordinator, client, asked):
        asking, rid = asked()
        coordinator.reservation(rid)
        coordinator.peer.close()
        (again,) = coordinator.come_back()[2]
        coordinator.grant(again.rid)
        assert asking.result(WAIT_S).gen == coordinator.gen
        coordinator.in_step(client)

    def test_who_builds_meanwhile_reserves_for_the_new_ticket(self, coordinator, client):
        building, go_on = threading.Event(), threading.Event()

        def build():
            building.set()
            assert go_on.wait(WAIT_S)
            return {"w": torch.ones(4)}

        asking = coordinator.call(client.acquire, built(build), None, None)
        coordinator.ticket(coordinator.expect(Acquire).rid)
        assert building.wait(WAIT_S)
        coordinator.peer.close()
        (again,) = coordinator.come_back()[2]
        go_on.set()
        wait_until(lambda: all(waits.waits_since_s for waits in client._session.requests))
        coordinator.in_step(client)  # it waits for the answer, and has said nothing
        coordinator.gen = type(coordinator.gen)(f"{coordinator.gen}-again")
        os.close(coordinator.send_space(coordinator.reservation(again.rid)))
        coordinator.expect(Commit)
        coordinator.grant(again.rid)
        assert asking.result(WAIT_S).gen == coordinator.gen

    @pytest.fixture
    def half_way(self, monkeypatch):
        """Stops a fill when half of it is done, if it is not let go on."""
        from gpu_worker import publish

        fill, begun, go_on = publish.fill, threading.Event(), threading.Event()

        def slowly(fd, plan, written):
            os.pwrite(fd, b"half", 4096)
            begun.set()
            assert go_on.wait(WAIT_S)
            fill(fd, plan, written)

        monkeypatch.setattr(publish, "fill", slowly)
        return begun, go_on

    def test_a_fill_goes_on_undisturbed(self, coordinator, client, asked, half_way):
        """The segment travels with it; COMMIT comes over the new connection."""
        begun, go_on = half_way
        asking, rid = asked(built(lambda: {"w": torch.arange(16.0)}))
        mine = coordinator.send_space(coordinator.reservation(rid))
        assert begun.wait(WAIT_S)
        coordinator.peer.close()
        _, (fill,), said = coordinator.come_back()
        assert isinstance(fill, HeldFill) and said == []
        assert (fill.gen, fill.key, fill.fingerprint) == (coordinator.gen, KEY, BUILT)
        assert fill.rid > rid
        assert same_file(coordinator.told_fds[fill][0], mine)
        go_on.set()
        assert coordinator.receive() == Commit(coordinator.gen)
        segment.seal(mine, Preamble(coordinator.gen, KEY, BUILT))
        coordinator.send(Grant(fill.rid, coordinator.gen), mine)
        state = tensors(asking.result(WAIT_S).buffer)
        assert torch.equal(state["w"], torch.arange(16.0))

    def test_what_was_committed_is_committed_again(self, coordinator, client, asked):
        """Whether the first COMMIT was read, nobody here can know."""
        asking, rid = asked(built(lambda: {"w": torch.arange(16.0)}))
        mine = coordinator.send_space(coordinator.reservation(rid))
        coordinator.expect(Commit)
        coordinator.peer.close()
        _, (fill,), said = coordinator.come_back()
        assert isinstance(fill, HeldFill) and said == [Commit(coordinator.gen)]
        segment.seal(mine, Preamble(coordinator.gen, KEY, BUILT))
        coordinator.send(Grant(fill.rid, coordinator.gen), mine)
        assert asking.result(WAIT_S).gen == coordinator.gen

    def test_a_fill_that_was_given_up_is_not_stated(self, coordinator, client, half_way):
        begun, go_on = half_way
        asking = coordinator.call(client.acquire, built(), 0.0, None)
        rid = coordinator.expect(Acquire).rid
        os.close(coordinator.send_space(coordinator.reservation(rid)))
        assert begun.wait(WAIT_S)
        coordinator.die(client)
        go_on.set()
        assert isinstance(asking.exception(WAIT_S), CoordinatorLost)
        assert segments_open(coordinator) == []
        coordinator.rise()
        assert coordinator.come_back()[1:] == ([], [])

    def test_a_fill_that_another_thread_has_mapped_already_is_stated_once(
        self, coordinator, client, asked
    ):
        """Its grant was on the way, and is a lease on the same map when it comes."""
        filling, rid = asked(built(lambda: {"w": torch.arange(16.0)}))
        waiting, other = asked()
        mine = coordinator.send_space(coordinator.reservation(rid))
        coordinator.expect(Commit)
        segment.seal(mine, Preamble(coordinator.gen, KEY, BUILT))
        coordinator.send(Grant(other, coordinator.gen), os.dup(mine))
        weights = waiting.result(WAIT_S)
        coordinator.peer.close()
        _, (fill,), _ = coordinator.come_back()
        assert isinstance(fill, HeldFill)
        coordinator.send(Grant(fill.rid, coordinator.gen), mine)
        assert filling.result(WAIT_S).gen == weights.gen
        del filling, waiting, weights
        assert coordinator.receive() == Release(coordinator.gen, LeaseId(fill.rid))


class TestPatience:
    @pytest.fixture
    def client(self, coordinator):
        return coordinator.attach(0.3)

    def test_who_waits_hears_after_it_and_so_do_later_callers(self, coordinator, client, asked):
        asking, _ = asked()
        since_s = time.monotonic()
        coordinator.die(client)
        with pytest.raises(CoordinatorLost, match="weight-cache serve"):
            asking.result(WAIT_S)
        assert time.monotonic() - since_s >= 0.3
        since_s = time.monotonic()
        with pytest.raises(CoordinatorLost):
            client.flush(WAIT_S)
        assert time.monotonic() - since_s >= 0.3

    def test_a_timeout_that_is_earlier_wins_and_says_why(self, coordinator):
        client = coordinator.attach(1000.0)
        coordinator.die(client)
        for call in (
            lambda: client.acquire(built(), 0.0, None),
            lambda: client.invalidate(KEY, 0.0),
            lambda: client.flush(0.05),
            lambda: client.charge(Charge(), KEY, "ram", 1, 0.0),
        ):
            with pytest.raises(CoordinatorLost):
                call()

    def test_it_begins_with_the_waiting(self, coordinator, client):
        """Who builds is at work, and would lose that."""
        building, go_on = threading.Event(), threading.Event()

        def build():
            building.set()
            assert go_on.wait(WAIT_S)
            return {"w": torch.ones(4)}

        asking = coordinator.call(client.acquire, built(build), None, None)
        coordinator.ticket(coordinator.expect(Acquire).rid)
        assert building.wait(WAIT_S)
        coordinator.die(client)
        with pytest.raises(CoordinatorLost):
            client.flush(WAIT_S)
        coordinator.rise()
        (again,) = coordinator.come_back()[2]
        go_on.set()
        coordinator.reservation(again.rid)
        coordinator.grant(again.rid)
        assert asking.result(WAIT_S).gen == coordinator.gen

    def test_after_it_the_session_comes_back_all_the_same(self, coordinator, client, granted):
        weights, lease = granted()
        coordinator.die(client)
        with pytest.raises(CoordinatorLost):
            client.flush(WAIT_S)
        coordinator.rise()
        assert coordinator.come_back()[1:] == ([HeldMap(coordinator.gen, lease)], [])
        coordinator.in_step(client)
        assert bytes(weights.buffer[:12]) == b"weight-cache"

    def test_a_coordinator_that_accepts_and_says_nothing_does_not_answer(self, coordinator, client):
        coordinator.peer.close()
        coordinator.accept()
        with pytest.raises(CoordinatorLost):
            client.flush(WAIT_S)

    def test_an_attach_in_the_outage_waits_for_it_too(self, coordinator, client):
        coordinator.die(client)
        with pytest.raises(CoordinatorLost):
            coordinator.share()
        coordinator.rise()
        attaching = coordinator.call(coordinator.share)
        coordinator.accept()
        for _ in range(2):
            coordinator.answer_flush()
        assert attaching.result(WAIT_S) is client

    def test_none_is_needed_to_end(self, coordinator):
        client = coordinator.attach(1000.0)
        coordinator.die(client)
        since_s = time.monotonic()
        with pytest.raises(CoordinatorLost):
            client.flush(WAIT_S, patient=False)
        client.stop()
        assert time.monotonic() - since_s < WAIT_S / 2


class TestEnds:
    def test_a_refusal_of_the_returning_session_is_final(self, coordinator, client, asked):
        """Mapped weights stay; later calls say why."""
        asking, _ = asked()
        for kind in (VersionMismatch,):
            coordinator.peer.close()
            coordinator.accept()
            coordinator.fail(RequestId(0), kind("2, not 1"))
            coordinator.peer.close()
            with pytest.raises(kind):
                asking.result(WAIT_S)
            with pytest.raises(kind):
                client.flush(WAIT_S)
        assert client.ended and not coordinator.connecting()

    def test_so_is_a_socket_that_may_not_be_opened(self, coordinator, client, monkeypatch):
        def forbidden(path, **_):
            raise PeerForbidden("not yours")

        monkeypatch.setattr("gpu_worker.connection.connect", forbidden)
        coordinator.peer.close()
        with pytest.raises(PeerForbidden):
            client.flush(WAIT_S)

    def test_one_for_want_of_something_is_not(self, coordinator, client, asked, granted):
        """As when what it states is just being freed, or the coordinator has no fd left."""
        weights, lease = granted()
        asking, _ = asked()
        coordinator.peer.close()
        for _ in range(3):
            coordinator.accept()
            coordinator.fail(RequestId(0), ResourceError("just being freed"))
            coordinator.peer.close()
        _, held, (again,) = coordinator.come_back()
        assert held == [HeldMap(coordinator.gen, lease)]
        coordinator.fail(again.rid, Cancelled("enough"))
        with pytest.raises(Cancelled):
            asking.result(WAIT_S)
        del weights

    def test_without_fds_it_tries_again(self, coordinator, client, monkeypatch):
        tries, connect = [], __import__("shm_store.channel").channel.connect

        def exhausted(path, **blocking):
            tries.append(path)
            if len(tries) < 3:
                raise OSError(24, "too many open files")
            return connect(path, **blocking)

        monkeypatch.setattr("gpu_worker.connection.connect", exhausted)
        coordinator.peer.close()
        assert coordinator.come_back()[1:] == ([], [])
        assert len(tries) == 3

    def test_a_session_that_is_left_in_the_outage_says_that_it_has_nothing(
        self, coordinator, client, granted
    ):
        """The coordinator may live, and would count its lease until the process ends."""
        weights, _ = granted()
        coordinator.die(client)
        del weights
        client._wait_for_keeper(settled(client), WAIT_S)
        coordinator.leave(client)
        with pytest.raises(WorkerClosed):
            client.flush(WAIT_S)
        coordinator.rise()
        assert coordinator.accept().held == 0
        coordinator.expect(Flush)
        assert coordinator.receive() is None

    def test_it_does_not_look_for_ever_for_somebody_to_say_that_to(self, coordinator):
        client = coordinator.attach(0.1)
        coordinator.die(client)
        coordinator.leave(client)
        client._connection._reader.join(WAIT_S)
        assert not client._connection._reader.is_alive()

    def test_a_session_without_a_user_ends_when_its_last_request_is_given_up(
        self, coordinator, client
    ):
        asking = coordinator.call(client.acquire, built(), 0.5, None)
        coordinator.expect(Acquire)
        coordinator.die(client)
        coordinator.leave(client)
        assert isinstance(asking.exception(WAIT_S), CoordinatorLost)
        coordinator.rise()
        assert coordinator.accept().held == 0
        coordinator.expect(Flush)
        assert coordinator.receive() is None


class TestReader:
    """S20: what fails in the reader ends the connection, and nothing else."""

    def test_who_waits_hears_of_it_and_what_is_held_is_stated(
        self, coordinator, client, asked, granted, monkeypatch, caplog
    ):
        weights, lease = granted()

        def fail(gen, lease, fd, wanted):
            os.close(fd)
            raise ZeroDivisionError("a bug")

        asking, rid = asked()
        with monkeypatch.context() as patch:
            patch.setattr(client.leases._mappings, "granted", fail)
            coordinator.grant(rid)
            with pytest.raises(ConnectionLost, match="a bug"):
                asking.result(WAIT_S)
            assert coordinator.receive() is None
        assert "the reader" in caplog.text
        assert coordinator.come_back()[1:] == ([HeldMap(coordinator.gen, lease)], [])
        del weights
        assert coordinator.receive() == Release(coordinator.gen, lease)

    def test_releases_that_are_queued_are_not_lost(self, coordinator, client, granted, monkeypatch):
        weights, lease = granted()
        go_on = threading.Event()
        client.keeper.put(go_on.wait)
        del weights

        def fail(message):
            raise ZeroDivisionError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr(client.leases, "take_revoke", fail)
            coordinator.send(Revoke(coordinator.gen, lease, "room"))
            assert coordinator.receive() is None
        assert coordinator.come_back()[1] == [HeldMap(coordinator.gen, lease)]
        go_on.set()
        assert coordinator.receive() == Release(coordinator.gen, lease)
        coordinator.in_step(client)

    def test_an_fd_that_was_lost_is_told_and_the_session_goes_on(
        self, coordinator, client, asked, granted, monkeypatch
    ):
        weights, lease = granted()
        asking, _ = asked()

        def exhausted():
            monkeypatch.undo()
            raise FdsExhausted("one was lost")

        monkeypatch.setattr(client._connection._channel, "receive", exhausted)
        coordinator.send(Flushed(RequestId(99)))
        with pytest.raises(FdsExhausted):
            asking.result(WAIT_S)
        assert coordinator.come_back()[1:] == ([HeldMap(coordinator.gen, lease)], [])
        del weights


def test_pauses_between_attempts_follow_the_outage(coordinator, client, monkeypatch):
    """The first comes at once; none makes an outage longer by more than an eighth, or a second."""
    connection = client._connection
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    for outage_s, pause_s in ((0.0, 0.01), (0.8, 0.1), (80.0, 1.0)):
        connection.away_since_s = now_s - outage_s
        assert connection._pause_s() == pytest.approx(pause_s)
