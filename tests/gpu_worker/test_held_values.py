"""Extra state and tensors made of tensors: into a segment and back, equal and zero-copy."""

import collections
import copy
import io
import re
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpu_worker import publish
from gpu_worker.tensors import entries, tensors
from shm_store.errors import TensorRefused
from shm_store.manifest import Kind
from tests.gpu_worker import wrapped
from tests.gpu_worker.sealed import bits, in_map, mapped, seal
from tests.gpu_worker.wrapped import Around, Layout, Level, Mode, Scaled, Slotted, scaled

# --- extras -------------------------------------------------------------------------------------

EXTRAS: dict[str, Any] = {
    "none": None,
    "bool": True,
    "int": 7,
    "big_int": 1 << 100,
    "float": -0.5,
    "complex": 1 - 2j,
    "text": "größe",
    "bytes": b"\0\xff" * 4000,
    "bytearray": bytearray(b"abc"),
    "list": [1, [2.5, None]],
    "tuple": (1, (2,), []),
    "set": {1, "a", (2, 3)},
    "frozenset": frozenset({1}),
    "dict": {"a": 1, 2: "b", (3, None): {}, torch.float16: torch.Size([1])},
    "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
    "size": torch.Size([2, 0, 3]),
    "dtype": torch.bfloat16,
    "odd_dtype": torch.quint4x2,
    "device": torch.device("cuda", 1),
    "layout": torch.sparse_csr,
    "memory_format": torch.channels_last,
    "enum": Mode.SIGNED,
    "int_enum": Level.LOW,
    "dataclass": Layout((1, 2), Mode.UNSIGNED, {"a": torch.int8}),
}


@pytest.mark.parametrize("kind", EXTRAS)
def test_a_value_comes_out_equal_and_of_the_same_type(kind):
    weights = {"before": torch.ones(2), "layer._extra_state": EXTRAS[kind], "after": torch.ones(3)}
    with mapped(seal(weights)) as buffer:
        state = tensors(buffer)
        assert list(state) == list(weights)
        value = state["layer._extra_state"]
        assert type(value) is type(EXTRAS[kind]) and value == EXTRAS[kind]
        assert [entry.kind for entry in entries(buffer)][1] is Kind.EXTRA


def test_a_dataclass_with_slots_comes_out_without_its_init():
    value = Slotted(torch.int8)
    value.calls = [1, 2]
    with mapped(seal({"x": value})) as buffer:
        assert tensors(buffer)["x"] == value


def test_extra_state_as_transformer_engine_writes_it():
    """A file at its end, with a pickle that we do not look into."""
    written = io.BytesIO()
    torch.save({"scale_fwd": torch.ones(3), "amax": torch.zeros(2, 3)}, written)
    with mapped(seal({"x._extra_state": written})) as buffer:
        read = tensors(buffer)["x._extra_state"]
    assert type(read) is io.BytesIO and read.tell() == written.tell()
    read.seek(0)
    assert torch.equal(torch.load(read, weights_only=True)["scale_fwd"], torch.ones(3))


def test_tensors_in_a_value_are_shared_as_all_others_are():
    """Zero-copy, aliased with what they share bytes with, and parameters if they were."""
    weight = torch.arange(12.0).view(3, 4)
    value: dict[str, Any] = {
        "same": weight,
        "transposed": [weight.t()],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "own": (torch.tensor(3), torch.empty(0, 2), torch.ones(2, dtype=torch.complex64).conj()),
        "wrapped": torch.nn.Parameter(scaled(), requires_grad=False),
    }
    with mapped(seal({"w": weight, "x": value})) as buffer:
        state = tensors(buffer)
        held = state["x"]
        assert list(state) == ["w", "x"]
        assert held["same"].data_ptr() == state["w"].data_ptr()
        assert held["transposed"][0].stride() == (1, 4)
        state["w"].add_(1)
        assert torch.equal(held["transposed"][0], (weight + 1).t())
        assert type(held["parameter"]) is torch.nn.Parameter and in_map(buffer, held["parameter"])
        assert [tuple(one.shape) for one in held["own"]] == [(), (0, 2), (2,)]
        assert bits(held["own"][2]) == bits(value["own"][2])
        around = held["wrapped"]
        assert type(around) is Scaled and in_map(buffer, around.integers)
        assert isinstance(around, torch.nn.Parameter)
        assert not any(one.requires_grad for one in (*held["own"], held["parameter"]))


def test_each_caller_gets_a_value_of_his_own():
    shared = [1]
    with mapped(seal({"a": shared, "b": shared, "c": {"t": torch.ones(2)}})) as buffer:
        first, second = tensors(buffer), tensors(buffer)
        first["a"].append(2)
        first["c"]["t"] = None
        assert second["a"] == second["b"] == first["b"] == [1]
        assert torch.equal(second["c"]["t"], torch.ones(2))


def test_a_whole_training_checkpoint_can_be_held():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    checkpoint: dict[str, Any] = {
        "epoch": 3,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    with mapped(seal({**checkpoint, "model": dict(checkpoint["model"])})) as buffer:
        state = tensors(buffer)
        assert state["epoch"] == 3
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        exp_avg = state["optimizer"]["state"][0]["exp_avg"]
        assert torch.equal(exp_avg, checkpoint["optimizer"]["state"][0]["exp_avg"])


def test_names_that_look_like_those_of_parts_do_not_collide():
    """A part is named after its entry and its number; a user may have that name already."""
    weights = {"x": [torch.ones(2)], "x\x003": torch.ones(3), "x\x003\0": torch.ones(4)}
    with mapped(seal(weights)) as buffer:
        state = tensors(buffer)
        assert list(state) == list(weights)
        assert len(state["x"][0]) == 2 and len(state["x\x003"]) == 3


def more():
    layout = Layout()
    object.__setattr__(layout, "cached", 1)
    return layout


def made_here():
    import dataclasses

    return dataclasses.make_dataclass("Here", ["a"])(1)


REFUSED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "tensor_as_a_key": (lambda: {torch.ones(1): 2}, "a key, which equals no other", "leave it out"),
    "tensor_in_a_set": (lambda: [{(torch.ones(1),)}], "in a set", "leave it out"),
    "several_flags": (lambda: wrapped.Flags.A | wrapped.Flags.B, "of type Flags", "leave it out"),
    "dataclass_that_ends": (lambda: wrapped.Ends("/"), "of type Ends", "leave it out"),
    "dataclass_with_more": (more, "attributes are not its fields", "leave it out"),
    "dataclass_in_a_function": (made_here, "cannot be found", "at the top of a module"),
    "wrapper_one_way": (
        lambda: torch.ones(2).as_subclass(wrapped.OneWay),
        "has no __tensor_unflatten__",
        "plain tensor",
    ),
    "wrapper_that_fails": (
        lambda: wrapped.Fails(torch.ones(2)),
        "not while it is on fire",
        "leave it out",
    ),
    "wrapper_of_another_class": (
        lambda: wrapped.Other(torch.ones(2)),
        "comes out as something else",
        "leave it out",
    ),
    "wrapper_that_is_stuck": (
        lambda: wrapped.Stuck(torch.ones(2)),
        "cannot be made anew of its parts: not any more",
        "leave it out",
    ),
    "context_with_a_function": (
        lambda: scaled(layout=[len]),
        "of type builtin_function_or_method, at ['context'][0]",
        "leave it out",
    ),
    "inner_on_meta": (
        lambda: Around(torch.ones(2, device="meta")),
        "no bytes, at ['inner']['held']",
        "real weights",
    ),
    "dtensor_like": (lambda: scaled(layout=types.SimpleNamespace()), "SimpleNamespace", "leave"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_made_again_is_refused_by_name(kind):
    make, why, remedy = REFUSED[kind]
    value = make()
    with pytest.raises(TensorRefused, match=re.escape(why)) as caught:
        publish.plan({"fine": torch.ones(2), "the.bad": value})
    assert caught.value.name == "the.bad"
    assert remedy in caught.value.remedy


# --- tensors made of tensors --------------------------------------------------------------------


def test_a_wrapper_comes_out_as_it_was_over_the_shared_bytes():
    made = scaled(layout=Layout((2,), Mode.UNSIGNED, {"dtype": torch.quint8}))
    weights = {"a": torch.ones(2), "w": torch.nn.Parameter(made, requires_grad=False), "z": 3}
    with mapped(seal(weights)) as buffer:
        state = tensors(buffer)
        assert list(state) == ["a", "w", "z"]
        held = state["w"]
        assert type(held) is Scaled and not isinstance(held, torch.nn.Parameter)
        assert held.layout_of_it == made.layout_of_it
        assert (held.shape, held.stride(), held.dtype) == (made.shape, made.stride(), made.dtype)
        assert in_map(buffer, held.integers) and in_map(buffer, held.scale)
        assert bits(held.integers) == bits(made.integers) and bits(held.scale) == bits(made.scale)
        assert not held.requires_grad
        assert torch.equal(held @ torch.ones(6, 2), made @ torch.ones(6, 2))
    assert [entry.kind for entry in decode(weights).tensors] == [
        Kind.TENSOR,
        Kind.WRAPPED,
        Kind.EXTRA,
        Kind.INNER,
        Kind.INNER,
    ]


def decode(weights):
    from shm_store.manifest import decode_manifest

    return decode_manifest(publish.plan(weights).manifest)


def test_wrappers_in_wrappers_come_out_nested():
    with mapped(seal({"w": Around(Around(scaled()))})) as buffer:
        held = tensors(buffer)["w"]
        assert [type(one) for one in (held, held.held, held.held.held)] == [
            Around,
            Around,
            Scaled,
        ]
        assert in_map(buffer, held.held.held.integers)
        assert torch.equal(held + 0, scaled().plain())


def test_a_tied_wrapper_comes_out_as_one_and_costs_once():
    """Whether it is one object, or two over the same bytes as in the dict of a tied module."""
    made = scaled()
    weights = {"a": made, "b": made, "c": made.detach(), "other": scaled()}
    one = sum(entry.size_bytes for entry in decode({"a": made}).groups)
    assert sum(entry.size_bytes for entry in decode(weights).groups) < 3 * one
    with mapped(seal(weights)) as buffer:
        state = tensors(buffer)
        assert state["a"] is state["b"] is state["c"]
        assert state["a"] is not state["other"]
        assert tensors(buffer)["a"] is not state["a"], "another caller's is another"


def test_what_a_wrapper_is_made_of_keeps_its_aliases_and_strides():
    whole = torch.arange(48, dtype=torch.int8).view(6, 8)
    made = Scaled(whole.t(), torch.ones(8, 1).expand(8, 1), Layout())
    part = Scaled(whole[2:4], torch.ones(2, 1), Layout())
    with mapped(seal({"plain": whole, "a": made, "b": part})) as buffer:
        state = tensors(buffer)
        assert state["a"].integers.stride() == (1, 8)
        assert state["a"].stride() == made.stride()
        state["plain"].zero_()
        assert not state["a"].integers.any() and not state["b"].integers.any()


def test_a_wrapper_as_a_buffer_that_no_state_dict_has():
    module = torch.nn.Module()
    module.register_buffer("table", scaled(), persistent=False)
    with mapped(seal(module)) as buffer:
        assert entries(buffer)[0].kind is Kind.NON_PERSISTENT_WRAPPED
        assert type(tensors(buffer)["table"]) is Scaled


def test_a_wrapper_made_in_inference_mode_can_be_edited_outside_of_it():
    with mapped(seal({"w": scaled()})) as buffer:
        with torch.inference_mode():
            held = tensors(buffer)["w"]
        held.integers.add_(1)
        assert not held.is_inference()


def test_a_wrapper_can_be_copied_and_the_copy_is_its_own():
    with mapped(seal({"w": Around(torch.ones(3))})) as buffer:
        copied = copy.deepcopy(tensors(buffer)["w"].held)
        assert not in_map(buffer, copied)
