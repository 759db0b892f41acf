"""A process that serves answers of one model until it is killed.

    python -m benchmarks.answering PLAN

Says when it had its imports and its first answer, and what it had moved to its device for that;
then answers without a pause, and says a byte before each answer. With `idle` it only keeps the
model locked instead.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from benchmarks.coordinator_process import ROOT

if TYPE_CHECKING:
    import torch

    from benchmarks.models import ModelPlan

Way = Literal["shared", "mapped", "copied"]
"""How it has its weights: from the coordinator, on a device, shared; by `load_file`, as that maps
the file; or so, and copied, as `.to(device)` does."""

COMPUTES = b"."
READ_BYTES = 1 << 16
FLUSH_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to serve, and from where. The socket, key and device are of the shared way.

    Attributes:
        idle: keep the model locked, and say no more after the first answer.
    """

    model: ModelPlan
    way: Way
    socket: str = ""
    key: str = ""
    device: str = ""
    idle: bool = False


@dataclass(frozen=True, slots=True)
class Started:
    """What the process says of its start. Times are of the monotonic clock, the same for all.

    Attributes:
        python_s: the first line of its program ran.
        imported_s: it had all that it imports.
        loaded_s: it had the module.
        ready_s: the module was locked, on its device.
        answered_s: it had its first answer.
        answer: that.
        moved_bytes: what the worker has counted as moved to the device, as STATUS says it.
        own_bytes: of that, what the module makes beside its weights: no other process has that.
    """

    python_s: float
    imported_s: float
    loaded_s: float
    ready_s: float
    answered_s: float
    answer: list[float]
    moved_bytes: int
    own_bytes: int


class Answering:
    """Such a process, as others see it; a context manager that kills it.

    Attributes:
        exec_s: when it was started, by the same clock.
        started: what it said.
    """

    def __init__(self, plan: Plan) -> None:
        """Start it, and wait for its first answer.

        Raises:
            RuntimeError: it ended before that.
        """
        self.exec_s = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.answering", json.dumps(asdict(plan))],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        try:
            self.started = Started(**json.loads(self._line()))
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill_while_it_computes(self) -> None:
        """SIGKILL it between a question and its answer."""
        stream = self._process.stdout
        assert stream is not None
        while select.select([stream], [], [], 0)[0]:  # what it has said before now
            self._read()
        while self._read() != COMPUTES:
            pass
        self.kill()
        if self._process.returncode != -signal.SIGKILL:
            raise RuntimeError(f"process {self.pid} had ended: {self._process.returncode}")

    def kill(self) -> None:
        """SIGKILL it, and wait for its end. May be called again."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def _read(self) -> bytes:
        assert self._process.stdout is not None
        said: bytes = os.read(self._process.stdout.fileno(), READ_BYTES)
        if not said:
            raise RuntimeError(f"process {self.pid} has ended: {self._process.wait()}")
        return said

    def _line(self) -> bytes:
        said = b""
        while b"\n" not in said:
            said += self._read()
        return said.partition(b"\n")[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()


# --- the process itself -------------------------------------------------------------------------


def main(words: dict[str, Any], python_s: float) -> None:
    """Serve until this process is killed, or nobody listens any more."""
    import torch

    from benchmarks.models import ModelPlan

    plan = Plan(**{**words, "model": ModelPlan(**words["model"])})
    torch.set_num_threads(1)
    plan.model.prepare()
    with contextlib.ExitStack() as stack:
        if plan.way == "shared":
            _serve_shared(plan, python_s, stack)
        else:
            _serve_plain(plan, python_s)


def _serve_shared(plan: Plan, python_s: float, stack: contextlib.ExitStack) -> None:
    import gpu_worker
    import gpu_worker.module
    import gpu_worker.placement  # what a first lock imports

    imported_s = time.monotonic()
    worker = gpu_worker.attach(plan.socket, device=plan.device, share_vram=True, name="benchmark")
    handle = worker.load(plan.key, skeleton=plan.model.skeleton, source=plan.model.file)
    loaded_s = time.monotonic()
    module = stack.enter_context(handle)

    def moved_bytes() -> int:
        from coordinator.operator import Operator

        worker.flush(FLUSH_LIMIT_S)
        with Operator.connect(plan.socket, "benchmark") as operator:
            (session,) = [one for one in operator.status().sessions if one.pid == os.getpid()]
        return sum(model.moved_bytes for model in session.models)

    _answer(plan, module, (python_s, imported_s, loaded_s, time.monotonic()), moved_bytes)


def _serve_plain(plan: Plan, python_s: float) -> None:
    from accelerate import init_empty_weights
    from safetensors.torch import load_file

    imported_s = time.monotonic()
    moved_bytes = 0
    with init_empty_weights():
        module = plan.model.skeleton()
    module.load_state_dict(load_file(plan.model.file), strict=False, assign=True)
    module.eval()
    loaded_s = time.monotonic()
    if plan.way == "copied":
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
            moved_bytes += parameter.nbytes
    times = python_s, imported_s, loaded_s, time.monotonic()
    _answer(plan, module, times, lambda: moved_bytes)


def _answer(
    plan: Plan,
    module: torch.nn.Module,
    times: tuple[float, float, float, float],
    moved_bytes: Callable[[], int],
) -> None:
    answer = plan.model.answer(module)
    answered_s = time.monotonic()
    saved = module.state_dict()
    own_bytes = sum(one.nbytes for name, one in module.named_buffers() if name not in saved)
    started = Started(*times, answered_s, answer, moved_bytes(), own_bytes)
    print(json.dumps(asdict(started)), flush=True)
    if plan.idle:
        sys.stdin.read()
        return
    while True:  # until nobody has the other end of the pipe any more, if it is not killed
        os.write(sys.stdout.fileno(), COMPUTES)
        plan.model.answer(module)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), time.monotonic())
