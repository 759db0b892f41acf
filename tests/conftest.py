"""After every test that passed, the books of each coordinator that runs agree with the kernel."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest

from tests.processes import Coordinator, Peer

if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    # As under nohup: what tests start would inherit it. A handler that does nothing they do not,
    # and these tests still outlive their terminal.
    signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.fixture(autouse=True)
def _audited() -> Iterator[None]:
    """Set up before all others, and so done after they are over: workers have shut down by then.

    A coordinator of the test's own has ended by then; `running` has audited it before.
    """
    yield
    for coordinator in Coordinator.audited:
        coordinator.audit_quiet()
    Peer.close_all()


@pytest.fixture(scope="module", autouse=True)
def _garbage_ends_with_its_module() -> Iterator[None]:
    """Cycles that hold a worker's maps are freed here, not while another module counts its fds."""
    yield
    gc.collect()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Take the failure of a test, in whose frames tensors live on, for the only thing to say."""
    try:
        yield
    except pytest.skip.Exception:
        raise
    except BaseException:
        for coordinator in Coordinator.audited:
            coordinator.unquiet = "its test failed"
        raise
