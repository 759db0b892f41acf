"""Checkpoints as people have them, through a real coordinator: shards, folders, parts of a file."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

import gpu_worker
from gpu_worker import Source
from shm_store.errors import ArgumentRefused, SourceError, SourceMalformed, SourceNotOpened
from tests.gpu_worker.served import leases
from tests.processes import fds_of, running, write_safetensors

pytestmark = pytest.mark.process

SHARDS = ("model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "m3.safetensors")


@pytest.fixture
def sharded(tmp_path):
    """A folder with an index of three shards; gives what they hold."""
    torch.manual_seed(0)
    state = {f"layer.{number}.weight": torch.randn(number + 1, 5) for number in range(9)}
    weight_map = {name: SHARDS[number % 3] for number, name in enumerate(state)}
    folder = tmp_path / "sharded"
    folder.mkdir()
    for shard in SHARDS:
        part = {name: tensor for name, tensor in state.items() if weight_map[name] == shard}
        save_file(part, folder / shard)
    write_index(folder, weight_map)
    return folder, state, weight_map


def write_index(folder, weight_map):
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def same(state, expected):
    assert list(state) == list(expected)
    return all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize("place", ["", "model.safetensors.index.json"])
def test_shards_are_one_state_dict(worker, operator, key, sharded, place):
    folder, expected, _ = sharded
    state = worker.state_dict(key, source=folder / place)
    assert same(state, expected)
    assert leases(operator, key) == 1
    again = worker.state_dict(key, source=folder / "model.safetensors.index.json")
    assert again["layer.0.weight"].data_ptr() == state["layer.0.weight"].data_ptr()


def test_a_shard_that_is_replaced_is_another_generation(worker, key, sharded):
    folder, expected, _ = sharded
    worker.state_dict(key, source=folder)
    changed = {name: tensor + 1 for name, tensor in load_file(folder / SHARDS[1]).items()}
    save_file(changed, folder / "new")
    os.rename(folder / "new", folder / SHARDS[1])
    assert same(worker.state_dict(key, source=folder), {**expected, **changed})


def test_the_index_says_what_is_read(worker, key, sharded, caplog):
    """What a shard has beside is left out, and so is a whole one, which is named."""
    folder, expected, _ = sharded
    extra = folder / "model-00003-of-00003.safetensors"
    save_file({"layer.0.weight": torch.zeros(1)}, extra)
    save_file({**load_file(folder / SHARDS[2]), "layer.0.weight": torch.zeros(1)}, folder / "new")
    os.rename(folder / "new", folder / SHARDS[2])
    with caplog.at_level("WARNING", "gpu_worker"):
        assert same(worker.state_dict(key, source=folder), expected)
    assert f"does not name {extra.name}" in caplog.text


def test_a_tensor_that_is_not_where_the_index_says_is_named(worker, operator, key, sharded):
    folder, _, weight_map = sharded
    write_index(folder, {**weight_map, "layer.0.weight": SHARDS[1], "none": SHARDS[2]})
    with pytest.raises(
        SourceMalformed, match=rf"{SHARDS[1]} has tensor 'layer\.0\.weight'.*1 more"
    ):
        worker.state_dict(key, source=folder)
    assert operator.generation(key) is None


@pytest.mark.parametrize("harm", ["missing", "truncated", "garbage"])
def test_a_shard_that_cannot_be_used_is_named_and_nothing_charged(
    worker, operator, key, sharded, harm
):
    folder, expected, _ = sharded
    shard = folder / SHARDS[1]
    whole = shard.read_bytes()
    if harm == "missing":
        shard.unlink()
    else:
        shard.write_bytes(whole[:-1] if harm == "truncated" else bytes(range(200)))
    with pytest.raises(SourceError, match=SHARDS[1]):
        worker.state_dict(key, source=folder)
    assert operator.generation(key) is None
    shard.write_bytes(whole)
    assert same(worker.state_dict(key, source=folder), expected), "the next attempt works"


def test_as_many_shards_as_can_travel(tmp_path, key):
    """None of their fds is left in the coordinator."""
    count = 250
    names = [f"m-{number:05}-of-{count:05}.safetensors" for number in range(count)]
    for number, name in enumerate(names):
        save_file({str(number): torch.full((1,), number)}, tmp_path / name)
    write_index(tmp_path, {str(number): name for number, name in enumerate(names)})
    with running(str(tmp_path / "s")) as started:
        with gpu_worker.attach(started.socket) as worker:
            state = worker.state_dict(key, source=tmp_path)
            assert [int(tensor) for tensor in state.values()] == list(range(count))
            del state
        assert len(fds_of(started.process.pid)) < 64


def test_a_part_of_a_file_under_other_names(worker, key, tmp_path):
    path = tmp_path / "sd.safetensors"
    whole = {
        "model.unet.in": torch.randn(3),
        "model.unet.out": torch.randn(2, 2),
        "vae.in": torch.randn(4),
    }
    save_file(whole, path)
    part = Source(path, name_filter="model.*", rename={"model.unet.": "", "model.": "x."})
    state = worker.state_dict(key, source=part)
    assert sorted(state) == ["in", "out"]
    assert torch.equal(state["out"], whole["model.unet.out"])
    assert same(worker.state_dict(key, source=path), load_file(path)), "other weights, by options"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"name_filter": "unet.*"}, "matches none of its 2 tensors.*'a'"),
        ({"rename": {"a": "b"}}, "'[ab]' and '[ab]' are both to be named 'b'"),
    ],
)
def test_options_that_fit_nothing_are_refused_by_name(
    worker, operator, key, tmp_path, options, text
):
    path = tmp_path / "two.safetensors"
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, path)
    with pytest.raises(SourceMalformed, match=text):
        worker.state_dict(key, source=Source(path, **options))
    assert operator.generation(key) is None


@pytest.mark.parametrize(
    "options",
    [
        {"name_filter": [1]},
        {"name_filter": ""},
        {"name_filter": ["a"] * 257},
        {"rename": {"a": None}},
        {"dtype": torch.int8},
        {"dtype": "no_dtype"},
        {"dtype": {"*": 3}},
        {"name_filter": 5},
        {"rename": "a=b"},
        {"rename": [("a", "b", "c")]},
    ],
)
def test_options_that_are_none_are_refused_before_anything_is_asked(worker, key, options):
    with pytest.raises(ArgumentRefused):
        worker.state_dict(key, source=Source("nowhere.safetensors", **options))


def test_a_tie_across_shards_is_one_parameter(worker, key, tmp_path):
    """The index names the tensor once, as files hold what is tied once."""

    def tied():
        module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        module[1].weight = module[0].weight
        return module

    module = tied()
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    shard_of = {"0.bias": "a", "1.weight": "b", "1.bias": "b"}
    for shard in "ab":
        part = {name: state[name] for name, where in shard_of.items() if where == shard}
        save_file(part, tmp_path / shard)
    write_index(tmp_path, shard_of)
    with worker.use(key, skeleton=tied, source=tmp_path) as loaded:
        assert loaded[0].weight is loaded[1].weight
        assert same(loaded.state_dict(), module.state_dict())


def test_a_folder_without_a_checkpoint_is_named(worker, key, tmp_path):
    with pytest.raises(SourceNotOpened, match="no checkpoint"):
        worker.state_dict(key, source=tmp_path)


def test_a_module_of_other_tensors_takes_the_place_of_the_first(worker, key, tmp_path):
    """The record knows how its weights were read."""
    path = tmp_path / "two.safetensors"
    save_file({f"{part}.weight": torch.full((2, 3), float(part)) for part in "12"}, path)

    def skeleton():
        return torch.nn.Linear(3, 2, bias=False)

    def part(number):
        return Source(path, name_filter=f"{number}.*", rename={f"{number}.": ""})

    for number in (1, 2, 1):
        with worker.use(key, skeleton=skeleton, source=part(number)) as module:
            assert torch.equal(module.weight, torch.full((2, 3), float(number)))


def test_a_hundred_thousand_tensors_with_names_of_all_kinds(worker, key, tmp_path):
    """Each is one byte; the names have every plane of Unicode, white space, and NUL."""
    letters = ["a", "é", "漢", "🦊", "\0", "\n", '"', "\\", "\u200d", "."]
    names = [f"{number}{letters[number % len(letters)]}" for number in range(100_000)]
    tensors = {name: ("U8", [1], bytes([number % 256])) for number, name in enumerate(names)}
    state = worker.state_dict(key, source=write_safetensors(tmp_path / "many", tensors))
    assert list(state) == names
    assert torch.cat(list(state.values())).tolist() == [number % 256 for number in range(100_000)]
