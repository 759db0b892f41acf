"""How fast bytes come to the device, by each way that there is, beside a pinned copy of as many.

The ways are those of `gpu_worker.cuda_uploads`, made of the same parts and in the same sizes. What
is pinned once, as the floor is, no process could afford for weights.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from benchmarks.device_check.checks import Found, Missed, Skipped
from benchmarks.device_check.models import Large
from benchmarks.device_check.place import Place
from benchmarks.rows import interleave, medians
from gpu_worker import cuda_device, cuda_uploads, mapping
from gpu_worker.block import Piece
from gpu_worker.residency import PASS_BYTES
from shm_store.layout import PAGE_BYTES, round_up
from shm_store.sizes import parse_size

PINNED = "pinned"
PAGEABLE = "pageable"
RING = "ring"
MAPPED = "ring, from a map"
REGISTERED = "registered"

LEAST = 0.9
"""Of the speed of a pinned copy."""
LEAST_BYTES = 4 * cuda_uploads.PROBE_BYTES
"""Less says nothing about which way is faster."""

Way = Callable[[], None]
"""Brings all the bytes to the device, and returns when they are there."""


def as_fast_as_pinned(place: Place) -> Found:
    """The better of ring and registered pages is nearly as fast as what was pinned all along."""
    if place.simulated:
        raise Skipped("pageable, ring and registered need a GPU")
    size_bytes = round_up(max(place.size_bytes, LEAST_BYTES), PAGE_BYTES)
    whole = _bytes(size_bytes)
    target = torch.empty(size_bytes, dtype=torch.uint8, device=place.device.torch_device)
    with _memfd(whole) as fd:
        ways = _ways(place, whole, fd, target)
        for name, way in ways.items():
            target.zero_()
            place.device.synchronize()  # copies have a stream of their own
            way()
            if not torch.equal(target.cpu(), whole):
                raise Missed(f"{name}: other bytes have come")
        taken_s = medians(
            interleave(place.rounds, {name: partial(_took_s, way) for name, way in ways.items()})
        )
    speeds = {name: size_bytes / took_s / 1e9 for name, took_s in taken_s.items()}
    ratio = max(speeds.get(RING, 0.0), speeds.get(REGISTERED, 0.0)) / speeds[PINNED]
    figures = {f"{name}, GB/s": speed for name, speed in speeds.items()} | {"ratio": ratio}
    said = ", ".join(f"{name} {speed:.1f}" for name, speed in speeds.items())
    if REGISTERED not in speeds:
        said += f", {REGISTERED} not supported"
    said = f"GB/s: {said}; best {ratio:.2f} of pinned (at least {LEAST:g})"
    if ratio < LEAST:
        raise Missed(said, figures)
    return Found(said, figures)


def lock_speed(place: Place) -> Found:
    """A lock of a model that is on the host, allocation and all. A figure, and no promise."""
    handle = place.load(lambda: Large(place.size_bytes, 100))

    def lock() -> None:
        with handle:
            pass

    def took_s() -> float:
        place.worker.offload(handle.key)
        place.settle()
        return _took_s(lock)

    took = medians({"lock": [took_s() for _ in range(place.rounds + 1)][1:]})["lock"]
    speed = place.size_bytes / took / 1e9
    said = f"{place.size_bytes / 1e9:.3g} GB in {took * 1000:.1f} ms: {speed:.1f} GB/s"
    return Found(said, {"lock_s": took, "GB/s": speed})


def _took_s(way: Way) -> float:
    started_s = time.perf_counter()
    way()
    return time.perf_counter() - started_s


def _ways(place: Place, whole: torch.Tensor, fd: int, target: torch.Tensor) -> dict[str, Way]:
    where = place.device.torch_device
    pinned = _pinned(whole)

    def copy(source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        place.device.synchronize()

    size_bytes = parse_size(cuda_device.DEFAULT_PINNED) // cuda_uploads.BUFFERS
    buffers = cuda_uploads.buffers(place.device.name, cuda_uploads.BUFFERS, size_bytes)
    ring = cuda_uploads.Uploads(cuda_uploads.CopyStream(where), buffers, None)
    ways: dict[str, Way] = {
        PINNED: partial(copy, pinned),
        PAGEABLE: partial(copy, whole),
        RING: partial(_send, ring, target, lambda at, size: Piece(None, fd, at, size)),
        MAPPED: partial(
            _send, ring, target, lambda at, size: Piece(whole[at : at + size], None, 0, size)
        ),
    }
    registration = cuda_uploads.registration(where.index or 0)
    if registration is not None and _can_register(registration, fd):
        # A clock that stands still after the buffers have: so registered pages are the faster way.
        clock = iter((0.0, 1.0, 1.0)).__next__
        stream = cuda_uploads.CopyStream(where)
        registered = cuda_uploads.Uploads(stream, buffers, registration, clock)
        ways[REGISTERED] = partial(
            _send, registered, target, lambda at, size: Piece(None, fd, at, size)
        )
    return ways


def _pinned(whole: torch.Tensor) -> torch.Tensor:
    pinned = torch.empty(whole.nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    return pinned.copy_(whole)


def _send(
    uploads: cuda_uploads.Uploads, target: torch.Tensor, piece: Callable[[int, int], Piece]
) -> None:
    """Bring the bytes in passes, as a module comes."""
    for at in range(0, target.nbytes, PASS_BYTES):
        size_bytes = min(PASS_BYTES, target.nbytes - at)
        part = target[at : at + size_bytes]
        uploads.send(partial(_range, part), piece(at, size_bytes))
    uploads.stream.finish()


def _range(part: torch.Tensor, offset_bytes: int, size_bytes: int) -> torch.Tensor:
    return part[offset_bytes : offset_bytes + size_bytes]


def _can_register(registration: cuda_uploads.Registration, fd: int) -> bool:
    """Say whether the driver really pins such pages; that it should is only its word."""
    pages = mapping.map_shared(fd, PAGE_BYTES, 0, write=False)
    address = ctypes.addressof(pages)
    try:
        with registration.pinned(address, PAGE_BYTES) as pinned:
            return pinned
    finally:
        del pages
        mapping.unmap_range(address, PAGE_BYTES)


def _bytes(size_bytes: int) -> torch.Tensor:
    """Return bytes that are nowhere like those some bytes further on."""
    whole = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
    return whole.random_(generator=torch.Generator().manual_seed(1))


@contextmanager
def _memfd(whole: torch.Tensor) -> Iterator[int]:
    """Give a memfd with these bytes, as a segment is one."""
    fd = os.memfd_create("device-check")
    try:
        source = memoryview((ctypes.c_ubyte * whole.nbytes).from_address(whole.data_ptr()))
        written = 0
        while written < whole.nbytes:
            written += os.pwrite(fd, source[written:], written)
        yield fd
    finally:
        os.close(fd)


CHECKS = (
    ("upload bandwidth", as_fast_as_pinned),
    ("lock, from host to device", lock_speed),
)
