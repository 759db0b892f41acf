"""`restart` ends with an error where a process that is started again did not find what was kept."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest

from benchmarks import restart
from benchmarks.answering import Answering, Plan
from benchmarks.coordinator_process import CoordinatorProcess
from benchmarks.models import generated, same

pytestmark = pytest.mark.process


class Wrong(Answering):
    """A process that says something else of its start than the truth."""

    says: dict[str, object] = {}  # noqa: RUF012 (set by each test)

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.started = dataclasses.replace(self.started, **self.says)


@pytest.fixture
def scene(tmp_path, monkeypatch) -> Iterator[restart._Scene]:
    """A served model, whose first process was started and is to be killed."""
    monkeypatch.setattr(restart, "Answering", Wrong)
    monkeypatch.setattr(Wrong, "says", {})
    monkeypatch.setenv(restart.SIZE_VARIABLE, "64MiB")
    model = generated(1_000_000, 4, tmp_path)
    socket = str(tmp_path / "s")
    with contextlib.ExitStack() as stack:
        stack.enter_context(CoordinatorProcess(socket))
        yield restart._Scene(model, socket, stack)


def test_a_byte_that_was_moved_ends_it(scene, monkeypatch):
    assert scene.kept().weights_bytes == 0
    monkeypatch.setattr(Wrong, "says", {"moved_bytes": 1})
    with pytest.raises(RuntimeError, match=r"^1 bytes were moved"):
        scene.kept()


def test_a_wrong_answer_ends_it(scene, monkeypatch):
    monkeypatch.setattr(Wrong, "says", {"answer": [0.0] * 8})
    with pytest.raises(RuntimeError, match="was right"):
        scene.kept()


def test_weights_that_were_not_kept_end_it(scene):
    """Somebody had the device's room, as in `on_host`, when it was to be kept."""
    scene._kill()
    scene._operator.limit(restart.POOL, restart.NOTHING_BYTES)
    scene._operator.flush()
    with pytest.raises(RuntimeError, match="was not kept"):
        scene.kept()


def test_a_process_that_ends_by_itself_is_no_kill(tmp_path):
    """What was to be killed while it computes, and had ended before, ends the benchmark."""
    model = generated(1_000_000, 4, tmp_path)
    with Answering(Plan(model, "mapped", idle=True)) as served:
        assert served._process.stdin is not None
        served._process.stdin.close()
        served._process.wait()
        with pytest.raises(RuntimeError, match="has ended"):
            served.kill_while_it_computes()


def test_answers_are_the_same_but_for_the_last_bits():
    assert same([1.0, 2.0], [1.0, 2.0001])
    assert not same([1.0, 2.0], [1.0, 2.1])
    assert not same([1.0], [1.0, 2.0])
