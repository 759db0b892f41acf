"""The coordinator's own short-lived children: started, watched by pidfd, ended, reaped.

Note on the parent-death signal
fact: PR_SET_PDEATHSIG fires when the *thread* that started the child ends
consequence: a child started from a pool thread could die with that thread
choice: children are started on the event loop's thread, which lives as long as the process
cost: a millisecond of the loop per start
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Sequence


class Child:
    """One running child. `ended` resolves to how it ended, once, after it was reaped."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, command: Sequence[str], fds: Sequence[int]
    ) -> None:
        """Start `command` with `fds` inherited under their own numbers.

        Raises:
            OSError: it could not be started (EAGAIN, EMFILE, ENOMEM).
        """
        self._loop = loop
        self._process = subprocess.Popen(
            command, pass_fds=fds, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError:
            self._process.kill()
            self._process.communicate()
            raise
        self.ended: asyncio.Future[Ending] = loop.create_future()
        loop.add_reader(self._pidfd, self._reap)

    def kill(self) -> None:
        """SIGKILL it, if it still runs. `ended` follows."""
        if not self.ended.done():
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        _, stderr = self._process.communicate()
        self.ended.set_result(Ending(self._process.returncode, stderr.strip()))


class Ending:
    """How a child ended: its return code as `subprocess` gives it, and what it said last."""

    def __init__(self, code: int, stderr: str) -> None:
        self.code = code
        self.stderr = stderr

    def __str__(self) -> str:
        if self.code < 0:
            how = f"was ended by {signal.Signals(-self.code).name}"
        else:
            how = f"ended with exit code {self.code}"
        return f"{how}: {self.stderr.splitlines()[-1]}" if self.stderr else how


Spawn = Callable[[Sequence[str], Sequence[int]], Child]
