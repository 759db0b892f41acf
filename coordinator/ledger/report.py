"""The ledger as figures, for `status` and for the holders in a refusal. Reads only."""

from __future__ import annotations

from coordinator.ledger.state import Generation, Ledger, State
from shm_store.keys import start_id
from shm_store.pace import Pace
from shm_store.report import (
    FillReport,
    GenerationReport,
    LeaseReport,
    PoolReport,
    SessionReport,
    StatusReport,
)


def generation_report(ledger: Ledger, generation: Generation, now_s: float) -> GenerationReport:
    """Return who holds `generation` and what it costs."""
    return GenerationReport(
        key=generation.key,
        generation=generation.id,
        state=generation.state.value,
        size_bytes=generation.charged_bytes,
        pool=generation.pool,
        pinned=ledger.pinned(generation),
        leases=tuple(
            LeaseReport(
                session,
                ledger.sessions[session].pid,
                round(now_s - lease.since_s, 3),
                lease.copied_bytes,
                lease.asked,
            )
            for session, lease in generation.leases.items()
        ),
        filled_bytes=generation.filled_bytes,
        waiting=len(generation.askers),
        filled_by=ledger.owner_pid(generation),
        private=generation.private,
        fixed=generation.fixed,
        fill=_fill_report(generation, now_s) if _comes_further(generation) else None,
    )


def _comes_further(generation: Generation) -> bool:
    """Say whether it is filled, or what is needed to know its size is fetched."""
    fetched = generation.pace is not None and generation.queued_s is None
    return generation.state is State.FILLING or (generation.state is State.OPEN and fetched)


def _fill_report(generation: Generation, now_s: float) -> FillReport:
    """Return how far a fill is. Of one that another coordinator began the beginning is unknown."""
    pace = generation.pace or Pace(generation.progressed_s)
    left_s = pace.left_s(generation.total_bytes, now_s) if generation.total_bytes else None
    return FillReport(
        done_bytes=generation.filled_bytes,
        total_bytes=generation.total_bytes,
        elapsed_s=round(now_s - pace.begun_s, 3),
        bytes_per_s=round(pace.bytes_per_s(now_s)),
        left_s=None if left_s is None else round(left_s, 3),
    )


def silent_text(ledger: Ledger) -> str:
    """Name the processes that have not resumed since this coordinator was started."""
    pids = [str(session.pid) for session in ledger.sessions.values() if session.silent]
    if not pids:
        return "a process that was attached before"
    many = "processes" if len(pids) > 1 else "process"
    return f"{many} {', '.join(pids)}, not heard of since,"


def pool_report(ledger: Ledger, name: str) -> PoolReport:
    """Return what fills a pool, by kind."""
    sums = dict.fromkeys(("leased", "retained", "filling", "retired", "private", "freeing"), 0)
    for generation in ledger.in_pool(name):
        sums[_kind(generation)] += generation.size_bytes
        sums["private"] += sum(lease.copied_bytes for lease in generation.leases.values())
    return PoolReport(
        name=name,
        limit_bytes=ledger.pools[name].limit_bytes,
        in_use_bytes=sum(sums.values()),
        leased_bytes=sums["leased"],
        retained_bytes=sums["retained"],
        filling_bytes=sums["filling"],
        retired_bytes=sums["retired"],
        private_bytes=sums["private"],
        freeing_bytes=sums["freeing"],
    )


def status_report(ledger: Ledger, now_s: float) -> StatusReport:
    """Return the whole ledger. Operators' own connections are not listed as sessions."""
    return StatusReport(
        draining=ledger.draining,
        pools=tuple(pool_report(ledger, name) for name in ledger.pools),
        generations=tuple(
            generation_report(ledger, generation, now_s)
            for generation in ledger.generations.values()
        ),
        sessions=tuple(
            SessionReport(
                session=session.id,
                pid=session.pid,
                name=session.name,
                device=session.device,
                waiting_for=tuple(
                    request.key
                    for request in ledger.requests.values()
                    if request.session == session.id
                ),
                connected=session.connected,
                models=session.models,
            )
            for session in ledger.sessions.values()
            if session.role == "worker"
        ),
        start=start_id(ledger.start_ns),
        pins=tuple(ledger.pins),
    )


def _kind(generation: Generation) -> str:
    match generation.state:
        case State.READY if generation.private:
            return "private"
        case State.READY:
            return "leased" if generation.leases else "retained"
        case State.RETIRED:
            return "retired"
        case State.FREEING:
            return "freeing"
        case _:
            return "filling"
