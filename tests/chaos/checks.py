"""What must hold of a group that is whole and quiet, and of one that is gone, whatever was done."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path

import msgspec

from coordinator.audit import AuditReport, audit
from coordinator.operator import Operator
from shm_store.report import GenerationReport, StatusReport
from shm_store.wire import RAM
from tests.chaos import kernel
from tests.chaos.host import Host
from tests.chaos.watch import Violation, until
from tests.chaos.weights import PRIVATE_VARIABLE, STEADY
from tests.chaos.worker import FAULTS

QUIET_S = 60.0
SETTLE_S = 15.0
"""In which what a moment ago ended is closed and reaped."""

UNDER_WAY = ("open", "reserved", "filling", "freeing")

ALARMING = ("Traceback", "Exception ignored", "never awaited", "leaked", "was destroyed", "rror:")
"""What no process of a group ever says, whatever happens to the others."""


class Trace:
    """What coordinators stored, removed and had read, in order; see `hook`."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder, "trace")
        self._read_bytes = 0
        self._sources: dict[str, tuple[str, str]] = {}
        """By generation that a loader was started for: its fingerprint and key."""
        self.stored: set[str] = set()
        self.starts: set[str] = set()
        """What the generations of all coordinators so far begin with."""
        self.loads = 0

    def forget(self) -> None:
        """The store has ended, with its group."""
        self.stored.clear()

    def follow(self) -> None:
        """Take in what was written since.

        Raises:
            Violation: weights were read that were in the store.
        """
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            text = file.read()
        self._read_bytes += len(text)
        for line in text.decode().splitlines():
            what, gen, *rest = line.split(" ", 3)
            self.starts.add(gen.rpartition("-")[0])
            if what == "read":
                self._read(gen, (rest[0], rest[1]))
            elif what == "stored":
                self.stored.add(gen)
            else:
                self.stored.discard(gen)

    def _read(self, gen: str, source: tuple[str, str]) -> None:
        self.loads += 1
        self._sources[gen] = source
        for other in self.stored:
            if self._sources.get(other) == source:
                raise Violation(f"{source} was read again as {gen}: {other} was READY")


class Checks:
    """Holds a group against the kernel, and against what it was before."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.trace = Trace(host.folder)
        self._fds: dict[str, Counter[str]] = {}
        """By role: the fds of a process when all is quiet, segments aside."""
        self._faults_read_bytes = 0
        self._log_read_bytes = 0
        self.tolerated: Counter[str] = Counter()
        self.books: StatusReport | None = None
        self.found: AuditReport | None = None

    # --- a group that is there --------------------------------------------------------------------

    def quiet(self, tolerated: frozenset[str]) -> None:
        """See that nothing is lost and nothing leaked, once nothing is under way any more.

        Args:
            tolerated: names of the errors that workers may have seen since.

        Raises:
            Violation: with what is wrong.
        """
        self.faults(tolerated)
        until(self._is_quiet, QUIET_S, lambda: f"there is no quiet: {self._shown()}")
        self.trace.follow()
        books = self.books
        assert books is not None
        self.trace.starts.add(books.start)
        self.trace.starts |= {one.generation.rpartition("-")[0] for one in books.generations}
        self._leases(books)
        lost = self.trace.stored - {one.generation for one in books.generations}
        if lost:
            raise Violation(f"these were in the store, and are lost: {sorted(lost)}")
        until(
            self._is_as_charged,
            SETTLE_S,
            lambda: f"the books are not the kernel's: {self._difference}",
        )
        self._said()

    def ledger(self) -> object:
        """Return the books without what a coordinator's death may change.

        Those are ages and orders, and what was asked of a lease for somebody who waits for room: he
        asks anew.
        """
        books = self.books
        assert books is not None
        generations = {
            one.generation: (
                one.key,
                one.state,
                one.size_bytes,
                one.pool,
                one.pinned,
                one.private,
                sorted(
                    (lease.pid, lease.copied_bytes, lease.asked == "stale") for lease in one.leases
                ),
            )
            for one in books.generations
        }
        pools = [msgspec.structs.asdict(pool) for pool in books.pools]
        sessions = sorted((session.pid, session.name, session.device) for session in books.sessions)
        return {
            "generations": generations,
            "pools": pools,
            "pins": books.pins,
            "sessions": sessions,
        }

    def _is_quiet(self) -> bool:
        """Read the books; say whether nothing is under way, and no look at them finds a window."""
        with Operator.connect(self._host.socket, "chaos") as operator:
            operator.flush()
            self.found = audit(operator)
            books = self.books = operator.status()
        if self.found.differences:
            raise Violation(f"the audit found differences: {self.found.differences}")
        workers = {worker.pid for worker in self._host.connected}
        return (
            not self.found.windows
            and not any(
                one.state in UNDER_WAY or one.waiting or one.collapsed_by
                for one in books.generations
            )
            and all(one.connected and not one.waiting_for for one in books.sessions)
            and {one.pid for one in books.sessions} == workers
            and len(books.sessions) == len(workers)
        )

    def _leases(self, books: StatusReport) -> None:
        """A key has one READY generation at most in a pool, and only workers lease anything.

        Of what every worker has locked from first to last there is one, also on their device.
        """
        ready = Counter((one.key, one.pool) for one in books.generations if _is_ready(one))
        if doubled := [home for home, count in ready.items() if count > 1]:
            raise Violation(f"more than one READY generation of {doubled}")
        workers = {worker.pid for worker in self._host.connected}
        there = [one for one in books.generations if one.key == STEADY.key and one.pool != RAM]
        holders = sorted((one.private, *(lease.pid for lease in one.leases)) for one in there)
        wanted = [(False, *sorted(workers))]
        if os.environ[PRIVATE_VARIABLE]:
            wanted = sorted((True, pid) for pid in workers)
        if [(private, *sorted(pids)) for private, *pids in holders] != wanted:
            raise Violation(f"on the device, all workers are to have one copy: {there}")
        for one in books.generations:
            if strange := {lease.pid for lease in one.leases} - workers:
                raise Violation(f"{one.key} is leased to {strange}, who are no workers")

    _difference = ""

    def _is_as_charged(self) -> bool:
        """Compare with the kernel, by a way of our own; say whether nothing is left over."""
        self._difference = self._compare()
        return not self._difference

    def _compare(self) -> str:
        books, host = self.books, self._host
        assert books is not None
        roles = {host.front: "front", host.supervisor: "supervisor"}
        roles[host.pid_of("coordinator")] = "coordinator"
        roles |= {worker.pid: "worker" for worker in host.connected}
        pids = set(kernel.processes(host.folder))
        if pids != set(roles):
            return f"processes {[f'{pid}: {kernel.command(pid)}' for pid in pids ^ set(roles)]}"
        if zombies := kernel.zombies(pids):
            return f"zombies {zombies}"
        shared = [one for one in books.generations if not one.private]
        wanted = {
            "coordinator": {one.generation for one in shared},
            "supervisor": {one.generation for one in shared if one.state == "ready"},
            "front": set(),
        }
        for pid, role in roles.items():
            process = kernel.process(pid)
            has = [one for one in books.generations if not one.private or one.pool != RAM]
            leased = {one.generation for one in has if any(x.pid == pid for x in one.leases)}
            if process.segments != wanted.get(role, leased):
                extra = process.segments ^ wanted.get(role, leased)
                return f"{role} {pid} has, or lacks, the segments {sorted(extra)}"
            kinds = self._kinds(process)
            if role == "supervisor":  # there are none until there is something to remember
                words = kinds.pop("weight-cache:words", 0)
                if words > 1:
                    return f"the supervisor keeps {words} times words"
                there = sum(_is_ready(one) and one.pool != RAM for one in shared)
                said = kinds.pop("weight-cache:about", 0)
                if said != there:
                    return f"of {there} segments on devices the supervisor knows {said}"
            if kinds != self._fds.setdefault(role, kinds):
                return f"{role} {pid} has the fds {kinds} instead of {self._fds[role]}"
        return self._memory(books, set(roles))

    def _kinds(self, process: kernel.Process) -> Counter[str]:
        """Return its fds by kind, wherever the group's words go."""
        kinds: Counter[str] = Counter()
        for kind, count in process.kinds.items():
            kinds["the log" if kind in (self._host.log, "/dev/full") else kind] += count
        return kinds

    def _memory(self, books: StatusReport, pids: set[int]) -> str:
        found = kernel.segments(self.trace.starts)
        known = {one.generation for one in books.generations}
        if unknown := found.holders.keys() - known:
            return f"nobody is charged for {[(gen, found.holders[gen]) for gen in unknown]}"
        if strangers := set().union(*found.holders.values()) - pids:
            return f"processes that are no part of the group have segments: {strangers}"
        charged = sum(pool.in_use_bytes for pool in books.pools)
        private = sum(pool.private_bytes for pool in books.pools if pool.name == RAM)
        taken = sum(found.sizes.values())
        if charged - private != taken:
            return f"{charged} bytes are charged, {private} of them private; {taken} are taken"
        return ""

    # --- what was said ----------------------------------------------------------------------------

    def faults(self, tolerated: frozenset[str]) -> None:
        """See that no worker has seen what it must not.

        Raises:
            Violation: one has, with its traceback.
        """
        path = Path(self._host.folder, FAULTS)
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._faults_read_bytes)
            text = file.read()
        self._faults_read_bytes += len(text)
        for line in text.decode().splitlines():
            fault = json.loads(line)
            if fault["error"] not in tolerated:
                raise Violation(
                    f"worker {fault['rank']} (pid {fault['pid']}), {fault['doing']}: "
                    f"{fault['traceback']}"
                )
            self.tolerated[fault["error"]] += 1

    def _said(self) -> None:
        if self._host.full:
            return
        for line in self._new_lines():
            if any(word in line for word in ALARMING):
                raise Violation(f"the group said: {line}")

    def _new_lines(self) -> list[str]:
        with open(self._host.log, "rb") as file:
            file.seek(self._log_read_bytes)
            text = file.read()
        self._log_read_bytes += len(text)
        return text.decode(errors="replace").splitlines()

    def started(self) -> None:
        """See that a group that has just started said nothing but that it is ready."""
        self.trace.forget()
        self._log_read_bytes = 0
        if self._host.full:
            return
        lines = self._new_lines()
        if len(lines) != 1 or not lines[0].startswith("weight-cache: ready on "):
            raise Violation(f"a new group began with {lines}")

    # --- a group that is gone ---------------------------------------------------------------------

    def gone(self, tolerated: frozenset[str], killed: str) -> None:
        """See that the kernel has everything back, and that no file is left but by necessity.

        Args:
            killed: whom, if anybody was: "front", "supervisor" or "everything".

        Raises:
            Violation: something is left.
        """
        self.faults(tolerated)
        self.trace.follow()
        until(
            lambda: not kernel.segments(self.trace.starts).holders,
            SETTLE_S,
            lambda: f"segments are left: {kernel.segments(self.trace.starts).holders}",
        )
        self._said()
        left = {name for name in os.listdir(self._host.folder) if name.startswith("s.")}
        left |= set(os.listdir(self._host.temporary))
        match killed:
            case "everything":
                # Nobody was there to do it. The next group begins with what lies at its socket.
                for name in os.listdir(self._host.temporary):
                    shutil.rmtree(os.path.join(self._host.temporary, name))
            case "supervisor":
                left -= {"s.group", "s.lock"}  # a coordinator may have died before it
        if left and killed != "everything":
            raise Violation(f"files are left: {sorted(left)}")

    # --- for a report of what went wrong ----------------------------------------------------------

    def _shown(self) -> str:
        return "" if self.books is None else shown(self.books)


def shown(what: object) -> str:
    """Return anything as JSON, for whoever looks into what went wrong."""
    return msgspec.json.encode(what).decode()


def _is_ready(one: GenerationReport) -> bool:
    return one.state == "ready" and not one.private
