"""What a worker does with its tensors, as the audit sees it in the kernel."""

from __future__ import annotations

import mmap

import pytest

from tests.gpu_worker.served import skeleton

pytestmark = pytest.mark.process


def in_use_bytes(operator) -> int:
    (pool,) = operator.status().pools
    return pool.in_use_bytes


def test_an_edit_in_place_costs_its_page_until_the_tensors_are_gone(
    served, worker, operator, key, source
):
    """Law 12: books and kernel agree at every step, to the page."""
    before_bytes = in_use_bytes(operator)
    state = worker.state_dict(key, source=source)
    loaded_bytes = in_use_bytes(operator)
    assert float(state["weight"].sum()) == 6.0
    assert served.audit().copied == ()

    state["weight"][0, 0] = 5.0
    (copied,) = served.audit().copied
    assert copied.kernel_bytes == mmap.PAGESIZE
    assert in_use_bytes(operator) == loaded_bytes + mmap.PAGESIZE
    state["weight"][0, 1] = 5.0
    assert served.audit().copied == ()  # the same page

    del state
    worker.flush()
    assert in_use_bytes(operator) == loaded_bytes > before_bytes
    assert served.audit().leases == 0


def test_modules_and_state_dicts_of_one_key_are_one_lease(served, worker, operator, key, source):
    with worker.use(key, skeleton=skeleton, source=source) as module:
        state = worker.state_dict(key, source=source)
        assert module.weight.data_ptr() == state["weight"].data_ptr()
        assert served.audit().leases == 1
