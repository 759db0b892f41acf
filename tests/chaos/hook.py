"""Inside each process of a chaos run: ends or stops it at a failpoint, and notes what is read.

`site/sitecustomize.py` installs it, before anything else of the process runs. Whoever runs chaos
arms one failpoint at a time by a symbolic link, whose text says all (`Armed`): a process looks at
it with one system call. The first that comes to the armed place claims it, by another link that
only one can make, and gets the signal.

Beside that a coordinator writes into `trace` which generations are in its store, and which it has a
loader read.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any, NamedTuple

from tests.chaos.failpoints import FAILPOINTS, Failpoint, resolve

FOLDER_VARIABLE = "WEIGHT_CACHE_CHAOS"
"""The folder of the run. Also how its processes are told from all others."""

ROLES = {
    "tests.chaos.worker": "worker",
    "coordinator.loader": "loader",
    "coordinator": "coordinator",
    "tests.chaos.group": "supervisor",
}
"""By the module that a process runs."""

SABOTAGE_VARIABLE = "WEIGHT_CACHE_CHAOS_SABOTAGE"
"""The target of a function that is to do nothing: for the tests of chaos itself."""

TRACED = "coordinator.executor:Executor.perform"


class Armed(NamedTuple):
    """One failpoint, armed.

    Attributes:
        number: of the fault; its claim is made once.
        nth: the call of a process at which it gets the signal.
        signal: its number.
    """

    number: int
    role: str
    name: str
    nth: int
    signal: int

    def text(self) -> str:
        return "|".join(map(str, self))

    @classmethod
    def of(cls, text: str) -> Armed:
        number, role, name, nth, signal = text.split("|")
        return cls(int(number), role, name, int(nth), int(signal))


def armed_path(folder: str) -> str:
    return os.path.join(folder, "armed")


def claim_path(folder: str, number: int) -> str:
    return os.path.join(folder, f"claim-{number}")


def install(folder: str) -> None:
    """Put this process's failpoints around the functions that they are at, once those are there."""
    module = _module(sys.orig_argv)
    role = ROLES.get(module, "")
    if not role:
        return
    hook = _Hook(folder, role)
    for name in hook.modules & set(sys.modules):
        hook.wrap(sys.modules[name])
    sys.meta_path.insert(0, hook)
    if role == "worker":
        os.register_at_fork(after_in_child=hook.disarm)  # the supervisor is itself a child


def _module(command: list[str]) -> str:
    """Return what `python -m` runs; nothing if it does not."""
    for number, word in enumerate(command[:-1]):
        if word == "-m":
            return command[number + 1]
    return ""


class _Hook:
    """A finder on `sys.meta_path` that changes nothing but the functions of failpoints."""

    def __init__(self, folder: str, role: str) -> None:
        self._folder = folder
        self._armed = armed_path(folder)
        self._passed: dict[int, int] = {}
        """By armed failpoint: how many calls went by here."""
        self._points: dict[str, list[Failpoint]] = {}
        for point in FAILPOINTS:
            if point.role == role:
                self._points.setdefault(point.target, []).append(point)
        self._traced = TRACED if role == "coordinator" else ""
        self._sabotaged = os.environ.get(SABOTAGE_VARIABLE, "")
        targets = [*self._points, *filter(None, [self._traced, self._sabotaged])]
        self.modules = {target.partition(":")[0] for target in targets}

    def disarm(self) -> None:
        """In a worker's forked child: it is nobody's victim, else its parent were taken for it."""
        self._armed = ""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in self.modules:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            inner = spec.loader.exec_module

            def execute(module: Any) -> None:
                inner(module)
                self.wrap(module)

            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec

    def wrap(self, module: Any) -> None:
        if self._sabotaged.partition(":")[0] == module.__name__:
            owner, name = resolve(module, self._sabotaged.partition(":")[2].split("."))
            setattr(owner, name, lambda *arguments: None)
        for target, points in self._points.items():
            if target.partition(":")[0] == module.__name__:
                owner, name = resolve(module, points[0].path)
                setattr(owner, name, self._around(getattr(owner, name), points))
        if self._traced.partition(":")[0] == module.__name__:
            owner, name = resolve(module, self._traced.partition(":")[2].split("."))
            setattr(owner, name, self._noting(getattr(owner, name)))

    def _around(self, inner: Callable[..., Any], points: list[Failpoint]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def call(*arguments: Any, **named: Any) -> Any:
            self._pass(points, "before", arguments)
            result = inner(*arguments, **named)
            self._pass(points, "after", (*arguments, result))
            return result

        return call

    def _pass(self, points: Iterable[Failpoint], moment: str, seen: tuple[object, ...]) -> None:
        try:
            armed = Armed.of(os.readlink(self._armed))
        except FileNotFoundError:
            return
        for point in points:
            if (point.name, point.moment) != (armed.name, moment) or point.role != armed.role:
                continue
            if point.message and not any(_is(point.message, thing) for thing in seen):
                continue
            self._passed[armed.number] = passed = self._passed.get(armed.number, 0) + 1
            if passed == armed.nth:
                self._claim(armed)

    def _claim(self, armed: Armed) -> None:
        try:
            os.symlink(str(os.getpid()), claim_path(self._folder, armed.number))
        except FileExistsError:
            return  # somebody else had it, or it is not wanted any more
        os.kill(os.getpid(), armed.signal)

    def _noting(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        path = os.path.join(self._folder, "trace")
        trace = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

        def note(*words: object) -> None:
            os.write(trace, (" ".join(map(str, words)) + "\n").encode())

        @functools.wraps(inner)
        def perform(executor: Any, effect: Any) -> Any:
            # So that what is lost between the two, at a SIGKILL, can raise no false alarm.
            match type(effect).__name__:
                case "StartLoader":
                    note("read", effect.gen, effect.fingerprint, effect.key)
                case "Unkeep":
                    note("removed", effect.gen)
            inner(executor, effect)
            if type(effect).__name__ == "Keep":
                note("stored", effect.gen)

        return perform


def _is(message: str, thing: object) -> bool:
    """Say whether `thing` is, or has in it, a message of that class, as it is or encoded."""
    if isinstance(thing, bytes):
        return message.encode() in thing[: len(message) + 4]
    if isinstance(thing, tuple):
        return any(_is(message, one) for one in thing)
    return type(thing).__name__ == message
