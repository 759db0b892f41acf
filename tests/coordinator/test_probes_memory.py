"""What `doctor`'s probes say of memory, huge pages and limits: made-up hosts, and real limits."""

from __future__ import annotations

import contextlib
import errno
import json
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from coordinator.backing import SPARE_BYTES
from coordinator.probes import huge_pages, limits, maps, memory
from coordinator.probes.finding import Finding
from shm_store.layout import PAGE_BYTES
from tests.coordinator.command_line import environment
from tests.coordinator.test_memory import GIB, MIB, V1_MOUNT, V2_MOUNT, FakeHost
from tests.coordinator.test_probes import refusing, told
from tests.processes import ROOT, WAIT_S

THP = "/sys/kernel/mm/transparent_hugepage"


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path)


def v2_host(host: FakeHost, limit: int | str, use: int, **more) -> str:
    host.process(["0::/a"], [V2_MOUNT.format(top="/")])
    host.v2("/sys/fs/cgroup/a", limit, use, **more)
    return str(host.root)


# --- cgroups ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "verdict"), [(2 * GIB, "ok"), (GIB // 2, "warn"), (SPARE_BYTES, "fail"), (-1, "fail")]
)
def test_a_cgroup_allows_enough_or_little_or_nothing(left, verdict, host):
    root = v2_host(host, 3 * GIB, 3 * GIB - left)
    told(memory.memory_cgroup(root), verdict, "/sys/fs/cgroup/a (v2)", "limit 3.0 GiB")


def test_the_tightest_of_the_chain_is_named(host):
    """v1, whose parent allows less than the own cgroup does."""
    host.process(["4:memory:/pod/app"], [V1_MOUNT.format(top="/")])
    host.v1("/sys/fs/cgroup/memory/pod/app", 8 * GIB, GIB)
    host.v1("/sys/fs/cgroup/memory/pod", 6 * GIB, 2 * GIB, inactive=GIB)
    finding = memory.memory_cgroup(str(host.root))
    told(finding, "ok", "5.0 GiB left", "memory/pod (v1)", "limit 6.0 GiB", "in use 2.0 GiB")


def test_without_a_limit_a_cgroup_is_right(host):
    told(memory.memory_cgroup(str(host.root)), "ok", "no memory cgroup")
    told(memory.memory_cgroup(v2_host(host, "max", GIB)), "ok", "v2: none of 2 levels")


def test_memory_high_is_a_warning_and_a_limit(host):
    told(memory.memory_high(str(host.root)), "ok")
    told(memory.memory_high(v2_host(host, 9 * GIB, GIB)), "ok", "not set")
    root = v2_host(host, "max", GIB, high=4 * GIB)
    told(memory.memory_high(root), "warn", "4.0 GiB", "MemoryHigh=")
    told(memory.memory_cgroup(root), "ok", "3.0 GiB left", "limit 4.0 GiB")


# --- the host's memory --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("available", "verdict"), [(8 * GIB, "ok"), (GIB, "warn"), (SPARE_BYTES, "fail")]
)
def test_the_budget_is_what_a_coordinator_would_take(available, verdict, host, monkeypatch):
    figures = SimpleNamespace(available=available)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: figures)
    host.write("/proc/meminfo", f"MemAvailable: {available // 1024} kB\nSwapFree: 0 kB\n")
    finding = memory.ram_budget(str(host.root))
    told(finding, verdict, "by default")
    assert finding.found.startswith(
        {"ok": "4.0 GiB", "warn": "512.0 MiB", "fail": "16.0 MiB"}[verdict]
    )


SWAP = "Filename Type Size Used Priority\n/dev/sda2 partition 2097148 0 -2\n"


def test_swap_is_a_warning_where_it_can_take_weights(host):
    told(memory.swap(str(host.root)), "ok", "none")
    host.write("/proc/swaps", SWAP)
    host.write("/proc/sys/vm/swappiness", "60\n")
    told(memory.swap(str(host.root)), "warn", "2.0 GiB", "/dev/sda2", "swappiness 60")
    root = v2_host(host, "max", 0)
    host.write("/sys/fs/cgroup/a/memory.swap.max", "max\n")
    told(memory.swap(root), "warn")
    host.write("/sys/fs/cgroup/a/memory.swap.max", "0\n")
    told(memory.swap(root), "ok", "not for this memory cgroup")


@pytest.mark.parametrize(("left", "verdict"), [(2 * GIB, "warn"), (SPARE_BYTES, "fail")])
def test_strict_overcommit_charges_what_is_shared(left, verdict, host):
    told(memory.overcommit(str(host.root)), "ok", "not shown")
    host.write("/proc/sys/vm/overcommit_memory", "1\n")
    told(memory.overcommit(str(host.root)), "ok", "is 1")
    host.write("/proc/sys/vm/overcommit_memory", "2\n")
    limit = 8 * GIB
    host.write(
        "/proc/meminfo",
        f"HugePages_Total: 0\nCommitLimit: {limit // 1024} kB\n"
        f"Committed_AS: {(limit - left) // 1024} kB\n",
    )
    told(memory.overcommit(str(host.root)), verdict, "left for all", "overcommit_memory=0")
    told(limits.private_map(str(host.root)), "ok", "not tried")


# --- huge pages ---------------------------------------------------------------------------------


@pytest.fixture
def thp(host: FakeHost) -> str:
    host.write(f"{THP}/enabled", "always [madvise] never\n")
    host.write(f"{THP}/shmem_enabled", "always within_size advise [never] deny force\n")
    for size, chosen in ((2048, "[never]"), (64, "[always] never"), (16, "always [never]")):
        host.write(f"{THP}/hugepages-{size}kB/shmem_enabled", f"{chosen}\n")
    return str(host.root)


def test_huge_pages_are_told_by_what_a_segment_got(thp, monkeypatch):
    """The settings are shown, the verdict is the kernel's."""
    said = (
        "enabled madvise, shmem_enabled never, hugepages-2048kB/shmem_enabled never, "
        "hugepages-64kB/shmem_enabled always"
    )
    for got, verdict in ((huge_pages.TRIED_BYTES, "ok"), (0, "warn"), (None, "warn")):
        monkeypatch.setattr(maps, "huge_bytes", lambda address, got=got: got)
        finding = huge_pages.huge_pages(thp)
        told(finding, verdict, said)
        assert "hugepages-16kB" not in finding.found


def test_a_kernel_without_huge_pages_is_a_warning(tmp_path):
    told(huge_pages.huge_pages(str(tmp_path)), "warn", "no transparent huge pages")


def test_small_segments_that_are_huge_are_a_warning(thp, monkeypatch):
    """They would take more than the books say."""
    monkeypatch.setattr(maps, "huge_bytes", lambda address: huge_pages.TRIED_BYTES)
    monkeypatch.setattr(maps, "taken_by_one_page", lambda: 2 * MIB)
    told(huge_pages.huge_pages(thp), "warn", "takes 2.0 MiB", "within_size")


def test_where_memory_is_short_none_is_taken(thp, monkeypatch):
    monkeypatch.setattr(huge_pages, "shortage", lambda needed_bytes: "1 MiB left")
    monkeypatch.setattr(maps, "sealed_map", lambda size: pytest.fail("it was tried"))
    told(huge_pages.huge_pages(thp), "warn", "not tried: 1 MiB left")
    told(huge_pages.collapse(), "warn", "not tried: 1 MiB left")


def test_a_collapse_that_is_refused_is_a_warning(monkeypatch):
    monkeypatch.setattr(maps, "collapse", refusing(errno.EINVAL))
    told(huge_pages.collapse(), "warn", "Invalid argument", "6.1")


@pytest.mark.parametrize(("got", "verdict"), [(0, "warn"), (None, "ok"), (MIB, "ok")])
def test_a_collapse_is_told_by_what_came_of_it(got, verdict, monkeypatch):
    monkeypatch.setattr(maps, "collapse", lambda address, size: None)
    monkeypatch.setattr(maps, "huge_bytes", lambda address: got)
    told(huge_pages.collapse(), verdict, "MADV_COLLAPSE")


def test_a_map_that_cannot_be_made_is_a_warning(thp, monkeypatch):
    monkeypatch.setattr(maps, "sealed_map", refusing(errno.EFBIG))
    told(huge_pages.huge_pages(thp), "warn", "not tried", "file_size")
    told(huge_pages.collapse(), "warn", "not tried", "file_size")


def test_a_sealed_map_is_aligned_and_its_pages_are_the_segments():
    """And nothing of it is left."""
    before = Path("/proc/self/maps").read_text().count("weight-cache:doctor")
    with maps.sealed_map(2 * MIB) as address:
        maps.touch(address, 2 * MIB)
        assert address % (2 * MIB) == 0
        assert maps.huge_bytes(address) in (0, 2 * MIB)
        assert Path("/proc/self/maps").read_text().count("weight-cache:doctor") == before + 1
    assert Path("/proc/self/maps").read_text().count("weight-cache:doctor") == before
    assert maps.taken_by_one_page() >= PAGE_BYTES


# --- limits of a process ------------------------------------------------------------------------

LIMITED = """
import json, resource, sys
from coordinator.probes import limits
import coordinator.loader, psutil  # before there is too little memory to import them
probe, name, *amounts = sys.argv[1:]
used = 0
for line in open("/proc/self/status"):
    if line.startswith({"RLIMIT_AS": "VmSize:", "RLIMIT_DATA": "VmData:"}.get(name, "-")):
        used = int(line.split()[1]) * 1024
infinite = lambda amount: resource.RLIM_INFINITY if amount == "none" else used + int(amount)
resource.setrlimit(getattr(resource, name), tuple(map(infinite, amounts)))
found = getattr(limits, probe)()
print(json.dumps([found.verdict, found.found, found.remedy]))
"""


def limited(probe: str, limit: str, soft: object, hard: object):
    """Return what a probe finds in a process with this limit, beyond what it has already."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, probe, limit, str(soft), str(hard)],
        check=True,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        cwd=ROOT,
        env=environment(),
    )
    verdict, found, remedy = json.loads(done.stdout)
    return Finding(probe, verdict, found, remedy)


@pytest.mark.process
@pytest.mark.parametrize(
    ("probe", "limit", "soft", "hard", "verdict", "words"),
    [
        ("open_files", "RLIMIT_NOFILE", 64, 1024, "ok", "hard limit 1024"),
        ("open_files", "RLIMIT_NOFILE", 64, 256, "warn", "ulimit -Hn"),
        ("open_files", "RLIMIT_NOFILE", 24, 24, "fail", "hard limit 24"),
        ("file_size", "RLIMIT_FSIZE", "none", "none", "ok", "no limit"),
        ("file_size", "RLIMIT_FSIZE", GIB, GIB, "warn", "1.0 GiB"),
        ("file_size", "RLIMIT_FSIZE", MIB, MIB, "fail", "no segment can exceed"),
        ("data_size", "RLIMIT_DATA", "none", "none", "ok", "no limit"),
        ("data_size", "RLIMIT_DATA", 8 * GIB, 8 * GIB, "warn", "count in full"),
        ("data_size", "RLIMIT_DATA", 64 * MIB, 64 * MIB, "warn", "of a loader"),
        ("address_space", "RLIMIT_AS", "none", "none", "ok", "no limit"),
        ("address_space", "RLIMIT_AS", GIB, GIB, "warn", "ulimit -v"),
        ("private_map", "RLIMIT_AS", 64 * MIB, "none", "warn", "ulimit -v"),
        ("private_map", "RLIMIT_AS", MIB, "none", "fail", "not even 2.0 MiB"),
        ("private_map", "RLIMIT_DATA", 64 * MIB, "none", "warn", "ulimit -d"),
    ],
)  # fmt: skip
def test_a_limit_is_told_by_what_it_leaves(probe, limit, soft, hard, verdict, words):
    told_hard = resource.getrlimit(getattr(resource, limit))[1]
    if told_hard != resource.RLIM_INFINITY and (hard == "none" or hard > told_hard):
        pytest.skip(f"the limit is {told_hard} here")
    told(limited(probe, limit, soft, hard), verdict, words)


def test_enough_maps_are_right_and_few_are_a_warning(host):
    told(limits.map_count(str(host.root)), "ok", "not shown")
    host.write("/proc/sys/vm/max_map_count", "65530\n")
    told(limits.map_count(str(host.root)), "ok", "65530")
    host.write("/proc/sys/vm/max_map_count", "1000\n")
    told(limits.map_count(str(host.root)), "warn", "is 1000", "sysctl")


@contextlib.contextmanager
def memlock(soft: int):
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


def test_pages_are_locked_and_a_device_that_is_not_there_is_not_tried(tmp_path):
    with memlock(8 * PAGE_BYTES):
        finding = limits.pinning(str(tmp_path))
    told(finding, "ok", "limit 32.0 KiB", "not tried: no device")


def test_a_device_that_is_there_is_left_to_another_command(tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert not limits.has_gpu(str(tmp_path))
    (tmp_path / "dev/kfd").touch()
    assert "scripts/device-check" in limits.pinning(str(tmp_path)).found


def test_pages_that_may_not_be_locked_are_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(maps, "lock", refusing(errno.ENOMEM))
    told(limits.pinning(str(tmp_path)), "warn", "Cannot allocate memory", "ulimit -l")
