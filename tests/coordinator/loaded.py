"""A loader driven to its end, with some of its ways changed, and what came of it."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shm_store import layout, segment
from shm_store.channel import Channel, close_all, pair
from shm_store.keys import GenerationId, Key
from shm_store.manifest import Manifest, decode_manifest
from shm_store.reading import AS_IT_IS, Reading
from shm_store.source import fingerprint, open_source
from shm_store.wire import Fetch, Message, Reserve, Space, decode, encode, loader_decoder
from tests.processes import ROOT, WAIT_S

GEN = GenerationId("0000000000000001-00000001")

PROGRAM = """
import sys
from coordinator import casting, loader, pickles, private_memory
{changed}
code = loader.main(sys.argv)
{after}
sys.exit(code)
"""


def bits(state: Mapping[str, torch.Tensor]) -> dict[str, tuple]:
    """What tensors are, to be compared: NaNs too, and dtypes that torch cannot compare."""
    return {
        name: (
            tensor.dtype,
            tuple(tensor.shape),
            bytes(tensor.detach().contiguous().flatten().view(torch.uint8).numpy()),
        )
        for name, tensor in state.items()
    }


@dataclass
class Driven:
    """What a loader has said and done."""

    said: list[Message]
    code: int
    stdout: str
    stderr: str
    segment_fd: int
    gen: GenerationId = GEN

    @property
    def last(self) -> Message:
        return self.said[-1]

    @property
    def manifest(self) -> Manifest:
        return decode_manifest(os.pread(self.segment_fd, self._length, layout.PREAMBLE_BYTES + 8))

    @property
    def data_start(self) -> int:
        return layout.data_start(self._length)

    @property
    def _length(self) -> int:
        (length,) = struct.unpack("<Q", os.pread(self.segment_fd, 8, layout.PREAMBLE_BYTES))
        return length

    def __del__(self) -> None:
        if self.segment_fd >= 0:
            os.close(self.segment_fd)


def drive(
    path: Path,
    reading: Reading = AS_IT_IS,
    changed: str = "",
    *,
    after: str = "",
    before_space: Callable[[], object] = lambda: None,
    give_space: bool = True,
    files: Sequence[str] = (),
) -> Driven:
    """Have a loader read `path`, with the lines `changed` before it begins and `after` at its end.

    Args:
        files: of an index, the names of it and its shards.
    """
    ours, theirs = pair()
    ours.settimeout(WAIT_S)
    program = PROGRAM.format(changed=changed, after=after)
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(theirs.fileno())],
        pass_fds=(theirs.fileno(),),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    theirs.close()
    channel = Channel(ours)
    names = files or (str(path),)
    fds = [open_source(path.parent / name) for name in names]
    segment_fd = -1
    said: list[Message] = []
    try:
        asked = fingerprint([os.fstat(fd) for fd in fds], names, reading)
        channel.send(encode(Fetch(GEN, Key("k"), str(path), asked, tuple(files), reading)), fds)
        while received := channel.receive():
            said.append(decode(loader_decoder, received[0]))
            if isinstance(said[-1], Reserve):
                before_space()
                if not give_space:
                    channel.socket.shutdown(1)
                    continue
                segment_fd = segment.create(GEN)
                os.posix_fallocate(segment_fd, 0, said[-1].size_bytes)
                channel.send(encode(Space(GEN)), [segment_fd])
        stdout, stderr = process.communicate(timeout=WAIT_S)
        return Driven(said, process.returncode, stdout, stderr, segment_fd)
    finally:
        process.kill()
        process.communicate()
        channel.close()
        close_all(fds)
