"""How far a load is, seen from everywhere: its loader stops at a byte, and all say that byte."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

import gpu_worker
from shm_store.report import FillReport
from tests.coordinator.command_line import on_terminal, run
from tests.coordinator.held_loaders import NEVER, PROGRAM, HeldLoaders
from tests.gpu_worker.served import wait_until
from tests.processes import WAIT_S, Peer, running, write_safetensors

pytestmark = pytest.mark.process

PART_BYTES, SIZE_BYTES = 512 * 1024, 2 * 1024 * 1024


@pytest.fixture(scope="module")
def loaders(tmp_path_factory):
    held = HeldLoaders(tmp_path_factory.mktemp("d"))
    yield held
    held.close()


@pytest.fixture(scope="module")
def coordinator(loaders, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("s") / "s")
    with running(path, program=PROGRAM, env=loaders.environment) as started:
        yield started


@pytest.fixture
def worker(coordinator):
    worker = gpu_worker.attach(coordinator.socket)
    yield worker
    worker.shutdown()


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    tensors = {"w": ("U8", [SIZE_BYTES], bytes([1]) * SIZE_BYTES)}
    return write_safetensors(tmp_path_factory.mktemp("w") / "w.safetensors", tensors)


def fill_of(operator: Peer, key: str) -> FillReport | None:
    shown = operator.generation(key)
    return None if shown is None else shown.fill


def stops_at(loaders, operator: Peer, key: str, done_bytes: int):
    """Have the next loader stop there; returns it once the coordinator has heard so."""
    loader = loaders.next()
    loader.stop_at(done_bytes)
    wait_until(lambda: (fill := fill_of(operator, key)) and fill.done_bytes == done_bytes)
    return loader


def test_a_prefetch_is_in_status_to_the_byte(coordinator, operator, loaders, worker, weights):
    worker.prefetch("prefetch", source=weights)
    loader = stops_at(loaders, operator, "prefetch", PART_BYTES)
    fill = fill_of(operator, "prefetch")
    assert (fill.done_bytes, fill.total_bytes) == (PART_BYTES, SIZE_BYTES)
    assert fill.left_s is not None and fill.left_s > 0
    assert fill.bytes_per_s > 0

    shown = json.loads(run("status", "--json", "--socket", coordinator.socket).stdout)
    (generation,) = [one for one in shown["generations"] if one["key"] == "prefetch"]
    assert generation["fill"]["done_bytes"] == PART_BYTES
    assert generation["fill"]["total_bytes"] == SIZE_BYTES
    assert generation["fill"]["elapsed_s"] >= fill.elapsed_s

    table = run("status", "--socket", coordinator.socket).stdout
    line = r"prefetch +#\w+ +filling 512\.0 KiB of 2\.0 MiB, \S+ [KMG]?i?B/s, \d+ \w+ left +4"
    assert re.search(line, table), table
    narrow = on_terminal(80, "status", "--socket", coordinator.socket)
    assert all(len(row) <= 80 for row in narrow), narrow
    assert "prefetch" in "".join(narrow) and "512.0 KiB" in "".join(narrow)

    loader.stop_at(NEVER)
    wait_until(lambda: operator.generation("prefetch").state == "ready")
    assert fill_of(operator, "prefetch") is None


def test_who_waits_with_progress_sees_it_grow_up_to_all(operator, loaders, worker, weights):
    heard: list[tuple[int, int]] = []
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(
            worker.state_dict,
            "waits",
            source=weights,
            progress=lambda *figures: heard.append(figures),
        )
        loader = stops_at(loaders, operator, "waits", PART_BYTES)
        wait_until(lambda: heard and heard[-1] == (PART_BYTES, SIZE_BYTES))
        loader.stop_at(NEVER)
        assert waiting.result(WAIT_S)["w"].sum() == SIZE_BYTES
    assert heard == sorted(set(heard)) and heard[-1] == (SIZE_BYTES, SIZE_BYTES)


def test_who_comes_to_a_load_under_way_is_told_at_once(operator, loaders, worker, weights):
    """Though nothing moves any more: the loader stands where it is."""
    worker.prefetch("late", source=weights)
    loader = stops_at(loaders, operator, "late", PART_BYTES)
    heard: list[tuple[int, int]] = []
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(
            worker.state_dict,
            "late",
            source=weights,
            progress=lambda *figures: heard.append(figures),
        )
        wait_until(lambda: heard)
        assert heard == [(PART_BYTES, SIZE_BYTES)]
        loader.stop_at(NEVER)
        waiting.result(WAIT_S)


def test_progress_that_raises_gives_the_load_up_and_another_has_it(
    operator, loaders, worker, weights
):
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(
            worker.state_dict, "raises", source=weights, progress=lambda done, total: 1 // 0
        )
        loader = stops_at(loaders, operator, "raises", PART_BYTES)
        assert isinstance(waiting.exception(WAIT_S), ZeroDivisionError)
        wait_until(lambda: operator.generation("raises").waiting == 0)
        assert operator.generation("raises").leases == ()
        loader.stop_at(NEVER)
        wait_until(lambda: operator.generation("raises").state == "ready")
