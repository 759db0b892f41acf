"""Tensors over maps, sent through `torch.multiprocessing`: received by lease, and not copied."""

from __future__ import annotations

import copy
import io
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import warnings
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing

import gpu_worker
from gpu_worker import sending
from shm_store.errors import SegmentRefused
from tests.gpu_worker.receiver import Receiver, facts, region_of
from tests.gpu_worker.served import wait_until
from tests.processes import ROOT, Coordinator

pytestmark = pytest.mark.process

STRATEGIES = ("file_descriptor", "file_system")


@pytest.fixture(scope="module")
def receivers(served, template):
    """One process for each way to start one, as they are asked for.

    They end before the template does: one that is forked has its stdin, which would not end else.
    """
    started: dict[str, Receiver] = {}

    def receiver(method: str) -> Receiver:
        if method not in started:
            with warnings.catch_warnings():
                # Python 3.12 warns of every fork beside threads: that is what is tried here.
                warnings.simplefilter("ignore", DeprecationWarning)
                started[method] = Receiver(method)
        return started[method]

    yield receiver
    for one in started.values():
        one.close()


@pytest.fixture(params=["fork", "spawn", "forkserver"])
def receiver(request, receivers):
    return receivers(request.param)


@pytest.fixture
def spawned(receivers):
    return receivers("spawn")


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(request.param)
    yield request.param
    torch.multiprocessing.set_sharing_strategy(before)


def weights() -> dict[str, torch.Tensor]:
    """More than a page of each, and a tie."""
    whole = torch.arange(6000.0).view(60, 100)
    return {"whole": whole, "tied": whole, "other": torch.ones(2000), "scalar": torch.tensor(3.0)}


def holders(operator, key: str) -> dict[str, set[int]]:
    """The pids that lease each generation of a key, by state."""
    return {
        one.state: {lease.pid for lease in one.leases}
        for one in operator.status().generations
        if one.key == key
    }


def file_of(tensor: torch.Tensor) -> str:
    return region_of(tensor.untyped_storage().data_ptr())["file"]


def test_all_of_it_arrives_over_a_map_of_the_receivers_own(
    worker, operator, key, receiver, strategy
):
    """Tensors, ties, views and parameters: right, leased, and no page of them copied."""
    state = worker.state_dict(key, build=weights)
    segment = file_of(state["whole"])
    sent = {
        **state,
        "view": state["whole"][3:5, 7:9],
        "parameter": torch.nn.Parameter(state["other"], requires_grad=False),
        "trained": torch.nn.Parameter(state["other"][:4]),
    }
    before = facts(sent)
    came = receiver.take(sent)
    for name, was in before.items():
        same = ("type", "values", "requires_grad", "file", "storage_bytes")
        assert [came[name][fact] for fact in same] == [was[fact] for fact in same]
        assert came[name]["file"] == segment
        assert came[name]["copied_kib"] == 0
    assert came["tied"]["address"] == came["whole"]["address"]
    assert facts(sent) == before  # not moved, where torch would have
    assert holders(operator, key) == {"ready": {os.getpid(), receiver.pid}}
    receiver.ask("drop")
    wait_until(lambda: holders(operator, key) == {"ready": {os.getpid()}})
    assert not sending._under_way


def test_a_module_is_sent_as_it_is(worker, operator, key, spawned):
    with worker.use(key, skeleton=lambda: torch.nn.Linear(30, 70), build=_linear) as module:
        before = facts(module)
        came = spawned.take(module)
        assert {name: one["values"] for name, one in came.items()} == {
            name: one["values"] for name, one in before.items()
        }
        assert {one["file"] for one in came.values()} == {before["weight"]["file"]}
        assert facts(module) == before
    spawned.ask("drop")
    wait_until(lambda: holders(operator, key) == {"ready": {os.getpid()}})


def test_what_comes_back_is_over_the_map_that_is_there(worker, operator, key, receiver):
    """A process has one map of a generation, however often it was sent to it."""
    state = worker.state_dict(key, build=weights)
    receiver.take(dict(state))
    back = receiver.ask("send back")
    assert back["whole"].data_ptr() == state["whole"].data_ptr()
    assert torch.equal(back["other"], state["other"])
    receiver.ask("drop")
    wait_until(lambda: holders(operator, key) == {"ready": {os.getpid()}})


def test_what_was_edited_arrives_edited_and_the_rest_over_the_map(worker, key, spawned, strategy):
    """Pages that were written to are not in the segment. The sender keeps them where they are."""
    state = worker.state_dict(key, build=weights)
    state["whole"].mul_(2)
    before = facts(state)
    came = spawned.take(dict(state))
    assert {name: one["values"] for name, one in came.items()} == {
        name: one["values"] for name, one in before.items()
    }
    assert "weight-cache" not in came["whole"]["file"]
    assert came["tied"]["address"] == came["whole"]["address"]
    assert came["whole"]["storage_bytes"] == before["whole"]["storage_bytes"]
    assert facts(state) == before
    spawned.ask("drop")


def test_what_the_receiver_edits_is_its_own(worker, key, spawned):
    state = worker.state_dict(key, build=weights)
    spawned.take({"other": state["other"]})
    assert set(spawned.ask("edit")["other"]["values"]) == {2.0}
    assert set(state["other"].tolist()) == {1.0}
    again = spawned.take({"other": state["other"]})  # over the map that it has edited
    assert set(again["other"]["values"]) == {2.0}
    spawned.ask("drop")


def test_what_is_under_way_stays_leased_and_is_received_retired(worker, operator, key, spawned):
    """The sender has let go, and there are newer weights: nothing is freed before it arrives."""
    state = worker.state_dict(key, build=weights, version="1")
    message = bytes(ForkingPickler.dumps(state["whole"]))
    expected = state["whole"].tolist()
    del state
    newer = worker.state_dict(key, build=lambda: {"w": torch.zeros(1)}, version="2")
    worker.flush()
    assert holders(operator, key) == {"ready": {os.getpid()}, "retired": {os.getpid()}}
    assert spawned.ask("unpickle", message)["it"]["values"] == expected
    wait_until(lambda: holders(operator, key).get("retired") == {spawned.pid})
    spawned.ask("drop")
    wait_until(lambda: holders(operator, key) == {"ready": {os.getpid()}})
    del newer


def test_a_message_to_itself_is_over_the_same_map(worker, operator, key):
    state = worker.state_dict(key, build=weights)
    message = ForkingPickler.dumps(dict(state))
    assert len(sending._under_way) == 1  # for all tensors of the message
    came = pickle.loads(message)
    assert came["whole"].data_ptr() == state["whole"].data_ptr()
    assert came["tied"].untyped_storage().data_ptr() == came["whole"].data_ptr()
    wait_until(lambda: not sending._under_way)
    del state
    worker.flush()
    assert holders(operator, key) == {"ready": {os.getpid()}}
    del came
    worker.flush()
    assert holders(operator, key) == {"ready": set()}


def test_plain_pickles_and_copies_are_copies(worker, key):
    state = worker.state_dict(key, build=weights)
    saved = io.BytesIO()
    torch.save(state["other"], saved)
    saved.seek(0)
    for made in (
        pickle.loads(pickle.dumps(state["other"])),
        copy.deepcopy(state["other"]),
        torch.load(saved),
    ):
        assert torch.equal(made, state["other"])
        assert "weight-cache" not in file_of(made)
    assert "weight-cache" in file_of(state["other"])


def test_tensors_of_others_go_as_ever(worker, strategy):
    tensor = torch.ones(3)
    came = pickle.loads(ForkingPickler.dumps({"it": tensor, "none": torch.empty(0)}))
    assert tensor.is_shared()
    assert came["it"].tolist() == [1.0, 1.0, 1.0]
    assert came["none"].tolist() == []


def test_who_cannot_lease_it_gets_a_copy_of_the_tensor_and_says_so_once(tmp_path, spawned):
    """No coordinator, no lease; the sender is there, and has the bytes."""
    served = Coordinator(str(tmp_path / "s"))
    worker = gpu_worker.attach(served.socket, patience=0.1)
    state = worker.state_dict("k", build=weights)
    served.stop(signal.SIGKILL)
    fds, said = spawned.ask("fds"), len(spawned.ask("said"))
    for _ in range(2):
        came = spawned.take({"other": state["other"], "again": state["other"][5:]})
        assert came["other"]["values"] == state["other"].tolist()
        assert came["other"]["storage_bytes"] == state["other"].untyped_storage().nbytes()
        assert came["again"]["address"] == came["other"]["address"] + 20
        assert "weight-cache" not in came["other"]["file"]
    (line,) = spawned.ask("said")[said:]
    assert "'k' was sent to this process" in line
    assert spawned.ask("fds") == fds
    assert "weight-cache" in file_of(state["other"])
    assert not sending._under_way
    again = pickle.loads(ForkingPickler.dumps(state["other"]))
    assert again.data_ptr() == state["other"].data_ptr()  # who has a map needs no lease
    spawned.ask("drop")
    del state, again
    worker.shutdown(timeout=0.1)


@pytest.mark.parametrize("place", [(0, 4097), (4096, 1), (-1, 1), (0, 0)])
def test_what_is_not_in_the_segment_is_refused(place):
    received = sending.Received(None, os.memfd_create("small"))
    os.truncate(received._fd, 4096)
    with pytest.raises(SegmentRefused):
        received.storage(*place)
    assert received.storage(4095, 1).nbytes() == 1


def test_what_an_ended_process_has_sent_is_leased_while_the_coordinator_has_it(run, key):
    """Torch's own descriptors die with their sender; of what is retired there is an error."""
    run(
        f"""
        import pickle
        from multiprocessing.reduction import ForkingPickler
        from gpu_worker import WeightCacheError
        ours, theirs = os.pipe()
        def child():
            state = worker.state_dict({key!r}, build=lambda: {{"w": torch.ones(3)}})
            return bytes(ForkingPickler.dumps(state["w"]))
        pid = os.fork()
        if not pid:
            os.write(theirs, child())
            os._exit(0)
        os.waitpid(pid, 0)
        message = os.read(ours, 1 << 16)
        assert pickle.loads(message).tolist() == [1.0, 1.0, 1.0]
        worker.flush()
        worker.invalidate({key!r})
        worker.flush()
        try:
            pickle.loads(message)
        except WeightCacheError as error:
            assert "cannot be had" in str(error), error
        else:
            raise AssertionError("it is gone")
        """
    )


def test_a_forked_child_does_not_keep_what_its_parent_has_sent(run, key):
    run(
        f"""
        from multiprocessing.reduction import ForkingPickler
        from coordinator.operator import Operator
        state = worker.state_dict({key!r}, build=lambda: {{"w": torch.ones(3)}})
        message = ForkingPickler.dumps(state["w"])
        del state
        worker.flush()
        pid = os.fork()
        if not pid:
            worker.flush()
            with Operator.connect(sys.argv[1], "test") as operator:
                (found,) = [g for g in operator.status().generations if g.key == {key!r}]
            assert [lease.pid for lease in found.leases] == [os.getppid()], found
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        """
    )


SCRIPT = """
import os, resource, sys, warnings
import torch, torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset
from tests.gpu_worker.receiver import region_of

def mapped(tensor):
    return "memfd:weight-cache:" in region_of(tensor.untyped_storage().data_ptr())["file"]

class Rows(Dataset):
    def __init__(self, state):
        self.state = state
    def __len__(self):
        return len(self.state)
    def __getitem__(self, index):
        return self.state[str(index)]

def child(state, inbox, outbox):
    outbox.put((len(state), all(map(mapped, state.values()))))
    del state
    took = inbox.get()
    right = all(set(tensor.tolist()) == {float(name)} for name, tensor in took.items())
    outbox.put((len(took), all(map(mapped, took.values())), right))

def main():
    import gpu_worker
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    worker = gpu_worker.attach(sys.argv[1])
    warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
    mp.set_sharing_strategy("file_descriptor")
    context = mp.get_context("spawn")
    build = lambda: {str(i): torch.full((1000,), float(i)) for i in range(300)}
    state = dict(worker.state_dict("many", build=build))
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=child, args=(state, inbox, outbox))
    process.start()
    assert outbox.get(timeout=30) == (300, True)
    inbox.put(state)
    assert outbox.get(timeout=30) == (300, True, True)
    process.join(30)
    assert process.exitcode == 0
    for strategy, method in (("file_descriptor", "fork"), ("file_system", "spawn")):
        load(state, strategy, method)
    del state
    worker.shutdown()

def load(state, strategy, method):
    mp.set_sharing_strategy(strategy)
    few = {name: state[name] for name in ("0", "1", "2", "3")}
    rows = DataLoader(Rows(few), batch_size=None, num_workers=2, multiprocessing_context=method)
    got = list(rows)
    assert [row[0].item() for row in got] == [0.0, 1.0, 2.0, 3.0]
    assert all(map(mapped, got)) and all(map(mapped, state.values()))

if __name__ == "__main__":
    main()
"""


def test_a_process_with_few_fds_sends_many_tensors_and_ends_silently(served, tmp_path):
    """As arguments, through a queue, and to and from the workers of a DataLoader."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    ended = subprocess.run(
        [sys.executable, str(script), served.socket],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def _linear() -> torch.nn.Module:
    return torch.nn.Linear(30, 70)
