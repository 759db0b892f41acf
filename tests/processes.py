"""Real processes for tests: a coordinator, and a peer that speaks the wire by hand."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from coordinator.audit import AuditReport, audit
from coordinator.operator import Operator
from shm_store import channel, layout, manifest, segment, source
from shm_store.errors import ConnectionLost, CoordinatorLost, WorkerClosed
from shm_store.report import GenerationReport, StatusReport
from shm_store.wire import (
    VERSION,
    Acquire,
    Cancel,
    Charge,
    Commit,
    Fail,
    Filling,
    Flush,
    Flushed,
    Grant,
    Held,
    HeldMap,
    Release,
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
    """A coordinator process, ready when made.

    Those made by `running` are in `audited` meanwhile.
    """

    audited: ClassVar[list[Coordinator]] = []

    def __init__(
        self, path: str, *arguments: str, program: Sequence[str] = ("-m", "coordinator"), **popen
    ) -> None:
        self.socket = path
        self.unquiet = ""
        """Why `audit_quiet` looks at nothing, if it does not."""
        self.process = subprocess.Popen(
            [sys.executable, *program, "serve", "--socket", path, *arguments],
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
        self.unquiet = "it was stopped"
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

    def audit_quiet(self) -> None:
        """Have everybody here give back what is over, then hold the books against the kernel.

        A test that has broken or ended this coordinator says so in `unquiet`.
        """
        if self.unquiet:
            return
        Peer.settle(self.socket)
        _flush_workers(self.socket)
        with Operator.connect(self.socket, "test") as operator:
            operator.flush()
        self.audit()

    def segment_blocks(self) -> int:
        """The kernel's word: bytes of every segment that this process holds an fd of."""
        total = 0
        for fd, target in fds_of(self.pid).items():
            if "memfd:weight-cache:" in target:
                total += os.stat(f"/proc/{self.pid}/fd/{fd}").st_blocks * 512
        return total


class Peer:
    """A session spoken by hand. Blocking, with a timeout on every read.

    Granted fds are the test's own, until `settle`; the sockets of all peers are closed by
    `close_all`.
    """

    opened: ClassVar[list[channel.Channel]] = []
    attached: ClassVar[list[Peer]] = []

    def __init__(
        self,
        path: str,
        name: str = "peer",
        role: str = "worker",
        version: int = VERSION,
        token: str = "",
        held: Sequence[tuple[Held, Sequence[int]]] = (),
    ) -> None:
        """Attach, or come back as the session `token`, which has `held`, each with its fds."""
        self.path = path
        self.channel = self.connect(path)
        self.channel.socket.settimeout(WAIT_S)
        self.rid = 0
        self.asked: set[int] = set()
        self.leases: dict[str, int] = {}
        self.given: list[tuple[int, os.stat_result]] = []
        self.attached.append(self)
        self.send(Resume(version, name, "cpu", role, token, len(held)))
        for thing, fds in held:
            self.send(thing, fds)

    @classmethod
    def connect(cls, path: str) -> channel.Channel:
        """Connect without a word."""
        cls.opened.append(channel.connect(path))
        return cls.opened[-1]

    @classmethod
    def close_all(cls) -> None:
        cls.attached.clear()
        while cls.opened:
            cls.opened.pop().close()

    @classmethod
    def settle(cls, path: str) -> None:
        """Have those on `path` ask for nothing more and give everything back, then close all.

        They lease without a map and keep fds, which no worker does and every audit names.
        """
        for peer in cls.attached:
            if peer.path == path:
                peer.give_back()
        cls.close_all()

    def send(self, message, fds=()) -> None:
        match message:
            case Acquire(rid) | Charge(rid):
                self.asked.add(rid)
            case Release(gen, rid) if self.leases.get(gen) == rid:
                del self.leases[gen]
            case HeldMap(gen, lease):
                self.leases[gen] = lease
        self.channel.send(encode(message), fds)

    def receive(self):
        """The next message; its fds are in `self.fds`. None at end of file."""
        received = self.channel.receive()
        if received is None:
            return None
        data, self.fds = received
        for fd in self.fds:
            self.given.append((fd, os.fstat(fd)))
        message = decode(to_session_decoder, data)
        if isinstance(message, Grant | Fail):
            self.asked.discard(message.rid)
        if isinstance(message, Grant):
            self.leases[message.gen] = message.rid
        return message

    def give_back(self) -> None:
        """End its requests and leases, and what it still has of the fds it was given."""
        with contextlib.suppress(ConnectionLost):  # what it leased then is left, and found
            for rid in self.asked:
                self.send(Cancel(rid))
            leaving = True
            while leaving:
                for gen, rid in list(self.leases.items()):
                    self.send(Release(gen, rid))
                flush = Flush(self.next_rid())
                self.send(flush)
                while (message := self.receive()) not in (None, Flushed(flush.rid)):
                    pass  # among them grants, which are given back the next time round
                leaving = message is not None and bool(self.leases)
        for fd, stat in self.given:
            with contextlib.suppress(OSError):  # the test has closed it
                if os.path.samestat(os.fstat(fd), stat):
                    os.close(fd)

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
    """A coordinator for the length of a block. It must end with 0 and say nothing alarming.

    After a block that raised nothing, and after each test that passed, it is audited.
    """
    started = Coordinator(path, *arguments, **popen)
    Coordinator.audited.append(started)
    try:
        yield started
        started.audit_quiet()
    finally:
        Coordinator.audited.remove(started)
        Peer.close_all()
        code, stderr = started.stop()
    assert code == 0, stderr
    assert "Traceback" not in stderr, stderr


def _flush_workers(path: str) -> None:
    """Have this process's workers on `path`, if any, give back what they let go of."""
    from gpu_worker import registry

    client = registry._clients.get(os.path.abspath(path))
    if client is not None:
        # It may close meanwhile, with nothing mapped any more and all of it sent.
        with contextlib.suppress(CoordinatorLost, WorkerClosed):
            client.flush(WAIT_S)


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


def who_has(gen: str) -> list[int]:
    """The kernel's word: every process that has an fd or a map of this generation's segment."""
    name, found = f"memfd:weight-cache:{gen}", []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
            fds = fds_of(int(pid)).values()
        except OSError:
            continue  # it ended while we looked, or is somebody else's
        if name in maps or any(name in fd for fd in fds):
            found.append(int(pid))
    return found


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
