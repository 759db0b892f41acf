"""What `doctor`'s probes say of calls, folders and packages where a host has less than this one."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import tomllib
from importlib import util

import pytest

from coordinator.probes import folders, kernel, packages
from coordinator.probes.every import found_by, probes
from coordinator.probes.finding import ok
from shm_store import channel, segment
from shm_store.channel import Channel
from shm_store.paths import SOCKET_VARIABLE
from tests.processes import ROOT
from tests.shm_store.test_connecting import OLDER_KERNEL

GIB = 1 << 30


def refusing(code: int):
    def refuse(*_: object, **__: object):
        raise OSError(code, os.strerror(code))

    return refuse


def told(finding, verdict: str, *words: str) -> None:
    """Assert what a finding is and says. What is not right has a remedy."""
    assert finding.verdict == verdict, finding
    assert verdict == "ok" or finding.remedy, finding
    for word in words:
        assert word in f"{finding.found} -> {finding.remedy}"


@pytest.fixture
def no_fd_is_left():
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.usefixtures("no_fd_is_left")
@pytest.mark.parametrize("name", probes())
def test_a_probe_leaves_no_fd_and_says_its_own_name(name):
    """What it says here depends on this host."""
    finding = found_by(name, probes()[name])
    assert finding.name == name
    told(finding, finding.verdict)


# --- the kernel ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "verdict"),
    [
        ("5.3.0", "ok"),
        ("6.18.1-generic", "ok"),
        ("10.0", "ok"),
        ("5.2.21", "fail"),
        ("4.19.0-26-cloud", "fail"),
        ("unknown", "warn"),
    ],
)
def test_the_kernel_is_new_enough_or_not(release, verdict, monkeypatch):
    made = os.uname()
    monkeypatch.setattr(
        os, "uname", lambda: os.uname_result((made[0], made[1], release, *made[3:]))
    )
    told(kernel.version(), verdict, release)


def test_a_system_without_proc_is_a_failure(tmp_path):
    """The kernel's file systems are looked for where the root says; this one's has none."""
    told(kernel.proc(), "ok")
    told(kernel.proc(str(tmp_path)), "fail", "/proc/meminfo", "mount /proc")


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSYS, "seccomp"),
        (errno.EPERM, "seccomp"),
        (errno.EACCES, "vm.memfd_noexec"),
        (errno.EMFILE, "ulimit -n"),
    ],
)
def test_a_memfd_that_is_refused_is_a_failure(code, remedy, monkeypatch):
    monkeypatch.setattr(os, "memfd_create", refusing(code))
    told(kernel.memfd(), "fail", "memfd_create", os.strerror(code), remedy)


def test_a_python_without_memfds_is_a_failure(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    told(kernel.memfd(), "fail", "no memfd_create", "Linux 5.3")


@pytest.mark.usefixtures("no_fd_is_left")
def test_seals_that_seal_nothing_are_a_failure(monkeypatch):
    monkeypatch.setattr(segment, "freeze", lambda fd, name: None)
    told(kernel.memfd(), "fail", "can still be written")


@pytest.mark.usefixtures("no_fd_is_left")
def test_seals_that_are_refused_are_a_failure(monkeypatch):
    monkeypatch.setattr(fcntl, "fcntl", refusing(errno.EINVAL))
    told(kernel.memfd(), "fail", "cannot be sealed")


@pytest.mark.usefixtures("no_fd_is_left")
def test_an_edit_that_others_see_is_a_failure(monkeypatch):
    monkeypatch.setattr(os, "pread", lambda *_: b"Weights")
    told(kernel.memfd(), "fail", "seen by others")


def test_a_pidfd_that_is_refused_is_a_failure(monkeypatch):
    monkeypatch.setattr(os, "pidfd_open", refusing(errno.ENOSYS))
    told(kernel.pidfd(), "fail", "pidfd_open", "seccomp")
    monkeypatch.delattr(os, "pidfd_open")
    told(kernel.pidfd(), "fail", "no pidfd_open", "Linux 5.3")


@pytest.mark.usefixtures("no_fd_is_left")
@pytest.mark.process
def test_a_pidfd_that_names_the_dead_is_a_failure(monkeypatch):
    """A real one, of another process, which has ended."""
    opened = os.pidfd_open
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        monkeypatch.setattr(os, "pidfd_open", lambda pid: opened(ended.pid))
        told(kernel.pidfd(), "fail", "has ended")


@pytest.mark.usefixtures("no_fd_is_left")
def test_a_kernel_without_peer_pidfds_is_a_warning(monkeypatch):
    monkeypatch.setattr(channel, "SO_PEERPIDFD", OLDER_KERNEL)
    told(kernel.peer_pidfd(), "warn", "no SO_PEERPIDFD", "6.5")


def test_without_sockets_there_is_a_failure_and_nothing_to_ask_of(monkeypatch):
    monkeypatch.setattr(socket, "socketpair", refusing(errno.ESOCKTNOSUPPORT))
    told(kernel.sockets(), "fail", "no Unix SEQPACKET sockets", "seccomp")
    told(kernel.peer_pidfd(), "warn", "not tried")


@pytest.mark.usefixtures("no_fd_is_left")
def test_a_message_that_loses_its_fd_is_a_failure(monkeypatch):
    monkeypatch.setattr(Channel, "receive", lambda _: (b"weights", []))
    told(kernel.sockets(), "fail", "without its bytes or its fd")


@pytest.mark.usefixtures("no_fd_is_left")
def test_a_message_that_is_refused_is_a_failure(monkeypatch):
    monkeypatch.setattr(Channel, "send_frame", refusing(errno.EPERM))
    told(kernel.sockets(), "fail", "a message with an fd")


@pytest.mark.usefixtures("no_fd_is_left")
def test_a_sender_with_another_name_is_a_failure(monkeypatch):
    told_of = Channel.credentials
    monkeypatch.setattr(Channel, "credentials", lambda self: told_of(self)._replace(pid=0))
    told(kernel.sockets(), "fail", "pid 0")


# --- folders ------------------------------------------------------------------------------------


def test_a_folder_that_takes_a_socket_is_right_and_stays_as_it_was(tmp_path):
    tmp_path.chmod(0o700)
    told(folders.socket_folder(f"{tmp_path}/s"), "ok", "mode 0700")
    assert os.listdir(tmp_path) == []


def test_a_socket_that_is_there_stays(coordinator):
    before = os.stat(coordinator.socket).st_ino
    told(folders.socket_folder(coordinator.socket), "ok")
    assert os.stat(coordinator.socket).st_ino == before


def test_a_path_of_108_bytes_is_a_failure(tmp_path):
    path = f"{tmp_path}/".ljust(108, "s")
    told(folders.socket_folder(path), "fail", "has 108 bytes", "107 at most")


def test_the_longest_path_is_right(tmp_path):
    """Although what is tried there has a longer name."""
    folder = tmp_path / ("f" * (107 - len(str(tmp_path)) - 3))
    folder.mkdir(mode=0o700)
    told(folders.socket_folder(f"{folder}/s"), "ok")


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_what_is_no_path_is_a_failure(path):
    told(folders.socket_folder(path), "fail", "no path of a socket")


def test_a_folder_that_somebody_chose_and_did_not_make_is_a_failure(tmp_path):
    told(folders.socket_folder(f"{tmp_path}/gone/s"), "fail", "no folder", "make it")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_takes_no_socket_is_a_failure():
    """/proc is one, whoever asks."""
    told(folders.socket_folder("/proc/s"), "fail", "no socket can be made in /proc")


def test_the_default_folder_need_not_be_there(tmp_path, monkeypatch):
    """`serve` makes it, where it can."""
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    told(folders.socket_folder(), "ok", f"{tmp_path}/weight-cache", "`serve` makes it")
    assert os.listdir(tmp_path) == []
    (tmp_path / "weight-cache").write_text("")
    told(folders.socket_folder(), "fail", "cannot be made")


def test_a_folder_that_others_may_write_to_is_a_warning(tmp_path):
    tmp_path.chmod(0o777)
    told(folders.socket_folder(f"{tmp_path}/s"), "warn", "mode 0777", "0700")


def test_a_folder_of_somebody_else_is_a_warning(tmp_path, monkeypatch):
    if os.geteuid() == 0:
        os.chown(tmp_path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    told(folders.socket_folder(f"{tmp_path}/s"), "warn", "belongs to user")


@pytest.mark.parametrize(("free", "verdict"), [(GIB, "ok"), (64 << 20, "warn")])
def test_a_small_shm_is_a_warning_for_the_sake_of_torch(free, verdict, monkeypatch, tmp_path):
    figures = os.statvfs("/proc")
    blocks = (4096, 4096, 8 * GIB // 4096, free // 4096, free // 4096, *figures[5:])
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(blocks))
    told(folders.dev_shm(str(tmp_path)), verdict, "DataLoader", "weight-cache does without")


def test_no_shm_is_a_warning(tmp_path):
    told(folders.dev_shm(str(tmp_path)), "warn", "no /dev/shm", "--shm-size")


# --- packages -----------------------------------------------------------------------------------


def without(monkeypatch, *missing: str) -> None:
    found = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name in missing else found(name))


@pytest.mark.parametrize("extra", packages.EXTRAS, ids=lambda extra: extra.name)
def test_an_extra_that_is_not_there_says_how_to_have_it(extra, monkeypatch, tmp_path):
    """It is none of what weight-cache needs."""
    without(monkeypatch, *extra.modules)
    finding = packages.installed(extra, str(tmp_path))
    told(finding, "ok", "not installed", f"pip install 'shm-weight-cache[{extra.name}]'")


def test_an_extra_of_which_half_is_there_names_the_other_half(monkeypatch):
    without(monkeypatch, "aiohttp")
    (http,) = [extra for extra in packages.EXTRAS if extra.name == "http"]
    assert packages.installed(http).found.startswith("aiohttp: not installed")


def test_a_gpu_that_lacks_its_extra_is_a_warning(monkeypatch, tmp_path):
    without(monkeypatch, "cuda.bindings")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    (cuda,) = [extra for extra in packages.EXTRAS if extra.name == "cuda"]
    told(packages.installed(cuda, str(tmp_path)), "warn", "[cuda]")


def test_a_package_whose_parent_is_not_there_is_not_there():
    extra = packages.Extra("none", ("no_such_package.part",), "nothing")
    assert "not installed" in packages.installed(extra).found


def test_without_torch_there_is_a_warning(monkeypatch):
    without(monkeypatch, "torch", "torchao")
    told(packages.torch(), "warn", "pip install torch")
    told(packages.torchao(), "ok", "pip install 'torchao")


def test_the_extras_are_those_of_the_project():
    """What pip is told to install brings what is looked for, and each one for users is named."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for_developers = {"demo", "test", "bench", "dev"}
    assert {extra.name for extra in packages.EXTRAS} == set(extras) - for_developers
    for extra in packages.EXTRAS:
        brought = {needed.split(">=")[0].replace("-", "_") for needed in extras[extra.name]}
        assert {module.replace(".", "_") for module in extra.modules} == brought


# --- all of them --------------------------------------------------------------------------------


def test_a_probe_that_cannot_look_is_a_warning():
    told(found_by("swap", refusing(errno.EACCES)), "warn", "Permission denied")
    assert found_by("swap", lambda: ok("swap", "none")) == ok("swap", "none")
