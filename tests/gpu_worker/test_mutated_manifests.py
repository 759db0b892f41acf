"""Manifests that are almost right: tensors within their segment, or a typed error."""

from __future__ import annotations

import pytest
import torch

from gpu_worker import publish
from gpu_worker.mapping import Buffer
from gpu_worker.tensors import tensors
from shm_store.errors import PlatformUnsupported, SegmentRefused
from shm_store.layout import PREAMBLE_BYTES, data_start
from tests.mutations import COUNT, mutations

ROOM_BYTES = 4096


def weights() -> dict[str, torch.Tensor]:
    whole = torch.arange(64.0)
    return {
        "plain": torch.ones(3, 5, dtype=torch.bfloat16),
        "view": whole[3:9],
        "other view": whole.view(8, 8).T,
        "expanded": torch.ones(1).expand(4, 4),
        "channels last": torch.ones(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(True),
    }


@pytest.mark.timeout(900)
def test_a_mutated_manifest_gives_tensors_within_its_segment_or_is_refused():
    whole = publish.plan(weights()).manifest
    made = 0
    for manifest in mutations((whole,), 9):
        size = data_start(len(manifest)) + ROOM_BYTES
        kind = type("Buffer", (Buffer,), {"__slots__": (), "_length_": size})
        buffer = kind()
        memoryview(buffer).cast("B")[PREAMBLE_BYTES : PREAMBLE_BYTES + 8] = len(manifest).to_bytes(
            8, "little"
        )
        memoryview(buffer).cast("B")[PREAMBLE_BYTES + 8 : PREAMBLE_BYTES + 8 + len(manifest)] = (
            manifest
        )
        try:
            state = tensors(buffer)
        except (SegmentRefused, PlatformUnsupported):
            continue
        made += 1
        start = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
        for tensor in state.values():
            if tensor.numel():
                storage = tensor.untyped_storage()
                assert start <= storage.data_ptr()
                assert storage.data_ptr() + storage.nbytes() <= start + size
                tensor.reshape(-1)[-1:].clone()
    assert 0 < made < COUNT / 2
