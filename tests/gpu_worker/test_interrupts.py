"""S23: an exception from outside, at every point of a call where the interpreter lets one in.

A signal handler runs at the start of a function, right after a call, or in a call that waits; a
profiler hears of just these points, so it can raise there, at each in turn. (A tracer also hears of
lines where no handler ever runs, such as the way out of a `with lock`.)
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import pytest
import torch

import gpu_worker
from gpu_worker.flights import Flight, Flights
from shm_store.keys import Key
from shm_store.wire import Done, Evict, Fail
from tests.gpu_worker.on_device import charged, new_device
from tests.gpu_worker.served import WAIT_S, skeleton, wait_until

pytestmark = pytest.mark.process

PACKAGE = os.path.dirname(gpu_worker.__file__)

WAITING = ("acquire", "get", "poll")
"""Calls that an interrupt can end before they have done anything."""

LEFT_LOCKED = ("handle.py", "__exit__", "call")
"""Before the first line of it: nothing of ours could act."""

LEFT_OPEN = (
    ("connection.py", "open", "eventfd"),
    ("sim_device.py", "_memfd", "memfd_create"),
    ("pages.py", "any_own", "open"),
    ("mapping.py", "dup_fd", "dup"),
    ("sim_device.py", "open", "dup"),
)
"""The number of an fd that was made, and that nobody has yet."""


class Interrupter:
    """A profiler that raises KeyboardInterrupt at the nth point in this package."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.place: tuple[str, str, str] | None = None

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or event == "return":
            return
        if event == "call" and code.co_flags & inspect.CO_GENERATOR:
            return  # it is told of the closing of one, too, where nothing can come in
        name = getattr(argument, "__name__", "call")
        if event == "c_call" and name not in WAITING:
            return
        self.left -= 1
        if not self.left:
            self.place = os.path.basename(code.co_filename), code.co_name, name
            raise KeyboardInterrupt


def interrupted(number: int, call: Callable[[], object]) -> tuple[str, str, str] | None:
    """Call, interrupted at the nth point. Returns where that was; None if it has not so many."""
    interrupter = Interrupter(number)
    sys.setprofile(interrupter)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return interrupter.place


def each_point(prepare: Callable[[], Callable[[], object]]) -> Iterator[tuple[str, str, str]]:
    """Interrupt what `prepare` returns at each of its points, and yield after each."""
    number = 0
    while True:
        number += 1
        place = interrupted(number, prepare())
        gc.collect()
        if place is None:
            return
        yield place


def quiet() -> tuple[int, int]:
    """Count this process's fds and threads."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def settle(before: tuple[int, int]) -> None:
    """Wait until what ends by itself has done so."""
    wait_until(lambda: quiet() == before)


@pytest.fixture
def other_thread():
    """Does what this thread could do with a lock that it has leaked."""
    # What there is already would only make each collection slow.
    gc.collect()
    gc.freeze()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(int).result(WAIT_S)
        yield lambda call: threads.submit(call).result(WAIT_S)
    gc.unfreeze()


def load(worker, key, **weights):
    return worker.load(key, skeleton=skeleton, timeout=WAIT_S, **weights)


def use(worker, key, **weights):
    with load(worker, key, **weights) as module:
        assert not module.weight.is_meta


def check_whole(worker, key, other_thread, **weights) -> None:
    """Everything must work, in this thread and in another."""
    use(worker, key, **weights)
    assert not torch.nn.Linear(1, 1).weight.is_meta
    worker.evict(key)
    other_thread(lambda: use(worker, key, **weights))


def state_dict(worker, key, **weights):
    worker.state_dict(key, **weights)


def evict(worker, key, **weights):
    worker.evict(key)


def flush(worker, key, **weights):
    worker.flush()


def shutdown(worker, key, **weights):
    worker.shutdown()


def invalidate(worker, key, **weights):
    worker.invalidate(key)


def prefetch(worker, key, source):
    worker.prefetch(key, source=source)


def use_private(worker, key, **weights):
    use(worker, f"{key} private", build=skeleton, private=True)


@pytest.mark.parametrize(
    ("call", "first", "how"),
    [
        pytest.param(use, None, "source", id="use"),
        pytest.param(use, None, "build", id="use, built"),
        pytest.param(use, load, "source", id="use again"),
        pytest.param(state_dict, None, "source", id="state_dict"),
        pytest.param(state_dict, None, "build", id="state_dict, built"),
        pytest.param(evict, load, "source", id="evict"),
        pytest.param(flush, load, "source", id="flush"),
        pytest.param(shutdown, load, "source", id="shutdown"),
        pytest.param(invalidate, load, "source", id="invalidate"),
        pytest.param(prefetch, None, "source", id="prefetch"),
        pytest.param(use_private, None, "source", id="use, private"),
    ],
)
def test_a_call_leaves_nothing_half_done(served, key, source, other_thread, call, first, how):
    """The next one succeeds; nothing stays held, and no fd, thread or lock behind."""
    weights = {"source": source} if how == "source" else {"build": skeleton}
    before = quiet()
    worker: gpu_worker.Worker | None = None

    def prepare():
        nonlocal worker
        worker = gpu_worker.attach(served.socket)
        if first is not None:
            first(worker, key, **weights)
        return lambda: call(worker, key, **weights)

    for place in each_point(prepare):
        assert worker is not None
        again = gpu_worker.attach(served.socket) if worker._table._records.closed else worker
        check_whole(again, key, other_thread, **weights)
        assert again.shutdown() == () or place == LEFT_LOCKED, place
        worker.shutdown()
        del again
        worker = None
        gc.collect()
        settle(before)
    assert worker is not None
    worker.shutdown()


def load_there(worker, key, **weights):
    return use(worker, key, **weights)


def away(worker, key, **weights):
    use(worker, key, **weights)
    worker.offload(key)


def use_without_host(worker, key, **weights):
    use(worker, key, keep_host=False, **weights)


def away_without_host(worker, key, **weights):
    use_without_host(worker, key, **weights)
    worker.offload(key)


def offload(worker, key, **weights):
    worker.offload(key)


def reserve(worker, key, **weights):
    with worker.reserve(1):
        pass


def make_room(worker, key, **weights):
    worker.make_room(1)


def session(worker, key, **weights):
    with worker.session():
        use(worker, key, **weights)


@pytest.mark.slow
@pytest.mark.timeout(300)  # hundreds of points each
@pytest.mark.parametrize(
    "shares", [pytest.param(False, id="private"), pytest.param(True, id="shared")]
)
@pytest.mark.parametrize(
    ("call", "first"),
    [
        pytest.param(use, None, id="use"),
        pytest.param(use, away, id="use again"),
        pytest.param(use_without_host, None, id="use without host"),
        pytest.param(use_without_host, away_without_host, id="use again without host"),
        pytest.param(offload, load_there, id="offload"),
        pytest.param(evict, load_there, id="evict"),
        pytest.param(reserve, load_there, id="reserve"),
        pytest.param(make_room, load_there, id="make_room"),
        pytest.param(session, load_there, id="session"),
        pytest.param(shutdown, load_there, id="shutdown"),
    ],
)
def test_a_call_leaves_nothing_half_done_on_a_device(
    served, operator, key, source, other_thread, call, first, shares
):
    """The next one succeeds, and what is charged there is what is there: in the end, nothing.

    What is shared stays until it is evicted.
    """
    before, fds = quiet(), open_fds()
    device = new_device()
    worker: gpu_worker.Worker | None = None

    def prepare():
        nonlocal worker
        worker = gpu_worker.attach(served.socket, device=device, share_vram=shares)
        if first is not None:
            first(worker, key, source=source)
        return lambda: call(worker, key, source=source)

    for place in each_point(prepare):
        assert worker is not None
        again = worker
        if worker._table._records.closed:
            again = gpu_worker.attach(served.socket, device=device, share_vram=shares)
        check_whole(again, key, other_thread, source=source)
        assert again.shutdown() == () or place == LEFT_LOCKED, place
        worker.shutdown()
        del again
        worker = None
        gc.collect()
        if shares:
            wait_until(lambda: evicted(operator, key))
        if place in LEFT_OPEN:
            wait_until(lambda: quiet()[0] <= before[0] + 1)
            close_lost(fds)
        wait_until(lambda: charged(operator, device) == 0)
        settle(before)
    assert worker is not None
    worker.shutdown()


def evicted(operator, key) -> bool:
    """Evict what is shared, if it is not in use any more."""
    operator.send(Evict(operator.next_rid(), key))
    return isinstance(operator.expect((Done, Fail)), Done)


def open_fds() -> dict[int, str]:
    found = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # that of the listing itself is gone
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return found


def close_lost(before: dict[int, str]) -> None:
    """Close what nobody could: it would be found by audits."""
    for fd, name in open_fds().items():
        if before.get(fd) != name:
            os.close(fd)


def test_a_load_that_a_shutdown_came_into_pins_nothing(served, operator, key, other_thread):
    """S12: interrupted before it gets its handle; whatever had come to be is given back."""
    before = quiet()
    worker: gpu_worker.Worker | None = None
    number = 0

    def prepare():
        nonlocal worker, number
        worker = gpu_worker.attach(served.socket)
        number += 1
        ending = worker.shutdown

        def build():
            other_thread(ending)
            return skeleton()

        return lambda: load(worker, key, build=build, version=str(number))

    for place in each_point(prepare):
        assert worker is not None
        assert worker.shutdown() == (), place
        worker = None
        settle(before)
        wait_until(lambda: held(operator, key) == [])
    assert worker is not None
    worker.shutdown()


def held(operator, key) -> list[str]:
    """The states of what is leased, or being made, of a key."""
    generations = [g for g in operator.status().generations if g.key == key]
    return [g.state for g in generations if g.leases or g.state != "ready"]


# A socket that nobody has yet is closed by being dropped, which Python finds worth a warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_attach_leaves_nothing_half_done(served, key, source, other_thread):
    before = quiet()

    def prepare():
        return lambda: gpu_worker.attach(served.socket)

    for place in each_point(prepare):
        before = before[0] + (place in LEFT_OPEN), before[1]
        settle(before)
        with gpu_worker.attach(served.socket) as worker:
            check_whole(worker, key, other_thread, source=source)
        del worker
        gc.collect()
        settle(before)


class TestFlights:
    def test_one_that_is_over_but_did_not_land_is_in_nobodys_way(self):
        """Neither in its own thread's, which may have been in a skeleton, nor in another's."""
        flights = Flights(threading.RLock())
        over = Flight(Key("k"), in_skeleton=True)
        assert flights.board(over) is over
        over.over = True
        flights.refuse_in_skeleton(Key("other"))
        flights.wait(over, 0.0)
        mine = Flight(Key("k"))
        assert flights.board(mine) is mine

    def test_who_waits_for_it_already_notices(self, monkeypatch):
        monkeypatch.setattr("gpu_worker.waits.STEP_S", 0.01)
        flights = Flights(threading.RLock())
        flight = flights.board(Flight(Key("k")))
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(flights.wait, flight, WAIT_S)
            wait_until(lambda: flights._waits)
            flight.over = True
            waiting.result(WAIT_S)
