"""Two threads, or a thread and the coordinator, meet at every line of a call.

One thread makes a call and stops at its nth line in the worker; there the other has its turn, until
it is done or waits for the worker's lock; then the first goes on. So for every n, as long as there
is such a line. Whatever meets whatever: a module that is in use is there, and each one that was
made is let go of, and told of, once.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch

import gpu_worker
from gpu_worker.reentry import owned
from gpu_worker.worker import Worker
from shm_store.errors import ConnectionLost, WorkerClosed
from shm_store.keys import GenerationId
from shm_store.wire import Ack, Acquire, Flush, Flushed, Release, Revoke
from tests.gpu_worker.spoken import KEY, WAIT_S, SpokenCoordinator

PACKAGE = os.path.dirname(gpu_worker.__file__)

FILES = {
    os.path.join(PACKAGE, name)
    for name in (
        "worker.py",
        "handle.py",
        "record_table.py",
        "records.py",
        "flights.py",
        "callbacks.py",
    )
}
"""Where no other lock than the worker's is held."""


class Weights(torch.nn.Module):
    """What `SpokenCoordinator.grant` has weights for: they sum up to 120."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(16))


class WatchedLock:
    """A worker's lock that says when somebody has to wait for it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.events: queue.SimpleQueue[str] = queue.SimpleQueue()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.events.put("waits")
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _is_owned(self) -> bool:
        return owned(self._lock)


class AnsweringCoordinator(SpokenCoordinator):
    """Answers by itself. `leases` is what its books would say."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.leases: dict[GenerationId, int] = {}
        self.answers: queue.SimpleQueue[Ack | Release] = queue.SimpleQueue()
        self.revoke_at_once: str | None = None

    def serve(self) -> None:
        """Until the worker closes the connection."""
        while (message := self.receive()) is not None:
            self.take(message)

    def take(self, message: object) -> None:
        match message:
            case Acquire(rid):
                self.leases[self.gen] = rid
                self.grant(rid)
                if self.revoke_at_once is not None:
                    self.send(Revoke(self.gen, rid, self.revoke_at_once))
            case Flush(rid):
                with contextlib.suppress(ConnectionLost):  # it asked, and left
                    self.send(Flushed(rid))
            case Release(gen, lease):
                if self.leases.get(gen) == lease:
                    del self.leases[gen]
                self.answers.put(message)
            case Ack():
                self.answers.put(message)

    def revoke(self, asked: str) -> bool:
        """Ask for a lease, and wait for the answer. Whether there was one to ask for."""
        lease = self.leases.get(self.gen)
        if lease is None:
            return False
        gen = self.gen
        if asked == "stale":
            self.gen = GenerationId(f"{os.getpid()}-{next(self.numbers)}")
        self.send(Revoke(gen, lease, asked))
        answer = self.answers.get(timeout=WAIT_S)
        assert (answer.gen, answer.lease) == (gen, lease)
        return True


class Scene:
    """One worker, what it has made, and what it has told."""

    def __init__(self, path: str) -> None:
        self.coordinator = AnsweringCoordinator(path)
        attaching = self.coordinator.call(lambda: gpu_worker.attach(path, on_evict=self.evicted))
        self.coordinator.accept()
        self.serving = self.coordinator.call(self.coordinator.serve)
        self.worker: Worker = attaching.result(WAIT_S)
        self.lock = WatchedLock()
        table = self.worker._table
        table._lock = table._flights._lock = self.lock
        self.made: list[weakref.ref[Weights]] = []
        self.told: list[str] = []
        self.handles: list[gpu_worker.ModelHandle] = []
        self.refused = False
        self.evictions: list[bool] = []
        self.held: tuple[gpu_worker.Held, ...] = ()
        self.revoked = False

    def evicted(self, key: str, generation: str, cause: str) -> None:
        self.told.append(cause)

    def skeleton(self) -> Weights:
        module = Weights()
        self.made.append(weakref.ref(module))
        return module

    # --- what threads do ---

    def load(self) -> None:
        try:
            self.handles.append(self.worker.load(KEY, skeleton=self.skeleton, build=dict))
        except WorkerClosed:
            self.refused = True

    def use(self) -> None:
        with self.handles[0] as module:
            assert float(module.state_dict()["w"].sum()) == 120

    def leave(self) -> None:
        self.handles[0].__exit__(None, None, None)

    def close(self) -> None:
        self.handles.pop().close()

    def evict(self) -> None:
        self.evictions.append(self.worker.evict(KEY))

    def shutdown(self) -> None:
        self.held = self.worker.shutdown()

    def room(self) -> None:
        self.revoked = self.coordinator.revoke("room")

    def stale(self) -> None:
        self.revoked = self.coordinator.revoke("stale")

    # --- how they meet ---

    def meet(self, first: Callable[[], None], other: Callable[[], None], number: int) -> bool:
        """Call `first`, and `other` at its nth line. Whether it has so many."""
        turns = []

        def turn() -> None:
            events = self.lock.events = queue.SimpleQueue()
            turns.append(self.coordinator.call(other))
            turns[0].add_done_callback(lambda _: events.put("done"))
            events.get(timeout=WAIT_S)

        before = sys.gettrace()
        sys.settrace(AtLine(number, turn))
        try:
            first()
        finally:
            sys.settrace(before)
        for future in turns:
            future.result(WAIT_S)
        return bool(turns)

    def check(self) -> None:
        """In between, when both are through: what was let go of is gone, and nothing else is."""
        try:
            self.worker.flush(WAIT_S)
        except WorkerClosed:
            self.serving.result(WAIT_S)
        dead = [module for module in self.made if module() is None]
        assert len(self.told) == len(dead), (self.told, len(self.made))
        for handle in self.handles:
            with handle as module:
                assert float(module.state_dict()["w"].sum()) == 120
        self.worker._table._records.check()

    def end(self) -> None:
        """Everything was given back, once."""
        for handle in self.handles:
            handle.close()
        assert self.worker.shutdown() == ()
        self.serving.result(WAIT_S)
        assert [module() for module in self.made] == [None] * len(self.made)
        assert len(self.told) == len(self.made)
        assert self.coordinator.leases == {}


class AtLine:
    """A tracer that has something done at the nth line of a call."""

    def __init__(self, number: int, do: Callable[[], None]) -> None:
        self.left = number
        self.do = do

    def __call__(self, frame: FrameType, event: str, argument: object) -> AtLine | None:
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            self.left -= 1
            if not self.left:
                self.do()
        return self


@pytest.fixture
def each_meeting(tmp_path):
    """Has two meet at each line of the first, in a scene that is prepared anew."""

    def each(prepare, first: str, other: str) -> Iterator[Scene]:
        number = 0
        while True:
            number += 1
            scene = Scene(str(tmp_path / f"s{number}"))
            try:
                prepare(scene)
                if not scene.meet(getattr(scene, first), getattr(scene, other), number):
                    getattr(scene, other)()
                    scene.end()
                    assert number > 5, "the first has no lines"
                    return
                scene.check()
                yield scene
                scene.end()
            finally:
                scene.coordinator.close()

    return each


def idle(scene: Scene) -> None:
    """Its module is there, and nobody uses it."""
    scene.load()
    scene.close()


def claimed(scene: Scene) -> None:
    scene.load()


def claimed_twice(scene: Scene) -> None:
    scene.load()
    scene.load()


def locked_twice(scene: Scene) -> None:
    scene.load()
    for _ in range(2):
        scene.handles[0].__enter__()


def stale_and_claimed_twice(scene: Scene) -> None:
    claimed_twice(scene)
    scene.evict()


def nothing(scene: Scene) -> None:
    """It has loaded nothing yet."""


@pytest.mark.parametrize("state", [idle, nothing])
def test_a_load_comes_before_a_shutdown_or_after_it(each_meeting, state):
    """S14, S11: usable and held until its end, or refused; there is nothing in between."""
    for scene in each_meeting(state, "load", "shutdown"):
        assert scene.refused is (scene.handles == [])
        if scene.refused:
            assert scene.told == ["shutdown"] * (state is idle)
            continue
        known = [(one.key, one.claims) for one in scene.held]
        # A load in flight is nobody's yet when the shutdown returns, and arrives stale.
        assert known == [(KEY, 1)] or (state is nothing and known == [])
        assert scene.told == []
        scene.close()
        scene.check()
        assert scene.told == ["shutdown"]


def test_a_hit_comes_before_an_eviction_or_after_it(each_meeting):
    """S14: either it has the claim, and the record waits for it, or it makes a new one."""
    for scene in each_meeting(idle, "load", "evict"):
        evicted_first = scene.evictions == [True]
        assert len(scene.made) == 1 + evicted_first
        assert scene.told == ["evicted"] * evicted_first
        scene.close()
        scene.check()
        assert scene.told == ["evicted"]


def test_two_locks_through_one_handle_end_one_each(each_meeting):
    """Neither ends the other's, so none is left."""
    for scene in each_meeting(locked_twice, "leave", "leave"):
        assert [(one.claims, one.locks) for one in scene.worker._table._records.held()] == [(1, 0)]


@pytest.mark.parametrize("asked", ["room", "stale"])
@pytest.mark.parametrize("state", [idle, nothing])
def test_a_load_comes_before_a_revoke_or_after_it(each_meeting, state, asked):
    """S14, S19: where the claim was first it wins, and the module goes once it is idle."""
    cause = {"room": "room", "stale": "invalidated"}[asked]
    for scene in each_meeting(state, "load", asked):
        assert len(scene.handles) == 1
        asked_before = scene.told == [cause]
        assert scene.told == [] or (asked_before and state is idle and len(scene.made) == 2)
        scene.close()
        scene.check()
        assert scene.told == [cause] * scene.revoked


@pytest.mark.parametrize("asked", ["room", "stale"])
def test_a_revoke_right_behind_the_grant_is_not_lost(tmp_path, asked):
    """S19: it is there before there is anything that it could be noted on."""
    scene = Scene(str(tmp_path / "s"))
    scene.coordinator.revoke_at_once = asked
    scene.load()
    scene.check()
    assert scene.told == []
    scene.close()
    scene.check()
    assert scene.told == [{"room": "room", "stale": "invalidated"}[asked]]
    scene.end()
    scene.coordinator.close()


@pytest.mark.parametrize("other", ["evict", "shutdown", "room", "stale"])
def test_a_record_that_two_evict_goes_once(each_meeting, other):
    """S5, S26: one release, one callback."""
    for scene in each_meeting(idle, "evict", other):
        assert len(scene.told) == 1
        if other == "evict":
            assert sorted(scene.evictions) == [False, True]


def test_of_two_handles_on_a_stale_record_the_last_evicts(each_meeting):
    """S9: whichever that is."""
    for scene in each_meeting(stale_and_claimed_twice, "close", "close"):
        assert scene.told == ["evicted"]


def test_the_second_of_two_handles_on_a_stale_record_can_be_used(each_meeting):
    """S9: while the first ends, and after that."""
    for scene in each_meeting(stale_and_claimed_twice, "use", "close"):
        assert scene.told == []
        scene.close()
        scene.check()
        assert scene.told == ["evicted"]


@pytest.mark.parametrize("other", ["evict", "shutdown", "room", "stale"])
def test_a_lock_comes_before_an_eviction_or_after_it(each_meeting, other):
    """S14, S19: the claim has it either way."""
    for scene in each_meeting(claimed, "use", other):
        assert scene.told == []
        scene.close()
        scene.check()
        assert len(scene.told) == 1


@pytest.mark.parametrize("other", ["evict", "shutdown", "room", "stale"])
def test_a_claim_that_ends_while_its_record_is_evicted_lets_it_go_once(each_meeting, other):
    """S5, S19, S26: by whichever comes last."""
    for scene in each_meeting(claimed, "close", other):
        assert len(scene.told) == 1
