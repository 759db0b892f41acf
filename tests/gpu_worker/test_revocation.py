"""What a worker does when others need its room, or its weights are no longer current."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch
from safetensors.torch import save_file

import gpu_worker
from shm_store.errors import ArgumentRefused, BudgetExceeded, WorkerClosed
from shm_store.wire import Ack, Acquire, Done, Fail, Grant, Invalidate, Release, Revoke
from tests.gpu_worker.served import WAIT_S, wait_until
from tests.processes import Peer, running

WIDTH = 512


def wide() -> torch.nn.Linear:
    return torch.nn.Linear(WIDTH, WIDTH, bias=False)


def wide_weights(value: float):
    return lambda: {"weight": torch.full((WIDTH, WIDTH), value)}


@pytest.fixture
def coordinator(tmp_path):
    """Room for one model, and a half."""
    with running(str(tmp_path / "s"), "--ram-budget", "2MiB") as started:
        yield started


@pytest.fixture
def told() -> list[tuple[str, str]]:
    """Key and cause of every eviction."""
    return []


@pytest.fixture
def worker(coordinator, told):
    made = gpu_worker.attach(
        coordinator.socket, on_evict=lambda key, generation, cause: told.append((key, cause))
    )
    yield made
    made.shutdown()


@pytest.fixture
def other(coordinator) -> Peer:
    return Peer(coordinator.socket, "other")


@pytest.fixture
def file(tmp_path):
    """The path of weights for `wide`."""
    path = tmp_path / "wide.safetensors"
    save_file({"weight": torch.full((WIDTH, WIDTH), 1.0)}, path)
    return str(path)


def asks(other: Peer, key: str, path: str, timeout_s: float = WAIT_S) -> int:
    """Send an ACQUIRE and do not wait for its answer."""
    with open(path, "rb") as source:
        rid = other.next_rid()
        other.send(Acquire(rid, key, path, "", timeout_s), [source.fileno()])
    return rid


class TestRoom:
    def test_an_idle_module_makes_room_for_another_process(
        self, coordinator, worker, other, file, told
    ):
        with worker.use("mine", skeleton=wide, source=file):
            pass
        other.send(Release(*_lease(other.load("theirs", file))))
        os.close(other.fds[0])
        assert told == [("mine", "room")]
        assert {g.key for g in other.status().generations} == {"theirs"}
        coordinator.audit()

    def test_a_module_in_use_makes_room_when_it_is_idle(self, worker, other, file, told):
        """S19: the claim wins."""
        handle = worker.load("mine", skeleton=wide, source=file)
        asks(other, "theirs", file)
        watcher = Peer(worker._client.path, "watcher", role="operator")
        wait_until(lambda: [g for g in watcher.status().generations if g.key == "mine"])
        wait_until(lambda: watcher.generation("theirs").waiting == 1)
        with handle as module:
            assert float(module.weight.detach().sum()) == WIDTH * WIDTH
        del module
        again = worker.load("mine", skeleton=wide, source=file)
        assert again.generation == handle.generation, "hits stay allowed"
        handle.close()
        assert told == []
        again.close()
        assert isinstance(other.expect(Grant), Grant)
        assert told == [("mine", "room")]

    def test_a_module_in_a_cycle_makes_room_too(self, worker, other, file, told):
        """An idle process would not collect it by itself."""

        def looped() -> torch.nn.Linear:
            made = wide()
            made.__dict__["itself"] = made
            return made

        gc.collect()
        gc.disable()
        try:
            with worker.use("mine", skeleton=looped, source=file):
                pass
            assert isinstance(other.load("theirs", file), Grant)
        finally:
            gc.enable()
        assert told == [("mine", "room")]

    def test_an_interrupt_in_the_last_use_keeps_no_room(
        self, worker, other, file, told, monkeypatch
    ):
        handle = worker.load("mine", skeleton=wide, source=file)
        asks(other, "theirs", file)
        records = worker._table._records
        wait_until(lambda: [r for r in records._current.values() if r.going == "room"])
        settle, interrupts = records._settle, iter([KeyboardInterrupt])

        def interrupted(record, now_s=0.0):
            for interrupt in interrupts:
                raise interrupt
            return settle(record, now_s)

        monkeypatch.setattr(records, "_settle", interrupted)
        with pytest.raises(KeyboardInterrupt):
            handle.close()
        assert isinstance(other.expect(Grant), Grant)
        assert told == [("mine", "room")]

    def test_tensors_that_somebody_keeps_are_named_in_the_refusal(self, worker, other, file):
        state = worker.state_dict("mine", source=file)
        answer = other.load("theirs", file, timeout_s=0.5)
        assert isinstance(answer, Fail) and answer.cause.code == "budget_exceeded"
        (holder,) = [holder for holder in answer.cause.holders if holder.key == "mine"]
        assert [lease.asked for lease in holder.leases] == ["room"]
        del state
        assert isinstance(other.load("theirs", file), Grant)

    def test_an_idle_module_goes_when_the_last_tensor_does(self, worker, other, file, told):
        with worker.use("mine", skeleton=wide, source=file):
            pass
        state = worker.state_dict("mine", source=file)
        asks(other, "theirs", file)
        wait_until(lambda: worker._client.leases._mappings._mappings[_only(worker)].watched)
        worker.flush()
        assert told == []
        del state
        assert isinstance(other.expect(Grant), Grant)
        assert told == [("mine", "room")]

    def test_a_module_stays_if_who_waited_for_its_room_has_given_up(
        self, worker, other, file, told
    ):
        handle = worker.load("mine", skeleton=wide, source=file)
        assert isinstance(other.load("theirs", file, timeout_s=0.2), Fail)
        for _ in range(2):  # has both REVOKEs read, then done
            worker.flush()
        assert worker._table._records._current["mine"].going is None
        handle.close()
        worker.flush()
        assert told == []
        assert other_answer(other, worker) == ""

    def test_a_module_that_somebody_else_has_stays(self, worker, other, file, told):
        """A name bound by `as` is enough. Letting go of it would free nothing."""
        with worker.use("mine", skeleton=wide, source=file) as module:
            pass
        assert isinstance(other.load("theirs", file, timeout_s=0.2), Fail)
        asks(other, "theirs", file)
        wait_until(lambda: worker._table._records._current["mine"].module.module is None)
        for _ in range(3):
            with worker.use("mine", skeleton=wide, source=file) as again:
                assert again is module
            worker.flush()
        assert told == []
        del module, again
        assert isinstance(other.expect(Grant), Grant)
        assert told == [("mine", "room")]

    def test_while_somebody_else_has_a_module_its_process_does_not_say_that_it_is_idle(
        self, coordinator, worker, other, file, told
    ):
        with worker.use("mine", skeleton=wide, source=file) as module:
            pass
        peer = Peer(coordinator.socket, "peer")
        gen, lease = _lease(peer.load("mine", file))
        asks(other, "theirs", file)
        peer.expect(Revoke)
        peer.send(Ack(gen, lease, "idle", idle=True))
        wait_until(lambda: other_answer(peer, worker) == "idle")
        worker.flush()
        assert told == []
        del module  # which tells nobody, and it is not used again
        assert peer.expect(Revoke).asked == "room"
        peer.send(Release(gen, lease))
        assert isinstance(other.expect(Grant), Grant)
        assert told == [("mine", "room")]

    def test_a_request_that_comes_before_the_answer_is_sent_is_not_lost(
        self, coordinator, worker, other, file, told, monkeypatch
    ):
        """The last to say that it is idle is asked for the room at once."""
        with worker.use("mine", skeleton=wide, source=file):
            pass
        peer = Peer(coordinator.socket, "peer")
        gen, lease = _lease(peer.load("mine", file))
        connection, mappings = worker._table.client._connection, leased(worker)
        post = connection.post

        def post_slowly(message, *rest) -> None:
            post(message, *rest)
            if getattr(message, "idle", False):
                wait_until(lambda: mappings.asked(gen) == "room")

        monkeypatch.setattr(connection, "post", post_slowly)
        asks(other, "theirs", file)
        peer.expect(Revoke)
        peer.send(Ack(gen, lease, "idle", idle=True))
        assert peer.expect(Revoke).asked == "room"
        peer.send(Release(gen, lease))
        assert isinstance(other.expect(Grant), Grant)
        assert told == [("mine", "room")]

    def test_two_workers_of_a_process_let_go_together(self, coordinator, worker, other, file, told):
        second = gpu_worker.attach(
            coordinator.socket, on_evict=lambda key, generation, cause: told.append((key, cause))
        )
        first = worker.load("mine", skeleton=wide, source=file)
        held = second.load("mine", skeleton=wide, source=file)
        asks(other, "theirs", file)
        wait_until(lambda: worker._table._records._current["mine"].watched)
        first.close()
        worker.flush()
        assert told == [], "the other worker still uses the bytes"
        held.close()
        assert isinstance(other.expect(Grant), Grant)
        assert told == [("mine", "room")] * 2
        second.shutdown()

    def test_an_idle_module_stays_while_its_process_keeps_the_bytes(
        self, coordinator, worker, other, file, told
    ):
        """Evicting it would free nothing. It goes once the last other use has ended."""
        state = worker.state_dict("mine", source=file)
        with worker.use("mine", skeleton=wide, source=file):
            pass
        second = gpu_worker.attach(
            coordinator.socket, on_evict=lambda key, generation, cause: told.append((key, cause))
        )
        held = second.load("mine", skeleton=wide, source=file)
        assert isinstance(other.load("theirs", file, timeout_s=0.2), Fail)
        asks(other, "theirs", file)
        del state
        worker.flush()
        assert told == []
        assert worker.load("mine", skeleton=wide, source=file).generation == held.generation
        held.close()
        assert isinstance(other.expect(Grant), Grant)
        assert told == [("mine", "room")] * 2
        second.shutdown()

    def test_of_several_processes_none_lets_go_while_one_is_at_work(
        self, coordinator, worker, other, file, told
    ):
        with worker.use("mine", skeleton=wide, source=file):
            pass
        busy = Peer(coordinator.socket, "busy")
        gen, lease = _lease(busy.load("mine", file))
        asks(other, "theirs", file)
        asked = busy.expect(Revoke)
        assert (asked.gen, asked.lease, asked.asked) == (gen, lease, "idle")
        busy.send(Ack(gen, lease, "idle"))
        watcher = Peer(coordinator.socket, "watcher", role="operator")
        wait_until(lambda: [ls.asked for ls in watcher.generation("mine").leases] == ["idle"] * 2)
        worker.flush()
        with worker.use("mine", skeleton=wide, source=file) as module:
            assert float(module.weight.detach().sum()) == WIDTH * WIDTH
        del module
        assert told == []
        busy.send(Ack(gen, lease, "idle", idle=True))
        assert busy.expect(Revoke).asked == "room"
        wait_until(lambda: told == [("mine", "room")])
        busy.send(Release(gen, lease))
        assert isinstance(other.expect(Grant), Grant)

    def test_a_busy_module_says_once_when_it_is_idle(self, coordinator, worker, other, file, told):
        handle = worker.load("mine", skeleton=wide, source=file)
        busy = Peer(coordinator.socket, "busy")
        gen, lease = _lease(busy.load("mine", file))
        asks(other, "theirs", file)
        busy.expect(Revoke)
        wait_until(lambda: worker._table._records._current["mine"].watched)
        handle.close()
        wait_until(lambda: not worker._table._records._current["mine"].watched)
        with worker.use("mine", skeleton=wide, source=file):
            assert not worker._table._records._current["mine"].watched
        busy.send(Ack(gen, lease, "idle", idle=True))
        assert busy.expect(Revoke).asked == "room"
        busy.send(Release(gen, lease))
        assert isinstance(other.expect(Grant), Grant)
        assert told == [("mine", "room")]

    def test_a_worker_that_asks_again_lets_the_other_go_first(self, worker, other, file, told):
        """It would else take its lease anew for ever, and the other would never get its room."""
        stop = threading.Event()

        begun = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                with worker.use("mine", skeleton=wide, source=file):
                    begun.set()

        serving = threading.Thread(target=serve)
        serving.start()
        assert begun.wait(WAIT_S)
        try:
            for _ in range(5):
                granted = other.load("theirs", file)
                assert isinstance(granted, Grant), granted
                other.send(Release(granted.gen, granted.rid))
        finally:
            stop.set()
            serving.join()
        assert set(told) == {("mine", "room")}


class TestGenerations:
    @pytest.fixture
    def coordinator(self, tmp_path):
        with running(str(tmp_path / "s"), "--ram-budget", "16MiB") as started:
            yield started

    def test_a_newer_file_loaded_elsewhere_is_noticed_here(self, worker, other, file, told):
        with worker.use("mine", skeleton=wide, source=file):
            pass
        save_file({"weight": torch.full((WIDTH, WIDTH), 2.0)}, f"{file}.new")
        other.send(Release(*_lease(other.load("mine", f"{file}.new"))))
        wait_until(lambda: told == [("mine", "invalidated")])

    def test_a_module_that_left_its_weights_is_invalidated_too(self, worker, other, file, told):
        """`half()` makes others, and nothing of the map is used any more."""
        with worker.use("mine", skeleton=wide, source=file) as module:
            module.half()
        del module
        worker.flush()
        other.send(Invalidate(other.next_rid(), "mine", WAIT_S))
        assert other.expect(Done).keys == ("mine",)
        wait_until(lambda: told == [("mine", "invalidated")])

    def test_an_invalidated_module_serves_its_holders_and_no_other(self, worker, other, told):
        """S10."""
        held = worker.load("mine", skeleton=wide, build=wide_weights(1.0))
        assert worker.invalidate("mine") is True
        generation = other.generation("mine")
        assert (generation.state, len(generation.leases)) == ("retired", 1)
        with held as module:
            assert float(module.weight.detach()[0, 0]) == 1.0
        assert told == []
        held.close()
        with worker.use("mine", skeleton=wide, build=wide_weights(2.0)) as module:
            assert float(module.weight.detach()[0, 0]) == 2.0
        assert told == [("mine", "invalidated")]
        assert worker.invalidate("nothing") is False


class TestPrefetch:
    def test_it_leaves_the_weights_to_whoever_comes(self, worker, other, file):
        worker.prefetch("mine", source=file)
        wait_until(lambda: other.generation("mine") and other.generation("mine").state == "ready")
        wait_until(lambda: other.generation("mine").leases == ())
        with worker.use("mine", skeleton=wide, source=file):
            assert len(other.generation("mine").leases) == 1

    def test_it_takes_nothing_from_anybody(self, worker, other, file, told):
        with worker.use("held", skeleton=wide, source=file):
            pass
        worker.prefetch("mine", source=file)
        wait_until(lambda: other.generation("mine") is not None)
        with worker.use("held", skeleton=wide, source=file):
            pass
        assert told == [] and other.generation("mine").state == "open"

    def test_it_ends_with_its_worker(self, coordinator, other, file):
        holder = gpu_worker.attach(coordinator.socket)
        state = holder.state_dict("held", source=file)
        holder.prefetch("mine", source=file)
        wait_until(lambda: other.generation("mine") is not None)
        del state
        holder.shutdown()
        wait_until(lambda: [s.name for s in other.status().sessions] == ["other"])

    def test_one_that_fails_is_logged(self, worker, file, caplog):
        worker.prefetch("mine", source=__file__)
        wait_until(lambda: "'mine' was not prefetched" in caplog.text)

    def test_a_closed_worker_has_none(self, worker, file):
        worker.shutdown()
        with pytest.raises(WorkerClosed):
            worker.prefetch("mine", source=file)

    def test_however_many_there_are_loads_go_on(self, worker, other, file):
        state = worker.state_dict("held", source=file)
        for number in range(100):
            worker.prefetch(f"mine {number}", source=file)
        worker.flush()
        assert torch.equal(worker.state_dict("held", source=file)["weight"], state["weight"])


class TestPrivate:
    def test_its_memory_is_counted_until_the_module_is_gone(self, worker, other):
        def build() -> torch.nn.Linear:
            return wide().requires_grad_(False)

        with worker.use("mine", skeleton=wide, build=build, private=True) as module:
            assert other.status().pools[0].private_bytes == WIDTH * WIDTH * 4
            assert not module.training
        kept = module
        worker.evict("mine")
        worker.flush()
        assert other.status().pools[0].private_bytes == WIDTH * WIDTH * 4, "somebody keeps it"
        del kept, module
        worker.flush()
        assert other.status().pools[0].in_use_bytes == 0

    def test_it_makes_room_when_it_is_idle(self, worker, other, file, told):
        with worker.use("mine", skeleton=wide, build=wide, private=True):
            pass
        with worker.use("more", skeleton=wide, build=wide, private=True):
            pass
        assert isinstance(other.load("theirs", file), Grant)
        assert set(told) <= {("mine", "room"), ("more", "room")} and told

    def test_what_was_asked_before_its_record_was_there_is_not_forgotten(
        self, worker, other, file, told, monkeypatch
    ):
        """GRANT and REVOKE arrive together if somebody waits behind the charge."""
        charge = worker._client.charge

        def charge_and_be_asked(made, *rest) -> None:
            charge(made, *rest)
            asks(other, "theirs", file)
            wait_until(lambda: made.asked == "room")

        with worker.use("first", skeleton=wide, build=wide, private=True):
            pass
        monkeypatch.setattr(worker._client, "charge", charge_and_be_asked)
        with worker.use("mine", skeleton=wide, build=wide, private=True):
            pass
        assert isinstance(other.expect(Grant), Grant)
        assert ("mine", "room") in told or ("first", "room") in told

    def test_an_interrupted_charge_is_given_back(self, worker, other, monkeypatch):
        charge = worker._client.charge

        def interrupted(*facts) -> None:
            charge(*facts)
            raise KeyboardInterrupt

        monkeypatch.setattr(worker._client, "charge", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.load("mine", skeleton=wide, build=wide, private=True)
        worker.flush()
        assert other.status().pools[0].in_use_bytes == 0

    def test_invalidate_reaches_those_of_this_worker(self, worker, told):
        with worker.use("mine", skeleton=wide, build=wide, private=True):
            pass
        assert worker.invalidate("mine") is False, "nobody shares any"
        assert told == [("mine", "invalidated")]

    def test_without_room_it_is_refused_and_leaves_nothing(self, worker, other, file):
        state = worker.state_dict("held", source=file)
        with pytest.raises(BudgetExceeded):
            worker.load(
                "mine",
                skeleton=wide,
                build=lambda: torch.nn.Linear(2 * WIDTH, WIDTH),
                private=True,
                timeout=0.5,
            )
        del state
        worker.flush()
        assert other.status().pools[0].private_bytes == 0

    def test_only_what_is_built_here_can_be_private(self, worker, file):
        with pytest.raises(ArgumentRefused, match="build="):
            worker.load("mine", skeleton=wide, source=file, private=True)
        with pytest.raises(ArgumentRefused, match="module"):
            worker.load("mine", skeleton=wide, build=wide_weights(1.0), private=True)


class TestIdle:
    def test_what_nobody_used_for_a_while_is_evicted(self, coordinator, other, file, told):
        worker = gpu_worker.attach(
            coordinator.socket,
            idle_timeout=0.05,
            on_evict=lambda key, generation, cause: told.append((key, cause)),
        )
        with worker.use("mine", skeleton=wide, source=file):
            pass
        wait_until(lambda: told == [("mine", "unused")])
        wait_until(lambda: other.generation("mine").leases == ())
        worker.shutdown()

    def test_what_is_in_use_stays(self, coordinator, file, told, monkeypatch):
        worker = gpu_worker.attach(
            coordinator.socket,
            idle_timeout=0.01,
            on_evict=lambda key, generation, cause: told.append((key, cause)),
        )
        swept = threading.Event()
        with worker.use("mine", skeleton=wide, source=file):
            expire = worker._table._records.expire

            def sweep(before_s: float):
                swept.set()
                return expire(before_s)

            monkeypatch.setattr(worker._table._records, "expire", sweep)
            assert swept.wait(WAIT_S)
            assert told == []
        wait_until(lambda: told == [("mine", "unused")])
        worker.shutdown()


class TestCallbacks:
    def test_hits_misses_and_evictions_are_told_once_each(self, coordinator, file):
        """S26: whatever the cause."""
        told: list[tuple[str, ...]] = []
        worker = gpu_worker.attach(
            coordinator.socket,
            on_hit=lambda key, generation: told.append(("hit", key, generation)),
            on_miss=lambda key: told.append(("miss", key)),
            on_evict=lambda key, generation, cause: told.append((cause, key, generation)),
        )
        handle = worker.load("mine", skeleton=wide, source=file)
        gen = handle.generation
        worker.load("mine", skeleton=wide, source=file).close()
        assert worker.evict("mine") is False
        handle.close()
        handle.close()
        assert told == [("miss", "mine"), ("hit", "mine", gen), ("evicted", "mine", gen)]
        with worker.use("mine", skeleton=wide, source=file):
            pass
        worker.shutdown()
        assert told[3:] == [("miss", "mine"), ("shutdown", "mine", gen)]

    def test_one_that_raises_keeps_nothing_from_going(self, coordinator, file, other, monkeypatch):
        """S22. A log that kept the traceback would keep its frames, and so the module."""
        said: list[str] = []

        def log(*facts: object, exc_info: Exception) -> None:
            said.append(str(exc_info))

        monkeypatch.setattr("gpu_worker.callbacks.logger.error", log)

        def refuse(*_: object) -> None:
            raise RuntimeError("a callback of the user's")

        worker = gpu_worker.attach(
            coordinator.socket, on_evict=refuse, on_hit=refuse, on_miss=refuse
        )
        for _ in range(2):
            with worker.use("mine", skeleton=wide, source=file):
                pass
        assert worker.shutdown() == ()
        assert len(said) == 3
        assert other.generation("mine").leases == ()

    def test_what_is_no_function_is_refused(self, coordinator):
        with pytest.raises(ArgumentRefused, match="on_evict"):
            gpu_worker.attach(coordinator.socket, on_evict=5)
        with pytest.raises(ArgumentRefused, match="idle_timeout"):
            gpu_worker.attach(coordinator.socket, idle_timeout=-1)


def leased(worker):
    """The mappings of a worker's session."""
    return worker._table.client.leases._mappings


def other_answer(peer: Peer, worker) -> str:
    """What the worker's lease on "mine" was asked for, by the status."""
    (asked,) = {lease.asked for lease in peer.generation("mine").leases}
    return asked


def _only(worker) -> str:
    """The one generation that a worker keeps a record of."""
    (record,) = worker._table._records._current.values()
    return record.generation


def _lease(grant) -> tuple[str, int]:
    assert isinstance(grant, Grant), grant
    return grant.gen, grant.rid
