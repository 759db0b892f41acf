"""Arguments are refused before anything is done with them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import gpu_worker
from gpu_worker import arguments
from gpu_worker.records import Origin
from shm_store.errors import ArgumentRefused, KeyRefused
from shm_store.paths import SOCKET_VARIABLE, default_socket_path, socket_path


def build():
    raise AssertionError("it must not run")


@pytest.mark.parametrize("patience", [None, "30", -1.0, math.nan, math.inf, True])
def test_a_patience_that_is_no_time_is_refused(patience):
    with pytest.raises(ArgumentRefused, match="patience="):
        arguments.patience_s(patience)
    assert arguments.patience_s(0) == 0.0


class TestAsked:
    def test_a_source_is_known_by_its_absolute_path(self, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        for source in ("w.safetensors", Path("w.safetensors"), f"{tmp_path}/./w.safetensors"):
            ask, origin = arguments.asked("k", source, None, "")
            assert (ask.key, ask.source, ask.build) == ("k", f"{tmp_path}/w.safetensors", None)
            assert origin == Origin("source", f"{tmp_path}/w.safetensors")

    def test_what_is_built_is_known_by_its_version(self):
        ask, origin = arguments.asked("k", None, build, "v2")
        assert (ask.source, ask.build, ask.version) == (None, build, "v2")
        assert origin == Origin("build", "v2")

    @pytest.mark.parametrize(
        ("source", "built", "version"),
        [
            pytest.param(None, None, "", id="neither"),
            pytest.param("f", build, "", id="both"),
            pytest.param(None, "not callable", "", id="a build that cannot be called"),
            pytest.param("f", None, "v2", id="a version of a file"),
            pytest.param(None, build, "v" * 121, id="a version too long"),
            pytest.param(None, build, "\ud800", id="a version without UTF-8"),
            pytest.param(None, build, 2, id="a version that is no text"),
            pytest.param(b"f", None, "", id="a path in bytes"),
            pytest.param(3, None, "", id="an fd"),
        ],
    )
    def test_what_contradicts_itself_is_refused(self, source, built, version):
        with pytest.raises(ArgumentRefused) as caught:
            arguments.asked("k", source, built, version)
        assert caught.value.remedy

    def test_a_version_that_is_no_text_is_shown_as_one(self):
        with pytest.raises(ArgumentRefused, match="not of type int") as caught:
            arguments.asked("k", None, build, 2)
        assert 'version="1"' in caught.value.remedy

    @pytest.mark.parametrize("key", ["", " k", "k\n", "k" * 513, None, b"k"])
    def test_a_key_that_is_none_is_refused(self, key):
        with pytest.raises(KeyRefused):
            arguments.asked(key, "f", None, "")


class TestFactory:
    @pytest.mark.parametrize("argument", ["skeleton", "build"])
    @pytest.mark.parametrize(
        ("given", "why"),
        [
            pytest.param(torch.nn.Linear(1, 1), "a module already, a Linear", id="a module"),
            pytest.param({}, "not of type dict", id="a state dict"),
            pytest.param(None, "not of type NoneType", id="nothing"),
        ],
    )
    def test_what_was_made_already_is_refused_with_how_to_wrap_it(self, argument, given, why):
        """A module can be called, too; it would be, without its input."""
        with pytest.raises(ArgumentRefused, match=f"^{argument}= .*{why}") as caught:
            arguments.check_factory(argument, given)
        assert f"{argument}=lambda: MyModel(config)" in caught.value.remedy

    def test_a_class_is_a_function_that_makes_one(self):
        arguments.check_factory("skeleton", torch.nn.Identity)

    def test_a_module_is_refused_as_build(self):
        with pytest.raises(ArgumentRefused, match="build= is a module already"):
            arguments.asked("k", None, torch.nn.Linear(1, 1), "")


class TestPublicCalls:
    """What only the call itself checks. Nothing is asked, and what was loaded stays as it is."""

    @pytest.mark.process
    @pytest.mark.parametrize("call", ["state_dict", "load"])
    @pytest.mark.parametrize("progress", [5, "print", b"print", [print]])
    def test_a_progress_that_cannot_be_called_is_refused(self, worker, call, progress):
        arguments = {"build": build, "progress": progress}
        if call == "load":
            arguments["skeleton"] = build
        with pytest.raises(ArgumentRefused, match="progress=") as caught:
            getattr(worker, call)("k", **arguments)
        assert caught.value.remedy

    @pytest.mark.process
    @pytest.mark.parametrize("train", [None, 1, "no"])
    def test_a_mode_that_is_no_flag_is_refused(self, worker, train):
        """1 is not True, so a later load with True would be told of another mode."""
        with pytest.raises(ArgumentRefused, match="train=") as caught:
            worker.load("k", skeleton=build, build=build, train=train)
        assert caught.value.remedy

    @pytest.mark.process
    @pytest.mark.parametrize("call", ["flush", "shutdown"])
    @pytest.mark.parametrize("timeout", [-1, math.nan, "1", b"1", Path("1"), True])
    def test_a_time_that_nobody_can_wait_ends_nothing(self, worker, call, timeout):
        with pytest.raises(ArgumentRefused, match="timeout=") as caught:
            getattr(worker, call)(timeout)
        assert "progress" not in caught.value.remedy, "there is none to wait for"
        worker.flush()

    @pytest.mark.process
    @pytest.mark.parametrize("key", [None, 5, b"k", Path("k"), ""])
    def test_every_call_refuses_what_is_no_key(self, worker, key):
        calls = (
            lambda: worker.state_dict(key, build=build),
            lambda: worker.load(key, skeleton=build, build=build),
            lambda: worker.use(key, skeleton=build, build=build).__enter__(),
            lambda: worker.evict(key),
        )
        for call in calls:
            with pytest.raises(KeyRefused):
                call()


class TestTimeout:
    @pytest.mark.parametrize(("timeout", "result"), [(None, None), (0, 0.0), (2, 2.0), (0.5, 0.5)])
    def test_it_is_in_seconds(self, timeout, result):
        assert arguments.timeout_s(timeout) == result

    @pytest.mark.parametrize("timeout", [-1, -1e-9, math.nan, math.inf, 2e9, True, "1"])
    def test_a_time_that_nobody_can_wait_is_refused(self, timeout):
        with pytest.raises(ArgumentRefused) as caught:
            arguments.timeout_s(timeout)
        assert caught.value.remedy


class TestAttach:
    @pytest.mark.parametrize("device", ["meta", "", 0, "sim:x", "cpu:1", "cuda:-1"])
    def test_an_unknown_device_is_refused_with_the_known_ones(self, device):
        with pytest.raises(gpu_worker.DeviceUnknown, match="cpu"):
            gpu_worker.attach("/none", device=device)

    @pytest.mark.parametrize("size", [0, -1, 1.5, True, "20G", "", b"1"])
    @pytest.mark.parametrize("argument", ["vram_budget", "working_memory"])
    def test_a_size_that_is_none_is_refused(self, argument, size):
        with pytest.raises(ArgumentRefused):
            gpu_worker.attach("/none", device="sim:0", **{argument: size})

    @pytest.mark.parametrize("name", ["n" * 201, "two\nlines", "\ud800", 7])
    def test_a_name_that_cannot_be_shown_is_refused(self, name):
        with pytest.raises(ArgumentRefused, match="name="):
            gpu_worker.attach("/none", name=name)

    @pytest.mark.parametrize("socket", [5, b"/run/s", ["/run/s"], 0, False, "\ud800"])
    def test_what_is_no_path_in_text_is_refused(self, socket):
        """An empty one is not: it is a path, where nobody answers."""
        with pytest.raises(ArgumentRefused, match="socket=") as caught:
            gpu_worker.attach(socket)
        assert caught.value.remedy

    def test_a_path_too_long_for_a_socket_is_refused(self, tmp_path):
        with pytest.raises(ArgumentRefused, match="socket path"):
            gpu_worker.attach(str(tmp_path / ("s" * 108)))

    def test_the_programs_name_is_made_fit(self, monkeypatch):
        monkeypatch.setattr("sys.argv", ["/opt/a\nb" + "c" * 300])
        assert arguments.program_name() == "ab" + "c" * 198
        monkeypatch.setattr("sys.argv", [])
        assert arguments.program_name() == ""


class TestSocketPath:
    def test_the_argument_wins_then_the_variable_then_the_default(self, monkeypatch):
        monkeypatch.setenv(SOCKET_VARIABLE, "/run/chosen")
        assert socket_path("/run/argument") == "/run/argument"
        assert socket_path(Path("/run/argument")) == "/run/argument"
        assert socket_path() == "/run/chosen"
        monkeypatch.setenv(SOCKET_VARIABLE, "")
        assert socket_path() == default_socket_path()
        monkeypatch.delenv(SOCKET_VARIABLE)
        assert socket_path() == default_socket_path()

    def test_the_default_is_a_place_of_the_user(self, monkeypatch, tmp_path):
        """Without XDG_RUNTIME_DIR, too, and without a warning: both ends find the same one."""
        tmp_path.chmod(0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        assert default_socket_path().endswith("/weight-cache/coordinator.sock")
        monkeypatch.delenv("XDG_RUNTIME_DIR")
        assert default_socket_path().endswith("/weight-cache/coordinator.sock")
        assert default_socket_path() == default_socket_path()
