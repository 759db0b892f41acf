"""A process that does with a segment what it is told: lease, map, write, keep, fork.

    python -m tests.mapper SOCKET

One command per line of standard input, its words separated by blanks; one line answers each.
`Mapper` is the test's side.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shm_store.keys import GenerationId, LeaseId
from shm_store.wire import Acquire, Grant, Release
from tests.processes import ROOT, WAIT_S, Peer

PAGE_BYTES = mmap.PAGESIZE


class Mapper:
    """The test's side of one such process."""

    def __init__(self, path: str, before: Callable[[], None] | None = None) -> None:
        """Start it. `before` is called in it, before it is this program."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.mapper", path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            preexec_fn=before,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def do(self, *words: object) -> str:
        """Have one command carried out; return its answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(*words, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, f"it ended at {words}"
        return answer.strip()

    def end(self) -> None:
        """Have it exit, and wait for that. A child that it has forked goes on."""
        self.process.kill()
        self.process.wait(WAIT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def mapper(path: str, before: Callable[[], None] | None = None) -> Iterator[Mapper]:
    """One for the length of a block."""
    started = Mapper(path, before)
    try:
        yield started
    finally:
        started.end()


class _Commands:
    """What the process does when told."""

    def __init__(self, path: str) -> None:
        self.peer = Peer(path, "mapper")
        self.fd = -1
        self.gen = ""
        self.lease = 0
        self.address = self.size_bytes = 0

    def publish(self, key: str, size_bytes: str) -> None:
        """Build weights of that size and lease them."""
        self._granted(self.peer.publish(key, b"\1" * int(size_bytes)))

    def acquire(self, key: str) -> None:
        """Lease weights that are there."""
        self.peer.send(Acquire(self.peer.next_rid(), key, None, "", WAIT_S))
        self._granted(self.peer.expect(Grant))

    def _granted(self, grant: Grant) -> None:
        self.gen, self.lease = grant.gen, grant.rid
        (self.fd,) = self.peer.fds

    def reserve(self, key: str, size_bytes: str) -> None:
        """Have a ticket and a segment to fill, and keep both."""
        self.fd = self.peer.space(self.peer.ticket(key).gen, int(size_bytes))

    def punch(self) -> None:
        """Give the first page of a segment back."""
        libc = ctypes.CDLL(None, use_errno=True)
        keep_size_punch_hole = 0x01 | 0x02
        offset, length = ctypes.c_int64(0), ctypes.c_int64(PAGE_BYTES)
        assert libc.fallocate(self.fd, keep_size_punch_hole, offset, length) == 0

    def map(self) -> None:
        """Map it as workers do: privately, writable; Python's own mmap would keep an fd."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        self.size_bytes = os.fstat(self.fd).st_size
        size = ctypes.c_size_t(self.size_bytes)
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        self.address = libc.mmap(None, size, writable, mmap.MAP_PRIVATE, self.fd, ctypes.c_long(0))

    def close(self) -> None:
        """Close the fd."""
        os.close(self.fd)

    def read(self) -> None:
        """Touch every page."""
        sum(self._bytes()[::PAGE_BYTES])

    def write(self, first: str, count: str) -> None:
        """Change one byte in each of `count` pages."""
        for page in range(int(first), int(first) + int(count)):
            self._bytes()[page * PAGE_BYTES + 7] = 9

    def _bytes(self):
        return (ctypes.c_ubyte * self.size_bytes).from_address(self.address)

    def unmap(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.munmap(ctypes.c_void_p(self.address), ctypes.c_size_t(self.size_bytes))

    def release(self) -> None:
        self.peer.send(Release(GenerationId(self.gen), LeaseId(self.lease)))
        self.peer.flush()

    def fork(self) -> int:
        """Fork a child that has what this process has, and does nothing. Say its pid."""
        pid = os.fork()
        if pid == 0:
            os.close(1)
            signal.pause()
        return pid


def main(path: str) -> None:
    commands = _Commands(path)
    for line in sys.stdin:
        name, *words = line.split()
        print(getattr(commands, name)(*words), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
