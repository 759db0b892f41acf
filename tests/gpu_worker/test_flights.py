"""Loads of one key in several threads: one of them does it, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpu_worker.flights import Flight, Flights
from shm_store.errors import CallerError, LoadTimeout
from shm_store.keys import Key
from tests.gpu_worker.served import WAIT_S, skeleton

pytestmark = pytest.mark.process


class TestSingleFlight:
    def test_threads_that_load_one_key_make_one_module(self, worker, key, source):
        made = []
        barrier = threading.Barrier(8)

        def slow():
            made.append(1)
            return skeleton()

        def load():
            barrier.wait(WAIT_S)
            return worker.load(key, skeleton=slow, source=source)

        with ThreadPoolExecutor(8) as threads:
            handles = [future.result() for future in [threads.submit(load) for _ in range(8)]]
        assert len(made) == 1
        with handles[0] as first, handles[-1] as last:
            assert first is last
        assert worker.shutdown()[0].claims == 8

    def test_if_the_first_fails_the_others_go_on_by_themselves(self, worker, key, source):
        entered, fail = threading.Event(), threading.Event()
        made = []

        def first_fails():
            made.append(1)
            if len(made) == 1:
                entered.set()
                fail.wait(WAIT_S)
                raise KeyboardInterrupt
            return skeleton()

        def load():
            return worker.load(key, skeleton=first_fails, source=source)

        with ThreadPoolExecutor(4) as threads:
            first = threads.submit(load)
            assert entered.wait(WAIT_S)
            others = [threads.submit(load) for _ in range(3)]
            fail.set()
            assert isinstance(first.exception(WAIT_S), KeyboardInterrupt)
            handles = [other.result(WAIT_S) for other in others]
        assert len(made) == 2
        assert len({handle.generation for handle in handles}) == 1

    def test_who_waits_for_another_thread_leaves_at_its_own_timeout(self, worker, key):
        entered, go_on = threading.Event(), threading.Event()

        def build():
            entered.set()
            go_on.wait(WAIT_S)
            return skeleton()

        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(worker.load, key, skeleton=skeleton, build=build)
            assert entered.wait(WAIT_S)
            for _ in range(2):  # the second must find the first thread's load as the first did
                started_s = time.monotonic()
                with pytest.raises(LoadTimeout, match="another thread"):
                    worker.load(key, skeleton=skeleton, build=build, timeout=0.05)
                assert time.monotonic() - started_s < 2
            go_on.set()
            first.result(WAIT_S).close()

    def test_the_wait_for_another_threads_skeleton_counts(self, worker, key, source):
        """Of any key: there is one at a time. And it is said what was waited for."""
        entered, go_on = threading.Event(), threading.Event()

        def slow():
            entered.set()
            go_on.wait(WAIT_S)
            return skeleton()

        weights = worker.state_dict(f"{key}2", source=source)
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(worker.load, key, skeleton=slow, source=source)
            assert entered.wait(WAIT_S)
            other = {"skeleton": skeleton, "source": source}
            started_s = time.monotonic()
            with pytest.raises(LoadTimeout, match="another thread builds a module"):
                worker.load(f"{key}2", timeout=0.3, **other)
            assert time.monotonic() - started_s < 3
            del weights
            go_on.set()
            first.result(WAIT_S).close()
            worker.load(f"{key}2", timeout=WAIT_S, **other).close()

    def test_the_time_in_build_does_not_count_there(self, worker, key, source):
        entered, go_on = threading.Event(), threading.Event()

        def slow():
            entered.set()
            go_on.wait(WAIT_S)
            return skeleton()

        def build():
            threads.submit(worker.load, key, skeleton=slow, source=source)
            assert entered.wait(WAIT_S)
            threading.Event().wait(1.3)  # longer than the timeout and its grace
            threading.Timer(0.1, go_on.set).start()
            return skeleton()

        with ThreadPoolExecutor(1) as threads:
            worker.load(f"{key}2", skeleton=skeleton, build=build, timeout=1.0).close()

    def test_a_load_inside_the_same_load_is_refused(self, worker, key, source):
        def recursive():
            with worker.use(key, skeleton=skeleton, source=source) as module:
                return module

        with pytest.raises(CallerError, match=r"the skeleton of .* loads"):
            worker.load(key, skeleton=recursive, source=source)
        with worker.use(key, skeleton=skeleton, source=source) as module:
            assert module.bias[0] == 1

    def test_a_skeleton_that_would_wait_for_other_weights_is_refused(self, worker, key, source):
        """It is in the way of every other skeleton. What is loaded already may be used."""

        def dependent():
            with worker.use(f"{key}2", skeleton=skeleton, source=source):
                return skeleton()

        with pytest.raises(CallerError, match=r"the skeleton of .* loads"):
            worker.load(key, skeleton=dependent, source=source)
        with pytest.raises(CallerError, match=r"the skeleton of .* loads"):
            worker.load(key, skeleton=lambda: worker.state_dict(key, source=source), source=source)
        worker.load(f"{key}2", skeleton=skeleton, source=source).close()
        worker.load(key, skeleton=dependent, source=source).close()

    def test_builds_that_wait_for_each_other_are_refused(self, worker, key):
        """One of them hears of it, and then the other can go on."""
        barrier = threading.Barrier(2)

        def load(mine, other):
            def build():
                barrier.wait(WAIT_S)
                with worker.use(other, skeleton=skeleton, build=skeleton) as module:
                    return module

            return worker.load(mine, skeleton=skeleton, build=build)

        with ThreadPoolExecutor(2) as threads:
            loads = [threads.submit(load, key + a, key + b) for a, b in ("12", "21")]
            errors = [loading.exception(WAIT_S) for loading in loads]
        assert sorted(type(error).__name__ for error in errors) == ["CallerError", "NoneType"]

    def test_a_wait_that_is_over_makes_no_circle(self):
        """A thread that gave up waiting for this one may be waited for."""
        flights = Flights(threading.RLock())
        with ThreadPoolExecutor(1) as threads:
            other = threads.submit(threading.get_ident).result(WAIT_S)
            with pytest.raises(LoadTimeout):
                flights.wait(Flight(Key("theirs"), other), 0.0)
            waiting = threads.submit(flights.wait, Flight(Key("ours")), 0.0)
            assert isinstance(waiting.exception(WAIT_S), LoadTimeout)
