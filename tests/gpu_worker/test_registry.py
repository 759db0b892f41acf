"""One connection per process and socket: who shares it, and when it closes."""

from __future__ import annotations

import os
import weakref

import pytest

from gpu_worker import registry
from shm_store.errors import (
    Cancelled,
    ConnectionLost,
    Draining,
    LoadTimeout,
    NoCoordinator,
    WorkerClosed,
)
from shm_store.keys import LeaseId
from shm_store.wire import Acquire, Cancel, Release
from tests.gpu_worker.spoken import WAIT_S, Sharer, built


class TestSharing:
    def test_a_second_attach_shares_the_connection(self, coordinator, client, monkeypatch):
        """Under any spelling of the path."""
        monkeypatch.chdir(os.path.dirname(coordinator.path))
        assert coordinator.share() is client
        assert coordinator.share(f"./{os.path.basename(coordinator.path)}") is client
        assert not coordinator.connecting()

    def test_attaching_at_the_same_time_makes_one_connection(self, coordinator):
        """Two would be two sessions of one process, each with half of its leases."""
        attaching = [coordinator.call(coordinator.share) for _ in range(8)]
        coordinator.accept()
        coordinator.answer_flush()
        clients = {future.result(WAIT_S) for future in attaching}
        coordinator.clients += clients
        assert len(clients) == 1
        assert not coordinator.connecting()
        assert len(clients.pop().workers) == 8

    def test_an_attach_interrupted_before_it_opens_keeps_nobody_waiting(
        self, coordinator, monkeypatch
    ):
        """Ctrl-C between making the client known and opening it: the next attach does that."""

        class Interrupted(weakref.WeakSet):
            def add(self, item):
                monkeypatch.undo()
                raise KeyboardInterrupt

        monkeypatch.setattr(registry, "_alive", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            coordinator.share()
        coordinator.in_step(coordinator.attach())

    def test_those_who_waited_for_a_failed_attach_try_themselves(self, coordinator):
        attaching = [coordinator.call(coordinator.share) for _ in range(3)]
        for _ in range(3):
            coordinator.accept()
            coordinator.peer.close()
        for future in attaching:
            assert isinstance(future.exception(WAIT_S), ConnectionLost)

    def test_after_a_farewell_the_next_attach_connects_anew(self, coordinator, client):
        coordinator.leave_for_good()
        with pytest.raises(Draining):
            client.flush(WAIT_S)
        again = coordinator.attach()
        assert again is not client
        coordinator.in_step(again)

    def test_a_failed_attach_leaves_nothing_behind(self, tmp_path):
        path = str(tmp_path / "none")
        with pytest.raises(NoCoordinator):
            registry.share(path, "test", "cpu", Sharer())
        assert path not in registry._clients


class TestClosing:
    def test_it_closes_with_its_last_worker_when_nothing_is_mapped(self, coordinator, client):
        assert coordinator.share() is client
        coordinator.leave(client)
        coordinator.in_step(client)
        coordinator.leave(client)
        assert coordinator.receive() is None
        with pytest.raises(WorkerClosed):
            client.flush(WAIT_S)
        assert coordinator.attach() is not client

    def test_it_stays_for_the_release_of_what_is_mapped(self, coordinator, client, asked):
        asking, rid = asked()
        coordinator.grant(rid)
        granted = asking.result(WAIT_S)
        del asking
        coordinator.leave(client)
        coordinator.in_step(client)
        del granted
        assert coordinator.receive() == Release(coordinator.gen, LeaseId(rid))
        assert coordinator.receive() is None

    def test_it_stays_for_the_answer_to_what_was_given_up(self, coordinator, client):
        """A grant that crossed the CANCEL would else stay leased for the life of the process."""
        with pytest.raises(LoadTimeout):
            client.acquire(built(), 0.0, None)
        rid = coordinator.expect(Acquire).rid
        assert coordinator.receive() == Cancel(rid)
        coordinator.leave(client)
        coordinator.grant(rid)
        assert coordinator.receive() == Release(coordinator.gen, LeaseId(rid))
        assert coordinator.receive() is None

    def test_a_refusal_is_an_answer_too(self, coordinator, client, asked):
        asking, rid = asked()
        coordinator.leave(client)
        coordinator.fail(rid, Cancelled("given up"))
        with pytest.raises(Cancelled):
            asking.result(WAIT_S)
        assert coordinator.receive() is None

    def test_a_worker_that_comes_meanwhile_keeps_it(self, coordinator, client, asked):
        asking, rid = asked()
        coordinator.grant(rid)
        asking.result(WAIT_S)
        coordinator.leave(client)
        assert coordinator.share() is client
        del asking
        assert coordinator.receive() == Release(coordinator.gen, LeaseId(rid))
        coordinator.in_step(client)

    def test_frames_that_wait_for_the_socket_are_sent_before(self, coordinator, client):
        for lease in range(1, 2001):
            client.leases.release(coordinator.gen, LeaseId(lease))
        coordinator.leave(client)
        for lease in range(1, 2001):
            assert coordinator.receive() == Release(coordinator.gen, LeaseId(lease))
        assert coordinator.receive() is None
