"""The loader: a short-lived process that fills one segment from one checkpoint file.

    python -m coordinator.loader FD

FD is one end of a SEQPACKET pair whose other end the coordinator keeps. The first frame is
FETCH and the opened file. Then: RESERVE, SPACE and the segment's fd, PROGRESS as it fills, COMMIT.
A source that cannot be used ends in ABORT with its cause, and exit code 0: the loader did its work.

Rules. It ends with its coordinator: by the kernel's signal, by end of file, by a failed send. It
volunteers for the out-of-memory killer. It never maps the segment and closes it before COMMIT. It
starts fast, so it imports little, and never torch. Files are judged by content, not by name.

    Note on the parent's death signal
    fact: PR_SET_PDEATHSIG fires when the *thread* that started this process ends, not its process
    consequence: a loader that a pool thread started dies when that thread is let go
    choice: the coordinator starts loaders from its main thread
    cost: none; starting takes it about a millisecond

    Note on what a change is
    fact: renaming another file over the source changes its ctime, and its link count, not its bytes
    consequence: ctime would refuse the very way in which checkpoints ought to be replaced
    choice: the fingerprint (inode, size, mtime), as it was asked for, before and after
    cost: a writer that restores the mtime is not seen

    Note on what a header costs
    fact: parsed, a header takes 11 times its length in memory; one made for it, of nested empty
    objects, 28 times: 2.8 GB at the format's limit of 100 MB
    consequence: one small file could take the memory that the weights were admitted to
    choice: a limit on this process's private memory; nothing but the header needs much of it
    cost: headers above some 45 MB, of 400,000 tensors, are refused
"""

from __future__ import annotations

import gc
import sys

if __name__ == "__main__":
    # Before the imports: looking for cycles is a tenth of them, and the process is short-lived.
    gc.disable()
    # A third of them is typing_extensions and what it imports; msgspec does without where it is
    # not installed. Whoever imports it later finds it.
    sys.modules["typing_extensions"] = None  # type: ignore[assignment]
    import msgspec  # noqa: F401

    del sys.modules["typing_extensions"]

import fcntl
import os
import resource
import signal
import socket

from coordinator.checkpoint import HEAD_BYTES, LENGTH_BYTES, Checkpoint, header_bytes, parse
from coordinator.pump import Meter, Pump, ReadAhead, read_into
from shm_store.channel import Channel, close_all
from shm_store.errors import (
    ConnectionLost,
    FillFailed,
    ProtocolViolation,
    SourceChanged,
    SourceError,
    SourceMalformed,
    SourceNotOpened,
    SourceUnsupported,
    WeightCacheError,
)
from shm_store.layout import segment_bytes
from shm_store.manifest import encode_manifest
from shm_store.segment import write_manifest
from shm_store.source import check_regular, fingerprint
from shm_store.wire import (
    Abort,
    Cause,
    Commit,
    Fetch,
    FromLoader,
    Progress,
    Reserve,
    Space,
    ToLoader,
    decode,
    encode,
    to_loader_decoder,
)

MEMORY_LIMIT_BYTES = 512 * 1024 * 1024
"""Of this process, without the segment; see the note on what a header costs."""

EXIT_DONE = 0
"""COMMIT, or ABORT with the source's fault, was sent."""
EXIT_FAILED = 1
"""The coordinator is gone; or the loader itself failed: ABORT was sent and stderr says why."""

_PR_SET_PDEATHSIG = 1


def command(fd: int) -> list[str]:
    """Return the command line of a loader that talks over the inherited `fd`."""
    from coordinator.process_host import module_command  # the loader itself has no use for it

    return [*module_command("coordinator.loader"), str(fd)]


def main(arguments: list[str]) -> int:
    """Run as the loader; return the exit code."""
    # Ctrl-C reaches the whole foreground group; the coordinator decides what its loaders do then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connected = socket.socket(fileno=int(arguments[1]))
    connected.setblocking(True)
    channel = Channel(connected)
    _volunteer()
    _bound_memory()
    if not _end_with_parent(channel.credentials().pid):
        return EXIT_FAILED
    return run(channel)


def _volunteer() -> None:
    """Be the first whom the out-of-memory killer takes."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
            score.write("1000")
    except OSError:
        pass  # No /proc here. The file can be loaded all the same.


def _bound_memory() -> None:
    """Have what would take more private memory than the limit fail with MemoryError."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = MEMORY_LIMIT_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_LIMIT_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _end_with_parent(parent_pid: int) -> bool:
    """Ask for SIGKILL at the parent's end; say whether the parent is still there.

    Args:
        parent_pid: who made the socket pair; 0 if it cannot be named in this pid namespace.
    """
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # A parent that ended before the line above sends nothing any more.
    return parent_pid in (0, os.getppid())


def run(channel: Channel) -> int:
    """Serve one FETCH; return the exit code."""
    try:
        fetch, source_fd = _receive_fetch(channel)
        try:
            return _serve(channel, fetch, source_fd)
        finally:
            os.close(source_fd)
    except ConnectionLost:
        return EXIT_FAILED
    except ProtocolViolation:
        sys.excepthook(*sys.exc_info())
        return EXIT_FAILED


def _serve(channel: Channel, fetch: Fetch, source_fd: int) -> int:
    try:
        load(channel, fetch, source_fd)
    except ConnectionLost:
        raise
    except SourceError as error:
        _send(channel, Abort(fetch.gen, Cause.of(error)))
    except Exception as error:
        sys.excepthook(*sys.exc_info())
        failed = FillFailed(f"{fetch.source}: the loader failed: {_described(error)}")
        _send(channel, Abort(fetch.gen, Cause.of(failed)))
        return EXIT_FAILED
    return EXIT_DONE


def _described(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "out of memory"  # which it does not say itself
    text = error.message if isinstance(error, WeightCacheError) else str(error)
    return f"{type(error).__name__}: {text}"


def load(channel: Channel, fetch: Fetch, source_fd: int) -> None:
    """Reserve, fill and commit the generation of `fetch`.

    Raises:
        SourceError: the file cannot be used, or changed. The segment's fd is closed.
        ConnectionLost: the coordinator is gone.
    """
    size_bytes = check_unchanged(source_fd, fetch)
    _check_readable(source_fd, fetch.source)
    os.set_blocking(source_fd, True)
    try:
        checkpoint = read_checkpoint(source_fd, size_bytes, fetch.source)
        manifest = encode_manifest(checkpoint.manifest)
    except MemoryError as error:
        raise SourceUnsupported(
            f"{fetch.source}: its header takes more memory than a loader may have, which is "
            f"{MEMORY_LIMIT_BYTES // (1024 * 1024)} MiB at most",
            source=fetch.source,
            remedy="split the checkpoint, or load it yourself with build=",
        ) from error
    _send(channel, Reserve(fetch.gen, segment_bytes(len(manifest), checkpoint.data_bytes)))
    with ReadAhead([(source_fd, fetch.source)], checkpoint.copies):
        segment_fd = _receive_space(channel)
    try:
        meter = Meter(
            checkpoint.copied_bytes(),
            lambda done, total: _send(channel, Progress(fetch.gen, done, total)),
        )
        data_start = write_manifest(segment_fd, manifest)
        Pump([(source_fd, fetch.source)], segment_fd).copy(checkpoint.copies, data_start, meter)
    finally:
        os.close(segment_fd)
    check_unchanged(source_fd, fetch)
    _send(channel, Commit(fetch.gen))


# --- messages -----------------------------------------------------------------------------------


def _send(channel: Channel, message: FromLoader) -> None:
    channel.send(encode(message))


def _receive(channel: Channel) -> tuple[ToLoader, int]:
    """Return the next message and its one fd."""
    received = channel.receive()
    if received is None:
        raise ConnectionLost("the coordinator closed the connection")
    data, fds = received
    if len(fds) != 1:
        close_all(fds)
        raise ProtocolViolation(f"a message to a loader carries one fd, not {len(fds)}")
    return decode(to_loader_decoder, data), fds[0]


def _receive_fetch(channel: Channel) -> tuple[Fetch, int]:
    message, fd = _receive(channel)
    if not isinstance(message, Fetch):
        raise ProtocolViolation(f"a loader's first message is Fetch, not {type(message).__name__}")
    return message, fd


def _receive_space(channel: Channel) -> int:
    message, fd = _receive(channel)
    if not isinstance(message, Space):
        os.close(fd)
        raise ProtocolViolation(f"a loader waits for Space, not {type(message).__name__}")
    return fd


# --- the source ---------------------------------------------------------------------------------


def read_checkpoint(source_fd: int, size_bytes: int, name: str) -> Checkpoint:
    """Return what an opened file holds.

    Raises:
        SourceError: it cannot be read, or is not what it should be.
    """
    head = _read(source_fd, min(HEAD_BYTES, size_bytes), 0, name)
    header = _read(source_fd, header_bytes(head, size_bytes, name), LENGTH_BYTES, name)
    return parse(header, size_bytes, name)


def check_unchanged(source_fd: int, fetch: Fetch) -> int:
    """Return the size of a source that is what was asked for.

    Raises:
        SourceChanged: it was written to, or cut, since.
        SourceNotOpened: it is not a regular file.
    """
    status = check_regular(source_fd, fetch.source)
    if fingerprint(status) != fetch.fingerprint:
        raise SourceChanged(
            f"{fetch.source}: it changed between being asked for and being read to the end",
            source=fetch.source,
        )
    return status.st_size


def _check_readable(fd: int, name: str) -> None:
    """Refuse an fd that is of a file, and does not let it be read.

    Raises:
        SourceNotOpened: it was opened for writing only, or as a mere path.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if flags & os.O_PATH or flags & os.O_ACCMODE == os.O_WRONLY:
        raise SourceNotOpened(
            f"{name}: its fd was not opened for reading",
            source=name,
            remedy="open the file with O_RDONLY before you send its fd",
        )


def _read(fd: int, size: int, offset: int, name: str) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    done = 0
    while done < size:
        got = read_into(fd, view[done:], offset + done, name)
        if got == 0:
            raise SourceMalformed(f"{name}: ends at byte {offset + done}", source=name)
        done += got
    return bytes(data)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
