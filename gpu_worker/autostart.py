"""A coordinator for those who find none: `attach(autostart=True)`.

It is started by a process of its own, `coordinator.detached`, which chooses among many starters and
returns once a coordinator answers. Here is only how that process is started: away from everything
that is ours, so that nothing that ends us, our terminal or our service ends the coordinator.

    Note on control groups
    fact: a process stays in its starter's control group, whatever session it makes. A service's end
    kills all of its group, and its limit of memory is that of all of it
    consequence: the coordinator would end with the service that happened to come first, and others'
    weights with it
    choice: where systemd runs for this user, `systemd-run --user --scope` gives it a group under
    the user's own. It is tried before, so that a systemd that does not answer costs only time. The
    group is delegated: else systemd would end all of it when the kernel kills a child for memory
    cost: 40 ms. Where systemd does not run for this user, as in containers, it stays where it is

    Note on exit codes
    fact: where SIGCHLD is ignored, as a starter may have inherited it, the kernel throws the exit
    codes of children away, and `subprocess` says 0
    consequence: what failed would look as if it had not
    choice: what is started has to show that it works: a scope by what runs in it, a coordinator by
    its answer
    cost: none where the exit code is there
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from shm_store.channel import connect
from shm_store.errors import CoordinatorLost, NoCoordinator, StartFailed
from shm_store.paths import log_path

LEAVE_AFTER_S = 1800.0
"""How long a coordinator stays when nobody is attached."""

START_LIMIT_S = 40.0
"""More than `coordinator.detached` takes, which says why."""

RETRY_LIMIT_S = 10.0
"""How long one that leaves just now is followed by another."""

SCOPE_LIMIT_S = 5.0

NOT_PASSED_ON = (
    *("WEIGHT_CACHE_", "LISTEN_", "WATCHDOG_", "NOTIFY_SOCKET", "FDSTORE"),
    "PYTHONINSPECT",
)
"""What these variables begin with is said to us: about our manager, our fds, our group, and that
our Python is to stay when its program has ended."""

_RAN = "apart"

Attached = TypeVar("Attached")


def attach_or_start(path: str, attach: Callable[[], Attached]) -> Attached:
    """Return what `attach` does, with a coordinator on `path`: one is started if nobody answers.

    Raises:
        StartFailed: none could be started.
        WeightCacheError: as `attach`.
    """
    deadline_s = time.monotonic() + RETRY_LIMIT_S
    while True:
        if not _answers(path):
            start(path)
        try:
            return attach()
        except CoordinatorLost:
            # It may have left at this very moment: the next look says so.
            if time.monotonic() >= deadline_s:
                raise


def _answers(path: str) -> bool:
    try:
        connect(path).close()
    except NoCoordinator:
        return False
    return True


def start(path: str) -> None:
    """Return once a coordinator answers on `path`.

    Raises:
        StartFailed: none does. It names the reason, and the log.
    """
    place = os.path.abspath(path)
    log = log_path(place)
    if not sys.executable:
        raise StartFailed(f"none can be started on {path}: this program does not name its Python")
    environment = _environment(os.environ)
    scope = _scope(environment)
    command = [*scope, sys.executable, "-P", "-m", "coordinator.detached"]
    command += [place, log, f"{LEAVE_AFTER_S:g}", "apart" if scope else "within"]
    try:
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=START_LIMIT_S,
            cwd="/",
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise _failed(path, log, f"{command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise _failed(path, log, f"none was ready within {START_LIMIT_S:g} s") from None
    if done.returncode or (done.stderr and not _answers(path)):
        lines = done.stderr.decode(errors="replace").split("\n")
        said = next((line for line in reversed(lines) if line), f"exit code {done.returncode}")
        raise _failed(path, log, said.removeprefix("weight-cache: "))


def _failed(path: str, log: str, reason: str) -> StartFailed:
    there = log if os.path.exists(log) else ""
    return StartFailed(f"no coordinator could be started on {path}: {reason}", log=there)


def _environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the coordinator's environment: ours, without what is said to us alone.

    It does not run where we do, so it is told where these packages are, if nobody else knows.
    """
    kept = {name: value for name, value in inherited.items() if not name.startswith(NOT_PASSED_ON)}
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    told = kept.get("PYTHONPATH", "").split(os.pathsep)
    places = [os.path.abspath(path) for path in told if path]
    installed = sysconfig.get_paths()
    if root not in (installed["purelib"], installed["platlib"], site.getusersitepackages()):
        places.insert(0, root)
    if places:
        kept["PYTHONPATH"] = os.pathsep.join(places)
    return kept


def _scope(environment: Mapping[str, str]) -> list[str]:
    """Return the command that gives what follows a control group of its own; none if nothing can.

    Tried with a command that only shows that it ran: what is said of the real one would be mixed
    with its own words.
    """
    found = shutil.which("systemd-run", path=environment.get("PATH"))
    if found is None:
        return []
    command = [found, "--user", "--scope", "--quiet", "--collect", "--property=Delegate=yes"]
    command += ["--description=weight-cache coordinator", "--"]
    try:
        tried = subprocess.run(
            [*command, "echo", _RAN],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SCOPE_LIMIT_S,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    ran = tried.returncode == 0 and tried.stdout.decode(errors="replace").strip() == _RAN
    return command if ran else []
