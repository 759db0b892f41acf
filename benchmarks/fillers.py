"""Who brings the bytes of a file into memory: the peers of `fill`, each in a process of its own.

    python -m benchmarks.fillers NAME PLACES

Imports and whatever any program would have started already come first, and `ready` is said. Each
line on standard input then means one sample, in a forked child: with the imports done, and none of
the memory that an earlier sample has left. It is answered by the seconds, or by why there are none.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from benchmarks import reading
from benchmarks.coordinator_process import ROOT
from benchmarks.rows import Unavailable

if TYPE_CHECKING:  # torch is for those who need it: a reader starts at once
    from benchmarks.checkpoint import Tensors

LOAD_FILE = "safetensors load_file, first read"
LOAD_FILE_PREAD = 'safetensors load_file(backend="pread")'
RUNAI = "runai-model-streamer"
FASTSAFETENSORS = "fastsafetensors (nogds)"
TENSORIZER = "tensorizer"
RAY_PUT = "load_file + ray put"
TORCH_LOAD = "torch.load"
TORCH_LOAD_MAPPED = "torch.load(mmap=True), first read"
PEERS = (
    *(LOAD_FILE, LOAD_FILE_PREAD, RUNAI, FASTSAFETENSORS, TENSORIZER),
    *(RAY_PUT, TORCH_LOAD, TORCH_LOAD_MAPPED),
)
READS = "reads"
"""No peer: the reference of a cold file. `READS 4 direct there` is four threads, O_DIRECT, into
memory that is there; `made` counts making it."""


@dataclass(frozen=True)
class Places:
    """The same tensors in each one's format."""

    safetensors: str
    pickled: str = ""
    tensorized: str = ""
    ray_folder: str = ""

    def of(self, name: str) -> str:
        """Return the file that a contender reads."""
        if name in (TORCH_LOAD, TORCH_LOAD_MAPPED):
            return self.pickled
        return self.tensorized if name == TENSORIZER else self.safetensors


def write_places(tensors: Tensors, safetensors: Path, names: list[str]) -> Places:
    """Write what the contenders of these names read, beside a `.safetensors` file that is there."""
    pickled, tensorized = safetensors.with_suffix(".pt"), safetensors.with_suffix(".tensors")
    from benchmarks.checkpoint import write_pickled

    if TORCH_LOAD in names or TORCH_LOAD_MAPPED in names:
        write_pickled(tensors, pickled)
    if TENSORIZER in names:
        with contextlib.suppress(ImportError):  # its process says so
            from tensorizer import TensorSerializer

            serializer = TensorSerializer(str(tensorized))
            serializer.write_state_dict(tensors)
            serializer.close()
    return Places(str(safetensors), str(pickled), str(tensorized), str(safetensors.parent / "ray"))


class Filler:
    """The process of one of them; a context manager that ends it."""

    def __init__(self, name: str, places: Places) -> None:
        """Start it and wait until it is ready.

        Raises:
            Unavailable: it cannot run here.
        """
        self.file = places.of(name)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fillers", name, json.dumps(asdict(places))],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        said = self._hear()
        if said != "ready":
            self._process.communicate()
            raise Unavailable(said)

    def sample(self) -> float:
        """Return the seconds until the bytes are in memory.

        Raises:
            Unavailable: it failed.
        """
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        said = self._hear()
        try:
            return float(said)
        except ValueError:
            raise Unavailable(said) from None

    def close(self) -> None:
        """Have it end, and wait for that. Closing twice changes nothing."""
        if self._process.returncode is None:
            self._process.communicate()

    def _hear(self) -> str:
        """Return what it says. Libraries print too: only what is marked is for us."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            mark, _, said = line.rstrip("\n").partition(_MARK)
            if said and not mark:
                return said
        return f"its process ended with code {self._process.wait()}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


# --- in that process ----------------------------------------------------------------------------

_MARK = "fillers: "


def main(name: str, places: Places) -> None:
    """Take samples until standard input ends."""
    try:
        sample = _sample(name, places)
    except Exception as error:  # whatever keeps it from running here is what the row says
        _say(_described(error))
        return
    _say("ready")
    for _ in sys.stdin:
        # Ray has threads, which no forked child has.
        _say(_outcome(sample) if name == RAY_PUT else _forked(sample))


def _say(text: str) -> None:
    print(f"{_MARK}{text}", flush=True)


def _outcome(sample: Callable[[], float]) -> str:
    try:
        return str(sample())
    except Exception as error:
        return _described(error)


def _forked(sample: Callable[[], float]) -> str:
    """Take it in a child, and return its outcome when all its memory is free again."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(sending, _outcome(sample).encode())
        os._exit(0)
    os.close(sending)
    with open(receiving, encoding="utf-8") as outcome:
        said = outcome.read()
    _, status = os.waitpid(child, 0)
    return said or f"ended with code {os.waitstatus_to_exitcode(status)}"


def _described(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def _sample(name: str, places: Places) -> Callable[[], float]:
    """Import what it needs, and return what takes one sample."""
    if name.startswith(READS):
        _, threads, way, memory = name.split()
        read = (int(threads), way == "direct", memory == "made")
        return lambda: reading.timed_read(places.safetensors, *read)
    import torch

    torch.set_num_threads(1)
    fill = _FILLS[name](places)

    def timed() -> float:
        started_s = time.perf_counter()
        # Closing, and letting go of the memory, is not counted.
        with contextlib.closing(fill()) as filled:
            next(filled)
            return time.perf_counter() - started_s

    return timed


Filling = Generator[None, None, None]
"""Yields once, with the bytes in memory."""
Fill = Callable[[], Filling]


def _load_file(places: Places, backend: str = "mmap") -> Fill:
    from safetensors.torch import load_file

    from benchmarks.checkpoint import read_every_page

    def fill() -> Filling:
        if backend == "mmap":
            tensors = load_file(places.safetensors)
            read_every_page(tensors)
        else:
            tensors = load_file(places.safetensors, backend=backend)
        yield
        del tensors

    return fill


def _runai(places: Places) -> Fill:
    from runai_model_streamer import SafetensorsStreamer

    def fill() -> Filling:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(places.safetensors)
            tensors = dict(streamer.get_tensors())
            yield
            del tensors

    return fill


def _fastsafetensors(places: Places) -> Fill:
    from fastsafetensors import SafeTensorsFileLoader

    def fill() -> Filling:
        loader = SafeTensorsFileLoader(None, "cpu", nogds=True)
        loader.add_filenames({0: [places.safetensors]})
        buffers = loader.copy_files_to_device()
        tensors = {name: buffers.get_tensor(name) for name in loader.get_keys()}
        yield
        del tensors

    return fill


def _tensorizer(places: Places) -> Fill:
    from tensorizer import TensorDeserializer

    def fill() -> Filling:
        with TensorDeserializer(places.tensorized, device="cpu") as tensors:
            yield
            del tensors

    return fill


def _torch_load(places: Places, mapped: bool) -> Fill:
    import torch

    from benchmarks.checkpoint import read_every_page

    def fill() -> Filling:
        tensors = torch.load(places.pickled, mmap=mapped, weights_only=True)
        if mapped:
            read_every_page(tensors)
        yield
        del tensors

    return fill


def _ray_put(places: Places) -> Fill:
    import ray
    from safetensors.torch import load_file

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    size_bytes = os.stat(places.safetensors).st_size
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=size_bytes + size_bytes // 4 + (128 << 20),
        logging_level=logging.ERROR,
        log_to_driver=False,
        _temp_dir=places.ray_folder,
    )

    def fill() -> Filling:
        tensors = load_file(places.safetensors)
        reference = ray.put({name: tensor.numpy() for name, tensor in tensors.items()})
        yield
        del reference, tensors

    return fill


_FILLS: dict[str, Callable[[Places], Fill]] = {
    LOAD_FILE: _load_file,
    LOAD_FILE_PREAD: lambda places: _load_file(places, "pread"),
    RUNAI: _runai,
    FASTSAFETENSORS: _fastsafetensors,
    TENSORIZER: _tensorizer,
    RAY_PUT: _ray_put,
    TORCH_LOAD: lambda places: _torch_load(places, mapped=False),
    TORCH_LOAD_MAPPED: lambda places: _torch_load(places, mapped=True),
}


if __name__ == "__main__":
    main(sys.argv[1], Places(**json.loads(sys.argv[2])))
