"""Who gets tensors finds them mapped: in huge pages, or all small ones at once."""

from __future__ import annotations

import gc
import os

import pytest
import torch

import gpu_worker
from shm_store.layout import HUGE_PAGE_BYTES
from tests import huge_pages
from tests.gpu_worker.served import wait_until
from tests.processes import running

pytestmark = pytest.mark.process

SIDE = 1200
SIZE_BYTES = 3 * HUGE_PAGE_BYTES
"""Of a segment with a matrix of so many float32, squared."""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    with running(str(tmp_path_factory.mktemp("small") / "s"), "--no-huge-pages") as started:
        yield started


@pytest.fixture
def on_small(small):
    worker = gpu_worker.attach(small.socket)
    yield worker
    worker.shutdown()


def matrix() -> dict[str, torch.Tensor]:
    return {"weight": torch.ones(SIDE, SIDE), "bias": torch.ones(SIDE)}


def skeleton() -> torch.nn.Linear:
    return torch.nn.Linear(SIDE, SIDE)


def mapped(gen: str) -> tuple[int, int]:
    return huge_pages.mapped_bytes(os.getpid(), gen)


def test_a_state_dict_in_huge_pages_is_read_in_huge_pages(worker, operator, key):
    """Kernel truth: this process's own private map has them, also of what was attached before."""
    huge_pages.require()
    state = worker.state_dict(key, build=matrix)
    wait_until(lambda: operator.generation(key).huge_bytes)
    gen = operator.generation(key).generation
    assert float(state["weight"].sum()) == SIDE * SIDE
    assert mapped(gen) == (SIZE_BYTES, SIZE_BYTES)
    del state
    worker.flush(20)
    assert mapped(gen) == (0, 0)
    state = worker.state_dict(key, build=matrix)
    # The manifest was read, and one page was looked at.
    assert mapped(gen) == (2 * HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES)
    assert float(state["weight"].sum()) == SIDE * SIDE
    assert mapped(gen) == (SIZE_BYTES, SIZE_BYTES)


def test_a_state_dict_in_small_pages_has_all_of_them_mapped(on_small, key):
    gc.collect()  # what other tests have left mapped is to be no more, or to stay
    others, huge = mapped("")
    with_tensors = on_small.state_dict(key, build=matrix)
    assert mapped("") == (others + SIZE_BYTES, huge)
    assert float(with_tensors["bias"].sum()) == SIDE


def test_that_is_done_once_for_each_map(on_small, key, monkeypatch):
    """Asking again while tensors live costs a request, and no walk over all pages."""
    walks = []
    monkeypatch.setattr("gpu_worker.mapping.fault_in", lambda *where: walks.append(where))
    first = on_small.state_dict(key, build=matrix)
    second = on_small.state_dict(key, build=matrix)
    assert len(walks) == 1
    del first, second
    on_small.flush(20)
    on_small.state_dict(key, build=matrix)
    assert len(walks) == 2


@pytest.mark.parametrize(("device", "share"), [("cpu", 1.0), ("sim:0", 0.1)])
def test_a_module_has_them_mapped_where_it_runs_on_them(small, key, device, share):
    """On a device nobody reads the map: what is brought there is read through the fd."""
    gc.collect()
    others, _ = mapped("0")  # a generation's id; blocks of the device have other names
    worker = gpu_worker.attach(small.socket, device=device)
    handle = worker.load(key, skeleton=skeleton, build=matrix)
    there = mapped("0")[0] - others
    assert (there == SIZE_BYTES) == (share == 1.0)
    assert there <= share * SIZE_BYTES
    del handle
    worker.shutdown()
