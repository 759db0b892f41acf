"""Plays the coordinator for the worker's tests: backs, fills and seals segments."""

import ctypes
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gpu_worker import mapping, publish
from shm_store import segment
from shm_store.keys import Fingerprint, GenerationId, Key
from shm_store.layout import segment_bytes
from shm_store.manifest import GroupEntry, Manifest, Preamble, TensorEntry, encode_manifest

KEY = Key("tests/weights")
GEN = GenerationId("1-1")
PREAMBLE = Preamble(GEN, KEY, Fingerprint("tests"))


def seal(weights: torch.nn.Module | Mapping[str, Any], gen: str = GEN) -> int:
    """Publish `weights`; return the fd of the sealed segment."""
    plan = publish.plan(weights)
    fd = segment.create(GenerationId(gen))
    os.posix_fallocate(fd, 0, plan.size_bytes)
    publish.fill(fd, plan)
    segment.seal(fd, Preamble(GenerationId(gen), KEY, Fingerprint("tests")))
    return fd


def seal_manifest(
    tensors: Sequence[TensorEntry],
    groups: Sequence[GroupEntry],
    data_bytes: int = 4096,
    beyond: int = 0,
    front: bytes = b"",
) -> int:
    """Return the fd of a sealed segment with this manifest, true or not, over counting bytes.

    Args:
        front: what is there instead, at the beginning.
    """
    manifest = encode_manifest(Manifest(tuple(tensors), tuple(groups), beyond=beyond))
    fd = segment.create(GEN)
    os.posix_fallocate(fd, 0, segment_bytes(len(manifest), data_bytes))
    start = segment.write_manifest(fd, manifest)
    counting = bytes(index % 251 for index in range(data_bytes))
    segment.write_at(fd, front + counting[len(front) :], start)
    segment.seal(fd, PREAMBLE)
    return fd


@contextmanager
def mapped(fd: int) -> Iterator[mapping.Buffer]:
    """Map a sealed segment, and unmap it afterwards. No tensor of it may be used after that."""
    buffer = mapping.map_segment(fd, os.fstat(fd).st_size)
    address, size_bytes = ctypes.addressof(buffer), len(buffer)
    try:
        yield buffer
    finally:
        ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes))
        os.close(fd)


def maps_of(gen: str) -> list[str]:
    """Return the lines of this process's memory map that are maps of that generation."""
    name = re.compile(rf"/memfd:weight-cache:{re.escape(gen)}(?: |$)")
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if name.search(line)]


def bits(tensor: torch.Tensor) -> bytes:
    """Return the elements in logical order, as bytes. Works where torch has no comparison."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    plain = tensor.detach().resolve_conj().resolve_neg().view(sizes[tensor.itemsize])
    dense = torch.empty(plain.shape, dtype=plain.dtype).copy_(plain)
    return ctypes.string_at(dense.data_ptr(), dense.numel() * dense.itemsize)


def in_map(buffer: mapping.Buffer, tensor: torch.Tensor) -> bool:
    """Say whether the bytes of a tensor are in a map."""
    address = ctypes.addressof(buffer)
    return tensor.data_ptr() in range(address, address + len(buffer))
