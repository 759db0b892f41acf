"""The loader: a short-lived process that fills one segment from one checkpoint file.

    python -m coordinator.loader FD

FD is one end of a SEQPACKET pair whose other end the coordinator keeps. The first frame is
FETCH and the opened file. Then: RESERVE, SPACE and the segment's fd, PROGRESS as it fills, COMMIT.
A source that cannot be used ends in ABORT with its cause, and exit code 0: the loader did its work.

Rules. It ends with its coordinator: by the kernel's signal, by end of file, by a failed send. It
volunteers for the out-of-memory killer. Its map of the segment is gone, and the segment closed,
before COMMIT. It starts fast, so it imports little, and torch only for what needs it: casts, which
wait until the coordinator makes room, and what torch.save wrote. Files are judged by content, not
by name. With a URL no file comes along: the loader opens it itself, see `url_checkpoint`, and what
that takes is imported only then.

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

import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from coordinator import digests, private_memory
from coordinator.formats import read_contents
from coordinator.local_file import check_unchanged, opened
from coordinator.pump import Meter
from shm_store.channel import Channel, close_all
from shm_store.errors import (
    ConnectionLost,
    FillFailed,
    PlatformUnsupported,
    ProtocolViolation,
    ResourceError,
    SourceError,
    SourceMalformed,
    SourceUnsupported,
    WeightCacheError,
)
from shm_store.layout import segment_bytes
from shm_store.segment import write_manifest
from shm_store.source import is_url
from shm_store.url import scrubbed, shown_url
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

if TYPE_CHECKING:
    from coordinator.formats import Contents, File

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
    private_memory.bound()
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
        fetch, fds = _receive_fetch(channel)
        try:
            return _serve(channel, fetch, fds)
        finally:
            close_all(fds)
    except ConnectionLost:
        return EXIT_FAILED
    except ProtocolViolation:
        sys.excepthook(*sys.exc_info())
        return EXIT_FAILED


def _serve(channel: Channel, fetch: Fetch, fds: Sequence[int]) -> int:
    try:
        load(channel, fetch, fds)
    except ConnectionLost:
        raise
    except (SourceError, ResourceError) as error:
        _send(channel, Abort(fetch.gen, Cause.of(error)))
    except Exception as error:
        sys.excepthook(*sys.exc_info())
        failed = FillFailed(f"{_name(fetch)}: the loader failed: {_described(error)}")
        _send(channel, Abort(fetch.gen, Cause.of(failed)))
        return EXIT_FAILED
    return EXIT_DONE


def _described(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "out of memory"  # which it does not say itself
    text = error.message if isinstance(error, WeightCacheError) else scrubbed(str(error))
    return f"{type(error).__name__}: {text}"


def _name(fetch: Fetch) -> str:
    """Return what errors call the source; a URL may hold secrets."""
    return shown_url(fetch.source) if is_url(fetch.source) else fetch.source


def _opened(fetch: Fetch, fds: Sequence[int]) -> tuple[Sequence[File], Callable[[], None]]:
    """Return the files of a FETCH, and what refuses them if they are others by now."""
    if not is_url(fetch.source):
        return opened(fetch, fds), partial(check_unchanged, fetch, fds)
    from coordinator import url_checkpoint

    files = url_checkpoint.open_url(fetch.source)
    return files, partial(url_checkpoint.check_unchanged, files)


def load(channel: Channel, fetch: Fetch, fds: Sequence[int]) -> None:
    """Reserve, fill and commit the generation of `fetch`.

    Raises:
        SourceError: the source cannot be used, or changed. The segment's fd is closed.
        ConnectionLost: the coordinator is gone.
    """
    source = _name(fetch)

    def report(done_bytes: int, total_bytes: int) -> None:
        _send(channel, Progress(fetch.gen, done_bytes, total_bytes))

    try:
        files, check = _opened(fetch, fds)
        contents = _contents(files, check, fetch, report)
    except MemoryError as error:
        raise SourceUnsupported(
            f"{source}: its header takes more memory than a loader may have, which is "
            f"{private_memory.MEMORY_LIMIT_BYTES // (1024 * 1024)} MiB at most",
            source=source,
            remedy="split the checkpoint, or load it yourself with build=",
        ) from error
    manifest = contents.manifest
    if fetch.reading.digest:
        manifest = _reserve_digests(manifest, source)
    size_bytes = segment_bytes(len(manifest), contents.data_bytes)
    _send(channel, Reserve(fetch.gen, size_bytes))
    with contents.ahead():
        segment_fd = _receive_space(channel)
    try:
        meter = Meter(contents.filled_bytes, report)
        data_start = write_manifest(segment_fd, manifest)
        contents.fill(segment_fd, data_start, meter)
        meter.finish()
        if fetch.reading.digest:
            digests.write(segment_fd, manifest)
    finally:
        os.close(segment_fd)
    check()
    _send(channel, Commit(fetch.gen))


def _contents(
    files: Sequence[File],
    check: Callable[[], None],
    fetch: Fetch,
    report: Callable[[int, int], None],
) -> Contents:
    """Return what is in the files. One that makes no sense may be another by now.

    Raises:
        SourceError: they cannot be used, or have changed.
    """
    try:
        return read_contents(files, fetch.reading, _name(fetch), report)
    except SourceMalformed:
        if not is_url(fetch.source):  # a server may say something else about itself by now
            check()
        raise


def _reserve_digests(manifest: bytes, source: str) -> bytes:
    try:
        return digests.reserve(manifest)
    except PlatformUnsupported as error:
        text = f"{source}: {error.message}"
        raise SourceUnsupported(text, source=source, remedy=error.remedy) from error


# --- messages -----------------------------------------------------------------------------------


def _send(channel: Channel, message: FromLoader) -> None:
    channel.send(encode(message))


def _receive(channel: Channel) -> tuple[ToLoader, list[int]]:
    received = channel.receive()
    if received is None:
        raise ConnectionLost("the coordinator closed the connection")
    data, fds = received
    return decode(to_loader_decoder, data), fds


def _receive_fetch(channel: Channel) -> tuple[Fetch, list[int]]:
    message, fds = _receive(channel)
    if not isinstance(message, Fetch):
        raise ProtocolViolation(f"a loader's first message is Fetch, not {type(message).__name__}")
    expected = len(message.files) or int(not is_url(message.source))
    if len(fds) != expected:
        raise ProtocolViolation(f"{len(fds)} fds came with a Fetch of {expected} files")
    return message, fds


def _receive_space(channel: Channel) -> int:
    message, fds = _receive(channel)
    if not isinstance(message, Space):
        close_all(fds)
        raise ProtocolViolation(f"a loader waits for Space, not {type(message).__name__}")
    if len(fds) != 1:
        close_all(fds)
        raise ProtocolViolation(f"a Space carries one fd, not {len(fds)}")
    return fds[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv))
