"""Casts on the way into a segment: real loaders of a real coordinator, and torch's word for it."""

from __future__ import annotations

import errno
import itertools
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import gpu_worker
from coordinator import casting
from coordinator.checkpoint import Cast, Checkpoint, Copy
from coordinator.pump import Meter
from gpu_worker.dtypes import TORCH_DTYPES
from shm_store.errors import SourceChanged, SourceError, SourceUnsupported
from shm_store.manifest import Manifest
from shm_store.reading import FLOATING, Reading
from shm_store.wire import Commit
from tests.coordinator.loaded import bits, drive
from tests.coordinator.test_loader import ENVIRONMENT
from tests.processes import Peer, running

pytestmark = pytest.mark.process

MIB = 1024 * 1024


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
def path(tmp_path) -> Path:
    generator = torch.Generator().manual_seed(7)
    halves = torch.randn(3, 5, generator=generator)
    tensors = {
        "unet.a": torch.randn(1000, 33, generator=generator),
        "unet.b": halves.to(torch.float16),
        "vae.a": halves.to(torch.float64),
        "vae.f8": halves.to(torch.float8_e4m3fn),
        "ids": torch.arange(77),
        "mask": torch.tensor([True, False]),
        "none": torch.empty(0, 4),
        "one": torch.tensor(2.7),
    }
    tensors["unet.a"][7, 7] = float("nan")
    save_file(tensors, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


# --- through the public face --------------------------------------------------------------------


def test_all_floating_tensors_are_what_to_gives(worker, path, request):
    """Bit for bit; integers and booleans stay."""
    source = gpu_worker.Source(path, dtype=torch.bfloat16)
    state = worker.state_dict(request.node.name, source=source)
    expected = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in load_file(path).items()
    }
    assert bits(state) == bits(expected)


def test_by_pattern_with_other_names_and_only_some(worker, path, request):
    """The first pattern counts, None keeps a dtype; patterns are of names in the file."""
    source = gpu_worker.Source(
        path,
        name_filter=["unet.*", "vae.*"],
        rename={"unet.": "", "vae.": "decoder."},
        dtype={"unet.b": None, "unet.*": torch.float8_e5m2, "vae.f8": "float32", "*": "float16"},
    )
    state = worker.state_dict(request.node.name, source=source)
    loaded = load_file(path)
    assert bits(state) == bits(
        {
            "a": loaded["unet.a"].to(torch.float8_e5m2),
            "b": loaded["unet.b"],
            "decoder.a": loaded["vae.a"].to(torch.float16),
            "decoder.f8": loaded["vae.f8"].to(torch.float32),
        }
    )


def test_the_command_line_casts_and_other_options_are_another_generation(
    served, worker, path, request
):
    """What `weight-cache load --dtype` has loaded is there for whoever asks for the same."""
    key = request.node.name
    command = [sys.executable, "-m", "coordinator", "load", key, str(path), "--dtype", "bf16"]
    subprocess.run([*command, "--socket", served.socket], env=ENVIRONMENT, check=True)
    with gpu_worker.attach(served.socket) as other:
        source = gpu_worker.Source(path, dtype="bfloat16")
        assert other.state_dict(key, source=source)["unet.a"].dtype is torch.bfloat16
    generations = [_generation(served, key)]
    for dtype in (torch.float16, None):
        state = worker.state_dict(key, source=gpu_worker.Source(path, dtype=dtype))
        assert state["unet.a"].dtype is (dtype or torch.float32)
        generations.append(_generation(served, key))
        del state
    assert len(set(generations)) == 3


def _generation(served, key: str) -> str:
    generations = Peer(served.socket, role="operator").status().generations
    (found,) = [one for one in generations if (one.key, one.state) == (key, "ready")]
    return found.generation


# --- every pair, every edge ---------------------------------------------------------------------


def filled(tmp_path, checkpoint: Checkpoint, data: bytes) -> bytes:
    """Do a checkpoint's copies and casts of `data` in this process; return the tensor bytes."""
    (tmp_path / "source").write_bytes(data)
    segment = os.memfd_create("segment")
    source = os.open(tmp_path / "source", os.O_RDONLY)
    try:
        os.truncate(segment, checkpoint.data_bytes + 64)
        files = [(source, "nice name")]
        casting.prepare(checkpoint, [name for _, name in files])
        meter = Meter(checkpoint.filled_bytes(), lambda *_: None)
        casting.fill(checkpoint, files, segment, 64, meter)
        assert meter.done_bytes == checkpoint.filled_bytes()
        return os.pread(segment, checkpoint.data_bytes, 64)
    finally:
        os.close(segment)
        os.close(source)


PAIRS = list(itertools.permutations(sorted(FLOATING & TORCH_DTYPES.keys()), 2))


def test_every_pair_of_dtypes_in_chunks_beside_copies(tmp_path, monkeypatch, torch_kept):
    """Two chunks and a rest each, at odd places of the file; what is not cast is copied.

    The file is read from its front to its end.
    """
    monkeypatch.setattr(casting, "CHUNK_BYTES", 4096)
    values = torch.cat([torch.linspace(-500, 500, 1500), torch.tensor([float("inf"), 1e-9])])
    data, expected, copies, casts = bytearray(b"head"), bytearray(), [], []
    for source, to in PAIRS:
        elements = values.to(TORCH_DTYPES[source])
        stored = bytes(elements.view(torch.uint8).numpy())
        copies.append(Copy(len(data), len(expected), 3))
        data += b"abc"
        expected += b"abc".ljust(64, b"\0")
        casts.append(Cast(len(data), len(expected), len(values), source, to))
        data += stored
        became = bytes(elements.to(TORCH_DTYPES[to]).view(torch.uint8).numpy())
        expected += became + bytes(-len(became) % 64)
    checkpoint = Checkpoint(Manifest((), ()), len(expected), tuple(copies), tuple(casts))
    read = []
    preadv, sendfile = os.preadv, os.sendfile

    def noted_preadv(fd, views, offset):
        read.append(offset)
        return preadv(fd, views, offset)

    def noted_sendfile(to, fd, offset, size):
        read.append(offset)
        return sendfile(to, fd, offset, size)

    monkeypatch.setattr(os, "preadv", noted_preadv)
    monkeypatch.setattr(os, "sendfile", noted_sendfile)
    assert filled(tmp_path, checkpoint, data) == expected
    assert read == sorted(read) and len(read) > 2 * len(PAIRS)


def test_a_file_that_ends_early_is_a_change(tmp_path, torch_kept):
    checkpoint = Checkpoint(Manifest((), ()), 64, (), (Cast(2, 0, 8, "F32", "F16"),))
    with pytest.raises(SourceChanged, match="nice name: ended at byte 20"):
        filled(tmp_path, checkpoint, bytes(20))


def test_a_source_that_cannot_be_read_is_its_own_fault(tmp_path, monkeypatch, torch_kept):
    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", refuse)
    checkpoint = Checkpoint(Manifest((), ()), 64, (), (Cast(2, 0, 8, "F32", "F16"),))
    with pytest.raises(SourceError, match="nice name: reading at byte 2 failed"):
        filled(tmp_path, checkpoint, bytes(40))


def test_a_dtype_that_this_torch_lacks_is_refused_with_what_helps(monkeypatch, torch_kept):
    monkeypatch.delitem(TORCH_DTYPES, "F8_E8M0")
    checkpoint = Checkpoint(Manifest((), ()), 64, (), (Cast(0, 0, 8, "F8_E8M0", "F16"),))
    with pytest.raises(SourceUnsupported, match=r"nice name: torch .* has no dtype") as refused:
        casting.prepare(checkpoint, ["nice name"])
    assert refused.value.remedy == "install a newer torch"


def test_what_torch_cannot_convert_is_refused_by_dtypes(tmp_path, monkeypatch, torch_kept):
    def write(*_):
        raise NotImplementedError('"copy_" not implemented')

    monkeypatch.setattr(casting.Converter, "write", write)
    checkpoint = Checkpoint(Manifest((), ()), 64, (), (Cast(0, 0, 8, "F32", "F16"),))
    with pytest.raises(SourceUnsupported, match="cannot convert F32 to F16"):
        filled(tmp_path, checkpoint, bytes(32))


# --- the loader's process -----------------------------------------------------------------------

BF16 = Reading(dtypes=(("*", "BF16"),))


def test_a_tensor_larger_than_all_that_a_loader_may_have_is_cast(tmp_path):
    """It never has more of it than a chunk: here 600 MiB under a limit of 512 MiB, torch included.

    With the peak of its whole memory, shared libraries too, in the kernel's words.
    """
    elements = 150 * MIB
    entry = {"dtype": "F32", "shape": [elements], "data_offsets": [0, 4 * elements]}
    header = struct.pack("<Q", 4096) + json.dumps({"w": entry}).encode().ljust(4096)
    path = tmp_path / "a.safetensors"
    path.write_bytes(header)
    os.truncate(path, len(header) + 4 * elements)
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(struct.pack("<f", 1.5))
    driven = drive(
        path,
        BF16,
        "casting.TORCH_BYTES = 0",
        after="print(*(line.split()[1] for line in open('/proc/self/status') if 'VmHWM' in line))",
    )
    assert driven.last == Commit(driven.gen) and driven.stderr == ""
    assert os.pread(driven.segment_fd, 2, driven.data_start + 2 * elements - 2) == b"\xc0\x3f"
    assert int(driven.stdout) * 1024 < 400 * MIB


def test_the_import_is_while_the_coordinator_makes_room(path):
    """Asked for room first: a second of waiting is not added to what the kernel needs for pages."""
    noting = (
        "send = loader._send\n"
        "loader._send = lambda *said: (print(type(said[1]).__name__), send(*said))\n"
        "casting.prepare = lambda *_: print('prepare')"
    )
    driven = drive(path, BF16, noting, give_space=False)
    assert driven.stdout == "Reserve\nprepare\n"


@pytest.mark.parametrize(
    "modules",
    [
        "coordinator.server, coordinator.serve, coordinator.executor, coordinator.cli",
        "coordinator.loader, coordinator.casting, coordinator.pickles, coordinator.tensor_casts",
    ],
)
def test_importing_never_imports_torch(modules):
    """The coordinator never has it, and a loader when there is something to do with it."""
    code = f"import sys, {modules}; print({{'torch', 'numpy', 'gpu_worker'}} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"


def test_a_loader_that_casts_nothing_imports_no_torch(path):
    driven = drive(path, Reading(), after="print('torch' in sys.modules)")
    assert driven.last == Commit(driven.gen) and driven.stdout == "False\n"


def test_a_cast_that_changes_nothing_imports_no_torch(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "a")
    driven = drive(
        tmp_path / "a", Reading(dtypes=(("*", "F32"),)), after="print('torch' in sys.modules)"
    )
    assert driven.last == Commit(driven.gen) and driven.stdout == "False\n"
