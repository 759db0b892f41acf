"""Writes to weights that a device's processes share, which are named before they end the process.

In a process of its own, which would be ended by each that is not.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.gpu_worker.on_device import new_device
from tests.processes import ROOT, WAIT_S

pytestmark = pytest.mark.process

PROGRAM = """
import copy, io, json, sys, torch, gpu_worker
from gpu_worker import ArgumentRefused, check_writes, read_only

def net():
    torch.manual_seed(0)
    inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    return torch.nn.Sequential(inner, torch.nn.Linear(8, 8))

def writers():
    "Layers that write to what they have when they are used."
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(8, 8, max_norm=0.1)
    new = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(8, 8))
    old = torch.nn.utils.spectral_norm(torch.nn.Linear(8, 8))
    return torch.nn.Sequential(embedding, new, old, torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8))

def said(do):
    try:
        with torch.no_grad():
            do()
    except ArgumentRefused as error:
        return str(error)
    return "nothing"

def step(kind=torch.optim.SGD):
    weight = model[1].weight.requires_grad_(True)
    try:
        with torch.enable_grad():
            model(x).sum().backward()
        optimizer = kind(model.parameters(), lr=1.0)
        optimizer.step()
    finally:
        weight.requires_grad_(False)
        weight.grad = None

def used():
    rows = torch.arange(4)
    for mode in (False, True):
        model.train(mode)(rows)
        torch.nn.BatchNorm1d.forward(model[3], x)
    model[3].reset_running_stats()
    torch.optim.swa_utils.update_bn([rows], model)

def step_closure(kind):
    weight = model[1].weight.requires_grad_(True)
    optimizer = kind([weight], lr=1.0)
    def closure():
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        return loss
    try:
        optimizer.step(closure)
    finally:
        weight.requires_grad_(False)
        weight.grad = None

def statistics():
    bias = model[1].bias
    torch.nn.functional.batch_norm(x, bias, bias, training=True)

def saved():
    file = io.BytesIO()
    torch.save(model, file)
    assert b"gpu_worker" not in file.getvalue()

def checked(do):
    def inside():
        with check_writes():
            do()
    return inside

def adapter():
    extra = torch.nn.Linear(8, 8)
    with torch.enable_grad():
        extra(model(x)).sum().backward()
    torch.optim.SGD([*extra.parameters(), *model.parameters()], lr=1.0).step()

def assign():
    before = model[1].bias
    model[1].load_state_dict({"weight": model[1].weight, "bias": torch.ones(8)}, assign=True)
    model[1].bias = before

def a_copy():
    other = copy.deepcopy(model).train()
    other.load_state_dict({name: value + 1 for name, value in state.items()})
    other(x)

worker = gpu_worker.attach(sys.argv[1], device=sys.argv[2], share_vram=True)
handle = worker.load("net", skeleton=net, build=net)
x = torch.ones(4, 8)
model = handle.__enter__()
state = {name: value.clone() for name, value in model.state_dict().items()}
wanted = model(x)
for name, do in {
    "load_state_dict": lambda: model.load_state_dict(state),
    "an optimizer": step,
    "another optimizer": lambda: step(torch.optim.Adam),
    "a load of a child": lambda: model[1].load_state_dict(model[1].state_dict()),
    "a load of what holds it": lambda: torch.nn.ModuleList([model[1]]).load_state_dict(
        {"0.weight": torch.ones(8, 8), "0.bias": torch.ones(8)}),
    "a step that makes gradients": lambda: step_closure(torch.optim.SGD),
    "LBFGS": lambda: step_closure(torch.optim.LBFGS),
    "statistics": checked(statistics),
    "statistics, inferred": torch.inference_mode()(checked(statistics)),
    "an operation": checked(lambda: model[0][0].weight.mul_(2.0)),
    "one through data": checked(lambda: model[1].bias.data.copy_(torch.ones(8))),
    "one to a view": checked(lambda: model[1].weight[0, :2].zero_()),
    "one of out": checked(lambda: torch.add(x, x, out=model[1].weight.view(8, 8)[:4])),
    "several at once": checked(lambda: torch._foreach_mul_([torch.ones(2), model[1].bias], 2.0)),
    "an initialiser": checked(lambda: torch.nn.init.zeros_(model[1].weight)),
    "reading": checked(lambda: model(x)),
    "an adapter": adapter,
    "assign": assign,
    "a copy": a_copy,
    "scripted": lambda: torch.jit.script(model),
    "saved": saved,
}.items():
    print(json.dumps([name, said(do)]), flush=True)
print(json.dumps(["the same", str(torch.equal(model(x), wanted))]), flush=True)
handle.__exit__(None, None, None)
worker.offload("net")
print(json.dumps(["left", str(len(read_only._guards))]), flush=True)
print(json.dumps(["on the host", said(lambda: model.load_state_dict(state))]), flush=True)
with worker.load("private", skeleton=net, build=net, private=True) as own:
    print(json.dumps(["private", said(lambda: own.load_state_dict(state))]), flush=True)
with worker.load("writers", skeleton=writers, build=writers) as model:
    print(json.dumps(["used", said(used)]), flush=True)
    rest = own[1].state_dict()
    print(json.dumps(["the rest", said(lambda: model[4].load_state_dict(rest))]), flush=True)
"""

NAMED = {
    "load_state_dict": ("load_state_dict", "0.0.weight"),
    "an optimizer": ("a step of SGD", "1.weight"),
    "another optimizer": ("a step of Adam", "1.weight"),
    "a load of a child": ("load_state_dict", "1.weight"),
    "a load of what holds it": ("load_state_dict", "1.weight"),
    "a step that makes gradients": ("a step of SGD", "1.weight"),
    "LBFGS": ("a step of LBFGS", "1.weight"),
    "statistics": ("aten.native_batch_norm", "1.bias"),
    "statistics, inferred": ("aten.batch_norm", "1.bias"),
    "an operation": ("aten.mul_", "0.0.weight"),
    "one through data": ("aten.copy_", "1.bias"),
    "one to a view": ("aten.zero_", "1.weight"),
    "one of out": ("aten.add.out", "1.weight"),
    "several at once": ("aten._foreach_mul_", "1.bias"),
    "an initialiser": ("aten.zero_", "1.weight"),
    "the rest": ("load_state_dict", "4.weight"),
}
ALLOWED = (
    "reading",
    "an adapter",
    "assign",
    "a copy",
    "on the host",
    "private",
    "scripted",
    "saved",
    "used",
)


@pytest.fixture(scope="module")
def told(served):
    """What each of the writes of the program has led to; those after a fault are missing."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, served.socket, new_device()],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=6 * WAIT_S,
        check=False,
    )
    lines = dict(map(json.loads, ended.stdout.splitlines()))
    return {"": f"it ended with {ended.returncode}: {ended.stderr[-2000:]}", **lines}


@pytest.mark.parametrize("write", NAMED)
def test_what_would_write_is_stopped_and_the_weight_is_named(told, write):
    why, name = NAMED[write]
    said = told.get(write, told[""])
    assert why in said and f"would write to {name!r} of " in said and "share_vram=False" in said


@pytest.mark.parametrize("what", ALLOWED)
def test_what_writes_to_nothing_that_is_shared_goes_on(told, what):
    assert told.get(what, told[""]) == "nothing"


def test_nothing_watches_what_has_left_the_device(told):
    """Its addresses may be others' soon."""
    assert told.get("left", told[""]) == "0"


def test_nothing_was_changed(told):
    assert told.get("the same", told[""]) == "True"
