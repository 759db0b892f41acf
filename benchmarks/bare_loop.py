"""The floor of `scale`: our coordinator's loop with nothing behind it.

    python -m benchmarks.bare_loop SOCKET FD

An asyncio reader per SEQPACKET connection. Every message is decoded; an ACQUIRE is answered with a
GRANT and one fd, anything else with nothing. No books, no checks, no process that is watched.
"""

from __future__ import annotations

import array
import asyncio
import socket
import subprocess
import sys
from functools import partial

import msgspec

from benchmarks.coordinator_process import ROOT
from shm_store.channel import FRAME_LIMIT_BYTES
from shm_store.keys import generation_id
from shm_store.wire import Acquire, Grant, Release, Resume

BURST = 16
"""Messages read from one connection before the others get their turn, as ours does."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Resume | Acquire | Release)
_gen = generation_id(1, 1)


def start(path: str, fd: int) -> subprocess.Popen[str]:
    """Start one that hands out `fd`; return when it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.bare_loop", path, str(fd)],
        cwd=ROOT,
        pass_fds=(fd,),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


async def main(path: str, fd: int) -> None:
    """Serve until the process is ended."""
    loop = asyncio.get_running_loop()
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    listening.bind(path)
    listening.listen()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]

    def accept() -> None:
        accepted, _ = listening.accept()
        accepted.setblocking(False)
        loop.add_reader(accepted.fileno(), partial(answer, accepted))

    def answer(accepted: socket.socket) -> None:
        try:
            for _ in range(BURST):
                frame = accepted.recv(FRAME_LIMIT_BYTES)
                if not frame:
                    loop.remove_reader(accepted.fileno())
                    accepted.close()
                    return
                message = _decoder.decode(frame[1:])
                if isinstance(message, Acquire):
                    grant = _encoder.encode(Grant(message.rid, _gen))
                    accepted.sendmsg([frame[:1] + grant], rights)
        except BlockingIOError:
            pass

    loop.add_reader(listening.fileno(), accept)
    print("ready", flush=True)
    await loop.create_future()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
