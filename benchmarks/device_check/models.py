"""The modules that are loaded: small ones of every kind, and one that is just large."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Make = Callable[[], torch.nn.Module]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return the same numbers each time, none of which is special, between -1 and 1."""
    count = 1
    for length in shape:
        count *= length
    whole = torch.arange(count, dtype=torch.int64, device="cpu")
    return (((whole * 2654435761 + seed * 97) >> 7) % 1999).float().div(999.5).sub(1.0).view(shape)


class Kinds(torch.nn.Module):
    """One of each kind of tensor that a module can have, all of them used."""

    def __init__(self) -> None:
        super().__init__()
        base = numbers(4, 6)
        self.plain = torch.nn.Parameter(numbers(4, 6, seed=1))
        self.tied = self.plain
        self.turned = torch.nn.Parameter(base.t())
        self.columns = torch.nn.Parameter(base[:, 1:3])
        self.sixteen = torch.nn.Parameter(numbers(64, seed=2).bfloat16())
        eighth = numbers(64, seed=3).to(torch.float8_e4m3fn)
        self.eighth = torch.nn.Parameter(eighth, requires_grad=False)
        self.scalar = torch.nn.Parameter(torch.tensor(0.75))
        self.none = torch.nn.Parameter(torch.empty(0, 5))
        image = numbers(1, 3, 4, 4, seed=4).to(memory_format=torch.channels_last)
        self.image = torch.nn.Parameter(image)
        self.flags: torch.Tensor
        self.waves: torch.Tensor
        self.steps: torch.Tensor
        self.register_buffer("flags", torch.tensor([True, False, True, True]))
        self.register_buffer("waves", torch.tensor([1 + 2j, 3 - 1j]))
        self.register_buffer("steps", torch.tensor(5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.turned @ self.tied
        y = y + (x[:, :4] @ self.columns).sum(-1, keepdim=True)
        y = y * self.sixteen.float().mean() + self.eighth.float().sum() * self.scalar
        y = y + self.image.sum() + self.flags.sum() * self.steps
        return y * self.waves.abs().sum()


def layers(count: int, width: int) -> torch.nn.Module:
    """Return so many layers of `width` x `width` floats, one behind the other."""
    made = torch.nn.Sequential(
        *(torch.nn.Linear(width, width, bias=False) for _ in range(count)),
    )
    for number, layer in enumerate(made):
        weight = numbers(width, width, seed=number).div(width)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return made


class Large(torch.nn.Module):
    """So many bytes of bf16 in so many parameters."""

    def __init__(self, size_bytes: int, parameters: int, seed: int = 0) -> None:
        super().__init__()
        elements = max(1, size_bytes // parameters // 2)
        for number in range(parameters):
            one = torch.full((elements,), seed + number % 7, dtype=torch.bfloat16)
            self.register_parameter(f"weight_{number}", torch.nn.Parameter(one))


class Noise(torch.nn.Module):
    """So many bytes, none of which can be told from others."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        whole = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        whole.random_(generator=torch.Generator().manual_seed(1))
        self.register_buffer("whole", whole)


def noise(size_bytes: int) -> torch.nn.Module:
    return Noise(size_bytes)


class Scaled(torch.Tensor):
    """A tensor subclass as quantisation libraries make them: numbers, and a scale for each row."""

    numbers: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scale: torch.Tensor) -> Scaled:
        made = torch.Tensor._make_wrapper_subclass(
            cls, numbers.shape, dtype=torch.float32, device=numbers.device
        )
        assert isinstance(made, Scaled)
        return made

    def __init__(self, numbers: torch.Tensor, scale: torch.Tensor) -> None:
        self.numbers = numbers
        self.scale = scale

    def plain(self) -> torch.Tensor:
        return self.numbers.float() * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any
    ) -> Scaled:
        return cls(inner["numbers"], inner["scale"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(func(args[0].numbers), func(args[0].scale))
        plain = [one.plain() if isinstance(one, cls) else one for one in args]
        return func(*plain, **(kwargs or {}))


def quantised(width: int) -> torch.nn.Module:
    """Return a layer whose weight is a tensor subclass."""
    layer = torch.nn.Linear(width, width, bias=False)
    whole = numbers(width, width).mul(127).to(torch.int8)
    scaled = Scaled(whole, numbers(width, 1, seed=1))
    layer.weight = torch.nn.Parameter(scaled, requires_grad=False)
    return layer
