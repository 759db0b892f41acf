"""New weights of a key, loaded by one process while others serve the old ones."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.gpu_worker.served import wait_until, write
from tests.processes import WAIT_S, children_of

pytestmark = pytest.mark.process

SERVE = """
stop, failed = threading.Event(), []
served = [[] for _ in range(2)]  # by thread: an answer, and how often it came in a row

def serve(told):
    while not stop.is_set():
        try:
            value = answer('m', source=file)
        except BaseException as error:
            failed.append(repr(error))
            raise
        if not told or told[-1][0] != value:
            told.append([value, 0])
        told[-1][1] += 1

threads = [in_thread(lambda told=told: serve(told)) for told in served]
"""

ROUNDS = 4


def stop_child(pid: int, before: set[int]) -> int:
    """Stop the next child beside those of `before`, long before it has done anything. Its pid."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        for child in set(children_of(pid)) - before:
            os.kill(child, signal.SIGSTOP)
            return child
    raise AssertionError("no child was started")


def test_traffic_never_sees_a_gap_while_weights_are_replaced(
    coordinator, operator, start, tmp_path
):
    """Every answer is of the old or the new weights, in this order; at the end there is one copy.

    Old ones are served for as long as the new ones take: their loader is stopped until everybody
    has answered again and again.
    """
    file = write(tmp_path / "w.safetensors", 1.0)
    servers = [start(f"server {number}") for number in range(3)]
    for server in servers:
        server.do(SERVE, file=file)
    other = start("other")

    def latest() -> list[list[float]]:
        return [told[-1] for server in servers for told in server.do("served") if told]

    wait_until(lambda: [value for value, _ in latest()] == [4.0] * 6)
    size_bytes = operator.generation("m").size_bytes
    for value in range(2, ROUNDS + 2):
        write(tmp_path / "w.safetensors", float(value))
        children = set(children_of(coordinator.pid))
        # Which asks, as `load` does not while it has a module.
        other.do("thread = in_thread(lambda: worker.state_dict('m', source=file))", file=file)
        loader = stop_child(coordinator.pid, children)
        before = latest()
        wait_until(
            lambda before=before: all(
                now[1] >= was[1] + 10 for was, now in zip(before, latest(), strict=True)
            )
        )
        assert {served for served, _ in latest()} == {4.0 * (value - 1)}
        os.kill(loader, signal.SIGCONT)
        while {served for served, _ in latest()} != {4.0 * value}:
            states = [g.state for g in operator.status().generations if g.key == "m"]
            assert states.count("ready") == 1, states
        other.do("thread.join(); worker.flush()")
        assert [server.do("failed") for server in servers] == [[], [], []]

    for server in servers:
        server.do("stop.set(); [thread.join() for thread in threads]; worker.flush()")
    expected = [4.0 * value for value in range(1, ROUNDS + 2)]
    for server in servers:
        assert server.do("failed") == []
        for told in server.do("served"):
            assert [value for value, _ in told] == expected
    assert [g.state for g in operator.status().generations] == ["ready"]
    assert operator.status().pools[0].in_use_bytes == size_bytes == coordinator.segment_blocks()
    assert coordinator.audit().leases == 3
    for server in servers:
        assert server.do("held()") == []
    assert operator.status().pools[0].retained_bytes == size_bytes == coordinator.segment_blocks()
    assert coordinator.audit().leases == 0
