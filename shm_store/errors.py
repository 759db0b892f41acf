"""Every error of the project, branched by whose fault it is. Pure.

Each class has a `code` (how it travels on the wire) and an `exit_code` (how the command line ends);
each instance carries a `remedy` and its facts as attributes.

| branch            | whose fault                            | exit code |
| ----------------- | -------------------------------------- | --------- |
| `CallerError`     | the caller's arguments or order        | 2         |
| `SourceError`     | the checkpoint file                    | 3         |
| `ResourceError`   | no room, no memory, no fds             | 4         |
| `PeerError`       | the process at the other end           | 5         |
| `CoordinatorLost` | nobody answers                         | 6         |
| `PlatformUnsupported` | this system                        | 7         |
"""

from collections.abc import Sequence
from typing import ClassVar

from shm_store.report import GenerationReport, size_text


class WeightCacheError(Exception):
    """The root. `remedy` says what to do next; `str()` gives the message, then the remedy."""

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1
    default_remedy: ClassVar[str] = ""

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = self.default_remedy if remedy is None else remedy

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (rebuild, (self.code, self.message, self.__dict__))


def listed(names: Sequence[str], limit: int = 20, separator: str = ", ") -> str:
    """Return the first `limit` of `names`, and how many more there are, on one line."""
    more = len(names) - limit
    return separator.join([*names[:limit], *([f"and {more} more"] if more > 0 else [])])


HOLDERS_NAMED = 3
"""How many of those who fill a pool one line names."""


def holders_text(holders: Sequence[GenerationReport], here: int | None = None) -> str:
    """Return the largest of `holders` and whose they are, on one line; "" if there are none.

    Args:
        here: the pid of who reads it.
    """
    charged = sorted(holders, key=lambda holder: -holder.size_bytes)
    return listed([_holder_text(holder, here) for holder in charged], HOLDERS_NAMED)


def _holder_text(holder: GenerationReport, here: int | None) -> str:
    def who(pid: int) -> str:
        return "this process" if pid == here else f"pid {pid}"

    facts = [size_text(holder.size_bytes)]
    facts += ["private"] if holder.private else []
    facts += ["pinned"] if holder.pinned else []
    facts += dict.fromkeys(who(lease.pid) for lease in holder.leases)
    facts += [f"built by {who(holder.filled_by)}"] if holder.filled_by else []
    return f"{holder.key!r} ({', '.join(facts)})"


def rebuild(code: str, message: str, facts: dict[str, object]) -> WeightCacheError:
    """Return the error that another process described, with `facts` as its attributes.

    Serves the wire, and pickle between a user's own processes. An unknown code, from a newer peer,
    becomes the root class.
    """
    kind = BY_CODE.get(code, WeightCacheError)
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.message = message
    error.remedy = kind.default_remedy
    for name, value in facts.items():
        setattr(error, name, value)
    return error


# --- the caller ---------------------------------------------------------------------------------


class CallerError(WeightCacheError):
    """The caller's arguments, or the order of its calls."""

    code = "caller"
    exit_code = 2


class KeyRefused(CallerError):
    """The key is not a name that can be used."""

    code = "key_refused"
    default_remedy = "use 1 to 512 bytes of printable text without white space at its ends"


class ArgumentRefused(CallerError):
    """An argument is missing, contradicts another, or is out of range."""

    code = "argument_refused"


class TensorRefused(CallerError):
    """A tensor cannot be held in a segment. `name` and `kind` say which and why."""

    code = "tensor_refused"

    def __init__(self, name: str, kind: str, *, remedy: str | None = None) -> None:
        super().__init__(f"tensor {name!r} cannot be shared: {kind}", remedy=remedy)
        self.name = name
        self.kind = kind


class ClassUnknown(CallerError):
    """Weights hold a value of a class that this process has not imported."""

    code = "class_unknown"


class DeviceUnknown(CallerError):
    """No device has this name, or the system has none of this index."""

    code = "device_unknown"
    default_remedy = 'use "cpu", "cuda", "cuda:N" with an N that is there, or "sim:N"'


class WeightsMissing(CallerError):
    """The skeleton needs weights that are not there: `names`. `unused` are there instead."""

    code = "weights_missing"
    default_remedy = "load a checkpoint of this architecture"

    def __init__(self, key: str, names: tuple[str, ...], unused: tuple[str, ...] = ()) -> None:
        remedy = None
        if unused:
            remedy = (
                "make the module that these weights were saved from; they have e.g. "
                f"{listed(unused, 5)}, which this one does not use; or, if build= makes others by "
                "now, pass another version=, or invalidate them"
            )
        super().__init__(
            f"weights {key!r} lack {len(names)} tensor(s) of the skeleton: {listed(names)}",
            remedy=remedy,
        )
        self.key = key
        self.names = names
        self.unused = unused


class WorkerClosed(CallerError):
    """The worker, or the handle, was shut down before this call."""

    code = "worker_closed"
    default_remedy = "attach again"


class ReentryRefused(CallerError):
    """The same thread builds or moves a module already, or waits to: it would wait for itself."""

    code = "reentry_refused"
    default_remedy = (
        "call before `with gpu_worker.constructing():` or a skeleton, or after it; in a finalizer "
        "or a signal handler, set a flag, and call from the program's normal flow"
    )


class ForkedProcess(CallerError):
    """A call that was under way when its process was forked goes on in the child, or so it seems.

    It is the parent's. So is everything in a copy that was made without Python's at-fork hooks.
    """

    code = "forked_process"
    default_remedy = "call again in the child"


class Cancelled(CallerError):
    """The request was given up by its own caller."""

    code = "cancelled"


class InUse(CallerError):
    """The weights are leased or pinned, so they cannot be evicted. `holders` says by whom."""

    code = "in_use"

    def __init__(
        self,
        message: str,
        *,
        holders: tuple[GenerationReport, ...] = (),
        remedy: str | None = None,
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.holders = holders


# --- the source ---------------------------------------------------------------------------------


class SourceError(WeightCacheError):
    """The checkpoint cannot be used as it is. `source` is its path, or its URL without secrets."""

    code = "source"
    exit_code = 3

    def __init__(self, message: str, *, source: str = "", remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.source = source


class SourceNotOpened(SourceError):
    """No such file, no permission, or not a regular file."""

    code = "source_not_opened"
    default_remedy = "check the path and its permissions in the process that asks"


class SourceUnreachable(SourceError):
    """The server that has it cannot be reached, does not answer, or has broken off for good."""

    code = "source_unreachable"
    default_remedy = "check the network and the server, then load it again"


class SourceMalformed(SourceError):
    """The file is not what its format says: truncated, empty, or its header lies."""

    code = "source_malformed"
    default_remedy = "save or download the checkpoint again"


class SourceUnsupported(SourceError):
    """A kind of checkpoint, or of tensor, that this version does not read."""

    code = "source_unsupported"
    default_remedy = "convert it to .safetensors, or load it yourself with build="


class SourceChanged(SourceError):
    """The file changed while it was read."""

    code = "source_changed"
    default_remedy = "write checkpoints beside the old one and rename them into place"


# --- resources ----------------------------------------------------------------------------------


class ResourceError(WeightCacheError):
    """No room, no memory, no file descriptors, or no time."""

    code = "resource"
    exit_code = 4


class BudgetExceeded(ResourceError):
    """The pool has no room for the weights. `holders` are the generations that fill it.

    `possible_bytes` is the most that its asker could ever have there, as things are.
    """

    code = "budget_exceeded"
    default_remedy = (
        "let go of modules and tensors, evict some (`weight-cache status`), "
        "or raise the limit: `weight-cache limit ram SIZE`"
    )

    def __init__(
        self,
        message: str,
        *,
        needed_bytes: int = 0,
        free_bytes: int = 0,
        possible_bytes: int = 0,
        holders: tuple[GenerationReport, ...] = (),
        remedy: str | None = None,
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.possible_bytes = possible_bytes
        self.holders = holders


class BackingFailed(ResourceError):
    """The kernel gave no memory for the segment although the budget allowed it."""

    code = "backing_failed"
    default_remedy = "lower --ram-budget, or raise the memory limit of the coordinator's cgroup"


class LoadTimeout(ResourceError):
    """The weights were not ready by the caller's deadline."""

    code = "load_timeout"
    default_remedy = "see `weight-cache status` for what it waits for, or pass a longer timeout="


class FillFailed(ResourceError):
    """The process that filled the segment ended before it was done."""

    code = "fill_failed"
    default_remedy = "load again; if it comes back, see the coordinator's log"


class DiskFull(ResourceError):
    """A folder has no room for what has to be downloaded into it first. `folder` is its path."""

    code = "disk_full"
    default_remedy = "make room there, or start the coordinator with TMPDIR set to another folder"

    def __init__(self, message: str, *, folder: str = "", remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.folder = folder


class Incomplete(ResourceError):
    """Not done for everyone at its deadline. `holders` says what is left, and by whom."""

    code = "incomplete"

    def __init__(
        self,
        message: str,
        *,
        holders: tuple[GenerationReport, ...] = (),
        remedy: str | None = None,
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.holders = holders


class DrainIncomplete(Incomplete):
    """Something is still held at the drain's deadline."""

    code = "drain_incomplete"
    default_remedy = "end the processes it names, then drain again"


class InvalidateIncomplete(Incomplete):
    """A key is retired, but some process has not said that it knows."""

    code = "invalidate_incomplete"
    default_remedy = "see `weight-cache status`; a process that is stopped answers when it goes on"


class DeviceUnavailable(ResourceError):
    """The device cannot be used: no driver, it is gone, it failed, or not in this process."""

    code = "device_unavailable"
    default_remedy = (
        'see what its driver says (`nvidia-smi`, `dmesg`) and start the process again, or use "cpu"'
    )


class DeviceOutOfMemory(ResourceError):
    """The device has no block of `needed_bytes`. It says that `free_bytes` are free.

    The budget allowed it: others have taken memory of the device, or what is free is in pieces.
    """

    code = "device_out_of_memory"
    default_remedy = (
        "let go of tensors on the device, keep more of it free for them with working_memory=, or "
        "lower vram_budget="
    )

    def __init__(
        self,
        message: str,
        *,
        needed_bytes: int = 0,
        free_bytes: int = 0,
        remedy: str | None = None,
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class FdsExhausted(ResourceError):
    """A file descriptor was lost, or could not be made, because this process has too many."""

    code = "fds_exhausted"
    default_remedy = "raise `ulimit -n`"


# --- the peer -----------------------------------------------------------------------------------


class PeerError(WeightCacheError):
    """The process at the other end of the socket."""

    code = "peer"
    exit_code = 5


class ProtocolViolation(PeerError):
    """A frame that no correct peer sends. The connection that carried it is closed."""

    code = "protocol_violation"
    default_remedy = "both ends must run weight-cache; check what else uses this socket"


class VersionMismatch(PeerError):
    """Worker and coordinator speak different versions of the protocol."""

    code = "version_mismatch"
    default_remedy = "install the same version of shm-weight-cache on both ends"


class PeerForbidden(PeerError):
    """The peer's user may not use this coordinator."""

    code = "peer_forbidden"
    default_remedy = "run as the coordinator's user, or as root"


class SegmentRefused(PeerError):
    """A segment is not what it says: wrong preamble, wrong size, not sealed, or still written."""

    code = "segment_refused"
    default_remedy = "load again; if it comes back, report the process that published it"


# --- nobody answers -----------------------------------------------------------------------------


class CoordinatorLost(WeightCacheError):
    """No coordinator answers."""

    code = "coordinator_lost"
    exit_code = 6
    default_remedy = (
        "start one with `weight-cache serve` or attach(autostart=True), or set WEIGHT_CACHE_SOCKET "
        "to the socket of one"
    )


class NoCoordinator(CoordinatorLost):
    """Nothing listens on the socket."""

    code = "no_coordinator"


class StartFailed(CoordinatorLost):
    """There was none, and none could be started. `log` is the file that says more."""

    code = "start_failed"
    default_remedy = ""

    def __init__(self, message: str, *, log: str = "", remedy: str | None = None) -> None:
        super().__init__(message, remedy=f"see {log}" if log and remedy is None else remedy)
        self.log = log


class ConnectionLost(CoordinatorLost):
    """The coordinator went away. What this process has mapped stays valid."""

    code = "connection_lost"
    default_remedy = "try again once a coordinator runs; mapped weights stay valid"


class Draining(CoordinatorLost):
    """The coordinator is about to leave and takes no new work."""

    code = "draining"
    default_remedy = "wait for it to end, then start it again"


class CoordinatorRunning(CoordinatorLost):
    """A coordinator already serves this socket."""

    code = "coordinator_running"
    default_remedy = "use it, drain it first, or choose another --socket"


# --- the platform -------------------------------------------------------------------------------


class PlatformUnsupported(WeightCacheError):
    """This system lacks something the project is built on."""

    code = "platform_unsupported"
    exit_code = 7
    default_remedy = "weight-cache needs Linux 5.3 or newer (memfd seals, pidfd)"


def _branch(root: type[WeightCacheError]) -> dict[str, type[WeightCacheError]]:
    found = {root.code: root}
    for kind in root.__subclasses__():
        found.update(_branch(kind))
    return found


BY_CODE: dict[str, type[WeightCacheError]] = _branch(WeightCacheError)
"""Every class by its `code`, for what arrives over the wire."""
