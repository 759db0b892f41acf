"""`progress=`: every way to wait for a fill hears how far it is, and so does everybody else."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gpu_worker import fill_meter, publish
from gpu_worker.fill_meter import FillMeter
from shm_store import layout, manifest, segment
from shm_store.wire import Acquire, Commit, Progress
from tests.gpu_worker.served import WAIT_S, skeleton, wait_until
from tests.gpu_worker.spoken import built
from tests.processes import Peer

STEP_BYTES = 4096
STEPS = 4
FIGURES = [(step * STEP_BYTES, STEPS * STEP_BYTES) for step in range(1, STEPS + 1)]


@pytest.fixture
def each_step(monkeypatch):
    """Every step is reported, and they are small."""
    monkeypatch.setattr(fill_meter, "PAUSE_S", 0.0)
    monkeypatch.setattr(publish, "STEP_BYTES", STEP_BYTES)


def weights() -> dict[str, torch.Tensor]:
    return {"w": torch.ones(STEPS * STEP_BYTES, dtype=torch.uint8)}


class Heard(list):
    """What a `progress=` was called with, and in which threads."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        self.append((done_bytes, total_bytes))
        self.threads.add(threading.get_ident())


class TestFillMeter:
    def test_it_reports_every_quarter_second_and_at_the_end(self):
        told, times = [], iter([0.0, 0.1, 0.25, 0.3, 0.49, 0.5, 0.6])
        meter = FillMeter(60, lambda *figures: told.append(figures), lambda: next(times))
        for _ in range(6):
            meter.add(10)
        assert told == [(20, 60), (50, 60)]
        meter.finish()
        assert told == [(20, 60), (50, 60), (60, 60)]

    def test_the_end_is_reported_once_and_nothing_is_said_of_nothing(self):
        told, times = [], iter([0.0, 0.3, 0.0])
        meter = FillMeter(10, lambda *figures: told.append(figures), lambda: next(times))
        meter.add(10)
        meter.finish()
        FillMeter(0, lambda *figures: told.append(figures), lambda: next(times)).finish()
        assert told == [(10, 10)]


def test_who_fills_tells_the_coordinator_before_its_commit(coordinator, client):
    asking = coordinator.call(client.acquire, built(), None, None)
    rid = coordinator.expect(Acquire).rid
    os.close(coordinator.send_space(coordinator.reservation(rid)))
    coordinator.expect(Commit)
    assert coordinator.progress == [Progress(coordinator.gen, 16, 16)]
    coordinator.grant(rid)
    asking.result(WAIT_S)


@pytest.mark.process
class TestBuilder:
    def test_it_hears_each_step_in_its_own_thread(self, each_step, worker, key):
        heard = Heard()
        state = worker.state_dict(key, build=weights, progress=heard)
        assert heard == FIGURES and heard.threads == {threading.get_ident()}
        assert torch.equal(state["w"], weights()["w"]), "in steps, every byte is written"

    def test_a_quick_one_hears_the_end(self, worker, key):
        heard = Heard()
        worker.state_dict(key, build=weights, progress=heard)
        assert heard == FIGURES[-1:]
        worker.state_dict(key, build=weights, progress=heard)
        assert heard == FIGURES[-1:], "what is there already is not filled"

    def test_of_nothing_it_hears_nothing(self, worker, key):
        heard = Heard()
        assert worker.state_dict(key, build=dict, progress=heard) == {} and heard == []

    def test_what_progress_raises_gives_it_up_and_the_next_one_builds(self, worker, operator, key):
        with pytest.raises(ZeroDivisionError):
            worker.state_dict(key, build=weights, progress=lambda done, total: 1 // 0)
        worker.flush()
        assert operator.generation(key) is None
        assert worker.state_dict(key, build=weights)["w"].sum() == STEPS * STEP_BYTES


@pytest.mark.process
class TestWaiter:
    def test_it_hears_how_far_another_thread_builds(self, each_step, worker, operator, key):
        go = threading.Event()

        def build():
            assert go.wait(WAIT_S)
            return weights()

        heard = Heard()
        with ThreadPoolExecutor(2) as threads:
            first = threads.submit(worker.state_dict, key, build=build)
            wait_until(lambda: operator.generation(key))
            second = threads.submit(worker.state_dict, key, build=build, progress=heard)
            wait_until(lambda: operator.generation(key).waiting == 2)
            go.set()
            first.result(WAIT_S), second.result(WAIT_S)
        assert heard and heard == sorted(set(heard)) and set(heard) <= set(FIGURES)
        assert heard[-1] == FIGURES[-1]

    def test_it_hears_how_far_another_thread_loads_the_same_module(self, each_step, worker, key):
        """One of them asks; the other hears of that, and what it raises ends its own wait only."""
        built, go = threading.Event(), threading.Event()

        def build():
            built.set()
            assert go.wait(WAIT_S)
            return skeleton()

        heard = Heard()

        def load(progress):
            return worker.load(key, skeleton=skeleton, build=build, progress=progress)

        with ThreadPoolExecutor(3) as threads:
            first = threads.submit(load, None)
            assert built.wait(WAIT_S)
            second = threads.submit(load, heard)
            third = threads.submit(load, lambda done, total: 1 // 0)
            flights = worker._table._flights
            wait_until(lambda: len(flights._waits) == 2)
            go.set()
            handles = [one.result(WAIT_S) for one in (first, second)]
            assert isinstance(third.exception(WAIT_S), ZeroDivisionError)
        total_bytes = sum(tensor.nbytes for tensor in skeleton().state_dict().values())
        assert heard[-1] == (total_bytes, total_bytes) and heard == sorted(set(heard))
        with handles[0] as module, handles[1] as same:
            assert module is same

    def test_it_hears_what_another_process_says_and_status_shows_that(
        self, served, worker, operator, key
    ):
        """Nothing more, and nothing less: a stranger's word counts neither here nor there."""
        builder, stranger = Peer(served.socket, "builder"), Peer(served.socket, "stranger")
        ticket = builder.ticket(key)
        entry = manifest.TensorEntry("w", "U8", (64,), (1,), 0, 0)
        group = manifest.GroupEntry(0, 64)
        encoded = manifest.encode_manifest(manifest.Manifest((entry,), (group,)))
        heard = Heard()
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(
                worker.state_dict, key, build=weights, timeout=WAIT_S, progress=heard
            )
            wait_until(lambda: operator.generation(key).waiting == 2)
            fd = builder.space(ticket.gen, layout.segment_bytes(len(encoded), 64))
            for done_bytes in (16, 48, 64):
                stranger.send(Progress(ticket.gen, 63, 64))
                stranger.flush()
                builder.send(Progress(ticket.gen, done_bytes, 64))
                builder.flush()
                shown = operator.generation(key)
                assert (shown.fill.done_bytes, shown.fill.total_bytes) == (done_bytes, 64)
                assert shown.filled_bytes == done_bytes and shown.filled_by == os.getpid()
                assert shown.fill.bytes_per_s > 0
            wait_until(lambda: heard[-1:] == [(64, 64)])
            segment.write_at(fd, bytes([1]) * 64, segment.write_manifest(fd, encoded))
            os.close(fd)
            builder.send(Commit(ticket.gen))
            assert waiting.result(WAIT_S)["w"].sum() == 64
        assert heard == [(16, 64), (48, 64), (64, 64)]
        assert operator.generation(key).fill is None
