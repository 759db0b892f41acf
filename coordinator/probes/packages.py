"""Packages that some uses need. They are looked for, not imported."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import util

from coordinator.probes.finding import Finding, ok, warn
from coordinator.probes.limits import has_gpu


@dataclass(frozen=True, slots=True)
class Extra:
    """One of the optional dependencies in pyproject.toml."""

    name: str
    modules: tuple[str, ...]
    use: str
    for_gpu: bool = False

    @property
    def remedy(self) -> str:
        return f"pip install 'shm-weight-cache[{self.name}]'"


EXTRAS = (
    Extra("gguf", ("gguf",), "GGUF files"),
    Extra("digest", ("xxhash",), "digests of weights"),
    Extra("http", ("fsspec", "aiohttp"), "https:// URLs"),
    Extra("hf", ("fsspec", "huggingface_hub"), "hf:// URLs"),
    Extra("s3", ("s3fs",), "s3:// URLs"),
    Extra("gcs", ("gcsfs",), "gs:// URLs"),
    Extra("cuda", ("cuda.bindings",), "memory of an NVIDIA GPU that processes share", for_gpu=True),
)


def installed(extra: Extra, root: str = "/") -> Finding:
    """Is there what an extra brings? That it is not there is a warning where a GPU waits for it."""
    name = f"extra_{extra.name}"
    missing = [module for module in extra.modules if not _found(module)]
    if not missing:
        return ok(name, f"{', '.join(extra.modules)}: installed, for {extra.use}")
    found = f"{', '.join(missing)}: not installed; only for {extra.use}"
    if extra.for_gpu and has_gpu(root):
        return warn(name, found, extra.remedy)
    return ok(name, found, extra.remedy)


def torch() -> Finding:
    """Is there torch, which a worker needs and a coordinator does not?"""
    if _found("torch"):
        return ok("torch", "installed")
    return warn(
        "torch",
        "not installed: a coordinator runs here, a worker does not",
        "pip install torch, built for this machine's GPU or for CPUs",
    )


def torchao() -> Finding:
    """Is there torchao?"""
    if _found("torchao"):
        return ok("torchao", "installed, for its quantised tensors")
    return ok(
        "torchao", "not installed; only for its quantised tensors", "pip install 'torchao>=0.14'"
    )


def _found(module: str) -> bool:
    try:
        return util.find_spec(module) is not None
    except (ImportError, ValueError):  # its package is not there, or half imported
        return False
