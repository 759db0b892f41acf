"""A module out of a skeleton and shared weights.

Order: build the skeleton without memory, assign the weights, tie what is tied, then refuse whatever
is still missing or on the meta device. Nothing is handed out before that.

    Note on construction
    fact: accelerate's `init_empty_weights` patches `torch.nn.Module` for the whole process; a
    parameter that another thread assigns or makes meanwhile lands on the meta device
    consequence: what assigns parameters must never overlap with what builds, and a module that
    another thread builds by itself, as a `build=` does under no lock, must not see the patch
    choice: the write side of the load lock around skeleton and assignment, and a patch that works
    in its own thread only. A skeleton that assembles another module would find everything patched,
    so that is refused
    cost: modules are assembled one after the other, and none is moved meanwhile

    Note on fork
    fact: a child that another thread forks during a skeleton has the patch, and nobody to take it
    away
    consequence: what it builds may land on meta, in threads that it starts later
    choice: an at-fork hook takes the patch away; the load lock frees itself
    cost: none
"""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import init_empty_weights

from gpu_worker.load_lock import load_lock
from gpu_worker.mapping import Buffer
from gpu_worker.tensors import entries, tensors
from gpu_worker.wrappers import plain_parts
from shm_store.errors import ArgumentRefused, LoadTimeout, WeightsMissing, listed
from shm_store.keys import Key
from shm_store.manifest import NON_PERSISTENT

_MISMATCH = re.compile(
    r"size mismatch for (.+): copying a param with shape torch\.Size\((.+)\) from checkpoint, "
    r"the shape in current model is torch\.Size\((.+)\)\."
)
"""As torch words it, one to a line."""

_unpatched: Callable[..., None] | None = None
"""What `register_parameter` is without the patch, while a skeleton is called, so that may be on.

The write side of the load lock guards it.
"""


@dataclass(frozen=True, slots=True)
class Assembled:
    """A module over shared weights, and the names in the weights that it has no place for."""

    module: torch.nn.Module
    unexpected: tuple[str, ...]


def assemble(
    key: Key,
    skeleton: Callable[[], torch.nn.Module],
    buffer: Buffer,
    train: bool = False,
    left_s: float | None = None,
) -> Assembled:
    """Return `skeleton()` with the weights in `buffer` as its parameters and buffers. Zero-copy.

    Args:
        key: for messages.
        skeleton: builds the module. Its parameters get no memory; its buffers do, and those that
            the weights do not hold keep their values.
        buffer: the mapped segment. The module keeps it.
        train: leave the module in the mode it was built in, instead of calling `eval()`.
        left_s: how long to wait for other threads that build or move a module; None is for ever.

    Returns:
        The module, no parameter of which requires a gradient.

    Raises:
        WeightsMissing: the weights lack parameters or persistent buffers of the skeleton.
        ArgumentRefused: shapes differ, the skeleton is no module, it leaves buffers on the meta
            device, or it assembles a module itself.
        ReentryRefused: this thread has the load lock for something else.
        SegmentRefused: the manifest lies.
        LoadTimeout: other threads build or move theirs for longer than `left_s`.
        Whatever `skeleton` raises. In all cases nothing stays patched or locked.
    """
    state = tensors(buffer)
    apart = {
        entry.name: state.pop(entry.name)
        for entry in entries(buffer)
        if entry.kind in NON_PERSISTENT
    }
    address = ctypes.addressof(buffer)
    region = range(address, address + len(buffer))
    if _unpatched is not None and load_lock.owned():
        raise ArgumentRefused(
            "skeleton= assembles another module while it builds its own",
            remedy="load the other weights first, and use their module in the skeleton",
        )
    with load_lock.write(left_s, busy=lambda: _another_builds(key)):
        module, unexpected = _construct(key, skeleton, state, apart, region)
    if not train:
        module.eval()
    return Assembled(module, tuple(unexpected))


def _another_builds(key: Key) -> LoadTimeout:
    return LoadTimeout(
        f"the weights of {key!r} are here, but it was not ready in time: another thread builds a "
        "module, and there can be only one at a time"
    )


def private(build: Callable[[], object], train: bool = False) -> Assembled:
    """Return the module that `build` makes, with the weights it has: memory of this process alone.

    Raises:
        ArgumentRefused: it makes no module.
        Whatever `build` raises.
    """
    module = build()
    if not isinstance(module, torch.nn.Module):
        raise ArgumentRefused(
            f"with private=True, build= returns a module, not a {type(module).__name__}",
            remedy="have it load the weights into a module, and return that",
        )
    if not train:
        module.eval()
    return Assembled(module.requires_grad_(False), ())


def held_bytes(module: torch.nn.Module) -> int:
    """Return the bytes of memory that the tensors of `module` keep, each storage once."""
    storages = {}
    for named in _named(module).values():
        for tensor in plain_parts(named):
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _construct(
    key: Key,
    skeleton: Callable[[], torch.nn.Module],
    state: dict[str, Any],
    apart: dict[str, torch.Tensor],
    region: range,
) -> tuple[torch.nn.Module, list[str]]:
    """Return the module, and the names it does not know. `apart` are buffers no state dict has."""
    module = _build_empty(skeleton)
    _check_module(module)
    module.requires_grad_(False)
    ties = _ties(module)
    missing, unexpected = _assign(key, module, state)
    unexpected += _assign_buffers(key, module, apart)
    _tie_equal(module, region)
    _tie_as_built(module, ties, region)
    # By object: a tie may move what it ties, as transformers does when it pads a bias.
    held = [tensor for tensor in _named(module).values() if _lies_in(tensor, region)]
    _tie_by_method(module, missing)
    _refuse_incomplete(key, module, missing, held, unexpected)
    module.requires_grad_(False)
    return module, unexpected


def _build_empty(skeleton: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Return `skeleton()`, whose parameters get no memory."""
    global _unpatched
    full = _unpatched = torch.nn.Module.register_parameter
    try:
        with init_empty_weights(include_buffers=False):
            _patch_this_thread_only(full)
            return skeleton()
    finally:
        # An exception from outside may have kept the context manager from it.
        torch.nn.Module.register_parameter = full  # type: ignore[method-assign]
        _unpatched = None


def _patch_this_thread_only(full: Callable[..., None]) -> None:
    """Keep accelerate's patch of `nn.Module` from the modules that other threads build meanwhile.

    It is for the whole process, so a `build=` in another thread would find its weights on meta.
    Leaving `init_empty_weights` takes this away with the patch.
    """
    empty, mine = torch.nn.Module.register_parameter, threading.get_ident()

    def register(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        (empty if threading.get_ident() == mine else full)(module, name, parameter)

    torch.nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]


def _check_module(made: object) -> None:
    if not isinstance(made, torch.nn.Module):
        what = "None" if made is None else f"a {type(made).__name__}"
        raise ArgumentRefused(
            f"skeleton= returned {what}, not a module",
            remedy="have it return the torch.nn.Module that it makes",
        )


def _assign(
    key: Key, module: torch.nn.Module, state: dict[str, Any]
) -> tuple[list[str], list[str]]:
    """Give the module its weights; return the names it lacks and those it does not know."""
    try:
        missing, unexpected = module.load_state_dict(state, strict=False, assign=True)
    except RuntimeError as error:
        shown = r"\1 has shape \2, the skeleton's \3"
        facts = [_MISMATCH.sub(shown, line.strip()) for line in str(error).splitlines()[1:]]
        # What torch lists is told here, without its 10 KB; anything else may need its traceback.
        cause = None if facts else error
        raise _unfit(key, facts or [str(error)]) from cause
    return missing, unexpected


def _unfit(key: Key, facts: list[str]) -> ArgumentRefused:
    return ArgumentRefused(
        f"weights {key!r} do not fit the skeleton: {listed(facts, separator='; ')}",
        remedy="build the skeleton from the configuration these weights were made with",
    )


def _assign_buffers(key: Key, module: torch.nn.Module, state: dict[str, torch.Tensor]) -> list[str]:
    """Give the module the buffers that no state dict holds; return the names it does not know."""
    buffers = dict(module.named_buffers(remove_duplicate=False))
    unexpected = []
    for name, tensor in state.items():
        if name not in buffers:
            unexpected.append(name)
        elif buffers[name].shape != tensor.shape:
            shapes = f"{list(tensor.shape)}, the skeleton's {list(buffers[name].shape)}"
            raise _unfit(key, [f"{name} has shape {shapes}"])
        else:
            _replace(module, name, tensor)
    return unexpected


def _ties(module: torch.nn.Module) -> list[list[str]]:
    """Return the names that the skeleton gave to one parameter.

    The patch replaces a parameter each time it is registered; the replacements share a storage,
    which has no address on the meta device, but an identity.
    """
    names = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[parameter.untyped_storage()._cdata, _geometry(parameter)].append(name)
    return [tied for tied in names.values() if len(tied) > 1]


def _tie_equal(module: torch.nn.Module, region: range) -> None:
    """Make one parameter of those that are the same tensor of the weights."""
    first: dict[tuple[object, ...], torch.nn.Parameter] = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if _lies_in(parameter, region):
            tied = first.setdefault(_bytes(parameter), parameter)
            if tied is not parameter:
                _replace(module, name, tied)


def _tie_as_built(module: torch.nn.Module, ties: list[list[str]], region: range) -> None:
    """Let a tie of the skeleton supply what the weights lack.

    Where the weights hold two tensors, both stay.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for names in ties:
        held = [name for name in names if _lies_in(parameters[name], region)]
        for name in names:
            if held and name not in held:
                _replace(module, name, parameters[held[0]])


def _tie_by_method(module: torch.nn.Module, missing: list[str]) -> None:
    """Call the module's own `tie_weights`, if it has one."""
    tie_weights = getattr(module, "tie_weights", None)
    if not callable(tie_weights):
        return
    if "missing_keys" in inspect.signature(tie_weights).parameters:
        # transformers 5 then keeps apart what the weights hold apart, as its from_pretrained does.
        tie_weights(missing_keys=set(missing))
    else:
        tie_weights()


def _refuse_incomplete(
    key: Key,
    module: torch.nn.Module,
    missing: list[str],
    held: list[torch.Tensor],
    unexpected: list[str],
) -> None:
    """Raise unless every weight the skeleton needs has come, by name or through a tie to `held`."""
    present = _named(module)
    sources = {id(tensor) for tensor in held}
    lacking = [name for name in missing if id(present.get(name)) not in sources]
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    on_meta = [name for name, tensor in present.items() if tensor.is_meta]
    lacking += [name for name in on_meta if name not in buffers]
    if lacking:
        raise WeightsMissing(key, tuple(dict.fromkeys(lacking)), tuple(unexpected))
    if on_meta:
        # We leave buffers their memory, so the skeleton itself did this.
        raise ArgumentRefused(
            f"skeleton= leaves {len(on_meta)} buffer(s) on the meta device that weights {key!r} "
            f"do not hold: {listed(on_meta)}",
            remedy='skeleton= makes a normal module, outside of torch.device("meta"); its weights '
            "are left out for you, so compute no buffer from them",
        )


def _named(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers, under each of their names."""
    named: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    named.update(module.named_buffers(remove_duplicate=False))
    return named


def _geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _bytes(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what two tensors have in common only if they are the same bytes in the same form."""
    parts = plain_parts(tensor)
    if any(part is tensor for part in parts):
        return tensor.data_ptr(), tensor.dtype, _geometry(tensor)
    made_of = ((part.data_ptr(), part.dtype, _geometry(part)) for part in parts)
    return type(tensor), tensor.layout, tensor.dtype, tensor.shape, *made_of


def _lies_in(tensor: torch.Tensor, region: range) -> bool:
    """Say whether a tensor, or something that it is made of, has its bytes in `region`."""
    return any(part.data_ptr() in region for part in plain_parts(tensor))


def _replace(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, tensor)


def _forget_inherited() -> None:
    """In a forked child: start without another thread's patch."""
    if _unpatched is not None:
        torch.nn.Module.register_parameter = _unpatched  # type: ignore[method-assign]


os.register_at_fork(after_in_child=_forget_inherited)
