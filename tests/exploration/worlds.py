"""The worlds that are explored: small, closed, each about one thing."""

from __future__ import annotations

from typing import Any

from tests.exploration.parts import Op, Program, World


def use(key: str, fingerprint: str = "", **facts: Any) -> Op:
    return Op("use", key, fingerprint, **facts)


def op(what: str, key: str = "", **facts: Any) -> Op:
    return Op(what, key, **facts)


def once(*ops: Op) -> Program:
    return Program(ops)


def loop(*ops: Op) -> Program:
    return Program(ops, loops=True)


A, B, C = {"a": 60}, {"a": 60, "b": 60}, {"a": 40, "b": 40, "c": 40}
SLOW = frozenset({"back", "load", "free", "seal"})

SMALL = [
    World("two load the same", ((once(use("a")),), (once(use("a")),)), A, slow=SLOW),
    World(
        "two builders",
        ((once(use("a", build=True)),), (once(use("a", build=True)),)),
        A,
        slow=frozenset({"back"}),
    ),
    World(
        "a builder or its waiter dies",
        ((once(use("a", build=True)),), (once(use("a", build=True)),)),
        A,
        slow=frozenset({"back"}),
        faults={"die": 1},
    ),
    World(
        "a builder loses its connection",
        ((once(use("a", build=True)),), (once(use("a", build=True)),)),
        A,
        slow=frozenset({"back"}),
        faults={"disconnect": 1, "die": 1},
        limits={"ram": 200},
    ),
    World(
        "a holder loses its connection",
        ((once(op("hold", "a"), op("end", "a")),), (once(use("a")),)),
        A,
        faults={"disconnect": 1, "die": 1},
    ),
    World(
        "a loader dies twice",
        ((once(use("a")),), (once(use("a")),)),
        A,
        slow=SLOW,
        faults={"kill": 2},
    ),
    World(
        "one gives up",
        ((once(use("a", build=True)),), (once(use("a", build=True)),)),
        A,
        slow=frozenset({"back", "seal"}),
        faults={"cancel": 2},
    ),
    World(
        "one gives up a source",
        ((once(use("a")),), (once(use("a")),)),
        A,
        slow=SLOW,
        faults={"cancel": 2},
    ),
    World(
        "deadlines",
        ((once(use("a")),), (once(use("b")),)),
        B,
        slow=frozenset({"back", "load"}),
        faults={"deadline": 2},
    ),
    World("a frame comes twice", ((once(use("a")),), (once(use("a")),)), A, faults={"replay": 1}),
    World(
        "tensors and modules of one key",
        ((once(op("state", "a"), op("drop", "a")), once(use("a"))),),
        A,
    ),
    World(
        "asked again while the map lives",
        (
            (
                once(
                    op("state", "a"),
                    op("state", "a"),
                    op("drop", "a"),
                    op("state", "a"),
                    op("drop", "a"),
                ),
            ),
            (once(use("a")),),
        ),
        A,
        slow=frozenset({"free"}),
    ),
    World(
        "sent, and let go of",
        (
            (once(op("state", "a"), op("send", "a"), op("drop", "a")),),
            (once(op("receive", "a"), op("drop", "a")),),
        ),
        A,
        slow=frozenset({"free"}),
    ),
    World(
        "sent, and retired on its way",
        (
            (once(op("state", "a"), op("send", "a"), op("drop", "a")),),
            (once(op("receive", "a"), op("drop", "a")),),
            (once(op("invalidate", "a")),),
        ),
        A,
        slow=frozenset({"free"}),
    ),
    World(
        "sent, while another waits for room",
        (
            (once(op("state", "a"), op("send", "a"), op("drop", "a")),),
            (once(op("receive", "a"), op("drop", "a")),),
            (once(use("b")),),
        ),
        B,
    ),
    World(
        "sent, and one dies",
        (
            (once(op("state", "a"), op("send", "a"), op("drop", "a")),),
            (once(op("receive", "a"), op("drop", "a")),),
        ),
        A,
        faults={"die": 1, "disconnect": 1},
        resumes=True,
    ),
    World(
        "crash: sent",
        (
            (once(op("state", "a"), op("send", "a"), op("drop", "a")),),
            (once(op("receive", "a"), op("drop", "a")),),
        ),
        A,
        faults={"crash": 1},
        resumes=True,
    ),
    World("evict and load", ((once(use("a"), op("evict", "a"), use("a")),), (once(use("a")),)), A),
    World(
        "shutdown in flight",
        ((once(use("a"), use("a")), once(op("shutdown"))), (once(use("a")),)),
        A,
        slow=frozenset({"load"}),
    ),
    World(
        "room for one of two", ((loop(use("a")),), (loop(use("b")),)), B, slow=frozenset({"free"})
    ),
    World("room for one of two, in one process", ((loop(use("a")), loop(use("b"))),), B),
    World("three keys, room for two", ((loop(use("a")),), (loop(use("b")),), (loop(use("c")),)), C),
    World(
        "re-acquirers and a head",
        ((loop(use("a")),), (loop(use("a")),), (once(use("b")),)),
        {"a": 60, "b": 60},
    ),
    World(
        "nested use of two keys that fit",
        ((once(op("hold", "a"), use("b"), op("end", "a")),), (loop(use("c")),)),
        {"a": 40, "b": 40, "c": 60},
    ),
    World(
        "two holders, and a head",
        (
            (once(op("state", "a"), op("drop", "a")),),
            (loop(use("a")),),
            (once(use("b")),),
        ),
        B,
    ),
    World(
        "an idle module beside tensors",
        ((once(use("a"), op("state", "a"), op("drop", "a")),), (once(use("b")),)),
        B,
    ),
    World(
        "one of two holders never lets go",
        ((once(op("hold", "a")),), (loop(use("a")),), (once(use("b")),)),
        B,
        stuck=frozenset({(1, 0), (2, 0)}),
        keeps=frozenset({0}),
    ),
    World(
        "a head waits for its own asker, and a hit does not",
        ((once(op("hold", "a"), use("b"), op("end", "a")),), (once(use("a")),)),
        B,
        stuck=frozenset({(0, 0)}),
    ),
    World(
        "a head waits for its own asker, and what fits does not",
        ((once(op("hold", "a"), use("b"), op("end", "a")),), (once(use("c")),)),
        {"a": 40, "b": 80, "c": 30},
        stuck=frozenset({(0, 0)}),
    ),
    World(
        "a holder asks for what it holds",
        ((once(op("state", "a"), use("a"), op("drop", "a")),), (once(use("b")),)),
        B,
    ),
    World(
        "a holder needs one more",
        ((once(op("hold", "a"), use("c"), op("end", "a")),), (once(use("b")),)),
        {"a": 40, "b": 80, "c": 30},
    ),
    World(
        "a circle through two pools",
        (
            (
                once(
                    op("hold", "a"),
                    op("charge", pool="vram", size=30),
                    op("uncharge"),
                    op("end", "a"),
                ),
            ),
            (once(op("charge", pool="vram", size=50), use("b"), op("uncharge")),),
            (once(op("charge", pool="vram", size=80), op("uncharge")),),
        ),
        {"a": 40, "b": 80},
        limits={"ram": 100, "vram": 100},
    ),
    World(
        "prefetch behind a load",
        ((once(op("prefetch", "a")), once(use("c"))), (once(use("b")),)),
        B | {"c": 60},
    ),
    World(
        "two fingerprints",
        ((once(use("a", "v1", build=True)),), (once(use("a", "v2", build=True)),)),
        {"a": 30},
        slow=frozenset({"seal"}),
    ),
    World(
        "two fingerprints from loaders",
        ((once(use("a", "v1")),), (once(use("a", "v2")),)),
        {"a": 30},
        slow=frozenset({"load"}),
        faults={"kill": 2},
    ),
    World(
        "the file changes",
        ((once(use("a"), op("state", "a"), op("drop", "a")),), (once(use("a")),)),
        {"a": 30},
        slow=frozenset({"load"}),
        faults={"change": 1},
    ),
    World(
        "rolling replacement",
        ((loop(use("a", "v1", build=True)),), (once(use("a", "v2", build=True)),)),
        {"a": 30},
    ),
    World(
        "invalidate",
        (
            (once(op("hold", "a"), op("end", "a"), use("a")),),
            (once(use("a"), op("invalidate", "a"), use("a")),),
        ),
        {"a": 30},
    ),
    World(
        "invalidate a fill",
        ((once(use("a"), use("a")),), (once(op("invalidate", "a")),)),
        {"a": 30},
        slow=frozenset({"load", "seal"}),
    ),
    World(
        "invalidate what makes room",
        (
            (once(op("hold", "a"), op("end", "a")),),
            (once(use("b")),),
            (once(op("invalidate", "a")),),
        ),
        B,
    ),
    World(
        "invalidate, and a holder dies",
        ((once(op("state", "a"), op("drop", "a")),), (once(op("invalidate", "a")),)),
        {"a": 30},
        faults={"die": 1},
    ),
    World(
        "limit lowered",
        ((loop(use("a")),), (once(op("limit", size=30), op("limit", size=100)),)),
        A,
    ),
    World(
        "pins",
        ((loop(use("a")),), (once(op("pin", "a"), use("b"), op("unpin", "a"), use("b")),)),
        {"a": 60, "b": 50},
    ),
    World(
        "nobody answers a revoke",
        ((once(op("state", "a"), op("drop", "a")),), (once(use("b")),), (once(use("c")),)),
        C | {"b": 70},
        faults={"overdue": 2},
    ),
]


LARGE = [
    World(
        "three askers, two fingerprints, slow loaders",
        ((once(use("a", "v1")),), (once(use("a", "v2")),), (once(use("a", "v1")),)),
        {"a": 30},
        slow=frozenset({"load"}),
    ),
    World(
        "builders and waiters die or are lost",
        (
            (once(use("a", build=True)),),
            (once(use("a", build=True)),),
            (once(use("a", build=True)),),
        ),
        {"a": 30},
        slow=frozenset({"back"}),
        faults={"die": 2, "disconnect": 1},
    ),
    World(
        "two threads each, three keys, room for two",
        (
            (once(op("hold", "a"), op("end", "a")), once(use("b"))),
            (once(use("c")), once(use("a"))),
        ),
        C,
    ),
    World(
        "three processes take turns, and let go slowly",
        ((loop(use("a")),), (loop(use("b")),), (loop(use("c")),)),
        C,
        slow=frozenset({"free"}),
    ),
    World(
        "three processes, two threads in one, cancels and deadlines",
        (
            (once(use("a")), once(use("b", build=True))),
            (once(use("b", build=True)),),
            (once(use("a")),),
        ),
        B,
        faults={"cancel": 1, "deadline": 1},
    ),
    World(
        "rolling replacement with two servers",
        (
            (loop(use("a", "v1", build=True)),),
            (loop(use("a", "v1", build=True)),),
            (once(use("a", "v2", build=True)),),
        ),
        {"a": 30},
    ),
    World(
        "two pools, a holder in each, deaths",
        (
            (
                once(
                    op("hold", "a"),
                    op("charge", pool="vram", size=30),
                    op("uncharge"),
                    op("end", "a"),
                ),
            ),
            (once(op("charge", pool="vram", size=50), use("b"), op("uncharge")),),
            (once(op("charge", pool="vram", size=80), op("uncharge")),),
        ),
        {"a": 40, "b": 80},
        limits={"ram": 100, "vram": 100},
        faults={"die": 1},
    ),
    World(
        "invalidate among three, room short",
        (
            (once(op("state", "a"), op("drop", "a"), use("a")),),
            (once(use("a"), op("invalidate", "a")),),
            (once(use("b")),),
        ),
        B,
    ),
]
"""Explored at length by scripts/explore, not in every test run."""


def _on_device(key: str, **facts: Any) -> tuple[Op, Op]:
    """Lock a module on a device that has room for 100 bytes, and unlock it: it stays there."""
    return op("lock", key, pool="vram", **facts), op("unlock", key)


DEVICE = {"ram": 100, "vram": 100}

SMALL += [
    World(
        "two take turns on a device, for ever",
        ((loop(*_on_device("a", size=60)),), (loop(*_on_device("b", size=60)),)),
        B,
        limits=DEVICE,
    ),
    World(
        "three on a device for two, one of which dies there",
        (
            (once(*_on_device("a", size=60), *_on_device("a", size=60)),),
            (once(*_on_device("b", size=40)),),
            (once(*_on_device("b", size=60)),),
        ),
        B,
        limits=DEVICE,
        slow=frozenset({"free"}),
        faults={"die": 1},
    ),
    World(
        "a thread locks more than fits, and is refused at the deadline",
        (
            (once(op("lock", "a", pool="vram", size=60), *_on_device("b", size=60)),),
            (once(*_on_device("b", size=40)),),
        ),
        B,
        limits=DEVICE,
        faults={"deadline": 2, "cancel": 1},
        stuck=frozenset({(0, 0)}),
    ),
    World(
        "a limit is lowered below what is on a device",
        (
            (once(*_on_device("a", size=60), *_on_device("a", size=60)),),
            (once(op("limit", pool="vram", size=50), op("limit", pool="vram", size=100)),),
        ),
        B,
        limits=DEVICE,
    ),
]
"""Modules that come to a device when they are locked, and stay until somebody lacks the room."""


def _shared(key: str, *between: Op, size: int = 60, **facts: Any) -> tuple[Op, ...]:
    """Claim a module, lock it on a device where all processes share its memory, and let go."""
    lock = op("lock", key, pool="vram", size=size, shared=True)
    return (op("hold", key, **facts), lock, *between, op("unlock", key), op("end", key))


SMALL += [
    World(
        "two share a copy on a device",
        ((once(*_shared("a")),), (once(*_shared("a")),)),
        A,
        limits=DEVICE,
        slow=frozenset({"seal"}),
        faults={"unsealed": 1},
    ),
    World(
        "who fills a copy on a device dies, is lost, or gives up",
        ((once(*_shared("a")),), (once(*_shared("a")),)),
        A,
        limits=DEVICE,
        faults={"die": 1, "cancel": 1},
    ),
    World(
        "who fills a copy on a full device loses its connection, and comes back",
        ((once(*_shared("a")),), (once(*_shared("a")),)),
        A,
        limits=DEVICE,
        faults={"disconnect": 1},
        resumes=True,
    ),
    World(
        "two copies take turns on a device, for ever",
        ((loop(*_shared("a")),), (loop(*_shared("b")),)),
        {"a": 30, "b": 30},
        limits=DEVICE,
        slow=frozenset({"free"}),
    ),
    World(
        "a copy on a device, and newer weights",
        (
            (once(*_shared("a", fingerprint="v1", build=True)),),
            (once(op("hold", "a", fingerprint="v2", build=True)),),
        ),
        {"a": 30},
        limits=DEVICE,
    ),
    World(
        "a copy on a device is invalidated",
        ((once(*_shared("a", size=30)),), (once(op("invalidate", "a"), *_shared("a", size=30)),)),
        {"a": 30},
        limits=DEVICE,
    ),
    World(
        "two modules of one process on a device",
        ((once(*_shared("a", size=40)), once(*_shared("a", size=40))),),
        {"a": 30},
        limits=DEVICE,
    ),
]
"""Memory of a device that all processes share."""

LARGE += [
    World(
        "a copy on a device, and a newer one",
        (
            (once(*_shared("a", fingerprint="v1", build=True)),),
            (once(*_shared("a", fingerprint="v2", build=True)),),
        ),
        {"a": 30},
        limits=DEVICE,
    ),
    World(
        "a copy that one process has twice, and another needs the room",
        ((once(*_shared("a", size=40)), once(*_shared("a", size=40))), (once(*_shared("b")),)),
        {"a": 30, "b": 30},
        limits=DEVICE,
    ),
]


def _crash(name: str, *programs: Any, **facts: Any) -> World:
    """A world whose coordinator dies once, at any moment, and whose workers come back."""
    faults = {"crash": 1, **facts.pop("faults", {})}
    sizes = facts.pop("sizes", A)
    return World(name, programs, sizes, faults=faults, resumes=True, **facts)


RESTARTS = [
    _crash(
        "crash: a holder and a loader", (once(op("hold", "a"), op("end", "a")),), (once(use("a")),)
    ),
    _crash(
        "crash without a store",
        (once(op("hold", "a"), op("end", "a")),),
        (once(use("a")),),
        store=False,
    ),
    _crash(
        "crash: two builders",
        (once(use("a", build=True)),),
        (once(use("a", build=True)),),
        slow=frozenset({"back", "seal"}),
    ),
    _crash(
        "crash: tensors that come and go",
        (once(op("state", "a"), op("drop", "a"), op("state", "a"), op("drop", "a")),),
        (once(use("a")),),
        slow=frozenset({"free"}),
    ),
    _crash("crash: room for one of two", (loop(use("a")),), (once(use("b")),), sizes=B),
    _crash(
        "crash: invalidate",
        (once(op("hold", "a"), op("end", "a")),),
        (once(op("invalidate", "a"), use("a")),),
        sizes={"a": 30},
    ),
    _crash(
        "crash without a store: invalidate",
        (once(op("hold", "a"), op("end", "a")),),
        (once(op("invalidate", "a"), use("a")),),
        sizes={"a": 30},
        store=False,
    ),
    _crash(
        "crash: who is awaited dies, or does not come in time",
        (once(op("hold", "a"), op("end", "a")),),
        (once(use("a")),),
        faults={"die": 1, "impatient": 1},
    ),
    _crash(
        "crash: pins and limits",
        (once(op("pin", "a"), use("a")),),
        (once(op("limit", size=90), use("b")),),
        sizes={"a": 50, "b": 60},
        stuck=frozenset({(1, 0)}),
    ),
    _crash(
        "crash: two take turns on a device",
        (once(*_on_device("a", size=60), *_on_device("a", size=60)),),
        (once(*_on_device("b", size=60)),),
        limits=DEVICE,
        sizes=B,
        faults={"die": 1},
        slow=frozenset({"free"}),
    ),
    _crash(
        "crash: a copy on a device",
        (once(*_shared("a")),),
        (once(*_shared("a")),),
        limits=DEVICE,
        slow=frozenset({"seal"}),
    ),
    _crash(
        "crash without a store: a copy on a device",
        (once(*_shared("a")),),
        limits=DEVICE,
        store=False,
    ),
    _crash(
        "crash: charges",
        (once(op("charge", size=60), op("uncharge")),),
        (once(use("a")),),
        sizes={"a": 60},
    ),
    World(
        "a holder forks, and what it has is retired",
        ((once(op("state", "a"), op("drop", "a")),), (once(op("invalidate", "a"), use("a")),)),
        {"a": 30},
        faults={"fork": 1, "die": 1},
        resumes=True,
    ),
    _crash(
        "crash: a holder forks",
        (once(op("state", "a"), op("drop", "a")),),
        (once(use("a")),),
        faults={"fork": 1},
    ),
    World(
        "a builder loses its connection, and comes back",
        ((once(use("a", build=True)),), (once(use("a", build=True)),)),
        A,
        slow=frozenset({"back", "seal"}),
        limits={"ram": 200},
        faults={"disconnect": 1, "die": 1},
        resumes=True,
    ),
    World(
        "a holder loses its connection, and comes back",
        (
            (once(op("state", "a"), op("drop", "a"), op("state", "a"), op("drop", "a")),),
            (once(use("a")),),
        ),
        A,
        slow=frozenset({"free"}),
        faults={"disconnect": 2},
        resumes=True,
    ),
]
"""Coordinators that die, connections that are lost, and forks."""

SMALL += RESTARTS

LARGE += [
    _crash(
        "crash without a store: two builders",
        (once(use("a", build=True)),),
        (once(use("a", build=True)),),
        slow=frozenset({"seal"}),
        store=False,
    ),
    _crash(
        "crash without a store: one of two holders has heard",
        (once(op("hold", "a"), op("end", "a")),),
        (once(use("a"), op("invalidate", "a")),),
        sizes={"a": 30},
        store=False,
    ),
    _crash(
        "crash without a store: two share a copy on a device",
        (once(*_shared("a")),),
        (once(*_shared("a")),),
        limits=DEVICE,
        store=False,
    ),
    _crash(
        "crash: a copy on a device, and newer weights",
        (once(*_shared("a", fingerprint="v1", build=True)),),
        (once(op("hold", "a", fingerprint="v2", build=True)),),
        sizes={"a": 30},
        limits=DEVICE,
    ),
    _crash(
        "crash: two versions",
        (once(use("a", "v1", build=True)),),
        (once(use("a", "v2", build=True)),),
        sizes={"a": 30},
    ),
]
