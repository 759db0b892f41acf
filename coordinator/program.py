"""Which program a process runs: one that executes another keeps its pid, and its pidfd.

Note on exec
fact: execve takes a process's memory and its close-on-exec fds away, and nothing else: its
pidfd stays silent
consequence: what it had mapped would stay in the books for as long as the next program runs
choice: once its connection is lost, look whether the process has begun anew. The kernel says
where its stack began, which is chosen at random for each program, and is inherited by fork
cost: a read of /proc when a session begins, and a few once its connection is lost. Where /proc or
the address is withheld, or not random, only the pidfd is left
"""

from __future__ import annotations

from pathlib import Path

UNKNOWN = 0

_START_STACK = 25
"""Field 28 of proc_pid_stat(5), counted behind the name, which may hold anything."""


def program(pid: int) -> int:
    """Return what tells a program from the next one of the same process; UNKNOWN if nothing does.

    Args:
        pid: in this namespace. 0 is of another one.
    """
    if not pid:
        return UNKNOWN
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return UNKNOWN
    return int(stat.rpartition(b")")[2].split()[_START_STACK])
