"""What fsspec reads besides the web, and copies on this host for readers that need a file."""

from __future__ import annotations

import errno
import os
import tempfile
from collections import namedtuple

import fsspec
import pytest

from coordinator import remote_pump, url_checkpoint
from coordinator.local_copy import localized
from coordinator.pump import Meter
from shm_store.errors import (
    DiskFull,
    SourceChanged,
    SourceMalformed,
    SourceNotOpened,
    SourceUnsupported,
)
from tests.coordinator.fetched import (
    FILE,
    INDEX,
    QUICK,
    SHARDED,
    SHARDS,
    TENSORS,
    load,
    raw,
)
from tests.coordinator.web_server import serving
from tests.processes import fds_of


@pytest.fixture
def web():
    with serving(m__safetensors=FILE) as started:
        yield started


@pytest.fixture
def memory():
    """What memory:// has: nothing, before and after."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield fs
    fs.store.clear()


def test_what_fsspec_reads_is_read(memory):
    memory.pipe("/b/m.safetensors", FILE)
    assert load("memory://b/m.safetensors") == raw(TENSORS)


@pytest.mark.parametrize("url", ["memory://b", "memory://b/"])
def test_a_folder_is_read_as_a_folder_on_disk_is(memory, url):
    memory.pipe("/b/model.safetensors.index.json", INDEX)
    for name, data in SHARDS.items():
        memory.pipe(f"/b/{name}", data)
    memory.pipe("/b/other.bin", b"x")
    assert load(url) == raw(SHARDED)


def test_a_folder_with_several_checkpoints_is_refused_by_their_names(memory):
    memory.pipe("/b/one.safetensors", FILE)
    memory.pipe("/b/two.safetensors", FILE)
    with pytest.raises(SourceNotOpened, match=r"one\.safetensors, two\.safetensors"):
        load("memory://b")


def test_what_is_not_there_is_named(memory):
    with pytest.raises(SourceNotOpened, match="no such file"):
        load("memory://b/none.safetensors")


def test_what_is_written_anew_meanwhile_is_refused(memory):
    memory.pipe("/b/m.safetensors", FILE)
    with pytest.raises(SourceChanged):
        load(
            "memory://b/m.safetensors",
            on_filled=lambda: memory.pipe("/b/m.safetensors", FILE[::-1]),
        )


@pytest.mark.parametrize(
    "url",
    [
        "local:///etc/passwd",
        "FILE:///etc/passwd",
        "ssh://host/file",
        "zip://a::file:///etc/passwd",
        "simplecache::https://host/file",
        "memory://a::file:///etc/passwd",
        "https://host/a::file:///etc/passwd",
        "reference://x",
    ],
)
def test_no_url_reaches_what_is_not_for_everybody(url):
    """The loader has the permissions of the coordinator, not those of who asks."""
    with pytest.raises((SourceUnsupported, SourceNotOpened)):
        load(url)


@pytest.mark.parametrize(
    ("url", "package", "remedy"),
    [
        ("s3://b/k", "s3fs", "pip install 'shm-weight-cache[s3]'"),
        ("gs://b/k", "gcsfs", "pip install 'shm-weight-cache[gcs]'"),
        ("hf://o/n/k", "huggingface_hub", "pip install 'shm-weight-cache[hf]'"),
        ("https://h/k", "aiohttp", "pip install 'shm-weight-cache[http]'"),
        ("http://h/k", "fsspec", "pip install 'shm-weight-cache[http]'"),
        ("az://c/k", "adlfs", "pip install adlfs"),
    ],
)
def test_a_package_that_lacks_is_named_with_what_installs_it(monkeypatch, url, package, remedy):
    import sys

    for name in list(sys.modules):
        if name.partition(".")[0] == package or name == "fsspec.implementations.http":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SourceUnsupported, match="not installed") as caught:
        load(url)
    assert remedy in caught.value.remedy


# --- copies on this host --------------------------------------------------------------------------


def test_a_copy_on_this_host_has_no_name_and_all_bytes(web, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (file,) = url_checkpoint.open_url(f"{web.url}/m.safetensors", QUICK)
    reported: list[tuple[int, int]] = []
    meter = Meter(file.size_bytes, lambda *told: reported.append(told), lambda: len(reported) + 9e9)
    local = localized(file, meter)
    try:
        assert local.read(len(FILE), 0) == FILE
        assert (local.name, local.size_bytes) == (file.name, len(FILE))
        assert list(tmp_path.iterdir()) == []
        assert meter.done_bytes == len(FILE)
    finally:
        os.close(local.fd)


def test_a_copy_that_does_not_fit_its_folder_is_refused_by_its_name(web, tmp_path, monkeypatch):
    """At once, if it is known, or when it turns out; nothing stays behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (file,) = url_checkpoint.open_url(f"{web.url}/m.safetensors", QUICK)
    room = namedtuple("room", "f_bavail f_frsize")
    with monkeypatch.context() as full:
        full.setattr(os, "statvfs", lambda path: room(1, 4096))
        with pytest.raises(DiskFull, match="has no room for its") as caught:
            localized(file, Meter(1, lambda *_: None))
    assert caught.value.folder == str(tmp_path) and "TMPDIR" in caught.value.remedy

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(remote_pump, "write_at", refuse)
        with pytest.raises(DiskFull):
            localized(file, Meter(1, lambda *_: None))
    assert not [place for place in fds_of(os.getpid()).values() if str(tmp_path) in place]


def test_a_format_that_needs_a_file_gets_one(monkeypatch):
    """Its reader is given what lies on this host."""
    seen: list[object] = []
    head = b"PK\x03\x04\0\0\0\0\0\0"

    def read(files, *_):
        seen.extend((type(file).__name__, file.read(file.size_bytes, 0)) for file in files)
        raise SourceMalformed("seen")

    monkeypatch.setattr("coordinator.pickles.read_pickles", read)
    with serving(m__pt=head + bytes(100)) as web, pytest.raises(SourceMalformed, match="seen"):
        load(f"{web.url}/m.pt")
    assert seen == [("LocalFile", head + bytes(100))]
