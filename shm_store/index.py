"""The index of a sharded checkpoint: which file has which tensor. Pure: bytes in, values out.

As transformers and diffusers write it: a JSON object whose `weight_map` gives each tensor's file.
It is authoritative: what it does not name is not read.
"""

from __future__ import annotations

import json
import re
from typing import Any

from shm_store.errors import SourceMalformed, SourceUnsupported

INDEX_LIMIT_BYTES = 64 * 1024 * 1024

SHARDS_LIMIT = 250
"""Their fds travel with one message, for which the kernel takes 253."""

_NAME = re.compile(r"\.index(\.[A-Za-z0-9_-]+)?\.json$")
_NUMBERED = re.compile(r"(.*)-\d{5}-of-\d{5}(\..*)")


def is_index(name: str) -> bool:
    """Say whether a file is an index, by its name; `model.safetensors.index.fp16.json` is one."""
    return _NAME.search(name) is not None


def is_numbered(name: str) -> bool:
    """Say whether a file is one of several, by its name, as `model-00001-of-00003.safetensors`."""
    return _NUMBERED.fullmatch(name) is not None


def parse_index(data: bytes, source: str) -> dict[str, str]:
    """Return the file of each tensor, as an index has it.

    Args:
        data: the index.
        source: its name, for errors.

    Raises:
        SourceMalformed: this is no index, or it leads out of its folder.
        SourceUnsupported: it names more shards than can be read.
    """
    try:
        table: Any = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise SourceMalformed(f"{source}: cannot be read: {error}", source=source) from None
    weight_map = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceMalformed(
            f"{source}: has no weight_map, which says what is where", source=source
        )
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _is_beside(file):
            raise SourceMalformed(
                f"{source}: tensor {name[:200]!r} is in {str(file)[:200]!r}, which is no file "
                "beside the index",
                source=source,
            )
    shards = len(set(weight_map.values()))
    if shards > SHARDS_LIMIT:
        raise SourceUnsupported(
            f"{source}: {shards} shards, of which {SHARDS_LIMIT} can be read",
            source=source,
            remedy="save the checkpoint again with a larger max_shard_size",
        )
    return weight_map


def extra_shards(files: list[str], shards: set[str]) -> list[str]:
    """Return those `files` of a folder that are numbered as its `shards` are, and are none."""
    series = {match.groups() for shard in shards if (match := _NUMBERED.fullmatch(shard))}
    return sorted(
        name
        for name in files
        if name not in shards
        and (match := _NUMBERED.fullmatch(name)) is not None
        and match.groups() in series
    )


def _is_beside(file: str) -> bool:
    parts = file.split("/")
    return all(part not in ("", ".", "..") for part in parts) and file.isprintable()
