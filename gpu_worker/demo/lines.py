"""What the demo and its workers say to each other: one JSON object to a line, over pipes. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

Way = Literal["shared", "plain"]
"""How a worker gets its weights: from the coordinator, or by itself."""


class Line(msgspec.Struct, frozen=True, tag=True):
    """The root of every line."""


class Setting(Line, frozen=True):
    """The first line to a worker: who it is, and where things are."""

    name: str
    started_s: float
    """When its process was started, on the monotonic clock, which all processes share."""
    socket: str
    minilm: str
    """The folder of the real model."""
    checkpoint: str
    """The generated file."""
    width: int
    layers: int


class Open(Line, frozen=True):
    """Make the model of this key ready, in this way."""

    key: str
    way: Way


class Ask(Line, frozen=True):
    """Give the open model its work."""


class Touch(Line, frozen=True):
    """Read every page of the open model's weights."""


class Settle(Line, frozen=True):
    """Give memory that nothing uses back to the kernel."""


class Close(Line, frozen=True):
    """Let go of the open model; answer when that has taken effect everywhere."""


class Leave(Line, frozen=True):
    """Shut down what is attached, and stay: the kernel is about to be asked what is left."""


Request = Open | Ask | Touch | Settle | Close | Leave


class Ready(Line, frozen=True):
    """The worker's first line: everything is imported, and tried out on a tiny model."""

    took_s: float
    """Since its process was started."""


class Opened(Line, frozen=True):
    """The model is ready."""

    took_s: float
    generation: str
    """Of its weights; empty where the worker loaded them by itself."""


class Answered(Line, frozen=True):
    """What came out of the model, exactly as bytes, and as a ranking where there is one."""

    took_s: float
    digest: str
    ranking: tuple[tuple[float, str], ...]


class Finished(Line, frozen=True):
    """Done; there is nothing to tell."""


class Failed(Line, frozen=True):
    """The request raised this."""

    error: str


Reply = Ready | Opened | Answered | Finished | Failed

setting_decoder = msgspec.json.Decoder(Setting)
request_decoder = msgspec.json.Decoder(Request)
reply_decoder = msgspec.json.Decoder(Reply)
_encoder = msgspec.json.Encoder()


def encode(line: Setting | Request | Reply) -> bytes:
    """Return `line` as bytes, its newline included."""
    return _encoder.encode(line) + b"\n"
