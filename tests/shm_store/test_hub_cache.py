"""`hf://` URLs whose files this host has already: who asks opens them, and nothing is fetched."""

from __future__ import annotations

import json

import pytest

from shm_store.checkpoint_files import open_checkpoint
from shm_store.hub_cache import cached

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def snapshot(tmp_path, monkeypatch):
    """The folder of a snapshot, in a cache of the test's own."""
    for name in ("HF_HUB_CACHE", "XDG_CACHE_HOME", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    model = tmp_path / "hub" / "models--org--name"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    folder = model / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    return folder


def opened(url: str) -> str:
    """The name of what was opened, and that it was."""
    found = open_checkpoint(url)
    found.close()
    return found.name if found.fds else "a URL" if found.name == url else "something else"


def test_a_commit_that_is_here_is_not_fetched(snapshot):
    (snapshot / "model.safetensors").write_bytes(b"x")
    path = str(snapshot / "model.safetensors")
    assert opened(f"hf://org/name@{COMMIT}/model.safetensors") == path
    assert opened(f"hf://org/name@{COMMIT}") == path
    assert opened(f"hf://models/org/name@{COMMIT}/") == path


def test_a_branch_is_asked_for_on_the_hub_unless_that_is_offline(snapshot, monkeypatch):
    """It may be another commit there by now."""
    (snapshot / "model.safetensors").write_bytes(b"x")
    for url in ("hf://org/name", "hf://org/name@main/model.safetensors"):
        assert opened(url) == "a URL"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for url in ("hf://org/name", "hf://org/name@main/model.safetensors"):
        assert opened(url) == str(snapshot / "model.safetensors")
    assert opened("hf://org/name@other") == "a URL"


def test_what_is_here_in_part_is_fetched(snapshot):
    url = f"hf://org/name@{COMMIT}"
    assert opened(url) == opened(f"{url}/model.safetensors") == "a URL"
    (snapshot / "model.fp16.safetensors").write_bytes(b"x")
    assert opened(url) == "a URL"  # the Hub may have a better one
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "one.safetensors").write_bytes(b"x")
    assert opened(url) == "a URL"
    (snapshot / "two.safetensors").write_bytes(b"x")
    assert opened(url) == str(snapshot / "model.safetensors.index.json")


@pytest.mark.parametrize(
    "url",
    [
        f"hf://datasets/name@{COMMIT}/a",
        f"hf://org/name@{COMMIT}/../{COMMIT}/model.safetensors",
        "hf://gpt2",
        "hf://org/name@../x",
        "hf://org",
    ],
)
def test_what_is_no_model_is_not_looked_for(snapshot, url):
    (snapshot / "model.safetensors").write_bytes(b"x")
    assert cached(url) is None


def test_the_cache_is_where_its_variables_say(snapshot, tmp_path):
    url = f"hf://org/name@{COMMIT}"
    assert cached(url, {"HF_HUB_CACHE": str(tmp_path / "hub")}) is not None
    assert cached(url, {"HF_HOME": str(tmp_path)}) is not None
    assert cached(url, {"XDG_CACHE_HOME": str(tmp_path)}) is None
