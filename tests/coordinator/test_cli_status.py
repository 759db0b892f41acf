"""`weight-cache status`, and the tables of a refusal: for programs, for people, for terminals."""

from __future__ import annotations

import json
import os
import re
import signal

import msgspec
import pytest

from shm_store.report import GenerationReport, LeaseReport, PoolReport, SessionReport, StatusReport
from shm_store.wire import Status
from tests.coordinator.command_line import BUDGET_BYTES, Played, on_terminal, run
from tests.processes import Peer

pytestmark = pytest.mark.process


def fields(kind: type[msgspec.Struct]) -> list[str]:
    return [field.name for field in msgspec.structs.fields(kind)]


def test_status_as_json_has_the_documented_fields_and_figures(coordinator, weights):
    holder = Peer(coordinator.socket, "holder")
    granted = holder.load("k", weights)
    holder.ticket("open", "v1")
    done = run("status", "--json", WEIGHT_CACHE_SOCKET=coordinator.socket)
    assert (done.returncode, done.stderr) == (0, "")
    assert msgspec.json.decode(done.stdout, type=StatusReport).pools == holder.status().pools

    shown = json.loads(done.stdout)
    assert list(shown) == [*fields(StatusReport), "group"]
    assert shown["group"] is None
    assert list(shown["pools"][0]) == fields(PoolReport)
    generation = next(g for g in shown["generations"] if g["key"] == "k")
    assert list(generation) == fields(GenerationReport)
    assert list(generation["leases"][0]) == fields(LeaseReport)
    (session,) = shown["sessions"]
    assert list(session) == fields(SessionReport)

    assert generation["generation"] == granted.gen
    assert generation["leases"][0]["pid"] == os.getpid()
    assert session["name"] == "holder" and session["waiting_for"] == ["open"]
    assert shown["pools"][0]["limit_bytes"] == BUDGET_BYTES
    assert shown["pools"][0]["leased_bytes"] == coordinator.segment_blocks()


def test_status_for_people_names_key_holder_and_socket(coordinator, weights):
    holder = Peer(coordinator.socket, "holder")
    granted = holder.load("k", weights)
    shown = run("status", "--socket", coordinator.socket).stdout
    texts = (coordinator.socket, "1.0 MiB", "300 KiB", f"pid {os.getpid()} (", "holder")
    for text in texts:
        assert text in shown
    assert granted.gen.endswith("-00000001")
    assert re.search(r"^k +#1 +ready ", shown, re.MULTILINE)


def test_tables_fit_in_80_columns(coordinator, weights):
    holder = Peer(coordinator.socket, "python serve.py")
    holder.load("stabilityai/sdxl/unet:bf16", weights)
    holder.ticket("open", "v1")
    run("pin", "stabilityai/sdxl/unet:bf16", "--socket", coordinator.socket)

    _, *status = on_terminal(80, "status", "--socket", coordinator.socket)
    assert all(len(line) <= 80 for line in status), status
    rows = [re.split(r" {2,}", line.strip()) for line in status]
    assert ["pool", "limit", "charged", "leased"] in rows
    assert ["key", "generation", "state", "size", "held by", "waiting"] in rows
    assert ["open", "#2", "open", "0 B", f"pid {os.getpid()} builds it", "1"] in rows
    assert ["session", "pid", "name", "device", "waiting for"] in rows

    _, *refusal = on_terminal(
        80, "evict", "stabilityai/sdxl/unet:bf16", "--socket", coordinator.socket
    )
    refusal = [line for line in refusal if "pid" in line or "held by" in line]
    assert len(refusal) == 2 and all(len(line) <= 80 for line in refusal)
    assert "stabilityai/sdxl/unet:bf16  #1          ready, pinned  300 KiB  pid" in refusal[1]


def test_an_interrupted_command_ends_with_130_and_without_a_word(path):
    """The coordinator here takes the request and never answers."""
    with Played(path, "status") as played:
        assert isinstance(played.heard(), Status)  # from here on it waits
        played.process.send_signal(signal.SIGINT)
        assert played.end() == (130, "", "")
