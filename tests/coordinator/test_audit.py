"""Comparing the ledger with the kernel: each kind of finding, and what is none. No processes."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from coordinator import audit as audit_module
from coordinator.audit import AuditReport, Finding, audit, compare, copied
from coordinator.kernel_facts import Facts, Use
from shm_store.report import (
    GenerationReport,
    LeaseReport,
    PoolReport,
    SessionReport,
    StatusReport,
)

PAGE = 4096
SIZE = 10 * PAGE
COORDINATOR = 1
WORKER = 20
OTHER = 30
GEN = "0a-00000001"


def generation(state: str = "ready", *leases: LeaseReport, **fields) -> GenerationReport:
    made = GenerationReport("k", GEN, state, SIZE, "ram", False, leases)
    return replace(made, **fields)


def lease(pid: int = WORKER, session: int = 1, **fields) -> LeaseReport:
    return LeaseReport(session, pid, 1.0, **fields)


def books(*generations: GenerationReport, in_use_bytes: int | None = None) -> StatusReport:
    sums = [
        g.size_bytes + sum(lease.copied_bytes for lease in g.leases)
        for g in generations
        if g.state != "open"
    ]
    in_use = sum(sums) if in_use_bytes is None else in_use_bytes
    pool = PoolReport("ram", 1 << 30, in_use, 0, 0, 0, 0, 0, 0)
    workers = {lease.session: lease.pid for g in generations for lease in g.leases}
    sessions = [SessionReport(s, pid, "w", "cpu", (), True) for s, pid in workers.items() if s < 9]
    return StatusReport(False, (pool,), generations, tuple(sessions), start="0a")


def facts(*uses: Use, **fields) -> Facts:
    known = {
        "segments": {GEN: SIZE},
        "uses": uses,
        "processes": {WORKER: "read", OTHER: "read"},
        "names": {WORKER: "python", OTHER: "sleep"},
    }
    return Facts(**{**known, **fields})


def differences(status: StatusReport, found: Facts) -> list[str]:
    report = compare(status, found)
    assert report.agree == (not report.differences)
    return [difference.kind for difference in report.differences]


def windows(status: StatusReport, found: Facts) -> list[str]:
    assert differences(status, found) == []
    return [window.kind for window in compare(status, found).windows]


MAPPED = Use(WORKER, GEN, mapped_bytes=SIZE)
LEASED = books(generation("ready", lease()))


def test_a_mapped_lease_of_a_segment_of_its_size_agrees():
    report = compare(LEASED, facts(MAPPED))
    assert report == AuditReport(True, 1, 1, SIZE, (), (), (), ())


def test_a_retained_generation_needs_no_lease_and_an_open_one_no_segment():
    unbuilt = generation("open", generation="0a-00000002", size_bytes=0, filled_by=WORKER)
    assert differences(books(generation(), unbuilt), facts()) == []


def test_a_mapping_without_a_lease_names_its_process():
    (found,) = compare(books(generation()), facts(Use(OTHER, GEN, mapped_bytes=SIZE))).differences
    assert found == Finding("unleased_mapping", GEN, "k", OTHER, "sleep", kernel_bytes=SIZE)


def test_a_mapping_outlives_the_generation_and_is_found():
    (found,) = compare(books(), facts(MAPPED, segments={})).differences
    assert found == Finding("unleased_mapping", GEN, "", WORKER, "python", kernel_bytes=SIZE)


def test_a_lease_without_a_mapping_is_found():
    (found,) = compare(LEASED, facts()).differences
    assert found == Finding("unmapped_lease", GEN, "k", WORKER, "python", 1)
    assert differences(LEASED, facts(processes={})) == ["unmapped_lease"]


def test_a_lease_of_an_ending_process_is_a_window():
    assert windows(LEASED, facts(processes={WORKER: "ending"})) == ["ending"]


def test_a_lease_of_an_operator_maps_nothing():
    assert windows(books(generation("ready", lease(session=9))), facts()) == ["loading"]


@pytest.mark.parametrize("sight", ["unread", "foreign"])
def test_a_holder_that_may_not_be_looked_into_is_named_and_no_difference(sight):
    report = compare(LEASED, facts(processes={WORKER: sight}))
    assert report.agree
    assert report.unread == (Finding("unread", pid=WORKER, process="python"),)


def test_of_other_users_processes_only_holders_are_named():
    seen = facts(MAPPED, processes={WORKER: "read", OTHER: "foreign"})
    assert compare(LEASED, seen).unread == ()
    assert compare(LEASED, replace_sight(seen, OTHER, "unread")).unread[0].pid == OTHER


def replace_sight(seen: Facts, pid: int, sight: str) -> Facts:
    return facts(*seen.uses, processes={**seen.processes, pid: sight})


def test_an_fd_is_for_who_maps_and_leases_what_it_is_of():
    held = Use(WORKER, GEN, mapped_bytes=SIZE, holds=True)
    assert differences(LEASED, facts(held)) == [], "to state it when it resumes"
    assert differences(books(generation()), facts(Use(OTHER, GEN, holds=True))) == ["fd_held"]


def test_the_coordinators_manager_stores_what_is_ready_and_nothing_else():
    stored = facts(Use(OTHER, GEN, holds=True), manager=OTHER)
    assert differences(books(generation()), stored) == []
    mapped = facts(Use(OTHER, GEN, holds=True), MAPPED, manager=OTHER)
    assert differences(books(generation("retired", lease())), mapped) == ["fd_held"]


@pytest.mark.parametrize(
    ("filler", "children"), [(WORKER, frozenset()), (None, frozenset({WORKER}))]
)
def test_who_fills_a_segment_has_its_fd_and_nobody_else(filler, children):
    status = books(generation("filling", filled_by=filler))
    held = Use(WORKER, GEN, holds=True)
    assert differences(status, facts(held, children=children)) == []
    other = Use(OTHER, GEN, holds=True)
    assert differences(status, facts(held, other, children=children)) == ["fd_held"]


def test_a_child_of_the_coordinator_has_no_fd_of_what_is_ready():
    held = Use(OTHER, GEN, holds=True)
    found = differences(books(generation()), facts(held, children=frozenset({OTHER})))
    assert found == ["fd_held"]


@pytest.mark.parametrize("state", ["reserved", "freeing"])
@pytest.mark.parametrize("segments", [{}, {GEN: PAGE}])
def test_what_is_getting_or_losing_its_pages_is_a_window(state, segments):
    child = Use(OTHER, GEN, holds=True)
    assert windows(books(generation(state)), facts(child, segments=segments)) == [state]


@pytest.mark.parametrize("state", ["filling", "ready", "retired"])
def test_a_segment_that_takes_other_memory_than_is_charged_is_found(state):
    status = books(generation(state))
    (found,) = compare(status, facts(segments={GEN: SIZE - PAGE})).differences
    wrong = Finding("wrong_size", GEN, "k", books_bytes=SIZE, kernel_bytes=SIZE - PAGE)
    assert found == wrong
    assert differences(status, facts(segments={})) == ["missing_segment"]


def test_a_segment_of_nothing_that_is_charged_is_found():
    (found,) = compare(books(), facts()).differences
    assert found == Finding("unknown_segment", GEN, kernel_bytes=SIZE)
    unbuilt = books(generation("open", size_bytes=0))
    assert differences(unbuilt, facts()) == ["unknown_segment"]


def test_private_memory_has_no_segment_and_is_part_of_the_total():
    private = generation("ready", lease(), generation="0a-00000002", private=True)
    assert differences(books(generation(), private), facts()) == []


def test_a_pool_that_is_not_the_sum_of_its_parts_is_found():
    copies = Use(WORKER, GEN, mapped_bytes=SIZE, copied_bytes=PAGE)
    leased = generation("ready", lease(copied_bytes=PAGE))
    assert differences(books(leased), facts(copies)) == []
    (found,) = compare(books(leased, in_use_bytes=SIZE), facts(copies)).differences
    wrong = Finding("wrong_total", key="ram", books_bytes=SIZE, kernel_bytes=SIZE + PAGE)
    assert found == wrong


def test_a_total_is_not_judged_while_a_window_is_open():
    freeing = generation("freeing", generation="0a-00000002")
    status = books(generation(), freeing, in_use_bytes=SIZE)
    assert windows(status, facts()) == ["freeing"]


def test_copied_pages_are_those_of_the_first_session_of_their_process():
    status = books(generation("ready", lease(), lease(session=2, copied_bytes=PAGE)))
    found = copied(status, facts(Use(WORKER, GEN, mapped_bytes=SIZE, copied_bytes=3 * PAGE)))
    assert [(c.session, c.books_bytes, c.kernel_bytes) for c in found] == [
        (1, 0, 3 * PAGE),
        (2, PAGE, 0),
    ]


def test_copied_pages_stay_as_they_are_where_nobody_may_look():
    status = books(generation("ready", lease(copied_bytes=PAGE)))
    for sight in ("unread", "foreign", "ending"):
        assert copied(status, facts(processes={WORKER: sight})) == []
    assert copied(status, facts(processes={})) == []


def test_charges_for_copied_pages_that_do_not_follow_are_found():
    copies = Use(WORKER, GEN, mapped_bytes=SIZE, copied_bytes=PAGE)
    assert differences(LEASED, facts(copies)) == ["wrong_copied"]


# --- several looks ------------------------------------------------------------------------------


class FakeOperator:
    """Answers with one status after the other, the last one for ever."""

    def __init__(self, *reports: StatusReport) -> None:
        self.reports = list(reports)
        self.charged: list = []

    def coordinator_pid(self) -> int:
        return COORDINATOR

    def status(self) -> StatusReport:
        return self.reports.pop(0) if len(self.reports) > 1 else self.reports[0]

    def copied(self, pages) -> None:
        self.charged.append(pages)


@pytest.fixture
def kernel(monkeypatch):
    """Sets what each look finds."""

    def finds(*looks: Facts) -> list[Facts]:
        left = list(looks)
        monkeypatch.setattr(audit_module, "collect", lambda *_: left.pop(0))
        return left

    return finds


def test_what_a_second_look_does_not_find_is_no_difference(kernel):
    left = kernel(facts(), facts(MAPPED), facts(MAPPED))
    assert audit(FakeOperator(LEASED)).agree
    assert len(left) == 1  # it looks no further


def test_what_every_look_finds_is_a_difference(kernel):
    kernel(*[facts(MAPPED, Use(OTHER, GEN, holds=True))] * 3)
    report = audit(FakeOperator(LEASED))
    assert not report.agree
    assert [difference.pid for difference in report.differences] == [OTHER]


def test_differences_that_change_from_look_to_look_are_none(kernel):
    holders = [Use(pid, GEN, holds=True) for pid in (OTHER, OTHER + 1, OTHER + 2)]
    kernel(*(facts(MAPPED, holder) for holder in holders))
    report = audit(FakeOperator(LEASED))
    assert report.agree and report.differences == ()


def test_copied_pages_are_charged_and_told(kernel):
    kernel(facts(Use(WORKER, GEN, mapped_bytes=SIZE, copied_bytes=PAGE)))
    operator = FakeOperator(LEASED, books(generation("ready", lease(copied_bytes=PAGE))))
    report = audit(operator)
    assert report.agree and report.in_use_bytes == SIZE + PAGE
    told = Finding("copied_pages", GEN, "k", WORKER, "python", 1, 0, PAGE)
    assert report.copied == (told,)
    ((pages,),) = operator.charged
    assert (pages.session, pages.gen, pages.size_bytes) == (1, GEN, PAGE)


def test_the_json_has_the_documented_fields():
    report = msgspec.to_builtins(compare(LEASED, facts(Use(OTHER, GEN, holds=True))))
    assert list(report) == [
        "agree",
        "generations",
        "leases",
        "in_use_bytes",
        "differences",
        "windows",
        "copied",
        "unread",
        "digested",
    ]
    assert list(report["differences"][0]) == [
        "kind",
        "generation",
        "key",
        "pid",
        "process",
        "session",
        "books_bytes",
        "kernel_bytes",
        "tensor",
    ]
