"""Names weights that are about to be written to where that would end the process.

Weights that all processes on a device share are mapped read-only, and torch knows no tensor that
cannot be written to: a write is a fault of the processor or of the GPU, which names nothing. So:

- What layers write to by being used is not shared: `written_by_use`.
- `load_state_dict` and an optimizer's step are stopped before they write.
- Every other operation is looked at by `CheckWrites`, where somebody asks for that.

    Note on the hooks
    fact: hooks of a module are pickled, copied and compiled with it, and one at the root does not
    see what is loaded into a child
    consequence: a saved module could not be read without this package
    choice: `Module._load_from_state_dict` itself looks, from the first shared weights on
    cost: a function of torch is replaced, as accelerate does it
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_worker.wrappers import plain_parts
from shm_store.errors import ArgumentRefused
from shm_store.keys import Key

_guards: weakref.WeakSet[Guard] = weakref.WeakSet()
_before: list[Any] = []
"""What `Module._load_from_state_dict` was when the first guard began: torch's, or another's."""

STATISTICS = (
    "aten::batch_norm",
    "aten::native_batch_norm",
    "aten::cudnn_batch_norm",
    "aten::miopen_batch_norm",
    "aten::instance_norm",
)
"""Operations whose schema does not say that they write to their fourth and fifth argument, which
they do if the sixth is true.
"""


class Guard:
    """Watches over one module's weights as long as they lie in memory that is shared."""

    def __init__(self, key: Key, device: str) -> None:
        """Describe whose they are; `begin` watches."""
        self._key = key
        self._device = device
        self._names: dict[int, str] = {}
        """The first tensor of each storage there, by where that begins."""

    def begin(self, shared: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Watch over these, which lie there now."""
        if not _before:
            _before.append(torch.nn.Module._load_from_state_dict)
            torch.nn.Module._load_from_state_dict = _load_checked  # type: ignore[assignment]
            register_optimizer_step_pre_hook(_before_step)
        self._names = {}
        for name, tensor in shared:
            self._names.setdefault(_start(tensor), name)
        _guards.add(self)

    def end(self) -> None:
        """Watch no more. Safe at any time, more than once."""
        _guards.discard(self)

    def name(self, tensor: torch.Tensor) -> str | None:
        """Return which of the weights a tensor is, or is a view of."""
        return self._names.get(_start(tensor))

    def refused(self, name: str, why: str) -> ArgumentRefused:
        return ArgumentRefused(
            f"{why} would write to {name!r} of {self._key!r}, which all processes on "
            f"{self._device} share, read-only",
            remedy="load it with share_vram=False, which gives this process a copy there of its "
            "own; or offload it, edit it on the host, and lock it again",
        )


def written_by_use(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield what layers known to do so write to when they are used: statistics, clipped rows."""
    for layer in module.modules():
        if isinstance(layer, _NormBase | _SpectralNorm):
            yield from layer.buffers(recurse=False)
        elif isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag):
            if layer.max_norm is not None:
                yield layer.weight
        elif type(layer).__module__.startswith("torch.ao.quantization"):
            yield from layer.buffers(recurse=False)
        for hook in layer._forward_pre_hooks.values():
            if type(hook).__name__ == "SpectralNorm":  # the older one, torch.nn.utils.spectral_norm
                yield from layer.buffers(recurse=False)


class CheckWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at every operation of the thread that enters it; see `gpu_worker.check_writes`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        statistics = func._schema.name in STATISTICS and len(args) > 5 and args[5]
        for place, argument in enumerate(func._schema.arguments):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if writes or (statistics and place in (3, 4)):
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                for tensor in value if isinstance(value, list | tuple) else [value]:
                    if isinstance(tensor, torch.Tensor):
                        _stop(tensor, str(func))
        return func(*args, **kwargs)


def _stop(tensor: torch.Tensor, why: str) -> None:
    """Raise if a tensor is of weights that are shared."""
    for guard in list(_guards):
        for part in plain_parts(tensor):
            name = guard.name(part)
            if name is not None:
                raise guard.refused(name, why)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not _guards:
        return
    closure = bool(args[1:] or kwargs.get("closure"))
    """It makes the gradients."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None or (closure and parameter.requires_grad):
                _stop(parameter, f"a step of {type(optimizer).__name__}")


def _load_checked(
    module: torch.nn.Module, state: Any, prefix: str, facts: dict[str, Any], *rest: Any
) -> None:
    if _guards and not facts.get("assign_to_params_buffers"):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and f"{prefix}{name}" in state:
                _stop(tensor, "load_state_dict (without assign=True)")
    _before[0](module, state, prefix, facts, *rest)


def _start(tensor: torch.Tensor) -> int:
    """Return where the memory of a tensor begins; -1 if it has none of its own."""
    try:
        return tensor.untyped_storage().data_ptr() or -1
    except (RuntimeError, NotImplementedError):
        return -1  # a wrapper, or on no device
