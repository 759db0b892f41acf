"""How records end in one worker: once each, whatever ends them, whoever raises meanwhile."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

import gpu_worker
from shm_store import segment
from shm_store.errors import WorkerClosed
from shm_store.layout import PREAMBLE_BYTES
from shm_store.wire import Commit, Grant, Release, Reserve
from tests.gpu_worker.served import WAIT_S, leases, skeleton, wait_until, write
from tests.processes import Peer, running, segments_mapped_by

pytestmark = pytest.mark.process


@pytest.fixture
def told() -> list[tuple[str, str]]:
    """Key and cause of every eviction."""
    return []


@pytest.fixture
def worker(served, told):
    made = gpu_worker.attach(
        served.socket, on_evict=lambda key, generation, cause: told.append((key, cause))
    )
    yield made
    made.shutdown()


class KeptBusy:
    """Keeps a worker's keeper from its queue until `over`."""

    def __init__(self, worker: gpu_worker.Worker) -> None:
        self.begun, self.over = threading.Event(), threading.Event()
        worker._client.keeper.put(self.hold)
        assert self.begun.wait(WAIT_S)

    def hold(self) -> None:
        self.begun.set()
        self.over.wait(WAIT_S)


class TestQueue:
    def test_it_keeps_no_bytes_alive_and_gives_none_back_too_early(
        self, served, worker, operator, key, source
    ):
        """S21: the module is gone at once; the books count its bytes until they are unmapped."""
        with worker.use(key, skeleton=skeleton, source=source) as module:
            alive = weakref.ref(module)
        del module
        generation = operator.generation(key).generation
        busy = KeptBusy(worker)
        assert worker.evict(key)
        assert alive() is None
        assert leases(operator, key) == 1
        assert f"weight-cache:{generation}" in segments_mapped_by(os.getpid())
        served.audit()
        busy.over.set()
        worker.flush()
        assert leases(operator, key) == 0
        assert f"weight-cache:{generation}" not in segments_mapped_by(os.getpid())
        served.audit()

    def test_what_was_dropped_is_idle_though_it_is_not_through(self, worker, key, source):
        """Its handle is gone, and the keeper has not heard of that."""
        handle = worker.load(key, skeleton=skeleton, source=source)
        busy = KeptBusy(worker)
        del handle
        assert worker.evict(key)
        busy.over.set()
        worker.flush()

    def test_the_end_of_a_claim_in_it_keeps_no_worker_and_no_module(
        self, served, operator, key, source
    ):
        """S21: what is queued for a handle that was dropped leads to both weakly."""
        with gpu_worker.attach(served.socket) as other:
            worker = gpu_worker.attach(served.socket)
            handle = worker.load(key, skeleton=skeleton, source=source)
            with handle as module:
                alive = weakref.ref(module)
            busy = KeptBusy(other)
            del handle, module, worker
            gc.collect()
            assert alive() is None
            assert leases(operator, key) == 1, "it is mapped"
            busy.over.set()
            other.flush()
            assert leases(operator, key) == 0

    def test_shutdown_returns_after_it(self, served, operator, key, source):
        """S33: garbage that waits for the keeper is gone before shutdown says what is held."""
        worker = gpu_worker.attach(served.socket)
        handle = worker.load(key, skeleton=skeleton, source=source)
        busy = KeptBusy(worker)
        del handle
        with ThreadPoolExecutor(1) as threads:
            ending = threads.submit(worker.shutdown)
            wait_until(lambda: worker._table._records.closed)
            assert leases(operator, key) == 1
            assert not ending.done()
            busy.over.set()
            assert ending.result(WAIT_S) == ()
        assert leases(operator, key) == 0
        served.audit()


class TestOnce:
    """S26: any eviction, whatever caused it, is told of once, and gives one lease back."""

    @pytest.fixture
    def served(self, tmp_path):
        with running(str(tmp_path / "s"), "--ram-budget", "16KiB") as started:
            yield started

    @pytest.mark.parametrize("held", [False, True])
    @pytest.mark.parametrize(
        "cause", ["evicted", "replaced", "invalidated", "room", "unused", "shutdown"]
    )
    def test_each_cause(self, served, operator, key, tmp_path, told, cause, held):
        path = write(tmp_path / "w", 1.0)
        worker = gpu_worker.attach(
            served.socket,
            on_evict=lambda _, generation, cause: told.append((generation, cause)),
            idle_timeout=3600 if cause == "unused" else None,
        )
        handle = worker.load(key, skeleton=skeleton, source=path)
        with handle as module:
            alive = weakref.ref(module)
        del module
        if not held:
            handle.close()
        other = Peer(served.socket, "other")
        match cause:
            case "evicted":
                assert worker.evict(key) is not held
            case "replaced":
                # Not from a file: that would be retired, and so could be "invalidated" first.
                worker.load(key, skeleton=skeleton, build=skeleton, private=True).close()
            case "invalidated":
                worker.invalidate(key)
            case "room":
                ticket = other.ticket("other")
                other.send(Reserve(ticket.gen, 16 << 10))
                wait_until(lambda: [one.asked for one in asked(operator, key)] in ([], ["room"]))
                worker.flush()
            case "unused":
                worker._table._idle_s = 0.0
                worker._table._expire()
                if held:
                    handle.close()
                    worker._table._expire()
            case "shutdown":
                worker.shutdown()
        if held:
            assert told == [] or cause == "unused"
            handle.close()
        wait_until(lambda: told == [(handle.generation, cause)])
        handle.close()
        worker.evict(key)
        wait_until(lambda: alive() is None)
        worker.shutdown()
        assert [gone for gone in told if gone[0] == handle.generation] == told[:1]
        wait_until(lambda: leases(operator, key) == 0)
        served.audit()


class TestRaising:
    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
    def test_a_callback_that_raises_in_a_sweep_keeps_nobody_from_going(
        self, served, operator, key, source, monkeypatch, error
    ):
        """S22: all are evicted and told of, then what comes from outside is raised."""
        told: list[str] = []

        def refuse(key: str, generation: str, cause: str) -> None:
            told.append(key)
            raise error

        def log(*facts: object, exc_info: object) -> None:
            raise OSError("a log that is full")

        monkeypatch.setattr("gpu_worker.callbacks.logger.error", log)
        worker = gpu_worker.attach(served.socket, on_evict=refuse)
        keys = [f"{key} {number}" for number in range(3)]
        for each in keys:
            worker.load(each, skeleton=skeleton, source=source).close()
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            worker.shutdown()
            assert error is RuntimeError, "it was swallowed"
        assert told == keys
        assert worker.shutdown() == ()
        assert [leases(operator, each) for each in keys] == [0, 0, 0]
        served.audit()

    @pytest.mark.parametrize("error", [RuntimeError, SystemExit])
    def test_a_callback_that_raises_keeps_no_other_worker_from_hearing_a_revoke(
        self, served, operator, key, source, monkeypatch, error
    ):
        """S22: everyone lets go, and the coordinator has its answer."""
        told: list[str] = []

        def refuse(key: str, generation: str, cause: str) -> None:
            told.append(cause)
            raise error

        monkeypatch.setattr("gpu_worker.callbacks.logger.error", lambda *_, **__: None)
        workers = [gpu_worker.attach(served.socket, on_evict=refuse) for _ in range(3)]
        for worker in workers:
            worker.load(key, skeleton=skeleton, source=source).close()
        held = workers[0].load(key, skeleton=skeleton, source=source)
        assert workers[0].invalidate(key, timeout=WAIT_S)
        assert told == ["invalidated"] * 2
        with contextlib.suppress(error):  # this one is told in this thread
            held.close()
        assert told == ["invalidated"] * 3
        workers[0].flush()
        assert leases(operator, key) == 0
        for worker in workers:
            worker.shutdown()

    @pytest.mark.parametrize("error", [RuntimeError, SystemExit])
    def test_a_log_that_raises_ends_no_keeper(
        self, served, worker, operator, key, source, monkeypatch, error
    ):
        """S20, S22: releases that are queued behind it are done."""

        def log(*facts: object, exc_info: object) -> None:
            raise error

        monkeypatch.setattr("gpu_worker.callbacks.logger.error", log)
        worker._client.keeper.put(lambda: 1 / 0)
        handle = worker.load(key, skeleton=skeleton, source=source)
        del handle
        worker.flush()
        assert worker.evict(key)
        worker.flush()
        assert leases(operator, key) == 0


class TestLateThreads:
    @pytest.mark.parametrize("gone", [False, True], ids=["there", "coordinator gone"])
    def test_workers_are_joined_after_the_shutdown(self, tmp_path, source, told, gone):
        """S24: the manager stops first; each late lock, unlock, close and load settles once."""
        with running(str(tmp_path / "s")) as mortal:
            worker = gpu_worker.attach(
                mortal.socket,
                on_evict=lambda key, generation, cause: told.append((key, cause)),
                patience=0,
            )
            ready, over = threading.Barrier(5), threading.Event()

            def build():
                ready.wait(WAIT_S)
                over.wait(WAIT_S)
                return skeleton()

            def late_lock():
                handle = worker.load("lock", skeleton=skeleton, source=source)
                ready.wait(WAIT_S)
                over.wait(WAIT_S)
                with handle as module:
                    assert module.state_dict()["bias"][0] == 1
                del module
                handle.close()
                handle.close()

            def late_unlock():
                with worker.use("unlock", skeleton=skeleton, source=source):
                    ready.wait(WAIT_S)
                    over.wait(WAIT_S)

            def late_drop():
                handle = worker.load("drop", skeleton=skeleton, source=source)
                ready.wait(WAIT_S)
                over.wait(WAIT_S)
                del handle

            def late_load():
                with worker.use("load", skeleton=skeleton, build=build) as module:
                    assert module.state_dict()["bias"].numel() == 2

            with ThreadPoolExecutor(4) as threads:
                late = [
                    threads.submit(call) for call in (late_lock, late_unlock, late_drop, late_load)
                ]
                ready.wait(WAIT_S)
                assert {one.key for one in worker.shutdown()} == {"load", "lock", "unlock", "drop"}
                if gone:
                    mortal.stop(signal.SIGKILL)
                over.set()
                for future in late[:3]:
                    future.result(WAIT_S)
                if gone:
                    assert isinstance(late[3].exception(WAIT_S), gpu_worker.CoordinatorLost)
                else:
                    late[3].result(WAIT_S)
                del future, late
            gc.collect()
            keys = ["drop", "lock", "unlock"] if gone else ["drop", "load", "lock", "unlock"]
            wait_until(lambda: sorted(told) == [(key, "shutdown") for key in keys])
            assert worker.shutdown() == ()
            if gone:
                mortal.process.returncode = 0  # as it was to end
                return
            watcher = Peer(mortal.socket, "watcher", role="operator")
            wait_until(lambda: watcher.status().sessions == ())
            assert all(leases(watcher, key) == 0 for key in keys)
            mortal.audit()

    def test_calls_after_a_shutdown_are_refused_and_change_nothing(
        self, served, operator, key, source
    ):
        worker = gpu_worker.attach(served.socket)
        with gpu_worker.attach(served.socket) as other:
            handle = other.load(key, skeleton=skeleton, source=source)
            worker.shutdown()
            before = operator.status().generations
            for call in (
                lambda: worker.state_dict(key, source=source),
                lambda: worker.load(key, skeleton=skeleton, source=source),
                lambda: worker.use(key, skeleton=skeleton, source=source).__enter__(),
                lambda: worker.prefetch(key, source=source),
                lambda: worker.invalidate(key),
            ):
                with pytest.raises(WorkerClosed):
                    call()
            assert worker.evict(key) is False
            assert worker.shutdown() == ()
            after = operator.status().generations
            assert [(g.generation, g.state, len(g.leases)) for g in after] == [
                (g.generation, g.state, len(g.leases)) for g in before
            ]
            handle.close()


class TestBadInput:
    def test_calls_out_of_order_change_nothing(self, served, worker, operator, key, source):
        """Closing twice, leaving without having entered, evicting what is locked."""
        handle = worker.load(key, skeleton=skeleton, source=source)
        with pytest.raises(gpu_worker.CallerError):
            handle.__exit__(None, None, None)
        with handle as module:
            assert worker.evict(key) is False
            assert worker.evict(key) is False
            handle.close()
            handle.close()
            assert module.state_dict()["bias"][0] == 1
            assert leases(operator, key) == served.audit().leases == 1
            del module
        with pytest.raises(gpu_worker.CallerError):
            handle.__exit__(None, None, None)
        worker.flush()
        assert leases(operator, key) == served.audit().leases == 0

    @pytest.mark.parametrize("length_bytes", [0, 1 << 20, 1 << 62, (1 << 64) - 1])
    def test_a_manifest_that_lies_about_its_size_is_refused(
        self, served, worker, operator, key, length_bytes
    ):
        """By whoever reads it, with a type; and given back."""
        liar = Peer(served.socket, "liar")
        ticket = liar.ticket(key)
        fd = liar.space(ticket.gen, 8192)
        segment.write_at(fd, length_bytes.to_bytes(8, "little"), PREAMBLE_BYTES)
        os.close(fd)
        liar.send(Commit(ticket.gen))
        grant = liar.expect(Grant)
        os.close(*liar.fds)
        liar.send(Release(grant.gen, grant.rid))
        liar.flush()
        for call in (
            lambda: worker.state_dict(key, build=skeleton),
            lambda: worker.load(key, skeleton=skeleton, build=skeleton),
        ):
            with pytest.raises(gpu_worker.SegmentRefused):
                call()
        gc.collect()
        worker.flush()
        assert worker.shutdown() == ()
        assert leases(operator, key) == served.audit().leases == 0


def asked(operator: Peer, key: str):
    generation = operator.generation(key)
    return generation.leases if generation else ()
