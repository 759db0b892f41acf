"""A command's connection, against the other end of a socket pair: answers are put there before."""

from __future__ import annotations

import os

import pytest

from coordinator import operator as operator_module
from coordinator.operator import Known, Operator
from shm_store import channel
from shm_store.channel import Channel
from shm_store.checkpoint_files import Opened
from shm_store.errors import (
    ArgumentRefused,
    BudgetExceeded,
    ConnectionLost,
    CoordinatorLost,
    DrainIncomplete,
    Draining,
    ProtocolViolation,
    VersionMismatch,
)
from shm_store.keys import GenerationId, Key, LeaseId, RequestId
from shm_store.reading import AS_IT_IS
from shm_store.report import GenerationReport, LeaseReport, StatusReport
from shm_store.wire import (
    VERSION,
    Acquire,
    AnyMessage,
    Bye,
    Cause,
    Done,
    Drain,
    Evict,
    Fail,
    Filling,
    Flushed,
    FromSession,
    Grant,
    Release,
    Report,
    Resume,
    Status,
    decode,
    encode,
    resume_decoder,
    session_decoder,
)
from tests.processes import fds_of

KEY = Key("k")
HOLDER = GenerationReport("k", "g1", "ready", 10, "ram", False, ())


class Coordinator:
    """The other end: answers are sent ahead, what the operator said is read afterwards."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def say(self, message: AnyMessage, fds: tuple[int, ...] = ()) -> None:
        self.channel.send(encode(message), fds)

    def resume(self) -> Resume:
        received = self.channel.receive()
        assert received is not None
        return decode(resume_decoder, received[0])

    def heard(self) -> tuple[FromSession, list[int]]:
        received = self.channel.receive()
        assert received is not None
        return decode(session_decoder, received[0]), received[1]


@pytest.fixture
def ends():
    ours, theirs = channel.pair()
    operator, coordinator = Operator(Channel(ours), "test"), Coordinator(Channel(theirs))
    yield operator, coordinator
    operator.close()
    coordinator.channel.close()


@pytest.fixture
def some_fd(tmp_path):
    path = tmp_path / "bytes"
    path.write_bytes(b"x" * 4096)
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def open_fds() -> list[str]:
    return sorted(fds_of(os.getpid()).values())


def test_it_presents_itself_first_and_counts_its_requests_upwards(ends):
    operator, coordinator = ends
    coordinator.say(Done(RequestId(1)))
    coordinator.say(Done(RequestId(2), (Key("a"), Key("b"))))
    operator.pin(KEY)
    assert operator.evict() == ("a", "b")

    assert coordinator.resume() == Resume(VERSION, "weight-cache test", "", "operator")
    assert coordinator.heard()[0].rid == 1
    assert coordinator.heard()[0] == Evict(RequestId(2), None)


def test_a_report_comes_as_it_was_sent(ends):
    operator, coordinator = ends
    report = StatusReport(True, (), (HOLDER,), ())
    coordinator.say(Report(RequestId(1), report))
    assert operator.status() == report


def test_a_refusal_raises_its_own_class_with_its_facts(ends):
    operator, coordinator = ends
    refusal = BudgetExceeded("full", needed_bytes=9, free_bytes=3, holders=(HOLDER,))
    coordinator.say(Fail(RequestId(1), Cause.of(refusal)))
    with pytest.raises(BudgetExceeded) as caught:
        operator.status()
    assert (caught.value.needed_bytes, caught.value.holders) == (9, (HOLDER,))


def test_a_refused_connection_is_heard_although_nothing_can_be_sent_on_it(ends):
    operator, coordinator = ends
    coordinator.say(Fail(RequestId(0), Cause.of(VersionMismatch("version 9"))))
    coordinator.channel.close()
    with pytest.raises(VersionMismatch, match="version 9"):
        operator.status()


def test_answers_to_others_are_passed_over_and_their_fds_closed(ends, some_fd):
    operator, coordinator = ends
    before = open_fds()
    coordinator.say(Grant(RequestId(7), GenerationId("g7")), (some_fd,))
    coordinator.say(Fail(RequestId(8), Cause.of(ArgumentRefused("not for us"))))
    coordinator.say(Done(RequestId(9), (Key("not ours"),)))
    coordinator.say(Done(RequestId(1), (KEY,)))
    assert operator.evict() == (KEY,)
    assert open_fds() == before


def test_a_granted_load_reports_progress_and_keeps_no_fd(ends, some_fd):
    operator, coordinator = ends
    before = open_fds()
    coordinator.say(Filling(RequestId(1), 5, 10))
    coordinator.say(Filling(RequestId(1), 10, 10))
    coordinator.say(Grant(RequestId(1), GenerationId("g1")), (some_fd,))
    seen = []
    granted = operator.acquire(
        KEY, Opened("path", (some_fd,)), AS_IT_IS, 3.0, lambda done, total: seen.append(done)
    )

    assert (granted.gen, granted.lease, granted.size_bytes) == ("g1", 1, 4096)
    assert seen == [5, 10]
    assert open_fds() == before
    coordinator.resume()
    message, fds = coordinator.heard()
    assert message == Acquire(RequestId(1), KEY, "path", "", 3.0)
    assert [os.fstat(fd).st_size for fd in fds] == [4096]
    channel.close_all(fds)
    operator.release(granted)
    assert coordinator.heard()[0] == Release(GenerationId("g1"), LeaseId(1))


@pytest.mark.parametrize("fds", [0, 2])
def test_a_grant_needs_exactly_one_fd(ends, some_fd, fds):
    operator, coordinator = ends
    before = open_fds()
    coordinator.say(Grant(RequestId(1), GenerationId("g1")), (some_fd,) * fds)
    with pytest.raises(ProtocolViolation, match=f"{fds} fds"):
        operator.acquire(KEY, Opened("path", (some_fd,)), AS_IT_IS, 3.0)
    assert open_fds() == before


def test_an_answer_of_the_wrong_kind_is_refused(ends):
    operator, coordinator = ends
    coordinator.say(Flushed(RequestId(1)))
    with pytest.raises(ProtocolViolation, match="Flushed"):
        operator.pin(KEY)


def test_what_is_no_message_is_refused(ends):
    operator, coordinator = ends
    coordinator.channel.send(b"garbage")
    with pytest.raises(ProtocolViolation):
        operator.status()


def test_end_of_file_means_lost_and_after_a_farewell_it_means_gone(ends):
    operator, coordinator = ends
    coordinator.channel.close()
    with pytest.raises(ConnectionLost):
        operator.status()

    ours, theirs = channel.pair()
    with Operator(Channel(ours), "test") as told:
        other = Coordinator(Channel(theirs))
        other.say(Bye())
        other.channel.close()
        with pytest.raises(Draining):
            told.status()


def test_a_silent_coordinator_is_given_up(ends, monkeypatch):
    operator, _ = ends
    monkeypatch.setattr(operator_module, "ANSWER_LIMIT_S", 0.05)
    with pytest.raises(CoordinatorLost, match=r"0\.05 s"):
        operator.status()


def test_a_load_that_stands_still_hears_why_until_it_knows(ends, some_fd, monkeypatch):
    """Reports come while the ACQUIRE is open; the second one tells enough, so no third is asked."""
    operator, coordinator = ends
    reports = [StatusReport(False, (), (), ()), StatusReport(False, (), (HOLDER,), ())]
    heard = []

    def on_wait(report: StatusReport) -> bool:
        heard.append(report)
        if len(heard) == 1:
            coordinator.say(Report(RequestId(3), reports[1]))
        else:
            coordinator.say(Grant(RequestId(1), GenerationId("g1")), (some_fd,))
        return len(heard) == 2

    quiet = iter([False, False])
    monkeypatch.setattr(operator_module, "_readable", lambda *_: next(quiet))
    coordinator.say(Report(RequestId(2), reports[0]))
    granted = operator.acquire(KEY, Opened("path", (some_fd,)), AS_IT_IS, 3.0, on_wait=on_wait)

    assert granted.lease == 1 and heard == reports
    coordinator.resume()
    acquire, fds = coordinator.heard()
    channel.close_all(fds)
    assert isinstance(acquire, Acquire)
    assert [coordinator.heard()[0] for _ in range(2)] == [
        Status(RequestId(2)),
        Status(RequestId(3)),
    ]


def test_a_fill_that_has_begun_needs_no_explanation(ends, some_fd, monkeypatch):
    operator, coordinator = ends
    quiet = iter([True])  # asked once, before the fill begins
    monkeypatch.setattr(operator_module, "_readable", lambda *_: next(quiet))
    coordinator.say(Filling(RequestId(1), 5, 10))
    coordinator.say(Grant(RequestId(1), GenerationId("g1")), (some_fd,))
    seen = []
    operator.acquire(
        KEY,
        Opened("path", (some_fd,)),
        AS_IT_IS,
        3.0,
        lambda *done: seen.append(done),
        lambda _: False,
    )
    assert seen == [(5, 10)]


def test_what_is_there_and_what_a_pin_keeps_is_read_from_the_ledger(ends):
    operator, coordinator = ends
    lease = LeaseReport(1, 10, 1.0)
    found = (
        GenerationReport("idle", "g1", "ready", 1, "ram", True, ()),
        GenerationReport("leased", "g2", "ready", 1, "ram", True, (lease,)),
        GenerationReport("plain", "g3", "ready", 1, "ram", False, ()),
        GenerationReport("going", "g4", "freeing", 1, "ram", False, ()),
        GenerationReport("coming", "g5", "open", 0, "ram", False, ()),
        GenerationReport("own", "g6", "ready", 1, "ram", False, (lease,), private=True),
    )
    for rid in range(1, 8):
        coordinator.say(Report(RequestId(rid), StatusReport(False, (), found, ())))
    assert operator.pinned_idle() == ("idle",)
    keys = ("plain", "coming", "going", "nowhere")
    assert [operator.known(Key(key)).shared for key in keys] == [True, True, False, False]
    assert operator.known(Key("leased")) == Known(shared=True, holders=(10,), private_to=())
    assert operator.known(Key("own")) == Known(shared=False, holders=(), private_to=(10,))


def test_a_request_goes_out_with_the_callers_own_id(ends):
    operator, coordinator = ends
    coordinator.say(Report(RequestId(1), StatusReport(False, (), (), ())))
    answer = operator.request(Status(operator.next_rid()))
    assert isinstance(answer.message, Report) and answer.fds == ()


def test_a_drained_coordinator_that_does_not_end_is_named(ends, monkeypatch):
    """The process at the other end is this one, which goes on: a drain is over with the process."""
    operator, coordinator = ends
    monkeypatch.setattr(operator_module, "EXIT_LIMIT_S", 0.05)
    coordinator.say(Done(RequestId(1)))
    coordinator.say(Bye())
    coordinator.channel.socket.shutdown(1)
    before = open_fds()
    with pytest.raises(DrainIncomplete, match="still runs"):
        operator.drain(2.0)
    assert open_fds() == before
    coordinator.resume()
    assert coordinator.heard()[0] == Drain(RequestId(1), 2.0)


def test_a_drain_that_fails_says_who_is_in_the_way(ends):
    operator, coordinator = ends
    coordinator.say(Fail(RequestId(1), Cause.of(DrainIncomplete("1 held", holders=(HOLDER,)))))
    with pytest.raises(DrainIncomplete) as caught:
        operator.drain(2.0)
    assert caught.value.holders == (HOLDER,)


def test_a_drain_that_is_refused_is_no_success(ends):
    operator, coordinator = ends
    coordinator.say(Fail(RequestId(1), Cause.of(Draining("by another"))))
    with pytest.raises(Draining, match="by another"):
        operator.drain(2.0)


def test_a_coordinator_lost_in_a_drain_is_no_success(ends):
    operator, coordinator = ends
    coordinator.channel.close()
    with pytest.raises(ConnectionLost):
        operator.drain(2.0)
