"""Headers that are almost right: a table that can be copied, or an error that names the file."""

from __future__ import annotations

import json

import pytest

from coordinator.checkpoint import lay_out
from coordinator.safetensors_file import HEAD_BYTES, LENGTH_BYTES, header_bytes, read_table
from shm_store.errors import SourceError, SourceMalformed
from shm_store.index import parse_index
from shm_store.manifest import encode_manifest
from shm_store.reading import AS_IT_IS
from tests.mutations import COUNT, mutations


def file(tensors: dict[str, tuple[str, list[int], int]]) -> bytes:
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, size) in tensors.items():
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(table).encode()
    return len(header).to_bytes(8, "little") + header + bytes(end)


NAME = "a.safetensors"
FILES = (
    file({}),
    file({"a": ("F32", [2, 3], 24), "b.c": ("BF16", [4], 8), "empty": ("I64", [0, 3], 0)}),
    file({f"layer.{number}.weight": ("F8_E4M3", [8], 8) for number in range(12)}),
    file({"é": ("F4", [4], 2), "nul\0": ("BOOL", [], 1), "x": ("C64", [1], 8)}),
)


@pytest.mark.timeout(600)
def test_a_mutated_file_is_read_within_its_bounds_or_refused_by_name():
    read, said = 0, []
    for data in mutations(FILES, 7):
        try:
            length = header_bytes(data[:HEAD_BYTES], len(data), NAME)
            header = data[LENGTH_BYTES : LENGTH_BYTES + length]
            checkpoint = lay_out(read_table(header, len(data), NAME), AS_IT_IS, "a")
        except SourceError as error:
            said.append((error.source, str(error)))
            continue
        read += 1
        encode_manifest(checkpoint.manifest)
        for copy in checkpoint.copies:
            assert LENGTH_BYTES + length <= copy.source_offset_bytes
            assert copy.source_offset_bytes + copy.size_bytes <= len(data)
            assert copy.data_offset_bytes + copy.size_bytes <= checkpoint.data_bytes
    assert 0 < read < COUNT / 2
    assert all(by == NAME and text.startswith(f"{NAME}: ") for by, text in said)


@pytest.mark.timeout(600)
def test_a_mutated_index_names_files_beside_it_or_is_refused():
    index = json.dumps(
        {"metadata": {"total_size": 8}, "weight_map": {"a": "1.safetensors", "b": "s/2.st"}}
    ).encode()
    said = []
    for data in mutations((index,), 8):
        try:
            file_of = parse_index(data, "i")
        except SourceMalformed as error:
            said.append(error.source)
            continue
        for name in file_of.values():
            assert not name.startswith("/") and ".." not in name.split("/") and "\0" not in name
    assert set(said) == {"i"}
