"""What a child of the supervisor is before it becomes its command: tied to its parent's life.

    python -I -S leash.py PARENT SIGNAL FDS_LIMIT ERRORS FDS COMMAND...

Run by its path, by itself: it imports nothing of ours, and replaces itself within some 20 ms.

PARENT is the pid of the process that starts it, and SIGNAL what the kernel sends when that has
ended. FDS_LIMIT is the soft limit of open files for the command: the supervisor has raised its own.
ERRORS is an inherited pipe that closes when the command runs; else an errno is written into it.
FDS, separated by commas, are inherited ones that the command finds at 3, 4 and so on, with
LISTEN_PID to say that they are for it; "" for none.

    Note on preexec_fn
    fact: between fork and exec, `subprocess` can run Python code that sets all this
    consequence: that code runs in a copy of the supervisor, with its locks and its fds at the
    numbers that are wanted here; the pipe on which `subprocess` hears of errors may be one of them
    choice: a fresh interpreter that has nothing open
    cost: 17 ms for each start, most of it the interpreter's

    Note on what leaves the leash
    fact: the kernel forgets the signal for a command that is setuid or has capabilities, and when
    the command changes its own credentials; it never applies to the command's own children
    consequence: those outlive a supervisor and a front that were killed in the same moment
    choice: none: without a cgroup or a pid namespace of its own the kernel offers nothing more
    cost: see `coordinator.front` for what happens to them while one of the two is left
"""

import ctypes
import fcntl
import os
import resource
import signal
import sys

FIRST_FD = 3
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Become the command, or say why not and end."""
    parent, number, fds_limit, errors = map(int, arguments[1:5])
    fds = [int(fd) for fd in arguments[5].split(",") if fd]
    command = arguments[6:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the line above
        sys.exit(1)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by this interpreter, for itself
        signal.signal(ignored, signal.SIG_DFL)
    errors = _move(fds, errors)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (fds_limit, hard))
    if fds:
        os.environ["LISTEN_PID"] = str(os.getpid())
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(errors, str(error.errno).encode())
        sys.exit(127)


def _move(fds: list[int], errors: int) -> int:
    """Put `fds` at 3, 4 and so on, and have nothing else inherited; return where `errors` is now.

    All leave the numbers that are wanted before any of these is taken.
    """
    first = (errors, *fds)
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FD + len(fds)) for fd in first]
    for fd in first:
        os.set_inheritable(fd, False)
    for number, fd in enumerate(moved[1:], FIRST_FD):
        os.dup2(fd, number)
    return moved[0]


if __name__ == "__main__":
    main(sys.argv)
