"""One state dict of everything that a state dict can hold, and what can be seen of it."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import torch

from gpu_worker.wrappers import is_wrapper, plain_parts
from tests.gpu_worker.sealed import bits
from tests.gpu_worker.test_compound import ALL_DTYPES, QUANTISED, SPARSE
from tests.gpu_worker.test_held_values import EXTRAS
from tests.gpu_worker.test_publish import KINDS
from tests.gpu_worker.wrapped import Around, scaled


def everything() -> dict[str, Any]:
    """Return it: plain, compound and wrapped tensors of all kinds, values, ties between them."""
    torch.manual_seed(3)
    state: dict[str, Any] = {}
    for kind, make in KINDS.items():
        state |= {f"kinds.{kind}.{name}": value for name, value in make().items()}
    for name in ALL_DTYPES:
        if not name.startswith("torch.q"):
            dtype = getattr(torch, name.removeprefix("torch."))
            state[f"dtypes.{name}"] = torch.ones(6 * 16, dtype=torch.uint8).view(dtype).view(2, -1)
    state |= {f"sparse.{kind}": make() for kind, make in SPARSE.items()}
    state |= {f"quantised.{kind}": make() for kind, make in QUANTISED.items()}
    state |= {f"values.{kind}": value for kind, value in EXTRAS.items()}
    state["wrapped"] = Around(scaled())
    state["wrapped.again"] = state["wrapped"]
    state["wrapped.integers"] = state["wrapped"].held.integers
    state["file"] = io.BytesIO(b"x" * 3000)
    state["big"] = torch.arange(300_000.0)[7:250_000]
    state["small_view"] = torch.arange(1_000_000.0)[500_000:500_010]
    state["nested"] = {"tensors": [state["big"], state["small_view"].view(2, 5)]}
    return state


def seen(state: dict[str, Any]) -> list[str]:
    """Return one line for each entry, the same in each process that has the same there."""
    lines = [f"{name}: {_seen(value)}" for name, value in state.items()]
    starts: dict[int, str] = {}
    for name, value in state.items():
        for part in plain_parts(value) if isinstance(value, torch.Tensor) else ():
            if part.numel():
                lines.append(f"{name} is at {starts.setdefault(part.data_ptr(), name)}")
    return lines


def _seen(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if is_wrapper(value):
            inside = [_seen(part) for part in plain_parts(value)]
            return f"{type(value).__name__} {list(value.shape)} {inside}"
        facts = f"{value.dtype} {value.layout} {list(value.shape)}"
        if value.is_quantized:
            value = value.int_repr()
        digest = hashlib.sha256(b"".join(bits(part) for part in plain_parts(value)))
        return f"{facts} {digest.hexdigest()[:16]}"
    if isinstance(value, dict):
        return f"{type(value).__name__} {[(repr(key), _seen(held)) for key, held in value.items()]}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} {[_seen(held) for held in value]}"
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__} {sorted(map(repr, value))}"
    if isinstance(value, io.BytesIO):
        return f"a file at {value.tell()}: {hashlib.sha256(value.getvalue()).hexdigest()}"
    return f"{type(value).__name__} {value!r}"
