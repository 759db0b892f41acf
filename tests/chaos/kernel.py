"""What the kernel says of the processes of a chaos run, and of their segments on the whole host."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.hook import FOLDER_VARIABLE
from tests.processes import fds_of, processes_with

_SEGMENT = re.compile(r"/memfd:weight-cache:(?:sim:\d+:)?(\S+)")
"""A segment, or memory of the simulated device, which has the generation of its charge."""

_WORDS = ("words", "about")
"""The supervisor's memfds beside segments: what a coordinator remembers in words, and of what is
on devices."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process: its fds by kind, and the generations of which it has an fd."""

    pid: int
    command: str
    kinds: Counter[str]
    segments: frozenset[str]


@dataclass(slots=True)
class Segments:
    """Every memfd of the host whose generation is of one of these coordinators.

    Attributes:
        holders: by generation, the processes that have an fd of it or map it.
        sizes: by generation, the memory of its file.
    """

    holders: dict[str, set[int]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)


def processes(folder: str) -> list[int]:
    """Return every process of a run, whoever its parent is; no zombies."""
    return [pid for pid in processes_with(FOLDER_VARIABLE, folder) if pid != os.getpid()]


def zombies(parents: set[int]) -> list[int]:
    """Return the ended children that these processes have not reaped."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            state, parent, *_ = _stat(int(pid))
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state == "Z" and int(parent) in parents:
            found.append(int(pid))
    return found


def process(pid: int) -> Process:
    """Look into a process that runs.

    Raises:
        FileNotFoundError, ProcessLookupError: it does not.
    """
    kinds: Counter[str] = Counter()
    segments = set()
    for target in fds_of(pid).values():
        found = _SEGMENT.match(target)
        if found is not None and found[1] not in _WORDS:
            segments.add(found[1])
        else:
            kinds[_kind(target)] += 1
    return Process(pid, command(pid), kinds, frozenset(segments))


def command(pid: int) -> str:
    """Return a process's command line; nothing if it has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return words.replace(b"\0", b" ").decode(errors="replace").strip()


def started_at(pid: int) -> int:
    """When a process was started, in ticks since boot."""
    return int(_stat(pid)[19])


def state(pid: int) -> str:
    """The letter of a process's state; nothing if it has ended."""
    try:
        return _stat(pid)[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _kind(target: str) -> str:
    for kind in ("pidfd", "socket:", "pipe:", "weight-cache:words", "weight-cache:about"):
        if kind in target:
            return kind.strip(":")
    return target


def segments(starts: set[str]) -> Segments:
    """Look for segments in every process of the host, by fd and by map.

    Args:
        starts: what the generations of the coordinators in question begin with.
    """
    found = Segments()
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        try:
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
            names: set[tuple[str, str | None]] = {(name, None) for name in _SEGMENT.findall(maps)}
            for number, target in fds_of(pid).items():
                if match := _SEGMENT.match(target):
                    names.add((match[1], number))
        except OSError:
            continue  # it has ended, or is another user's
        for gen, fd in names:
            if gen.rpartition("-")[0] not in starts:
                continue
            found.holders.setdefault(gen, set()).add(pid)
            if fd is not None and gen not in found.sizes:
                try:
                    found.sizes[gen] = os.stat(f"/proc/{pid}/fd/{fd}").st_blocks * 512
                except FileNotFoundError:
                    continue
    return found


def children(pid: int, word: str) -> list[int]:
    """Return the children of a process in whose command line `word` is."""
    found = []
    for child in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if int(_stat(int(child))[1]) == pid and word in command(int(child)):
                found.append(int(child))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
