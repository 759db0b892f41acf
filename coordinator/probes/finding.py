"""What a probe has to say, and how it reads a host."""

from __future__ import annotations

import os
from typing import Literal

import msgspec

Verdict = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True):
    """What one probe found.

    `name` and `verdict` stay as they are from version to version; the texts are for people.
    """

    name: str
    verdict: Verdict
    """fail: weight-cache cannot work without. warn: it works, and not as well as it could."""
    found: str
    remedy: str = ""
    """What to do; empty where there is nothing to do."""


def ok(name: str, found: str, remedy: str = "") -> Finding:
    return Finding(name, "ok", found, remedy)


def warn(name: str, found: str, remedy: str) -> Finding:
    return Finding(name, "warn", found, remedy)


def fail(name: str, found: str, remedy: str) -> Finding:
    return Finding(name, "fail", found, remedy)


def text_of(root: str, path: str) -> str:
    """Return the text of a file of the host, without white space around it; "" if there is none."""
    try:
        with open(os.path.join(root, path), "rb") as file:
            return os.fsdecode(file.read()).strip()
    except OSError:
        return ""


def number_of(root: str, path: str) -> int | None:
    """Return the number in a file of the host; None if it has none, such as `max`."""
    text = text_of(root, path)
    return int(text) if text.isdecimal() else None
