"""What torch.save wrote, as what fills a segment. Runs in the loader alone.

Rules:

- No code of a file is run: `weights_only` always, and what needs more is refused by name.
- From there it is a state dict, and `gpu_worker.publish` makes of it what it makes of any other, so
  that ties, views and strides come out as they went in. Here alone the two packages meet.
- An archive is mapped, not read: its bytes go from the page cache to the segment. What cannot be
  mapped (torch's format before 1.6), or must not be (on a network), is read into memory whole.

    Note on files that are cut
    fact: reading a mapped page that the file has no more ends the process with SIGBUS; a `pwrite`
    from there fails with EFAULT
    consequence: of what is copied we can say why; while bytes are cast the loader dies
    choice: the next loader is started in any case, and finds another file than was asked for
    cost: a second start
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from coordinator import backing, private_memory
from coordinator.casting import import_torch
from coordinator.checkpoint import check_found, select, shown
from coordinator.local_file import LocalFile
from coordinator.mounts import is_remote
from coordinator.pump import Meter
from coordinator.state_dicts import weights_in
from coordinator.tensor_casts import CastPart, place_casts
from coordinator.torch_file import check_archive, is_legacy_file, is_torch_file, not_opened, path_of
from shm_store.errors import (
    CallerError,
    SourceChanged,
    SourceError,
    SourceMalformed,
    SourceUnsupported,
)
from shm_store.reading import Reading

if TYPE_CHECKING:
    from gpu_worker import publish


class Part(Protocol):
    """What fills one alias group."""

    @property
    def size_bytes(self) -> int: ...

    def write(self, fd: int, offset_bytes: int, written: Callable[[int], object]) -> None:
        """Write its bytes into the segment, and tell `written` of each step."""


class PickleContents:
    """Tensors that torch has loaded, or mapped."""

    def __init__(
        self, plan: publish.Plan, casts: Mapping[int, CastPart], files: Sequence[LocalFile]
    ) -> None:
        from gpu_worker.publish import Span

        self._files = files
        self.manifest = plan.manifest
        self._parts: list[tuple[int, Part]] = []
        for offset_bytes, group in plan.groups:
            # Of what is cast the plan has the place, and we the bytes.
            address = group.storage.data_ptr() if isinstance(group, Span) else 0
            self._parts.append((offset_bytes, casts.get(address, group)))
        plan.groups.clear()
        sizes = [(offset, part.size_bytes) for offset, part in self._parts if part.size_bytes]
        self.data_bytes = max((offset + size for offset, size in sizes), default=0)
        self.filled_bytes = sum(size for _, size in sizes)

    def ahead(self) -> contextlib.AbstractContextManager[None]:
        """Nothing is left to do."""
        return contextlib.nullcontext()

    def fill(self, segment_fd: int, data_start: int, meter: Meter) -> None:
        """Write each group from where torch has it, and let go of it."""
        self._parts.reverse()
        while self._parts:
            offset_bytes, part = self._parts.pop()
            if part.size_bytes:
                try:
                    part.write(segment_fd, data_start + offset_bytes, meter.add)
                except OSError as error:
                    raise self._described(error) from error

    def _described(self, error: OSError) -> Exception:
        if error.errno != errno.EFAULT:
            return error
        for file in self._files:
            if os.fstat(file.fd).st_size < file.size_bytes:
                return SourceChanged(f"{file.name}: was cut while it was read", source=file.name)
        name = self._files[0].name
        return SourceError(
            f"{name}: reading it failed",
            source=name,
            remedy="check the disk or the file server that holds it",
        )


def read_pickles(
    files: Sequence[LocalFile], file_of: Mapping[str, str] | None, reading: Reading, source: str
) -> PickleContents:
    """Return what files of torch.save hold: a lone one, or the shards of an index.

    Args:
        file_of: the shard of each tensor, as an index has it; None for a lone file. The files are
            those shards in the order of their names.
        source: the name of the checkpoint, for errors.

    Raises:
        SourceError: a file cannot be read, is not what it should be, or has code in it.
    """
    if file_of is None:
        weights = weights_in(_load(files[0]), _is_tensor, reading, source)
    else:
        weights = _sharded(files, file_of, source)
    wanted, names = select(list(weights.items()), list(weights), reading, source)
    state, casts = place_casts(dict(wanted), reading.casts(), source)
    from gpu_worker import publish

    try:
        plan = publish.plan(dict(zip(names, state.values(), strict=True)))
    except CallerError as error:
        raise SourceUnsupported(
            f"{source}: {error.message}",
            source=source,
            remedy=f"{error.remedy}; or leave it out with name_filter= (--only)",
        ) from error
    return PickleContents(plan, casts, files)


def _is_tensor(value: object) -> bool:
    return isinstance(value, import_torch().Tensor)


def _sharded(files: Sequence[LocalFile], file_of: Mapping[str, str], source: str) -> dict[str, Any]:
    """Return what an index names, in its order, each from the shard in which it says that it is."""
    found: dict[str, Any] = {}
    for shard, file in zip(sorted(set(file_of.values())), files, strict=True):
        if not is_torch_file(file):
            raise SourceMalformed(
                f"{file.name}: torch.save did not write it, as it did other shards",
                source=file.name,
            )
        loaded = _load(file)
        if not isinstance(loaded, Mapping):
            raise SourceUnsupported(
                f"{file.name}: has a {type(loaded).__name__} in it, no state dict",
                source=file.name,
            )
        found |= {
            name: value
            for name, value in loaded.items()
            if isinstance(name, str) and file_of.get(name) == shard
        }
    check_found(found, file_of, source)
    return {name: found[name] for name in file_of}


# --- one file -----------------------------------------------------------------------------------


def _load(file: LocalFile) -> object:
    """Return what torch makes of a file. No code in it is run.

    Raises:
        SourceError: it does not make anything of it.
    """
    legacy = is_legacy_file(file)
    if not legacy:
        check_archive(file)
    mapped = not legacy and not is_remote(file.fd)
    if not mapped:
        _check_room(file, legacy)
    torch = import_torch()
    private_memory.allow(file.size_bytes)
    try:
        return torch.load(path_of(file), map_location="cpu", mmap=mapped, weights_only=True)
    except pickle.UnpicklingError as error:
        raise _refused(file, str(error)) from error
    except OSError as error:
        raise not_opened(file, error) from error
    except Exception as error:  # whatever it is, these bytes have led there
        text = (str(error).strip().splitlines() or [""])[0].replace(path_of(file), file.name)
        if isinstance(error, MemoryError) or any(said in text for said in _NO_MEMORY):
            raise SourceUnsupported(
                f"{file.name}: reading it takes more memory than a loader may have",
                source=file.name,
                remedy="look at what is in it beside its weights, or load it yourself with build=",
            ) from error
        raise SourceMalformed(
            f"{file.name}: torch cannot read it: {type(error).__name__}: {text[:300]}",
            source=file.name,
        ) from error


_NO_MEMORY = ("allocate memory", "unable to mmap", "bad_alloc", "bad allocation")


def _check_room(file: LocalFile, legacy: bool) -> None:
    """Refuse what would have to be read into memory that is not there.

    Raises:
        SourceUnsupported: so it is.
    """
    known = (backing.cgroup_headroom_bytes(), backing.host_headroom_bytes())
    headroom = min((left for left in known if left is not None), default=None)
    if headroom is None or file.size_bytes + backing.SPARE_BYTES <= headroom:
        return
    mib = 1024 * 1024
    why = "torch wrote it before 1.6" if legacy else "it is on a network"
    raise SourceUnsupported(
        f"{file.name}: cannot be mapped, as {why}, so it is read into memory whole: "
        f"{file.size_bytes // mib} MiB, of which {headroom // mib} MiB are left",
        source=file.name,
        remedy="copy it to a disk of this host, and save it again with torch.save",
    )


_GLOBAL = re.compile(r"GLOBAL (\S+)")

_NO_WEIGHTS = ("must be imported", "allowlisted", "add_safe_globals")
"""In what torch says of a pickle that is whole."""


def _refused(file: LocalFile, text: str) -> SourceError:
    """Return the refusal of a pickle that is more than weights, or none at all."""
    found = _GLOBAL.search(text)
    if found is not None:
        name = shown(found.group(1).rstrip(".,"))
        return SourceUnsupported(
            f"{file.name}: needs {name}, which is code and no weights; code of a checkpoint is "
            "never run",
            source=file.name,
            remedy="save its state_dict() alone, or load it yourself with build=",
        )
    lines = [line for line in text.splitlines() if "WeightsUnpickler error" in line]
    told = (lines or text.splitlines() or [""])[-1].rpartition("WeightsUnpickler error:")[2].strip()
    told = told or "it is damaged, or made to be refused"
    said = f"{file.name}: torch cannot read it: {told[:300]}"
    if any(words in said for words in _NO_WEIGHTS):
        return SourceUnsupported(said, source=file.name)
    return SourceMalformed(said, source=file.name)
