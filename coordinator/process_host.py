"""Processes that we start: signalled through their pidfds, reaped once, and how they ended.

The coordinator's loaders and backing children, and what `launch` runs. A pidfd is readable once its
process has ended: with `selectors` in the supervisor, through `ended` on an event loop.

    Note on the parent-death signal
    fact: PR_SET_PDEATHSIG fires when the *thread* that started the child ends
    consequence: a loader started from a pool thread could die with that thread
    choice: children are started on the event loop's thread, which lives as long as the process
    cost: a millisecond of the loop per start
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ERRNO_LIMIT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Leash:
    """What ties a child's life to ours, and what it finds at its start; see `coordinator.leash`.

    Attributes:
        number: the signal that the kernel sends it when this process has ended.
        fds: what it finds at fd 3 and on, with LISTEN_PID; the other variables are the caller's.
        fds_limit: its soft limit of open files; None leaves ours.
    """

    number: int
    fds: tuple[int, ...] = ()
    fds_limit: int | None = None

    def command(self, command: Sequence[str], errors: int) -> list[str]:
        """Return the command line that becomes `command`, or writes an errno to the fd `errors`."""
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "leash.py")
        fds_limit = self.fds_limit
        if fds_limit is None:
            fds_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        numbers = [os.getpid(), int(self.number), fds_limit, errors]
        fds = ",".join(map(str, self.fds))
        return [sys.executable, "-I", "-S", path, *map(str, numbers), fds, *command]


class Child:
    """A process that was started here."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        pass_fds: Sequence[int] = (),
        stdin: int | None = subprocess.DEVNULL,
        stdout: int | None = None,
        stderr: int | None = None,
        env: Mapping[str, str] | None = None,
        own_group: bool = False,
        leash: Leash | None = None,
    ) -> None:
        """Start `command`. Arguments as those of `subprocess.Popen`.

        Args:
            own_group: signals to our process group, as from a terminal, do not reach it; ours go
                to all of its own, so that what a shell started for it ends too.
            leash: end it when this process ends. That `command` cannot be run is then known when it
                is reaped.

        Raises:
            OSError: it cannot be started; nothing runs.
        """
        self.never_ran: OSError | None = None
        """Why a child on a leash did not become its command; known once it is reaped."""
        self._errors = -1
        theirs = -1
        if leash is not None:
            self._errors, theirs = os.pipe()
            command = leash.command(command, theirs)
            pass_fds = (*pass_fds, theirs, *leash.fds)
        try:
            self.process = subprocess.Popen(
                command,
                pass_fds=pass_fds,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=env,
                process_group=0 if own_group else None,
            )
        except OSError:
            self._close_errors()
            raise
        finally:
            if theirs >= 0:
                os.close(theirs)
        self._own_group = own_group
        self.sent = 0
        """The last signal from here: an end by it is no news."""
        try:
            self.pidfd = os.pidfd_open(self.process.pid)
        except OSError:
            self.process.kill()
            self.process.wait()
            self._close_errors()
            raise

    def send(self, number: int) -> None:
        """Send a signal, if it was not reaped."""
        if self.pidfd < 0:
            return
        self.sent = number
        try:
            if self._own_group:
                # Until the leader is reaped nobody else can get its pid, or this group.
                os.killpg(self.process.pid, number)
            else:
                signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            pass  # it has ended, and its end is on the way to us

    def reap(self) -> int:
        """Return how it ended, as `subprocess` says it. Call once, when it has ended or will.

        What it left behind in a group of its own is ended too.
        """
        if self._own_group:
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
            self.send(signal.SIGKILL)
        code = self.process.wait()
        os.close(self.pidfd)
        self.pidfd = -1
        if self._errors >= 0:
            # Not to be waited for: somebody whom it started before its exec might have it too.
            os.set_blocking(self._errors, False)
            try:
                text = os.read(self._errors, ERRNO_LIMIT_BYTES)
            except BlockingIOError:
                text = b""
            if text:
                self.never_ran = OSError(int(text), os.strerror(int(text)))
            self._close_errors()
        return code

    def _close_errors(self) -> None:
        if self._errors >= 0:
            os.close(self._errors)
            self._errors = -1


async def ended(child: Child) -> int:
    """Wait on the event loop until `child` has ended, reap it, and return how it ended."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(child.pidfd, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(child.pidfd)
    return child.reap()


def exit_code(code: int) -> int:
    """Return the exit code that stands for how a process ended: 128 + N for signal N."""
    return code if code >= 0 else 128 - code


def ending(code: int) -> str:
    """Say in words how a process ended."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:  # most real-time signals have no name
        return f"by signal {-code}"


def module_command(module: str) -> list[str]:
    """Return the command that runs one of our modules in a process of its own.

    `python -m` looks into the working directory first, where a user may have a folder of the same
    name. That is wanted only when we were imported from there ourselves.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    safe = [] if os.path.realpath(root) == os.path.realpath(os.getcwd()) else ["-P"]
    return [sys.executable, *safe, "-m", module]
