"""Modules that come to a device when they are locked, stay there, and make room for others."""

# An attribute of a module is anything to mypy.
# mypy: disable-error-code="operator"

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch

import gpu_worker
from gpu_worker.device import device_named
from gpu_worker.load_lock import load_lock
from gpu_worker.sim_device import Faults, tell
from shm_store.errors import (
    ArgumentRefused,
    BudgetExceeded,
    DeviceUnavailable,
    LoadTimeout,
    WorkerClosed,
)
from shm_store.wire import Charge, Done, Evict, Grant, Limit, Release
from tests.gpu_worker.on_device import MIB, charged, matrix, new_device, skeleton, taken
from tests.gpu_worker.served import WAIT_S, wait_until

SIDE = 512
AROUND_MANIFEST_BYTES = 64 * 1024
"""What the kernel maps around a page that is read, as the one with the manifest was."""

MODEL_BYTES = SIDE * SIDE * 4 + 4096
"""What `matrix(SIDE)` takes on a device: its bias has a page of its own."""


@pytest.fixture
def device() -> str:
    return new_device()


@pytest.fixture
def worker(served, device) -> Iterator[gpu_worker.Worker]:
    """Room for two of `matrix(SIDE)`, and a half."""
    made = gpu_worker.attach(served.socket, device=device, vram_budget=5 * MIB // 2)
    yield made
    made.shutdown()


def load(
    worker: gpu_worker.Worker, key: str, value: float = 1.0, **facts
) -> gpu_worker.ModelHandle:
    return worker.load(key, skeleton=skeleton(SIDE), build=matrix(SIDE, value), **facts)


def keys(worker: gpu_worker.Worker) -> set[str]:
    return {resident.key for resident in worker.resident()}


def on_host(operator, key: str):
    """The generation of a key on the host."""
    (found,) = [g for g in operator.status().generations if g.key == key and g.pool == "ram"]
    return found


def resident_bytes(address: int) -> int:
    """What of the map at an address has pages in this process."""
    with open("/proc/self/smaps") as smaps:
        lines = iter(smaps)
        for line in lines:
            bounds = line.split()[0].split("-")
            if len(bounds) == 2 and int(bounds[0], 16) <= address < int(bounds[1], 16):
                rss = next(line for line in lines if line.startswith("Rss:"))
                return int(rss.split()[1]) * 1024
    raise AssertionError("nothing is mapped there")


def agree(worker, operator, device) -> int:
    """Return what is on the device, of which books and kernel say the same."""
    worker.flush()
    gc.collect()
    worker.flush()
    assert charged(operator, device) == taken(device)
    return taken(device)


class TestLock:
    def test_a_locked_module_is_there_and_stays_when_it_is_unlocked(self, worker, operator, device):
        handle = load(worker, "lock", 2.0)
        home = None
        with handle as module:
            there = module.weight.data_ptr()
            assert (module(torch.ones(1, SIDE)) == 2.0 * SIDE + 2.0).all()
            assert agree(worker, operator, device) == MODEL_BYTES
        assert module.weight.data_ptr() == there and keys(worker) == {"lock"}
        with handle as module:
            assert module.weight.data_ptr() == there, "nothing was moved again"
        assert worker.offload("lock") and keys(worker) == set()
        home = module.weight.data_ptr()
        assert home != there
        assert agree(worker, operator, device) == 0
        with handle as module:
            assert (module(torch.ones(1, SIDE)) == 2.0 * SIDE + 2.0).all()
        assert worker.offload("lock") and module.weight.data_ptr() == home, "the same host bytes"

    def test_what_is_locked_is_not_taken_away(self, worker, device):
        with load(worker, "held"):
            assert not worker.offload("held")
            assert worker.offload_all() == ("held",)
            assert worker.resident()[0].locked
        assert worker.offload("held") and not worker.offload("nothing")

    def test_parameters_stay_the_objects_they_are(self, worker):
        with load(worker, "objects") as module:
            weight = module.weight
        worker.offload("objects")
        assert module.weight is weight

    def test_several_threads_bring_it_once(self, worker, device):
        handle = load(worker, "many")
        slow = Faults(slow_s=WAIT_S)
        tell(device, slow)
        places = []

        def lock() -> None:
            with handle as module:
                places.append(module.weight.data_ptr())

        threads = [threading.Thread(target=lock) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert slow.begun.wait(WAIT_S)
        slow.go_on.set()
        for thread in threads:
            thread.join(WAIT_S)
        assert len(places) == 3 and len(set(places)) == 1
        (model,) = [model for model in worker._table.counted() if model.key == "many"]
        assert model.moved_bytes == SIDE * SIDE * 4 + SIDE * 4

    def test_a_module_without_tensors_needs_no_room(self, worker, operator, device):
        with worker.use("none", skeleton=torch.nn.ReLU, build=dict) as module:
            assert (module(torch.ones(2)) == 1).all() and worker.resident() == ()
        assert agree(worker, operator, device) == 0

    def test_one_model_may_stay_on_the_host(self, worker, operator, device):
        with load(worker, "host", device="cpu"):
            assert worker.resident() == ()
        with pytest.raises(ArgumentRefused, match="loaded for device 'cpu'"):
            load(worker, "host", device=device)
        with pytest.raises(ArgumentRefused, match="is not the worker's"):
            load(worker, "host", device=new_device())
        assert agree(worker, operator, device) == 0

    def test_private_weights_come_too(self, worker, operator, device):
        with load(worker, "own", 3.0, private=True) as module:
            assert (module(torch.ones(1, SIDE)) == 3.0 * SIDE + 3.0).all()
            assert agree(worker, operator, device) == MODEL_BYTES


class TestSource:
    """Where an upload has its bytes from."""

    def test_no_weights_are_read_through_the_host_map(self, worker):
        handle = load(worker, "untouched", 2.0)
        module = handle.__enter__()
        handle.__exit__(None, None, None)
        worker.offload("untouched")
        address = module.weight.data_ptr()
        assert resident_bytes(address) <= AROUND_MANIFEST_BYTES
        with handle:
            assert (module(torch.ones(1, SIDE)) == 2.0 * SIDE + 2.0).all()
        worker.offload("untouched")
        assert resident_bytes(address) <= AROUND_MANIFEST_BYTES

    def test_what_was_edited_on_the_host_is_what_comes(self, worker):
        """Also through `.data`, which torch does not count: the kernel does."""
        handle = load(worker, "edited", 2.0)
        with handle as module:
            pass
        worker.offload("edited")
        module.weight.data.mul_(3.0)
        with handle:
            assert (module(torch.ones(1, SIDE)) == 6.0 * SIDE + 2.0).all()


class TestRoom:
    def test_an_idle_one_leaves_for_one_that_is_locked(self, worker, operator, device):
        handles = [load(worker, f"room-{number}") for number in range(3)]
        for number, handle in enumerate(handles):
            with handle:
                assert f"room-{number}" in keys(worker)
                assert taken(device) <= 5 * MIB // 2
        assert len(keys(worker)) == 2
        assert agree(worker, operator, device) == 2 * MODEL_BYTES

    def test_the_smallest_that_suffices_leaves(self, worker):
        small = worker.load("small", skeleton=skeleton(128), build=matrix(128))
        large = load(worker, "large")
        with large, small:
            pass
        with worker.use("middle", skeleton=skeleton(384), build=matrix(384)):
            assert keys(worker) == {"large", "small", "middle"}
        with load(worker, "other"):
            assert keys(worker) == {"large", "small", "other"}, "the small one alone is too little"

    def test_handles_that_were_not_entered_keep_their_records(self, worker):
        """S8: a claim is not a lock; what it is on may leave the device, and is not evicted."""
        x, y = load(worker, "x", 1.0), load(worker, "y", 2.0)
        with load(worker, "z"), load(worker, "z2"):
            pass
        for handle, value in ((x, 1.0), (y, 2.0)):
            with handle as module:
                assert (module(torch.ones(1, SIDE)) == value * SIDE + value).all()

    def test_what_is_in_use_leaves_when_it_is_unlocked(self, worker):
        first, second, third = (load(worker, key) for key in ("first", "second", "third"))
        entered, leave, done = threading.Event(), threading.Event(), threading.Event()

        def use_both() -> None:
            with first, second:
                entered.set()
                assert leave.wait(WAIT_S)

        def use_third() -> None:
            with third:
                done.set()

        threads = [threading.Thread(target=use_both), threading.Thread(target=use_third)]
        threads[0].start()
        assert entered.wait(WAIT_S)
        threads[1].start()
        wait_until(
            lambda: any(
                charge.asked == "room" for charge in worker._client.leases._charges.values()
            )
        )
        assert not done.is_set()
        leave.set()
        for thread in threads:
            thread.join(WAIT_S)
        assert done.is_set() and "third" in keys(worker)

    def test_without_room_in_time_it_says_who_has_it(self, worker, operator, device):
        with load(worker, "a"), load(worker, "b"):
            handle = load(worker, "c", timeout=0.2)
            with pytest.raises(BudgetExceeded, match=r"vram:sim-.*held by") as refused, handle:
                pass
            assert {holder.key for holder in refused.value.holders} == {"a", "b"}
        with handle:  # as before
            pass

    def test_what_could_never_fit_is_refused_at_once(self, worker):
        handle = worker.load("huge", skeleton=skeleton(1024), build=matrix(1024))
        with pytest.raises(BudgetExceeded, match=r"alone takes 4\.0 MiB"), handle:
            pass

    def test_a_tensor_that_somebody_keeps_keeps_its_memory_charged(self, worker, operator, device):
        with load(worker, "kept") as module:
            kept = module.weight.detach()
        assert worker.offload("kept")
        assert agree(worker, operator, device) == MODEL_BYTES
        assert (kept == 1.0).all()
        del kept
        assert agree(worker, operator, device) == 0

    def test_it_leaves_with_its_record(self, worker, operator, device):
        handle = load(worker, "gone")
        with handle:
            assert not worker.evict("gone")
        assert agree(worker, operator, device) == MODEL_BYTES
        handle.close()
        assert agree(worker, operator, device) == 0

    def test_a_lower_limit_takes_what_is_idle(self, worker, operator, device):
        with load(worker, "idle"):
            pass
        pool = f"vram:sim-{device.partition(':')[2]}"
        operator.send(Limit(operator.next_rid(), pool, 1))
        operator.expect(Done)
        wait_until(lambda: not worker.resident())
        assert agree(worker, operator, device) == 0


def looped() -> torch.nn.Module:
    """A module in a cycle. An idle process would not collect it by itself."""
    made = skeleton(SIDE)()
    made.__dict__["itself"] = made
    return made


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
class TestCycles:
    """Who lacks room gets what only a cycle keeps."""

    def test_an_evicted_module_in_a_cycle_makes_room(self, worker, device):
        for key in ("a", "b"):
            with worker.use(key, skeleton=looped, build=matrix(SIDE)):
                pass
            assert worker.evict(key)
        assert taken(device) == 2 * MODEL_BYTES
        with load(worker, "c", timeout=WAIT_S):
            assert taken(device) <= 2 * MODEL_BYTES

    def test_so_does_one_that_is_let_go_of_while_somebody_waits(self, worker, operator, device):
        kept = []
        for key in ("a", "b"):
            with worker.use(key, skeleton=looped, build=matrix(SIDE)) as module:
                kept.append(module)
            assert worker.evict(key)
        del module
        rid = operator.next_rid()
        pool = f"vram:sim-{device.partition(':')[2]}"
        operator.send(Charge(rid, pool, "theirs", MODEL_BYTES, WAIT_S))
        wait_until(lambda: all(charge.collected for charge in charges(worker)))
        kept.clear()
        operator.send(Release(operator.expect(Grant).gen, rid))

    def test_a_tensor_in_a_cycle_that_a_module_has_left_behind_makes_room(self, worker, device):
        handles = [load(worker, key) for key in ("a", "b")]
        for handle in handles:
            with handle as module:
                cycle: list[object] = [module.weight.detach()]
                cycle.append(cycle)
        del cycle
        assert worker.offload_all() == ()
        assert taken(device) == 2 * MODEL_BYTES
        with load(worker, "c", timeout=WAIT_S):
            assert taken(device) <= 2 * MODEL_BYTES

    def test_one_whose_worker_is_gone_makes_room(self, served, device):
        first = gpu_worker.attach(served.socket, device=device, vram_budget=3 * MIB // 2)
        with first.use("a", skeleton=looped, build=matrix(SIDE)):
            pass
        del first
        second = gpu_worker.attach(served.socket, device=device)
        with load(second, "b", timeout=WAIT_S):
            assert taken(device) == MODEL_BYTES
        second.shutdown()


def charges(worker):
    """What is charged for this process."""
    return [*worker._client.leases._charges.values()]


class TestByHand:
    def test_all_leave_but_those_that_are_kept(self, worker):
        with load(worker, "a"), load(worker, "b"):
            pass
        assert worker.offload_all(keep=["a"]) == () and keys(worker) == {"a"}
        with pytest.raises(ArgumentRefused, match="several keys"):
            worker.offload_all(keep="a")

    def test_a_session_gives_the_device_back(self, worker, operator, device):
        with pytest.raises(ZeroDivisionError), worker.session(), load(worker, "a"):
            raise ZeroDivisionError
        assert agree(worker, operator, device) == 0

    def test_a_reservation_keeps_models_away(self, worker, operator, device):
        with load(worker, "a"), load(worker, "b"):
            pass
        with worker.reserve("1MiB") as reserved:
            assert reserved.size_bytes == MIB and len(keys(worker)) == 1
            handle = load(worker, "c")
            with handle:
                assert keys(worker) == {"c"}
            with pytest.raises(BudgetExceeded, match="has reserved"):
                worker.reserve("2MiB")
        with handle, load(worker, "b"):
            pass

    def test_room_that_was_made_is_not_kept(self, worker, operator, device):
        with load(worker, "a"), load(worker, "b"):
            pass
        worker.make_room("2MiB")
        assert agree(worker, operator, device) == 0
        with pytest.raises(BudgetExceeded):
            worker.make_room("3MiB")

    def test_no_budget_is_above_what_the_device_has(self, served, monkeypatch):
        """Else nobody would be asked for room before the device itself refuses."""
        monkeypatch.setenv("WEIGHT_CACHE_SIM_BYTES", "2.5MiB")
        with gpu_worker.attach(served.socket, device=new_device(), vram_budget="20GiB") as worker:
            for key in "abc":
                with load(worker, key) as module:
                    assert (module(torch.ones(1, SIDE)) == SIDE + 1.0).all()
            assert keys(worker) == {"b", "c"}
            with pytest.raises(BudgetExceeded):
                worker.reserve("3MiB")

    def test_a_budget_is_not_cut_to_what_others_have_left(self, served, operator, monkeypatch):
        """As a GPU says it: who attaches second finds the models of the first on it."""
        device = new_device()
        monkeypatch.setattr(device_named(device), "total_bytes", lambda: MIB)
        with gpu_worker.attach(served.socket, device=device, vram_budget="3MiB"):
            name = f"vram:sim-{device.partition(':')[2]}"
            (pool,) = (one for one in operator.status().pools if one.name == name)
            assert pool.limit_bytes == 3 * MIB

    def test_what_all_have_reserved_is_said(self, served):
        device = new_device()
        one, other = (
            gpu_worker.attach(served.socket, device=device, vram_budget="3MiB") for _ in range(2)
        )
        refused = pytest.raises(BudgetExceeded, match=r"2\.0 MiB is what its own process has")
        with one.reserve("1MiB"), other.reserve("1MiB"), refused:
            one.reserve("1.5MiB")
        one.shutdown(), other.shutdown()

    def test_what_is_there_in_part_is_said_once(self, served, caplog):
        with gpu_worker.attach(served.socket, device=new_device(), vram_budget="1.5MiB") as worker:
            handle = worker.load(
                "halves",
                skeleton=lambda: torch.nn.Sequential(skeleton(SIDE)(), skeleton(SIDE)()),
                build=lambda: torch.nn.Sequential(matrix(SIDE)(), matrix(SIDE)()),
            )
            for _ in range(2):
                with handle:
                    pass
                worker.offload("halves")
        said = [
            record.getMessage() for record in caplog.records if "in part" in record.getMessage()
        ]
        assert len(said) == 1 and "'halves' is on sim:" in said[0]

    def test_working_memory_is_kept_free_as_long_as_the_worker_is_there(self, served, operator):
        device = new_device()
        worker = gpu_worker.attach(
            served.socket, device=device, vram_budget="2MiB", working_memory="1MiB"
        )
        assert charged(operator, device) == MIB
        handle = load(worker, "a")
        with (
            pytest.raises(BudgetExceeded, match=r"'a': module .* room on sim:\d+ for 1\.0 MiB"),
            handle,
        ):
            pass
        with pytest.raises(BudgetExceeded, match=r"1\.0 MiB is what its own process"):
            worker.reserve("1.5MiB")
        worker.shutdown()
        wait_until(lambda: charged(operator, device) == 0)
        with pytest.raises(WorkerClosed):
            worker.reserve(1)

    def test_a_device_without_memory_of_its_own_has_none_to_give(self, served):
        for what in ({"vram_budget": 1}, {"working_memory": "1GiB"}):
            with pytest.raises(ArgumentRefused, match="no memory of its own"):
                gpu_worker.attach(served.socket, **what)
        with gpu_worker.attach(served.socket) as worker:
            with pytest.raises(ArgumentRefused, match="no memory of its own"):
                worker.reserve(1)
            assert worker.offload_all() == () and worker.resident() == ()


class TestHostGivenUp:
    """`keep_host=False`: the device has the only copy of this process."""

    def test_the_host_has_its_room_back_while_it_is_there(self, worker, operator, device):
        with load(worker, "given", 2.0, keep_host=False) as module:
            worker.flush()
            assert not on_host(operator, "given").leases
            assert (module(torch.ones(1, SIDE)) == 2.0 * SIDE + 2.0).all()
            assert agree(worker, operator, device) == MODEL_BYTES
        operator.send(Evict(operator.next_rid(), "given"))
        operator.expect(Done)
        with load(worker, "given", 9.0, keep_host=False) as module:
            assert (module(torch.ones(1, SIDE)) == 2.0 * SIDE + 2.0).all(), "asked nobody"

    def test_the_next_lock_after_it_left_asks_again(self, worker, operator, device):
        handle = load(worker, "again", 3.0, keep_host=False)
        with handle as module:
            pass
        worker.flush()
        assert worker.offload("again") and module.weight.numel() == 0
        assert agree(worker, operator, device) == 0
        for _ in range(2):
            with handle as module:
                assert (module(torch.ones(1, SIDE)) == 3.0 * SIDE + 3.0).all()
                worker.flush()
                assert not on_host(operator, "again").leases
            worker.offload("again")

    def test_what_is_evicted_meanwhile_is_made_anew(self, worker, operator):
        built = []

        def build() -> torch.nn.Module:
            built.append(1)
            return matrix(SIDE, float(len(built)))()

        handle = worker.load("anew", skeleton=skeleton(SIDE), build=build, keep_host=False)
        with handle as module:
            assert module.weight[0, 0] == 1.0
        worker.offload("anew")
        worker.flush()
        first = on_host(operator, "anew").generation
        operator.send(Evict(operator.next_rid(), "anew"))
        operator.expect(Done)
        with handle as module:
            assert module.weight[0, 0] == 2.0 and len(built) == 2
        assert first != on_host(operator, "anew").generation == worker.resident()[0].generation

    def test_an_invalidate_reaches_it(self, worker, operator, device):
        """Though its process leases nothing on the host."""
        with load(worker, "old", 1.0, keep_host=False):
            pass
        worker.flush()
        assert worker.invalidate("old")
        with load(worker, "old", 2.0, version="2") as module:
            assert (module(torch.ones(1, SIDE)) == 2.0 * SIDE + 2.0).all()
        assert agree(worker, operator, device) == MODEL_BYTES

    def test_it_goes_with_what_nobody_else_has(self, worker, served):
        with pytest.raises(ArgumentRefused, match="keep_host=False goes with"):
            load(worker, "own", private=True, keep_host=False)
        with pytest.raises(ArgumentRefused, match="keep_host=False goes with"):
            load(worker, "host", device="cpu", keep_host=False)

    def test_a_part_keeps_its_host_copy(self, worker, operator):
        deep = lambda: torch.nn.Sequential(*(torch.nn.Linear(SIDE, SIDE) for _ in range(4)))  # noqa: E731
        with worker.use("deep", skeleton=deep, build=deep, keep_host=False) as module:
            said = module(torch.ones(1, SIDE))
            worker.flush()
            assert len(on_host(operator, "deep").leases) == 1
        worker.offload("deep")
        assert torch.equal(module(torch.ones(1, SIDE)), said)


class TestTooLarge:
    def test_it_runs_with_the_part_that_fits_and_follows_the_limit(self, worker, operator, device):
        deep = lambda: torch.nn.Sequential(*(torch.nn.Linear(SIDE, SIDE) for _ in range(4)))  # noqa: E731
        handle = worker.load("deep", skeleton=deep, build=deep)
        pool = f"vram:sim-{device.partition(':')[2]}"
        said = None
        for limit, takes in ((5 * MIB // 2, 2), (7 * MIB // 2, 3), (6 * MIB, 4), (5 * MIB // 2, 2)):
            operator.send(Limit(operator.next_rid(), pool, limit))
            operator.expect(Done)
            wait_until(lambda limit=limit: charged(operator, device) <= limit)
            with handle as module:
                answer = module(torch.ones(1, SIDE))
                assert said is None or torch.equal(answer, said)
                said = answer
                (there,) = worker.resident()
                assert takes * MIB <= there.size_bytes <= limit
                with handle:
                    assert worker.resident() == (there,), "locked again: as it is"
            agree(worker, operator, device)

    def test_who_locks_a_part_while_its_size_is_looked_at_waits_for_that(
        self, worker, operator, device, monkeypatch
    ):
        """It may be about to leave, for a larger part."""
        deep = lambda: torch.nn.Sequential(*(torch.nn.Linear(SIDE, SIDE) for _ in range(4)))  # noqa: E731
        handle = worker.load("deep", skeleton=deep, build=deep)
        with handle as module:
            said = module(torch.ones(1, SIDE))
        looking, go_on = threading.Event(), threading.Event()
        possible_bytes = worker._client.possible_bytes

        def slowly(pool: str) -> int:
            looking.set()
            assert go_on.wait(WAIT_S)
            return possible_bytes(pool) + MIB

        monkeypatch.setattr(worker._client, "possible_bytes", slowly)
        answers = []

        def infer() -> None:
            with handle as module:
                answers.append(module(torch.ones(1, SIDE)))

        threads = [threading.Thread(target=infer) for _ in range(2)]
        threads[0].start()
        assert looking.wait(WAIT_S)
        threads[1].start()
        wait_until(lambda: worker._table.held()[0].locks == 2)
        threads[1].join(0.2)
        assert threads[1].is_alive() and answers == []
        go_on.set()
        for thread in threads:
            thread.join(WAIT_S)
        assert all(torch.equal(answer, said) for answer in answers) and len(answers) == 2


class TestFailure:
    @pytest.mark.parametrize("what", [{"fail_fill": 1}, {"fail_finish": 1}])
    def test_an_upload_that_fails_leaves_all_as_it_was(self, worker, operator, device, what):
        """S32."""
        handle = load(worker, "fails", 2.0)
        tell(device, Faults(**what))
        with pytest.raises(DeviceUnavailable, match="as it was told to") as kept, handle:
            pass
        assert worker.resident() == () and not worker._table._records._locks
        assert agree(worker, operator, device) == 0, "though somebody keeps the error"
        assert kept.value.__traceback__ is not None
        with load_lock.read(0.0):
            pass
        tell(device, Faults())
        with handle as module:
            assert (module(torch.ones(1, SIDE)) == 2.0 * SIDE + 2.0).all()

    def test_a_device_that_is_fragmented_has_no_block(self, worker, operator, device):
        tell(device, Faults(largest_block_bytes=MIB))
        handle = load(worker, "fragmented")
        with pytest.raises(gpu_worker.DeviceOutOfMemory, match="pieces"), handle:
            pass
        assert agree(worker, operator, device) == 0

    def test_memory_that_the_device_does_not_take_back_stays_charged(
        self, worker, operator, device
    ):
        with load(worker, "stuck"):
            pass
        tell(device, Faults(fail_free=1))
        worker.offload("stuck")
        wait_until(lambda: charged(operator, device) == 0)
        assert agree(worker, operator, device) == 0

    def test_a_detached_record_disturbs_nobody_at_its_last_unlock(self, worker, operator, device):
        """S4."""
        old = load(worker, "again", 1.0)
        old.__enter__()
        worker.evict("again")
        new = load(worker, "again", 2.0, version="2")
        with new as module:
            old.__exit__(None, None, None)
            old.close()
            assert (module(torch.ones(1, SIDE)) == 2.0 * SIDE + 2.0).all()
            assert keys(worker) == {"again"}
            assert agree(worker, operator, device) == MODEL_BYTES

    def test_a_construction_that_takes_long_ends_a_wait_in_time(self, worker):
        handle = load(worker, "waits", timeout=0.1)
        with gpu_worker.constructing():
            outcome: list[BaseException] = []

            def lock() -> None:
                try:
                    with handle:
                        pass
                except BaseException as error:
                    outcome.append(error)

            thread = threading.Thread(target=lock)
            thread.start()
            thread.join(WAIT_S)
        assert isinstance(outcome[0], LoadTimeout)
        with handle:
            pass


class TestUser:
    """What users do with a module that is locked, and how they leave it."""

    def test_memory_that_runs_out_in_a_forward_leaves_all_as_it_was(self, worker, operator, device):
        handle = load(worker, "forward")
        with handle as module:
            hook = module.register_forward_pre_hook(_out_of_memory)
        with pytest.raises(torch.OutOfMemoryError), handle as module:
            module(torch.ones(1, SIDE))
        hook.remove()
        assert keys(worker) == {"forward"} and not worker.resident()[0].locked
        assert worker.offload("forward")
        assert agree(worker, operator, device) == 0

    def test_it_may_be_unlocked_by_another_thread(self, worker):
        handle = load(worker, "threads")
        handle.__enter__()
        thread = threading.Thread(target=handle.__exit__, args=(None, None, None))
        thread.start()
        thread.join(WAIT_S)
        assert worker.offload("threads")

    def test_to_while_it_is_locked_is_the_users_own(self, worker, operator, device):
        """What he has made of it stays, is no part of the block, and moves with it next time."""
        handle = load(worker, "to", 2.0)
        with handle as module:
            module.to(torch.float64)
        assert worker.offload("to") and module.weight.dtype is torch.float64
        with handle as module:
            (there,) = worker.resident()
            assert there.size_bytes >= 2 * SIDE * SIDE * 4
            answer = module(torch.ones(1, SIDE, dtype=torch.float64))
            assert (answer == 2.0 * SIDE + 2.0).all()

    def test_one_submodule_in_two_places_comes_once(self, worker):
        def build() -> torch.nn.Module:
            shared = torch.nn.Linear(SIDE, SIDE)
            return torch.nn.Sequential(shared, torch.nn.ReLU(), shared)

        with worker.use("shared", skeleton=build, build=build) as module:
            (there,) = worker.resident()
            assert there.size_bytes == MODEL_BYTES
            assert module[0].weight is module[2].weight

    def test_accelerate_hooks_go_on(self, worker):
        from accelerate.hooks import ModelHook, add_hook_to_module

        calls = []

        class Counts(ModelHook):
            def pre_forward(self, module, *args, **kwargs):
                calls.append(module.weight.data_ptr())
                return args, kwargs

        handle = load(worker, "hooked")
        with handle as module:
            add_hook_to_module(module, Counts())
        worker.offload("hooked")
        with handle as module:
            module(torch.ones(1, SIDE))
            assert calls == [module.weight.data_ptr()]


def _out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("of the user's own")


class TestConstruction:
    """S27: a move and a construction under accelerate's patch never overlap."""

    def test_whoever_builds_is_refused_before_he_waits_for_room(self, worker):
        """He who has it may wait for the construction."""
        handle = load(worker, "c", timeout=WAIT_S)
        with load(worker, "a"), load(worker, "b"), gpu_worker.constructing():
            for refused in (handle.__enter__, lambda: worker.offload("c")):
                with pytest.raises(gpu_worker.ReentryRefused):
                    refused()
        with handle:
            pass

    def test_keep_alive_evicts_meanwhile_and_puts_nothing_on_meta(self, served, device):
        """It moves nothing: who has kept the module by a name has it where it was."""
        from accelerate import init_empty_weights

        told = threading.Event()
        worker = gpu_worker.attach(
            served.socket, device=device, idle_timeout=0.05, on_evict=lambda *_: told.set()
        )
        with gpu_worker.constructing(), init_empty_weights(include_buffers=True):
            pass  # accelerate is imported by now, and the module below idle for less long
        with load(worker, "unused") as module:
            pass
        with gpu_worker.constructing(), init_empty_weights(include_buffers=True):
            assert told.wait(WAIT_S)
            assert not any(parameter.is_meta for parameter in module.parameters())
            assert torch.nn.Linear(3, 3).weight.is_meta
        assert (module(torch.ones(1, SIDE)) == SIDE + 1.0).all()
        worker.shutdown()

    def test_whoever_asks_waits_for_it_and_nothing_is_ever_on_meta(self, worker, operator, device):
        from accelerate import init_empty_weights

        handle = load(worker, "moves")
        with handle:
            pass
        pool = f"vram:sim-{device.partition(':')[2]}"

        def end_session() -> None:
            with worker.session():
                pass

        def ask_for_room() -> None:
            """As another process does. Who is asked is the keeper, which does not wait."""
            rid = operator.next_rid()
            operator.send(Charge(rid, pool, "other", 2 * MIB + MIB // 4, WAIT_S))
            operator.send(Release(operator.expect(Grant).gen, rid))

        offloads = {
            "at the end of a session": end_session,
            "asked for": ask_for_room,
            "by hand": lambda: worker.offload("moves"),
            "all": worker.offload_all,
            "to make room": lambda: worker.make_room("2.5MiB"),
        }
        for name, offload in offloads.items():
            with handle:
                pass
            begun = threading.Event()

            def act(offload=offload, begun=begun) -> None:
                begun.set()
                offload()

            with gpu_worker.constructing(), init_empty_weights(include_buffers=True):
                thread = threading.Thread(target=act)
                thread.start()
                assert begun.wait(WAIT_S)
                thread.join(0.05)
                assert thread.is_alive(), name
                empty = torch.nn.Linear(3, 3)
                assert empty.weight.is_meta and keys(worker) == {"moves"}
            thread.join(WAIT_S)
            assert keys(worker) == set(), name
            with handle as module:
                assert not any(parameter.is_meta for parameter in module.parameters())
                assert (module(torch.ones(1, SIDE)) == SIDE + 1.0).all()
