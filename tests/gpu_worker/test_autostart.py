"""What a coordinator in the background is told of its starter, and when one is started."""

from __future__ import annotations

import os

import pytest

import gpu_worker
from gpu_worker import autostart
from shm_store.channel import listen
from shm_store.errors import ArgumentRefused, ConnectionLost, Draining, NoCoordinator, StartFailed
from shm_store.paths import log_path


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "s")


@pytest.fixture
def started(monkeypatch, path):
    """The sockets that a coordinator was started on. One answers there from then on."""
    paths, listeners = [], []

    def start(place: str) -> None:
        paths.append(place)
        if os.path.exists(place):
            os.unlink(place)
        listeners.append(listen(place))

    monkeypatch.setattr(autostart, "start", start)
    yield paths
    for listener in listeners:
        listener.close()


def test_where_one_answers_none_is_started(started, path):
    with listen(path):
        assert autostart.attach_or_start(path, lambda: "attached") == "attached"
    assert started == []


def test_one_that_leaves_at_that_moment_is_followed_by_another(started, path):
    left = [ConnectionLost("it went away"), Draining("it has left"), NoCoordinator("gone")]

    def attach() -> str:
        if left:
            os.unlink(path)
            raise left.pop()
        return "attached"

    assert autostart.attach_or_start(path, attach) == "attached"
    assert started == [path] * 4


def test_one_that_never_answers_is_not_asked_for_ever(started, path, monkeypatch):
    """It is stopped, say: another cannot be started beside it."""
    monkeypatch.setattr(autostart, "RETRY_LIMIT_S", 0.0)

    def attach() -> None:
        raise NoCoordinator("it was opened, but nobody answered")

    with pytest.raises(NoCoordinator, match="nobody answered"):
        autostart.attach_or_start(path, attach)
    assert started == [path]


def test_what_is_said_to_the_starter_alone_is_not_passed_on(monkeypatch):
    inherited = {
        "HOME": "/home/u",
        "NOTIFY_SOCKET": "/n",
        "FDSTORE": "9",
        "PYTHONINSPECT": "1",
        "LISTEN_PID": "1",
        "LISTEN_FDS": "1",
        "LISTEN_FDNAMES": "a",
        "WATCHDOG_USEC": "1",
        "WEIGHT_CACHE_SOCKET": "/s",
        "WEIGHT_CACHE_RANK": "1",
        "LISTENER": "mine",
    }
    kept = autostart._environment(inherited)
    assert {name: kept[name] for name in kept if name != "PYTHONPATH"} == {
        "HOME": "/home/u",
        "LISTENER": "mine",
    }


def test_it_finds_these_packages_wherever_it_runs(monkeypatch):
    """In front of everybody else's, if they are not installed where every program looks."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(gpu_worker.__file__)))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"purelib": "", "platlib": ""})
    assert autostart._environment({"PYTHONPATH": "/a:/b"})["PYTHONPATH"] == f"{root}:/a:/b"
    assert autostart._environment({})["PYTHONPATH"] == root
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"purelib": root, "platlib": ""})
    monkeypatch.chdir("/usr")
    assert autostart._environment({"PYTHONPATH": "/a:b"})["PYTHONPATH"] == "/a:/usr/b"
    assert "PYTHONPATH" not in autostart._environment({})


def test_a_program_that_does_not_name_its_python_is_told(path, monkeypatch):
    monkeypatch.setattr("sys.executable", "")
    with pytest.raises(StartFailed, match="does not name its Python"):
        autostart.start(path)


@pytest.mark.parametrize("executable", ["/no/such/python", "/bin/false"])
def test_a_python_that_does_not_run_is_named(path, monkeypatch, executable):
    monkeypatch.setattr("sys.executable", executable)
    with pytest.raises(StartFailed, match=r"No such file|exit code 1") as failed:
        autostart.start(path)
    assert failed.value.log == "" and path in str(failed.value)


def test_autostart_is_true_or_false(path):
    with pytest.raises(ArgumentRefused, match="autostart= is True or False"):
        gpu_worker.attach(path, autostart="yes")


def test_each_socket_has_a_log_of_its_own(monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert log_path("/run/user/7/c.sock") == "/state/weight-cache/log/run%user%7%c.sock.log"
    assert len(os.path.basename(log_path("/" + "x" * 106))) < 255
