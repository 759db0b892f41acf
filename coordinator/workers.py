"""The workers of a group, each over all its lives: their environment, their output, their end.

Whether one is started again the supervisor decides.

    Note on the variables of torchrun
    fact: accelerate, transformers and others take LOCAL_RANK, RANK or WORLD_SIZE for the word that
    this process is one of a `torch.distributed` job
    consequence: set for workers that serve by themselves, those libraries would wait for peers, on
    a MASTER_ADDR that nobody listens on
    choice: only names of our own are set, and others are passed on as they are
    cost: a job that does want them says so: `sh -c 'RANK=$WEIGHT_CACHE_RANK exec ...'`
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from coordinator.loop import Loop
from coordinator.output import Outlet, Source
from coordinator.plan import Plan
from coordinator.process_host import Child, Leash
from coordinator.roster import Member
from shm_store.paths import SOCKET_VARIABLE

DEVICE_VARIABLE = "WEIGHT_CACHE_DEVICE"
RANK_VARIABLE = "WEIGHT_CACHE_RANK"
WORLD_SIZE_VARIABLE = "WEIGHT_CACHE_WORLD_SIZE"


@dataclass(slots=True)
class Worker:
    """One rank, over all its lives."""

    rank: int
    name: str
    member: Member
    child: Child | None = None
    sources: list[Source] = field(default_factory=list)
    due: bool = True
    """It is to be started as soon as there is a coordinator."""
    state: str = "restarting"
    """As `MemberReport` has it. "restarting" is also one that has not been started yet."""
    last_end: str = ""

    @property
    def pid(self) -> int | None:
        return None if self.child is None else self.child.process.pid


Ended = Callable[[Worker], None]
"""Called when the process of a worker has ended, before it is reaped."""


class Workers:
    """All of them."""

    def __init__(
        self, loop: Loop, plan: Plan, path: str, outlets: tuple[Outlet, Outlet], fds_limit: int
    ) -> None:
        """Nothing runs yet.

        Args:
            path: of the coordinator's socket.
            outlets: where standard output and standard error of the workers go.
            fds_limit: their soft limit of open files.
        """
        self._loop = loop
        self._plan = plan
        self._path = os.path.abspath(path)
        self._outlets = outlets
        self._fds_limit = fds_limit
        self.all = [
            Worker(rank, plan.name_of(rank), Member(plan.worker_rule))
            for rank in range(plan.workers)
        ]

    def running(self) -> list[Worker]:
        return [worker for worker in self.all if worker.child is not None]

    def over(self) -> bool:
        """None runs, and none is to run again."""
        return all(worker.child is None and worker.state != "restarting" for worker in self.all)

    def start(self, worker: Worker, ended: Ended) -> None:
        """Start its command.

        Raises:
            OSError: no process can be started; nothing has changed.
        """
        sources = [Source(self._loop, outlet, f"[{worker.name}] ") for outlet in self._outlets]
        stdout, stderr = sources
        try:
            child = Child(
                self._plan.command_of(worker.rank),
                stdin=subprocess.DEVNULL if os.isatty(0) else None,
                stdout=stdout.theirs,
                stderr=stderr.theirs,
                env=self._environment(worker.rank),
                own_group=True,
                leash=Leash(signal.SIGKILL, (), self._fds_limit),
            )
        except OSError:
            for source in sources:
                source.close()
            raise
        for source in sources:
            source.started()
        worker.child, worker.sources = child, sources
        worker.due, worker.state = False, "running"
        self._loop.when_readable(child.pidfd, partial(ended, worker))

    def _environment(self, rank: int) -> dict[str, str]:
        environment = {
            # Its output is a pipe now, on which Python would sit for 8 KiB.
            "PYTHONUNBUFFERED": "1",
            **os.environ,
            SOCKET_VARIABLE: self._path,
            RANK_VARIABLE: str(rank),
            WORLD_SIZE_VARIABLE: str(self._plan.workers),
        }
        if self._plan.devices:
            environment[DEVICE_VARIABLE] = self._plan.devices[rank % len(self._plan.devices)]
        return environment

    def reap(self, worker: Worker) -> tuple[OSError | None, int]:
        """Return why its command never ran, if that is so, and how it ended.

        What it has written is passed on; what it left in its process group is killed.
        """
        child, worker.child = worker.child, None
        assert child is not None
        self._loop.forget(child.pidfd)
        code = child.reap()
        for source in worker.sources:
            source.finish()
        return child.never_ran, code

    def send(self, number: int) -> None:
        """Send a signal to all that run, and what they started in their process groups."""
        for worker in self.running():
            assert worker.child is not None
            worker.child.send(number)
