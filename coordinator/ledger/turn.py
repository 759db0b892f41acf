"""One event's turn: the only hands that change the ledger, and the effects they leave.

Every change of a generation's state goes through `move`, `free` or `remove`, every lease through
`grant`, `revoke` and `end_lease`, every charge through `_charge`, every final answer through
`answer`. The rest of the ledger decides.
"""

from __future__ import annotations

from coordinator.ledger.events import Effect, Free, Keep, Offer, Remember, Send, Unkeep
from coordinator.ledger.state import (
    LOADER,
    RUNNING,
    TRANSITIONS,
    Generation,
    Lease,
    Ledger,
    Request,
    State,
)
from shm_store.errors import WeightCacheError
from shm_store.keys import GenerationId, LeaseId, RequestId, SessionId, generation_id
from shm_store.wire import (
    NO_GENERATION,
    RAM,
    Asked,
    Cause,
    Fail,
    Filling,
    Grant,
    Revoke,
    ToSession,
)


class Turn:
    """The ledger, the time of the event, and the effects so far."""

    def __init__(self, ledger: Ledger, now_s: float) -> None:
        self.ledger = ledger
        self.now_s = now_s
        self.effects: list[Effect] = []

    def do(self, effect: Effect) -> None:
        self.effects.append(effect)

    def send(
        self, session: SessionId, message: ToSession, segment: GenerationId | None = None
    ) -> None:
        """Send to a session, if it is there to hear it."""
        known = self.ledger.sessions.get(session)
        if known is not None and known.connected:
            self.do(Send(session, message, segment))

    def refuse(self, session: SessionId, rid: RequestId, error: WeightCacheError) -> None:
        """Answer a request that never got a generation, or an operator's."""
        self.send(session, Fail(rid, Cause.of(error)))

    # --- requests -------------------------------------------------------------------------------

    def ask(self, request: Request, generation: Generation) -> None:
        """Attach `request` to `generation`, which answers it."""
        request.gen = generation.id
        self.ledger.requests[request.id] = request
        generation.askers[request.id] = request
        if generation.state is State.READY:
            self.ledger.parked[generation.id] = generation

    def tell(self, request: Request, generation: Generation) -> None:
        """Say to `request` how far the fill is that it waits for."""
        how_far = Filling(request.rid, generation.filled_bytes, generation.total_bytes)
        self.send(request.session, how_far)

    def detach(self, request: Request) -> None:
        """Take `request` from its generation, to be answered or asked anew."""
        if request.gen is None:
            return
        generation = self.ledger.generations[request.gen]
        del generation.askers[request.id]
        if not generation.askers:
            self.ledger.parked.pop(generation.id, None)
        del self.ledger.requests[request.id]
        request.gen = None

    def answer(self, request: Request, message: ToSession, segment: GenerationId | None) -> None:
        """Give `request` its one final answer."""
        self.detach(request)
        self.send(request.session, message, segment)

    def fail(self, request: Request, error: WeightCacheError) -> None:
        """Give `request` its one final answer: no."""
        self.answer(request, Fail(request.rid, Cause.of(error)), None)

    # --- leases ---------------------------------------------------------------------------------

    def grant(self, request: Request, generation: Generation) -> None:
        """Answer with a lease. It replaces the one this session has on the generation."""
        lease = Lease(LeaseId(request.rid), self.now_s)
        previous = generation.leases.get(request.session)
        if previous is not None:
            lease.copied_bytes = previous.copied_bytes
        generation.leases[request.session] = lease
        self.ledger.sessions[request.session].leases[generation.id] = lease
        segment = None if generation.private else generation.id
        self.answer(request, Grant(request.rid, generation.id), segment)
        if generation.state is State.RETIRED:
            self.revoke(request.session, generation, "stale")

    def revoke(self, session: SessionId, generation: Generation, asked: Asked) -> None:
        """Ask a holder. Again only whether it is idle; what is stale stays stale."""
        lease = generation.leases[session]
        if lease.asked == "stale" or (lease.asked == asked and lease.answer != "idle"):
            return
        lease.asked, lease.asked_s, lease.answer = asked, self.now_s, ""
        self.send(session, Revoke(generation.id, lease.id, asked))

    def unask(self, generation: Generation, asked: tuple[Asked, ...]) -> None:
        """Take back what holders were asked and have answered. Of room they hear that.

        Who has not answered may not read, and is sent nothing more until then.
        """
        for session, lease in generation.leases.items():
            if lease.asked in asked and lease.answer in ("idle", "kept"):
                if lease.asked == "room":
                    self.send(session, Revoke(generation.id, lease.id, "keep"))
                lease.asked = lease.answer = ""

    def copied(self, generation: Generation, lease: Lease, size_bytes: int) -> None:
        """Charge the pages that a holder has written to, instead of what was known before."""
        self._charge(generation, size_bytes - lease.copied_bytes)
        lease.copied_bytes = size_bytes

    def end_lease(self, session: SessionId, generation: Generation, *, died: bool = False) -> None:
        """The process has unmapped the bytes, or is gone.

        Memory on a device is not gone with its process: the device takes its time.
        """
        self.copied(generation, generation.leases[session], 0)
        del generation.leases[session]
        del self.ledger.sessions[session].leases[generation.id]
        if generation.leases:
            return
        generation.idle_s = self.now_s
        if died:
            generation.died_pid = self.ledger.sessions[session].pid
        if generation.private and died and generation.pool != RAM:
            self.free(generation)
        elif generation.private:
            self.remove(generation)
        elif generation.state is State.RETIRED:
            self.settle_retired(generation)

    def lease(self, session: SessionId, lease: LeaseId, generation: Generation) -> None:
        """Count a lease that a session states. What was asked of it is asked again."""
        stated = Lease(lease, self.now_s)
        previous = generation.leases.get(session)
        if previous is not None:
            stated.copied_bytes = previous.copied_bytes
        generation.leases[session] = stated
        self.ledger.sessions[session].leases[generation.id] = stated
        if generation.state is State.RETIRED:
            self.revoke(session, generation, "stale")

    # --- generations ----------------------------------------------------------------------------

    def open(
        self,
        first: Request,
        *,
        doomed: bool = False,
        deaths: int = 0,
        private: bool = False,
        fixed: bool = False,
        copy_of: GenerationId = NO_GENERATION,
    ) -> Generation:
        """Put a new generation on the table. Its owner is the loader, or `first` itself."""
        ledger = self.ledger
        ledger.counter += 1
        generation = Generation(
            id=generation_id(ledger.start_ns, ledger.counter),
            key=first.key,
            fingerprint=first.fingerprint,
            pool=first.pool,
            owner=first if first.source is None else LOADER,
            private=private,
            fixed=fixed,
            copy_of=copy_of,
            doomed=doomed,
            deaths=deaths,
        )
        ledger.generations[generation.id] = generation
        if not private:
            ledger.by_home.setdefault(generation.home, []).append(generation)
        ledger.running[generation.id] = generation
        return generation

    def adopt(
        self,
        offer: Offer,
        state: State,
        *,
        private: bool = False,
        fixed: bool = False,
        copy_of: GenerationId = NO_GENERATION,
        doomed: bool = False,
    ) -> Generation:
        """Put a generation on the table that another coordinator had. Charged at once."""
        ledger = self.ledger
        generation = Generation(
            id=offer.gen,
            key=offer.key,
            fingerprint=offer.fingerprint,
            pool=offer.pool,
            owner=None,
            private=private,
            fixed=fixed,
            copy_of=copy_of,
            state=state,
            doomed=doomed,
            size_bytes=offer.size_bytes,
            filled_bytes=offer.size_bytes if offer.sealed else 0,
            progressed_s=self.now_s,
            idle_s=self.now_s,
        )
        ledger.generations[generation.id] = generation
        if not private:
            ledger.by_home.setdefault(generation.home, []).append(generation)
        if state in RUNNING:
            ledger.running[generation.id] = generation
        self._charge(generation, generation.size_bytes)
        if not private and state is not State.FILLING:
            self._have_kept(generation)
        return generation

    def settle_retired(self, generation: Generation) -> None:
        """Free what is retired once nobody leases it, and nobody may turn out to have it."""
        if not generation.leases and not self.ledger.awaited:
            self.free(generation)

    def move(self, generation: Generation, state: State) -> None:
        """Change the state. Only moves in the table are allowed."""
        if state not in TRANSITIONS[generation.state]:
            raise AssertionError(f"{generation.id}: {generation.state} -> {state}")
        if generation.state is State.OPEN:
            self._charge(generation, generation.size_bytes)
        before, generation.state = generation.state, state
        if not generation.private and State.READY in (before, state):
            self._have_kept(generation)
        if state not in RUNNING:
            generation.owner = None
            generation.sealing = False
            self.ledger.running.pop(generation.id, None)

    def _have_kept(self, generation: Generation) -> None:
        """Have a generation outlive this coordinator as long as it is READY."""
        if generation.state is not State.READY:
            self.do(Unkeep(generation.id))
            return
        about = None
        if generation.pool != RAM:
            facts = (generation.key, generation.fingerprint, generation.size_bytes)
            about = Offer(generation.id, LeaseId(0), *facts, pool=generation.pool)
        self.do(Keep(generation.id, about))

    def remember(self) -> None:
        """Have what was set, and found on devices, outlive this coordinator, before an answer."""
        ledger = self.ledger
        limits_bytes = {
            name: pool.limit_bytes
            for name, pool in ledger.pools.items()
            if pool.said_by == "operator"
        }
        found = {name: pool.found_bytes for name, pool in ledger.pools.items() if pool.found_bytes}
        self.do(Remember(tuple(ledger.pins), limits_bytes, ledger.draining, found))

    def free(self, generation: Generation) -> None:
        """Let go of a generation that nobody leases and nobody asks for.

        OPEN has no bytes and leaves at once, its loader with it. Everything else stays charged,
        as FREEING, until the executor reports it gone. A device takes its time to have back what
        an ended process had there.
        """
        assert not generation.leases and not generation.askers
        if generation.state is State.OPEN:
            if generation.owner == LOADER:
                self.do(Free(generation.id))
            if generation.queued_s is not None:
                self.ledger.pools[generation.pool].given_up = True
            self.unqueue(generation)
            self.remove(generation)
            return
        pid = generation.died_pid or self.ledger.owner_pid(generation) or 0
        self.move(generation, State.FREEING)
        if generation.pool == RAM:
            self.do(Free(generation.id))
        else:
            self.do(Free(generation.id, generation.pool, pid))

    def remove(self, generation: Generation) -> None:
        """Take a generation off the table: FREED, private and ended, or never charged."""
        ledger = self.ledger
        if generation.state is not State.OPEN:
            self._charge(generation, -generation.size_bytes)
        del ledger.generations[generation.id]
        ledger.running.pop(generation.id, None)
        if generation.private:
            return
        siblings = ledger.by_home[generation.home]
        siblings.remove(generation)
        if not siblings:
            del ledger.by_home[generation.home]

    def _charge(self, generation: Generation, size_bytes: int) -> None:
        self.ledger.pools[generation.pool].in_use_bytes += size_bytes

    def unqueue(self, generation: Generation) -> None:
        """Take a generation out of the queue for room, if it is in there."""
        if generation.queued_s is not None:
            generation.queued_s = None
            self.ledger.pools[generation.pool].queue.remove(generation)
