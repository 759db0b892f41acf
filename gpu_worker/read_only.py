"""Names weights that are about to be written to where that would end the process.

Weights that all processes on a device share are mapped read-only, and torch knows no tensor that
cannot be written to: a write is a fault of the processor or of the GPU, which names nothing. So
what is known to write is stopped before it does: `load_state_dict`, an optimizer's step, and layers
that keep statistics while they train. Every other operation is looked at by `CheckWrites`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from shm_store.errors import ArgumentRefused
from shm_store.keys import Key

_guards: weakref.WeakSet[Guard] = weakref.WeakSet()
_watched: list[RemovableHandle] = []
"""The hook of all optimizers, from the first guard on."""


class Guard:
    """Watches over one module's weights as long as they lie in memory that is shared.

    Refers to the module weakly: it is kept by what the module's record keeps of its place.
    """

    def __init__(self, module: torch.nn.Module, key: Key, device: str) -> None:
        """Describe what is to be watched; `begin` does it."""
        self._module = weakref.ref(module)
        self._key = key
        self._device = device
        self._names: dict[int, str] = {}
        """The first tensor of each storage there, by where that begins."""
        self._hooks: list[RemovableHandle] = []

    def begin(self, shared: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Watch over these, which lie there now."""
        module = self._module()
        if module is None:
            return
        if not _watched:
            _watched.append(register_optimizer_step_pre_hook(_before_step))
        self._names = {}
        for name, tensor in shared:
            self._names.setdefault(_start(tensor), name)
        loads = module.register_load_state_dict_pre_hook(_before_load)  # type: ignore[no-untyped-call]
        self._hooks.append(loads)
        for layer in module.modules():
            if isinstance(layer, _NormBase | _SpectralNorm):
                self._hooks.append(layer.register_forward_pre_hook(_before_forward))
        _guards.add(self)

    def end(self) -> None:
        """Watch no more. Safe at any time, more than once."""
        _guards.discard(self)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def name(self, tensor: torch.Tensor) -> str | None:
        """Return which of the weights a tensor is, or is a view of."""
        return self._names.get(_start(tensor))

    def refused(self, name: str, why: str) -> ArgumentRefused:
        return ArgumentRefused(
            f"{why} would write to {name!r} of {self._key!r}, which all processes on "
            f"{self._device} share, read-only",
            remedy="load it with private=True, or edit it on the host, before it is locked",
        )


class CheckWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at every operation of the thread that enters it; see `gpu_worker.check_writes`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                for tensor in value if isinstance(value, list | tuple) else [value]:
                    if isinstance(tensor, torch.Tensor):
                        _stop(tensor, str(func))
        return func(*args, **kwargs)


def _stop(tensor: torch.Tensor, why: str) -> None:
    """Raise if a tensor is of weights that are shared."""
    for guard in list(_guards):
        name = guard.name(tensor)
        if name is not None:
            raise guard.refused(name, why)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not _guards:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                _stop(parameter, f"a step of {type(optimizer).__name__}")


def _before_load(
    module: torch.nn.Module, state: dict[str, Any], prefix: str, facts: dict[str, Any], *_: Any
) -> None:
    if facts.get("assign_to_params_buffers"):
        return
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if f"{prefix}{name}" in state:
            _stop(tensor, "load_state_dict (without assign=True)")


def _before_forward(layer: torch.nn.Module, _: Any) -> None:
    if not layer.training:  # first, so that a compiler sees nothing else of this
        return
    if isinstance(layer, _NormBase) and not layer.track_running_stats:
        return
    for buffer in layer.buffers(recurse=False):
        _stop(buffer, f"{type(layer).__name__} in train()")


def _start(tensor: torch.Tensor) -> int:
    """Return where the memory of a tensor begins; -1 if it has none of its own."""
    try:
        return tensor.untyped_storage().data_ptr() or -1
    except (RuntimeError, NotImplementedError):
        return -1  # a wrapper, or on no device
