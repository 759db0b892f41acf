"""Weights from URLs, end to end: a worker asks, a loader fetches, everybody has the tensors."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os

import pytest
import safetensors.torch
import torch

import gpu_worker
from shm_store.errors import (
    LoadTimeout,
    SourceChanged,
    SourceMalformed,
    SourceNotOpened,
    SourceUnreachable,
    SourceUnsupported,
)
from shm_store.wire import Acquire, Fail
from tests.coordinator.command_line import run
from tests.coordinator.hub_server import SHA, hub
from tests.coordinator.web_server import serving
from tests.processes import Coordinator, Peer, running

pytestmark = pytest.mark.process

SECRET = "S3cr3t"
TENSORS = {
    "weight": torch.arange(3_000_000, dtype=torch.float32).reshape(1000, 3000),
    "bias": torch.ones(7, dtype=torch.bfloat16),
    "bytes": torch.arange(250).to(torch.uint8),
}
FILE = safetensors.torch.save(TENSORS)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with running(str(tmp_path_factory.mktemp("urls") / "s"), "--ram-budget", "64MiB") as started:
        yield started


@pytest.fixture
def worker(served):
    worker = gpu_worker.attach(served.socket)
    yield worker
    worker.shutdown()


@pytest.fixture
def web():
    with serving(m__safetensors=FILE) as started:
        yield started


def charged_bytes(served) -> int:
    peer = Peer(served.socket, role="operator")
    (pool,) = [pool for pool in peer.status().pools if pool.name == "ram"]
    peer.close()
    return pool.in_use_bytes


def refused(
    served, worker, key: str, url: str | gpu_worker.Source, kind: type[Exception], text: str
):
    """A load fails so, with no secret, and nothing is charged for it."""
    before = charged_bytes(served)
    with pytest.raises(kind, match=text) as caught:
        worker.state_dict(key, source=url)
    peer = Peer(served.socket, role="operator")
    peer.flush()
    peer.close()
    assert charged_bytes(served) == before
    assert SECRET not in str(caught.value) + repr(vars(caught.value))
    return caught.value


def same(state: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> bool:
    return sorted(state) == sorted(tensors) and all(
        state[name].dtype == tensor.dtype and torch.equal(state[name], tensor)
        for name, tensor in tensors.items()
    )


def test_weights_from_a_url_are_those_of_the_file(web, worker):
    """And they are fetched once, for whoever asks."""
    url = f"http://user:{SECRET}@{web.url[7:]}/m.safetensors?signature={SECRET}"
    state = worker.state_dict("url", source=url)
    assert same(state, safetensors.torch.load(FILE))
    asked = len(web.log)
    assert same(worker.state_dict("url", source=url), TENSORS)
    assert len(web.log) == asked


def test_another_version_of_a_url_is_fetched_anew(web, worker):
    """A URL stands for itself: what is there now, only who asks can know."""
    url = f"{web.url}/m.safetensors"
    worker.state_dict("versioned", source=url, version="1")
    asked = len(web.log)
    web.files["/m.safetensors"] = safetensors.torch.save({"weight": torch.zeros(3)})
    assert same(worker.state_dict("versioned", source=url, version="1"), TENSORS)
    assert len(web.log) == asked
    new = worker.state_dict("versioned", source=url, version="2")
    assert same(new, {"weight": torch.zeros(3)})


def test_a_part_under_other_names_comes_from_a_url_too(web, worker):
    source = gpu_worker.Source(
        f"{web.url}/m.safetensors", name_filter="b*", rename={"bias": "weight"}
    )
    state = worker.state_dict("part", source=source)
    assert same(state, {"bytes": TENSORS["bytes"], "weight": TENSORS["bias"]})


def test_shards_come_from_beside_their_index(worker):
    names = {
        name: f"model-0000{number}-of-00003.safetensors" for number, name in enumerate(TENSORS)
    }
    with serving() as web:
        web.files = {
            f"/a/{file}": safetensors.torch.save({name: TENSORS[name]})
            for name, file in names.items()
        }
        web.files["/a/i.index.json"] = json.dumps({"weight_map": names}).encode()
        state = worker.state_dict("shards", source=f"{web.url}/a/i.index.json")
    assert same(state, TENSORS)


def test_a_load_goes_on_after_the_connection_broke_off(web, worker):
    answers = itertools.count(1)
    web.drop = lambda start, end: (end - start) // 2 if next(answers) % 2 == 0 else None
    assert same(worker.state_dict("dropped", source=f"{web.url}/m.safetensors"), TENSORS)
    assert len([1 for _, start, end, sent in web.log if sent < end - start]) >= 2
    assert web.sent_bytes() <= len(FILE) + 200_000


def test_what_is_missing_or_refused_is_named_without_secrets(served, web, worker):
    url = f"http://user:{SECRET}@{web.url[7:]}/none.safetensors?signature={SECRET}"
    error = refused(served, worker, "missing", url, SourceNotOpened, "no such file")
    assert error.source == f"{web.url}/none.safetensors"
    web.status = 403
    error = refused(served, worker, "forbidden", url, SourceNotOpened, "credentials")
    assert "netrc" in error.remedy
    web.status = 0
    source = gpu_worker.Source(url.replace("/none.", "/m."), name_filter="nothing")
    refused(served, worker, "nothing", source, SourceMalformed, "matches none of its 3 tensors")


def test_what_changes_in_the_middle_is_refused(served, web, worker):
    web.on_answer = lambda: setattr(web, "etag", '"2"')
    url = f"{web.url}/m.safetensors?s={SECRET}"
    refused(served, worker, "changed", url, SourceChanged, "changed while it was read")


def test_a_host_that_does_not_answer_is_named(served, worker):
    url = f"http://u:{SECRET}@weight-cache.invalid/m.safetensors"
    refused(served, worker, "no-host", url, SourceUnreachable, "no such host")


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("s3://bucket/m.safetensors", r"pip install 'shm-weight-cache\[s3\]'"),
        ("hf2://a/b", "checkpoints are not read from hf2:// URLs"),
        ("s3://a::file:///x", "a chain of protocols"),
    ],
)
def test_what_cannot_be_read_is_refused_and_says_what_helps(served, worker, url, text):
    if importlib.util.find_spec("s3fs") and "pip" in text:
        pytest.skip("s3fs is installed")
    refused(served, worker, "none", url, SourceUnsupported, text)


def test_a_hand_made_request_reaches_no_file(served, tmp_path):
    """The loader looks itself: not every peer is one of ours."""
    (tmp_path / "m.safetensors").write_bytes(FILE)
    peer = Peer(served.socket)
    for protocol in ("file", "local"):
        url = f"{protocol}://{tmp_path}/m.safetensors"
        peer.send(Acquire(peer.next_rid(), "by-hand", url, "", 20.0))
        assert isinstance(peer.expect(Fail).cause.error(), SourceUnsupported)


def test_a_load_that_was_late_goes_on_when_its_server_does(web, worker):
    """Who waited is told at his deadline; what came by then is not lost."""
    web.stalls = True
    web.drop = lambda start, end: None if start == 0 else 1000
    with pytest.raises(LoadTimeout):
        worker.state_dict("silent", source=f"{web.url}/m.safetensors", timeout=1)
    web.drop = lambda start, end: None
    web.over.set()
    assert same(worker.state_dict("silent", source=f"{web.url}/m.safetensors"), TENSORS)
    assert web.sent_bytes() <= len(FILE) + 200_000


def test_a_model_of_the_hub_is_one_commit_of_it(tmp_path):
    """A folder is listed, and read as one on disk is; with the token of the coordinator."""
    files = {"config.json": b"{}", "model.safetensors": FILE, "model.fp16.safetensors": b"x"}
    with hub("org/name", files) as web:
        at = {"HF_ENDPOINT": web.url, "HF_HOME": str(tmp_path), "HF_TOKEN": f"hf_{SECRET}"}
        path = str(tmp_path / "s")
        with running(path, "--ram-budget", "64MiB", env={**os.environ, **at}) as served:
            worker = gpu_worker.attach(served.socket)
            try:
                assert same(worker.state_dict("folder", source="hf://org/name"), TENSORS)
                url = "hf://org/name@main/model.safetensors"
                assert same(worker.state_dict("file", source=url), TENSORS)
                assert {path.rpartition("/")[0] for path, *_ in web.log if "resolve" in path} == {
                    f"/org/name/resolve/{SHA}"
                }
                refused(served, worker, "none", "hf://org/none", SourceNotOpened, "no such file")
                web.status = 401
                refused(served, worker, "none", "hf://org/name", SourceNotOpened, "HF_TOKEN")
            finally:
                worker.shutdown()


def test_the_command_line_loads_a_url_and_nothing_writes_its_secrets(web, tmp_path):
    """Not the command, not `status`, not the log of the coordinator."""
    url = f"http://user:{SECRET}@{web.url[7:]}/m.safetensors?signature={SECRET}"
    coordinator = Coordinator(str(tmp_path / "s"), "--ram-budget", "64MiB")
    try:
        at = {"WEIGHT_CACHE_SOCKET": coordinator.socket}
        loaded = run("load", "k", url, **at)
        assert (loaded.returncode, loaded.stderr) == (0, "")
        assert loaded.stdout.startswith("k: generation ")
        failed = run("load", "k2", url.replace("/m.", "/none."), **at)
        assert failed.returncode == 3 and "no such file on the server" in failed.stderr
        shown = run("status", "--json", **at)
        assert [g["key"] for g in json.loads(shown.stdout)["generations"]] == ["k"]
    finally:
        code, log = coordinator.stop()
    assert (code, log) == (0, "")
    for text in (loaded.stdout, failed.stderr, shown.stdout, log):
        assert SECRET not in text
