"""What is seen, and in which order, when a process is killed that has a model on the device.

    python -m benchmarks.device_check.death SOCKET DEVICE BYTES

is that process: it says a line when the model is there, and ends with its standard input.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import gpu_worker
from benchmarks.coordinator_process import ROOT
from benchmarks.device_check.checks import Found, Missed
from benchmarks.device_check.models import Large
from benchmarks.device_check.place import Place

GONE_LIMIT_S = 60.0
"""A coordinator that cannot see a GPU's processes end waits 30 s for the driver."""

BOOKS = "charge released"
PIDFD = "pidfd"
EOF = "end of file"
FREE = "VRAM free"


def killed_with_vram(place: Place) -> Found:
    """Kill it, and see the charge go no earlier than the memory."""
    place.settle()
    used_bytes = place.used_bytes()
    command = ["-m", "benchmarks.device_check.death", place.socket, place.device.name]
    holder = subprocess.Popen(
        [sys.executable, *command, str(place.size_bytes)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    pidfd = os.pidfd_open(holder.pid)
    try:
        assert holder.stdout is not None
        if holder.stdout.readline() != b"here\n":
            raise Missed("a process of its own could not bring a model to the device")
        held_bytes = place.charged_bytes()
        if held_bytes < place.size_bytes or place.used_bytes() - used_bytes < held_bytes:
            raise Missed(f"a model is there, and {held_bytes} bytes are charged")
        at_s = _watched(place, holder, pidfd, used_bytes)
    finally:
        os.close(pidfd)
        holder.kill()
        holder.communicate()
    order = sorted(at_s, key=lambda what: at_s[what])
    said = ", ".join(f"{what} {at_s[what] * 1000:.1f} ms" for what in order)
    figures = {f"{what}_s": seconds for what, seconds in at_s.items()}
    if at_s[BOOKS] < at_s[FREE]:
        raise Missed(f"the charge went before the memory: {said}", figures)
    return Found(said, figures)


def _watched(
    place: Place, holder: subprocess.Popen[bytes], pidfd: int, used_bytes: int
) -> dict[str, float]:
    """Kill the process, and return after how long each was first seen.

    All are looked at in each round, the books first: so what they say was true before the memory
    is asked for, and they can be too early, but never only seem so.
    """
    assert holder.stdout is not None
    eof_fd = holder.stdout.fileno()
    looks: dict[str, Callable[[], bool]] = {
        BOOKS: lambda: not any(one.leases or one.state == "freeing" for one in place.on_device()),
        PIDFD: lambda: _readable(pidfd),
        EOF: lambda: _readable(eof_fd),
        FREE: lambda: place.used_bytes() <= used_bytes + place.slack_bytes,
    }
    at_s: dict[str, float] = {}
    started_s = time.perf_counter()
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    while len(at_s) < len(looks):
        round_s = time.perf_counter() - started_s
        if round_s > GONE_LIMIT_S:
            never = ", ".join(what for what in looks if what not in at_s)
            raise Missed(f"not seen within {GONE_LIMIT_S:g} s: {never}")
        for what, look in looks.items():
            if what not in at_s and look():
                at_s[what] = round_s
    return at_s


def _readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def main(socket: str, device: str, size_bytes: int) -> None:
    """Hold a model on the device until the standard input ends."""
    worker = gpu_worker.attach(socket, device=device, name="device-check, killed")
    make = lambda: Large(size_bytes, 20)  # noqa: E731
    with worker.use("device-check/killed", skeleton=make, build=make):
        print("here", flush=True)
        sys.stdin.read()


CHECKS = (("kill with VRAM held", killed_with_vram),)

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
