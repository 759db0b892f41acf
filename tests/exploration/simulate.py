"""Bigger worlds than can be explored whole, drawn and driven by a seed.

Each seed draws sessions, threads, programs, sizes, limits and faults, and takes random steps, with
everything checked after each. Then faults stop and everybody finishes: nobody may wait for ever,
and once all have let go nothing may be held.

    python -m tests.exploration.simulate --seeds 10000
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from coordinator.ledger.invariants import violations
from coordinator.ledger.state import State
from tests.exploration.model import System
from tests.exploration.parts import FAULTS, Action, Op, Program, Violation, World

STEPS_WITH_FAULTS = 200
STEPS_TO_FINISH = 20_000


def drawn(seed: int, chance: random.Random) -> World:
    """Return a random world. Programs end, and end what they began.

    In every third, those who lose the connection come back, and coordinators may die. In every
    fifth, modules come to a device, and in every fifth to memory there that all processes share.
    """
    keys = "abcdef"[: chance.randint(1, 6)]
    pools = {"ram": 100, "vram": 100}
    programs = tuple(
        tuple(_program(chance, keys) for _ in range(chance.randint(1, 3)))
        for _ in range(chance.randint(1, 6))
    )
    if seed % 5 == 1:
        programs = _on_device(programs, random.Random(-1 - seed))
    names = sorted(FAULTS - {"crash", "impatient", "fork"})
    faults = {name: chance.randint(1, 3) for name in names if chance.random() < 0.4}
    slow = frozenset(job for job in ("back", "seal", "free", "load") if chance.random() < 0.7)
    sizes = {key: chance.randint(1, 11) * 10 for key in keys}
    if seed % 5 == 2:
        programs = _shared(programs, sizes, random.Random(-1 - seed))
    if seed % 3:
        return World("drawn", programs, sizes, pools, slow, faults)
    more = random.Random(-seed)  # of its own, so that the other seeds stay what they were
    faults |= {
        name: more.randint(1, 3) for name in ("crash", "impatient", "fork") if more.random() < 0.7
    }
    store = more.random() < 0.5
    return World("drawn", programs, sizes, pools, slow, faults, resumes=True, store=store)


def _on_device(
    programs: tuple[tuple[Program, ...], ...], more: random.Random
) -> tuple[tuple[Program, ...], ...]:
    """Have threads lock a module on a device now and then, where it stays."""
    return tuple(
        tuple(
            Program((*_locks(more), *program.ops, *_locks(more)))
            if more.random() < 0.7
            else program
            for program in threads
        )
        for threads in programs
    )


def _shared(
    programs: tuple[tuple[Program, ...], ...], sizes: dict[str, int], more: random.Random
) -> tuple[tuple[Program, ...], ...]:
    """Have threads lock what they hold on a device, and more, and let go of it in the end."""
    return tuple(
        tuple(_sharing(program, sizes, more) for program in threads) for threads in programs
    )


def _sharing(program: Program, sizes: dict[str, int], more: random.Random) -> Program:
    ops: list[Op] = []
    for op in program.ops:
        if op.what == "hold":
            ops += [op, *_locks_shared(op.key, sizes)]
        elif op.what == "use" and more.random() < 0.5:
            held = Op("hold", op.key, op.fingerprint, op.build)
            ops += [held, *_locks_shared(op.key, sizes) * more.randint(1, 2), Op("end", op.key)]
        else:
            ops.append(op)
    return Program(tuple(ops))


def _locks_shared(key: str, sizes: dict[str, int]) -> list[Op]:
    return [Op("lock", key, pool="vram", size=sizes[key], shared=True), Op("unlock", key)]


def _locks(more: random.Random) -> list[Op]:
    key, size = more.choice("xyz"), more.randint(1, 9) * 10
    return [Op("lock", key, pool="vram", size=size), Op("unlock", key)]


def _program(chance: random.Random, keys: str) -> Program:
    ops: list[Op] = []
    for _ in range(chance.randint(1, 5)):
        key = chance.choice(keys)
        fingerprint = chance.choice(["", "", "", "v2"])
        build = chance.random() < 0.3
        kind = chance.choice(["use", "use", "use", "nested", "state", "charge", "other"])
        if kind == "use":
            ops.append(Op("use", key, fingerprint, build))
        elif kind == "nested":
            inner = chance.choice(keys)
            held = [Op("hold", key, fingerprint, build), Op("end", key)]
            ops += [held[0], *([Op("use", inner)] if inner != key else []), held[1]]
        elif kind == "state":
            ops += [Op("state", key, fingerprint, build), Op("drop", key)]
        elif kind == "charge":
            pool = chance.choice(["ram", "vram"])
            ops += [Op("charge", pool=pool, size=chance.randint(1, 9) * 10), Op("uncharge")]
        else:
            ops.append(_other(chance, key))
    return Program(tuple(ops))


def _other(chance: random.Random, key: str) -> Op:
    what = chance.choice(
        ["evict", "evict_all", "invalidate", "limit", "pin", "unpin", "prefetch", "shutdown"]
    )
    return Op(what, key, size=chance.choice([50, 100, 150]))


def simulate(seed: int) -> tuple[int, list[Action], str]:
    """Run one seed. Return how many steps it took, which, and what went wrong, if anything did."""
    chance = random.Random(seed)
    system = System(drawn(seed, chance))
    taken: list[Action] = []

    def step(action: Action) -> None:
        taken.append(action)
        system.perform(action)
        problems = violations(system.host.ledger) + system.violations()
        if problems:
            raise Violation("; ".join(problems))

    try:
        for _ in range(STEPS_WITH_FAULTS):
            actions = system.actions()
            if not actions:
                break
            step(chance.choice(actions))
        _finish(system, chance, step)
    except AssertionError as error:
        return len(taken), taken, f"{type(error).__name__}: {error}"
    return len(taken), taken, ""


def _finish(system: System, chance: random.Random, step) -> None:
    """Without faults everybody comes to an end, at the latest by a deadline; nothing is left."""
    for name in system.faults:
        system.faults[name] = 0
    for _ in range(STEPS_TO_FINISH):
        actions = system.actions()
        if not actions:
            # Users may wait for each other: then the coordinator ends it.
            system.faults = {"overdue": 1, "deadline": 1}
            actions = system.actions()
            if not actions:
                break
            step(actions[0])
            system.faults = dict.fromkeys(system.faults, 0)
            continue
        step(chance.choice(actions))
    else:
        raise Violation("it never ends")
    left = [thread.phase for w in system.workers if w.alive for thread in w.threads]
    if any(phase != "over" for phase in left):
        raise Violation(f"somebody waits for ever: {left}")
    for worker in system.workers:
        if worker.alive:
            worker.records.close()
            worker.collect()
            for thread, resident in worker._residents():
                thread.offload(resident)
    while actions := system.actions():
        step(chance.choice(actions))
    ledger = system.host.ledger
    if ledger.requests or ledger.running or ledger.invalidations:
        lost = {s for s, worker in enumerate(system.workers) if not worker.connected}
        if not _owned_only_by(system, lost):
            raise Violation("something is still under way")
    for session, worker in enumerate(system.workers):
        known = ledger.sessions.get(session)
        if known is not None and worker.connected and known.leases:
            raise Violation(f"{session} has let everything go, and leases {list(known.leases)}")


def _owned_only_by(system: System, lost: set[int]) -> bool:
    """Say whether what runs belongs to processes that live and have lost their connection."""
    ledger = system.host.ledger
    return not ledger.requests and all(
        generation.state is State.FILLING and getattr(generation.owner, "session", None) in lost
        for generation in ledger.running.values()
    )


def main() -> int:
    """Run seeds in all cores; print what failed, and with which seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first")
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    started_s = time.perf_counter()
    steps, failed = 0, []
    with ProcessPoolExecutor(os.cpu_count()) as processes:
        for seed, (count, _, problem) in zip(
            seeds, processes.map(simulate, seeds, chunksize=50), strict=True
        ):
            steps += count
            if problem:
                failed.append(seed)
                print(f"seed {seed}: {problem}")
    seconds = time.perf_counter() - started_s
    print(f"{len(seeds)} seeds, {steps} steps, {len(failed)} failed, {seconds:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
