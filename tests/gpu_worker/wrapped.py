"""Values and tensor subclasses that tests put into segments, at the top of a module."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import torch

aten = torch.ops.aten


class Mode(enum.Enum):
    SIGNED = "signed"
    UNSIGNED = 2


class Level(enum.IntEnum):
    LOW = 1


class Flags(enum.Flag):
    A = 1
    B = 2


@dataclass(frozen=True)
class Layout:
    tile: tuple[int, ...] = (4, 4)
    mode: Mode = Mode.SIGNED
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Slotted:
    dtype: torch.dtype
    calls: list[int] = field(default_factory=list, init=False)


ended: list[str] = []


@dataclass
class Ends:
    """As a dataclass of somebody's that removes a folder when it ends."""

    path: str

    def __del__(self) -> None:
        ended.append(self.path)


class Scaled(torch.Tensor):
    """Integers and a scale for each row: what a quantised weight is."""

    @staticmethod
    def __new__(cls, integers, scale, layout):
        return torch.Tensor._make_wrapper_subclass(
            cls, integers.shape, strides=integers.stride(), dtype=torch.float32, device="cpu"
        )

    def __init__(self, integers, scale, layout):
        self.integers = integers
        self.scale = scale
        self.layout_of_it = layout

    def __tensor_flatten__(self):
        return ["integers", "scale"], self.layout_of_it

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["integers"], inner["scale"], context)

    def plain(self) -> torch.Tensor:
        return self.integers.float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        if func in (aten.detach.default, aten.alias.default):
            made = args[0]
            return cls(made.integers.detach(), made.scale.detach(), made.layout_of_it)
        if func is aten.copy_.default:
            args[0].integers.copy_(args[1].integers)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        plain = [one.plain() if isinstance(one, cls) else one for one in args]
        return func(*plain, **(kwargs or {}))


def scaled(rows: int = 4, columns: int = 6, layout: object = None) -> Scaled:
    integers = (torch.arange(rows * columns) % 15 - 7).to(torch.int8).view(rows, columns)
    return Scaled(integers, torch.arange(1.0, rows + 1).view(rows, 1) / 8, layout or Layout())


class Around(torch.Tensor):
    """A wrapper around any other tensor, itself a wrapper if need be."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device="cpu"
        )

    def __init__(self, inner):
        self.held = inner

    def __tensor_flatten__(self):
        return ["held"], {}

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["held"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        if func in (aten.detach.default, aten.alias.default):
            return cls(args[0].held.detach())
        plain = [one.held if isinstance(one, cls) else one for one in args]
        return func(*plain, **(kwargs or {}))


class OneWay(torch.Tensor):
    """It says what it is made of, and not how."""

    def __tensor_flatten__(self):
        return [], None


made: list[str] = []
"""What was called of the classes below, which a segment may not have made."""


class Pretends:
    """It has both methods, and is no tensor."""

    def __tensor_flatten__(self):
        return [], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        made.append("Pretends")
        return torch.ones(size)


class OnlyMade(torch.Tensor):
    """It can be made, and was never taken apart."""

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        made.append("OnlyMade")
        return torch.ones(size).as_subclass(cls)


class Fails(Around):
    def __tensor_flatten__(self):
        raise NotImplementedError("not while it is on fire")


class Stuck(Around):
    """It can be taken apart, and not be made."""

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        raise NotImplementedError("not any more")


class Other(Around):
    """Its maker makes another class."""

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return inner["held"]


class Quantised(torch.nn.Linear):
    """A layer with state that is no tensor, as Transformer Engine's have."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.extra: Any = None
        self.calls = 0

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra, self.calls = state, self.calls + 1
