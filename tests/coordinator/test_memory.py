"""How much memory a process may use, read from made-up hosts and containers; and written sizes."""

from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from coordinator.backing import cgroup_headroom_bytes, host_headroom_bytes, memory_cgroups
from coordinator.memory import default_ram_budget_bytes, usable_bytes
from shm_store.errors import ArgumentRefused
from shm_store.sizes import parse_size

GIB = 1 << 30
MIB = 1 << 20
V1_UNLIMITED = 9223372036854771712
V1_MOUNT = "32 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V2_MOUNT = "31 23 0:28 {top} /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate"
OTHERS = (
    "22 27 0:21 / /proc rw,relatime - proc proc rw",
    "29 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct",
    "a broken line",
    "31 23 0:28 / /short - cgroup",
    "short - cgroup2 cgroup2 rw",
    "",
)


@dataclass
class FakeHost:
    """A root folder with just the files that are read."""

    root: Path

    def write(self, path: str, text: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def process(self, cgroups: list[str], mounts: list[str]) -> None:
        self.write("/proc/self/cgroup", "\n".join(cgroups) + "\n")
        self.write("/proc/self/mountinfo", "\n".join([*OTHERS, *mounts]) + "\n")

    def v1(self, folder: str, limit: int, use: int, inactive: int = 0, active: int = 0) -> None:
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{use}\n")
        stat = f"inactive_file 1\ntotal_inactive_file {inactive}\ntotal_active_file {active}\n"
        self.write(f"{folder}/memory.stat", stat)

    def v2(
        self, folder: str, limit: int | str, use: int, inactive: int = 0, high: int | str = "max"
    ) -> None:
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.high", f"{high}\n")
        self.write(f"{folder}/memory.current", f"{use}\n")
        self.write(f"{folder}/memory.stat", f"anon 5\ninactive_file {inactive}\nactive_file 0\n")

    def headroom(self) -> int | None:
        return cgroup_headroom_bytes(str(self.root))


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path)


# --- v1 -----------------------------------------------------------------------------------------


def test_v1_takes_the_least_of_the_chain(host):
    """The own cgroup allows more than its parent does; the root's "unlimited" is no limit."""
    host.process(["4:memory:/pod/app", "3:cpuset:/", "0::/"], [V1_MOUNT.format(top="/")])
    host.v1("/sys/fs/cgroup/memory/pod/app", 8 * GIB, GIB)
    host.v1("/sys/fs/cgroup/memory/pod", 6 * GIB, 2 * GIB)
    host.v1("/sys/fs/cgroup/memory", V1_UNLIMITED, 20 * GIB)
    assert host.headroom() == 4 * GIB


def test_v1_without_any_limit_limits_nothing(host):
    host.process(["4:memory:/pod"], [V1_MOUNT.format(top="/")])
    host.v1("/sys/fs/cgroup/memory/pod", V1_UNLIMITED, GIB)
    host.v1("/sys/fs/cgroup/memory", V1_UNLIMITED, GIB)
    assert host.headroom() is None


def test_file_pages_make_room(host):
    """Both kinds: a file that was read twice is active, and dropped as readily."""
    host.process(["4:memory:/"], [V1_MOUNT.format(top="/")])
    host.v1("/sys/fs/cgroup/memory", 4 * GIB, 3 * GIB, inactive=GIB, active=GIB // 2)
    assert host.headroom() == 4 * GIB - (3 * GIB - GIB - GIB // 2)


def test_v1_with_several_controllers_in_one_hierarchy(host):
    mount = V1_MOUNT.replace("rw,memory", "rw,cpu,memory,blkio")
    host.process(["4:cpu,memory,blkio:/a"], [mount.format(top="/")])
    host.v1("/sys/fs/cgroup/memory/a", GIB, 0)
    assert host.headroom() == GIB


def test_use_beyond_the_limit_is_no_headroom(host):
    host.process(["4:memory:/"], [V1_MOUNT.format(top="/")])
    host.v1("/sys/fs/cgroup/memory", GIB, 2 * GIB)
    assert host.headroom() == 0


# --- v2 -----------------------------------------------------------------------------------------


def test_v2_takes_the_least_of_the_chain(host):
    """`max` is no limit, and the top of the hierarchy has no such files."""
    host.process(["0::/a.slice/b.scope"], [V2_MOUNT.format(top="/")])
    host.v2("/sys/fs/cgroup/a.slice/b.scope", "max", GIB)
    host.v2("/sys/fs/cgroup/a.slice", 10 * GIB, 4 * GIB, inactive=GIB)
    assert host.headroom() == 7 * GIB


def test_v2_high_is_a_limit_too(host):
    """Above it allocations crawl."""
    host.process(["0::/a"], [V2_MOUNT.format(top="/")])
    host.v2("/sys/fs/cgroup/a", 10 * GIB, GIB, high=3 * GIB)
    assert host.headroom() == 2 * GIB


def test_hybrid_host_takes_the_least_of_both(host):
    """v2 is mounted, the memory controller is v1's."""
    unified = V2_MOUNT.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified ")
    host.process(["4:memory:/a", "0::/a"], [V1_MOUNT.format(top="/"), unified.format(top="/")])
    host.write("/sys/fs/cgroup/unified/a/cgroup.procs", "")
    host.v1("/sys/fs/cgroup/memory/a", 3 * GIB, GIB)
    assert host.headroom() == 2 * GIB
    host.v2("/sys/fs/cgroup/unified/a", GIB, 0)
    assert host.headroom() == GIB


# --- containers -----------------------------------------------------------------------------------


def test_container_that_sees_the_hosts_path(host):
    """No cgroup namespace: the mount shows only the container's own part of the hierarchy."""
    host.process(["4:memory:/docker/c1/sub"], [V1_MOUNT.format(top="/docker/c1")])
    host.v1("/sys/fs/cgroup/memory", 2 * GIB, 0)
    host.v1("/sys/fs/cgroup/memory/sub", 3 * GIB, 0)
    host.v1("/sys/fs/cgroup/memory/docker/c1/sub", MIB, 0)
    assert host.headroom() == 2 * GIB


def test_container_whose_path_is_not_under_the_mount(host):
    """The mount point is then the nearest level that is known."""
    host.process(["4:memory:/kubepods/p/c"], [V1_MOUNT.format(top="/docker/c1")])
    host.v1("/sys/fs/cgroup/memory", 2 * GIB, 0)
    assert host.headroom() == 2 * GIB


@pytest.mark.parametrize(("path", "top"), [("/../sibling", "/"), ("/", "/../..")])
def test_cgroup_namespace_that_the_process_or_the_mount_lies_outside(host, path, top):
    """`..` never leads out of the mount."""
    host.process([f"0::{path}"], [V2_MOUNT.format(top=top)])
    host.v2("/sys/fs/cgroup", 2 * GIB, 0)
    host.v2("/sys/fs/sibling", MIB, 0)
    assert host.headroom() == 2 * GIB


def test_name_that_begins_like_the_mounts_top_is_another_cgroup(host):
    """/docker/c10 does not lie in /docker/c1."""
    host.process(["4:memory:/docker/c10/x"], [V1_MOUNT.format(top="/docker/c1")])
    host.v1("/sys/fs/cgroup/memory", 2 * GIB, 0)
    host.v1("/sys/fs/cgroup/memory/0/x", MIB, 0)
    assert host.headroom() == 2 * GIB


def test_second_mount_that_shows_the_cgroup_wins_over_one_that_does_not(host):
    foreign = V1_MOUNT.format(top="/other").replace("/cgroup/memory", "/cgroup/foreign")
    host.process(["4:memory:/a"], [foreign, V1_MOUNT.format(top="/")])
    host.v1("/sys/fs/cgroup/foreign", MIB, 0)
    host.v1("/sys/fs/cgroup/memory/a", GIB, 0)
    assert host.headroom() == GIB


def test_removed_cgroup_leaves_its_parents(host):
    """The path says so, and the folder is gone."""
    host.process(["0::/a/b (deleted)"], [V2_MOUNT.format(top="/")])
    host.v2("/sys/fs/cgroup/a", GIB, 0)
    assert host.headroom() == GIB


def test_odd_mount_points_and_paths(host):
    """mountinfo spells white space in octal; a path may hold a colon, and what is no ASCII."""
    mount = V2_MOUNT.replace("/sys/fs/cgroup", "/sys/fs/my\\040c\\134gä")
    host.process(["0::/a:b:c"], [mount.format(top="/")])
    host.v2("/sys/fs/my c\\gä/a:b:c", GIB, 0)
    assert host.headroom() == GIB


@pytest.mark.parametrize("cgroups", [[], ["3:cpuset:/"], ["0::/"], ["nonsense", ""]])
def test_missing_controller_limits_nothing(host, cgroups):
    host.process(cgroups, [V1_MOUNT.format(top="/")])
    host.v1("/sys/fs/cgroup/memory", MIB, 0)
    assert host.headroom() is None


def test_system_without_proc_limits_nothing(host):
    assert host.headroom() is None
    assert host_headroom_bytes(str(host.root)) is None


def test_unreadable_figures_limit_nothing(host):
    host.process(["0::/"], [V2_MOUNT.format(top="/")])
    host.v2("/sys/fs/cgroup", "soon", 0)
    assert host.headroom() is None
    host.v2("/sys/fs/cgroup", GIB, 0)
    (host.root / "sys/fs/cgroup/memory.current").unlink()
    assert host.headroom() is None


def test_this_process_is_found_where_the_kernel_says_it_is():
    """Against the real /proc: some level of the chain lists this process's cgroup."""
    folders = [Path(folder) for folder, _ in memory_cgroups()]
    if not folders:
        pytest.skip("no memory cgroup is mounted here")
    for folder in folders:
        assert folder.is_dir()


# --- the host, and both --------------------------------------------------------------------------


def test_host_headroom_counts_swap(host):
    host.write(
        "/proc/meminfo", "MemTotal: 9 kB\nMemAvailable:   1000 kB\nSwapFree: 24 kB\nHuge: 0\n"
    )
    assert host_headroom_bytes(str(host.root)) == 1024 * 1024


def test_usable_is_the_cgroups_or_the_hosts_whichever_is_less(host):
    """The host's figure is the real one; the cgroup is made up."""
    host.process(["0::/"], [V2_MOUNT.format(top="/")])
    host.v2("/sys/fs/cgroup", 60 * MIB + 1, 10 * MIB)
    assert usable_bytes(str(host.root)) == 50 * MIB + 1
    assert default_ram_budget_bytes(str(host.root)) == 25 * MIB
    host.v2("/sys/fs/cgroup", 1 << 55, 0)
    assert 0 < usable_bytes(str(host.root)) <= psutil.virtual_memory().total


# --- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1000", 1000),
        ("1", 1),
        ("7B", 7),
        ("20GiB", 20 * GIB),
        ("20 gib", 20 * GIB),
        (" 512MB\n", 512_000_000),
        ("1.5GiB", 3 * GIB // 2),
        ("0.1KB", 100),
        ("2kib", 2048),
        ("1024TiB", 1 << 50),
        ("3TB", 3_000_000_000_000),
    ],
)
def test_sizes_are_read(text, size_bytes):
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "GiB", "0", "0GiB", "0.0001", "-1", "+1", "-1GiB", "nan", "inf", "1e9", "0x10",
        "1_000", "1,000", "1.", ".5", "1.2.3", "20G", "20Gi", "20gigs", "1 0", "1PiB", "1025TiB",
        "٣", "²", "9" * 5000, "1" + "0" * 30, "1GiB2", "b1", "1 k b", "½GiB",
    ],
)  # fmt: skip
def test_absurd_sizes_are_refused(text):
    """With a remedy, and without repeating a novel."""
    with pytest.raises(ArgumentRefused) as caught:
        parse_size(text)
    assert caught.value.remedy and len(str(caught.value)) < 200
