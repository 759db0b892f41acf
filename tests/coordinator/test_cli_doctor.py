"""`doctor`, as people run it."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys

import pytest

from coordinator import doctor
from tests.coordinator.command_line import environment, run
from tests.coordinator.test_probes import refusing
from tests.processes import ROOT, WAIT_S

pytestmark = pytest.mark.process

NAMES = [
    "kernel", "proc", "memfd", "pidfd", "peer_pidfd", "sockets", "socket_folder", "dev_shm",
    "memory_cgroup", "memory_high", "ram_budget", "swap", "overcommit", "huge_pages", "collapse",
    "open_files", "file_size", "data_size", "address_space", "private_map", "map_count", "pinning",
    "torch", "torchao", "extra_gguf", "extra_digest", "extra_http", "extra_hf", "extra_s3",
    "extra_gcs", "extra_cuda",
]  # fmt: skip


def test_a_host_that_runs_these_tests_is_fit(path):
    """All of it, with no coordinator, in the order that is documented."""
    done = run("doctor", "--json", "--socket", path)
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(done.stdout)
    assert list(said) == ["verdict", "findings"]
    assert said["verdict"] in ("ok", "warn")
    assert [finding["name"] for finding in said["findings"]] == NAMES
    for finding in said["findings"]:
        assert list(finding) == ["name", "verdict", "found", "remedy"]
        assert finding["verdict"] in ("ok", "warn"), finding
        assert finding["found"]
        assert finding["verdict"] == "ok" or finding["remedy"], finding
    worst = {finding["verdict"] for finding in said["findings"]}
    assert said["verdict"] == ("warn" if "warn" in worst else "ok")
    assert os.listdir(os.path.dirname(path)) == []


def test_the_guide_has_every_probe():
    guide = (ROOT / "docs/doctor.md").read_text().partition("## Probes")[2]
    rows = re.findall(r"^\| `(\w+)` \|", guide, re.M)
    assert rows == NAMES


def test_people_read_a_table_of_plain_text(path, run_here):
    code, out, err = run_here("doctor", socket=path)
    head, _rule, *rows, sums = out.splitlines()
    assert (code, err) == (0, "")
    assert head.split() == ["verdict", "probe", "found"]
    assert out.isprintable() or "\x1b" not in out
    found = [row.split()[:2] for row in rows if not row.lstrip().startswith("->")]
    assert [name for _, name in found] == NAMES
    assert sums == ", ".join(
        f"{[verdict for verdict, _ in found].count(kind)} {kind}" for kind in ("fail", "warn", "ok")
    )


@pytest.mark.parametrize("arguments", [("doctor",), ("doctor", "--json")], ids=" ".join)
def test_what_cannot_be_done_without_is_exit_code_1(arguments, path, run_here, monkeypatch):
    """The others are found out all the same."""
    monkeypatch.setattr(os, "memfd_create", refusing(errno.ENOSYS))
    code, out, err = run_here(*arguments, socket=path)
    assert (code, err) == (1, "")
    assert all(name in out for name in NAMES)
    assert "Function not implemented" in out


@pytest.mark.parametrize("arguments", [("doctor",), ("doctor", "--json")], ids=" ".join)
def test_another_system_is_named_and_that_is_all(arguments, path, run_here, monkeypatch):
    monkeypatch.setattr(doctor, "PLATFORM", "darwin")
    code, out, err = run_here(*arguments, socket=path)
    assert (code, err) == (1, "")
    assert "this system is darwin" in out and "weight-cache needs Linux 5.3 or newer" in out
    assert "memfd_create" not in out


def test_another_system_needs_no_module_of_linux():
    """Where there is no `resource` and no `fcntl`, it is told so by its one finding."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.platform = 'win32'\n"
            "for missing in ('resource', 'fcntl', 'pwd'): sys.modules[missing] = None\n"
            "from coordinator.doctor import report\n"
            "assert report(None, True) is False",
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        cwd=ROOT,
        env=environment(),
    )
    assert (done.returncode, done.stderr) == (0, "")
    (finding,) = json.loads(done.stdout)["findings"]
    assert (finding["name"], finding["verdict"]) == ("kernel", "fail")


def test_it_imports_neither_torch_nor_what_is_optional(path):
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys\nfrom coordinator.doctor import report\nreport(sys.argv[1], True)\n"
            "seen = {name.split('.')[0] for name in sys.modules}\n"
            "sys.exit(str(seen & {'torch', 'torchao', 'gguf', 'fsspec', 'xxhash', 'numpy'}))",
            path,
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        cwd=ROOT,
        env=environment(),
    )
    assert done.stderr.strip() == "set()"
