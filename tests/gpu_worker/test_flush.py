"""A flush comes after everything that was let go of before it."""

from __future__ import annotations

import threading

import pytest

from shm_store.errors import ResourceError
from shm_store.keys import LeaseId
from shm_store.wire import Acquire, Flush, Flushed, Release
from tests.gpu_worker.served import wait_until
from tests.gpu_worker.spoken import WAIT_S, built


class TestFlush:
    def test_it_comes_after_everything_the_keeper_had_to_do(self, coordinator, client, asked):
        asking, rid = asked()
        coordinator.grant(rid)
        asking.result(WAIT_S)
        held = threading.Event()
        client.keeper.put(held.wait)
        del asking
        flushing = coordinator.call(client.flush, WAIT_S)
        wait_until(lambda: client.keeper.queue.qsize() == 2)  # the mapping, and the flush
        other = coordinator.call(client.acquire, built(), None, None)
        crossing = coordinator.expect(Acquire).rid  # nothing before it: both wait for the keeper
        held.set()
        assert coordinator.receive() == Release(coordinator.gen, LeaseId(rid))
        coordinator.answer_flush()
        flushing.result(WAIT_S)
        coordinator.grant(crossing)
        other.result(WAIT_S)

    def test_it_comes_after_what_the_keeper_destroys(self, coordinator, client, asked):
        """A task that lets go of bytes enqueues their mapping behind the flush."""
        asking, rid = asked()
        coordinator.grant(rid)
        asking.result(WAIT_S)
        held, late, over = threading.Event(), threading.Event(), threading.Event()
        kept = [asking]
        del asking

        def let_go():
            late.set()
            over.wait(WAIT_S)
            kept.clear()

        client.keeper.put(held.wait)
        client.keeper.put(lambda: client.keeper.put(let_go))
        flushing = coordinator.call(client.flush, WAIT_S)
        wait_until(lambda: client.keeper.queue.qsize() == 2)  # the second task, and the flush
        held.set()
        assert late.wait(WAIT_S)
        other = coordinator.call(client.acquire, built(), None, None)
        crossing = coordinator.expect(Acquire).rid  # and no flush before it
        over.set()
        assert coordinator.receive() == Release(coordinator.gen, LeaseId(rid))
        coordinator.answer_flush()
        flushing.result(WAIT_S)
        coordinator.grant(crossing)
        other.result(WAIT_S)

    def test_it_ends_at_its_timeout_whoever_is_slow(self, coordinator, client):
        held = threading.Event()
        client.keeper.put(held.wait)
        with pytest.raises(ResourceError, match="taken effect"):
            client.flush(0.05)
        held.set()
        with pytest.raises(ResourceError, match="taken effect"):
            client.flush(0.2)
        rid = coordinator.expect(Flush).rid
        coordinator.send(Flushed(rid))
        coordinator.in_step(client)
