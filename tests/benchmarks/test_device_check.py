"""`scripts/device-check` finds what holds, and what does not. No figure of speed counts here."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.device_check import books, correctness, death, private, sharing, uploads
from benchmarks.device_check.checks import Found, Missed, Skipped, run
from benchmarks.device_check.place import MIB, Place
from gpu_worker import cuda_uploads
from gpu_worker.placement import Group
from tests.gpu_worker.on_device import new_device
from tests.gpu_worker.test_cuda_device import Libcuda
from tests.processes import running

ROOT = Path(__file__).parents[2]


def device_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.device_check", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.process
@pytest.mark.timeout(120)
def test_a_simulated_device_keeps_every_promise_that_it_can_be_asked_for():
    ended = device_check("--device", "sim:0", "--size-mb", "8", "--rounds", "1", "--json")
    assert (ended.returncode, ended.stderr) == (0, "")
    said = json.loads(ended.stdout)
    assert said["conditions"]["pool"] == "vram:sim-0" and said["took_s"] > 0
    verdicts = {check["name"]: check["verdict"] for check in said["checks"]}
    assert verdicts.pop("upload bandwidth") == "skipped"
    parts = (correctness, books, private, death, sharing, uploads)
    assert len(verdicts) == sum(len(part.CHECKS) for part in parts) - 1
    assert set(verdicts.values()) == {"ok"}


@pytest.mark.process
def test_without_such_a_device_nothing_is_checked():
    ended = device_check("--device", "cpu:7")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("device-check: nothing can be checked: 'cpu:7' is no device")


def test_what_goes_wrong_is_missed_and_stops_nothing(capsys):
    def holds(place: str) -> Found:
        return Found(f"on {place}", {"x": 1.0})

    def missed(place: str) -> Found:
        raise Missed("too slow", {"ratio": 0.5})

    def skipped(place: str) -> Found:
        raise Skipped("needs a GPU")

    def fails(place: str) -> Found:
        return Found(str(1 // 0))

    tidied: list[int] = []
    checks = [(one.__name__, one) for one in (missed, fails, skipped, holds)]
    found = list(run("here", checks, lambda: tidied.append(1)))
    assert [(one.name, one.verdict, one.said, dict(one.figures)) for one in found] == [
        ("missed", "MISSED", "too slow", {"ratio": 0.5}),
        ("fails", "MISSED", "ZeroDivisionError: integer division or modulo by zero", {}),
        ("skipped", "skipped", "needs a GPU", {}),
        ("holds", "ok", "on here", {"x": 1.0}),
    ]
    assert len(tidied) == 4 and "1 // 0" in capsys.readouterr().err


def test_what_leaves_something_behind_is_missed():
    def tidy() -> None:
        raise Missed("still charged afterwards: a")

    (found,) = run(None, [("one", lambda _: Found("fine"))], tidy)
    assert (found.verdict, found.said) == ("MISSED", "still charged afterwards: a")


# --- what is found when something is wrong ------------------------------------------------------


@pytest.fixture(scope="module")
def socket(tmp_path_factory):
    with running(str(tmp_path_factory.mktemp("check") / "s")) as started:
        yield started.socket


@pytest.fixture
def place(socket):
    with Place(socket, new_device(), 8 * MIB, rounds=1) as made:
        yield made


def test_books_that_are_not_the_drivers_are_missed(place, monkeypatch):
    own_bytes, calls = place.own_bytes, iter(range(100))
    monkeypatch.setattr(place, "own_bytes", lambda: own_bytes() + 4096 * (next(calls) == 3))
    with pytest.raises(Missed, match="the first is locked: charged"):
        books.agree_at_every_step(place)


def test_more_than_the_limit_is_missed(place, monkeypatch):
    monkeypatch.setattr(place, "limit", lambda size_bytes: None)
    with pytest.raises(Missed, match=r"the second has taken its place: charged .* of "):
        books.agree_at_every_step(place)


def test_a_wrong_byte_is_missed(place, monkeypatch):
    """Of one tensor, of those that nothing is computed with included."""
    point_there = Group.point_there

    def wrong(group, block):
        block.view(0, 1).add_(1)
        point_there(group, block)

    monkeypatch.setattr(Group, "point_there", wrong)
    with pytest.raises(Missed, match=r"differ from|has other bits"):
        correctness.comes_and_goes(place)


def test_an_upload_that_copies_the_segment_is_missed(place, monkeypatch):
    """As pinning a private map would."""
    steps = Group.steps

    def copies(group, block, segment=None):
        for moved in group._moved:
            moved.home.add_(0)
        return steps(group, block, segment)

    monkeypatch.setattr(Group, "steps", copies)
    with pytest.raises(Missed, match=r"copied 8\.0 MiB"):
        private.copies_nothing(place)


@pytest.mark.process
def test_a_charge_that_goes_before_the_memory_is_missed(place, monkeypatch):
    used_bytes = place.used_bytes
    until_s: list[float] = []

    def used() -> int:
        """Until a while after its end some of it is not free."""
        if any(session.name.endswith("killed") for session in place.operator.status().sessions):
            until_s[:] = [time.monotonic() + 0.5]
        return used_bytes() + (MIB if until_s and time.monotonic() < until_s[0] else 0)

    monkeypatch.setattr(place, "used_bytes", used)
    with pytest.raises(Missed, match=r"before the memory: .*charge released .*VRAM free") as found:
        death.killed_with_vram(place)
    assert set(found.value.figures) == {
        "charge released_s",
        "pidfd_s",
        "end of file_s",
        "VRAM free_s",
    }


@pytest.mark.process
@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"digest": "0"}, "other bytes"), ({"moved_bytes": 1}, "the second process moved 1 bytes")],
)
def test_a_second_process_that_has_its_own_or_other_bytes_is_missed(
    place, monkeypatch, wrong, said
):
    lock = sharing.Other.lock
    monkeypatch.setattr(sharing.Other, "lock", lambda self, key: lock(self, key) | wrong)
    with pytest.raises(Missed, match=said):
        sharing.one_copy(place)


@pytest.mark.process
def test_memory_that_is_another_copy_by_the_kernel_is_missed(place, monkeypatch):
    used_bytes, calls = place.used_bytes, iter(range(100))
    monkeypatch.setattr(place, "used_bytes", lambda: used_bytes() + 4096 * next(calls))
    with pytest.raises(Missed, match="4096 from the driver's"):
        sharing.one_copy(place)


@pytest.mark.process
def test_a_lock_after_its_makers_death_that_moves_bytes_is_missed(place, monkeypatch):
    """As if its memory had gone with who made it."""
    kill = sharing.Other.kill

    def all_gone(other: sharing.Other) -> None:
        kill(other)
        calls.append("")

    calls: list[str] = []
    lock = sharing.Other.lock
    monkeypatch.setattr(sharing.Other, "kill", all_gone)
    monkeypatch.setattr(
        sharing.Other,
        "lock",
        lambda self, key: lock(self, key) | ({"moved_bytes": 7} if calls else {}),
    )
    with pytest.raises(Missed, match="who comes next moves 7 bytes"):
        sharing.outlives_its_maker(place)


def test_memory_that_is_gone_with_its_last_map_is_missed(place, monkeypatch):
    monkeypatch.setattr(place, "used_bytes", lambda: 0)
    with pytest.raises(Missed, match="only 0 bytes of it are there"):
        sharing.kept_by_its_fd(place)


def test_memory_that_stays_after_its_end_is_missed(place, monkeypatch):
    monkeypatch.setattr(sharing, "GONE_LIMIT_S", 0.1)
    monkeypatch.setattr(place, "evict", lambda key: None)
    with pytest.raises(Missed, match="are not free after its end"):
        sharing.kept_by_its_fd(place)
    monkeypatch.undo()


def test_a_pass_that_is_slower_is_missed_where_there_is_a_gpu(place, monkeypatch):
    monkeypatch.setattr(sharing, "LEAST", 1e9)
    assert "times as fast" in sharing.as_fast_as_private(place).said
    monkeypatch.setattr(Place, "simulated", False)
    with pytest.raises(Missed, match="times as fast"):
        sharing.as_fast_as_private(place)
    monkeypatch.undo()


def test_a_device_that_takes_any_fd_is_missed(place, monkeypatch):
    device = SimpleNamespace(
        shares=True,
        segment_bytes=lambda size_bytes: 4096,
        open_segment=lambda fd, size_bytes: SimpleNamespace(free=lambda: None),
    )
    with pytest.raises(Missed, match="a memfd was taken"):
        sharing.refuses_others(SimpleNamespace(device=device))


def test_where_nothing_can_be_shared_that_is_not_checked(place):
    device = SimpleNamespace(name="cuda:0", shares=False, why_private="no package")
    for _, check in sharing.CHECKS:
        with pytest.raises(Skipped, match="cuda:0 does not share its memory: no package"):
            check(SimpleNamespace(device=device))


# --- uploads, to a target in memory --------------------------------------------------------------


class Stream:
    """Copies at once."""

    def __init__(self, where: torch.device) -> None:
        pass

    def start(self, target, source):
        target.copy_(source)
        return SimpleNamespace(synchronize=lambda: None)

    def finish(self):
        pass


@pytest.fixture
def gpu(monkeypatch):
    """What is no GPU, but has all ways of uploading."""
    monkeypatch.setattr(cuda_uploads, "CopyStream", Stream)
    monkeypatch.setattr(
        cuda_uploads,
        "buffers",
        lambda name, count, size: [torch.zeros(size, dtype=torch.uint8) for _ in range(count)],
    )
    monkeypatch.setattr(uploads, "_pinned", torch.clone)
    device = SimpleNamespace(
        name="cuda:0", torch_device=torch.device("cpu"), synchronize=lambda: None
    )
    return SimpleNamespace(simulated=False, size_bytes=1, rounds=1, device=device)


@pytest.mark.parametrize("fails", [(), ("register",)])
def test_every_way_of_uploading_is_measured_and_brings_the_same_bytes(gpu, monkeypatch, fails):
    libcuda = Libcuda(fails=fails)
    registration = cuda_uploads.Registration(libcuda)
    monkeypatch.setattr(cuda_uploads, "registration", lambda index: registration)
    monkeypatch.setattr(uploads, "LEAST", 0.0)
    found = uploads.as_fast_as_pinned(gpu)
    ways = {name.removesuffix(", GB/s") for name in found.figures} - {"ratio"}
    assert ways >= {"pinned", "pageable", "ring", "ring, from a map"}
    assert ("registered" in ways) is (not fails) is bool(libcuda.ever)
    assert ("registered not supported" in found.said) is bool(fails)
    assert libcuda.pinned == {} and all(speed > 0 for speed in found.figures.values())
    monkeypatch.setattr(uploads, "LEAST", 1e9)
    with pytest.raises(Missed, match="of pinned"):
        uploads.as_fast_as_pinned(gpu)


def test_a_way_that_brings_other_bytes_is_missed(gpu, monkeypatch):
    monkeypatch.setattr(cuda_uploads, "registration", lambda index: None)
    monkeypatch.setattr(Stream, "start", lambda self, target, source: SimpleNamespace())
    with pytest.raises(Missed, match="ring: other bytes"):
        uploads.as_fast_as_pinned(gpu)
