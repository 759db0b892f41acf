"""The places at which chaos ends or stops a process, by name. Pure: a table, and a check of it.

A failpoint is a function of the product, and a moment: as it is called, or as it has returned. The
product knows nothing of it; `hook` puts itself around the function in the processes of a chaos run.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Literal, NamedTuple

Role = Literal["worker", "loader", "coordinator", "supervisor"]
Moment = Literal["before", "after"]
Provocation = Literal["", "kill coordinator", "kill worker", "operate"]


class Failpoint(NamedTuple):
    """One place.

    Attributes:
        name: what happens there, in words.
        target: `module:qualified.name` of the function.
        message: only calls that pass or return a message of this class count, as it is or encoded.
        nth: at most so many calls of a process pass it first; how many, a seed chooses.
        provoked_by: what has to be done for a process to come there, beside the load.
    """

    role: Role
    name: str
    target: str
    moment: Moment
    message: str = ""
    nth: int = 1
    provoked_by: Provocation = ""

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def path(self) -> list[str]:
        return self.target.partition(":")[2].split(".")


_MAPS = "gpu_worker.mapping:MappingTable"
_SIM = "gpu_worker.sim_device:Sim"
_PLACEMENT = "gpu_worker.placement:Placement"
_POST = "gpu_worker.connection:Connection.post"
_STATE = "gpu_worker.session:Session.state"
_SENDS = "shm_store.channel:Channel.send"
_HEARS = "shm_store.channel:Channel.receive"
_REPLIES = "coordinator.connection:Connection.send"
_STORE = "coordinator.store:Store"
_SERVER = "coordinator.server:Server"
_KEEPS = "coordinator.fd_store:FdStore"
_HOST = "coordinator.coordinator_host:CoordinatorHost"
_STARTS = "coordinator.workers:Workers"

FAILPOINTS = (
    # --- worker
    Failpoint("worker", "grant received, not noted", f"{_MAPS}.granted", "before", nth=4),
    Failpoint("worker", "before the map of a grant", f"{_MAPS}._map", "before", nth=4),
    Failpoint("worker", "mapped, its lease not noted", "gpu_worker.mapping:map_segment", "after"),
    Failpoint("worker", "grant noted, its asker not told", f"{_MAPS}.granted", "after", nth=4),
    Failpoint("worker", "before RESERVE", _POST, "before", "Reserve"),
    Failpoint("worker", "after RESERVE", _POST, "after", "Reserve"),
    Failpoint("worker", "with SPACE, before the fill", "gpu_worker.publish:fill", "before"),
    Failpoint("worker", "in the fill", "gpu_worker.publish:Span.write", "after", nth=3),
    Failpoint("worker", "before COMMIT", _POST, "before", "Commit"),
    Failpoint("worker", "after COMMIT", _POST, "after", "Commit"),
    Failpoint("worker", "before the unmap", f"{_MAPS}.unmap", "before", nth=3),
    Failpoint("worker", "in the unmap", "gpu_worker.mapping:unmap_range", "after", nth=6),
    Failpoint("worker", "unmapped, before RELEASE", _POST, "before", "Release", nth=3),
    Failpoint("worker", "after RELEASE", _POST, "after", "Release", nth=3),
    Failpoint("worker", "before ACK", _POST, "before", "Ack"),
    Failpoint("worker", "charged, nothing on the device", f"{_SIM}Device.allocate", "before"),
    Failpoint(
        "worker", "allocated, nobody minds it", "gpu_worker.leases:Leases.watch_block", "before"
    ),
    Failpoint("worker", "in the upload", f"{_SIM}Block._fill", "after", nth=4),
    Failpoint("worker", "on the device, nobody told", f"{_PLACEMENT}.point_there", "after"),
    Failpoint("worker", "before it leaves the device", f"{_PLACEMENT}.point_home", "before", nth=3),
    Failpoint(
        "worker", "off the device, before RELEASE", "gpu_worker.block:Memory.free", "after", nth=3
    ),
    Failpoint("worker", "made for all, nothing in it", f"{_SIM}Device.make_segment", "after"),
    Failpoint("worker", "in the upload for all", f"{_SIM}Segment.fill", "after"),
    Failpoint("worker", "granted for all, not mapped", f"{_SIM}Device.open_segment", "before"),
    Failpoint("worker", "mapped for all, nobody minds it", f"{_SIM}Device.open_segment", "after"),
    Failpoint("worker", "before RESUME", _STATE, "before", provoked_by="kill coordinator"),
    Failpoint(
        "worker", "in RESUME", _POST, "after", "HeldMap", nth=2, provoked_by="kill coordinator"
    ),
    Failpoint("worker", "after RESUME", _STATE, "after", provoked_by="kill coordinator"),
    # --- loader
    Failpoint("loader", "before FETCH", _HEARS, "before"),
    Failpoint("loader", "after FETCH", _HEARS, "after", "Fetch"),
    Failpoint("loader", "before RESERVE", _SENDS, "before", "Reserve"),
    Failpoint("loader", "after RESERVE", _SENDS, "after", "Reserve"),
    Failpoint("loader", "after SPACE", _HEARS, "after", "Space"),
    Failpoint("loader", "manifest written", "shm_store.segment:write_manifest", "after"),
    Failpoint("loader", "in the fill", "coordinator.pump:Pump._move", "after", nth=2),
    Failpoint("loader", "before COMMIT", _SENDS, "before", "Commit"),
    Failpoint("loader", "after COMMIT", _SENDS, "after", "Commit"),
    # --- coordinator
    Failpoint(
        "coordinator", "before the store of a generation", f"{_STORE}.keep_segment", "before"
    ),
    Failpoint("coordinator", "stored, nobody told", f"{_STORE}.keep_segment", "after"),
    Failpoint("coordinator", "before the removal", f"{_STORE}.forget_segment", "before"),
    Failpoint("coordinator", "removed, not freed", f"{_STORE}.forget_segment", "after"),
    Failpoint("coordinator", "before words", f"{_STORE}.remember", "before", provoked_by="operate"),
    Failpoint("coordinator", "after words", f"{_STORE}.remember", "after", provoked_by="operate"),
    Failpoint("coordinator", "before TICKET", _REPLIES, "before", "Ticket"),
    Failpoint("coordinator", "before SPACE", _REPLIES, "before", "Space", nth=2),
    Failpoint("coordinator", "after SPACE", _REPLIES, "after", "Space", nth=2),
    Failpoint("coordinator", "before GRANT", _REPLIES, "before", "Grant", nth=4),
    Failpoint("coordinator", "after GRANT", _REPLIES, "after", "Grant", nth=4),
    Failpoint("coordinator", "before REVOKE", _REPLIES, "before", "Revoke"),
    Failpoint(
        "coordinator", "loader to be started", "coordinator.executor:Executor._run_loader", "before"
    ),
    Failpoint(
        "coordinator", "loader started", "coordinator.executor:Executor._run_loader", "after"
    ),
    Failpoint(
        "coordinator",
        "before the backing child",
        "coordinator.executor:Executor._start_backing",
        "before",
    ),
    Failpoint(
        "coordinator",
        "with a backing child",
        "coordinator.executor:Executor._start_backing",
        "after",
        nth=2,
    ),
    Failpoint("coordinator", "backed, no SPACE yet", "shm_store.segment:fix_size", "after"),
    Failpoint("coordinator", "before the seal", "coordinator.segment_table:seal", "before"),
    Failpoint("coordinator", "sealed, not stored", "coordinator.segment_table:seal", "after"),
    Failpoint("coordinator", "given memory of a device", f"{_SERVER}._deposit", "after"),
    Failpoint(
        "coordinator", "before it freezes that", "coordinator.device_memory:freeze_memory", "before"
    ),
    Failpoint(
        "coordinator", "frozen, not stored", "coordinator.device_memory:freeze_memory", "after"
    ),
    Failpoint(
        "coordinator", "while freeing", "coordinator.segment_table:SegmentTable.take", "after"
    ),
    Failpoint(
        "coordinator",
        "before a session's end",
        "coordinator.server:Server._process_ended",
        "before",
        provoked_by="kill worker",
    ),
    Failpoint(
        "coordinator",
        "after a session's end",
        "coordinator.server:Server._process_ended",
        "after",
        provoked_by="kill worker",
    ),
    Failpoint(
        "coordinator",
        "before the store is read",
        f"{_STORE}.recover",
        "before",
        provoked_by="kill coordinator",
    ),
    Failpoint(
        "coordinator",
        "store read, nothing adopted",
        f"{_STORE}.recover",
        "after",
        provoked_by="kill coordinator",
    ),
    Failpoint(
        "coordinator",
        "adopted, before any RESUME",
        "coordinator.server:Server.recover",
        "after",
        provoked_by="kill coordinator",
    ),
    Failpoint(
        "coordinator",
        "in a RESUME",
        "coordinator.statement:Statement.take",
        "after",
        nth=4,
        provoked_by="kill coordinator",
    ),
    Failpoint(
        "coordinator",
        "after a RESUME",
        "coordinator.server:Server._resume",
        "after",
        nth=6,
        provoked_by="kill coordinator",
    ),
    # --- supervisor
    Failpoint("supervisor", "FDSTORE heard, not kept", f"{_KEEPS}.keep", "before", nth=4),
    Failpoint("supervisor", "FDSTORE kept", f"{_KEEPS}.keep", "after", nth=4),
    Failpoint("supervisor", "before FDSTOREREMOVE", f"{_KEEPS}.remove", "before", nth=4),
    Failpoint(
        "supervisor",
        "a coordinator died, unseen",
        f"{_HOST}._ended",
        "before",
        provoked_by="kill coordinator",
    ),
    Failpoint(
        "supervisor",
        "a coordinator died, none yet",
        f"{_HOST}._ended",
        "after",
        provoked_by="kill coordinator",
    ),
    Failpoint(
        "supervisor",
        "the next one started",
        f"{_HOST}.start",
        "after",
        provoked_by="kill coordinator",
    ),
    Failpoint(
        "supervisor",
        "a worker died",
        f"{_STARTS}.reap",
        "before",
        provoked_by="kill worker",
    ),
    Failpoint(
        "supervisor",
        "a worker started again",
        f"{_STARTS}.start",
        "after",
        provoked_by="kill worker",
    ),
)


def resolve(module: object, path: list[str]) -> tuple[object, str]:
    """Return what holds a target, and under which name.

    Raises:
        LookupError: there is no such function, or it cannot have a moment after it.
    """
    owner = module
    for part in path[:-1]:
        owner = getattr(owner, part, None)
    found = getattr(owner, path[-1], None)
    if not callable(found) or inspect.isclass(found) or inspect.iscoroutinefunction(found):
        raise LookupError(f"{module} has no function {'.'.join(path)} that a failpoint can be at")
    return owner, path[-1]


def check() -> None:
    """See that every failpoint is there: one that is not would test nothing, in silence.

    Raises:
        LookupError: one is not.
        ImportError: nor is its module.
    """
    for point in FAILPOINTS:
        resolve(importlib.import_module(point.module), point.path)
    names = [(point.role, point.name) for point in FAILPOINTS]
    if len(set(names)) != len(names):
        raise LookupError("two failpoints have one name")
