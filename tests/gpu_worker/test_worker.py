"""The public face, against a real coordinator: state dicts, modules, handles, and their ends."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file

import gpu_worker
from gpu_worker import Held, registry
from shm_store.errors import (
    ArgumentRefused,
    CallerError,
    CoordinatorLost,
    LoadTimeout,
    SourceNotOpened,
    WeightsMissing,
    WorkerClosed,
)
from shm_store.keys import short_generation
from tests.gpu_worker.served import WAIT_S, leases, skeleton, wait_until, write
from tests.processes import running, segments_mapped_by

pytestmark = pytest.mark.process


class TestStateDict:
    def test_it_is_shared_and_given_back(self, worker, operator, key, source):
        state = worker.state_dict(key, source=source)
        assert torch.equal(state["weight"], torch.ones(2, 3)) and list(state) == ["bias", "weight"]
        again = worker.state_dict(key, source=source)
        assert again["weight"].data_ptr() == state["weight"].data_ptr()
        assert leases(operator, key) == 1
        generation = operator.generation(key).generation
        assert f"weight-cache:{generation}" in segments_mapped_by(os.getpid())
        del state
        worker.flush()
        assert leases(operator, key) == 1, "the second dict uses it"
        del again
        worker.flush()
        assert leases(operator, key) == 0
        assert f"weight-cache:{generation}" not in segments_mapped_by(os.getpid())

    def test_a_changed_source_is_noticed_by_it_and_then_by_load(self, worker, key, tmp_path):
        """`load` asks nobody while it has a record; one that is known to be old is not used."""
        path = write(tmp_path / "f", 1.0)
        old = worker.load(key, skeleton=skeleton, source=path)
        write(tmp_path / "f", 2.0)
        with worker.load(key, skeleton=skeleton, source=path) as module:
            assert module.bias[0] == 1
        assert worker.state_dict(key, source=path)["bias"][0] == 2
        with worker.load(key, skeleton=skeleton, source=path) as module, old as older:
            assert (module.bias[0], older.bias[0]) == (2, 1)

    def test_what_is_built_is_built_once_and_not_kept(self, worker, key):
        built = []

        def build():
            built.append(weakref.ref(module := torch.nn.Linear(3, 2)))
            return module

        state = worker.state_dict(key, build=build)
        assert list(state) == ["weight", "bias"]
        assert worker.state_dict(key, build=build)["bias"].data_ptr() == state["bias"].data_ptr()
        assert [module() for module in built] == [None]
        worker.state_dict(key, build=build, version="2")
        assert len(built) == 2

    def test_non_persistent_buffers_of_what_is_built_are_in_it(self, worker, key):
        def build():
            module = torch.nn.Module()
            module.register_buffer("kept", torch.ones(1))
            module.register_buffer("left_out", torch.ones(1), persistent=False)
            return module

        assert set(worker.state_dict(key, build=build)) == {"kept", "left_out"}

    def test_a_prefetch_of_no_file_is_refused_at_once(self, worker, key, tmp_path):
        with pytest.raises(SourceNotOpened):
            worker.prefetch(key, source=tmp_path / "nowhere")

    def test_what_build_raises_comes_out_and_the_next_one_builds(self, worker, operator, key):
        error = RuntimeError("no such model")

        def fail():
            raise error

        with pytest.raises(RuntimeError) as caught:
            worker.state_dict(key, build=fail)
        assert caught.value is error
        worker.flush()
        assert operator.generation(key) is None
        assert worker.state_dict(key, build=lambda: {"w": torch.ones(2)})["w"].sum() == 2

    def test_a_build_without_any_tensor_is_warned_of(self, worker, key, caplog):
        """It is published as it is: others get nothing, too."""
        assert worker.state_dict(key, build=dict) == {}
        assert worker.state_dict(key, build=lambda: {"w": torch.ones(1)}) == {}
        (told,) = [record for record in caplog.records if "no tensor" in record.getMessage()]
        assert told.levelname == "WARNING" and repr(key) in told.getMessage()

    def test_progress_is_reported_of_a_file(self, worker, key, tmp_path):
        """At least when it is all there; what is in between depends on the speed."""
        save_file({"w": torch.zeros(8 << 20)}, tmp_path / "big")
        seen = []
        worker.state_dict(key, source=tmp_path / "big", progress=lambda *done: seen.append(done))
        assert seen and all(0 <= done <= total for done, total in seen)


class TestLoad:
    def test_all_loads_share_one_module_until_it_is_evicted(self, worker, key, source):
        made = []

        def counted():
            made.append(1)
            return skeleton()

        first = worker.load(key, skeleton=counted, source=source)
        second = worker.load(key, skeleton=counted, source=source)
        with first as module, second as same:
            assert module is same
            assert not module.training and not module.weight.requires_grad
            assert torch.equal(module(torch.ones(3)), torch.full((2,), 4.0))
        assert len(made) == 1
        assert not hasattr(first, "module")
        assert first.generation == second.generation != ""
        assert (
            repr(first) == f"<ModelHandle {key!r} generation {short_generation(first.generation)}>"
        )

    def test_a_hit_asks_nobody(self, served, worker, key, source):
        """It works while the coordinator is stopped."""
        with worker.use(key, skeleton=skeleton, source=source):
            pass
        os.kill(served.pid, signal.SIGSTOP)
        try:
            with worker.use(key, skeleton=skeleton, source=source) as module:
                assert module.bias[0] == 1
            with pytest.raises(LoadTimeout):
                worker.load(key, skeleton=skeleton, build=dict, timeout=0)
        finally:
            os.kill(served.pid, signal.SIGCONT)
        worker.flush()

    def test_it_is_trained_for_this_process_alone_and_only_if_asked(
        self, served, worker, key, source
    ):
        """What an optimizer writes to is copied, and is what this process has of the weights."""
        with worker.use(key, skeleton=skeleton, source=source, train=True) as module:
            assert module.training and not any(p.requires_grad for p in module.parameters())
            module.requires_grad_(True)
            module(torch.ones(3)).sum().backward()
            torch.optim.SGD(module.parameters(), lr=1.0).step()
            assert torch.equal(worker.state_dict(key, source=source)["weight"], torch.zeros(2, 3))
            (copied,) = served.audit().copied
            assert (copied.key, copied.pid) == (key, os.getpid())

    def test_a_later_skeleton_makes_nothing(self, worker, key, source):
        with worker.use(key, skeleton=skeleton, source=source) as module:
            pass
        with worker.use(key, skeleton=lambda: 1 / 0, source=source) as same:
            assert same is module

    def test_another_source_takes_its_place(self, worker, key, tmp_path):
        one, two = write(tmp_path / "1", 1.0), write(tmp_path / "2", 2.0)
        old = worker.load(key, skeleton=skeleton, source=one)
        with worker.load(key, skeleton=skeleton, source=two) as module, old as older:
            assert (module.bias[0], older.bias[0]) == (2, 1)

    def test_two_paths_of_one_file_are_one_module(self, worker, key, source, tmp_path):
        os.symlink(source, tmp_path / "link")
        first = worker.load(key, skeleton=skeleton, source=source)
        with first as module, worker.use(
            key, skeleton=skeleton, source=tmp_path / "link"
        ) as same:  # fmt: skip
            assert module is same

    def test_train_leaves_the_mode_and_does_not_mix(self, worker, key, source):
        with worker.use(key, skeleton=skeleton, source=source, train=True) as module:
            assert module.training
        with pytest.raises(ArgumentRefused, match="train"):
            worker.load(key, skeleton=skeleton, source=source)
        worker.flush()
        assert worker.evict(key), "the refused load left no claim"

    def test_missing_weights_are_named_and_nothing_stays(self, worker, operator, key, source):
        with pytest.raises(WeightsMissing) as caught:
            worker.load(key, skeleton=lambda: torch.nn.ModuleList([skeleton()]), source=source)
        assert set(caught.value.names) == {"0.weight", "0.bias"}
        del caught
        gc.collect()
        worker.flush()
        assert leases(operator, key) == 0
        assert not worker.evict(key)

    def test_names_without_a_place_are_reported(self, worker, key, source, caplog):
        """On every handle, and once in the log: as news, for they do no harm."""
        with caplog.at_level("INFO", "gpu_worker"):
            handles = [
                worker.load(key, skeleton=lambda: torch.nn.Linear(3, 2, bias=False), source=source)
                for _ in range(2)
            ]
        assert [handle.unexpected for handle in handles] == [("bias",)] * 2
        (told,) = [record for record in caplog.records if "skeleton" in record.getMessage()]
        assert told.levelname == "INFO"
        assert told.getMessage() == (
            f"weight-cache: {key!r}: the weights have 1 tensor(s) that the skeleton does not use: "
            "bias"
        )

    def test_where_every_name_has_its_place_nothing_is_unexpected(self, worker, key, source):
        assert worker.load(key, skeleton=skeleton, source=source).unexpected == ()

    @pytest.mark.parametrize("given", [None, torch.nn.Linear(3, 2)])
    def test_a_skeleton_that_makes_the_module_is_needed(self, worker, key, source, given):
        with pytest.raises(ArgumentRefused, match="skeleton= is"):
            worker.load(key, skeleton=given, source=source)


class TestHandles:
    @pytest.fixture
    def handle(self, worker, key, source):
        return worker.load(key, skeleton=skeleton, source=source)

    def test_a_dropped_handle_ends_its_claim(self, worker, key, source):
        """Through the keeper's queue: a finalizer only enqueues, whoever holds the lock."""
        handle = worker.load(key, skeleton=skeleton, source=source)
        assert not worker.evict(key)
        handle = worker.load(key, skeleton=skeleton, source=source)
        worker.flush()
        held, over = threading.Event(), threading.Event()

        def hold():
            with worker._table._lock:
                held.set()
                return over.wait(2)

        with ThreadPoolExecutor(1) as threads:
            holding = threads.submit(hold)
            assert held.wait(WAIT_S)
            del handle
            over.set()
            assert holding.result(WAIT_S), "dropping it waited for the lock"
        worker.flush()
        assert worker.evict(key)

    def test_it_can_be_entered_again_and_nested_until_it_is_closed(self, worker, handle, key):
        with handle as module, handle as same:
            assert module is same
        with handle:
            handle.close()
            assert not worker.evict(key), "it is locked"
            with pytest.raises(WorkerClosed, match=r"handle was closed \(load again"):
                handle.__enter__()
            assert worker.shutdown() == (
                Held(key, handle.generation, claims=0, locks=1, threads=("MainThread",)),
            )
        assert worker.shutdown() == ()
        handle.close()

    def test_threads_that_share_one_leave_as_often_as_they_entered(
        self, worker, handle, monkeypatch
    ):
        """Were both to pick the same lock to end, the other would last for ever."""
        last_lock = worker._table._records.last_lock
        both = threading.Barrier(2)

        def together(claim):
            lock = last_lock(claim)
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.2)
            return lock

        monkeypatch.setattr(worker._table._records, "last_lock", together)
        handle.__enter__()
        handle.__enter__()
        with ThreadPoolExecutor(2) as threads:
            leaving = [threads.submit(handle.__exit__, None, None, None) for _ in range(2)]
            for future in leaving:
                future.result(WAIT_S)
        handle.close()
        assert worker.shutdown() == ()

    @pytest.mark.parametrize("step", ["claim", "adopt", "lock", "unlock", "end_claim"])
    def test_an_interrupt_after_any_step_leaves_nothing_in_use(
        self, worker, key, source, monkeypatch, step
    ):
        """S23: at the worst moment, when it has been done and nobody knows."""
        done = getattr(worker._table._records, step)

        def interrupted(*arguments):
            done(*arguments)
            monkeypatch.undo()
            raise KeyboardInterrupt

        def use():
            # By another name, and so adopted, if there is a record.
            os.link(source, f"{source}2") if step == "adopt" else None
            path = f"{source}2" if step == "adopt" else source
            with worker.use(key, skeleton=skeleton, source=path):
                pass

        worker.load(key, skeleton=skeleton, source=source).close()
        monkeypatch.setattr(worker._table._records, step, interrupted)
        try:
            use()
        except KeyboardInterrupt:
            pass
        else:
            pytest.fail("it was not interrupted")
        worker.flush()
        assert worker.evict(key)
        assert worker.shutdown() == ()

    def test_leaving_more_often_than_entering_is_refused(self, handle):
        with handle:
            pass
        with pytest.raises(CallerError, match="with handle as module"):
            handle.__exit__(None, None, None)

    def test_a_block_that_raises_unlocks_and_ends_use(self, worker, key, source):
        with pytest.raises(ZeroDivisionError), worker.use(
            key, skeleton=skeleton, source=source
        ):  # fmt: skip
            raise ZeroDivisionError
        assert worker.evict(key)

    def test_closing_it_inside_a_call_is_left_to_the_keeper(self, worker, handle, key):
        """As by the finalizer of something of the user's, while a call of ours collects garbage."""
        with worker._table._lock:
            handle.close()
            assert worker._table._records.held()
            with pytest.raises(CallerError):
                worker.evict(key)
        worker.flush()
        assert worker.evict(key)

    def test_a_load_inside_an_attach_of_the_same_thread_is_refused(self, worker, key, source):
        """It would wait for the keeper, which waits for the end of that."""
        with registry._registry, pytest.raises(CallerError, match="finalizer"):
            worker.load(key, skeleton=skeleton, source=source)


class TestEvict:
    def test_what_is_idle_goes_at_once(self, worker, operator, key, source):
        with worker.use(key, skeleton=skeleton, source=source) as module:
            alive = weakref.ref(module)
        del module
        assert leases(operator, key) == 1
        assert worker.evict(key)
        assert alive() is None
        assert not worker.evict(key)
        worker.flush()
        assert leases(operator, key) == 0

    def test_what_is_used_goes_with_its_last_use(self, worker, operator, key, source):
        handle = worker.load(key, skeleton=skeleton, source=source)
        assert not worker.evict(key)
        with handle as module:
            alive = weakref.ref(module)
            handle.close()
            del module
            assert alive() is not None
        assert alive() is None
        worker.flush()
        assert leases(operator, key) == 0

    def test_bytes_that_the_user_keeps_stay_leased(self, worker, operator, key, source):
        """Law 5: the books say so."""
        with worker.use(key, skeleton=skeleton, source=source) as module:
            kept = module.weight.detach()
        del module
        assert worker.evict(key)
        worker.flush()
        assert leases(operator, key) == 1
        del kept
        worker.flush()
        assert leases(operator, key) == 0


class TestShutdown:
    def test_the_idle_go_and_the_held_stay_until_their_last_use(
        self, served, operator, key, source
    ):
        """S1, S6: a handle made before can still be locked; the rest is gone on return."""
        worker = gpu_worker.attach(served.socket)
        held = worker.load(key, skeleton=skeleton, source=source)
        with worker.use(f"{key}2", skeleton=skeleton, source=source):
            pass
        assert worker.shutdown() == (
            Held(key, held.generation, claims=1, locks=0, threads=("MainThread",)),
        )
        assert (leases(operator, key), leases(operator, f"{key}2")) == (1, 0)
        with held as module:
            assert module.state_dict()["bias"][0] == 1
        del module
        for call in (worker.state_dict, lambda *a, **k: worker.load(*a, skeleton=skeleton, **k)):
            with pytest.raises(WorkerClosed, match=r"shut down \(attach again\)"):
                call(key, source=source)
        held.close()
        assert worker.shutdown() == ()
        wait_until(lambda: leases(operator, key) == 0)

    def test_a_load_in_flight_arrives_stale(self, served, operator, key):
        """S11: usable once, and evicted with its last use."""
        worker = gpu_worker.attach(served.socket)
        entered, go_on = threading.Event(), threading.Event()

        def build():
            entered.set()
            go_on.wait(WAIT_S)
            return skeleton()

        with ThreadPoolExecutor(1) as threads:
            loading = threads.submit(worker.load, key, skeleton=skeleton, build=build)
            assert entered.wait(WAIT_S)
            worker.shutdown()
            go_on.set()
            handle = loading.result(WAIT_S)
            del loading
        with handle as module:
            alive = weakref.ref(module)
        del module
        handle.close()
        assert alive() is None
        wait_until(lambda: leases(operator, key) == 0)

    def test_garbage_in_the_queue_is_gone_on_return(self, served, operator, key, source):
        """S7, S33."""
        worker = gpu_worker.attach(served.socket)
        worker.load(key, skeleton=skeleton, source=source)
        assert worker.shutdown() == ()
        assert leases(operator, key) == 0

    def test_its_session_ends_with_the_last_worker(self, served, operator, key, source):
        """And not before: another worker of this process goes on."""
        wait_until(lambda: operator.status().sessions == ())  # of the tests before
        with gpu_worker.attach(served.socket) as other:
            with gpu_worker.attach(served.socket) as worker:
                state = worker.state_dict(key, source=source)
            assert len(operator.status().sessions) == 1
            assert torch.equal(other.state_dict(key, source=source)["bias"], state["bias"])
        assert len(operator.status().sessions) == 1
        del state
        wait_until(lambda: len(operator.status().sessions) == 0)

    def test_a_worker_that_is_dropped_gives_everything_back(self, served, operator, key, source):
        wait_until(lambda: operator.status().sessions == ())  # of the tests before
        worker = gpu_worker.attach(served.socket)
        worker.load(key, skeleton=skeleton, source=source).close()
        del worker
        gc.collect()
        wait_until(lambda: operator.status().sessions == ())
        assert leases(operator, key) == 0

    def test_without_a_coordinator_it_returns(self, tmp_path, source):
        with running(str(tmp_path / "s")) as mortal:
            worker = gpu_worker.attach(mortal.socket)
            handle = worker.load("k", skeleton=skeleton, source=source)
            mortal.stop(signal.SIGTERM)
            with pytest.raises(CoordinatorLost, match="has left"):
                worker.flush()
            assert worker.shutdown() == (
                Held("k", handle.generation, claims=1, locks=0, threads=("MainThread",)),
            )
            with handle as module:
                assert module.state_dict()["bias"][0] == 1
            handle.close()
