"""Digests of what is in memory: made by a loader, looked at by `audit --bytes`."""

from __future__ import annotations

import os
import sys

import pytest

from coordinator import digests, loader
from shm_store import segment
from shm_store.errors import PlatformUnsupported, SourceUnsupported
from shm_store.keys import GenerationId
from shm_store.layout import segment_bytes
from shm_store.manifest import GroupEntry, Manifest, TensorEntry, decode_manifest, encode_manifest
from tests.coordinator.command_line import run
from tests.processes import write_safetensors

STEP = digests.STEP_BYTES
SIZES = (STEP + 5, 0, 64)


@pytest.fixture
def filled():
    """A segment of three tensors, one of no bytes, with digests."""
    groups, tensors, end = [], [], 0
    for number, size in enumerate(SIZES):
        start = -(-end // 64) * 64
        groups.append(GroupEntry(start, size))
        tensors.append(TensorEntry(f"t{number}", "U8", (size,), (1,), number, 0))
        end = start + size
    manifest = digests.reserve(encode_manifest(Manifest(tuple(tensors), tuple(groups))))
    fd = segment.create(GenerationId("g"))
    os.posix_fallocate(fd, 0, segment_bytes(len(manifest), end))
    start = segment.write_manifest(fd, manifest)
    for group in groups:
        os.pwrite(fd, os.urandom(group.size_bytes), start + group.offset_bytes)
    digests.write(fd, manifest)
    yield fd, [start + group.offset_bytes for group in groups]
    os.close(fd)


def test_what_was_written_is_found_unchanged(filled):
    fd, _ = filled
    assert digests.changed(fd) == []


@pytest.mark.parametrize(("group", "at"), [(0, 0), (0, STEP + 4), (2, 63)])
def test_one_bit_is_noticed_and_its_tensor_named(filled, group, at):
    fd, starts = filled
    offset = starts[group] + at
    os.pwrite(fd, bytes([os.pread(fd, 1, offset)[0] ^ 1]), offset)
    assert digests.changed(fd) == [f"t{group}"]


def test_a_segment_without_digests_says_nothing_of_its_bytes(filled):
    fd, _ = filled
    manifest, _ = segment.manifest_of(fd)
    segment.write_manifest(fd, encode_manifest(Manifest(manifest.tensors, manifest.groups)))
    assert digests.changed(fd) is None


def test_what_is_missing_to_make_them_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(PlatformUnsupported, match=r"xxhash.*shm-weight-cache\[digest\]"):
        digests.reserve(encode_manifest(Manifest((), ())))
    with pytest.raises(SourceUnsupported, match="digests need the package") as refused:
        loader._reserve_digests(encode_manifest(Manifest((), ())), "a.safetensors")
    assert "digest" in refused.value.remedy


@pytest.mark.process
def test_an_audit_reads_what_has_digests(coordinator, tmp_path):
    write_safetensors(tmp_path / "a", {"w": ("U8", [1000], bytes(range(250)) * 4)})
    run("load", "with", str(tmp_path / "a"), "--digest", "--socket", coordinator.socket)
    run("load", "without", str(tmp_path / "a"), "--socket", coordinator.socket)
    again = run("load", "with", str(tmp_path / "a"), "--socket", coordinator.socket)
    assert "generation #1," in again.stdout, "digests make no other weights"
    done = run("audit", "--bytes", "--socket", coordinator.socket)
    assert (done.returncode, done.stderr) == (0, "")
    assert "the bytes of 1 generation with digests were looked at" in done.stdout


@pytest.mark.process
def test_bytes_that_have_changed_are_a_difference(coordinator, tmp_path, monkeypatch):
    """Sealed memory cannot be written to, so what is wrong here is a digest, of a built model."""
    import torch

    import gpu_worker
    from gpu_worker import publish

    real = publish.plan

    def plan(weights):
        made = real(weights)
        table = decode_manifest(made.manifest)
        made.manifest = encode_manifest(
            Manifest(table.tensors, table.groups, bytes(8 * len(table.groups)))
        )
        return made

    monkeypatch.setattr(publish, "plan", plan)
    with gpu_worker.attach(coordinator.socket) as worker:
        worker.state_dict("bad", build=lambda: {"layer.weight": torch.ones(3)})
        done = run("audit", "--bytes", "--socket", coordinator.socket)
    assert done.returncode == 1
    assert "changed bytes" in done.stdout and "bad: layer.weight" in done.stdout
