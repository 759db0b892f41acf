"""What kind of file torch.save wrote, judged by its content and without torch.

Since 1.6 that is a zip archive in which each storage is a record, uncompressed; before, it was one
pickle after another and then the storages. What is wrong with an archive as such is said here, as
it takes a second less than torch does to be imported.
"""

from __future__ import annotations

import zipfile

from coordinator.checkpoint import shown
from coordinator.local_file import LocalFile
from shm_store.errors import SourceMalformed, SourceNotOpened, SourceUnsupported

_ZIP = b"PK\x03\x04"

_LEGACY = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The pickle of torch's magic number, behind two bytes for the protocol."""

HEAD_BYTES = 64

_PICKLE = "data.pkl"
_SCRIPT = "constants.pkl"

_ENCRYPTED = 1
"""A bit among a record's flags."""


def is_archive(head: bytes) -> bool:
    """Say whether a file begins as what torch.save writes; `head` are its first bytes."""
    # "PK" may also be the length of a safetensors header, which then begins here.
    return head.startswith(_ZIP) and head[8:9] != b"{"


def is_legacy(head: bytes) -> bool:
    """Say whether a file begins as what torch.save wrote before 1.6."""
    return head[:1] == b"\x80" and head[2:].startswith(_LEGACY)


def is_torch_file(file: LocalFile) -> bool:
    """Say whether torch.save wrote this, or it is another zip archive, by how it begins.

    Raises:
        SourceError: it cannot be read.
    """
    head = _head(file)
    return is_archive(head) or is_legacy(head)


def is_legacy_file(file: LocalFile) -> bool:
    """Say whether torch.save wrote this before 1.6.

    Raises:
        SourceError: it cannot be read.
    """
    return is_legacy(_head(file))


def _head(file: LocalFile) -> bytes:
    return file.read(min(HEAD_BYTES, file.size_bytes), 0)


def path_of(file: LocalFile) -> str:
    """Return a path that opens the file anew, wherever it was opened and whatever it is called."""
    return f"/proc/self/fd/{file.fd}"


def check_archive(file: LocalFile) -> None:
    """Refuse a zip archive that is not a whole one of torch.save.

    Raises:
        SourceMalformed: it is damaged.
        SourceUnsupported: something else wrote it.
        SourceNotOpened: it cannot be opened anew.
    """
    records = _records(file)
    roots = [name[: -len(_PICKLE)] for name in records if _is_at_root(name, _PICKLE)]
    if len(roots) != 1:
        raise SourceUnsupported(
            f"{file.name}: a zip archive that torch.save did not write", source=file.name
        )
    if roots[0] + _SCRIPT in records:
        raise SourceUnsupported(
            f"{file.name}: a TorchScript archive, which has code in it",
            source=file.name,
            remedy="save the state_dict() of what torch.jit.load makes of it",
        )
    for record in records.values():
        if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & _ENCRYPTED:
            raise SourceUnsupported(
                f"{file.name}: its record {shown(record.filename)} is compressed or encrypted",
                source=file.name,
                remedy="unpack it and save what it has with torch.save",
            )
        if record.header_offset + record.file_size > file.size_bytes:
            raise _damaged(file, f"its record {shown(record.filename)} does not fit it")


def _records(file: LocalFile) -> dict[str, zipfile.ZipInfo]:
    try:
        with open(path_of(file), "rb") as opened, zipfile.ZipFile(opened) as archive:
            return {record.filename: record for record in archive.infolist()}
    except OSError as error:
        if error.errno is None:  # zipfile's own
            raise _damaged(file, str(error)) from error
        raise not_opened(file, error) from error
    except MemoryError:
        raise
    except Exception as error:  # an archive that lies finds every gap of zipfile's checks
        raise _damaged(file, str(error)) from error


def not_opened(file: LocalFile, error: OSError) -> SourceNotOpened:
    """Return the refusal of a file that its asker may open, and we may not, or that fails."""
    return SourceNotOpened(
        f"{file.name}: the loader cannot open it anew: {error.strerror}",
        source=file.name,
        remedy="let the coordinator's user read it, and check its disk or file server",
    )


def _is_at_root(name: str, file: str) -> bool:
    folder, _, last = name.rpartition("/")
    return last == file and "/" not in folder


def _damaged(file: LocalFile, text: str) -> SourceMalformed:
    return SourceMalformed(
        f"{file.name}: a zip archive, as torch.save writes it, but damaged: {text[:200]}",
        source=file.name,
    )
