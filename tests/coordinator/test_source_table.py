"""Who keeps the opened files of a source, and until when."""

from __future__ import annotations

import os

from coordinator.source_table import OpenedSource, SourceTable
from shm_store.keys import Fingerprint, RequestId, SessionId
from shm_store.reading import AS_IT_IS
from tests.processes import fds_of

ONE, OTHER = Fingerprint("file:1"), Fingerprint("file:2")


def opened(count: int = 2) -> OpenedSource:
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]
    return OpenedSource(fds, tuple(map(str, range(count))), AS_IT_IS)


def request(session: int, rid: int) -> tuple[SessionId, RequestId]:
    return SessionId(session), RequestId(rid)


def test_requests_for_the_same_bytes_share_the_fds_of_the_first():
    before = len(fds_of(os.getpid()))
    table = SourceTable()
    table.add(request(1, 1), ONE, opened())
    table.add(request(2, 1), ONE, opened())
    table.add(request(2, 2), OTHER, opened())
    assert len(fds_of(os.getpid())) == before + 4
    assert table[request(2, 1)] is table[request(1, 1)]
    table.close(*request(1, 1))
    assert len(fds_of(os.getpid())) == before + 4, "another request has them still"
    table.close_all(SessionId(2))
    table.close(*request(1, 1))
    assert request(2, 1) not in table
    assert len(fds_of(os.getpid())) == before


def test_a_loader_keeps_them_though_no_request_does():
    before = len(fds_of(os.getpid()))
    table = SourceTable()
    table.add(request(1, 1), ONE, opened(1))
    kept = table[request(1, 1)].share()
    table.close(*request(1, 1))
    os.fstat(kept.fds[0])
    kept.close()
    assert len(fds_of(os.getpid())) == before


def test_urls_have_nothing_to_share():
    table = SourceTable()
    table.add(request(1, 1), ONE, opened(0))
    table.add(request(1, 2), ONE, opened(0))
    assert table[request(1, 1)] is not table[request(1, 2)]
