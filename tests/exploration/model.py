"""A whole host as one value: what can happen in it next, doing that, and what must hold.

The ledger and the workers' records are the real ones. `host` models the coordinator's side around
the ledger, `worker` and `thread` the processes around the records: two queues per connection are
all that is between them. `System.actions` lists everything that can happen next, `System.perform`
does it.

A world's threads run small programs (`Op`s), looped or once. Faults have budgets.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator

from coordinator.ledger.state import RUNNING, State
from shm_store.keys import GenerationId
from shm_store.wire import Grant, Release, Space
from tests.exploration.host import Host
from tests.exploration.parts import FAULTS, WAITING, Action, World
from tests.exploration.thread import Thread
from tests.exploration.worker import Worker

OF_WORKERS = frozenset(
    {"reader", "keeper", "thread", "die", "disconnect", "reconnect", "unmapped", "cancel", "fork"}
)
"""Actions of one worker, whose session comes next. The others are its host's."""


class System:
    """The state of a world, and what can become of it."""

    def __init__(self, world: World) -> None:
        self.host = Host(world)
        self.workers = [Worker(self.host, session) for session in range(len(world.programs))]
        for worker, programs in zip(self.workers, world.programs, strict=True):
            worker.threads = [Thread(worker, index) for index in range(len(programs))]
        self.host.attach(self.workers)
        self.faults = dict(world.faults)

    def image(self) -> bytes:
        """Return this state as bytes, from which `of` makes copies."""
        world, self.host.world = self.host.world, None
        try:
            return pickle.dumps(self, pickle.HIGHEST_PROTOCOL)
        finally:
            self.host.world = world

    @staticmethod
    def of(image: bytes, world: World) -> System:
        """Return the system of an image."""
        system = pickle.loads(image)
        assert isinstance(system, System)
        system.host.world = world
        return system

    # --- what can happen --------------------------------------------------------------------------

    def actions(self) -> list[Action]:
        """Return everything that can happen next. Faults are last."""
        found: list[Action] = []
        for session, worker in enumerate(self.workers):
            if worker.out and (worker.connected or not worker.alive):
                found.append(("channel", session))
            if worker.alive:
                found += worker.actions()
            elif not worker.out and session in self.host.ledger.sessions:
                found.append(("pidfd", session))
        return [*found, *self.host.actions(), *self._faults()]

    def _faults(self) -> Iterator[Action]:
        for name, left in self.faults.items():
            if left > 0:
                for owner in self.workers if name in OF_WORKERS else [self.host]:
                    yield from getattr(owner, f"can_{name}")()

    # --- doing it ---------------------------------------------------------------------------------

    def perform(self, action: Action) -> None:
        """Do one thing, and everything that follows from it at once.

        Raises:
            Violation: something came to be that must not.
        """
        name, *arguments = action
        if name in FAULTS:
            self.faults[name] -= 1
        owner = self.workers[arguments.pop(0)] if name in OF_WORKERS else self.host
        getattr(owner, f"do_{name}")(*arguments)
        for worker in self.workers:
            if worker.alive:
                worker.collect()

    # --- what must hold ---------------------------------------------------------------------------

    def waiting(self) -> list[tuple[int, int]]:
        """Return the threads that others must move."""
        return [
            (session, index)
            for session, worker in enumerate(self.workers)
            if worker.alive and (worker.connected or self.host.world.resumes)
            for index, thread in enumerate(worker.threads)
            if thread.phase in WAITING
        ]

    def violations(self) -> list[str]:
        """Return what must not be in any state, beside the ledger's own invariants."""
        ledger, found = self.host.ledger, []
        for session, worker in enumerate(self.workers):
            known = ledger.sessions.get(session)
            leases = {} if known is None else {gen: lease.id for gen, lease in known.leases.items()}
            if not worker.alive:
                continue
            states = worker.connected or not self.host.world.resumes
            for mapping in worker.mappings if states else ():
                if mapping.gen not in leases:
                    found.append(f"{session} maps {mapping.gen} without a lease")
            for _, resident in worker._residents() if states else ():
                if resident.gen not in leases:
                    found.append(f"{session} has {resident.gen} on a device without a lease")
            for thread in worker.threads:
                filled = ledger.generations.get(thread.gen) if thread.phase == "fill" else None
                gone = filled is None or filled.state is State.FREEING
                if thread.phase == "fill" and gone and states:
                    found.append(f"{session} fills {thread.gen}, which nobody counts")
            for gen, lease in leases.items():
                if not worker.connected or self._accounted(worker, gen, lease):
                    continue
                found.append(f"{session} leases {gen} ({lease}), and knows nothing of it")
            for record in worker.records._current.values():
                handled = ("revoke", record.module) not in [item[:2] for item in worker.keeper]
                if record.module.asked == "stale" and handled:
                    found.append(f"{session} hands out {record.generation}, which is retired")
            for message in worker.to:
                sent = ledger.generations.get(message.gen) if isinstance(message, Space) else None
                if isinstance(message, Space) and (sent is None or sent.state is State.FREEING):
                    found.append(
                        f"{session} is sent the bytes of {message.gen}, which nobody counts"
                    )
            found += self._unanswered(session, worker)
            rids = {rid for owner, rid in ledger.requests if owner == session}
            for rid in rids - set(worker.requests):
                if worker.connected:
                    found.append(f"request {rid} of {session} is open, and its asker does not know")
        found += self._beyond_the_books()
        for gen, content in self.host.bytes_from.items():
            generation = ledger.generations.get(gen)
            ready = generation is not None and generation.state not in RUNNING
            asked = "" if generation is None else generation.fingerprint.removeprefix("build:")
            if ready and generation.leases and content != asked:
                found.append(f"{gen} is said to be {asked!r} and is {content!r}")
        return found

    def _beyond_the_books(self) -> list[str]:
        """Law 3: what is on a device is charged, until the device has it back.

        After a restart nobody knows any more of whom there was and ended before.
        """
        if self.host.lives > 1 or "vram" not in self.host.ledger.pools:
            return []
        there = dict(self.host.draining)
        for worker in self.workers:
            there |= worker.on_device()
        taken = sum(there.values())
        charged = self.host.ledger.pools["vram"].in_use_bytes
        return [f"{taken} bytes are on the device, {charged} by the books"] * (taken > charged)

    def _unanswered(self, session: int, worker: Worker) -> list[str]:
        """Rule 5: what a worker waits for is known to the ledger, or on its way."""
        ledger = self.host.ledger
        known = {rid for owner, rid in ledger.requests if owner == session}
        known |= {waiting.rid for waiting in ledger.invalidations if waiting.session == session}
        known |= {m.rid for m in (*worker.to, *worker.out) if hasattr(m, "rid")}
        lost = set(worker.requests) - known if worker.connected else set()
        return [f"request {rid} of {session} will never be answered" for rid in lost]

    def _accounted(self, worker: Worker, gen: GenerationId, lease: int) -> bool:
        """Say whether the worker knows of a lease, or will, or has just given it back."""
        if any(mapping.gen == gen for mapping in worker.mappings):
            return True
        if any((gen, lease) in thread.charges for thread in worker.threads):
            return True
        if any((gen, lease) == (one.gen, one.lease) for _, one in worker._residents()):
            return True
        return any(isinstance(m, Grant) and m.gen == gen for m in worker.to) or any(
            isinstance(m, Release) and (m.gen, m.lease) == (gen, lease) for m in worker.out
        )
