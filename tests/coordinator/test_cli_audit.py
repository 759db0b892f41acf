"""`audit`, as people run it."""

from __future__ import annotations

import json
import re

import pytest

from shm_store.report import size_text
from tests.mapper import PAGE_BYTES, mapper
from tests.processes import Coordinator

pytestmark = pytest.mark.process

SIZE_BYTES = 20 * PAGE_BYTES


@pytest.mark.parametrize(
    "arguments",
    [("audit",), ("audit", "--json")],
    ids=" ".join,
)
def test_without_a_coordinator_they_say_what_to_do(arguments, path, run_here):
    code, out, err = run_here(*arguments, socket=path)
    assert (code, out) == (6, "")
    assert err.startswith(f"weight-cache: no coordinator answers on {path}: ")


def test_an_audit_that_agrees_is_one_line(coordinator: Coordinator, run_here):
    with mapper(coordinator.socket) as holder:
        for command in (("publish", "k", SIZE_BYTES), ("map",), ("close",)):
            holder.do(*command)
        code, out, err = run_here("audit", socket=coordinator.socket)
        size = size_text(coordinator.segment_blocks())
        line, *rest = out.splitlines()
        assert line == f"books and kernel agree: 1 generation, {size}, 1 lease"
        assert (code, err) == (0, "")
        assert all(line.startswith("not looked into ") for line in rest)


def test_an_audit_names_what_differs_and_exits_with_1(coordinator: Coordinator, run_here):
    with mapper(coordinator.socket) as holder, mapper(coordinator.socket) as other:
        holder.do("publish", "k", SIZE_BYTES)
        holder.do("map")
        holder.do("write", 1, 2)
        other.do("acquire", "k")
        other.do("release")  # and keeps its fd
        code, out, err = run_here("audit", socket=coordinator.socket)
        assert (code, err) == (1, "")
        assert out.startswith("books and kernel differ: 1 generation, ")
        assert re.search(rf"^fd held +k +#1 +pid {other.pid} \(python\S*\) +- +-$", out, re.M)
        charged = rf"^copied pages +k +#1 +pid {holder.pid} \(python\S*\) +0 B +8\.0 KiB$"
        assert re.search(charged, out, re.M)
        assert "\ncopied pages are charged from now on, to the process that has " in out
        shown = run_here("status", socket=coordinator.socket)[1]
        assert re.search(rf"pid {holder.pid} \(\d+ s, 8\.0 KiB copied\)$", shown, re.M)

        code, out, _ = run_here("audit", "--json", socket=coordinator.socket)
        report = json.loads(out)
        assert (code, report["agree"], report["copied"]) == (1, False, [])
        (found,) = report["differences"]
        assert (found["kind"], found["pid"], found["key"]) == ("fd_held", other.pid, "k")
