"""Classes by name: what a segment may say that a value of it is of.

A segment is written by another process, and a name in it must not be a way to run code here. So:

- A class is looked up among the modules that this process has imported itself. Only of a few
  packages, which are what weights are made with, a module is imported for it.
- Whoever asks checks that it is a class of the kind that he expects, before he makes anything.
- A name is written only if it leads back to the class, so that what cannot be found is refused
  where the weights are made.
"""

from __future__ import annotations

import importlib
import sys

from shm_store.errors import ClassUnknown
from shm_store.plain_values import ValueRefused

IMPORTABLE = frozenset({"torch", "torchao", "gpu_worker"})
"""Packages whose modules are imported when weights name them."""


def class_name(kind: type) -> str:
    """Return the name that `find_class` knows `kind` by, "module:qualname".

    Raises:
        ValueRefused: it has none, as one that was made in a function.
    """
    name = f"{kind.__module__}:{kind.__qualname__}"
    try:
        found = find_class(name)
    except ClassUnknown:
        found = None
    if found is not kind:
        raise ValueRefused(
            f"it is of the class {kind.__qualname__} of {kind.__module__}, which cannot be found "
            "there by its name",
            remedy="define the class at the top of a module",
        )
    return name


def find_class(name: str) -> type:
    """Return the class of this name.

    Raises:
        ClassUnknown: this process has not imported it, or its module has no such class.
    """
    module_name, _, path = name.partition(":")
    module = sys.modules.get(module_name)
    if module is None and _may_import(module_name):
        try:
            module = importlib.import_module(module_name)
        except Exception as error:  # whatever that module raises where it does not work
            raise _unknown(name) from error
    found: object = module
    for part in path.split("."):
        # Not getattr: a module may import what it is asked for.
        found = getattr(found, "__dict__", {}).get(part)
    if not isinstance(found, type):
        raise _unknown(name)
    return found


def _may_import(module_name: str) -> bool:
    parts = module_name.split(".")
    return parts[0] in IMPORTABLE and all(
        part.isidentifier() and not part.startswith("__") for part in parts
    )


def _unknown(name: str) -> ClassUnknown:
    module_name, _, path = name[:200].partition(":")
    return ClassUnknown(
        f"these weights hold a {path!r} of {module_name!r}, and this process has no such class",
        remedy=f"import {module_name} first, in the version that the weights were made with",
    )
