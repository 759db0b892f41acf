"""A worker that asks for one key when it is told to, for `fill`: many of them ask at once.

    python -m benchmarks.crowd SOCKET KEY FILE

Says `ready` once it is attached. A line on standard input has it ask; it reads every page of what
comes, says `done`, and ends with standard input.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.checkpoint import read_every_page
from benchmarks.coordinator_process import ROOT
from benchmarks.kernel import SEGMENT_MARK

PAUSE_S = 0.01


@dataclass(frozen=True, slots=True)
class CrowdSample:
    """What it took to have all of them served.

    Attributes:
        seconds: until the last one had read every page.
        peak_bytes: see `ask_at_once`.
        read_bytes: from the disk, by the coordinator, its children and the workers.
        called_bytes: that the coordinator's children and it have read by system calls.
        looks: how often memory was looked at.
    """

    seconds: float
    peak_bytes: int
    read_bytes: int
    called_bytes: int
    looks: int


def ask_at_once(
    workers: int, coordinator_pid: int, socket: str, key: str, file: str
) -> CrowdSample:
    """Have so many processes ask for `key`, and watch them.

    Memory is what no file on a disk is behind, at its peak: the segments (blocks of memfds that
    the coordinator has), and the anonymous memory of coordinator, its children and workers
    (RssAnon, of each in full), less what those had of it before they asked. Clean pages of the
    page cache are not counted: they are the kernel's to drop.
    """
    command = [sys.executable, "-m", "benchmarks.crowd", socket, key, file]
    processes = [
        subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(workers)
    ]
    try:
        streams = {process.stdout: process for process in processes if process.stdout is not None}
        for stream in streams:
            assert stream.readline(), "a worker has ended"
        pids = [coordinator_pid, *(process.pid for process in processes)]
        before = sum(_anonymous_bytes(pid) for pid in pids)
        read, called = _read_bytes(pids), _io(coordinator_pid)["rchar"]
        started_s = time.perf_counter()
        for process in processes:
            assert process.stdin is not None
            print(file=process.stdin, flush=True)
        peak = looks = 0
        while streams:
            answered, _, _ = select.select(list(streams), [], [], PAUSE_S)
            everybody = [*pids, *_children(coordinator_pid)]
            anonymous = sum(_anonymous_bytes(pid) for pid in everybody) - before
            peak = max(peak, anonymous + _segments_bytes(coordinator_pid))
            looks += 1
            for stream in answered:
                if not stream.readline():
                    raise RuntimeError(f"worker {streams[stream].pid} has ended")
                del streams[stream]
        took_s = time.perf_counter() - started_s
        while _children(coordinator_pid):
            time.sleep(PAUSE_S)  # what they have read is the coordinator's once it has reaped them
        return CrowdSample(
            seconds=took_s,
            peak_bytes=peak,
            read_bytes=_read_bytes(pids) - read,
            called_bytes=_io(coordinator_pid)["rchar"] - called,
            looks=looks,
        )
    finally:
        for process in processes:
            process.communicate()


def _read_bytes(pids: list[int]) -> int:
    """Return what they have read from disks; the kernel adds to it what reaped children have."""
    return sum(_io(pid)["read_bytes"] for pid in pids)


def _io(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    return {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}


def _anonymous_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it has ended
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def _children(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(child) for child in children.split()]


def _segments_bytes(coordinator_pid: int) -> int:
    total = 0
    for fd in Path(f"/proc/{coordinator_pid}/fd").iterdir():
        try:
            if os.readlink(fd).startswith(SEGMENT_MARK):
                total += os.stat(fd).st_blocks * 512
        except FileNotFoundError:
            pass  # closed meanwhile
    return total


def main(socket: str, key: str, file: str) -> None:
    """Attach, ask once, read it all, wait for the end."""
    import torch

    import gpu_worker
    import gpu_worker.tensors

    torch.set_num_threads(1)
    with gpu_worker.attach(socket=socket, name="benchmark") as worker:
        print("ready", flush=True)
        sys.stdin.readline()
        read_every_page(worker.state_dict(key, source=file))
        print("done", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:4])
