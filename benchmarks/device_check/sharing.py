"""Whether memory of a device is one copy for all processes there, whoever has it, comes, or ends.

    python -m benchmarks.device_check.sharing SOCKET DEVICE BYTES

is another process on the device. It does what its standard input says: `lock KEY` has the model
there, and answers with what it has found.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

import gpu_worker
from benchmarks.coordinator_process import ROOT
from benchmarks.device_check.checks import Found, Missed, Skipped
from benchmarks.device_check.models import layers, noise, numbers
from benchmarks.device_check.place import Place, bits
from benchmarks.rows import interleave, medians
from shm_store.errors import SegmentRefused
from shm_store.report import size_text

GONE_LIMIT_S = 60.0
POLL_S = 0.02
"""Between two looks at what the driver says is free: nothing of it can be awaited."""
LEAST = 0.95
"""Of the speed with weights of torch's own."""
WIDTH = 1024
LAYERS = 16


def one_copy(place: Place) -> Found:
    """Two processes lock it: the second moves nothing, and finds the same bytes, in one memory."""
    _require_sharing(place)
    handle = place.load(partial(noise, place.size_bytes), shares=True)
    with Other(place) as other:
        place.settle()
        used_bytes = place.used_bytes()
        with handle as module:
            found = other.lock(handle.key)
            if found["digest"] != digest(module):
                raise Missed("the second process has other bytes")
            taken_bytes = place.used_bytes() - used_bytes
        reports = [one for one in place.on_device() if one.key == handle.key]
    if found["moved_bytes"]:
        raise Missed(f"the second process moved {found['moved_bytes']} bytes")
    if len(reports) != 1 or reports[0].private:
        raise Missed(f"there are {len(reports)} copies by the books")
    apart_bytes = abs(taken_bytes - reports[0].size_bytes)
    if apart_bytes > place.slack_bytes:
        raise Missed(f"charged {reports[0].size_bytes} bytes, {apart_bytes} from the driver's")
    said = f"{size_text(place.size_bytes)}, bit-equal; the driver's free memory "
    return Found(said + f"{size_text(apart_bytes)} off", {"apart_bytes": apart_bytes})


def outlives_its_maker(place: Place) -> Found:
    """Who made it is killed: who has it goes on, and the next has it without moving a byte."""
    _require_sharing(place)
    make = partial(noise, place.size_bytes)
    with Other(place) as maker:
        handle = place.load(make, shares=True)
        made = maker.lock(handle.key)
        if made["moved_bytes"] < place.size_bytes:
            raise Missed("who came first has not moved it there")
        before_bytes = place.moved_bytes()
        with handle as module:
            maker.kill()
            if digest(module) != made["digest"]:
                raise Missed("who was there has other bytes now")
        with Other(place) as next_one:
            found = next_one.lock(handle.key)
        if found["digest"] != made["digest"] or found["moved_bytes"]:
            raise Missed(f"who comes next moves {found['moved_bytes']} bytes, or finds others")
    if place.moved_bytes() != before_bytes:
        raise Missed("who was there has moved bytes")
    return Found(f"{size_text(place.size_bytes)}, next lock {found['lock_s'] * 1000:.1f} ms", {})


def kept_by_its_fd(place: Place) -> Found:
    """When no process maps it the coordinator's fd keeps it; when that is closed, it is free."""
    _require_sharing(place)
    place.settle()
    used_bytes = place.used_bytes()
    handle = place.load(partial(noise, place.size_bytes), shares=True)
    with handle as module:
        want = digest(module)
    del module
    place.worker.offload(handle.key)
    place.settle()
    kept_bytes = place.used_bytes() - used_bytes
    if kept_bytes < place.size_bytes - place.slack_bytes:
        raise Missed(f"nobody maps it, and only {kept_bytes} bytes of it are there")
    before_bytes = place.moved_bytes()
    with handle as module:
        if digest(module) != want or place.moved_bytes() != before_bytes:
            raise Missed("it is not what it was, or was moved again")
    del module
    started_s = time.monotonic()
    place.forget(handle)
    while place.used_bytes() > used_bytes + place.slack_bytes:
        if time.monotonic() - started_s > GONE_LIMIT_S:
            raise Missed(f"{place.used_bytes() - used_bytes} bytes are not free after its end")
        time.sleep(POLL_S)
    took_s = time.monotonic() - started_s
    said = f"{size_text(kept_bytes)} kept by an fd; free {took_s * 1000:.1f} ms after its end"
    return Found(said, {"kept_bytes": kept_bytes, "free_s": took_s})


def import_latency(place: Place) -> Found:
    """How long a lock takes of what is there already, beside one that brings it. No promise."""
    _require_sharing(place)
    handle = place.load(partial(noise, place.size_bytes), shares=True)

    def lock_s(*, there: bool) -> float:
        place.worker.offload(handle.key)
        place.settle()
        if not there:
            place.evict(handle.key)
        started_s = time.perf_counter()
        with handle:
            return time.perf_counter() - started_s

    with handle:
        pass
    samples = {"import": partial(lock_s, there=True), "upload": partial(lock_s, there=False)}
    took_s = medians(interleave(place.rounds, samples))
    said = f"{size_text(place.size_bytes)}: {took_s['import'] * 1000:.2f} ms, "
    said += f"with its upload {took_s['upload'] * 1000:.1f} ms"
    return Found(said, {f"{name}_s": seconds for name, seconds in took_s.items()})


def as_fast_as_private(place: Place) -> Found:
    """A pass through weights that are shared takes as long as one through torch's own."""
    _require_sharing(place)
    make = partial(layers, LAYERS, WIDTH)
    x = numbers(64, WIDTH).to(place.device.torch_device)
    with (
        place.load(make, shares=True) as shared,
        place.load(make, private=True) as private,
        torch.no_grad(),
    ):
        if not torch.equal(shared(x), private(x)):
            raise Missed("the results differ")

        def forward_s(module: torch.nn.Module) -> float:
            place.device.synchronize()
            started_s = time.perf_counter()
            module(x)
            place.device.synchronize()
            return time.perf_counter() - started_s

        ways: dict[str, Callable[[], float]] = {
            "shared": partial(forward_s, shared),
            "private": partial(forward_s, private),
        }
        took_s = medians(interleave(max(place.rounds, 3) * 10, ways))
    ratio = took_s["private"] / took_s["shared"]
    figures = {f"{name}_s": seconds for name, seconds in took_s.items()} | {"ratio": ratio}
    said = f"{took_s['shared'] * 1e3:.3f} ms, private {took_s['private'] * 1e3:.3f} ms: "
    said += f"{ratio:.2f} times as fast (at least {LEAST:g} on a GPU)"
    if ratio < LEAST and not place.simulated:
        raise Missed(said, figures)
    return Found(said, figures)


def refuses_others(place: Place) -> Found:
    """An fd that is no memory of the device is refused by name, and the device goes on."""
    _require_sharing(place)
    size_bytes = place.device.segment_bytes(1)
    with contextlib.ExitStack() as stack:
        file = os.memfd_create("device-check")
        stack.callback(os.close, file)
        os.ftruncate(file, size_bytes)
        fds = {"a memfd": file, "/dev/null": os.open("/dev/null", os.O_RDWR)}
        stack.callback(os.close, fds["/dev/null"])
        for name, fd in fds.items():
            try:
                place.device.open_segment(fd, size_bytes).free()
            except SegmentRefused:
                continue
            raise Missed(f"{name} was taken for memory of the device")
    with place.load(partial(noise, size_bytes), shares=True) as module:
        digest(module)
    return Found(", ".join(fds))


def digest(module: torch.nn.Module) -> str:
    """Return what tells these bytes from all others."""
    found = hashlib.sha256()
    for _, tensor in sorted(module.state_dict().items()):
        whole = bits(tensor)
        found.update((ctypes.c_ubyte * whole.nbytes).from_address(whole.data_ptr()))
    return found.hexdigest()


def _require_sharing(place: Place) -> None:
    if not place.device.shares:
        raise Skipped(f"{place.device.name} does not share its memory: {place.device.why_private}")


class Other:
    """Another process on the device, which has used it already. A context manager that ends it."""

    def __init__(self, place: Place) -> None:
        command = ["-m", "benchmarks.device_check.sharing", place.socket, place.device.name]
        self._process = subprocess.Popen(
            [sys.executable, *command, str(place.size_bytes)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def lock(self, key: str) -> dict[str, Any]:
        """Have it lock a model; return what it has found, what it has moved, and how long it took.

        Raises:
            Missed: it could not.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(f"lock {key}\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise Missed("another process on the device could not lock it")
        found = json.loads(line)
        assert isinstance(found, dict)
        return found

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        stdout = self._process.stdout
        assert stdout is not None
        if stdout.readline() != "here\n":
            self.kill()
            raise Missed("another process could not use the device")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def main(socket: str, device: str, size_bytes: int) -> None:
    """Do what the standard input says, until it ends."""
    make = partial(noise, size_bytes)
    place = Place(socket, device, size_bytes, rounds=1)
    small = partial(noise, 1)
    with place.worker.use(f"device-check/{os.getpid()}", build=small, skeleton=small, private=True):
        pass  # what the first use of a device takes there is not to be counted later
    print("here", flush=True)
    handles = []
    for line in sys.stdin:
        key = line.split()[1]
        before_bytes = place.moved_bytes()
        handle: gpu_worker.ModelHandle = place.worker.load(
            key, skeleton=make, build=make, share_vram=True
        )
        handles.append(handle)
        started_s = time.perf_counter()
        module = handle.__enter__()
        lock_s = time.perf_counter() - started_s
        moved_bytes = place.moved_bytes() - before_bytes
        found = {"digest": digest(module), "moved_bytes": moved_bytes, "lock_s": lock_s}
        print(json.dumps(found), flush=True)


CHECKS = (
    ("shared: one copy, bit-equal in a second process", one_copy),
    ("shared: its maker is killed, others go on", outlives_its_maker),
    ("shared: its fd alone keeps it, and its end frees it", kept_by_its_fd),
    ("shared: lock of what is there", import_latency),
    ("shared: forward pass", as_fast_as_private),
    ("shared: what is no memory of the device", refuses_others),
)

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
