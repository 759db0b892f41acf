"""Real processes for tests: a coordinator, and a peer that speaks the wire by hand."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from coordinator.audit import AuditReport, audit
from coordinator.operator import Operator
from shm_store import channel, layout, manifest, segment, source
from shm_store.report import GenerationReport, StatusReport
from shm_store.wire import (
    VERSION,
    Acquire,
    Commit,
    Fail,
    Filling,
    Flush,
    Flushed,
    Grant,
    Report,
    Reserve,
    Resume,
    Revoke,
    Space,
    Status,
    Ticket,
    decode,
    encode,
    to_session_decoder,
)

ROOT = Path(__file__).parent.parent
WAIT_S = 20.0


class Coordinator:
    """A coordinator process, ready when made."""

    def __init__(self, path: str, *arguments: str, **popen) -> None:
        self.socket = path
        self.process = subprocess.Popen(
            [sys.executable, "-m", "coordinator", "serve", "--socket", path, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            **popen,
        )
        assert self.process.stdout is not None
        self.ready_line = self.process.stdout.readline()

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """End it; return its exit code and what it wrote to stderr."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        _, stderr = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, stderr

    def audit(self) -> AuditReport:
        """Books and kernel agree; what else was found.

        9 ms with 3 generations, 3 workers and 80 processes on the host: cheap after every step.
        """
        with Operator.connect(self.socket, "audit") as operator:
            found = audit(operator)
        assert found.agree, found.differences
        return found

    def segment_blocks(self) -> int:
        """The kernel's word: bytes of every segment that this process holds an fd of."""
        total = 0
        for fd, target in fds_of(self.pid).items():
            if "memfd:weight-cache:" in target:
                total += os.stat(f"/proc/{self.pid}/fd/{fd}").st_blocks * 512
        return total


class Peer:
    """A session spoken by hand. Blocking, with a timeout on every read.

    Granted fds are the test's own; the sockets of all peers are closed by `close_all`.
    """

    opened: ClassVar[list[channel.Channel]] = []

    def __init__(self, path: str, name: str = "peer", role: str = "worker") -> None:
        self.channel = self.connect(path)
        self.channel.socket.settimeout(WAIT_S)
        self.rid = 0
        self.send(Resume(VERSION, name, "cpu", role))

    @classmethod
    def connect(cls, path: str) -> channel.Channel:
        """Connect without a word."""
        cls.opened.append(channel.connect(path))
        return cls.opened[-1]

    @classmethod
    def close_all(cls) -> None:
        while cls.opened:
            cls.opened.pop().close()

    def send(self, message, fds=()) -> None:
        self.channel.send(encode(message), fds)

    def receive(self):
        """The next message; its fds are in `self.fds`. None at end of file."""
        received = self.channel.receive()
        if received is None:
            return None
        data, self.fds = received
        return decode(to_session_decoder, data)

    def next_rid(self) -> int:
        self.rid += 1
        return self.rid

    def expect(self, kind: type):
        """The next message that is no progress and no REVOKE; it must be of this kind."""
        while True:
            message = self.receive()
            if not isinstance(message, Filling | Revoke) or kind in (Filling, Revoke):
                assert isinstance(message, kind), message
                return message

    def load(self, key: str, path: str | os.PathLike, timeout_s: float = WAIT_S):
        """ACQUIRE with a source. Returns the final answer; a Grant's fd is in `self.fds`."""
        fd = source.open_source(path)
        try:
            rid = self.next_rid()
            self.send(Acquire(rid, key, os.fspath(path), "", timeout_s), [fd])
        finally:
            os.close(fd)
        return self.expect(Grant | Fail)

    def ticket(self, key: str, version: str = "") -> Ticket:
        self.send(Acquire(self.next_rid(), key, None, version, WAIT_S))
        return self.expect(Ticket)

    def space(self, gen: str, size: int) -> int:
        """RESERVE; returns the fd of the backed segment, the caller's to close."""
        self.send(Reserve(gen, size))
        self.expect(Space)
        (fd,) = self.fds
        return fd

    def publish(self, key: str, data: bytes = b"\1" * 64, version: str = "") -> Grant:
        """Build and commit one tensor; the granted fd is in `self.fds`."""
        ticket = self.ticket(key, version)
        entry = manifest.TensorEntry("w", "U8", (len(data),), (1,), 0, 0)
        table = manifest.Manifest((entry,), (manifest.GroupEntry(0, len(data)),))
        encoded = manifest.encode_manifest(table)
        fd = self.space(ticket.gen, layout.segment_bytes(len(encoded), len(data)))
        segment.write_at(fd, data, segment.write_manifest(fd, encoded))
        os.close(fd)
        self.send(Commit(ticket.gen))
        return self.expect(Grant)

    def status(self) -> StatusReport:
        rid = self.next_rid()
        self.send(Status(rid))
        return self.expect(Report).report

    def generation(self, key: str) -> GenerationReport | None:
        found = [g for g in self.status().generations if g.key == key]
        assert len(found) <= 1, found
        return found[0] if found else None

    def flush(self) -> None:
        rid = self.next_rid()
        self.send(Flush(rid))
        assert self.expect(Flushed) == Flushed(rid)

    def close(self) -> None:
        self.channel.close()


@contextmanager
def running(path: str, *arguments: str, **popen) -> Iterator[Coordinator]:
    """A coordinator for the length of a block. It must end with 0 and say nothing alarming."""
    started = Coordinator(path, *arguments, **popen)
    try:
        yield started
    finally:
        Peer.close_all()
        code, stderr = started.stop()
    assert code == 0, stderr
    assert "Traceback" not in stderr, stderr


def fds_of(pid: int) -> dict[str, str]:
    """Number to target of every fd of a process."""
    found = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            found[fd] = os.readlink(f"/proc/{pid}/fd/{fd}")
        except FileNotFoundError:
            continue  # closed while we looked
    return found


def children_of(pid: int) -> list[int]:
    """Pids of the direct children of a process."""
    return [
        int(child)
        for task in os.listdir(f"/proc/{pid}/task")
        for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()
    ]


def processes_with(variable: str, value: str) -> list[int]:
    """Pids of every process that was started with this environment variable."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue  # it ended while we looked, or is somebody else's
        if f"{variable}={value}".encode() in environment.split(b"\0"):
            found.append(int(pid))
    return found


def segments_mapped_by(pid: int) -> list[str]:
    """Names of the segments in a process's memory map."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return sorted(set(re.findall(r"memfd:(weight-cache:\S+)", maps)))


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> Path:
    """Write a file by hand: name to (dtype, shape, bytes)."""
    header = {}
    body = b""
    for name, (dtype, shape, data) in tensors.items():
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        body += data
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + body)
    return path
