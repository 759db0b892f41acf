"""Seeded random walks over the ledger: any event in any order, every invariant after each.

The exhaustive exploration of small worlds comes with the lifecycle; this walk is what keeps the
first cut honest. A failing seed is printed, and kept below once it has taught something.
"""

from __future__ import annotations

import random

import pytest

from coordinator.ledger.events import (
    Back,
    Backed,
    BackingRefused,
    Disconnected,
    Free,
    Freed,
    LoaderEnded,
    LoaderSaid,
    Said,
    Seal,
    Sealed,
    SealRefused,
    Send,
    SessionEnded,
    StartLoader,
    TimePassed,
)
from shm_store.wire import (
    Abort,
    Acquire,
    Cancel,
    Commit,
    Evict,
    Fail,
    Flush,
    Grant,
    Pin,
    Progress,
    Release,
    Reserve,
    Ticket,
    Unpin,
)
from tests.coordinator.ledger_world import World

KEYS = ("a", "b", "c")
FILES = ("f1", "f2")
SESSIONS_LIMIT = 12


class Walk:
    """One random life of a coordinator with three workers at a time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = World(limit_bytes=250)
        self.live: list[int] = []
        self.sessions = 0
        self.jobs: list = []
        self.seen = 0
        self.asked: dict[tuple[int, int], int] = {}
        self.leases: list[tuple[int, str, int]] = []
        self.tickets: list[tuple[int | None, str]] = []

    def step(self) -> None:
        if len(self.live) < 3 and self.sessions < SESSIONS_LIMIT:
            self.sessions += 1
            self.world.attach(self.sessions)
            self.live.append(self.sessions)
        moves = [self.ask, self.ask, self.own, self.own, self.release, self.perform, self.perform]
        moves += [self.cancel, self.operate, self.leave, self.pass_time, self.lie]
        self.random.choice(moves)()
        self.notice()

    def notice(self) -> None:
        """Take in what the ledger wanted done."""
        for effect in self.world.log[self.seen :]:
            match effect:
                case Send(session, Grant(rid, gen)):
                    self.leases.append((session, gen, rid))
                    self.answered(session, rid)
                case Send(session, Fail(rid)):
                    self.answered(session, rid)
                case Send(session, Ticket(_, gen)):
                    self.tickets.append((session, gen))
                case StartLoader(gen):
                    self.tickets.append((None, gen))
                case Back() | Seal() | Free():
                    self.jobs.append(effect)
        self.seen = len(self.world.log)

    def answered(self, session: int, rid: int) -> None:
        if (session, rid) in self.asked:
            self.asked[session, rid] += 1
            assert self.asked[session, rid] == 1, "a request was answered twice"

    def ask(self) -> None:
        if not self.live:
            return
        session = self.random.choice(self.live)
        key = self.random.choice(KEYS)
        timeout_s = self.random.choice((1.0, 20.0))
        if self.random.random() < 0.6:
            rid = self.world.load(session, key, self.random.choice(FILES), timeout_s)
        else:
            rid = self.world.build(session, key, self.random.choice(FILES), timeout_s)
        self.asked[session, rid] = 0

    def own(self) -> None:
        """An owner takes a step of its fill, or dies, or fails."""
        if not self.tickets:
            return
        sender, gen = self.random.choice(self.tickets)
        size = self.random.choice((40, 100, 240, 260))
        message = self.random.choice(
            (Reserve(gen, size),) * 2
            + (Commit(gen),) * 2
            + (Progress(gen, size, 260), Abort(gen), None)
        )
        if message is None:
            if sender is None:
                self.tickets.remove((sender, gen))
                self.world.event(LoaderEnded(gen, "was ended"))
        elif sender is None:
            self.world.event(LoaderSaid(gen, message))
        elif sender in self.live:
            self.world.event(Said(sender, message))

    def perform(self) -> None:
        """The executor finishes one of its jobs, well or badly."""
        if not self.jobs:
            return
        job = self.jobs.pop(self.random.randrange(len(self.jobs)))
        bad = self.random.random() < 0.2
        match job:
            case Back(gen):
                self.world.event(BackingRefused(gen, "none") if bad else Backed(gen))
            case Seal(gen):
                self.world.event(SealRefused(gen, "busy") if bad else Sealed(gen))
            case Free(gen):
                self.world.event(Freed(gen))

    def release(self) -> None:
        """Sometimes the right lease, sometimes an old one, sometimes twice."""
        if self.leases:
            session, gen, lease = self.random.choice(self.leases)
            if session in self.live:
                self.world.event(Said(session, Release(gen, lease)))

    def cancel(self) -> None:
        if self.asked:
            session, rid = self.random.choice(list(self.asked))
            if session in self.live:
                self.world.event(Said(session, Cancel(rid)))

    def operate(self) -> None:
        if self.live:
            session = self.random.choice(self.live)
            key = self.random.choice(KEYS)
            rid = self.world.rid(session)
            message = self.random.choice(
                (Pin(rid, key), Unpin(rid, key), Evict(rid, key), Evict(rid), Flush(rid))
            )
            self.world.event(Said(session, message))

    def leave(self) -> None:
        if self.live and self.random.random() < 0.3:
            session = self.random.choice(self.live)
            self.live.remove(session)
            if self.random.random() < 0.5:
                self.world.event(Disconnected(session))
            if self.random.random() < 0.8:
                self.world.event(SessionEnded(session))

    def pass_time(self) -> None:
        self.world.now_s += self.random.choice((0.1, 0.9, 30.0))
        self.world.event(TimePassed())

    def lie(self) -> None:
        """A peer speaks for generations and requests it has nothing to do with."""
        if self.live and self.world.ledger.generations:
            session = self.random.choice(self.live)
            gen = self.random.choice(list(self.world.ledger.generations))
            message = self.random.choice(
                (
                    Reserve(gen, 10),
                    Progress(gen, 10, 20),
                    Commit(gen),
                    Abort(gen),
                    Release(gen, 1),
                    Cancel(1),
                )
            )
            self.world.event(Said(session, message))
            replayed = self.world.rids[session]
            self.world.event(Said(session, Acquire(replayed, "a", None, "", 1.0)))

    def quieten(self) -> None:
        """Faults stop, owners give up, time passes: everyone still here must have an answer."""
        for _ in range(4 * len(KEYS)):
            for sender, gen in list(self.tickets):
                if sender is None:
                    self.world.event(LoaderEnded(gen, "was ended"))
                elif sender in self.live:
                    self.world.event(Said(sender, Abort(gen)))
            self.finish_jobs()
            self.world.now_s += 1000.0
            self.world.event(TimePassed())
            self.finish_jobs()
        unanswered = [
            request
            for request, count in self.asked.items()
            if count == 0 and request[0] in self.live
        ]
        assert not unanswered, f"{unanswered} were never answered"

    def settle(self) -> None:
        """Everybody leaves, every job ends: nothing may be left but retained generations."""
        for session in range(1, self.sessions + 1):
            self.world.event(SessionEnded(session))
        self.finish_jobs()
        assert not self.world.ledger.requests and not self.world.ledger.sessions
        left = list(self.world.ledger.generations.values())
        assert all(generation.retained for generation in left), left

    def finish_jobs(self) -> None:
        self.notice()
        while self.jobs:
            self.perform()
            self.notice()


@pytest.mark.sim
@pytest.mark.parametrize("block", range(8))
def test_random_walks_keep_every_invariant_answer_everyone_and_end_empty(block):
    for seed in range(block * 50, block * 50 + 50):
        walk = Walk(seed)
        try:
            for _ in range(250):
                walk.step()
            walk.quieten()
            walk.settle()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
