"""What is done to a group, one thing at a time, and what each of them may cost.

A fault is drawn by a seed. It names its role and its place; how it comes out is up to the machine.
Only what a fault says that it may cost is forgiven: restarts of the processes that it killed, and
errors of the kinds that it names.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from coordinator.backing import SPARE_BYTES
from coordinator.operator import Operator
from shm_store.errors import CoordinatorLost
from tests.chaos import kernel, weights
from tests.chaos.failpoints import FAILPOINTS, Failpoint
from tests.chaos.hook import Armed, armed_path, claim_path
from tests.chaos.host import Host, kill
from tests.chaos.watch import LOOK_S, until

Signal = Literal["KILL", "STOP"]

REACH_S = 12.0
"""So long a failpoint is waited for: the load comes to most of them within a second."""
RANDOM_WITHIN_S = 0.4
"""Of the start of the load, a kill at a random instant comes."""
STOPPED_S = (0.1, 1.5)
END_S = 10.0
"""In which a process that got a SIGKILL has ended, and one that got a SIGSTOP stands."""
SHORT_S = 0.7
"""How long a limit is lowered."""

CGROUP_FULL = "the cgroup is full"

ENDS_GROUP = ("supervisor", "front", "everything")

LIMIT_THAT_FITS = 9 * weights.MIB + weights.MIB // 2
LIMIT_THAT_DOES_NOT = 2 * weights.MIB
CGROUP_SLACK_BYTES = SPARE_BYTES + weights.MIB
"""Backing children refuse all but the smallest, before the kernel has to kill: what they leave to
others is what workers and loaders need meanwhile."""


@dataclass(slots=True)
class Fault:
    """One fault, and what became of it.

    Attributes:
        place: the name of a failpoint, or other words.
        after_s: of the load, for what happens at no particular place.
        stopped_s: until what was stopped goes on.
        tolerated: the errors that workers may see by it.
        quiet: nothing else is to happen, so the ledger must come out as it was.
        reached: it was done.
    """

    number: int
    role: str
    place: str
    signal: Signal | Literal["", "TERM"]
    point: Failpoint | None = None
    after_s: float = 0.0
    nth: int = 1
    stopped_s: float = 0.0
    tolerated: frozenset[str] = frozenset()
    quiet: bool = False
    reached: bool = False
    victims: list[int] = field(default_factory=list)

    @property
    def kills(self) -> int:
        """How many processes got a SIGKILL, those among them that had to, to come to the place."""
        provoked = self.point is not None and self.point.provoked_by.startswith("kill")
        return provoked + (len(self.victims) if self.signal == "KILL" else 0)

    @property
    def ends_group(self) -> bool:
        return self.signal in ("KILL", "TERM") and self.role in ENDS_GROUP

    def __str__(self) -> str:
        what = f"{self.role}: {self.place}"
        return f"{what}, SIG{self.signal}" if self.signal else what


# --- drawing --------------------------------------------------------------------------------------

WEIGHTS = {
    "worker": 24,
    "loader": 24,
    "coordinator": 30,
    "coordinator, all paused": 6,
    "backing": 4,
    "supervisor": 4,
    "front": 1,
    "everything": 1,
    "stop": 8,
    "memory": 4,
    "log": 1,
}
"""How often each kind is drawn, in a hundred or so."""


class Lots:
    """Draws faults. Each kind goes through all of its places, in an order drawn anew each time."""

    def __init__(self, seed: str, cgroup: bool, only: str = "") -> None:
        self._lots = random.Random(seed)
        self._number = 0
        self._only = only
        self._kinds = {kind: weight for kind, weight in WEIGHTS.items() if self._wanted(kind)}
        self._cgroup = cgroup
        self._bags: dict[str, Iterator[Fault]] = {kind: iter(()) for kind in WEIGHTS}

    def _wanted(self, kind: str) -> bool:
        return not self._only or any(self._only in str(fault) for fault in self._bag(kind, True))

    def draw(self) -> Fault:
        """Return the next fault."""
        kinds = list(self._kinds)
        (kind,) = self._lots.choices(kinds, [self._kinds[kind] for kind in kinds])
        fault = next(self._bags[kind], None)
        if fault is None:
            bag = [one for one in self._bag(kind, self._cgroup) if self._only in str(one)]
            self._lots.shuffle(bag)
            self._bags[kind] = iter(bag)
            fault = next(self._bags[kind])
        self._number += 1
        fault.number = self._number
        fault.after_s = self._lots.uniform(0.0, RANDOM_WITHIN_S)
        fault.stopped_s = self._lots.uniform(*STOPPED_S)
        if fault.point is not None:
            fault.nth = self._lots.randint(1, fault.point.nth)
        return fault

    def versions(self) -> list[weights.Weights]:
        """Return what is to be replaced during this fault."""
        every = [*weights.SOURCES, *weights.BUILDS]
        return self._lots.sample(every, self._lots.choice((0, 0, 1, 1, 2)))

    def _bag(self, kind: str, cgroup: bool) -> list[Fault]:
        """Return every fault of a kind, once."""
        match kind:
            case "worker" | "loader" | "coordinator" | "supervisor":
                at = [_at(point, "KILL") for point in FAILPOINTS if point.role == kind]
                return [*at, *(_anywhen(kind, "KILL") for _ in range(1 + len(at) // 4))]
            case "coordinator, all paused":
                return [Fault(0, "coordinator", "all workers paused", "KILL", quiet=True)]
            case "backing":
                failed = frozenset({"BackingFailed"})
                return [Fault(0, "backing", "at any time", "KILL", tolerated=failed)]
            case "front":
                return [_anywhen("front", "KILL")]
            case "everything":
                return [_anywhen("everything", "KILL")]
            case "stop":
                roles = ("worker", "loader", "coordinator")
                at = [
                    _at(point, "STOP")
                    for point in FAILPOINTS
                    if point.role in roles and not point.provoked_by
                ]
                return [*at, *(_anywhen(role, "STOP") for role in (*roles, "supervisor"))]
            case "memory":
                full = [
                    Fault(
                        0,
                        "memory",
                        CGROUP_FULL,
                        "",
                        # Of the first loader or the next one the kernel may take both.
                        tolerated=frozenset({"BackingFailed", "FillFailed"}),
                    )
                ]
                return [
                    Fault(0, "memory", "a limit that all fits in, one by one", ""),
                    Fault(
                        0,
                        "memory",
                        "a limit too small for some",
                        "",
                        tolerated=frozenset({"BudgetExceeded"}),
                    ),
                    *(full if cgroup else []),
                ]
            case "log":
                return [Fault(0, "front", "an end in order, then a log on a full disk", "TERM")]
        raise AssertionError(kind)


def _at(point: Failpoint, number: Signal) -> Fault:
    return Fault(0, point.role, point.name, number, point)


def _anywhen(role: str, number: Signal) -> Fault:
    return Fault(0, role, "at any time", number)


# --- doing ----------------------------------------------------------------------------------------


class Hand:
    """Does faults to a host."""

    def __init__(self, host: Host, seed: str) -> None:
        self._host = host
        self._lots = random.Random(seed)

    def do(self, fault: Fault) -> None:
        """Do it while everybody works; then it is `reached`, or could not be."""
        if fault.role == "memory":
            self._short_of_memory(fault)
        elif fault.point is None:
            self._at_any_time(fault)
        else:
            self._at_failpoint(fault, fault.point)

    # --- at a failpoint ---------------------------------------------------------------------------

    def _at_failpoint(self, fault: Fault, point: Failpoint) -> None:
        host = self._host
        names = {member.pid: member.name for member in host.report().members}
        number = getattr(signal, f"SIG{fault.signal}")
        armed = Armed(fault.number, point.role, point.name, fault.nth, int(number))
        os.symlink(armed.text(), armed_path(host.folder))
        try:
            claim = claim_path(host.folder, fault.number)
            provoked = self._provoke(point)
            pid = self._await_claim(claim)
        finally:
            os.unlink(armed_path(host.folder))
        if not pid:
            return
        fault.reached = True
        if pid == provoked:
            return  # it came there by itself, just before it was killed to have the next one come
        fault.victims = [pid]
        if fault.signal == "STOP":
            self._go_on(fault, pid)
        elif point.role == "worker":
            host.restarts[names[pid]] += 1
        elif point.role == "coordinator":
            host.restarts["coordinator"] += 1

    def _provoke(self, point: Failpoint) -> int:
        """Have somebody come to a place; return who was killed for that, or 0."""
        match point.provoked_by:
            case "kill coordinator":
                return self._kill_member("coordinator")
            case "kill worker":
                return self._kill_member(f"worker {self._lots.randrange(self._host.workers)}")
            case "operate":
                self._operate()
        return 0

    def _operate(self) -> None:
        """Have something to be remembered. The coordinator may end of it."""
        try:
            with Operator.connect(self._host.socket, "chaos") as operator:
                operator.pin(weights.STEADY.key)
                operator.unpin(weights.STEADY.key)
                operator.pin(weights.STEADY.key)
        except CoordinatorLost:
            pass

    def _kill_member(self, name: str) -> int:
        pid = self._host.pid_of(name)
        self._host.restarts[name] += 1
        kill(pid, signal.SIGKILL)
        return pid

    def _await_claim(self, claim: str) -> int:
        """Return who came to the armed place; 0 if nobody did in time, and then nobody will."""
        until_s = time.monotonic() + REACH_S
        while not os.path.lexists(claim):
            if time.monotonic() > until_s or self._host.process_ended():
                try:
                    os.symlink("0", claim)
                except FileExistsError:
                    break  # just now
                return 0
            threading.Event().wait(LOOK_S)
        return int(os.readlink(claim))

    def _go_on(self, fault: Fault, pid: int) -> None:
        """Let a process that was stopped go on after a while: silence is not death."""
        until(lambda: kernel.state(pid) in ("T", ""), END_S, lambda: f"pid {pid} is not stopped")
        threading.Event().wait(fault.stopped_s)
        kill(pid, signal.SIGCONT)

    # --- at any time ------------------------------------------------------------------------------

    def _at_any_time(self, fault: Fault) -> None:
        host = self._host
        number = getattr(signal, f"SIG{fault.signal}")
        threading.Event().wait(fault.after_s)
        if fault.role == "everything":
            fault.victims = kernel.processes(host.folder)
            self._lots.shuffle(fault.victims)
            for pid in fault.victims:
                kill(pid, number)
            fault.reached = True
            return
        pid = self._find(fault.role)
        if not pid:
            return
        fault.reached, fault.victims = True, [pid]
        if fault.signal == "KILL" and fault.role in ("worker", "coordinator"):
            host.restarts[host.name_of(pid)] += 1
        kill(pid, number)
        if fault.signal == "STOP":
            self._go_on(fault, pid)

    def _find(self, role: str) -> int:
        host = self._host
        match role:
            case "front":
                return host.front
            case "supervisor":
                return host.supervisor
            case "coordinator":
                return host.pid_of("coordinator")
            case "worker":
                return host.pid_of(f"worker {self._lots.randrange(host.workers)}")
        coordinator = host.pid_of("coordinator")
        word = {"loader": "coordinator.loader", "backing": "backing.py"}[role]
        until_s = time.monotonic() + REACH_S
        while time.monotonic() < until_s:
            if found := kernel.children(coordinator, word):
                return found[0]
        return 0

    # --- memory -----------------------------------------------------------------------------------

    def _short_of_memory(self, fault: Fault) -> None:
        match fault.place:
            case place if place == CGROUP_FULL:
                self._fill_cgroup()
            case "a limit too small for some":
                self._lower(LIMIT_THAT_DOES_NOT)
            case _:
                self._lower(LIMIT_THAT_FITS)
        fault.reached = True

    def _lower(self, limit_bytes: int) -> None:
        self._limit(limit_bytes)
        threading.Event().wait(SHORT_S)
        self._limit(weights.BUDGET_BYTES)

    def _limit(self, limit_bytes: int) -> None:
        with Operator.connect(self._host.socket, "chaos") as operator:
            operator.limit("ram", limit_bytes)

    def _fill_cgroup(self) -> None:
        cgroup = self._host.cgroup
        assert cgroup is not None
        limit = os.path.join(cgroup, "memory.limit_in_bytes")
        with open(os.path.join(cgroup, "memory.stat")) as stat:
            figures = dict(line.split() for line in stat)
        with open(os.path.join(cgroup, "memory.usage_in_bytes")) as usage:
            used_bytes = int(usage.read())
        file_bytes = int(figures["total_active_file"]) + int(figures["total_inactive_file"])
        _write(limit, str(used_bytes - file_bytes + CGROUP_SLACK_BYTES))
        try:
            threading.Event().wait(SHORT_S)
        finally:
            _write(limit, "-1")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
