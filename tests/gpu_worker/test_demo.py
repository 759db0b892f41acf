"""The demo holds what it claims, says so in figures, and is found out when it does not."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from gpu_worker.demo import __main__ as command
from gpu_worker.demo import checkpoint, kernel, stage, telling
from gpu_worker.demo.claims import Claim, Claims
from gpu_worker.demo.figures import Row
from gpu_worker.demo.notes import notes
from gpu_worker.demo.process import DemoFailed

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
SMALL_MIB = 32
DEMO = [sys.executable, "-m", "gpu_worker.demo", "--checkpoint-mib", str(SMALL_MIB)]

KEYS = ("minilm", "minilm:bf16", "generated:bf16")
CLAIMS = (
    "at the start ledger and kernel agree",
    *(
        f"{key}: {claim}"
        for key in KEYS
        for claim in (
            "answers are bit-equal",
            "the ledger has one generation",
            "the ledger's bytes are the kernel's",
            "both workers map the very memfd",
            "together they take one copy",
        )
    ),
    *(f"{key}: plain loading takes at least" for key in KEYS[1:]),
    "the lease of the killed worker is gone",
    "the other worker answers on",
    "the replacement has the same generation",
    "the replacement answers",
    "the workers have shut down",
    "retained: the ledger's bytes",
    "after evicting them ledger and kernel agree",
    "drained, the coordinator ends with exit code 0",
    "no process on this host has a segment",
    "the workers end with exit code 0",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run of the demo, with a folder of its own for temporary files, and that folder."""
    folder = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        [*DEMO, "--json"],
        cwd=ROOT,
        env={**ENVIRONMENT, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    return done, folder


@pytest.mark.process
@pytest.mark.timeout(180)
class TestRun:
    """One real run, looked at from several sides."""

    def test_every_claim_is_made_and_holds(self, finished):
        """Exit code 0 stands for all claims, each of them checked."""
        done, _ = finished
        outcome = json.loads(done.stdout)
        made = [claim["claim"] for claim in outcome["claims"]]
        broken = [claim for claim in outcome["claims"] if not claim["held"]]
        assert (broken, outcome["error"], outcome["ok"], done.returncode) == ([], None, True, 0)
        assert done.stderr == ""
        for claim in CLAIMS:
            assert sum(text.startswith(claim) for text in made) == 1, claim
        assert len(made) == len(CLAIMS)

    def test_the_search_finds_what_was_asked_for(self, finished):
        """The embeddings mean something: a real model answers."""
        figures = json.loads(finished[0].stdout)["figures"]
        scores = [found["score"] for found in figures["found"]]
        assert "refund" in figures["found"][0]["sentence"]
        assert scores == sorted(scores, reverse=True)
        assert len(scores) == 12

    def test_the_table_has_both_ways_of_each_case(self, finished):
        """Six rows of pairs; the figures say what one copy, and two, must come to."""
        table = json.loads(finished[0].stdout)["figures"]["table"]
        assert [row["way"] for row in table] == ["shared", "plain"] * 3
        for row in table:
            assert all(ready > 0 for ready in row["ready_s"])
            assert all(
                ready < answer
                for ready, answer in zip(row["ready_s"], row["first_answer_s"], strict=True)
            )
        shared, plain = (sum(row["private_bytes"]) + sum(row["shared_bytes"]) for row in table[4:])
        one_copy = SMALL_MIB * 2**20 // 2
        assert one_copy <= shared < 1.3 * one_copy
        assert 2 * one_copy <= plain < 2.3 * one_copy

    def test_the_kill_and_the_replacement_are_timed(self, finished):
        """The figures tell how fast a lease goes, and how fast a replacement is warm."""
        figures = json.loads(finished[0].stdout)["figures"]
        assert 0 < figures["kill"]["lease_gone_s"] < 5
        assert 0 < figures["replacement"]["ready_s"] < figures["replacement"]["first_answer_s"]
        assert figures["kill"]["pid"] != figures["replacement"]["pid"]
        assert 0 < figures["coordinator_ready_s"] < 10

    def test_no_file_is_left(self, finished):
        """Checkpoint, socket and logs go with the run."""
        assert list(finished[1].iterdir()) == []


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing(number, tmp_path):
    """Ctrl-C in the middle ends every process and removes every file."""
    demo = subprocess.Popen(
        DEMO,
        cwd=ROOT,
        env={**ENVIRONMENT, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert demo.stdout is not None
    while "is ready" not in demo.stdout.readline():
        assert demo.poll() is None
    children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children").read_text().split()
    demo.send_signal(number)
    _, complaints = demo.communicate(timeout=50)
    assert demo.returncode == 128 + number
    assert complaints == ""
    assert children
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    assert list(tmp_path.iterdir()) == []


class TestVerdict:
    """What decides between exit code 0 and 1."""

    def test_one_broken_claim_breaks_the_whole(self):
        """Nothing averages a failure away."""
        told: list[Claim] = []
        verdicts = []
        claims = Claims(told.append)
        for held in (True, False, True):
            claims.check("the sky is up", held, "looked")
            verdicts.append(claims.hold)
        assert verdicts == [True, False, False]
        assert [claim.held for claim in told] == [True, False, True]

    def test_nothing_claimed_is_nothing_shown(self):
        """A run that checks nothing has not succeeded."""
        assert not Claims(lambda claim: None).hold

    @pytest.mark.parametrize(
        ("held", "failure", "code"),
        [
            (True, None, 0),
            (False, None, 1),
            (True, DemoFailed("worker A has ended"), 1),
            (True, OSError(28, "No space left on device"), 1),
        ],
    )
    def test_the_exit_code_says_it(self, held, failure, code, monkeypatch, capsys):
        """A broken claim, or an end before the end, is exit code 1; the JSON comes all the same."""

        class Told:
            def __init__(self, stage, teller, claims, figures):
                self._claims = claims

            def tell(self):
                self._claims.check("the sky is up", held, "looked")
                if failure is not None:
                    raise failure

        monkeypatch.setattr(command, "Story", Told)
        monkeypatch.setattr(sys, "argv", ["demo", "--json"])
        monkeypatch.setattr(signal, "signal", lambda number, handler: None)
        assert command.main() == code
        outcome = json.loads(capsys.readouterr().out)
        assert outcome["ok"] is (code == 0)
        assert (outcome["error"] is None) is (failure is None)
        assert outcome["claims"] == [{"claim": "the sky is up", "held": held, "seen": "looked"}]

    def test_a_missing_package_is_named(self, monkeypatch):
        """Without the extra the demo says what to install."""
        monkeypatch.setitem(sys.modules, stage.PACKAGE, None)
        with pytest.raises(DemoFailed) as caught:
            stage.find_minilm()
        assert stage.PACKAGE in str(caught.value)
        assert "shm-weight-cache[demo]" in str(caught.value)

    def test_too_small_a_disk_is_told_before_it_is_full(self, monkeypatch):
        """The remedy is in the message, and nothing was written."""
        monkeypatch.setattr(checkpoint, "room_bytes", lambda folder: 2**20)
        with stage.Stage(SMALL_MIB) as small:
            with pytest.raises(DemoFailed) as caught:
                small.write_files()
            assert not os.path.exists(small.checkpoint)
        assert "TMPDIR" in str(caught.value)


@pytest.mark.process
def test_a_process_that_ends_is_named_and_quoted():
    """A demo that cannot go on says which process failed it, and that one's last words."""
    with stage.Stage(SMALL_MIB) as ill_placed:
        ill_placed.socket = "/proc/no-such-folder/coordinator.sock"
        coordinator = ill_placed.start_coordinator()
        with pytest.raises(DemoFailed) as caught:
            coordinator.await_ready()
        words = ill_placed.last_words()
    assert str(caught.value) == "the coordinator has ended"
    assert "the coordinator: " in words
    assert "no-such-folder" in words


class TestKernel:
    """The witness is right about this very process."""

    def test_a_segment_is_seen_open_mapped_and_gone(self):
        """Name, inode and real bytes; and who holds it."""
        name = f"test{time.monotonic_ns():x}"
        fd = os.memfd_create(f"weight-cache:{name}")
        os.posix_fallocate(fd, 0, 8192)
        segment = kernel.Segment(name, os.fstat(fd).st_ino)
        assert kernel.open_segments(os.getpid())[segment] == 8192
        assert segment not in kernel.mapped_segments(os.getpid())
        view = mmap.mmap(fd, 8192)
        os.close(fd)
        assert segment in kernel.mapped_segments(os.getpid())
        # mmap keeps an fd of its own; either would be enough.
        assert kernel.holders({name}) == [os.getpid()]
        view.close()
        assert kernel.holders({name}) == []

    @staticmethod
    def fill(memory: mmap.mmap) -> None:
        """Write every page, without an object of that size: the allocator may keep its memory."""
        page = b"x" * mmap.PAGESIZE
        while memory.tell() < len(memory):
            memory.write(page)

    def test_memory_is_told_apart(self, tmp_path):
        """Private, mapped from a checkpoint, and in a segment."""
        size = 4 * 2**20
        before = kernel.data_memory(os.getpid())
        own = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.fill(own)
        added = kernel.data_memory(os.getpid()).since(before)
        assert size <= added.private_bytes < 2 * size
        assert added.segment_bytes == 0
        fd = os.memfd_create("weight-cache:memory")
        os.posix_fallocate(fd, 0, size)
        shared = mmap.mmap(fd, size)
        os.close(fd)
        self.fill(shared)
        added = kernel.data_memory(os.getpid()).since(before)
        assert added.segment_bytes == size
        assert 2 * size <= added.total_bytes < 3 * size
        own.close()
        shared.close()


class TestCheckpoint:
    """The generated file is a real checkpoint."""

    def test_it_loads_and_is_always_the_same(self, tmp_path):
        """Finite numbers of both signs, the same in every run."""
        shape = checkpoint.Shape(64, 3)
        for name in ("one", "two"):
            checkpoint.write(str(tmp_path / name), shape)
        state = load_file(tmp_path / "one")
        assert sorted(state) == [f"layers.{layer}.weight" for layer in range(3)]
        assert all(tensor.shape == (64, 64) for tensor in state.values())
        magnitudes = state["layers.2.weight"].abs()
        assert 0.0078 < magnitudes.min() < magnitudes.max() < 0.032
        assert 0.4 < (state["layers.0.weight"] > 0).float().mean() < 0.6
        assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
        assert checkpoint.read_once(str(tmp_path / "one")) > shape.size_bytes

    @pytest.mark.parametrize(("size_mib", "width"), [(4, 1024), (32, 1024), (1024, 4096)])
    def test_its_size_is_what_was_asked_for(self, size_mib, width):
        """Whole layers of one width."""
        shape = checkpoint.shape_of(size_mib)
        assert (shape.width, shape.size_bytes) == (width, size_mib * 2**20)


def test_the_table_fits_a_terminal_of_80(capsys, monkeypatch):
    """No column is cut, with figures as wide as they come."""
    monkeypatch.setattr(telling, "PIPE_COLUMNS", 80)
    weights, pair, size = "1 GiB fp32, to bf16", (12.345, 0.123), 1025 * 2**20
    rows = [
        Row(weights, "shared", pair, pair, (size, size), (0, 0)),
        Row(weights, "plain", pair, pair, (size, size), (0, 0)),
    ]
    telling.Narrator().table(rows, ())
    drawn = capsys.readouterr().out
    assert "\u2026" not in drawn
    assert drawn.count("12.35/0.123") == 4
    assert drawn.count("1025/1025") == 2
    assert drawn.count("2050") == 2


@pytest.mark.parametrize(("plain_bytes", "words"), [(100, "nothing to gain"), (200, "2.00 times")])
def test_the_notes_say_what_was_measured(plain_bytes, words):
    """Whether sharing gains memory as stored is read off the table, not presumed."""
    pair = (1.0, 1.0)
    shared = Row("m", "shared", pair, pair, (0, 0), (50, 50))
    plain = Row("m", "plain", pair, pair, (0, 0), (plain_bytes // 2, plain_bytes // 2))
    assert any(words in note for note in notes([shared, plain]))


@pytest.mark.process
@pytest.mark.parametrize("arguments", [(), ("--json",)], ids=["text", "json"])
def test_output_that_cannot_be_written_is_said_in_one_line(arguments):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*DEMO, *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "weight-cache demo: standard output cannot be written: No space left on device"
    )
    assert "Traceback" not in done.stderr
