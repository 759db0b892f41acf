"""The arguments of public calls, checked before anything is done with them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TypeVar

from gpu_worker.records import Origin
from gpu_worker.request import Ask, Build
from gpu_worker.source import Source
from shm_store.errors import ArgumentRefused
from shm_store.keys import parse_key
from shm_store.reading import AS_IT_IS
from shm_store.sizes import parse_size
from shm_store.source import is_url
from shm_store.wire import SIZE_LIMIT_BYTES, TIMEOUT_LIMIT_S

NAME_LIMIT = 200
VERSION_LIMIT = 120


SourceLike = str | os.PathLike[str] | Source


def asked(
    key: object,
    source: SourceLike | None,
    build: Build | None,
    version: object,
) -> tuple[Ask, Origin]:
    """Check what was asked for, and give it the form that requests and records know it by."""
    name = parse_key(key)
    if (source is None) == (build is None):
        raise ArgumentRefused(
            f"{key!r} needs source= or build=, and not both",
            remedy="pass the path of a checkpoint, or a function that makes the weights",
        )
    version = text("version", version, VERSION_LIMIT)
    if source is None:
        check_factory("build", build)
        return Ask(name, None, build, version), Origin("build", version)
    location = source.location if isinstance(source, Source) else source
    reading = source.reading() if isinstance(source, Source) else AS_IT_IS
    place = path("source", location)
    if not is_url(place):
        place = os.path.abspath(place)
        if version:
            raise ArgumentRefused(
                "version= goes with build= or a URL: a file's version is its own",
                remedy="leave version= out: a file that changes is noticed",
            )
    return Ask(name, place, None, version, reading), Origin("source", place, version, reading)


def path(argument: str, value: object) -> str:
    """Return `value` as text if it is a path."""
    if not isinstance(value, str | bytes | os.PathLike):
        raise ArgumentRefused(
            f"{argument}= is a path, not of type {type(value).__name__}",
            remedy="pass it as str or pathlib.Path",
        )
    place = os.fspath(value)
    if not isinstance(place, str):
        raise ArgumentRefused(
            f"{argument}= is a path in text, not in bytes", remedy="pass os.fsdecode(path)"
        )
    try:
        os.fsencode(place)
    except UnicodeEncodeError as error:
        raise ArgumentRefused(
            f"{argument}={place!r} cannot be the name of a file: {error.reason}",
            remedy="pass os.fsdecode(path) of its name in bytes",
        ) from error
    return place


def check_factory(argument: str, factory: object) -> None:
    """Refuse what is not a function to be called without arguments.

    A module can be called too, but with its input; so an instance is refused here, by name.
    """
    from torch.nn import Module

    remedy = f"pass a function that makes it, e.g. {argument}=lambda: MyModel(config)"
    if isinstance(factory, Module):
        kind = type(factory).__name__
        raise ArgumentRefused(f"{argument}= is a module already, a {kind}", remedy=remedy)
    if not callable(factory):
        raise ArgumentRefused(
            f"{argument}= is a function, not of type {type(factory).__name__}", remedy=remedy
        )


def check_flag(argument: str, value: object) -> None:
    """Refuse what is neither True nor False: it would be compared with what is."""
    if not isinstance(value, bool):
        raise ArgumentRefused(
            f"{argument}= is True or False, not of type {type(value).__name__}",
            remedy=f"pass {argument}=True or {argument}=False",
        )


def check_private(private: object, build: object) -> None:
    """Refuse `private` for what is not built here."""
    check_flag("private", private)
    if private and build is None:
        raise ArgumentRefused(
            "private=True goes with build=: what a loader fills is shared",
            remedy="leave it out, or pass a function that makes the module",
        )


Callback = TypeVar("Callback")


def callback(argument: str, value: Callback) -> Callback:
    """Return `value` if it can be called, or is None."""
    if value is not None and not callable(value):
        raise ArgumentRefused(
            f"{argument}= is a function, not of type {type(value).__name__}",
            remedy="pass a function, or leave it out",
        )
    return value


def timeout_s(timeout: object, argument: str = "timeout") -> float | None:
    """Return `timeout` in seconds if it is a time one can wait; None is no limit."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise ArgumentRefused(
            f"{argument}= is a number of seconds, not of type {type(timeout).__name__}",
            remedy="pass a number, or leave it out",
        )
    if not 0 <= timeout <= TIMEOUT_LIMIT_S:  # nor is NaN
        raise ArgumentRefused(
            f"{argument}={timeout!r} is not between 0 and {TIMEOUT_LIMIT_S:g} s",
            remedy="pass seconds, 0 or more, or leave it out",
        )
    return float(timeout)


def size_bytes(argument: str, value: object) -> int:
    """Return a size in bytes: a number of them, or a text such as "20GiB"."""
    if isinstance(value, str):
        return parse_size(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentRefused(
            f"{argument}= is a size, not of type {type(value).__name__}",
            remedy=f'pass bytes, or a text: {argument}="2GiB"',
        )
    if not 0 < value <= SIZE_LIMIT_BYTES:
        raise ArgumentRefused(
            f"{argument}={value} is out of range", remedy="pass 1 byte to 1024 TiB"
        )
    return value


def keys(argument: str, value: Iterable[str]) -> list[str]:
    """Return several keys, which one text is not."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ArgumentRefused(
            f"{argument}= is several keys, not of type {type(value).__name__}",
            remedy=f'pass a list: {argument}=["one", "other"]',
        )
    return list(value)


def patience_s(patience: object) -> float:
    """Return `patience` in seconds if it is a time one can wait."""
    checked_s = timeout_s(patience, "patience")
    if checked_s is None:
        raise ArgumentRefused(
            "patience= is a number of seconds, not None",
            remedy="pass how long to wait for a coordinator that died, or leave it out",
        )
    return checked_s


def text(argument: str, value: object, limit: int) -> str:
    """Return `value` if it is a text that can be sent."""
    if not isinstance(value, str):
        raise ArgumentRefused(
            f"{argument}= is a text, not of type {type(value).__name__}",
            remedy=f'quote it, e.g. {argument}="1"',
        )
    if len(value) > limit or not value.isprintable():
        raise ArgumentRefused(
            f"{argument}= is not at most {limit} printable characters",
            remedy="shorten it, and leave out line breaks and other control characters",
        )
    return str.__str__(value)


def program_name() -> str:
    """Return a name for this process, for those who name none."""
    name = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""
    return "".join(character for character in name if character.isprintable())[:NAME_LIMIT]
