"""Files at URLs, read in this process from a web server of the test's own, and from memory://."""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
import urllib.parse

import numpy as np
import pytest
import safetensors.numpy

from coordinator import http_file, remote_pump, url_checkpoint
from coordinator.checkpoint import Copy
from coordinator.formats import read_contents
from coordinator.pump import Meter
from coordinator.remote_file import HEAD_BYTES, About, RemoteFile
from coordinator.remote_pump import RemotePump
from shm_store.errors import (
    SourceChanged,
    SourceError,
    SourceMalformed,
    SourceNotOpened,
    SourceUnreachable,
    SourceUnsupported,
)
from shm_store.reading import Reading
from tests.coordinator.fetched import (
    FILE,
    INDEX,
    QUICK,
    SECRET,
    SHARDED,
    SHARDS,
    TENSORS,
    load,
    raw,
)
from tests.coordinator.web_server import serving


@pytest.fixture
def web():
    with serving(m__safetensors=FILE) as started:
        yield started


@pytest.fixture(autouse=True)
def _many_ranges(monkeypatch):
    """A small file is cut into many, as a large one is."""
    monkeypatch.setattr(remote_pump, "LEAST_BYTES", 256 * 1024)


def test_a_file_comes_in_ranges_of_which_none_is_read_twice(web):
    """Several at once; with the head that was read first, and a last look, that is all."""
    assert load(f"{web.url}/m.safetensors") == raw(TENSORS)
    ranges = sorted((start, end) for _, start, end, _ in web.log[1:-1])
    assert len(ranges) > 8
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
    assert web.sent_bytes() <= HEAD_BYTES + len(FILE) + 1
    assert all(headers.get("If-Match") == '"1"' for headers in web.headers[1:-1])


def test_what_is_not_wanted_is_not_fetched(web):
    reading = Reading(name_filter=("a.*", "s1*"))
    found = load(f"{web.url}/m.safetensors", reading=reading)
    assert found == {name: data for name, data in raw(TENSORS).items() if name in found}
    assert len(found) == 12
    web.log.clear()
    assert len(load(f"{web.url}/m.safetensors", reading=Reading(name_filter=("s[13]", "s6")))) == 3
    assert len(web.log) == 3  # what lies between small ones costs less than a request
    web.log.clear()
    load(f"{web.url}/m.safetensors", reading=reading)
    assert web.sent_bytes() < HEAD_BYTES + TENSORS["a.weight"].nbytes + 100_000


def test_a_range_that_broke_off_goes_on_where_it_ended(web):
    """Every third answer is dropped on its way: what came of it is not asked for again."""
    answers = itertools.count(1)
    web.drop = lambda start, end: (end - start) // 3 if next(answers) % 3 == 0 else None
    assert load(f"{web.url}/m.safetensors") == raw(TENSORS)
    assert len([1 for _, start, end, sent in web.log if sent < end - start]) > 3
    assert web.sent_bytes() <= HEAD_BYTES + len(FILE) + 1


def test_a_server_that_fails_for_a_moment_is_asked_again(web):
    """At the first request, in the middle and at the last look."""
    web.statuses = {1: 503, 4: 500, 5: 429, 22: 502}
    assert load(f"{web.url}/m.safetensors") == raw(TENSORS)
    assert web.sent_bytes() <= HEAD_BYTES + len(FILE) + 1


def test_a_server_without_ranges_is_read_in_one_stream(web):
    """From the beginning each time, and by one thread."""
    web.ranges = False
    assert load(f"{web.url}/m.safetensors") == raw(TENSORS)
    whole = [sent for *_, sent in web.log if sent == len(FILE)]
    assert len(web.log) == 3 and len(whole) >= 1


def test_a_stream_without_ranges_that_broke_off_is_read_again(web):
    web.ranges = False
    answers = itertools.count(1)
    web.drop = lambda start, end: 700_000 if next(answers) == 2 else None
    assert load(f"{web.url}/m.safetensors") == raw(TENSORS)


def test_a_file_of_unknown_size_is_refused(web):
    web.ranges = web.sizes = False
    with pytest.raises(SourceUnsupported, match="does not say how large it is") as caught:
        load(f"{web.url}/m.safetensors")
    assert caught.value.source == f"{web.url}/m.safetensors"


@pytest.mark.parametrize(
    ("status", "kind", "text"),
    [
        (404, SourceNotOpened, "no such file on the server"),
        (401, SourceNotOpened, "refuses it to these credentials"),
        (403, SourceNotOpened, "refuses it to these credentials"),
        (500, SourceUnreachable, "the server fails"),
        (418, SourceError, "HTTP status 418"),
    ],
)
def test_a_refusal_says_why_and_shows_no_secret(web, status, kind, text):
    web.status = status
    url = web.url.replace("http://", f"http://user:{SECRET}@")
    with pytest.raises(kind, match=text) as caught:
        load(f"{url}/m.safetensors?signature={SECRET}")
    assert caught.value.source == f"{web.url}/m.safetensors"
    assert str(status) in str(caught.value) and caught.value.remedy
    assert SECRET not in str(caught.value)
    assert web.headers[0]["Authorization"]  # and it was sent
    assert len(web.headers) == 1 or status == 500


def test_a_host_that_is_not_there_is_named():
    with pytest.raises(SourceUnreachable, match="no such host"):
        load("http://weight-cache.invalid/m.safetensors")


def test_a_port_that_nobody_listens_on_is_tried_again_for_a_moment(web):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(SourceUnreachable, match="refuses connections"):
            load(f"http://127.0.0.1:{port}/m.safetensors")


def test_a_server_without_tls_is_no_https(web):
    with pytest.raises(SourceUnreachable, match="TLS"):
        load(f"{web.url.replace('http', 'https')}/m.safetensors")


def test_a_server_that_falls_silent_is_given_up(web, monkeypatch):
    """After its patience, in a typed error: threads that still wait change nothing."""
    monkeypatch.setattr(http_file, "SILENCE_S", 0.1)
    web.stalls = True
    web.drop = lambda start, end: None if end <= HEAD_BYTES else 0
    with pytest.raises(SourceUnreachable, match="does not answer in time"):
        load(f"{web.url}/m.safetensors")


def test_nothing_from_anywhere_is_a_standstill(web):
    """Whatever a library does that waits for a server by itself."""
    (file,) = url_checkpoint.open_url(f"{web.url}/m.safetensors")
    web.stalls = True
    web.drop = lambda start, end: 0
    segment_fd = os.memfd_create("segment")
    try:
        pump = RemotePump([file], segment_fd, standstill_s=0.1)
        with pytest.raises(SourceUnreachable, match=r"nothing came for 0\.1 s"):
            pump.copy([Copy(0, 0, len(FILE))], 0, Meter(1, lambda *_: None))
    finally:
        os.close(segment_fd)


def test_a_file_that_is_shorter_than_its_server_says_is_no_file(web):
    """It breaks off at the same byte each time."""
    web.drop = lambda start, end: max(0, len(FILE) - 5000 - start)
    with pytest.raises(SourceUnreachable, match="broke off"):
        load(f"{web.url}/m.safetensors")


def test_a_file_that_ends_before_its_header_says_is_truncated():
    with serving(m__safetensors=FILE[:-5]) as web, pytest.raises(SourceMalformed, match="truncat"):
        load(f"{web.url}/m.safetensors")


def test_an_empty_file_is_named():
    with serving(m__safetensors=b"") as web, pytest.raises(SourceMalformed, match="is empty"):
        load(f"{web.url}/m.safetensors")


@pytest.mark.parametrize("etag", ['"2"', 'W/"2"'])
def test_a_file_that_changes_while_it_is_read_is_refused(web, etag):
    """By the server, to which the version is said, or by its answer."""
    answers = itertools.count(1)
    web.etag = "W/" + web.etag if "W/" in etag else web.etag

    def change():
        if next(answers) == 3:
            web.etag = etag

    web.on_answer = change
    with pytest.raises(SourceChanged, match="changed while it was read"):
        load(f"{web.url}/m.safetensors")


def test_an_answer_of_another_version_is_refused_even_if_the_last_look_sees_none(web):
    """As of servers side by side, of which one is behind."""
    web.etag, web.etags = 'W/"1"', {4: 'W/"2"'}
    with pytest.raises(SourceChanged):
        load(f"{web.url}/m.safetensors")


def test_what_comes_with_a_refusal_is_no_part_of_the_file(web):
    """A server that cannot give a range now, which it could before."""
    (file,) = url_checkpoint.open_url(f"{web.url}/m.safetensors", QUICK)
    web.statuses = {2: 416}
    data = bytearray()
    file.fetch(0, 1000, lambda _, chunk: data.extend(chunk))
    assert data == FILE[:1000] and len(web.headers) == 3


def test_a_file_that_has_changed_when_all_is_read_is_refused(web):
    """One that is read without a version in between: a server of its own kind."""

    def change():
        web.etag = '"2"'

    with pytest.raises(SourceChanged, match="changed while it was read"):
        load(f"{web.url}/m.safetensors", on_filled=change)


def test_a_file_without_etag_of_another_size_is_refused(web):
    web.etag = ""

    def change():
        web.files["/m.safetensors"] = FILE + b"1"

    with pytest.raises(SourceChanged):
        load(f"{web.url}/m.safetensors", on_filled=change)


def test_a_redirect_leads_to_the_web_only(web):
    """Elsewhere is refused: what this host has is not for whoever runs a server."""
    with serving() as first:
        first.status, first.location = 302, f"{web.url}/m.safetensors"
        assert load(f"{first.url}/x") == raw(TENSORS)
        first.location = "file:///etc/passwd"
        with pytest.raises(SourceError, match="NonHttpUrlRedirect"):
            load(f"{first.url}/x")


def test_a_redirect_out_of_tls_is_refused():
    """In the middle of a chain, too: whoever listens there could lead on to anything."""

    class Answer:
        status, headers = 206, {"Content-Range": "bytes 0-9/10"}

        def __init__(self, url: str, *before: str) -> None:
            self.url = urllib.parse.urlsplit(url)
            self.history = [Answer(step) for step in before]

    transport = http_file.HttpTransport(None, "https://h/a", "https://h/a")
    for urls in (("http://h", "https://h"), ("https://h", "https://h", "http://i")):
        with pytest.raises(SourceUnsupported, match="from https to http"):
            transport._judged(Answer(*urls))
    for urls in (("https://h", "https://i"), ("https://h", "http://i"), ("http://h", "http://i")):
        assert transport._judged(Answer(*urls)).about.size_bytes == 10


class Late:
    """A transport whose bytes come when nobody waits for them any more."""

    step_bytes = 1 << 20
    streams = True

    def __init__(self) -> None:
        self.go_on, self.done = threading.Event(), threading.Event()

    def open(self):
        return self.look(), b""

    def look(self):
        return About(4096, "")

    def fetch(self, start, end, sink):
        self.go_on.wait(20)
        try:
            sink(start, b"late" * 1024)
        finally:
            self.done.set()


class Unheard(threading.Event):
    """Set a moment after somebody has looked."""

    def is_set(self) -> bool:
        return False


def test_bytes_that_come_too_late_are_written_nowhere():
    """The number of the segment's fd may be another file's by then."""
    late = Late()
    file = RemoteFile("memory://late", "memory://late", late, QUICK)
    file.stopped = Unheard()
    segment_fd = os.memfd_create("segment")
    with pytest.raises(SourceUnreachable, match="nothing came"):
        RemotePump([file], segment_fd, threads=1, standstill_s=0.01).copy(
            [Copy(0, 0, 4096)], 0, Meter(4096, lambda *_: None)
        )
    other_fd = os.memfd_create("other")
    os.dup2(other_fd, segment_fd)
    late.go_on.set()
    assert late.done.wait(20)
    assert os.fstat(other_fd).st_size == 0
    os.close(other_fd)
    os.close(segment_fd)


def test_shards_lie_beside_their_index_and_have_its_query():
    files = {"/d/i.safetensors.index.json": INDEX, **{f"/d/{n}": d for n, d in SHARDS.items()}}
    with serving() as web:
        web.files = files
        url = f"{web.url}/d/i.safetensors.index.json?token={SECRET}"
        assert load(url) == raw(SHARDED)
        assert list(load(url)) == ["y", "x"]
        del web.files["/d/model-00002-of-00002.safetensors"]
        with pytest.raises(SourceNotOpened, match="its shard model-00002-of-00002") as caught:
            load(url)
        assert SECRET not in str(caught.value)


def test_large_headers_of_shards_are_read_when_they_are_opened():
    """They do not fit the first bytes. Read side by side they take no longer than one."""
    tensors = {f"layer.{number}": np.array([number]) for number in range(3000)}
    data = safetensors.numpy.save(tensors)
    assert len(data) > HEAD_BYTES
    index = json.dumps({"weight_map": dict.fromkeys(tensors, "m.safetensors")}).encode()
    with serving(m__safetensors=data) as web:
        web.files["/m.index.json"] = index
        files = url_checkpoint.open_url(f"{web.url}/m.index.json")
        asked = len(web.log)
        assert asked == 3  # the index, and twice the shard
        read_contents(files, Reading(), "m")
        assert len(web.log) == asked
        assert load(f"{web.url}/m.index.json") == load(f"{web.url}/m.safetensors") == raw(tensors)
