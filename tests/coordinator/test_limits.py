"""The file of limits: what it may say, and what SIGHUP does with it."""

from __future__ import annotations

import os
import signal

import pytest

from coordinator.limits import FILE_LIMIT_BYTES, read_limits
from coordinator.operator import Operator
from shm_store.errors import ArgumentRefused
from tests.coordinator.launched import HELLO, WAITS

ENDS = "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))"


@pytest.fixture
def file(tmp_path):
    return tmp_path / "limits"


def test_a_line_is_a_pool_and_its_size(file):
    file.write_text("# the box has 64 GiB\n\nram 512 MB   # half of it is not ours\n")
    assert read_limits(str(file)) == {"ram": 512_000_000}
    file.write_text("vram:GPU-1f 20GiB\nram 1GiB\nvram:sim-0 1MiB")
    read = {"vram:GPU-1f": 20 << 30, "ram": 1 << 30, "vram:sim-0": 1 << 20}
    assert read_limits(str(file)) == read
    file.write_text("# nothing yet\n")
    assert read_limits(str(file)) == {}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"ram\n", "line 1: 'ram' has no size"),
        (b"\nram 20G\n", "line 2: '20G' is no size"),
        (b"ram 1GiB\nram 2GiB\n", "line 2: 'ram' has a limit already"),
        (b"ram 1GiB\nrum 1GiB\n", "line 2: there is no pool 'rum' (use 'ram', or 'vram:UUID' for"),
        (b"vram:a 1GiB\nvram:a 1GiB\n", "line 2: 'vram:a' has a limit already"),
        (b"vram:a\x1b 1GiB\n", "line 1: there is no pool 'vram:a\\x1b'"),
        (b"vram:" + b"a" * 200 + b" 1GiB\n", "line 1: there is no pool 'vram:aaa"),
        (b"ram 0\n", "line 1: a size of '0' is out of range"),
        (b"\xff\n", "it is not text"),
        (b"#" * (FILE_LIMIT_BYTES + 1), "longer than a file of limits ever is"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(file, text, why):
    file.write_bytes(text)
    with pytest.raises(ArgumentRefused, match=str(file)) as caught:
        read_limits(str(file))
    assert why in str(caught.value)


def test_a_file_that_is_not_there_is_named(file):
    with pytest.raises(ArgumentRefused, match="cannot be read: No such file"):
        read_limits(str(file))
    with pytest.raises(ArgumentRefused, match="cannot be read: Is a directory"):
        read_limits(str(file.parent))


def limit_bytes(launched, name: str = "ram") -> int | None:
    with Operator.connect(launched.socket(), "test") as operator:
        pools = {pool.name: pool.limit_bytes for pool in operator.status().pools}
    return pools.get(name)


@pytest.mark.process
def test_hup_has_the_limits_read_again_and_the_next_coordinator_keeps_them(launch, file):
    file.write_text("ram 5MiB\n")
    launched = launch(
        "--limits", str(file), "--ram-budget", "1MiB", worker=f"{ENDS}; {HELLO}; {WAITS}"
    )
    worker = launched.up(1)[0]
    assert limit_bytes(launched) == 5 << 20
    file.write_text("ram 7MiB\n")
    launched.send(signal.SIGHUP)
    assert launched.said("read the limits").endswith(f"read the limits in {file}: ram 7.0 MiB")
    while limit_bytes(launched) != 7 << 20:
        pass  # it was asked for, and nobody waits for the answer

    for text, why in (
        ("ram 9GB?", "'9GB?' is no size"),
        ("ram 9GiB\nrum 1GiB", "there is no pool 'rum'"),
    ):
        file.write_text(f"# wrong\n{text}\n")
        launched.send(signal.SIGHUP)
        first = launched.next_line()  # and not that it was read
        line = 1 + len(text.splitlines())
        assert f"{file}, line {line}: {why}; nothing was changed" in first
        assert limit_bytes(launched) == 7 << 20

    os.kill(launched.coordinator, signal.SIGKILL)
    launched.said("ready on")
    assert limit_bytes(launched) == 7 << 20
    assert [member.pid for member in launched.group.members[1:]] == [worker]  # HUP was not for it
    launched.send(signal.SIGUSR1)
    assert launched.end()[0] == 0


@pytest.mark.process
def test_a_device_is_limited_before_anybody_uses_it(launch, file):
    """From the start, by HUP, and by hand; what was said last is what the next coordinator has."""
    gpu = "vram:GPU-1f"
    file.write_text(f"{gpu} 5MiB\n")
    launched = launch("--limits", str(file), worker=f"{ENDS}; {HELLO}; {WAITS}")
    launched.up(1)
    while limit_bytes(launched, gpu) != 5 << 20:
        pass  # it is told once it is ready, and nobody waits for the answer
    file.write_text(f"{gpu} 6MiB\nvram:GPU-2f 1MiB\n")
    launched.send(signal.SIGHUP)
    launched.said("read the limits")
    while limit_bytes(launched, "vram:GPU-2f") != 1 << 20:
        pass
    assert limit_bytes(launched, gpu) == 6 << 20
    with Operator.connect(launched.socket(), "test") as operator:
        operator.limit(gpu, 7 << 20)
    os.kill(launched.coordinator, signal.SIGKILL)
    launched.said("ready on")
    assert limit_bytes(launched, gpu) == 7 << 20
    assert limit_bytes(launched, "vram:GPU-2f") == 1 << 20
    launched.send(signal.SIGUSR1)
    assert launched.end()[0] == 0


@pytest.mark.process
def test_hup_while_there_is_no_coordinator_is_for_the_next_one(launch, file):
    """Also where another limit was stored with the supervisor, which the next one finds."""
    file.write_text("ram 5MiB\n")
    launched = launch("--limits", str(file), worker=f"{ENDS}; {HELLO}; {WAITS}")
    launched.up(1)
    with Operator.connect(launched.socket(), "test") as operator:
        operator.limit("ram", 8 << 20)
    os.kill(launched.coordinator, signal.SIGKILL)
    launched.said("it is started again")
    file.write_text("ram 6MiB\n")
    launched.send(signal.SIGHUP)
    launched.said("read the limits")
    launched.said("ready on")
    while limit_bytes(launched) != 6 << 20:
        pass  # it is told once it is ready, and nobody waits for the answer
    launched.send(signal.SIGUSR1)
    assert launched.end()[0] == 0


@pytest.mark.process
def test_the_ready_line_has_the_limit_that_counts(launch):
    """Not the budget that this coordinator was started with, where another limit came back."""
    launched = launch("--ram-budget", "1MiB", worker=f"{ENDS}; {HELLO}; {WAITS}")
    launched.up(1)
    assert launched.said("ready on").endswith("(ram budget 1.0 MiB)")
    with Operator.connect(launched.socket(), "test") as operator:
        operator.limit("ram", 8 << 20)
    os.kill(launched.coordinator, signal.SIGKILL)
    assert launched.said("ready on").endswith("(ram budget 8.0 MiB)")
    assert limit_bytes(launched) == 8 << 20
    launched.send(signal.SIGUSR1)
    assert launched.end()[0] == 0


@pytest.mark.process
def test_hup_counts_also_where_it_was_ignored(launch, file):
    """As under nohup: without --limits it stays ignored, with it somebody asks for something."""
    file.write_text("ram 5MiB\n")
    launched = launch(
        "--limits",
        str(file),
        worker=f"{ENDS}; {HELLO}; {WAITS}",
        ignored=int(signal.SIGHUP),
    )
    launched.up(1)
    file.write_text("ram 7MiB\n")
    launched.send(signal.SIGHUP)
    launched.said(f"read the limits in {file}: ram 7.0 MiB")
    launched.send(signal.SIGUSR1)
    assert launched.end()[0] == 0


@pytest.mark.process
@pytest.mark.parametrize("text", [None, "ram 1GiB\nrum 1GiB\n"], ids=["not there", "no such pool"])
def test_limits_that_cannot_be_read_at_the_start_start_nothing(launch, file, text):
    if text is not None:
        file.write_text(text)
    launched = launch("--limits", str(file), worker=HELLO)
    code, lines, err = launched.end()
    assert (code, lines) == (2, [])
    (line,) = err.splitlines()
    assert (f"{file}, line 2: there is no pool 'rum'" if text else "No such file") in line
