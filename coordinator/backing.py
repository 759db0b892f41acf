"""The backing child: gives a segment its pages, so that nobody else meets a lack of memory.

    python -I -S backing.py FD SIZE_BYTES HUGE PARENT_PID

FD is the segment, inherited. HUGE is 1 if its pages are to be of 2 MiB where they can be had, or 0.
Exit codes are the `EXIT_` constants below; each but 0 comes with one line on stderr, and 0 with how
many bytes are in huge pages, on stdout. The file runs by itself: it imports `os` and `sys`, and
`coordinator.huge_backing` where there may be a huge page, and starts in a few milliseconds; it is
compiled each time. `coordinator.memory` takes the cgroup reader from here.

    Note on running out
    fact: in a memory cgroup at its limit, and on a host without memory left, `posix_fallocate` on a
    memfd does not fail, the kernel kills; and killing the child frees nothing, because the pages
    belong to the segment, not to the process
    consequence: the next victim is somebody else (seen on a full host: two processes beside it)
    choice: look at the headroom before every step and refuse what is not there; volunteer for the
    killer, for what could not be foreseen
    cost: some file reads (0.2 ms) per 64 MiB, and the last 32 MiB are never used

    Note on file pages
    fact: a file that was read twice lies in active_file, and `posix_fallocate` in a full cgroup has
    the kernel drop it as readily as inactive_file (measured: 220 MiB of it made room, no kill)
    consequence: not counting it refuses the second load of the same file
    choice: both kinds of file pages are headroom
    cost: a working set of mapped files may be dropped and read again
"""

import os
import sys

STEP_BYTES = 64 * 1024 * 1024
"""So much is backed between two looks at parent and headroom."""

SPARE_BYTES = 32 * 1024 * 1024
"""Left to the other processes, to the loader's own memory and to the kernel's tables."""

HUGE_PAGE_BYTES = 2 * 1024 * 1024
"""As in `shm_store.layout`."""

EXIT_BACKED = 0
EXIT_USAGE = 2
EXIT_NO_MEMORY = 3
"""ENOSPC or ENOMEM."""
EXIT_NO_HEADROOM = 4
"""The cgroup's limit, or the host's memory, would be exceeded. Nothing was tried."""
EXIT_PARENT_GONE = 5
EXIT_REFUSED = 6
"""The kernel refused for another reason."""

_UNLIMITED_BYTES = 1 << 60
"""A v1 limit that means none is the largest page-aligned integer."""


def command(fd: int, size_bytes: int, huge: bool) -> list[str]:
    """Return the command line that backs the inherited `fd`, for a child of this very process."""
    script = os.path.abspath(__file__)
    numbers = (fd, size_bytes, int(huge), os.getpid())
    return [sys.executable, "-I", "-S", script, *map(str, numbers)]


def huge_bytes(said: str) -> int:
    """Return how much a child that ended with 0 has said to be in huge pages."""
    line = said.strip()
    return int(line) if line.isdecimal() else 0


def reason(returncode: int, stderr_text: str) -> str:
    """Return in a phrase why a backing child failed.

    Args:
        returncode: as `subprocess` has it: negative for a signal. Not 0.
        stderr_text: what the child wrote.
    """
    if returncode == -9:
        return "the backing child was killed by SIGKILL, probably by the kernel's OOM killer"
    if returncode < 0:
        return f"the backing child was killed by signal {-returncode}"
    lines = stderr_text.strip().splitlines()
    if lines and returncode in (EXIT_NO_MEMORY, EXIT_NO_HEADROOM, EXIT_PARENT_GONE, EXIT_REFUSED):
        return lines[-1][:400]
    said = f": {lines[-1][:400]}" if lines else ""
    return f"the backing child ended with exit code {returncode}{said}"


def main(arguments: list[str]) -> int:
    """Run as the backing child; return the exit code."""
    try:
        fd, size_bytes, huge, parent_pid = (int(argument) for argument in arguments[1:])
    except ValueError:
        return _end(EXIT_USAGE, "usage: backing.py FD SIZE_BYTES HUGE PARENT_PID")
    volunteer()
    return back(fd, size_bytes, parent_pid, bool(huge))


def back(fd: int, size_bytes: int, parent_pid: int, huge: bool) -> int:
    """Give `fd` its pages from the first to `size_bytes`; return the exit code."""
    pages = None
    if huge and size_bytes >= HUGE_PAGE_BYTES:
        sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        try:
            from coordinator.huge_backing import HugePages

            pages = HugePages(fd, size_bytes)
        except (ImportError, OSError):
            pass  # no ctypes, or a limit on maps. Pages of 4 KiB need neither.
    for start in range(0, size_bytes, STEP_BYTES):
        if os.getppid() != parent_pid:
            return _end(EXIT_PARENT_GONE, "the coordinator is gone")
        lack = shortage(size_bytes - start)
        if lack:
            return _end(EXIT_NO_HEADROOM, lack)
        step_bytes = min(STEP_BYTES, size_bytes - start)
        if pages is not None:
            pages.back(start, start + step_bytes)
        try:
            # Counts and errors are those of this call, whatever was there before.
            os.posix_fallocate(fd, start, step_bytes)
        except OSError as error:
            # The module errno is one more import; these two numbers are Linux's on every machine.
            code = EXIT_NO_MEMORY if error.errno in (12, 28) else EXIT_REFUSED
            return _end(
                code,
                f"the kernel gave {_mib(start)} of {_mib(size_bytes)}, then: {error.strerror}",
            )
    print(0 if pages is None else pages.backed_bytes)
    return EXIT_BACKED


def shortage(needed_bytes: int) -> str:
    """Say what there is too little of for so many bytes more; nothing if it suffices."""
    for where, headroom in (
        ("this memory cgroup", cgroup_headroom_bytes()),
        ("this host", host_headroom_bytes()),
    ):
        if headroom is not None and needed_bytes + SPARE_BYTES > headroom:
            return (
                f"{_mib(needed_bytes)} needed, {_mib(headroom)} left in {where}, of which "
                f"{_mib(SPARE_BYTES)} stay free"
            )
    return ""


def _end(code: int, line: str) -> int:
    print(line, file=sys.stderr)
    return code


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1024 * 1024):.1f} MiB"


def volunteer() -> None:
    """Be the first whom the out-of-memory killer takes."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
            score.write("1000")
    except OSError:
        pass  # No /proc here, so no headroom to read either. Backing may still succeed.


# --- how much is left ---------------------------------------------------------------------------


def host_headroom_bytes(root: str = "/") -> int | None:
    """Return what the host can give before its out-of-memory killer runs, swap included.

    Returns:
        None where /proc/meminfo does not say.
    """
    figures = {}
    for line in _lines(os.path.join(root, "proc/meminfo")):
        name, _, amount = line.partition(":")
        words = amount.split()
        if words and words[0].isdecimal():
            figures[name] = int(words[0]) * 1024
    available = figures.get("MemAvailable")
    return None if available is None else available + figures.get("SwapFree", 0)


def cgroup_headroom_bytes(root: str = "/") -> int | None:
    """Return what this process's memory cgroups still allow: the least of its chain, v1 and v2.

    Use less file pages counts as use: those make room when asked to. Swap does not count as room.

    Args:
        root: where `proc` and the mounts are looked for; for tests.

    Returns:
        At least 0; None where nothing limits.
    """
    levels = [level_headroom_bytes(path, v2) for path, v2 in memory_cgroups(root)]
    limited = [headroom for headroom in levels if headroom is not None]
    return max(0, min(limited)) if limited else None


def memory_cgroups(root: str = "/") -> list[tuple[str, bool]]:
    """Return the folders of this process's memory cgroups up to each mount, and whether each is v2.

    In a container the path in /proc/self/cgroup may be the host's, of which the mount shows only a
    part, or the cgroup may lie outside the mount. Then the mount point is the nearest known level.
    """
    own = _own_paths(root)
    folders: list[tuple[str, bool]] = []
    for v2 in (False, True):
        if v2 not in own:
            continue
        mounts = _memory_mounts(root, v2)
        chains = [_chain(point, _below(own[v2], top)) for top, point in mounts]
        seen = [chain for chain in chains if chain] or [[point] for _, point in mounts[:1]]
        folders += [(os.path.join(root, path.lstrip("/")), v2) for chain in seen for path in chain]
    return folders


def _own_paths(root: str) -> dict[bool, str]:
    """Return this process's path in the v1 memory hierarchy (False) and in v2 (True)."""
    paths = {}
    for line in _lines(os.path.join(root, "proc/self/cgroup")):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            paths[False] = path
        elif number == "0" and not controllers:
            paths[True] = path
    return paths


def _memory_mounts(root: str, v2: bool) -> list[tuple[str, str]]:
    """Return which cgroup each fitting mount shows at its top, and where it is mounted."""
    found = []
    for line in _lines(os.path.join(root, "proc/self/mountinfo")):
        left, _, right = line.partition(" - ")
        place, kind = left.split(" "), right.split(" ")
        if len(place) < 5 or len(kind) < 3:
            continue
        kinds = ("cgroup2",) if v2 else ("cgroup", "memory")
        if kind[0] == kinds[0] and set(kinds[1:]) <= set(kind[2].split(",")):
            found.append((_unescape(place[3]), _unescape(place[4])))
    return found


def _below(path: str, top: str) -> str | None:
    """Return `path` as seen from `top`, or None if it does not lie there."""
    if ".." in path.split("/") or ".." in top.split("/"):
        return None
    top = top.rstrip("/")
    return path[len(top) :] if path == top or path.startswith(top + "/") else None


def _chain(point: str, below: str | None) -> list[str]:
    if below is None:
        return []
    folders = [point]
    for part in below.split("/"):
        if part:
            folders.append(os.path.join(folders[-1], part))
    return folders


def level_headroom_bytes(folder: str, v2: bool) -> int | None:
    """Return limit less use of one cgroup; None if it has no limit, or is gone."""
    if v2:
        # Above memory.high the kernel kills nobody, but slows every allocation to a crawl.
        limits = [_number(folder, "memory.max"), _number(folder, "memory.high")]
        use, prefix = _number(folder, "memory.current"), ""
    else:
        limits = [_number(folder, "memory.limit_in_bytes")]
        use, prefix = _number(folder, "memory.usage_in_bytes"), "total_"
    known = [limit for limit in limits if limit is not None and limit < _UNLIMITED_BYTES]
    if not known or use is None:
        return None
    return min(known) - max(0, use - _file_pages_bytes(folder, prefix))


def _file_pages_bytes(folder: str, prefix: str) -> int:
    wanted = (prefix + "inactive_file", prefix + "active_file")
    total = 0
    for line in _lines(os.path.join(folder, "memory.stat")):
        name, _, amount = line.partition(" ")
        if name in wanted and amount.isdecimal():
            total += int(amount)
    return total


def _number(folder: str, name: str) -> int | None:
    """Return the number in a cgroup's file; None for `max`, or where there is no such file."""
    text = "".join(_lines(os.path.join(folder, name))).strip()
    return int(text) if text.isdecimal() else None


def _lines(path: str) -> list[str]:
    try:
        with open(path, "rb") as file:
            return os.fsdecode(file.read()).split("\n")
    except OSError:
        return []


def _unescape(text: str) -> str:
    """Undo mountinfo's spelling of white space and backslashes, three octal digits each."""
    first, *rest = text.split("\\")
    return first + "".join(chr(int(part[:3], 8)) + part[3:] for part in rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
