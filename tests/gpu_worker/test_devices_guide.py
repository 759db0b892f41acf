"""docs/devices.md: every block of it runs, and what it says of edits and compiling holds."""

# An attribute of a module is anything to mypy.
# mypy: disable-error-code="operator,index"

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.utils import parametrize

import gpu_worker
from benchmarks import kernel
from shm_store.wire import Limit
from tests.gpu_worker.on_device import MIB, charged, new_device
from tests.gpu_worker.served import wait_until
from tests.processes import ROOT, WAIT_S

SIDE = 512
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(SIDE, SIDE, bias=False)
        self.head = torch.nn.Linear(SIDE, SIDE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.proj(x))


def load_and_convert() -> Model:
    torch.manual_seed(0)
    return Model()


def blocks(language: str) -> list[str]:
    text = (ROOT / "docs/devices.md").read_text()
    found = BLOCK.findall(text)
    assert len(found) == text.count("\n```") / 2
    return [code for kind, code in found if kind == language]


@pytest.fixture
def device() -> str:
    return new_device()


@pytest.fixture
def worker(served, device) -> Iterator[gpu_worker.Worker]:
    made = gpu_worker.attach(served.socket, device=device, vram_budget="16MiB")
    yield made
    made.shutdown()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.ones(1, SIDE)


@pytest.fixture
def handle(worker, key) -> gpu_worker.ModelHandle:
    return worker.load(key, skeleton=Model, build=load_and_convert)


# --- its blocks ---------------------------------------------------------------------------------


def test_its_python_runs_as_it_stands(served, operator, device, x, monkeypatch, tmp_path):
    """From top to bottom, on a simulated device."""
    monkeypatch.chdir(tmp_path)
    weights = load_and_convert().state_dict()
    save_file({name: tensor.clone() for name, tensor in weights.items()}, "clip.safetensors")
    monkeypatch.setenv("WEIGHT_CACHE_SOCKET", served.socket)
    monkeypatch.setenv("WEIGHT_CACHE_SIM_BYTES", "24GiB")
    eager = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", eager)
    names: dict[str, Any] = {
        "make_module": Model,
        "load_and_convert": load_and_convert,
        "x": x,
        "a": torch.randn(4, SIDE),
        "b": torch.randn(SIDE, 4),
        "delta": torch.randn(SIDE, SIDE),
    }
    for number, code in enumerate(blocks("python")):
        here = code.replace('torch.device("cuda:0")', 'torch.device("cpu")')
        here = here.replace('"cuda:0"', f'"{device}"')
        exec(compile(here, f"docs/devices.md, block {number}", "exec"), names)
    worker, handle, y = names["worker"], names["handle"], names["y"]
    want = load_and_convert()
    with torch.no_grad():
        assert torch.equal(y, want(x))
        want.proj.weight += names["b"] @ names["a"]
        torch.testing.assert_close(names["patched"], want(x), rtol=1e-3, atol=1e-3)
        want.proj.weight += names["delta"] - names["b"] @ names["a"]
        torch.testing.assert_close(names["other"], want(x), rtol=1e-3, atol=1e-3)
    with handle as model:
        assert torch.equal(model(x), y), "the patch is undone exactly"
        assert {one.key for one in worker.resident()} == {"unet", "vae"}
    torch._dynamo.reset()
    del model
    names.clear()
    worker.shutdown()
    handle.close()


def test_its_status_is_what_status_says(served, worker, handle, operator):
    with handle:
        worker.flush()
    (written,) = blocks("json")
    done = told(served.socket, "status", "--json")
    models = [model for session in json.loads(done)["sessions"] for model in session["models"]]
    assert any(model["key"] == handle.key for model in models)
    assert all(list(model) == list(json.loads(written)) for model in models)


def test_its_command_runs(served, operator, device):
    (written,) = blocks("")
    line = written.strip().replace("UUID", f"sim-{device.partition(':')[2]}")
    program, *arguments = line.split()
    assert program == "weight-cache"
    note = "; no process uses a device of this name so far"
    assert told(served.socket, *arguments).endswith(f"0 B charged of 18.0 GiB{note}\n")
    assert told(served.socket, *arguments).endswith("0 B charged of 18.0 GiB\n")


def told(socket: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "coordinator", *arguments, "--socket", socket],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- patches and edits --------------------------------------------------------------------------


def copied_bytes(handle: gpu_worker.ModelHandle) -> int:
    """What of the segment's map are pages of this process's own, by the kernel."""
    mark = kernel.SEGMENT_MARK + handle.generation
    return sum(one.sizes["Anonymous"] for one in kernel.maps(os.getpid()) if mark in one.path)


def lock_again(worker, handle, x) -> torch.Tensor:
    """What the model says after it has left the device, and come back."""
    assert worker.offload(handle.key)
    with handle as model, torch.no_grad():
        return model(x)


def edit_in_place(weight: torch.Tensor) -> None:
    weight.mul_(2)


def edit_through_data(weight: torch.Tensor) -> None:
    weight.data += 1


def replace_data(weight: torch.Tensor) -> None:
    weight.data = weight.data + 1


@pytest.mark.parametrize(
    ("edit", "kept", "pages"),
    [(edit_in_place, True, True), (edit_through_data, False, False), (replace_data, True, False)],
)
def test_edits_on_the_device_are_kept_or_not_as_the_table_says(
    worker, handle, x, edit, kept, pages
):
    with handle as model, torch.no_grad():
        before = model(x)
        edit(model.proj.weight)
        after = model(x)
    assert not torch.equal(before, after)
    assert torch.equal(lock_again(worker, handle, x), after if kept else before)
    assert (copied_bytes(handle) > 0) is pages


@pytest.mark.parametrize("edit", [edit_in_place, edit_through_data, replace_data])
def test_edits_on_the_host_are_private_and_move_with_the_module(
    worker, served, operator, handle, x, edit
):
    with handle as model, torch.no_grad():
        before = model(x)
    worker.offload(handle.key)
    with torch.no_grad():
        edit(model.proj.weight)
        after = model(x)
    assert not torch.equal(before, after)
    assert torch.equal(lock_again(worker, handle, x), after)
    served.audit()
    (shared,) = [g for g in operator.status().generations if g.generation == handle.generation]
    (lease,) = shared.leases
    assert lease.copied_bytes == copied_bytes(handle)
    assert (lease.copied_bytes > 0) is (edit is not replace_data)


class Lora(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + 1.0


@pytest.mark.parametrize("there", [False, True])
def test_a_parametrization_copies_nothing_only_if_it_is_registered_offloaded(
    worker, handle, x, there
):
    with handle as model, torch.no_grad():
        before = model(x)
        if there:
            parametrize.register_parametrization(model.proj, "weight", Lora())
    worker.offload(handle.key)
    if not there:
        parametrize.register_parametrization(model.proj, "weight", Lora())
    assert not torch.equal(lock_again(worker, handle, x), before)
    worker.offload(handle.key)
    parametrize.remove_parametrizations(model.proj, "weight", leave_parametrized=False)
    assert torch.equal(lock_again(worker, handle, x), before), "undone exactly"
    assert (copied_bytes(handle) > 0) is there


def test_what_is_added_while_it_is_offloaded_moves_with_it(worker, operator, device, handle, x):
    with handle as model:
        pass
    worker.offload(handle.key)
    model.adapter = torch.nn.Linear(SIDE, SIDE, bias=False)
    with handle:  # what was there before may be given back a moment later
        wait_until(lambda: charged(operator, device) == 3 * MIB)


# --- compiling ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_a_compiled_module_that_is_there_in_part_runs_in_pieces(worker, operator, device, x, key):
    make = lambda: torch.nn.Sequential(*(torch.nn.Linear(SIDE, SIDE) for _ in range(4)))  # noqa: E731
    handle = worker.load(key, skeleton=make, build=make)
    compiled = []

    def backend(graph, inputs):
        compiled.append(1)
        return graph.forward

    with handle as model, torch.no_grad():
        fast = torch.compile(model, backend=backend)
        whole = torch.compile(model, backend="eager", fullgraph=True)
        want = fast(x)
        assert torch.equal(whole(x), want) and len(compiled) == 1
    operator.send(Limit(operator.next_rid(), f"vram:sim-{device.partition(':')[2]}", 5 * MIB // 2))
    worker.offload(key)
    with handle, torch.no_grad():
        assert torch.equal(fast(x), want) and len(compiled) > 1
        with pytest.raises(torch._dynamo.exc.Unsupported):
            whole(x)
    torch._dynamo.reset()
