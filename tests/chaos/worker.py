"""A worker under chaos: loads, uses, keeps, edits and lets go, and holds every result to the bit.

Run by the group, with the run's folder in its environment. It says `up` on the control socket of
the run, works from `go SEED` to `pause`, and says `paused` when all that it let go of has taken
effect. What it was not to see goes into `faults.jsonl` of the folder; it works on.

Beside that one thread infers all the time, with a module that it has locked from first to last.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import random
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch

import gpu_worker
from gpu_worker import Worker
from shm_store.errors import CoordinatorLost
from tests.chaos import weights
from tests.chaos.hook import FOLDER_VARIABLE
from tests.chaos.weights import (
    BUILDS,
    DEVICE,
    DEVICE_BYTES,
    KEPT,
    PRIVATE,
    PRIVATE_VARIABLE,
    SOURCES,
    STEADY,
    Net,
    Weights,
)

CONTROL = "control.sock"
GO_ALONE = "go-alone"
"""As `go`, and nobody is to fork, or to bring anything to the device: its memory is the host's."""
FAULTS = "faults.jsonl"

PATIENCE_S = 60.0
TIMEOUT_S = 90.0
"""Longer than any fault lasts: nobody may run out of time."""
INVALIDATE_S = 60.0
PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>. Nobody else ends a child whose parent is killed."""
ATTACH_S = 60.0
PACE_S = 0.004
"""Between two inferences of the steady thread, which is not to take a processor for itself."""


class Wrong(Exception):
    """A result is not what it must be."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A state dict that is kept for a while."""

    weights: Weights
    state: dict[str, torch.Tensor]


class Working:
    """Everything that one worker does."""

    def __init__(self, folder: str, worker: Worker) -> None:
        self._folder = folder
        self._worker = worker
        self._lots = random.Random()
        self._alone = False
        self._kept: list[Kept] = []
        self.did = 0
        self.inferred = 0
        self.longest_pause_s = 0.0
        """Between two inferences of the steady thread."""
        self._does: list[tuple[int, str, Callable[[], None]]] = [
            (5, "use", self._use),
            (4, "state_dict", self._state_dict),
            (3, "build", self._build),
            (1, "private", self._private),
            (1, "edit", self._edit),
            (1, "prefetch", self._prefetch),
            (3, "evict", self._evict),
            (1, "invalidate", self._invalidate),
            (1, "fork", self._fork),
            (1, "offload", self._offload),
            (1, "reserve", self._reserve),
        ]

    def begin(self, seed: str, *, alone: bool) -> None:
        """Draw by these lots from now on."""
        self._lots.seed(seed)
        self._alone = alone

    def do_one(self) -> None:
        """Do something, by lot. What goes wrong is reported."""
        (_, name, do), *_ = self._lots.choices(self._does, [weight for weight, *_ in self._does])
        try:
            do()
        except Exception as error:
            self.report(name, error)
        self.did += 1
        print(f"did {self.did}: {name}", file=self._lots.choice((sys.stdout, sys.stderr)))

    def settle(self) -> None:
        """Have all that was let go of take effect. Prefetches get room that is leased to nobody."""
        for one in SOURCES[KEPT + 1 :]:
            self._worker.evict(one.key)
        gc.collect()
        self._worker.flush(TIMEOUT_S)

    def report(self, doing: str, error: BaseException) -> None:
        self._write(self._told(doing, error))

    def _told(self, doing: str, error: BaseException) -> str:
        """Return all of an error in one line. Of the error that is being handled."""
        line = json.dumps(
            {
                "at_s": time.monotonic(),
                "pid": os.getpid(),
                "rank": os.environ.get("WEIGHT_CACHE_RANK"),
                "doing": doing,
                "error": type(error).__name__,
                "text": str(error),
                "traceback": traceback.format_exc(),
            }
        )
        return f"{line}\n"

    def _write(self, line: str) -> None:
        path = os.path.join(self._folder, FAULTS)
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(fd, line.encode())
        os.close(fd)

    # --- what it does -----------------------------------------------------------------------------

    def _source(self) -> Weights:
        return self._lots.choice(SOURCES)

    def _use(self) -> None:
        """A module, new or at hand. One at hand may be of an earlier version."""
        if self._alone:
            return self._state_dict()
        one = self._source()
        path = weights.source_path(self._folder, one)
        make = functools.partial(Net, one.width)
        with self._worker.use(one.key, skeleton=make, source=path, timeout=TIMEOUT_S) as module:
            said, version = module(weights.given(one)), int(module.version)
        newest = weights.source_version(self._folder, one)
        if not 1 <= version <= newest:
            raise Wrong(f"{one.key} is of version {version}, the file of {newest}")
        _same(one, version, "answer", said, weights.answer(one, version))

    def _state_dict(self) -> None:
        """A state dict, which is of the file as it is. Small ones may be kept for a while."""
        one = self._source()
        oldest = weights.source_version(self._folder, one)
        state = self._ask(one)
        newest = weights.source_version(self._folder, one)
        version = int(state["version"])
        if not oldest <= version <= newest:
            raise Wrong(f"{one.key} is of version {version}, its file {oldest} to {newest}")
        _all_same(one, version, state)
        if one in SOURCES[:KEPT]:
            self._kept.append(Kept(one, state))
        while len(self._kept) > 2 or (self._kept and self._lots.random() < 0.5):
            self._kept.pop(0)

    def _edit(self) -> None:
        """A change in place, which nobody else may ever see, and then back: it is all exact."""
        one = SOURCES[self._lots.randrange(KEPT)]
        state = self._ask(one)
        edited, version = state["first.weight"].add_(1.0), int(state["version"])
        wanted = weights.expected(one, version)["first.weight"] + 1.0
        try:
            _same(one, version, "what was edited", edited, wanted)
        finally:
            edited.sub_(1.0)

    def _ask(self, one: Weights) -> dict[str, torch.Tensor]:
        path = weights.source_path(self._folder, one)
        return self._worker.state_dict(one.key, source=path, timeout=TIMEOUT_S)

    def _build(self) -> None:
        one = self._lots.choice(BUILDS)
        wanted = weights.build_version(self._folder, one)
        make = functools.partial(weights.expected, one, wanted)
        state = self._worker.state_dict(one.key, build=make, version=str(wanted), timeout=TIMEOUT_S)
        _all_same(one, wanted, state)

    def _private(self) -> None:
        if self._alone:
            return

        def make() -> Net:
            made = Net(PRIVATE.width)
            made.load_state_dict(weights.expected(PRIVATE, 1))
            return made

        skeleton = functools.partial(Net, PRIVATE.width)
        with self._worker.use(
            PRIVATE.key, skeleton=skeleton, build=make, private=True, timeout=TIMEOUT_S
        ) as module:
            said = module(weights.given(PRIVATE))
        _same(PRIVATE, 1, "answer", said, weights.answer(PRIVATE, 1))
        self._worker.evict(PRIVATE.key)

    def _prefetch(self) -> None:
        one = self._source()
        self._worker.prefetch(one.key, source=weights.source_path(self._folder, one))

    def _evict(self) -> None:
        self._worker.evict(self._source().key)

    def _offload(self) -> None:
        self._worker.offload_all(keep=[self._source().key])

    def _reserve(self) -> None:
        """Room on the device, for a moment."""
        # Without a load inside: who keeps room there, and waits for some of the host, may wait for
        # somebody who has that and waits for room there.
        self._worker.reserve(self._lots.randint(1, DEVICE_BYTES // 3), TIMEOUT_S).close()

    def _invalidate(self) -> None:
        self._worker.invalidate(self._lots.choice(SOURCES + BUILDS).key, INVALIDATE_S)

    def _fork(self) -> None:
        """A child, which has all that this has, asks for more, and says what it must not see.

        To its parent: whoever is killed with the group has nothing to report.
        """
        if self._alone:
            return
        mine = os.getpid()
        hearing, saying = os.pipe()
        child = os.fork()
        if child:
            os.close(saying)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            with open(hearing) as heard:
                said = heard.read()
            if said:
                self._write(said)
            elif code:
                raise Wrong(f"a forked child ended with {code}")
            return
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != mine:
                os._exit(0)
            for kept in self._kept:
                _all_same(kept.weights, int(kept.state["version"]), kept.state)
            self._kept.clear()
            self._state_dict()
            self._use()
            self._worker.flush(TIMEOUT_S)
        except BaseException as error:
            os.write(saying, self._told("in a forked child", error).encode())
        os._exit(0)

    # --- what goes on all the time ----------------------------------------------------------------

    def infer_steadily(self) -> None:
        """Begin to, in a thread of its own."""
        path = weights.source_path(self._folder, STEADY)
        make = functools.partial(Net, STEADY.width)
        handle = self._worker.load(STEADY.key, skeleton=make, source=path, timeout=TIMEOUT_S)
        module = handle.__enter__()
        threading.Thread(target=self._go_on, args=(module,), daemon=True).start()

    def _go_on(self, module: torch.nn.Module) -> None:
        asked, wanted, pause = weights.given(STEADY), weights.answer(STEADY, 1), threading.Event()
        before_s = time.monotonic()
        while True:
            try:
                _same(STEADY, 1, "answer", module(asked), wanted)
            except Exception as error:
                self.report("infer", error)
                return
            self.inferred += 1
            pause.wait(PACE_S)
            now_s = time.monotonic()
            self.longest_pause_s = max(self.longest_pause_s, now_s - before_s)
            before_s = now_s


def _same(one: Weights, version: int, what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    if not torch.equal(found, wanted):
        raise Wrong(f"{what} of {one.key} in version {version} differs")


def _all_same(one: Weights, version: int, state: dict[str, torch.Tensor]) -> None:
    wanted = weights.expected(one, version)
    if state.keys() != wanted.keys():
        raise Wrong(f"{one.key} has {sorted(state)}")
    for name, tensor in wanted.items():
        _same(one, version, name, state[name], tensor)


def attach() -> Worker:
    """Attach, also if the coordinator that was there a moment ago is just started again."""
    until_s = time.monotonic() + ATTACH_S
    while True:
        try:
            return gpu_worker.attach(
                device=DEVICE,
                vram_budget=DEVICE_BYTES,
                share_vram=not os.environ[PRIVATE_VARIABLE],
                patience=PATIENCE_S,
            )
        except CoordinatorLost:
            if time.monotonic() > until_s:
                raise
            threading.Event().wait(0.02)


def main(folder: str) -> int:
    torch.set_num_threads(1)
    rank = int(os.environ["WEIGHT_CACHE_RANK"])
    control = socket.socket(socket.AF_UNIX)
    control.connect(os.path.join(folder, CONTROL))
    heard = control.makefile("r")

    def say(word: str, **facts: object) -> None:
        control.sendall((json.dumps({"said": word, "rank": rank, **facts}) + "\n").encode())

    working = Working(folder, attach())
    working.infer_steadily()
    say("up", pid=os.getpid())
    paused = True
    while True:
        if paused or select.select([control], [], [], 0)[0]:
            line = heard.readline()
            if not line:
                return 0  # whoever runs chaos has gone
            word, _, seed = line.strip().partition(" ")
            paused = word == "pause"
            if not paused:
                working.begin(seed, alone=word == GO_ALONE)
            else:
                working.settle()
                facts = (working.did, working.inferred, working.longest_pause_s)
                say("paused", facts=facts)
        if not paused:
            working.do_one()


if __name__ == "__main__":
    sys.exit(main(os.environ[FOLDER_VARIABLE]))
