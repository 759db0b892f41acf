"""Breadth first through every state of a world, and what is checked on the way.

Safety is checked in each state. Progress is checked at the end, on the graph: no thread may wait
for ever while every actor that could do something does so now and then (weak fairness). A state in
which nothing can happen any more is the simplest such case.
"""

from __future__ import annotations

import hashlib
import marshal
import time
from collections import deque
from dataclasses import dataclass, field

from coordinator.ledger.invariants import violations
from tests.exploration.canonical import canonical
from tests.exploration.model import System
from tests.exploration.parts import FAULTS, Action, World


@dataclass
class Explored:
    """What was found in a world."""

    world: str
    states: int
    transitions: int
    seconds: float
    problem: str = ""
    path: list[Action] = field(default_factory=list)
    whole: bool = True


@dataclass
class _Graph:
    parents: list[tuple[int, Action] | None] = field(default_factory=list)
    edges: list[list[tuple[int, Action]]] = field(default_factory=list)
    waiting: list[frozenset[tuple[int, int]]] = field(default_factory=list)

    def path(self, state: int) -> list[Action]:
        found: list[Action] = []
        step = self.parents[state]
        while step is not None:
            state, action = step
            found.append(action)
            step = self.parents[state]
        return found[::-1]


def explore(world: World, limit: int = 10**9) -> Explored:
    """Visit every state of `world`, or the first `limit` of them; stop at the first violation."""
    started_s = time.perf_counter()
    first = System(world)
    graph = _Graph([None], [[]], [frozenset(first.waiting())])
    numbers = {_digest(first): 0}
    frontier = deque([(0, first.image())])
    transitions = 0

    def result(problem: str = "", path: list[Action] | None = None) -> Explored:
        seconds = time.perf_counter() - started_s
        whole = not frontier and not problem
        return Explored(world.name, len(numbers), transitions, seconds, problem, path or [], whole)

    while frontier and len(numbers) < limit:
        number, image = frontier.popleft()
        for action in System.of(image, world).actions():
            successor = System.of(image, world)
            transitions += 1
            try:
                successor.perform(action)
                problems = violations(successor.host.ledger) + successor.violations()
            except AssertionError as error:
                problems = [f"{type(error).__name__}: {error}"]
            if problems:
                return result("; ".join(problems), [*graph.path(number), action])
            key = _digest(successor)
            known = numbers.get(key)
            if known is None:
                known = numbers[key] = len(numbers)
                graph.parents.append((number, action))
                graph.edges.append([])
                graph.waiting.append(frozenset(successor.waiting()))
                frontier.append((known, successor.image()))
            graph.edges[number].append((known, action))
    if not frontier:
        stuck = _waits_for_ever(graph, world.stuck)
        if stuck is not None:
            state, thread = stuck
            return result(f"thread {thread} may wait for ever", graph.path(state))
    return result()


def _digest(system: System) -> bytes:
    """Return a state in 16 bytes: a million of them fit into memory."""
    # Version 2 of the format knows no references, so that equal tuples give equal bytes.
    return hashlib.blake2b(marshal.dumps(canonical(system), 2), digest_size=16).digest()


def replay(world: World, path: list[Action]) -> System:
    """Return the system after `path`. To look at what went wrong."""
    system = System(world)
    for action in path:
        system.perform(action)
    return system


def _actor(action: Action) -> tuple[object, ...]:
    """Return who takes `action`: each must be given its turn."""
    return action[:3] if action[0] in ("thread", "job", "loader") else action[:2]


def _waits_for_ever(
    graph: _Graph, excused: frozenset[tuple[int, int]]
) -> tuple[int, tuple[int, int]] | None:
    """Return a state from which a thread may wait for ever though everybody else goes on."""
    threads = {thread for waiting in graph.waiting for thread in waiting}
    for thread in sorted(threads - excused):
        states = [n for n, waiting in enumerate(graph.waiting) if thread in waiting]
        inside = set(states)
        for component in _components(graph, states, inside):
            if _fair(graph, component):
                return min(component), thread
    return None


def _fair(graph: _Graph, component: set[int]) -> bool:
    """Say whether a run may stay in `component` for ever without starving any actor."""
    moves: set[tuple[object, ...]] = set()
    always: set[tuple[object, ...]] | None = None
    for state in component:
        able = set()
        for successor, action in graph.edges[state]:
            if action[0] in FAULTS:
                continue
            able.add(_actor(action))
            if successor in component:
                moves.add(_actor(action))
        always = able if always is None else always & able
    if len(component) == 1 and not moves and always:
        return False
    return (always or set()) <= moves


def _components(graph: _Graph, states: list[int], inside: set[int]) -> list[set[int]]:
    """Return the strongly connected components without faults (Tarjan, without recursion)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    on_stack: set[int] = set()
    stack: list[int] = []
    components: list[set[int]] = []
    for root in states:
        if root in index:
            continue
        work = [(root, iter(_successors(graph, root, inside)))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            state, successors = work[-1]
            for successor in successors:
                if successor not in index:
                    index[successor] = low[successor] = len(index)
                    stack.append(successor)
                    on_stack.add(successor)
                    work.append((successor, iter(_successors(graph, successor, inside))))
                    break
                if successor in on_stack:
                    low[state] = min(low[state], index[successor])
            else:
                work.pop()
                if work:
                    parent = work[-1][0]
                    low[parent] = min(low[parent], low[state])
                if low[state] == index[state]:
                    component = set()
                    while True:
                        member = stack.pop()
                        on_stack.discard(member)
                        component.add(member)
                        if member == state:
                            break
                    components.append(component)
    return components


def _successors(graph: _Graph, state: int, inside: set[int]) -> list[int]:
    return [s for s, action in graph.edges[state] if s in inside and action[0] not in FAULTS]
