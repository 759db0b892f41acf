"""The benchmarks run and have the rows they promise. Sizes are small: no figure of speed counts."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from benchmarks import reading
from benchmarks.fillers import LOAD_FILE as FIRST_READ
from benchmarks.fillers import PEERS, Filler, Places
from benchmarks.rows import Claim, Row, Unavailable, interleave, percentile

ROOT = Path(__file__).parents[2]
ROW_FIELDS = {"case", "ours", "floor", "peers", "ratio_to_floor", "ratio_to_best_peer"}
MINILM = "all-MiniLM-L6-v2"
LOAD_FILE = "safetensors load_file"
OTHERS = (
    "torch.load(mmap=True)",
    "torch.multiprocessing file_system",
    "torch.multiprocessing file_descriptor",
    "ray get + from_numpy",
)
WITHOUT_OTHERS = [argument for name in OTHERS for argument in ("--skip", name)]


def run(*arguments: str) -> list[dict]:
    """Run a benchmark as `scripts/bench` does, and return its rows."""
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    rows = json.loads(ended.stdout)["rows"]
    for row in rows:
        assert set(row) >= ROW_FIELDS, row
    return rows


def claims(row: dict) -> dict[str, float]:
    return {claim["what"]: claim["value"] for claim in row["claims"]}


@pytest.mark.process
def test_attach_times_ours_the_floor_and_a_peer_in_all_four_circumstances():
    """`attach --json` has a row per circumstance, with positive times and the ratios of these."""
    rows = run(
        *("attach", "--size-mb", "4", "--tensors", "60", "--warm-mb", "0"),
        *("--rounds", "3", "--fresh-rounds", "1", *WITHOUT_OTHERS),
    )
    assert len({row["case"] for row in rows}) == 4
    for row in rows:
        assert set(row["peers"]) == {LOAD_FILE}
        assert 0 < row["floor"] < 10 and 0 < row["ours"] < 10
        assert row["ratio_to_floor"] == pytest.approx(row["ours"] / row["floor"])
        assert row["ratio_to_best_peer"] == pytest.approx(row["ours"] / row["peers"][LOAD_FILE])
    assert "repeated attach / floor" in claims(rows[0])
    claimed = claims(rows[2])[f"times as fast as {LOAD_FILE}"]
    assert claimed == pytest.approx(1 / rows[2]["ratio_to_best_peer"])


@pytest.mark.process
def test_memory_finds_one_copy_of_ours_and_a_private_copy_per_process_of_the_peer():
    """`memory --json`: PSS is one copy however many workers; converted by each it is as many."""
    workers = 3
    rows = run(
        *("memory", "--size-mb", "24", "--tensors", "60", "--warm-mb", "0"),
        *("--workers", str(workers), *WITHOUT_OTHERS),
    )
    plain, committed, fds, converted, few_fds, small_shm = rows
    for row in (plain, converted):
        assert 0.9 < row["ratio_to_floor"] <= 1.02, row
    assert converted["floor"] == pytest.approx(plain["floor"] / 2, rel=0.1)
    (private_copies,) = converted["peers"].values()
    assert private_copies > 0.9 * workers * converted["floor"]
    assert claims(committed)["maps of the segment that the kernel charged"] == 0
    assert fds["ours"] <= 1
    assert claims(fds)["fds of the coordinator per model"] == 1
    assert few_fds["ours"] == 60 and few_fds["beside"]["limit of fds"] == 256
    if small_shm["floor"] is not None:
        assert small_shm["ours"] == 60 and small_shm["beside"]["/dev/shm_bytes"] == 1 << 20


@pytest.mark.process
def test_death_is_compared_with_that_of_a_bare_process():
    """`death --json`: from the kill, from the kernel's notice, and of a coordinator."""
    killed, noticed, missed = run("death", "--kills", "3", "--coordinator-kills", "1")
    assert killed["ours"] > noticed["ours"] > 0 and killed["floor"] > noticed["floor"] > 0
    assert claims(noticed)["kills after which another lease had changed"] == 0
    assert missed["floor"] is None and claims(missed)["longest in s"] >= missed["ours"] > 0.5


@pytest.mark.process
def test_lock_sends_nothing_and_is_compared_with_a_bare_lock():
    """`lock --json`: alone, nested and contended; no message leaves the process meanwhile."""
    alone, nested, contended = run("lock", "--pairs", "100", "--rounds", "3")
    for row in (alone, nested, contended):
        assert 0 < row["floor"] < row["ours"] < 0.01
    assert claims(alone)["messages sent in 100 pairs"] == 0
    assert claims(alone)["times the pair of a bare RLock"] == alone["ratio_to_floor"]


@pytest.mark.process
def test_scale_compares_with_a_bare_loop_and_with_few_keys():
    """`scale --json`: throughput is more if better, and latency is ours beside ours."""
    throughput, latency = run(
        *("scale", "--clients", "2", "--pairs", "20", "--rounds", "2"),
        *("--keys", "30", "--sessions", "70"),
    )
    assert throughput["floor"] > 0
    of_floor = throughput["ours"] / throughput["floor"]
    assert claims(throughput)["of the bare loop's throughput"] == pytest.approx(of_floor)
    assert "30 keys, 70 sessions" in latency["case"]
    assert 0 < latency["floor"] < 1
    assert claims(latency)["times as long as with few"] == pytest.approx(latency["ratio_to_floor"])


@pytest.mark.process
def test_restart_finds_what_is_kept_and_moves_nothing_of_it():
    """`restart --json`: weights kept on the device, on the host, on disk; and a peer's."""
    kept, host, disk = run(
        *("restart", "--size-mb", "4", "--tensors", "4", "--warm-mb", "0"),
        *("--rounds", "1", "--skip", MINILM),
    )
    for row in (kept, host, disk):
        assert 0 < row["floor"] < row["beside"]["from exec to the first answer_s"]
        assert 0 < row["ours"] < row["beside"]["from exec to the first answer_s"]
        assert set(row["peers"]) == {f"{LOAD_FILE}, and a copy"}
    moved = "of the weights moved to the device, at most_bytes"
    assert kept["beside"][moved] == 0 == claims(kept)["bytes of the weights moved, at most"]
    assert host["beside"][moved] == disk["beside"][moved] == pytest.approx(4e6, rel=0.05)


@pytest.mark.process
def test_share_moves_nothing_and_is_compared_with_a_host_attach():
    """`share --json`: a model of few and one of many tensors that another process has there."""
    rows = run(
        *("share", "--size-mb", "4", "--tensors", "4", "--warm-mb", "0"),
        *("--rounds", "2", "--skip", MINILM),
    )
    assert len(rows) == 2
    for row in rows:
        assert 0 < row["ours"] < 10 and 0 < row["floor"] < 10
        assert claims(row)["first lock / host attach"] == pytest.approx(row["ratio_to_floor"])
        assert claims(row)["bytes of the weights moved"] == 0


@pytest.mark.process
def test_fill_times_ours_the_floor_and_a_peer_warm_and_cold_and_counts_what_many_take():
    """`fill --json`: whole and in the loader only, from the disk, and many workers at once."""
    skipped = [argument for name in PEERS if name != FIRST_READ for argument in ("--skip", name)]
    warm, alone, *on_disk = run(
        *("fill", "--size-mb", "4", "--tensors", "20", "--warm-mb", "0", "--rounds", "1"),
        *("--cold-rounds", "1", "--crowd-mb", "48", "--workers", "2", *skipped),
    )
    for row in (warm, *on_disk[:1]):
        assert 0 < row["floor"] < 10 and 0 < row["ours"] < 10
        assert set(row["peers"]) == {FIRST_READ}
    assert claims(warm)["of the floor's speed"] == pytest.approx(1 / warm["ratio_to_floor"])
    assert 0 < alone["ours"] < warm["ours"] and 0 < alone["floor"] < warm["floor"]
    if not on_disk:
        return  # temporary files are in memory here
    _, crowd = on_disk
    assert 1 <= crowd["ratio_to_floor"] == claims(crowd)["copies in memory at its peak"] < 2
    assert 1 <= claims(crowd)["files read from the disk"] < 2
    assert 1 <= claims(crowd)["files read by system calls"] < 2


@pytest.mark.process
def test_a_peer_that_cannot_run_is_named_with_its_error(tmp_path):
    """At its start or at a sample, in words that go into the row; never silently left out."""
    places = Places(str(tmp_path / "missing"))
    with pytest.raises(Unavailable) as caught:
        Filler("nobody", places)
    assert "KeyError" in str(caught.value)
    with Filler(FIRST_READ, places) as filler, pytest.raises(Unavailable) as caught:
        filler.sample()
    assert "No such file" in str(caught.value)


def test_what_is_cached_of_a_file_is_known(tmp_path):
    """All of what was just written; and, where a disk is behind it, nothing after it is dropped."""
    path = tmp_path / "file"
    path.write_bytes(bytes(1_000_000))
    with path.open("rb") as file:
        assert reading.cached(file.fileno()) == 1.0
        assert reading.drop(str(path)) in (0.0, 1.0)
        file.read(1)
        assert reading.cached(file.fileno()) > 0


def test_interleave_takes_one_sample_of_each_per_round():
    """Every round has one sample of each, in changing order; the warm-up does not count."""
    taken: list[str] = []

    def sample(name: str) -> int:
        taken.append(name)
        return len(taken)

    found = interleave(6, {name: partial(sample, name) for name in "abc"})
    rounds = [taken[start : start + 3] for start in range(0, len(taken), 3)]
    assert len(rounds) == 7 and all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1
    assert {name: len(samples) for name, samples in found.items()} == {"a": 6, "b": 6, "c": 6}
    assert min(min(samples) for samples in found.values()) > 3


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([5.0], 99, 5.0), (range(1, 101), 99, 99), (range(1, 101), 100, 100), ([3, 1, 2], 50, 2)],
)
def test_percentile_is_a_value_that_so_many_do_not_exceed(values, percent, expected):
    """By the nearest rank, so that it is a sample and no interpolation."""
    assert percentile(values, percent) == expected


def test_a_row_compares_ours_with_the_best_peer_and_says_which_claims_hold():
    """Ratios are ours divided by the other; a claim at its limit still holds."""
    missed = Claim("times as fast", 3.9, 4.0, "at least")
    row = Row("case", "s", 2.0, 4.0, {"slow": 10.0, "quick": 1.0}, [Claim("x", 2.0, 2.0), missed])
    plain = row.plain()
    assert plain["ratio_to_floor"] == 0.5 and plain["ratio_to_best_peer"] == 2.0
    assert [claim.holds for claim in row.claims] == [True, False]


def test_the_best_peer_is_the_one_with_most_where_more_is_better():
    """Where tensors that arrived are counted, a peer that got none across is not the best."""
    row = Row("case", "count", 60.0, 60.0, {"none": 0.0, "half": 30.0}, better="more")
    assert row.ratio_to_best_peer == 2.0
    assert Row("case", "count", 60.0, 60.0, {"none": 0.0}, better="more").ratio_to_best_peer is None


def test_a_row_without_floor_or_peers_has_no_ratios():
    """Nothing to divide by is no ratio, not a failure."""
    plain = Row("case", "count", 0.0, 0.0).plain()
    assert plain["ratio_to_floor"] is None and plain["ratio_to_best_peer"] is None
