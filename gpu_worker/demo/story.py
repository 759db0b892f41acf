"""The demo, in order: five acts, each a few steps and the claims that must hold after them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from gpu_worker.demo import kernel
from gpu_worker.demo.checks import (
    check_answers,
    check_books,
    check_gain,
    check_one_copy,
    describe,
    leases,
)
from gpu_worker.demo.claims import Claims
from gpu_worker.demo.figures import Figures, Found, Kill, Replacement, Row
from gpu_worker.demo.lines import Answered, Ask, Finished, Leave, Open, Opened, Way
from gpu_worker.demo.notes import notes, size_text
from gpu_worker.demo.operator import Operator
from gpu_worker.demo.performance import Cast, Performance, close, perform
from gpu_worker.demo.process import Worker
from gpu_worker.demo.sentences import QUERY
from gpu_worker.demo.stage import Stage

GONE_LIMIT_S = 10.0
DRAIN_LIMIT_S = 10.0
SHOWN = 3
"""How many sentences of the ranking are told."""

MINILM = "minilm"


class Teller(Protocol):
    """Whoever tells the story while it happens."""

    def title(self, text: str) -> None:
        """The demo begins."""

    def act(self, title: str) -> None:
        """A new act begins."""

    def say(self, text: str) -> None:
        """Something was seen."""

    def table(self, rows: Sequence[Row], notes: Sequence[str]) -> None:
        """The figures of both ways are there."""


class Story:
    """One telling: who hears it, what it claims and what it measures."""

    def __init__(self, stage: Stage, teller: Teller, claims: Claims, figures: Figures) -> None:
        self._stage = stage
        self._teller = teller
        self._claims = claims
        self._figures = figures
        self._generations: set[str] = set()

    def tell(self) -> None:
        """Run the whole demo.

        Raises:
            DemoFailed, WeightCacheError: it cannot go on.
        """
        self._teller.title(
            "Two processes answer with all-MiniLM-L6-v2, a real model, out of one copy of its "
            "weights. Each PASS was checked, mostly by asking the kernel."
        )
        self._teller.act("A coordinator and two workers")
        cast = self._assemble()
        with cast.operator:
            self._teller.act("Both workers answer from one copy of the weights")
            shared = self._share(cast)
            self._teller.act("One worker is killed, and replaced")
            cast = self._replace(cast, shared)
            self._teller.act("With weight-cache and without")
            self._convert(cast)
            self._teller.act("Everything is given back")
            self._give_back(cast)
            self._check_end(cast)

    # --- act 1 ----------------------------------------------------------------------------------

    def _assemble(self) -> Cast:
        coordinator = self._stage.start_coordinator()
        ready_s = coordinator.await_ready()
        self._figures.coordinator_ready_s = ready_s
        self._teller.say(
            f"The coordinator (pid {coordinator.pid}) is ready {ready_s:.2f} s after its start."
        )
        workers = self._stage.start_worker("worker A"), self._stage.start_worker("worker B")
        self._figures.checkpoint_bytes = self._stage.write_files()
        imports_s = max(worker.await_ready() for worker in workers)
        self._teller.say(
            f"Worker A (pid {workers[0].pid}) and worker B (pid {workers[1].pid}) have imported "
            f"torch and transformers after {imports_s:.1f} s."
        )
        operator = Operator(self._stage.socket)
        held = operator.status().generations
        segments = kernel.open_segments(coordinator.pid)
        self._claims.check(
            "at the start ledger and kernel agree that there is nothing",
            not held and not segments,
            f"{describe(held)}, {len(segments)} memfds",
        )
        return Cast(coordinator, operator, workers)

    # --- act 2 ----------------------------------------------------------------------------------

    def _share(self, cast: Cast) -> Performance:
        # The plain way comes first: the processes have then never been attached.
        plain = perform(cast, MINILM, "plain")
        close(cast)
        shared = perform(cast, MINILM, "shared")
        self._figures.query = QUERY
        self._figures.found = tuple(Found(*found) for found in shared.answered.ranking)
        self._teller.say(f'Worker A searches {len(self._figures.found)} sentences for "{QUERY}"')
        for found in self._figures.found[:SHOWN]:
            self._teller.say(f"  {found.score:.3f}  {found.sentence}")
        first, second = shared.row("").ready_s
        self._teller.say(
            f"Its model was ready in {first:.3f} s, with the weights read from the file; that of "
            f"worker B in {second:.3f} s, with the weights that were there."
        )
        check_answers(self._claims, plain, shared)
        check_one_copy(self._claims, cast, shared)
        self._record("MiniLM, as stored", plain, shared)
        return shared

    # --- act 3 ----------------------------------------------------------------------------------

    def _replace(self, cast: Cast, shared: Performance) -> Cast:
        victim, survivor = cast.workers
        segments = kernel.open_segments(cast.coordinator.pid)
        self._kill(cast.operator, victim)
        left = cast.operator.generations(MINILM)
        self._claims.check(
            "the lease of the killed worker is gone, and nothing else has changed",
            [held.generation for held in left] == [shared.generation]
            and leases(left) == [survivor.pid]
            and kernel.open_segments(cast.coordinator.pid) == segments,
            describe(left),
        )
        self._check_answer("the other worker answers on, bit-equal", survivor, shared)
        worker = self._stage.start_worker("worker C")
        cast = Cast(cast.coordinator, cast.operator, (survivor, worker))
        opened = self._bring_up(worker)
        now = cast.operator.generations(MINILM)
        self._claims.check(
            "the replacement has the same generation: nothing was read a second time",
            opened.generation == shared.generation
            and [held.generation for held in now] == [shared.generation]
            and leases(now) == cast.pids
            and kernel.open_segments(cast.coordinator.pid) == segments,
            describe(now),
        )
        self._check_answer("the replacement answers, bit-equal", worker, shared)
        close(cast)
        return cast

    def _kill(self, operator: Operator, victim: Worker) -> None:
        """Kill a worker, and watch its lease in the ledger until it is gone."""
        noticed_s = victim.kill()
        started_s = time.perf_counter()
        while True:
            left = leases(operator.generations(MINILM))
            gone_s = time.perf_counter() - started_s
            if victim.pid not in left or gone_s > GONE_LIMIT_S:
                break
        victim.wait()
        self._figures.kill = Kill(victim.pid, noticed_s, gone_s)
        self._teller.say(
            f"SIGKILL to worker A. The kernel took {noticed_s * 1000:.1f} ms to end the process; "
            f"{gone_s * 1000:.1f} ms later its lease was seen to be gone."
        )

    def _bring_up(self, worker: Worker) -> Opened:
        imports_s = worker.await_ready()
        opened = worker.ask(Open(MINILM, "shared"), Opened)
        answered = worker.ask(Ask(), Answered)
        self._figures.replacement = Replacement(
            worker.pid, imports_s, opened.took_s, opened.took_s + answered.took_s
        )
        self._teller.say(
            f"Worker C (pid {worker.pid}) takes its place. Its imports over ({imports_s:.1f} s), "
            f"it has attached and its model is ready within {opened.took_s:.3f} s."
        )
        return opened

    def _check_answer(self, claim: str, worker: Worker, shared: Performance) -> None:
        answered = worker.ask(Ask(), Answered)
        self._claims.check(
            claim,
            answered.digest == shared.answered.digest,
            f"sha256 {answered.digest[:12]} beside {shared.answered.digest[:12]}",
        )

    # --- act 4 ----------------------------------------------------------------------------------

    def _convert(self, cast: Cast) -> None:
        """Fill in the rest of the table: weights that are converted when they are loaded."""
        done: dict[Way, Performance] = {}
        for key, weights, order in self._conversions():
            for way in order:
                done[way] = perform(cast, key, way)
                if way == "shared":
                    check_one_copy(self._claims, cast, done[way])
                close(cast)
            check_answers(self._claims, done["plain"], done["shared"])
            check_gain(self._claims, done["plain"], done["shared"])
            self._record(weights, done["plain"], done["shared"])
        self._figures.notes = notes(self._figures.table)
        self._teller.table(self._figures.table, self._figures.notes)

    def _conversions(self) -> tuple[tuple[str, str, tuple[Way, Way]], ...]:
        """Return what is converted, what the table calls it, and which way comes first."""
        size = size_text(self._figures.checkpoint_bytes)
        return (
            ("minilm:bf16", "MiniLM, to bf16", ("shared", "plain")),
            ("generated:bf16", f"{size} fp32, to bf16", ("plain", "shared")),
        )

    def _record(self, weights: str, plain: Performance, shared: Performance) -> None:
        self._figures.table += [shared.row(weights), plain.row(weights)]
        self._generations.add(shared.generation)

    # --- act 5 ----------------------------------------------------------------------------------

    def _give_back(self, cast: Cast) -> None:
        for worker in cast.workers:
            worker.ask(Leave(), Finished)
        left = cast.operator.status()
        retained_bytes = sum(pool.retained_bytes for pool in left.pools)
        self._claims.check(
            "the workers have shut down: no lease is left, the weights are retained",
            not leases(left.generations)
            and retained_bytes == sum(pool.in_use_bytes for pool in left.pools),
            f"{describe(left.generations)}; {retained_bytes} bytes retained",
        )
        check_books(self._claims, cast, "retained")
        cast.operator.evict_idle()
        in_use_bytes = sum(pool.in_use_bytes for pool in cast.operator.status().pools)
        segments = kernel.open_segments(cast.coordinator.pid)
        self._claims.check(
            "after evicting them ledger and kernel agree that there is nothing",
            in_use_bytes == 0 and not segments,
            f"{in_use_bytes} bytes, {len(segments)} memfds",
        )
        cast.operator.drain(DRAIN_LIMIT_S)

    def _check_end(self, cast: Cast) -> None:
        code = cast.coordinator.wait()
        self._claims.check("drained, the coordinator ends with exit code 0", code == 0, f"{code}")
        # The workers still run: what they have kept would show.
        holders = kernel.holders(self._generations)
        self._claims.check(
            "no process on this host has a segment open or mapped",
            not holders,
            f"{len(self._generations)} generations, held by {holders}",
        )
        for worker in cast.workers:
            worker.hang_up()
        codes = [worker.wait() for worker in cast.workers]
        complaints = "".join(worker.complaints() for worker in cast.workers)
        self._claims.check(
            "the workers end with exit code 0 and have complained of nothing",
            not any(codes) and not complaints,
            f"exit codes {codes}, {complaints[-500:]!r}",
        )
