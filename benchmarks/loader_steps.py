"""The steps of a fill one by one, with the benchmark in the coordinator's place."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass

from benchmarks.coordinator_process import ROOT
from coordinator import backing, loader
from shm_store import segment
from shm_store.channel import Channel, pair
from shm_store.keys import Fingerprint, GenerationId, Key
from shm_store.manifest import Preamble
from shm_store.source import fingerprint, open_source
from shm_store.wire import (
    Commit,
    Fetch,
    FromLoader,
    Reserve,
    Space,
    decode,
    encode,
    loader_decoder,
)

GEN = GenerationId("0000000000000001-00000001")
KEY = Key("benchmark/steps")
LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Steps:
    """Seconds of one fill.

    Attributes:
        started_s: from just before the loader's exec to its RESERVE.
        backed_s: of the backing child, from just before its exec to its end.
        filled_s: from SPACE to COMMIT.
        sealed_s: of the seal.
    """

    started_s: float
    backed_s: float
    filled_s: float
    sealed_s: float


def sample(path: str) -> Steps:
    """Fill a segment from a file, and let go of it."""
    ours, theirs = pair()
    ours.settimeout(LIMIT_S)
    source_fd, segment_fd = open_source(path), segment.create(GEN)
    asked = fingerprint([os.fstat(source_fd)])
    begun_s = time.perf_counter()
    process = subprocess.Popen(
        loader.command(theirs.fileno()), cwd=ROOT, pass_fds=(theirs.fileno(),)
    )
    theirs.close()
    channel = Channel(ours)
    try:
        channel.send(encode(Fetch(GEN, KEY, path, asked)), [source_fd])
        reserve = _heard(channel)
        assert isinstance(reserve, Reserve), reserve
        reserved_s = time.perf_counter()
        command = backing.command(segment_fd, reserve.size_bytes, True)
        subprocess.run(command, pass_fds=(segment_fd,), stdout=subprocess.DEVNULL, check=True)
        segment.fix_size(segment_fd)
        backed_s = time.perf_counter()
        channel.send(encode(Space(GEN)), [segment_fd])
        while not isinstance(said := _heard(channel), Commit):
            assert said is not None, "the loader has ended"
        filled_s = time.perf_counter()
        segment.seal(segment_fd, Preamble(GEN, KEY, Fingerprint(asked)))
        sealed_s = time.perf_counter()
    finally:
        channel.close()
        process.wait()
        os.close(source_fd)
        os.close(segment_fd)
    return Steps(
        started_s=reserved_s - begun_s,
        backed_s=backed_s - reserved_s,
        filled_s=filled_s - backed_s,
        sealed_s=sealed_s - filled_s,
    )


def _heard(channel: Channel) -> FromLoader | None:
    received = channel.receive()
    return None if received is None else decode(loader_decoder, received[0])
