"""Reads files of torch.save as a loader does, one after the other in one process: torch takes long
to be imported.

    python -m tests.coordinator.pickle_reader FILE...
    python -m tests.coordinator.pickle_reader --fuzz SEED COUNT

Says of each file, as a line of JSON, what came of it. With --fuzz it reads COUNT damaged files; any
error that is not a source's is the end, and the seed of the file is said.
"""

from __future__ import annotations

import io
import json
import os
import random
import sys
import tempfile
import zipfile

from coordinator import private_memory
from coordinator.casting import TORCH_BYTES, import_torch
from coordinator.formats import read_contents
from coordinator.local_file import LocalFile
from coordinator.pump import Meter
from shm_store.errors import SourceError
from shm_store.reading import AS_IT_IS, Reading

READINGS = (AS_IT_IS, Reading(dtypes=(("*", "BF16"),)))


def read(path: str, reading: Reading = AS_IT_IS) -> str:
    """Read and write all of it; return how many bytes that were, or how it is refused."""
    import_torch()
    private_memory.bound(private_memory.MEMORY_LIMIT_BYTES + TORCH_BYTES)
    fd = os.open(path, os.O_RDONLY)
    segment = os.memfd_create("segment")
    try:
        file = LocalFile(fd, os.path.basename(path), os.fstat(fd).st_size)
        contents = read_contents([file], reading, file.name)
        if contents.data_bytes > 1 << 30:
            return "large"
        os.truncate(segment, contents.data_bytes)
        contents.fill(segment, 0, Meter(contents.filled_bytes, lambda *_: None))
        return str(contents.filled_bytes)
    except SourceError as error:
        return f"{error.code}: {error}"
    finally:
        os.close(fd)
        os.close(segment)


def originals() -> list[bytes]:
    """Good files, of both formats."""
    import torch

    tied = torch.randn(8, 4)
    state = {
        "a": tied,
        "b": tied,
        "v": tied[2:5],
        "t": torch.randn(3, 5).t(),
        "h": torch.ones(7, dtype=torch.float16),
        "p": torch.nn.Parameter(torch.ones(2)),
        "e": torch.empty(0),
        "i": torch.arange(3),
    }
    saved: list[object] = [
        state,
        {"state_dict": state, "epoch": 1},
        torch.nn.Linear(2, 2).state_dict(),
    ]
    files = []
    for thing in saved:
        for new in (True, False):
            file = io.BytesIO()
            torch.save(thing, file, _use_new_zipfile_serialization=new)
            files.append(file.getvalue())
    return files


def damaged(data: bytes, lots: random.Random) -> bytes:
    """Return a file with something wrong: anywhere, or in a pickle of a whole archive."""
    if data.startswith(b"PK") and lots.random() < 0.7:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = {name: archive.read(name) for name in archive.namelist()}
        name = next(name for name in records if name.endswith("data.pkl"))
        if lots.random() < 0.1:
            name = lots.choice(list(records))
        records[name] = _mutated(records[name], lots)
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            for name, record in records.items():
                archive.writestr(name, record)
        return file.getvalue()
    return _mutated(data, lots)


def _mutated(data: bytes, lots: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(lots.choice((1, 1, 2, 5))):
        at = lots.randrange(len(changed) + 1)
        match lots.randrange(6):
            case 0:
                changed[at:] = b""
            case 1:
                changed[at : at + lots.randrange(1, 9)] = b""
            case 2:
                changed[at:at] = lots.randbytes(lots.randrange(1, 9))
            case 3:
                other = lots.randrange(len(changed) + 1)
                changed[at:at] = changed[other : other + lots.randrange(1, 40)]
            case 4:
                changed[at : at + 1] = bytes([lots.choice((0, 1, 0x7F, 0x80, 0xFF, 0x2E, 0x52))])
            case _:
                changed[at : at + 1] = lots.randbytes(1)
    return bytes(changed)


def fuzz(seed: int, count: int) -> dict[str, int]:
    """Read so many damaged files; return how many were read, and how many refused as what."""
    import torch

    torch.manual_seed(0)
    files = originals()
    outcomes: dict[str, int] = {}
    with tempfile.NamedTemporaryFile() as file:
        for number in range(seed, seed + count):
            lots = random.Random(number)
            file.seek(0)
            file.truncate()
            file.write(damaged(lots.choice(files), lots))
            file.flush()
            try:
                outcome = read(file.name, lots.choice(READINGS)).partition(":")[0]
            except BaseException:
                print(f"seed {number}", flush=True)
                raise
            outcome = "read" if outcome.isdigit() else outcome
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
    return outcomes


if __name__ == "__main__":
    if sys.argv[1] == "--fuzz":
        print(json.dumps(fuzz(int(sys.argv[2]), int(sys.argv[3]))))
    else:
        for path in sys.argv[1:]:
            print(json.dumps(read(path)), flush=True)
