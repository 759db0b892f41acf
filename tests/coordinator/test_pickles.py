"""What torch.save wrote, read by real loaders of a real coordinator; torch.load is the judge."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import gpu_worker
from coordinator import backing, pickles
from coordinator.formats import Contents, read_contents
from coordinator.local_file import LocalFile
from coordinator.mounts import is_remote
from coordinator.state_dicts import weights_in
from shm_store.errors import SourceChanged, SourceError, SourceMalformed, SourceUnsupported
from shm_store.manifest import decode_manifest
from shm_store.reading import AS_IT_IS, Reading
from shm_store.wire import Abort, Commit, Progress
from tests.coordinator.loaded import bits, drive
from tests.processes import ROOT, Coordinator, Peer, running

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with running(str(tmp_path_factory.mktemp("s") / "s")) as started:
        yield started


@pytest.fixture
def worker(served):
    worker = gpu_worker.attach(served.socket)
    yield worker
    worker.shutdown()


@pytest.fixture
def key(request) -> str:
    return request.node.name


def state() -> dict[str, torch.Tensor]:
    """Ties, views, strides, and what a state dict may have in it."""
    generator = torch.Generator().manual_seed(7)
    tied = torch.randn(64, 33, generator=generator)
    whole = torch.randn(6, 8, generator=generator)
    return {
        "wte": tied,
        "lm_head": tied,
        "q": whole[:2],
        "qkv": whole,
        "last": torch.randn(4, 4, 4, generator=generator)[..., 0],
        "channels": torch.randn(2, 3, 4, 5, generator=generator).to(
            memory_format=torch.channels_last
        ),
        "turned": torch.randn(3, 7, generator=generator).t(),
        "half": torch.randn(9, generator=generator).to(torch.float16),
        "f8": torch.randn(9, generator=generator).to(torch.float8_e5m2),
        "ids": torch.arange(7),
        "none": torch.empty(0, 3),
        "one": torch.tensor(2.5),
    }


@pytest.fixture
def path(tmp_path) -> Path:
    torch.save(state(), tmp_path / "pytorch_model.bin")
    return tmp_path / "pytorch_model.bin"


# --- what it is read as -------------------------------------------------------------------------


@pytest.mark.parametrize("new", [True, False], ids=["zip", "before 1.6"])
def test_it_is_what_torch_loads(worker, key, tmp_path, new):
    """Bits, order, strides, ties and views; whatever the file is called."""
    path = tmp_path / "weights"
    saved = state()
    if not new:
        del saved["f8"]  # which torch itself does not read from there
    torch.save(saved, path, _use_new_zipfile_serialization=new)
    found = worker.state_dict(key, source=path)
    expected = torch.load(path, weights_only=True)
    assert list(found) == list(expected) and bits(found) == bits(expected)
    for name in ("channels", "turned", "qkv", "q"):
        assert found[name].stride() == expected[name].stride()
    assert found["wte"].data_ptr() == found["lm_head"].data_ptr()
    assert found["q"].data_ptr() == found["qkv"].data_ptr()


def test_casts_names_and_filters_are_as_of_any_file(worker, key, path):
    """Bit for bit what `to` gives; what was one tensor still is, and its views are its views."""
    source = gpu_worker.Source(
        path,
        name_filter=["wte", "lm_*", "q*", "last", "channels", "turned", "[hfino]*"],
        rename={"lm_": "model."},
        dtype={"half": None, "*": torch.bfloat16},
    )
    found = worker.state_dict(key, source=source)
    expected = {
        name.replace("lm_", "model."): tensor.to(torch.bfloat16)
        if tensor.is_floating_point() and name != "half"
        else tensor
        for name, tensor in torch.load(path, weights_only=True).items()
    }
    assert bits(found) == bits(expected)
    assert found["channels"].stride() == expected["channels"].stride()
    assert found["wte"].data_ptr() == found["model.head"].data_ptr()
    assert found["q"].data_ptr() == found["qkv"].data_ptr()


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_one_of_two_that_were_tied_can_be_cast(path, torch_kept):
    """Then they are two tensors. All that share bytes and look alike may go their own ways."""
    reading = Reading(("wte", "lm_head"), dtypes=(("wte", "F16"),))
    manifest = decode_manifest(_contents(path, reading).manifest)
    assert [tensor.dtype for tensor in manifest.tensors] == ["F16", "F32"]
    assert len(manifest.groups) == 2


def test_a_value_that_cannot_be_shared_is_named_with_what_leaves_it_out(tmp_path, torch_kept):
    torch.save({"w": torch.ones(2), "odd": torch.ones(2, device="meta")}, tmp_path / "f.pt")
    with pytest.raises(SourceUnsupported, match="nice name: tensor 'odd' cannot be") as refused:
        _contents(tmp_path / "f.pt")
    assert refused.value.remedy.endswith("leave it out with name_filter= (--only)")
    manifest = decode_manifest(_contents(tmp_path / "f.pt", Reading(("w",))).manifest)
    assert [tensor.name for tensor in manifest.tensors] == ["w"]


@pytest.mark.parametrize("dtypes", [(("q", "F16"),), (("q", "F16"), ("qkv", "BF16"))])
def test_casts_of_views_that_would_part_are_refused_by_name(path, dtypes, torch_kept):
    with pytest.raises(SourceUnsupported, match="tensors 'q', 'qkv' share bytes") as refused:
        _contents(path, Reading(dtypes=dtypes))
    assert "name_filter=" in refused.value.remedy


def _contents(path: Path, reading: Reading = AS_IT_IS) -> Contents:
    """Read a file in this process, under another name."""
    with path.open("rb") as file:
        files = [LocalFile(file.fileno(), "nice name", path.stat().st_size)]
        return read_contents(files, reading, "nice name")


def test_a_training_checkpoint_gives_its_weights(worker, key, tmp_path):
    """What is beside them is left out, and so is the `_metadata` of a module's state dict."""
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    weights = module.state_dict()
    assert hasattr(weights, "_metadata")
    saved = {"epoch": 3, "state_dict": weights, "optimizer": optimizer.state_dict(), "x": [None]}
    torch.save(saved, tmp_path / "last.ckpt")
    found = worker.state_dict(key, source=tmp_path / "last.ckpt")
    assert bits(found) == bits(weights)


def test_shards_are_read_by_their_index(worker, key, tmp_path):
    """Its order, and only what it names, each tensor from the shard that it says."""
    torch.save({"b": torch.ones(3), "a": torch.zeros(2)}, tmp_path / "pytorch_model-1.bin")
    torch.save({"c": torch.full((4,), 2.0), "b": torch.zeros(9)}, tmp_path / "pytorch_model-2.bin")
    index = tmp_path / "pytorch_model.bin.index.json"
    one, two = "pytorch_model-1.bin", "pytorch_model-2.bin"
    index.write_text(json.dumps({"weight_map": {"c": two, "b": one}}))
    found = worker.state_dict(key, source=tmp_path)
    assert list(found) == ["c", "b"]
    assert bits(found) == bits({"c": torch.full((4,), 2.0), "b": torch.ones(3)})
    index.write_text(json.dumps({"weight_map": {"c": two, "b": one, "x": one}}))
    with pytest.raises(SourceMalformed, match=f"{one} has tensor 'x', but it has none"):
        worker.state_dict(key, source=index)


class TestWhichDict:
    """`weights_in`, with numbers for tensors."""

    @staticmethod
    def chosen(loaded, *only: str):
        return weights_in(loaded, lambda value: isinstance(value, int), Reading(only), "f.pt")

    def test_of_what_is_at_the_top_tensors_and_extra_states_are_weights(self):
        """Neither counters nor an optimizer beside them."""
        weights = {"a": 1, "layer._extra_state": {"scale": 2}}
        top = {**weights, "epoch": "3", "optimizer": {"b": 2}}
        assert self.chosen(top) == weights

    def test_a_dict_with_a_known_name_comes_before_the_top(self):
        """Where a trainer has put a tensor beside it, as a learning rate."""
        assert self.chosen({"lr": 1, "state_dict": {"b": 2}}) == {"b": 2}

    @pytest.mark.parametrize("name", ["state_dict", "model", "model_state_dict", "module"])
    def test_the_one_dict_with_a_known_name_is_taken(self, name):
        """Others beside it are not, as long as the filter means this one."""
        loaded = {"epoch": "3", "mine": {"m": 1}, name: {"a.b": 1}, "optimizer": {"state": {}}}
        assert self.chosen(loaded) == {"a.b": 1}
        assert self.chosen(loaded, "a.*") == {"a.b": 1}
        assert self.chosen(loaded, "mine.*")["mine.m"] == 1
        assert self.chosen(loaded, "nothing") == {"a.b": 1}  # and then nothing is left of it

    def test_several_are_named_and_a_filter_says_which(self):
        loaded = {"params": {"a": 1}, "params_ema": {"a": 2}}
        with pytest.raises(SourceUnsupported, match="'params', 'params_ema'") as refused:
            self.chosen(loaded)
        assert "name_filter='params.*'" in refused.value.remedy
        assert self.chosen(loaded, "params_ema.*") == {"params.a": 1, "params_ema.a": 2}

    def test_one_of_an_unknown_name_has_to_be_asked_for(self):
        with pytest.raises(SourceUnsupported, match="a dict of tensors: 'mine'"):
            self.chosen({"mine": {"a": 1}})
        assert self.chosen({"mine": {"a": 1}}, "mine.*") == {"mine.a": 1}

    @pytest.mark.parametrize(
        ("loaded", "text"),
        [
            ([1, 2], "has a list in it, no state dict"),
            ({"a": "b", "c": {"d": "e"}}, "has no tensor"),
            ({7: 1}, "names a tensor 7, which is no text"),
            ({"state_dict": {(1, 2): 1}}, r"names a tensor \(1, 2\)"),
        ],
    )
    def test_what_is_none_is_refused(self, loaded, text):
        with pytest.raises(SourceUnsupported, match=text):
            self.chosen(loaded)

    def test_nothing_is_a_state_dict_too(self):
        assert self.chosen({}) == {}


# --- what is refused ----------------------------------------------------------------------------


class Code:
    """Pickled, it would run a command."""

    def __reduce__(self):
        return os.system, ("touch ran",)


def _zip(path: Path, records: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(name, data)


def _bomb(path: Path) -> None:
    """A pickle of a few bytes that asks for 2 GiB of zeros."""
    made = b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R."
    _zip(path, {"a/data.pkl": made, "a/version": b"3"})


def _nested(path: Path) -> None:
    """Lists in lists, deeper than anything that recurses over them bears."""
    _zip(
        path,
        {"a/data.pkl": b"\x80\x02" + b"]" * 300_000 + b"a" * 299_999 + b".", "a/version": b"3"},
    )


def _large_storage(path: Path) -> None:
    """Says that a small record, and the tensor in it, have 2**40 elements."""
    torch.save({"w": torch.ones(1000)}, path)
    _edited(path, b"M\xe8\x03", b"\x8a\x06\0\0\0\0\0\x01")


def _edited(path: Path, old: bytes, new: bytes) -> None:
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    _zip(path, {name: data.replace(old, new) for name, data in records.items()})


def _compressed(path: Path) -> None:
    torch.save({"w": torch.ones(1000)}, path)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    _zip(path, records, zipfile.ZIP_DEFLATED)


def _cut(path: Path, by: int) -> None:
    torch.save(state(), path)
    os.truncate(path, path.stat().st_size - by)


def _legacy_cut(path: Path) -> None:
    torch.save(state(), path, _use_new_zipfile_serialization=False)
    os.truncate(path, path.stat().st_size - 100)


Make = Callable[[Path], object]

WITHOUT_TORCH: dict[str, tuple[Make, type[SourceError], str]] = {
    "no torch file": (lambda p: _zip(p, {"a.npy": b"x"}), SourceUnsupported, "did not write"),
    "cut by one": (lambda p: _cut(p, 1), SourceMalformed, "damaged"),
    "cut in the middle": (lambda p: _cut(p, 5000), SourceMalformed, "damaged"),
    "TorchScript": (
        lambda p: _zip(p, {"a/data.pkl": b"", "a/constants.pkl": b"", "a/code/m.py": b""}),
        SourceUnsupported,
        "a TorchScript archive",
    ),
    "compressed": (_compressed, SourceUnsupported, "is compressed"),
    "a pickle": (lambda p: p.write_bytes(pickle.dumps({"a": 1}, 2)), SourceUnsupported, "pickle"),
}
"""Known for what they are before torch is imported."""

BAD: dict[str, tuple[Make, str, str]] = {
    "code": (lambda p: torch.save({"w": Code()}, p), "source_unsupported", "'posix.system'"),
    "a module": (lambda p: torch.save(torch.nn.Linear(1, 1), p), "source_unsupported", "Linear"),
    "old code": (
        lambda p: torch.save({"w": Code()}, p, _use_new_zipfile_serialization=False),
        "source_unsupported",
        "'posix.system'",
    ),
    "old and cut": (_legacy_cut, "source_malformed", "torch cannot read it"),
    "no pickle": (lambda p: _zip(p, {"a/data.pkl": b"x"}), "source_malformed", "cannot read it"),
    "a bomb": (_bomb, "source_unsupported", "takes more memory than a loader may have"),
    "nested": (_nested, "source_unsupported", "a list in it"),
    "a large storage": (_large_storage, "source", ""),
    "a tensor": (lambda p: torch.save(torch.ones(1), p), "source_unsupported", "a Tensor in it"),
    "meta": (
        lambda p: torch.save({"w": torch.ones(2, device="meta")}, p),
        "source_unsupported",
        "tensor 'w' cannot be shared",
    ),
}


@pytest.mark.parametrize("case", WITHOUT_TORCH)
def test_what_is_no_file_of_torch_is_refused_without_torch(tmp_path, case):
    make, kind, text = WITHOUT_TORCH[case]
    make(tmp_path / "f.pt")
    with pytest.raises(kind, match=text) as refused:
        _contents(tmp_path / "f.pt")
    assert refused.value.source == "nice name" and refused.value.remedy


def test_what_torch_refuses_is_told_and_no_code_is_run(tmp_path):
    """One process reads them all, with the memory of a loader."""
    for case, (make, _, _) in BAD.items():
        make(tmp_path / case)
    command = [sys.executable, "-m", "tests.coordinator.pickle_reader"]
    paths = [str(tmp_path / case) for case in BAD]
    run = subprocess.run([*command, *paths], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stderr == ""
    said = dict(zip(BAD, map(json.loads, run.stdout.splitlines()), strict=True))
    for case, (_, code, text) in BAD.items():
        assert said[case].startswith(code) and text in said[case], (case, said[case])
        assert "\n" not in said[case] and len(said[case]) < 600
    assert not (ROOT / "ran").exists() and not (tmp_path / "ran").exists()


def test_damaged_files_are_read_or_refused_and_nothing_else(request):
    """Some hundred; `python -m tests.coordinator.pickle_reader --fuzz SEED COUNT` for more."""
    _fuzz(request.config.getoption("randomly_seed", 0), 300)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_many_damaged_files_are_read_or_refused_and_nothing_else():
    _fuzz(0, 30_000)


def _fuzz(seed: int, count: int) -> None:
    command = [sys.executable, "-m", "tests.coordinator.pickle_reader", "--fuzz", str(seed)]
    run = subprocess.run(
        [*command, str(count)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (0, ""), (seed, run.stdout, run.stderr)
    outcomes = json.loads(run.stdout)
    assert sum(outcomes.values()) == count
    assert {"read", "source_malformed", "source_unsupported"} <= outcomes.keys()


# --- the loader's process -----------------------------------------------------------------------


def test_a_refusal_is_the_askers_and_nothing_is_charged(served, worker, key, tmp_path):
    """And it stays so for what is good under the same key."""
    torch.save({"w": Code()}, tmp_path / "bad.pt")
    with pytest.raises(SourceUnsupported, match=r"'posix\.system'") as refused:
        worker.state_dict(key, source=tmp_path / "bad.pt")
    assert refused.value.source == str(tmp_path / "bad.pt")
    assert "never run" in refused.value.message and refused.value.remedy
    operator = Peer(served.socket, role="operator")
    assert operator.generation(key) is None


CUTTING = """
import sys
from coordinator import loader
RUN = '''
import contextlib, os, sys
from coordinator import loader, pickles
def cut(contents):
    os.truncate(os.environ["CUT"], 50_000)
    return contextlib.nullcontext()
pickles.PickleContents.ahead = cut
sys.exit(loader.main(sys.argv))
'''
loader.command = lambda fd: [sys.executable, "-c", RUN, str(fd)]
from coordinator.cli import main
main()
"""


def test_the_asker_hears_that_the_file_was_cut_though_its_loader_has_died(tmp_path):
    """Of the second loader; what the first died of is in the log; nothing is charged."""
    _large(tmp_path / "f.pt")
    environment = {**os.environ, "CUT": str(tmp_path / "f.pt")}
    coordinator = Coordinator(str(tmp_path / "s"), program=("-c", CUTTING), env=environment)
    with gpu_worker.attach(coordinator.socket) as worker:
        source = gpu_worker.Source(tmp_path / "f.pt", dtype="bfloat16")
        with pytest.raises(SourceChanged):
            worker.state_dict("k", source=source)
        assert coordinator.audit().in_use_bytes == 0
    code, stderr = coordinator.stop()
    assert code == 0
    assert "(by SIGBUS: the file was cut, or its disk failed, while it was read)" in stderr


LARGE = 112 * 1024 * 1024


def _large(path: Path) -> None:
    """Three tensors, far more than a loader has left once it has torch in the tests below."""
    torch.save({name: torch.full((LARGE // 4,), 1.5) for name in "abc"}, path)


def test_a_mapped_file_takes_no_memory_and_a_cast_of_it_a_chunk(tmp_path):
    """None of its 336 MiB is ever in the memory of the loader itself, of which it may have 512 with
    what torch takes; what is mapped does not count.
    """
    _large(tmp_path / "f.pt")
    watched = (
        "import threading, time\n"
        "peak = [0]\n"
        "def watch():\n"
        "    while True:\n"
        "        for line in open('/proc/self/status'):\n"
        "            if line.startswith('RssAnon'):\n"
        "                peak[0] = max(peak[0], int(line.split()[1]))\n"
        "        time.sleep(0.002)\n"
        "threading.Thread(target=watch, daemon=True).start()"
    )
    driven = drive(
        tmp_path / "f.pt",
        Reading(dtypes=(("a", "F64"),)),
        f"casting.TORCH_BYTES = 0\n{watched}",
        after="print(*peak)",
    )
    assert driven.last == Commit(driven.gen) and driven.stderr == ""
    assert int(driven.stdout) * 1024 < 280 * 1024 * 1024
    assert [tensor.dtype for tensor in driven.manifest.tensors] == ["F64", "F32", "F32"]
    assert driven.said[-2] == Progress(driven.gen, 4 * LARGE, 4 * LARGE)


REMOTE = "pickles.is_remote = lambda fd: True"


def test_a_file_on_a_network_is_read_and_never_mapped(path):
    """A page that does not come would end the loader, or hold it for ever."""
    looking = (
        "real = pickles.PickleContents.fill\n"
        "def fill(*arguments):\n"
        "    print('pytorch_model.bin' in open('/proc/self/maps').read())\n"
        "    real(*arguments)\n"
        "pickles.PickleContents.fill = fill"
    )
    for changed, mapped in ((REMOTE, "False"), ("", "True")):
        driven = drive(path, changed=f"{changed}\n{looking}")
        assert driven.last == Commit(driven.gen) and driven.stdout == f"{mapped}\n"


def test_memory_is_no_network_and_what_cannot_be_told_is_one():
    fd = os.memfd_create("here")
    assert not is_remote(fd)
    os.close(fd)
    assert is_remote(fd)


def test_what_cannot_be_mapped_and_does_not_fit_is_refused_with_what_helps(path, monkeypatch):
    monkeypatch.setattr(backing, "host_headroom_bytes", lambda: 32 * 1024 * 1024)
    monkeypatch.setattr(pickles, "is_remote", lambda fd: True)
    with pytest.raises(
        SourceUnsupported, match="it is on a network, so it is read into"
    ) as refused:
        _contents(path)
    assert "copy it to a disk" in refused.value.remedy


@pytest.mark.parametrize("reading", [AS_IT_IS, Reading(dtypes=(("*", "BF16"),))])
def test_a_file_that_is_cut_while_it_is_mapped_is_a_change(tmp_path, reading):
    """Copying says so itself. Casting dies of it, by SIGBUS: the next loader says so."""
    _large(tmp_path / "f.pt")
    driven = drive(
        tmp_path / "f.pt", reading, before_space=lambda: os.truncate(tmp_path / "f.pt", 50_000)
    )
    assert driven.stderr == ""
    if reading is AS_IT_IS:
        assert isinstance(driven.last, Abort) and driven.last.cause.code == "source_changed"
        assert "was cut while it was read" in driven.last.cause.message
    else:
        assert driven.code == -signal.SIGBUS
