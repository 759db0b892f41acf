"""From one dtype to another while bytes go from files into a segment. Runs in the loader alone.

This is one of the two modules of the coordinator's package that use torch, and they import it when
it is needed and not before: most loaders never do, and the coordinator must not.

    Note on what comes out
    fact: torch converts most elements in vectors and the others alone. The two agree bit for bit,
    but for the payload of a NaN (0xffff and 0x7fc0 in BF16)
    consequence: `Tensor.to` itself depends there on shapes, and on the number of threads
    choice: chunks of whole vectors, so that it is what one thread of `Tensor.to` gives
    cost: a NaN in a tensor without dimensions may have another payload

    Note on memory
    fact: a tensor may be as large as half of the host's memory
    consequence: to convert it whole would take its size once more, which is in nobody's books
    choice: chunk by chunk, in two buffers that are used again and again
    cost: none: a chunk stays in the processor's cache from one step to the next

    Note on threads
    fact: torch's threads wait for each other by spinning, after every chunk. One converts F32 to
    BF16 at 4.6 GB/s; two, on two cores that others use too, took 3 to 40 times as long
    consequence: more threads make it slower whenever the machine is busy, and each has a stack
    choice: one
    cost: what is slow to convert, from float8 above all (0.2 GB/s), is no faster with more cores
"""

from __future__ import annotations

import functools
import itertools
import os
import warnings
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from coordinator import private_memory
from coordinator.checkpoint import Cast, Checkpoint, Copy
from coordinator.pump import Meter, Pump, read_into
from shm_store.errors import PlatformUnsupported, SourceChanged, SourceUnsupported
from shm_store.layout import ITEM_BYTES
from shm_store.segment import write_at

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 8 * 1024 * 1024
"""Of the larger of the two dtypes."""

TORCH_BYTES = 1024 * 1024 * 1024
"""What torch may take beside. Once imported it takes 230 MiB, with what a CPU's build brings."""


@functools.cache
def import_torch() -> ModuleType:
    """Return torch, imported into bounded memory, with one thread, and without a word."""
    private_memory.allow(TORCH_BYTES)
    # numpy, which torch imports if it is there, would else have a buffer for every core.
    os.environ.update({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
    # What torch warns of is for its caller, not for the coordinator's standard error.
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    return torch


def prepare(checkpoint: Checkpoint, names: Sequence[str]) -> None:
    """Import torch, and see whether it has all the dtypes.

    Args:
        names: of the files, for errors.

    Raises:
        SourceUnsupported: the installed torch does not know one.
    """
    import_torch()
    for file, dtypes in {(cast.file, (cast.dtype, cast.to)) for cast in checkpoint.casts}:
        for dtype in dtypes:
            dtype_of(dtype, names[file])


class Converter:
    """Writes elements of one dtype into a segment as another. Owns a buffer for them."""

    def __init__(self, segment_fd: int, size_bytes: int = CHUNK_BYTES) -> None:
        """Write into a segment; `size_bytes` in all, if that is less than a chunk."""
        self._segment_fd = segment_fd
        self._bytes = bytearray(min(size_bytes, CHUNK_BYTES))

    def write(self, elements: torch.Tensor, to: torch.dtype, offset_bytes: int) -> int:
        """Write one chunk of `elements`, of one dimension, at `offset_bytes`.

        Returns:
            The bytes that were written.
        """
        import torch

        converted = torch.frombuffer(self._bytes, dtype=to, count=elements.numel())
        converted.copy_(elements)
        size_bytes = elements.numel() * to.itemsize
        write_at(self._segment_fd, memoryview(self._bytes)[:size_bytes], offset_bytes)
        return size_bytes


def chunks(elements: int, *dtypes: torch.dtype) -> Iterable[tuple[int, int]]:
    """Return where each chunk of so many elements begins, and how many it has."""
    step = CHUNK_BYTES // max(dtype.itemsize for dtype in dtypes)
    for first in range(0, elements, step):
        yield first, min(step, elements - first)


def fill(
    checkpoint: Checkpoint,
    files: Sequence[tuple[int, str]],
    segment_fd: int,
    data_start: int,
    meter: Meter,
) -> None:
    """Do the copies and casts of a checkpoint, both in the order of its files.

    Raises:
        SourceChanged: a file ended early.
        SourceUnsupported: the installed torch does not know how to convert a dtype.
        SourceError: a file could not be read.
    """
    pump, caster = Pump(files, segment_fd), _Caster(files, segment_fd)
    stretches: list[Copy | Cast] = [*checkpoint.copies, *checkpoint.casts]
    stretches.sort(key=lambda stretch: (stretch.file, stretch.source_offset_bytes))
    for _, run in itertools.groupby(stretches, lambda stretch: isinstance(stretch, Cast)):
        some = list(run)
        pump.copy([copy for copy in some if isinstance(copy, Copy)], data_start, meter)
        for cast in some:
            if isinstance(cast, Cast):
                caster.cast(cast, data_start, meter)


class _Caster:
    def __init__(self, files: Sequence[tuple[int, str]], segment_fd: int) -> None:
        self._files = files
        self._converter = Converter(segment_fd)
        self._bytes = bytearray(CHUNK_BYTES)

    def cast(self, cast: Cast, data_start: int, meter: Meter) -> None:
        import torch

        fd, name = self._files[cast.file]
        dtype, to = dtype_of(cast.dtype, name), dtype_of(cast.to, name)
        item_bytes = ITEM_BYTES[cast.dtype]
        target = data_start + cast.data_offset_bytes
        for first, count in chunks(cast.elements, dtype, to):
            self._read(fd, name, cast.source_offset_bytes + first * item_bytes, count * item_bytes)
            elements = torch.frombuffer(self._bytes, dtype=dtype, count=count)
            try:
                written = self._converter.write(elements, to, target)
            except (NotImplementedError, RuntimeError) as error:
                raise cannot_cast(name, cast.dtype, cast.to) from error
            target += written
            meter.add(written)

    def _read(self, fd: int, name: str, offset: int, size_bytes: int) -> None:
        view = memoryview(self._bytes)[:size_bytes]
        done = 0
        while done < size_bytes:
            got = read_into(fd, view[done:], offset + done, name)
            if got == 0:
                raise SourceChanged(
                    f"{name}: ended at byte {offset + done} while it was read", source=name
                )
            done += got


def dtype_of(name: str, source: str) -> torch.dtype:
    """Return torch's dtype of our name.

    Raises:
        SourceUnsupported: the installed torch has none.
    """
    from gpu_worker.dtypes import torch_dtype

    try:
        return torch_dtype(name)
    except PlatformUnsupported as error:
        raise SourceUnsupported(
            f"{source}: {error.message}", source=source, remedy=error.remedy
        ) from error


def cannot_cast(source: str, dtype: str, to: str) -> SourceUnsupported:
    """Return the refusal of a conversion that the installed torch does not have."""
    return SourceUnsupported(
        f"{source}: the installed torch cannot convert {dtype} to {to}",
        source=source,
        remedy="ask for another dtype, or install a newer torch",
    )
