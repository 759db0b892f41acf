"""Checkpoints for tests of URLs, and how to read one as the loader does, in this process."""

from __future__ import annotations

import json
import os

import numpy as np
import safetensors.numpy

from coordinator import url_checkpoint
from coordinator.formats import read_contents
from coordinator.pump import Meter
from coordinator.remote_file import Patience
from shm_store.manifest import decode_manifest
from shm_store.reading import Reading

QUICK = Patience(opening_s=0.2, idle_s=0.5, first_pause_s=0.01, longest_pause_s=0.05)
SECRET = "S3cr3t"

RANDOM = np.random.default_rng(5)
SMALL = {f"s{number}": np.full(number + 1, number, dtype="u1") for number in range(40)}
TENSORS = {
    "a.weight": RANDOM.random((600, 1000)).astype("f4"),
    "b": np.arange(13, dtype="u1"),
    "none": np.zeros((0, 4), dtype="f2"),
    "c": RANDOM.integers(0, 255, 2_000_003).astype("u1"),
    **SMALL,
}
FILE = safetensors.numpy.save(TENSORS)

SHARDS = {
    "model-00001-of-00002.safetensors": safetensors.numpy.save({"x": TENSORS["a.weight"]}),
    "model-00002-of-00002.safetensors": safetensors.numpy.save({"y": TENSORS["c"]}),
}
INDEX = json.dumps(
    {
        "weight_map": {
            "y": "model-00002-of-00002.safetensors",
            "x": "model-00001-of-00002.safetensors",
        }
    }
).encode()
SHARDED = {"x": TENSORS["a.weight"], "y": TENSORS["c"]}


def load(
    url: str, patience: Patience = QUICK, reading: Reading | None = None, on_filled=lambda: None
) -> dict[str, bytes]:
    """Read a checkpoint as the loader does; the bytes of each tensor."""
    files = url_checkpoint.open_url(url, patience)
    contents = read_contents(files, reading or Reading(), files[0].name)
    reported: list[tuple[int, int]] = []
    meter = Meter(contents.filled_bytes, lambda *told: reported.append(told))
    segment_fd = os.memfd_create("segment")
    try:
        os.truncate(segment_fd, contents.data_bytes)
        contents.fill(segment_fd, 0, meter)
        meter.finish()
        assert reported[-1] == (contents.filled_bytes, contents.filled_bytes)
        on_filled()
        url_checkpoint.check_unchanged(files)
        manifest = decode_manifest(contents.manifest)
        return {
            tensor.name: os.pread(
                segment_fd,
                manifest.groups[tensor.group].size_bytes,
                manifest.groups[tensor.group].offset_bytes,
            )
            for tensor in manifest.tensors
        }
    finally:
        os.close(segment_fd)


def raw(tensors: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in tensors.items()}
