"""What a source is, as whoever asks opens it: a file, an index and its shards, a folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shm_store.checkpoint_files import Opened, open_checkpoint
from shm_store.errors import SourceMalformed, SourceNotOpened

pytestmark = pytest.mark.usefixtures("fds_flat")

SHARDS = ("m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors")


def files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def index(path: Path, *shards: str) -> Path:
    weight_map = {str(number): shard for number, shard in enumerate(shards)}
    path.write_text(json.dumps({"weight_map": weight_map}))
    return path


def seen(place: Path | str) -> Opened:
    opened = open_checkpoint(place)
    opened.close()
    return opened


def test_a_lone_file_has_its_own_name(tmp_path: Path) -> None:
    files(tmp_path, "a.safetensors")
    opened = seen(tmp_path / "a.safetensors")
    assert (opened.name, len(opened.fds), opened.files) == (
        str(tmp_path / "a.safetensors"),
        1,
        (),
    )


def test_an_index_brings_its_shards_and_says_what_it_leaves(tmp_path: Path) -> None:
    files(tmp_path, *SHARDS, "m-00003-of-00002.safetensors", "other.safetensors")
    place = index(tmp_path / "m.safetensors.index.json", SHARDS[1], SHARDS[0], SHARDS[1])
    opened = open_checkpoint(place)
    with_names = [os.pread(fd, 100, 0).decode() for fd in opened.fds[1:]]
    opened.close()
    assert opened.files == ("m.safetensors.index.json", *SHARDS)
    assert with_names == list(SHARDS)
    assert opened.extra == ("m-00003-of-00002.safetensors",)


def test_a_missing_shard_is_named_and_the_others_are_closed(tmp_path: Path) -> None:
    files(tmp_path, SHARDS[0])
    place = index(tmp_path / "m.safetensors.index.json", *SHARDS)
    with pytest.raises(SourceNotOpened, match=f"shard {SHARDS[1]} cannot be opened.*No such file"):
        open_checkpoint(place)


def test_an_index_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    place = tmp_path / "m.safetensors.index.json"
    place.touch()
    os.truncate(place, 1 << 40)
    with pytest.raises(SourceMalformed, match="too large"):
        open_checkpoint(place)


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["model.safetensors", "pytorch_model.bin", "tf.h5"], "model.safetensors"),
        (["model.safetensors", "model.fp16.safetensors"], "model.safetensors"),
        (
            ["diffusion_pytorch_model.safetensors", "config.json"],
            "diffusion_pytorch_model.safetensors",
        ),
        (["adapter.safetensors", "training_args.bin"], "adapter.safetensors"),
        (["m.gguf", "m.bin"], "m.gguf"),
        (["pytorch_model.bin", "optimizer.bin"], "pytorch_model.bin"),
    ],
)
def test_a_folder_stands_for_the_one_checkpoint_in_it(
    tmp_path: Path, names: list[str], chosen: str
) -> None:
    files(tmp_path, *names)
    assert seen(tmp_path).name == str(tmp_path / chosen)


def test_an_index_in_a_folder_comes_before_its_shards(tmp_path: Path) -> None:
    files(tmp_path, *SHARDS)
    place = index(tmp_path / "m.safetensors.index.json", *SHARDS)
    assert seen(tmp_path).name == str(place)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], "no checkpoint"),
        (["readme.md"], "no checkpoint"),
        (["a.safetensors", "b.safetensors"], r"2 checkpoints: a\.safetensors, b\.safetensors"),
        ([*SHARDS], "shards of a checkpoint .* no index"),
        ([SHARDS[0]], "shards of a checkpoint .* no index"),
    ],
)
def test_a_folder_without_just_one_is_refused_with_what_is_there(
    tmp_path: Path, names: list[str], text: str
) -> None:
    files(tmp_path, *names)
    with pytest.raises(SourceNotOpened, match=text):
        open_checkpoint(tmp_path)


def test_a_repository_in_the_cache_stands_for_its_main_revision(tmp_path: Path) -> None:
    """As Hugging Face keeps it: snapshots are links to blobs."""
    files(tmp_path, "blobs/1", "snapshots/old/model.safetensors")
    (tmp_path / "snapshots" / "new").mkdir()
    (tmp_path / "snapshots" / "new" / "model.safetensors").symlink_to(tmp_path / "blobs" / "1")
    with pytest.raises(SourceNotOpened, match="2 snapshots, and no main revision"):
        open_checkpoint(tmp_path)
    files(tmp_path, "refs/main")
    (tmp_path / "refs" / "main").write_text("new")
    opened = open_checkpoint(tmp_path)
    assert os.pread(opened.fds[0], 10, 0) == b"blobs/1"
    opened.close()


@pytest.mark.parametrize("url", ["file://a.safetensors", "file://host/a.safetensors", "file://"])
def test_a_file_of_another_host_is_none_of_ours(url: str) -> None:
    with pytest.raises(SourceNotOpened, match="names no file of this host"):
        open_checkpoint(url)


def test_what_is_at_a_url_is_not_opened_here(tmp_path: Path) -> None:
    assert seen("https://host/a.safetensors") == Opened("https://host/a.safetensors", [])
    files(tmp_path, "a b.safetensors")
    assert seen((tmp_path / "a b.safetensors").as_uri()).name == str(tmp_path / "a b.safetensors")
