"""One tuple for every state that differs only in the numbers that ids happen to have.

Generations are numbered by age, and a session's request ids by order: what is compared about ids is
only ever which is newer. Counters that nothing refers to are left out, or no world would be finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from coordinator.ledger.state import Generation, Ledger, Request
from shm_store.keys import GenerationId
from shm_store.wire import RAM, Acquire, Message
from tests.exploration.model import System
from tests.exploration.parts import Parcel
from tests.exploration.thread import Thread
from tests.exploration.worker import Worker

Names = Callable[[str], int]


def canonical(system: System) -> tuple[Any, ...]:
    """Return the state of `system` as a tuple that equals that of every state like it."""
    host, ledger = system.host, system.host.ledger
    gens = {gen: rank for rank, gen in enumerate(sorted(_generations(system)))}
    ranks = [_ranks(system, session) for session in range(len(system.workers))]
    return (
        _ledger(ledger, gens, ranks),
        tuple(_worker(w, gens, ranks[s]) for s, w in enumerate(system.workers)),
        tuple((kind, gens[gen]) for kind, gen in sorted(host.jobs)),
        tuple((gens[gen], *steps) for gen, steps in sorted(host.loaders.items())),
        tuple(
            (gens[gen], gens.get(made, made))
            for gen, made in host.bytes_from.items()
            if gen in ledger.generations
        ),
        tuple(sorted(host.files.items())),
        tuple(sorted(host.last_asked.items())),
        tuple(system.faults.values()),
        tuple(sorted(gens[gen] for gen in host.sealed if gen in gens)),
        tuple(sorted(gens[gen] for gen in host.store)),
        (host.words.pins, tuple(host.words.limits_bytes.items())),
        tuple(sorted((key, gens[gen]) for key, gen in host.ready.items())),
        tuple(sorted(gens[gen] for gen in host.over if gen in gens)),
        tuple(sorted((gens[gen], size) for gen, size in host.draining.items())),
        tuple(_parcel(parcel, system, gens) for parcel in host.parcels),
    )


def _generations(system: System) -> Iterable[GenerationId]:
    known = set(system.host.ledger.generations) | set(system.host.loaders)
    known |= {gen for _, gen in system.host.jobs} | set(system.host.store)
    known |= set(system.host.draining)
    known |= {parcel.gen for parcel in system.host.parcels}
    known |= set(system.host.ready.values())
    known |= {
        _copied(generation.fingerprint)
        for generation in system.host.ledger.generations.values()
        if generation.pool != RAM and not generation.private
    }
    for worker in system.workers:
        known |= {mapping.gen for mapping in worker.mappings}
        known |= set(worker.table)
        known |= {item[1].gen for item in worker.keeper}
        known |= {request.gen for request in worker.requests.values() if request.gen}
        known |= {m.gen for m in (*worker.to, *worker.out) if hasattr(m, "gen")}
        asked = [m for m in (*worker.out, *worker.said) if isinstance(m, Acquire)]
        known |= {GenerationId(m.version) for m in asked if m.pool != RAM}
        for thread in worker.threads:
            known |= {gen for gen, _ in thread.charges}
            known |= {resident.gen for resident in thread.residents.values()}
            known |= {one.copy_of for one in thread.residents.values() if one.copy_of}
            if thread.gen:
                known.add(thread.gen)
        known |= {record.generation for record in _records(worker)}
    return known


def _parcel(parcel: Parcel, system: System, gens: dict[str, int]) -> tuple[Any, ...]:
    mappings = system.workers[parcel.sender].mappings
    kept = None if parcel.mapping is None else mappings.index(parcel.mapping)
    return gens[parcel.gen], parcel.key, parcel.sender, kept, parcel.taken


def _copied(fingerprint: str) -> GenerationId:
    """Return the generation that memory on a device with this fingerprint is a copy of."""
    return GenerationId(fingerprint.removeprefix("build:"))


def _records(worker: Worker) -> list[Any]:
    records = worker.records
    return [*records._current.values(), *records.used()]


def _ranks(system: System, session: int) -> dict[int, int]:
    """Return the rank of every request id of a session that something still refers to."""
    worker = system.workers[session]
    used = set(worker.requests)
    used |= {mapping.lease for mapping in worker.mappings}
    used |= {m.rid for m in (*worker.to, *worker.out, *worker.said) if hasattr(m, "rid")}
    used |= {m.lease for m in (*worker.to, *worker.out) if hasattr(m, "lease")}
    used |= {item[2] for item in worker.keeper if len(item) > 2}
    used |= {item[1].lease for item in worker.keeper}
    for thread in worker.threads:
        used |= {lease for _, lease in thread.charges}
        used |= {resident.lease for resident in thread.residents.values()}
        used.add(thread.rid)
    ledger = system.host.ledger
    known = ledger.sessions.get(session)
    if known is not None:
        used |= {lease.id for lease in known.leases.values()}
        if worker.said:
            used.add(known.last_rid)
    used |= {rid for owner, rid in ledger.requests if owner == session}
    for generation in ledger.running.values():
        if isinstance(generation.owner, Request) and generation.owner.session == session:
            used.add(generation.owner.rid)
    used |= {w.rid for w in ledger.invalidations if w.session == session}
    used |= {w.rid for w in ledger.drains if w.session == session}
    return {rid: rank for rank, rid in enumerate(sorted(used))}


def _ledger(ledger: Ledger, gens: dict[str, int], ranks: list[dict[int, int]]) -> tuple[Any, ...]:
    return (
        tuple(_generation(g, gens, ranks) for g in ledger.generations.values()),
        tuple((s.id, s.connected, s.silent) for s in ledger.sessions.values()),
        tuple(
            (pool.limit_bytes, tuple(gens[g.id] for g in pool.queue))
            for pool in ledger.pools.values()
        ),
        tuple(ledger.pins),
        tuple(
            (w.session, ranks[w.session][w.rid], tuple(gens[g] for g in w.retired if g in gens))
            for w in ledger.invalidations
        ),
        ledger.draining,
        tuple(ledger.awaited),
    )


def _generation(
    generation: Generation, gens: dict[str, int], ranks: list[dict[int, int]]
) -> tuple[Any, ...]:
    owner = generation.owner
    return (
        gens[generation.id],
        generation.key,
        gens.get(_copied(generation.fingerprint), generation.fingerprint),
        generation.pool,
        generation.state.value,
        (owner.session, ranks[owner.session][owner.rid]) if isinstance(owner, Request) else owner,
        generation.private,
        generation.doomed,
        generation.sealing,
        generation.held,
        min(generation.deaths, 2),
        generation.size_bytes,
        generation.queued_s is not None,
        tuple(
            (session, ranks[session][lease.id], lease.asked, lease.answer)
            for session, lease in generation.leases.items()
        ),
        tuple(
            (request.session, ranks[request.session][request.rid], request.prefetch)
            for request in generation.askers.values()
        ),
    )


def _worker(worker: Worker, gens: dict[str, int], ranks: dict[int, int]) -> tuple[Any, ...]:
    numbers = {id(mapping): number for number, mapping in enumerate(worker.mappings)}
    records = worker.records
    claims = {claim: rank for rank, claim in enumerate(sorted(records._claims))}
    known = {id(record): record for record in _records(worker)}
    order = {identity: number for number, identity in enumerate(known)}
    return (
        worker.alive,
        worker.connected,
        tuple(_thread(t, gens, ranks, numbers, claims) for t in worker.threads),
        tuple(_message(m, gens, ranks) for m in worker.to),
        tuple(_message(m, gens, ranks) for m in worker.out),
        tuple(_message(m, gens, ranks) for m in worker.said),
        tuple(
            (
                ranks[r.rid],
                r.thread,
                gens.get(r.gen or ""),
                r.reserved,
                r.space,
                r.private,
                tuple(gens[g] for g in r.retires if g in gens),
            )
            for r in worker.requests.values()
        ),
        tuple(
            (gens[m.gen], ranks[m.lease], m.asked, m.watched, worker.table.get(m.gen) is m)
            for m in worker.mappings
        ),
        tuple(
            (
                item[0],
                gens[item[1].gen],
                numbers.get(id(item[1])),
                *(ranks[x] if isinstance(x, int) else x for x in item[2:]),
            )
            for item in worker.keeper
        ),
        tuple(sorted(worker.flights.items())),
        records.closed,
        tuple(
            (
                r.key,
                gens[r.generation],
                r.origin.kind,
                r.origin.name,
                numbers.get(id(r.module)),
                r.going,
                r.watched,
            )
            for r in known.values()
        ),
        tuple((key, order[id(record)]) for key, record in sorted(records._current.items())),
        tuple((claims[claim], order[id(record)]) for claim, (record, _) in records._claims.items()),
    )


def _thread(
    thread: Thread,
    gens: dict[str, int],
    ranks: dict[int, int],
    numbers: dict[int, int],
    claims: dict[Any, int],
) -> tuple[Any, ...]:
    return (
        thread.pc,
        thread.phase,
        ranks[thread.rid],
        gens.get(thread.gen or ""),
        numbers.get(id(thread.mapping)),
        thread.parcel is not None and gens[thread.parcel.gen],
        tuple((key, claims.get(claim)) for key, claim in sorted(thread.claims.items())),
        tuple((key, numbers.get(id(m))) for key, m in sorted(thread.kept.items())),
        tuple((gens[gen], ranks[lease]) for gen, lease in thread.charges),
        tuple(
            (
                key,
                gens[one.gen],
                ranks[one.lease],
                one.size,
                gens.get(one.copy_of or ""),
                one.locked,
                one.wanted,
            )
            for key, one in sorted(thread.residents.items())
        ),
    )


def _message(message: Message, gens: dict[str, int], ranks: dict[int, int]) -> tuple[Any, ...]:
    fields: list[Any] = [type(message).__name__]
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if name == "gen":
            value = gens[value]
        elif name in ("rid", "lease"):
            value = ranks[value]
        elif name == "version":
            value = gens.get(value, value)
        elif name in ("cause", "timeout_s", "fingerprint", "reading"):
            continue
        fields.append(value)
    return tuple(fields)
