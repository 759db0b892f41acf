"""The arguments of public calls, checked before anything is done with them."""

from __future__ import annotations

import math
import os
import sys

from gpu_worker.records import Origin
from gpu_worker.request import Ask, Build
from shm_store.errors import ArgumentRefused
from shm_store.keys import parse_key
from shm_store.wire import TIMEOUT_LIMIT_S

NAME_LIMIT = 200
VERSION_LIMIT = 120


def asked(
    key: object,
    source: str | os.PathLike[str] | None,
    build: Build | None,
    version: object,
) -> tuple[Ask, Origin]:
    """Check what was asked for, and give it the form that requests and records know it by."""
    name = parse_key(key)
    if (source is None) == (build is None):
        raise ArgumentRefused(f"{key!r} needs source= or build=, and not both")
    version = text("version", version, VERSION_LIMIT)
    if source is None:
        if not callable(build):
            raise ArgumentRefused(f"build= is a callable, not {type(build).__name__}")
        return Ask(name, None, build, version), Origin("build", version)
    if version:
        raise ArgumentRefused("version= goes with build=: a source's version is the file's own")
    if not isinstance(source, str | os.PathLike):
        raise ArgumentRefused(f"source= is a path, not {type(source).__name__}")
    path = os.fspath(source)
    if not isinstance(path, str):
        raise ArgumentRefused("source= is a path in text, not in bytes")
    path = os.path.abspath(path)
    return Ask(name, path, None), Origin("source", path)


def timeout_s(timeout: object) -> float | None:
    """Return `timeout` in seconds if it is a time one can wait; None is no limit."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise ArgumentRefused(f"timeout= is in seconds, not {type(timeout).__name__}")
    if math.isnan(timeout) or not 0 <= timeout <= TIMEOUT_LIMIT_S:
        raise ArgumentRefused(
            f"timeout={timeout!r} is not between 0 and {TIMEOUT_LIMIT_S:g} s",
            remedy="leave it out to wait as long as there is progress",
        )
    return float(timeout)


def text(argument: str, value: object, limit: int) -> str:
    """Return `value` if it is a text that can be sent."""
    if not isinstance(value, str):
        raise ArgumentRefused(f"{argument}= is a text, not {type(value).__name__}")
    if len(value) > limit or not value.isprintable():
        raise ArgumentRefused(f"{argument}= is at most {limit} printable characters")
    return str.__str__(value)


def program_name() -> str:
    """Return a name for this process, for those who name none."""
    name = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""
    return "".join(character for character in name if character.isprintable())[:NAME_LIMIT]
