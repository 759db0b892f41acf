"""A GPU whose memory is the host's: what torch would ask its driver is noted, and not done."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from gpu_worker import cuda_device, cuda_uploads

MIB = 1 << 20


class Noting(NamedTuple):
    device: cuda_device.CudaDevice
    notes: list[str]


class NotingEvent:
    def __init__(self, notes, name):
        self.notes, self.name = notes, name

    def record(self, stream):
        pass

    def synchronize(self):
        pass


class NotingStream:
    def __init__(self, notes, name):
        self.notes, self.name = notes, name

    def wait_event(self, event):
        self.notes.append(f"{self.name} waits for {event.name}")

    def record_event(self):
        return NotingEvent(self.notes, self.name)

    def synchronize(self):
        self.notes.append(f"wait for {self.name}")


def noted(monkeypatch: pytest.MonkeyPatch) -> Noting:
    """Return a device whose memory is the host's, and notes of what torch was asked there."""
    notes: list[str] = []
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "current_device", lambda: 1)
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="a-b"))
    monkeypatch.setattr(cuda, "mem_get_info", lambda _: (5 * MIB, 20 * MIB))
    monkeypatch.setattr(cuda, "memory_reserved", lambda _: 2 * MIB)
    monkeypatch.setattr(cuda, "Event", lambda blocking: NotingEvent(notes, "a copy"))
    monkeypatch.setattr(cuda, "Stream", lambda _: NotingStream(notes, "copies"))
    monkeypatch.setattr(cuda, "current_stream", lambda _: NotingStream(notes, "current"))
    monkeypatch.setattr(cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(cuda, "synchronize", lambda _: notes.append("wait for all"))
    monkeypatch.setattr(cuda, "empty_cache", lambda: notes.append("empty the cache"))
    monkeypatch.setattr(cuda_uploads, "_warned", True)

    def over(device, address, offset, length, hold=None):
        notes.append("over")

        class Whole(ctypes.Array):
            _type_, _length_ = ctypes.c_ubyte, length
            hold: object

        whole = Whole.from_address(address + offset)
        whole.hold = hold
        return torch.frombuffer(whole, dtype=torch.uint8)

    monkeypatch.setattr(cuda_device, "_over", over)
    device = cuda_device.CudaDevice(1)
    device.torch_device = torch.device("cpu")
    return Noting(device, notes)
