"""The ledger: who holds what, as a pure and deterministic state machine.

`apply(ledger, event, now_s) -> effects`. No clock, no sockets, no fds, no logging, no randomness
and no iteration over sets. The executor performs the effects and feeds the outcomes back as events.

Read in this order: `events` (what comes in and goes out), `state` (what is known), `turn` (the only
hands that change it), then the deciders: `admission`, `lifecycle`, `eviction`, `operators`,
`recovery`, `deadlines`. `invariants` says what must hold after every event.
"""

from __future__ import annotations

from typing import assert_never

from coordinator.ledger import admission, deadlines, lifecycle, operators, recovery
from coordinator.ledger.deadlines import next_deadline_s
from coordinator.ledger.events import (
    Attached,
    Backed,
    BackingRefused,
    Disconnected,
    Effect,
    Event,
    Freed,
    LoaderEnded,
    LoaderSaid,
    Recovered,
    Resumed,
    Said,
    Sealed,
    SealRefused,
    SessionEnded,
    TimePassed,
)
from coordinator.ledger.report import status_report
from coordinator.ledger.state import Ledger, new_ledger
from coordinator.ledger.turn import Turn
from shm_store.keys import SessionId
from shm_store.wire import (
    Abort,
    Ack,
    Acquire,
    Cancel,
    Charge,
    Commit,
    Copied,
    Counts,
    Declare,
    Drain,
    Evict,
    Flush,
    FromLoader,
    Invalidate,
    Limit,
    Pin,
    Progress,
    Receive,
    Release,
    Report,
    Reserve,
    Status,
    Unpin,
)

__all__ = ["Ledger", "apply", "new_ledger", "next_deadline_s", "status_report"]


def apply(ledger: Ledger, event: Event, now_s: float) -> list[Effect]:
    """Change `ledger` by one event and return what is to be done about it.

    Args:
        now_s: seconds on a clock that never goes back; deadlines and ages are counted on it.
    """
    turn = Turn(ledger, now_s)
    match event:
        case Said():
            _said(turn, event)
        case LoaderSaid(gen, message):
            _owner_said(turn, None, message)
        case Attached():
            lifecycle.attached(turn, event)
        case Recovered():
            recovery.recovered(turn, event)
        case Resumed():
            recovery.resumed(turn, event)
        case Disconnected(session) | SessionEnded(session):
            known = ledger.sessions.get(session)
            if known is not None:
                over = isinstance(event, SessionEnded)
                (lifecycle.ended if over else lifecycle.disconnected)(turn, known)
                if over:
                    recovery.heard(turn, session)
        case Freed(gen):
            lifecycle.freed(turn, gen)
        case TimePassed():
            deadlines.expire(turn)
        case LoaderEnded() | Backed() | BackingRefused() | Sealed() | SealRefused():
            _performed(turn, event)
        case _:
            assert_never(event)
    _settle(turn)
    return turn.effects


def _said(turn: Turn, event: Said) -> None:
    """Take a session's message. An id that is not above all earlier ones is a replay."""
    session = turn.ledger.sessions.get(event.session)
    message = event.message
    if session is None:
        return
    unnumbered = Cancel | Reserve | Progress | Commit | Abort | Release | Ack | Declare | Counts
    if not isinstance(message, unnumbered):
        if message.rid <= session.last_rid:
            return
        session.last_rid = message.rid
    match message:
        case Acquire():
            admission.acquire(turn, session.id, message, event.fingerprint)
        case Receive():
            lifecycle.receive(turn, session.id, message)
        case Charge():
            admission.charge(turn, session.id, message)
        case Declare():
            lifecycle.declared(turn, session, message)
        case Counts(models):
            session.models = models
        case Release():
            lifecycle.release(turn, session.id, message)
        case Ack():
            lifecycle.ack(turn, session.id, message)
        case Cancel():
            admission.cancel(turn, session.id, message)
        case Reserve() | Progress() | Commit() | Abort():
            _owner_said(turn, session.id, message)
        case Flush(rid):
            operators.flush(turn, session.id, rid)
        case Pin(rid, key):
            operators.pin(turn, session.id, rid, key)
        case Unpin(rid, key):
            operators.unpin(turn, session.id, rid, key)
        case Evict():
            operators.evict(turn, session.id, message)
        case Invalidate():
            operators.invalidate(turn, session.id, message)
        case Limit():
            operators.limit(turn, session.id, message)
        case Copied():
            operators.copied(turn, session.id, message)
        case Drain():
            operators.drain(turn, session.id, message)
        case Status(rid):
            turn.send(session.id, Report(rid, status_report(turn.ledger, turn.now_s)))
        case _:
            assert_never(message)


def _owner_said(turn: Turn, sender: SessionId | None, message: FromLoader) -> None:
    """Take what only the ticket's holder may say; from anyone else it changes nothing."""
    generation = lifecycle.owned(turn, sender, message.gen)
    if generation is None:
        return
    match message:
        case Reserve():
            admission.reserve(turn, generation, message)
        case Progress():
            lifecycle.progress(turn, generation, message)
        case Commit():
            lifecycle.commit(turn, generation)
        case Abort():
            lifecycle.abort(turn, generation, message)
        case _:
            assert_never(message)


def _performed(
    turn: Turn, event: LoaderEnded | Backed | BackingRefused | Sealed | SealRefused
) -> None:
    """Take the outcome of an effect. For a generation that is past running, it is history."""
    generation = turn.ledger.running.get(event.gen)
    if generation is None:
        return
    match event:
        case Backed():
            lifecycle.backed(turn, generation)
        case BackingRefused():
            lifecycle.backing_refused(turn, generation, event)
        case Sealed():
            lifecycle.sealed(turn, generation)
        case SealRefused():
            lifecycle.seal_refused(turn, generation, event.reason)
        case LoaderEnded():
            lifecycle.loader_ended(turn, generation, event.reason)
        case _:
            assert_never(event)


def _settle(turn: Turn) -> None:
    """After every event: room for those who wait, and what waited for an end."""
    ledger = turn.ledger
    if not ledger.awaited and (
        ledger.parked or any(pool.short or pool.given_up for pool in ledger.pools.values())
    ):
        admission.admit(turn)
    if ledger.flushes:
        operators.settle_flushes(turn)
    if ledger.invalidations:
        operators.settle_invalidations(turn)
    operators.settle_drain(turn)
