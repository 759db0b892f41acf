"""Model weights that all processes of a host share: attach to a coordinator, then load by key.

    worker = gpu_worker.attach()
    state = worker.state_dict("minilm", source="model.safetensors")
    with worker.use("minilm", skeleton=make_module, source="model.safetensors") as model:
        model(x)

Importing this is cheap and works anywhere; torch is imported when a worker attaches.
"""

from gpu_worker.attach import attach
from gpu_worker.handle import ModelHandle
from gpu_worker.records import EvictCause, Held
from gpu_worker.reservation import Reservation
from gpu_worker.residence import Resident
from gpu_worker.source import Source
from gpu_worker.worker import Worker, check_writes, constructing
from shm_store.errors import (
    ArgumentRefused,
    BackingFailed,
    BudgetExceeded,
    CallerError,
    ClassUnknown,
    ConnectionLost,
    CoordinatorLost,
    DeviceOutOfMemory,
    DeviceUnavailable,
    DeviceUnknown,
    DiskFull,
    Draining,
    FdsExhausted,
    FillFailed,
    ForkedProcess,
    InvalidateIncomplete,
    KeyRefused,
    LoadTimeout,
    NoCoordinator,
    PeerError,
    PeerForbidden,
    PlatformUnsupported,
    ProtocolViolation,
    ReentryRefused,
    ResourceError,
    SegmentRefused,
    SourceChanged,
    SourceError,
    SourceMalformed,
    SourceNotOpened,
    SourceUnreachable,
    SourceUnsupported,
    StartFailed,
    TensorRefused,
    VersionMismatch,
    WeightCacheError,
    WeightsMissing,
    WorkerClosed,
)

__all__ = [
    "ArgumentRefused",
    "BackingFailed",
    "BudgetExceeded",
    "CallerError",
    "ClassUnknown",
    "ConnectionLost",
    "CoordinatorLost",
    "DeviceOutOfMemory",
    "DeviceUnavailable",
    "DeviceUnknown",
    "DiskFull",
    "Draining",
    "EvictCause",
    "FdsExhausted",
    "FillFailed",
    "ForkedProcess",
    "Held",
    "InvalidateIncomplete",
    "KeyRefused",
    "LoadTimeout",
    "ModelHandle",
    "NoCoordinator",
    "PeerError",
    "PeerForbidden",
    "PlatformUnsupported",
    "ProtocolViolation",
    "ReentryRefused",
    "Reservation",
    "Resident",
    "ResourceError",
    "SegmentRefused",
    "Source",
    "SourceChanged",
    "SourceError",
    "SourceMalformed",
    "SourceNotOpened",
    "SourceUnreachable",
    "SourceUnsupported",
    "StartFailed",
    "TensorRefused",
    "VersionMismatch",
    "WeightCacheError",
    "WeightsMissing",
    "Worker",
    "WorkerClosed",
    "attach",
    "check_writes",
    "constructing",
]
