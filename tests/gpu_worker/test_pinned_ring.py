"""The ring of buffers on the way to a device, with a target in memory and copies that we end."""

import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpu_worker.pinned_ring import PinnedRing

BUFFER_BYTES = 64


class Device:
    """A target whose copies take place when they are waited for, or are all let go on."""

    def __init__(self, count: int = 3, readers: int = 2, size_bytes: int = 4096) -> None:
        self.buffers = [memoryview(bytearray(BUFFER_BYTES)) for _ in range(count)]
        self.ring = PinnedRing(self.buffers, readers)
        self.target = bytearray(size_bytes)
        self.copies: list[LateCopy] = []
        self.lock = threading.Lock()

    def start(self, number: int, offset: int, length: int) -> "LateCopy":
        copy = LateCopy(self, number, offset, length)
        with self.lock:
            self.copies.append(copy)
        return copy

    def finish(self) -> None:
        for copy in self.copies:
            copy.synchronize()


class LateCopy:
    """Takes the bytes at the last moment that is allowed: who overwrites them too early is seen."""

    def __init__(self, device: Device, number: int, offset: int, length: int) -> None:
        self.device, self.number, self.offset, self.length = device, number, offset, length
        self.over = False
        self.lock = threading.Lock()

    def synchronize(self) -> None:
        with self.lock:
            if not self.over:
                source = self.device.buffers[self.number][: self.length]
                self.device.target[self.offset : self.offset + self.length] = source
                self.over = True


def reader(source: bytes):
    def read(into: memoryview, offset: int) -> None:
        into[:] = source[offset : offset + len(into)]

    return read


@pytest.mark.parametrize("readers", [1, 2, 3])
@pytest.mark.parametrize("size_bytes", [0, 1, 63, 64, 65, 64 * 3, 64 * 3 + 1, 1000])
def test_all_bytes_arrive_where_they_belong(size_bytes, readers):
    device = Device(readers=readers)
    source = random.Random(size_bytes).randbytes(size_bytes)
    device.ring.send(size_bytes, reader(source), device.start)
    device.finish()
    assert bytes(device.target) == source + bytes(4096 - size_bytes)
    assert sorted(copy.offset for copy in device.copies) == list(range(0, size_bytes, 64))


def test_the_source_may_be_changed_when_the_copies_are_still_under_way():
    device = Device()
    source = bytearray(b"a" * 128)
    device.ring.send(128, reader(source), device.start)
    source[:] = b"b" * 128
    assert not any(copy.over for copy in device.copies)
    device.finish()
    assert bytes(device.target[:128]) == b"a" * 128


def test_a_buffer_is_not_written_to_before_the_copy_out_of_it_is_over():
    """Whatever many send at once: each byte arrives, through three buffers."""
    device = Device(size_bytes=40 * 1000)
    sources = [random.Random(number).randbytes(1000) for number in range(40)]

    def send(number: int) -> None:
        def start(buffer: int, offset: int, length: int) -> LateCopy:
            return device.start(buffer, number * 1000 + offset, length)

        device.ring.send(1000, reader(sources[number]), start)

    with ThreadPoolExecutor(8) as senders:
        list(senders.map(send, range(40)))
    device.finish()
    assert bytes(device.target) == b"".join(sources)


def test_buffers_are_read_into_side_by_side():
    """One reader would leave most of the link idle."""
    together = threading.Barrier(2, timeout=20)
    device = Device(readers=2)

    def read(into: memoryview, offset: int) -> None:
        together.wait()

    device.ring.send(128, read, device.start)
    assert len(device.copies) == 2


def test_there_are_never_more_readers_than_buffers():
    """A reader without a buffer would wait for one that it is to make free itself."""
    assert Device(count=2, readers=16).ring._readers == 2


@pytest.mark.parametrize("where", ["read", "start"])
def test_an_error_is_raised_when_all_reading_is_over_and_the_ring_goes_on(where):
    device = Device()
    source = random.Random(1).randbytes(640)

    def read(into: memoryview, offset: int) -> None:
        if where == "read" and offset == 128:
            raise OSError("cannot be read")
        reader(source)(into, offset)

    def start(number: int, offset: int, length: int) -> LateCopy:
        if where == "start" and offset == 128:
            raise OSError("cannot be copied")
        return device.start(number, offset, length)

    with pytest.raises(OSError, match="cannot be"):
        device.ring.send(640, read, start)
    device.ring.send(640, reader(source), device.start)
    device.finish()
    assert bytes(device.target[:640]) == source


def test_nothing_is_read_any_more_after_an_error():
    device = Device(readers=1)
    read_from: list[int] = []

    def read(into: memoryview, offset: int) -> None:
        read_from.append(offset)
        raise OSError("cannot be read")

    with pytest.raises(OSError, match="cannot be"):
        device.ring.send(640, read, device.start)
    device.ring._threads.shutdown(wait=True)
    assert read_from == [0]


def test_an_earlier_copy_that_failed_is_told_to_the_next_who_needs_its_buffer():
    class Failed:
        def synchronize(self) -> None:
            raise RuntimeError("the device is gone")

    device = Device(count=1, readers=1)
    device.ring.send(64, reader(bytes(64)), lambda *_: Failed())
    with pytest.raises(RuntimeError, match="gone"):
        device.ring.send(64, reader(bytes(64)), device.start)
    device.ring.send(64, reader(b"c" * 64), device.start)
    device.finish()
    assert bytes(device.target[:64]) == b"c" * 64


class Interrupt(BaseException):
    pass


def test_an_interrupt_waits_for_those_who_read():
    """Its caller closes the file then, and the number may be another's file at once."""
    delivered = threading.Event()
    read_to_the_end: list[int] = []

    def interrupt(*_: object) -> None:
        delivered.set()
        raise Interrupt

    def read(into: memoryview, offset: int) -> None:
        if not offset:
            os.kill(os.getpid(), signal.SIGUSR1)
        delivered.wait(20)
        for _ in range(100_000):
            into[0] = (into[0] + 1) % 251
        read_to_the_end.append(offset)

    device = Device(readers=1)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(Interrupt):
            device.ring.send(64 * 10, read, device.start)
        over = len(read_to_the_end)
    finally:
        signal.signal(signal.SIGUSR1, before)
    device.ring._threads.shutdown(wait=True)
    assert len(read_to_the_end) == over == 1
