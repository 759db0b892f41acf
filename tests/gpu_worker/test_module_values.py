"""Modules whose state is more than plain tensors: extra state, and weights made of others."""

# What is in a Sequential is anything to mypy.
# mypy: disable-error-code="index,operator,assignment"

from __future__ import annotations

import ast
import io
import threading
from typing import Any

import pytest
import torch

import gpu_worker
from gpu_worker.module import assemble, held_bytes
from gpu_worker.wrappers import plain_parts
from shm_store.errors import ArgumentRefused, WeightsMissing
from tests.gpu_worker.mixed import everything, seen
from tests.gpu_worker.on_device import MIB, charged, new_device, taken
from tests.gpu_worker.sealed import KEY, mapped, seal
from tests.gpu_worker.test_module import in_map
from tests.gpu_worker.wrapped import Around, Layout, Mode, Quantised, Scaled, scaled

pytestmark = pytest.mark.process

EXTRA: dict[str, Any] = {"scale": 3.5, "recipe": ("delayed", [1, 2]), "amax": torch.arange(3.0)}


def layers(extra: object = None) -> torch.nn.Sequential:
    made = torch.nn.Sequential(Quantised(3, 2), torch.nn.Linear(2, 2))
    made[0].extra = extra
    return made


def frozen(rows: int = 4, columns: int = 6) -> torch.nn.Parameter:
    return torch.nn.Parameter(scaled(rows, columns), requires_grad=False)


def test_extra_state_comes_to_the_skeleton_that_asks_for_it(worker, key):
    """By one call of its `set_extra_state`, with a value of its own."""
    original = layers(EXTRA)
    with worker.use(key, skeleton=layers, build=lambda: original) as model:
        first = model[0]
        assert first.calls == 1
        assert first.extra["recipe"] == ("delayed", [1, 2]) and first.extra["scale"] == 3.5
        assert torch.equal(first.extra["amax"], torch.arange(3.0))
        assert first.extra["amax"].data_ptr() != EXTRA["amax"].data_ptr()
        state = worker.state_dict(key, build=lambda: original)
        assert list(state) == list(original.state_dict())
        assert state["0._extra_state"]["recipe"] is not first.extra["recipe"]
        state["0._extra_state"]["recipe"][1].append(3)
        assert first.extra["recipe"] == ("delayed", [1, 2])


@pytest.mark.parametrize("extra", [None, b"", io.BytesIO(b"pickled"), torch.ones(2), [], 0])
def test_any_extra_state_comes_as_what_it_is(worker, key, extra):
    with worker.use(f"{key}", skeleton=layers, build=lambda: layers(extra)) as model:
        assert model[0].calls == 1 and type(model[0].extra) is type(extra)


def test_weights_without_the_extra_state_of_the_skeleton_are_refused_by_name():
    state = layers().state_dict()
    del state["0._extra_state"]
    with mapped(seal(state)) as buffer, pytest.raises(WeightsMissing) as caught:
        assemble(KEY, layers, buffer)
    assert caught.value.names == ("0._extra_state",)


def test_values_without_a_place_are_reported():
    state = layers().state_dict() | {"epoch": 3, "config": {"a": 1}}
    with mapped(seal(state)) as buffer:
        assert assemble(KEY, layers, buffer).unexpected == ("epoch", "config")


def test_a_value_in_the_place_of_a_weight_is_refused():
    state: dict[str, Any] = layers().state_dict() | {"1.bias": [1.0, 2.0]}
    with (
        mapped(seal(state)) as buffer,
        pytest.raises(ArgumentRefused, match=r"do not fit.*1\.bias"),
    ):
        assemble(KEY, layers, buffer)


def test_what_set_extra_state_raises_comes_out():
    class Refuses(Quantised):
        def set_extra_state(self, state):
            raise LookupError("not this one")

    with (
        mapped(seal(Refuses(3, 2))) as buffer,
        pytest.raises(LookupError, match="not this one"),
    ):
        assemble(KEY, lambda: Refuses(3, 2), buffer)
    with mapped(seal(layers())) as buffer:
        assemble(KEY, layers, buffer)


@pytest.mark.filterwarnings("ignore")
def test_everything_that_a_state_dict_can_hold_comes_to_another_process(run, worker, served, key):
    """Some two hundred entries: types, order, every bit, and what shares bytes with what."""
    made = everything()
    state = worker.state_dict(key, build=lambda: made)
    assert list(state) == list(made)
    want = [line for line in seen(made) if " is at " not in line]
    assert [line for line in seen(state) if " is at " not in line] == want
    script = f"""
    warnings.simplefilter("ignore")
    from tests.gpu_worker.mixed import seen
    for line in seen(worker.state_dict({key!r}, build=lambda: 1 / 0)):
        print(repr(line))
    """
    theirs = [ast.literal_eval(line) for line in run(script).splitlines()]
    mine = seen(state)
    assert len(mine) > 250 and theirs == mine
    assert "wrapped.integers is at wrapped" in mine


# --- weights made of others ---------------------------------------------------------------------


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Linear(6, 4, bias=False)
        self.head = torch.nn.Linear(6, 4, bias=False)
        self.head.weight = self.emb.weight


class Apart(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(6, 4, bias=False)


def quantised(kind: type[Tied] = Tied) -> Tied:
    made = kind()
    made.emb.weight = frozen()
    made.head.weight = made.emb.weight if kind is Tied else frozen()
    return made


def test_a_weight_made_of_others_is_assigned_without_a_copy():
    original = quantised(Apart)
    with mapped(seal(original)) as buffer:
        module = assemble(KEY, Apart, buffer).module
        for weight in (module.emb.weight, module.head.weight):
            assert type(weight) is Scaled and isinstance(weight, torch.nn.Parameter)
            assert not weight.requires_grad
            assert all(in_map(part, buffer) for part in plain_parts(weight))
        assert module.emb.weight is not module.head.weight
        assert torch.equal(module.emb(torch.ones(2, 6)), original.emb(torch.ones(2, 6)))
        parts = [part for weight in module.parameters() for part in plain_parts(weight)]
        assert held_bytes(module) == sum(part.nbytes for part in parts)


@pytest.mark.parametrize("of_the_module", [True, False], ids=["module", "state_dict"])
def test_a_tie_of_weights_made_of_others_is_one_parameter(of_the_module):
    original = quantised()
    with mapped(seal(original if of_the_module else original.state_dict())) as buffer:
        module = assemble(KEY, Apart, buffer).module
        assert module.head.weight is module.emb.weight
        assert len(list(module.parameters())) == 1


def test_a_tie_of_the_skeleton_supplies_a_weight_made_of_others():
    state = quantised().state_dict()
    del state["head.weight"]
    with mapped(seal(state)) as buffer:
        module = assemble(KEY, Tied, buffer).module
        assert module.head.weight is module.emb.weight
    with mapped(seal(state)) as buffer, pytest.raises(WeightsMissing, match=r"head\.weight"):
        assemble(KEY, Apart, buffer)


def test_a_weight_made_of_others_of_another_shape_is_refused():
    with (
        mapped(seal({"weight": scaled(5, 6)})) as buffer,
        pytest.raises(ArgumentRefused, match=r"weight has shape \[5, 6\], the skeleton's \[4, 6\]"),
    ):
        assemble(KEY, lambda: torch.nn.Linear(6, 4, bias=False), buffer)


def test_a_buffer_made_of_others_that_no_state_dict_has():
    class Table(torch.nn.Module):
        table: torch.Tensor

        def __init__(self, table: torch.Tensor) -> None:
            super().__init__()
            self.register_buffer("table", table, persistent=False)

    with mapped(seal(Table(Around(scaled())))) as buffer:
        module = assemble(KEY, lambda: Table(torch.zeros(4, 6)), buffer).module
        assert type(module.table) is Around and in_map(module.table.held.integers, buffer)


def test_a_class_that_this_process_lacks_is_named_to_who_loads(run, worker, served, key):
    """The remedy says what to import; nothing is left behind."""
    worker.state_dict(key, build=lambda: {"w": scaled(layout=Layout(mode=Mode.UNSIGNED))})
    script = f"""
    try:
        worker.state_dict({key!r}, build=lambda: 1 / 0)
    except gpu_worker.ClassUnknown as error:
        print(error.code, "|", error.remedy)
    import tests.gpu_worker.wrapped
    print(type(worker.state_dict({key!r}, build=lambda: 1 / 0)["w"]).__name__)
    """
    said, made = run(script).splitlines()
    assert said.startswith("class_unknown | import tests.gpu_worker.wrapped first")
    assert made == "Scaled"


def test_two_threads_that_read_at_once_have_values_of_their_own(worker, key):
    build = lambda: {"x": {"a": []}, "w": scaled()}  # noqa: E731
    worker.state_dict(key, build=build)
    found = []

    def read() -> None:
        state = worker.state_dict(key, build=build)
        state["x"]["a"].append(1)
        found.append(state)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [state["x"] for state in found] == [{"a": [1]}] * 8


# --- on a device --------------------------------------------------------------------------------


def sparse() -> torch.nn.Linear:
    made = torch.nn.Linear(6, 6)
    made.weight = torch.nn.Parameter(torch.eye(6).to_sparse_csr(), requires_grad=False)
    return made


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
def test_a_sparse_weight_stays_on_the_host(served, worker, operator, key):
    """On a device with memory it is refused by name, and told where it can be."""
    with worker.use(key, skeleton=lambda: torch.nn.Linear(6, 6), build=sparse) as model:
        assert model.weight.layout is torch.sparse_csr
        assert torch.equal(model(torch.eye(6)), torch.eye(6) + model.bias)
        assert held_bytes(model) > model.bias.nbytes
    device = new_device()
    with gpu_worker.attach(served.socket, device=device, vram_budget=MIB) as elsewhere:
        facts: dict[str, Any] = {"skeleton": lambda: torch.nn.Linear(6, 6), "build": sparse}
        handle = elsewhere.load(key, **facts)
        with pytest.raises(ArgumentRefused, match="weight") as caught, handle:
            pass
        assert "device='cpu'" in caught.value.remedy
        assert charged(operator, device) == taken(device) == 0
        handle.close()
        elsewhere.evict(key)
        with elsewhere.use(key, device="cpu", **facts) as model:
            assert model.weight.layout is torch.sparse_csr


def test_extra_state_and_nested_wrappers_on_a_device(served, operator, key):
    """The wrapper inside the wrapper moves; extra state is no tensor of the module, and stays."""

    class Deep(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Quantised(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    def build() -> Deep:
        made = Deep()
        torch.nn.init.ones_(made.layer.bias)
        made.layer.weight = torch.nn.Parameter(Around(scaled()), requires_grad=False)
        made.layer.extra = EXTRA
        return made

    device = new_device()
    want = build()(torch.ones(2, 6))
    with gpu_worker.attach(served.socket, device=device, vram_budget=MIB) as elsewhere:
        handle = elsewhere.load(key, skeleton=Deep, build=build)
        with handle as model:
            weight = model.layer.weight
            assert torch.equal(model(torch.ones(2, 6)), want)
            elsewhere.flush()
            assert charged(operator, device) == taken(device) > 0
            assert torch.equal(model.layer.extra["amax"], torch.arange(3.0))
        elsewhere.offload(key)
        assert model.layer.weight is weight and type(weight.held) is Scaled
        assert torch.equal(model(torch.ones(2, 6)), want)
        handle.close()
        del model, weight
