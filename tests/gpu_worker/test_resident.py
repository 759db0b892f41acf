"""The resident worker: what it keeps is there for all, and it is in nobody's way."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from safetensors.torch import save_file

import gpu_worker
from gpu_worker.__main__ import main
from gpu_worker.request import Ask
from shm_store.wire import Acquire, Done, Limit
from tests.gpu_worker.on_device import MIB, matrix, moved, new_device, skeleton, there
from tests.gpu_worker.resident import SIDE, SIZE, Beside, checkpoint, linear, resident, result
from tests.gpu_worker.served import wait_until
from tests.gpu_worker.spoken import KEY, WAIT_S
from tests.processes import Coordinator, Peer, running

pytestmark = pytest.mark.process


@pytest.fixture
def device() -> str:
    return new_device()


@pytest.fixture
def source(tmp_path) -> str:
    return checkpoint(tmp_path / "one.safetensors")


@pytest.fixture
def worker(served, device):
    with gpu_worker.attach(served.socket, device=device, share_vram=True) as made:
        yield made


@pytest.fixture
def beside(served, device):
    """Starts inference processes."""
    started: list[Beside] = []

    def start(key: str, source: str) -> Beside:
        started.append(Beside(served.socket, device, key, source))
        return started[-1]

    yield start
    for one in started:
        one.kill()


def leases(operator: Peer, key: str) -> int:
    """How many sessions lease what there is of `key` on the host."""
    found = [g for g in operator.status().generations if g.pool == "ram" and g.key == key]
    return sum(len(g.leases) for g in found)


def limit(operator: Peer, device: str, limit_bytes: int) -> None:
    pool = f"vram:sim-{device.partition(':')[2]}"
    operator.send(Limit(operator.next_rid(), pool, limit_bytes))
    operator.expect(Done)


def test_beside_it_a_lock_moves_nothing(served, worker, operator, device, source, key):
    with resident(served.socket, device, {key: source}) as kept:
        line = kept.said("is on sim")
        assert f"{key!r} #" in line and f"is on {device}: {SIZE}, {SIZE} moved" in line
        with worker.use(key, skeleton=linear, source=source) as module:
            assert result(module) == SIDE + 1 and moved(worker) == 0
            (one,) = there(operator, device)
            assert (one.private, len(one.leases)) == (False, 2)
            served.audit()
        names = {session.name for session in operator.status().sessions}
        assert f"resident {device}" in names
        del module


def test_it_holds_whatever_a_checkpoint_can_hold(served, worker, device, tmp_path, key):
    """Names that no module could have, no bytes, whole numbers: skeletons that use a part find it.

    It has no module itself.
    """
    tensors = {
        "a": torch.ones(3),
        "a.b": torch.full((2,), 2.0),
        "": torch.ones(1),
        "..": torch.ones(1),
        "forward": torch.ones(2),
        "no identifier / é": torch.ones(2),
        "empty": torch.zeros(0, 4),
        "steps": torch.arange(5),
        "mask": torch.tensor([True, False]),
        "half": torch.ones(7, dtype=torch.bfloat16),
        "scalar": torch.tensor(3.0),
        "inner.weight": torch.full((4, 4), 5.0),
    }
    path = tmp_path / "odd.safetensors"
    save_file(tensors, path)

    class Part(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 4, bias=False)
            self.register_buffer("steps", torch.zeros(5, dtype=torch.int64))
            self.register_buffer("mask", torch.zeros(2, dtype=torch.bool))
            self.register_buffer("empty", torch.zeros(0, 4))

    with resident(served.socket, device, {key: str(path)}) as kept:
        kept.said("is on sim")
        with worker.use(key, skeleton=Part, source=path) as module:
            assert moved(worker) == 0
            state = module.state_dict()
            assert all(torch.equal(state[name], tensors[name]) for name in state)
            assert (module.inner(torch.ones(1, 4)) == 20).all()
        del module, state


def test_a_checkpoint_without_a_byte_is_kept(served, device, tmp_path, key):
    path = tmp_path / "empty.safetensors"
    save_file({"w": torch.zeros(0)}, path)
    with resident(served.socket, device, {key: str(path)}) as kept:
        kept.said(f"is on {device}: 0 B")
        assert kept.end()[0] == 0


def test_what_a_transformer_ties_is_there(served, worker, device, tmp_path, key):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    torch.manual_seed(1)
    original = transformers.BertForMaskedLM(config).eval()
    original.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tokens = torch.arange(8).reshape(1, 8)
    with resident(served.socket, device, {key: str(path)}) as kept:
        kept.said("is on sim")
        make = lambda: transformers.BertForMaskedLM(config)  # noqa: E731
        with worker.use(key, skeleton=make, source=path) as module, torch.no_grad():
            assert torch.equal(module(tokens).logits, original(tokens).logits)
            own = sum(
                buffer.nbytes
                for name, buffer in module.named_buffers()
                if name not in module.state_dict()
            )
            assert moved(worker) <= own + 512 * 8, "buffers that no checkpoint has"
        del module


def test_an_inference_process_is_killed_and_finds_it_there(
    served, operator, beside, device, source, key
):
    with resident(served.socket, device, {key: source}) as kept:
        kept.said("is on sim")
        for _ in range(2):
            process = beside(key, source)
            assert process.computed() == (SIDE + 1, 0)
            process.kill()
        wait_until(lambda: [len(g.leases) for g in there(operator, device)] == [1])
        served.audit()


def test_it_is_killed_and_its_successor_moves_nothing(
    served, operator, beside, device, source, key
):
    """What is kept outlives its keeper, also if nobody else leases it."""
    with resident(served.socket, device, {key: source}) as kept:
        kept.said("is on sim")
        process = beside(key, source)
        assert process.computed() == (SIDE + 1, 0)
        assert kept.end(signal.SIGKILL)[0] == -signal.SIGKILL
        assert process.computed() == (SIDE + 1, 0)
        with resident(served.socket, device, {key: source}) as second:
            second.said("is on sim.* 0 B moved")
            assert process.computed() == (SIDE + 1, 0)
            process.kill()
            second.end(signal.SIGKILL)
    wait_until(lambda: [len(g.leases) for g in there(operator, device)] == [0])
    with resident(served.socket, device, {key: source}) as third:
        third.said("is on sim.* 0 B moved")
        served.audit()


def test_a_lock_that_lacks_room_has_it_go_and_it_comes_back(
    served, worker, operator, device, source, key
):
    limit(operator, device, 2 * MIB)
    with resident(served.socket, device, {key: source}) as kept:
        kept.said("is on sim")
        handle = worker.load(f"{key} other", skeleton=skeleton(600), build=matrix(600), timeout=20)
        with handle as module:
            kept.said(f"'{key}' has left {device}: others need its room on the device")
            kept.said(f"'{key}' #.* is on the host alone, {SIZE}: .*needs 1.0 MiB")
            assert [one.key for one in there(operator, device)] == [f"{key} other"]
            assert leases(operator, key) == 1, "on the host it stays"
            served.audit()
        del module
        assert worker.offload(f"{key} other")
        kept.said(f"'{key}' #.* is on {device}")
        assert [len(g.leases) for g in there(operator, device) if g.key == key] == [1]
        handle.close()
        worker.evict(f"{key} other")


def test_it_takes_nothing_from_anybody(served, worker, operator, device, source, key):
    """What others have idle stays, as long as they want it; what nobody leases goes."""
    limit(operator, device, 2 * MIB)
    name = f"{key} other"
    with worker.use(name, skeleton=skeleton(600), build=matrix(600)):
        pass
    with resident(served.socket, device, {key: source}) as kept:
        kept.said(f"'{key}' #.* is on the host alone, {SIZE}")
        assert [one.key for one in worker.resident()] == [name]
        worker.offload(name)
        kept.said(f"'{key}' #.* is on {device}")
    worker.evict(name)


def test_it_takes_nothing_from_anybody_on_the_host(tmp_path, device):
    source, evicted = checkpoint(tmp_path / "one.safetensors"), []
    with (
        running(str(tmp_path / "s"), "--ram-budget", "5MiB") as small,
        gpu_worker.attach(small.socket, on_evict=lambda *facts: evicted.append(facts)) as worker,
    ):
        with worker.use("theirs", skeleton=skeleton(800), build=matrix(800)):
            pass
        operator = Peer(small.socket, role="operator")
        with resident(small.socket, device, {"kept": source}) as kept:
            wait_until(lambda: [g.key for g in waiting(operator)] == ["kept"])
            worker.flush()
            assert evicted == []
            worker.evict("theirs")
            kept.said(f"'kept' #.* is on {device}")
        operator.close()


def test_what_is_named_first_is_there_first(served, operator, device, tmp_path, key):
    """There is room for one, and the second would be read sooner."""
    first = tmp_path / "first.safetensors"
    save_file({"weight": torch.ones(400, 512)}, first)
    second = checkpoint(tmp_path / "second.safetensors")
    with gpu_worker.attach(served.socket, device=device):
        limit(operator, device, 3 << 19)
        keep = {f"{key} 1": str(first), f"{key} 2": second}
        with resident(served.socket, device, keep) as kept:
            assert kept.said(f"'{key} .' #.* is on sim").startswith(f"weight-cache: '{key} 1'")
            kept.said(f"'{key} 2' #.* is on the host alone")


def test_what_it_loads_is_asked_for_behind_all_others(coordinator, client, source):
    client.background = True
    future = coordinator.call(client.acquire, Ask(KEY, source, None), None, None)
    asked = coordinator.expect(Acquire)
    coordinator.grant(asked.rid)
    assert future.result(WAIT_S).gen
    assert asked.prefetch


def waiting(operator: Peer):
    return [g for g in operator.status().generations if g.waiting]


def test_room_on_the_host_is_given_and_had_back(tmp_path, device):
    source = checkpoint(tmp_path / "one.safetensors")
    with (
        running(str(tmp_path / "s"), "--ram-budget", "5MiB") as small,
        resident(small.socket, device, {"kept": source}) as kept,
        gpu_worker.attach(small.socket) as worker,
    ):
        kept.said("is on sim")
        large = worker.state_dict("large", build=lambda: {"w": torch.ones(5 * MIB // 8)})
        kept.said(f"'kept' has left {device}: others need its room on the host")
        assert (large["w"] == 1).all()
        del large
        kept.said(f"'kept' #.* is on {device}")
        assert kept.end()[0] == 0


def test_who_needs_the_host_waits_for_nobody_who_waits_for_the_device(tmp_path, device):
    """While it waits for room there, it gives what it has on the host."""
    source = checkpoint(tmp_path / "one.safetensors")
    with (
        running(str(tmp_path / "s"), "--ram-budget", "5MiB") as small,
        gpu_worker.attach(small.socket, device=device, vram_budget=2 * MIB) as worker,
        worker.reserve(2 * MIB - 4096),
        resident(small.socket, device, {"kept": source}) as kept,
    ):
        kept.said("is on the host alone")
        large = worker.state_dict("large", build=lambda: {"w": torch.ones(5 * MIB // 8)})
        assert (large["w"] == 1).all()
        del large


def test_two_files_under_one_key_are_brought_back_less_and_less_often(
    served, worker, device, source, tmp_path, key
):
    """Whoever loads the other one retires what is kept; nobody is to load without an end."""
    other = checkpoint(tmp_path / "other.safetensors", 3.0)
    with resident(served.socket, device, {key: source}) as kept:
        kept.said("is on sim")
        for _ in range(2):
            with worker.use(key, skeleton=linear, source=other) as module:
                assert result(module) == 3 * SIDE + 3
            del module
            kept.said(f"'{key}' has left")
            kept.said(f"'{key}' #.* is on {device}")
            worker.evict(key)


def test_newer_weights_take_its_place(served, worker, operator, device, source, key):
    """The file was written anew, and somebody has loaded it."""
    with resident(served.socket, device, {key: source}) as kept:
        first = kept.said("is on sim").split()[2]
        checkpoint(source, 2.0)
        with worker.use(key, skeleton=linear, source=source) as module:
            kept.said(f"'{key}' has left {device}: it was retired")
            second = kept.said(f"'{key}' #.* is on {device}").split()[2]
            assert first != second
            assert result(module) == 2 * SIDE + 2
        del module
        worker.evict(key)
        worker.flush()
        wait_until(lambda: [len(g.leases) for g in there(operator, device)] == [1])
        served.audit()
        _, lines = kept.end()
        left = [line for line in lines if "has left" in line and "given back" not in line]
        assert len(left) == 1, "it is told twice, by the device's lease and the host's"


def test_what_is_invalidated_comes_back(served, worker, operator, device, source, key):
    with resident(served.socket, device, {key: source}) as kept:
        kept.said("is on sim")
        assert worker.invalidate(key)
        kept.said(f"'{key}' has left")
        kept.said(f"'{key}' #.* is on {device}")


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP"])
def test_asked_to_end_it_gives_everything_back(
    served, operator, device, source, tmp_path, key, name
):
    keys = [key, f"{key} 2"]
    sources = dict(zip(keys, [source, checkpoint(tmp_path / "two.safetensors")], strict=True))
    with resident(served.socket, device, sources) as kept:
        for _ in keys:
            kept.said("is on sim")
        code, lines = kept.end(signal.Signals[f"SIG{name}"])
        assert code == 0, lines
        assert not any("Traceback" in line for line in lines)
    wait_until(lambda: all(session.pid != kept.process.pid for session in sessions(operator)))
    assert [leases(operator, one) for one in keys] == [0, 0]
    assert [g.leases for g in there(operator, device)] == [(), ()]
    assert served.audit().leases == 0


def sessions(operator: Peer):
    return operator.status().sessions


def test_it_ends_while_it_waits_for_room(served, worker, operator, device, source, key):
    limit(operator, device, 2 * MIB)
    with (
        worker.reserve(2 * MIB),
        resident(served.socket, device, {key: source}) as kept,
    ):
        kept.said("is on the host alone")
        code, lines = kept.end()
        assert code == 0, lines


def test_on_a_device_that_is_too_small_it_stays_on_the_host(served, operator, device, source, key):
    with resident(served.socket, device, {key: source}, WEIGHT_CACHE_SIM_BYTES="512KiB") as kept:
        kept.said("is on the host alone, 1.0 MiB: the device is too small for it")
        assert leases(operator, key) == 1 and there(operator, device) == []
        limit(operator, device, 2 * MIB)
        kept.process.terminate()
        assert kept.wait()[0] == 0


def test_on_cpu_it_keeps_the_host_copy(served, operator, source, key):
    with resident(served.socket, "cpu", {key: source}) as kept:
        kept.said("it has no memory of its own, so weights are kept on the host")
        kept.said(f"'{key}' #.* is on the host: {SIZE}, [0-9.]+ s$")
        assert leases(operator, key) == 1
        assert kept.end()[0] == 0


def test_a_source_that_never_worked_ends_it(served, device, tmp_path, key):
    missing = str(tmp_path / "missing.safetensors")
    with resident(served.socket, device, {key: missing}) as kept:
        code, lines = kept.wait()
        assert code == 3 and f"{key!r} cannot be kept: {missing}: No such file" in lines[-1]
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(b"no checkpoint")
    with resident(served.socket, device, {key: str(torn)}) as kept:
        code, lines = kept.wait()
        assert code == 3 and f"{key!r} cannot be kept: " in lines[-1]


def test_a_source_that_worked_once_is_waited_for(served, worker, device, source, key):
    with resident(served.socket, device, {key: source}) as kept:
        kept.said("is on sim")
        os.rename(source, f"{source}.away")
        worker.invalidate(key)
        kept.said(f"'{key}' is not there: {source}: No such file.*tried again in 1 s")
        os.rename(f"{source}.away", source)
        kept.said(f"'{key}' #.* is on {device}")


def test_it_ends_with_its_coordinator_when_that_drains(tmp_path, device):
    source = checkpoint(tmp_path / "one.safetensors")
    with running(str(tmp_path / "s")) as mortal:
        mortal.unquiet = "it drains"
        with (
            resident(mortal.socket, device, {"kept": source}) as kept,
            resident(mortal.socket, "cpu", {}) as idle,
        ):
            kept.said("is on sim")
            idle.said("nothing to keep")
            from coordinator.operator import Operator

            with Operator.connect(mortal.socket, "test") as operator:
                operator.drain(20.0)
            assert kept.wait()[0] == 0
            assert idle.wait()[0] == 0


def test_it_outlives_its_coordinator(tmp_path, device):
    path, source = str(tmp_path / "s"), checkpoint(tmp_path / "one.safetensors")
    first = Coordinator(path)
    with resident(path, device, {"kept": source}) as kept:
        kept.said("is on sim")
        first.stop(signal.SIGKILL)
        with running(path) as second:
            operator = Peer(path, role="operator")
            wait_until(lambda: [len(g.leases) for g in there(operator, device)] == [1])
            with gpu_worker.attach(path, device=device, share_vram=True) as worker:
                with worker.use("kept", skeleton=linear, source=source) as module:
                    assert result(module) == SIDE + 1 and moved(worker) == 0
                    second.audit()
                del module
            operator.close()
            assert kept.end()[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "cpu", "--keep", "unet"], "--keep 'unet' has no '='"),
        (["--device", "cpu", "--keep", "=x"], "--keep '=x': a key must not be empty"),
        (["--device", "cpu", "--keep", "a=x", "--keep", "a=y"], "--keep names 'a' twice"),
        (["--keep", "a=x"], "--device"),
        (["--device", "cpu", "--device-x"], "unrecognized arguments: --device-x"),
    ],
)
def test_wrong_arguments_are_named(arguments, said, capsys):
    try:
        code: object = main(arguments)
    except SystemExit as ended:  # argparse's own
        code = ended.code
    assert code == 2
    assert said in capsys.readouterr().err


def test_an_unknown_device_and_no_coordinator_are_errors(tmp_path, source, key):
    with resident(str(tmp_path / "nobody"), "cpu", {key: source}) as kept:
        assert kept.wait()[0] == 6
    with resident(str(tmp_path / "nobody"), "tpu:0", {key: source}) as kept:
        code, lines = kept.wait()
        assert code == 2 and "'tpu:0' is no device" in lines[-1]
