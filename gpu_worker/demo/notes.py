"""What a reader has to know to read the table right. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_worker.demo.figures import Row

TIE = 1.1
"""Up to how many times our memory plain loading takes the same."""


def notes(table: Sequence[Row]) -> tuple[str, ...]:
    """Return the notes to a table, the first two rows of which are of the weights as stored."""
    return (
        "1st/2nd: the worker that asks first, and the other. The same two processes work both "
        "ways, on the same requests; which way comes first alternates.",
        "Model ready: from the request to a module that can be used. First answer: from the same "
        "request to its first answer. All imports were over, and a tiny model had run.",
        "The page cache is warm: every file had been read before.",
        "Memory: what the model added to a process, by PSS, once it had answered and every page of "
        "its weights was read. Private pages no other process maps; of shared ones each process "
        "counts its part. Code is not counted.",
        _as_stored(*table[:2]),
        "To bf16: weights converted at load, those of MiniLM and of a generated float32 "
        "checkpoint. Plain, each process reads, converts and keeps its own copy. With weight-cache "
        "the first converts for all (build=), and pays with the time to publish them.",
    )


def size_text(size_bytes: int) -> str:
    """Return a size as people say it."""
    return f"{size_bytes / 2**30:g} GiB" if size_bytes >= 2**30 else f"{size_bytes >> 20} MiB"


def _as_stored(shared: Row, plain: Row) -> str:
    times = plain.total_bytes / shared.total_bytes
    if times > TIE:
        return f"As stored, the plain way takes {times:.2f} times the memory here."
    return (
        "As stored there is nothing to gain in memory: transformers maps the file itself, so plain "
        "processes share its pages too. In time the first worker pays for the copy out of the file."
    )
