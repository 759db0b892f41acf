"""One run: a fault, the checks, the next fault, until the time is up or something is wrong."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from coordinator.operator import Operator
from shm_store.errors import WeightCacheError
from tests.chaos import failpoints, kernel, weights
from tests.chaos.cgroup import memory_cgroup
from tests.chaos.checks import Checks, shown
from tests.chaos.faults import CGROUP_FULL, Fault, Hand, Lots
from tests.chaos.host import Host, kill
from tests.chaos.watch import Violation

LOG_LINES = 40
TRIES = 3


def chaos(limit_s: float, seed: int, workers: int, faults: int | None, only: str) -> int:
    """Run for so long, or for so many faults; return the exit code."""
    failpoints.check()
    folder = tempfile.mkdtemp(prefix="chaos-")
    with memory_cgroup() as cgroup:
        run = Run(folder, seed, workers, cgroup, only)
        good = False
        try:
            good = run.go(time.monotonic() + limit_s, faults)
        finally:
            run.host.end()
            print(run.table(), flush=True)
            if good:
                shutil.rmtree(folder)
            else:
                print(f"the folder of the run is {folder}", flush=True)
    return 0 if good else 1


class Run:
    """Everything of one run."""

    def __init__(self, folder: str, seed: int, workers: int, cgroup: str | None, only: str) -> None:
        self.host = Host(folder, workers, cgroup)
        self._checks = Checks(self.host)
        self._seed = seed
        self._lots = Lots(str(seed), cgroup is not None, only)
        self._hand = Hand(self.host, f"hand {seed}")
        self._versions: dict[str, int] = {}
        self._sources = folder
        self._reached: Counter[str] = Counter()
        self._missed: Counter[str] = Counter()
        self._groups = 0
        self._kills = 0
        self._paused_s = 0.0
        """The longest that a worker that lived has not inferred."""
        self._before: object = None
        for one in (*weights.SOURCES, weights.STEADY, *weights.BUILDS):
            self._replace(one)

    def go(self, until_s: float, faults: int | None) -> bool:
        """Go on until then, and say whether all was well."""
        fault: Fault | None = None
        try:
            self._start()
            while time.monotonic() < until_s and faults != 0:
                faults = None if faults is None else faults - 1
                fault = self._lots.draw()
                self._one(fault)
            self._end_in_order()
            self._all_reached()
        except Exception as error:
            kind = "VIOLATION" if isinstance(error, Violation) else "BROKEN"
            print(f"{kind} with seed {self._seed}, fault {fault and fault.number}: {fault}")
            traceback.print_exc()
            self._explain(fault)
            return False
        return True

    # --- a fault ----------------------------------------------------------------------------------

    def _one(self, fault: Fault) -> None:
        began_s = time.monotonic()
        before = {worker.pid: worker.facts for worker in self.host.connected}
        if not fault.quiet:
            # A child copies pages that it writes to, and a simulated device takes some: nothing is
            # left for that in a full cgroup, and the kernel kills.
            self.host.go(f"{self._seed} {fault.number}", alone=fault.place == CGROUP_FULL)
            for one in self._lots.versions():
                self._replace(one)
        self._hand.do(fault)
        done_s = time.monotonic()
        if fault.reached and fault.ends_group:
            self.host.await_gone()
            self._checks.gone(fault.tolerated, fault.role if fault.signal == "KILL" else "")
            self._start(full=fault.signal == "TERM")
        else:
            self.host.await_whole()
            self.host.pause()
            ledger = self._checks.ledger()
            self._checks.quiet(fault.tolerated)
            if fault.quiet and self._checks.ledger() != ledger:
                raise Violation(
                    f"the ledger was {shown(ledger)}, and is {shown(self._checks.ledger())}"
                )
            self._survivors(before)
        (self._reached if fault.reached else self._missed)[str(fault)] += 1
        self._kills += fault.kills
        said = "" if fault.reached else ": not reached"
        took = f"{done_s - began_s:.1f} s, checked after {time.monotonic() - done_s:.1f} s more"
        print(f"{fault.number:5} {fault}{said} ({took})", flush=True)

    def _survivors(self, before: dict[int, tuple[int, int, float] | None]) -> None:
        """See that who was there before has gone on inferring."""
        for worker in self.host.connected:
            facts, earlier = worker.facts, before.get(worker.pid)
            assert facts is not None
            if earlier is not None and facts[1] <= earlier[1]:
                raise Violation(f"worker {worker.rank} has not inferred: {earlier}, then {facts}")
            self._paused_s = max(self._paused_s, facts[2])

    def _replace(self, one: weights.Weights) -> None:
        """Put the next version of some weights in the place of the one before."""
        version = self._versions[one.key] = self._versions.get(one.key, 0) + 1
        write = weights.write_build if one in weights.BUILDS else weights.write_source
        write(self._sources, one, version)

    # --- groups -----------------------------------------------------------------------------------

    def _start(self, full: bool = False) -> None:
        """Start a group, and see it whole, quiet, and as clean as if there had been none before."""
        self._groups += 1
        self.host.start("/dev/full" if full else None)
        self.host.await_whole()
        self._checks.started()
        self.host.pause()
        self._checks.quiet(frozenset())

    def _end_in_order(self) -> None:
        kill(self.host.front, signal.SIGTERM)
        self.host.await_gone()
        self._checks.gone(frozenset(), "")

    def _all_reached(self) -> None:
        """See that no place was tried again and again, and never reached: it would test nothing."""
        never = [
            what
            for what, count in self._missed.items()
            if count >= TRIES and not self._reached[what]
        ]
        if never:
            raise Violation(f"nobody comes to {never}")

    # --- saying -----------------------------------------------------------------------------------

    def table(self) -> str:
        """Return how often each fault was done, by role and place."""
        checks = self._checks
        lines = [f"{count:6}  {what}" for what, count in sorted(self._reached.items())]
        lines += [f"{count:6}  {what}: NOT REACHED" for what, count in sorted(self._missed.items())]
        return "\n".join(
            [
                "",
                *lines,
                f"{self._reached.total()} faults, {self._kills} kills; {self._groups} groups",
                f"{checks.trace.loads} loads from files, none of weights that were READY",
                f"tolerated: {dict(checks.tolerated)}",
                self._by_role(),
                f"longest pause between two inferences of a worker: {self._paused_s:.2f} s",
            ]
        )

    def _by_role(self) -> str:
        roles: Counter[str] = Counter()
        for what, count in self._reached.items():
            roles[what.partition(":")[0]] += count
        return ", ".join(f"{role}: {count}" for role, count in roles.most_common())

    def _explain(self, fault: Fault | None) -> None:
        """Print what there is to know: the fault, the books, the kernel, the log."""
        print(f"fault: {fault!r}")
        try:
            with Operator.connect(self.host.socket, "chaos") as operator:
                print(f"books: {shown(operator.status())}")
        except WeightCacheError as error:
            print(f"no books: {error}")
        if self._checks.books is not None:
            print(f"books when it was last quiet: {shown(self._checks.books)}")
        if self._checks.found is not None:
            print(f"audit: {shown(self._checks.found)}")
        for pid in kernel.processes(self.host.folder):
            try:
                print(f"kernel: {kernel.process(pid)} state {kernel.state(pid)}")
            except (FileNotFoundError, ProcessLookupError):
                print(f"kernel: {pid} has ended")
        print(f"segments: {kernel.segments(self._checks.trace.starts)}")
        if Path(self.host.log).exists():
            lines = Path(self.host.log).read_text(errors="replace").splitlines()
            print("log:", *lines[-LOG_LINES:], sep="\n  ", flush=True)
