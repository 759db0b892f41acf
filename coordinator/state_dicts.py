"""Which of the things in a training checkpoint are its weights. Pure: knows no torch.

Weights are those of the one dict in it that has a name by which weights are known; or, if there is
none, the tensors and extra states at its top. Where it has several, names begin with that of their
dict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from coordinator.checkpoint import shown
from shm_store.errors import SourceUnsupported
from shm_store.reading import Reading

WELL_KNOWN = (
    "state_dict",
    "model_state_dict",
    "model",
    "module",
    "net",
    "network",
    "weights",
    "params",
    "params_ema",
    "ema",
    "model_ema",
    "ema_state_dict",
)
"""Under these names trainers put weights. With several of them nobody knows which is meant."""

EXTRA_STATE = "_extra_state"
"""How torch calls what a module keeps beside tensors."""

_SHOWN = 8


def weights_in(
    loaded: object, is_tensor: Callable[[object], bool], reading: Reading, source: str
) -> dict[str, Any]:
    """Return the state dict that is meant, by the names that `reading` sees.

    Args:
        loaded: what a file holds.
        is_tensor: says what a tensor is.
        source: the file's name, for errors.

    Raises:
        SourceUnsupported: it has none, or more than one, or names that are no texts.
    """
    if not isinstance(loaded, Mapping):
        raise SourceUnsupported(
            f"{source}: has a {type(loaded).__name__} in it, no state dict",
            source=source,
            remedy="save the module's state_dict()",
        )
    inner = {
        str(name): held
        for name, held in loaded.items()
        if isinstance(held, Mapping) and any(map(is_tensor, held.values()))
    }
    known = [name for name in WELL_KNOWN if name in inner]
    if not known and any(map(is_tensor, loaded.values())):
        return {
            name: value
            for name, value in _named(loaded, source).items()
            if is_tensor(value) or name.endswith(EXTRA_STATE)
        }
    if not inner and not loaded:
        return {}
    if not inner:
        raise SourceUnsupported(
            f"{source}: has no tensor, neither at its top nor in a dict there",
            source=source,
            remedy="save the module's state_dict()",
        )
    keeps = reading.keeps()
    if len(known) == 1:
        weights = _named(inner[known[0]], source)
        if any(map(keeps, weights)):
            return weights
    flat = {
        f"{outer}.{name}": value
        for outer, held in inner.items()
        for name, value in _named(held, source).items()
    }
    if reading.name_filter and any(map(keeps, flat)):
        return flat
    if len(known) == 1:
        return weights
    names = sorted(inner)
    listed = ", ".join(map(shown, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")
    meant = (known or names)[0]
    what = "several dicts" if len(names) > 1 else "a dict"
    raise SourceUnsupported(
        f"{source}: has {what} of tensors: {listed}",
        source=source,
        remedy=f"say which is meant: name_filter={meant + '.*'!r} with "
        f"rename={{{meant + '.'!r}: ''}}, or --only {meant + '.*'!r} --rename {meant}.=",
    )


def _named(weights: Mapping[Any, Any], source: str) -> dict[str, Any]:
    for name in weights:
        if not isinstance(name, str):
            raise SourceUnsupported(
                f"{source}: names a tensor {shown(name)}, which is no text",
                source=source,
                remedy="save a dict whose keys are texts",
            )
    return dict(weights)
