# What is in a Sequential is anything to mypy.
# mypy: disable-error-code="index"

"""Models that torchao has quantised: one copy for all processes, and the results to the bit.

An older torchao has other configurations than these.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu_worker
from gpu_worker.tensors import tensors
from gpu_worker.wrappers import is_wrapper, plain_parts
from tests.gpu_worker.on_device import MIB, charged, new_device, taken
from tests.gpu_worker.sealed import bits, mapped, seal
from tests.gpu_worker.served import WAIT_S
from tests.processes import ROOT

torchao = pytest.importorskip("torchao", minversion="0.18")

from torchao.prototype.mx_formats.mx_tensor import MXTensor  # noqa: E402
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor  # noqa: E402
from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig  # noqa: E402
from torchao.quantization import (  # noqa: E402
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    quantize_,
)
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4  # noqa: E402

pytestmark = pytest.mark.process

CONFIGS: dict[str, Callable[[], Any]] = {
    "int8_weight_only": Int8WeightOnlyConfig,
    "int8_dynamic": Int8DynamicActivationInt8WeightConfig,
    "float8_weight_only": Float8WeightOnlyConfig,
    "int4_packed": lambda: PrototypeInt4WeightOnlyConfig(set_inductor_config=False),
    "int4_unpacked": lambda: IntxWeightOnlyConfig(weight_dtype=torch.int4),  # type: ignore[attr-defined]
}


def plain(side: int = 128) -> torch.nn.Sequential:
    torch.manual_seed(7)
    layers = [torch.nn.Linear(side, side), torch.nn.ReLU(), torch.nn.Linear(side, side)]
    return torch.nn.Sequential(*layers).bfloat16().requires_grad_(False).eval()


def quantised(kind: str, side: int = 128) -> torch.nn.Sequential:
    model = plain(side)
    quantize_(model, CONFIGS[kind]())
    assert is_wrapper(model[0].weight)
    return model


def inputs(side: int = 128) -> torch.Tensor:
    return torch.linspace(-1, 1, 3 * side).view(3, side).bfloat16()


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bits(one) == bits(other)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_quantised_model_computes_the_same_from_shared_weights(worker, key, kind):
    """Of the weights nothing is copied: all that they are made of lies in the map."""
    original = quantised(kind)
    with worker.use(key, skeleton=plain, build=lambda: quantised(kind)) as model:
        weight, its = model[0].weight, original[0].weight
        assert type(weight) is type(its) and isinstance(weight, torch.nn.Parameter)
        assert not weight.requires_grad
        assert (weight.shape, weight.dtype) == (its.shape, its.dtype)
        for mine, held in zip(plain_parts(weight), plain_parts(its), strict=True):
            assert equal(mine, held) and mine.stride() == held.stride()
        assert equal(model(inputs()), original(inputs()))
        state = worker.state_dict(key, build=lambda: pytest.fail("it is there"))
        assert [type(one) for one in state.values()] == [
            type(one) for one in original.state_dict().values()
        ]
        shared = {part.data_ptr() for one in state.values() for part in plain_parts(one)}
        assert {
            part.data_ptr() for one in model.parameters() for part in plain_parts(one)
        } == shared


TENSORS: dict[str, Callable[[], Any]] = {
    "mxfp8": lambda: MXTensor.to_mx(torch.randn(32, 64), torch.float8_e4m3fn, 32),
    "mxfp4": lambda: MXTensor.to_mx(torch.randn(32, 64), torch.float4_e2m1fn_x2, 32),
    "nvfp4": lambda: NVFP4Tensor.to_nvfp4(torch.randn(32, 64)),
    "nf4": lambda: to_nf4(torch.randn(64, 64), 64, 64),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_other_tensors_of_torchao_come_out_as_they_were(kind):
    made = TENSORS[kind]()
    with mapped(seal({"w": made})) as buffer:
        held = tensors(buffer)["w"]
        assert type(held) is type(made) and held.shape == made.shape
        assert held.__tensor_flatten__()[1] == made.__tensor_flatten__()[1]
        for mine, its in zip(plain_parts(held), plain_parts(made), strict=True):
            assert equal(mine, its)


def test_its_state_dict_is_as_good_as_the_module(worker, key):
    """Each name of a tied layer then has a wrapper of its own, over the same bytes."""

    def tied(quantise: bool) -> torch.nn.Sequential:
        model = quantised("int8_weight_only") if quantise else plain()
        model[2].weight = model[0].weight
        return model

    original = tied(True)
    state = original.state_dict()
    assert state["0.weight"] is not state["2.weight"]
    with worker.use(key, skeleton=lambda: tied(False), build=lambda: state) as model:
        assert model[0].weight is model[2].weight
        assert equal(model(inputs()), original(inputs()))


def map_of(pid: int, gen: str) -> dict[str, int]:
    """What the kernel says of a process's map of that generation, in bytes."""
    found: dict[str, int] = {}
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-", line):
            inside = f"weight-cache:{gen}" in line
        elif inside and line.endswith("kB"):
            name, size = line.split(":")
            found[name] = found.get(name, 0) + int(size.split()[0]) * 1024
    return found


SECOND = """
import sys, torch
from gpu_worker import attach
from tests.gpu_worker.test_torchao import inputs, plain
worker = attach(sys.argv[1])
with worker.use(sys.argv[2], skeleton=lambda: plain(1024), build=lambda: 1 / 0) as model:
    for _ in sys.stdin:
        print(model(inputs(1024)).view(torch.int16).flatten().tolist(), flush=True)
"""


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts processes that end with the test, however that ends."""
    with contextlib.ExitStack() as ends:

        def start(*arguments: Any, **facts: Any) -> subprocess.Popen:
            process = ends.enter_context(subprocess.Popen(*arguments, **facts))
            ends.callback(process.kill)
            return process

        yield start


def test_a_second_process_has_no_copy(served, worker, key, operator, started):
    """It maps what the first has made. Both together have as much as one alone."""
    side = 1024
    handle = worker.load(
        key, skeleton=lambda: plain(side), build=lambda: quantised("int8_weight_only", side)
    )
    with handle as model:
        want = model(inputs(side)).view(torch.int16).flatten().tolist()
        second = started(
            [sys.executable, "-c", SECOND, served.socket, key],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert second.stdin is not None and second.stdout is not None
        deadline_s = time.monotonic() + WAIT_S
        while True:
            second.stdin.write("\n")
            second.stdin.flush()
            assert json.loads(second.stdout.readline()) == want
            assert model(inputs(side)).view(torch.int16).flatten().tolist() == want
            maps = [map_of(pid, handle.generation) for pid in (os.getpid(), second.pid)]
            # When small pages are put together to large ones, a map has none until the next read.
            if all(one["Rss"] >= 2 * side * side for one in maps):
                break
            assert time.monotonic() < deadline_s
        generation = operator.generation(key)
        assert len(generation.leases) == 2
        assert all(one["Anonymous"] == 0 for one in maps), "nobody has a page of his own"
        assert sum(one["Pss"] for one in maps) <= generation.size_bytes
        second.communicate()
        assert second.returncode == 0


# --- on a device --------------------------------------------------------------------------------


@pytest.fixture
def device() -> str:
    return new_device()


def attached(served, device, **facts) -> gpu_worker.Worker:
    return gpu_worker.attach(served.socket, device=device, vram_budget=8 * MIB, **facts)


def load(worker, key, **facts) -> gpu_worker.ModelHandle:
    return worker.load(
        key,
        skeleton=lambda: plain(512),
        build=lambda: quantised("int8_weight_only", 512),
        **facts,
    )


@pytest.mark.parametrize("facts", [{}, {"keep_host": False}, {"share_vram": True}], ids=str)
def test_a_quantised_model_goes_to_a_device_and_comes_back(served, device, operator, key, facts):
    """Its bytes are on the device, by the books and by the kernel, and the results the same."""
    original = quantised("int8_weight_only", 512)
    want = original(inputs(512))
    worker = attached(served, device)
    handle = load(worker, key, **facts)
    for _ in range(2):
        with handle as model:
            weight = model[0].weight
            there = [part.data_ptr() for part in plain_parts(weight)]
            assert equal(model(inputs(512)), want)
            worker.flush()
            assert charged(operator, device) == taken(device) >= 2 * 512 * 512
        assert worker.offload(key)
        worker.flush()
        assert model[0].weight is weight
        assert not set(there) & {part.data_ptr() for part in plain_parts(weight)}
        if "share_vram" not in facts:
            assert charged(operator, device) == taken(device) == 0
        if "keep_host" not in facts:
            assert equal(model(inputs(512)), want)
        served.audit()
    del model, weight
    worker.shutdown()


def test_two_workers_share_a_quantised_model_on_a_device(served, device, operator, key):
    first = attached(served, device, share_vram=True)
    second = attached(served, device, share_vram=True)
    want = quantised("int8_weight_only", 512)(inputs(512))
    with load(first, key) as one, load(second, key) as other:
        assert equal(one(inputs(512)), want) and equal(other(inputs(512)), want)
        assert charged(operator, device) == taken(device)
    del one, other
    first.shutdown()
    second.shutdown()


def test_a_part_of_a_quantised_model_is_on_a_device_that_is_too_small(served, device, key):
    """Each of its layers is brought there for its own forward."""
    worker = gpu_worker.attach(served.socket, device=device, vram_budget=400 * 1024)
    want = quantised("int8_weight_only", 512)(inputs(512))
    with load(worker, key) as model:
        assert equal(model(inputs(512)), want)
    del model
    worker.shutdown()


def test_a_write_to_quantised_weights_that_are_shared_on_a_device_is_refused(served, device, key):
    """Without that it would end the process: what they are made of is read-only there."""
    worker = attached(served, device, share_vram=True)
    state = quantised("int8_weight_only", 512).state_dict()
    with load(worker, key) as model:
        with pytest.raises(gpu_worker.ArgumentRefused, match=r"write to '0\.weight'"):
            model.load_state_dict(state)
        with (
            gpu_worker.check_writes(),
            torch.no_grad(),
            pytest.raises(gpu_worker.ArgumentRefused, match=r"write to '0\.weight'"),
        ):
            model[0].weight.copy_(state["0.weight"])
    del model
    worker.shutdown()
