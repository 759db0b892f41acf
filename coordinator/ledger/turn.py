"""One event's turn: the only hands that change the ledger, and the effects they leave.

Every change of a generation's state goes through `move`, `free` or `remove`, every lease through
`grant` and `end_lease`, every final answer through `answer`. The rest of the ledger decides.
"""

from __future__ import annotations

from coordinator.ledger.events import Effect, Free, Send
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
from shm_store.wire import Cause, Fail, Grant, ToSession


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

    def detach(self, request: Request) -> None:
        """Take `request` from its generation, to be answered or asked anew."""
        if request.gen is None:
            return
        del self.ledger.generations[request.gen].askers[request.id]
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
        generation.leases[request.session] = lease
        self.ledger.sessions[request.session].leases[generation.id] = lease
        self.answer(request, Grant(request.rid, generation.id), generation.id)

    def end_lease(self, session: SessionId, generation: Generation) -> None:
        """The process has unmapped the bytes, or is gone."""
        del generation.leases[session]
        del self.ledger.sessions[session].leases[generation.id]
        if generation.leases:
            return
        generation.idle_s = self.now_s
        if generation.state is State.RETIRED:
            self.free(generation)

    # --- generations ----------------------------------------------------------------------------

    def open(self, first: Request, *, doomed: bool, deaths: int, pool: str) -> Generation:
        """Put a new generation on the table. Its owner is the loader, or `first` itself."""
        ledger = self.ledger
        ledger.counter += 1
        generation = Generation(
            id=generation_id(ledger.start_ns, ledger.counter),
            key=first.key,
            fingerprint=first.fingerprint,
            pool=pool,
            owner=first if first.source is None else LOADER,
            doomed=doomed,
            deaths=deaths,
            progressed_s=self.now_s,
        )
        ledger.generations[generation.id] = generation
        ledger.by_key.setdefault(generation.key, []).append(generation)
        ledger.running[generation.id] = generation
        return generation

    def move(self, generation: Generation, state: State) -> None:
        """Change the state. Only moves in the table are allowed."""
        if state not in TRANSITIONS[generation.state]:
            raise AssertionError(f"{generation.id}: {generation.state} -> {state}")
        generation.state = state
        if state not in RUNNING:
            generation.owner = None
            generation.sealing = False
            self.ledger.running.pop(generation.id, None)

    def free(self, generation: Generation) -> None:
        """Let go of a generation that nobody leases and nobody asks for.

        OPEN has no bytes and leaves at once, its loader with it. Everything else stays charged,
        as FREEING, until the executor reports it gone.
        """
        assert not generation.leases and not generation.askers
        if generation.state is State.OPEN:
            if generation.owner == LOADER:
                self.do(Free(generation.id))
            self.unqueue(generation)
            self.remove(generation)
            return
        self.move(generation, State.FREEING)
        self.do(Free(generation.id))

    def remove(self, generation: Generation) -> None:
        """Take a generation off the table: FREED, or never charged."""
        ledger = self.ledger
        del ledger.generations[generation.id]
        ledger.running.pop(generation.id, None)
        siblings = ledger.by_key[generation.key]
        siblings.remove(generation)
        if not siblings:
            del ledger.by_key[generation.key]

    def unqueue(self, generation: Generation) -> None:
        """Take a generation out of the queue for room, if it is in there."""
        if generation.queued_s is not None:
            generation.queued_s = None
            self.ledger.pools[generation.pool].queue.remove(generation)
