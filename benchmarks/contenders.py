"""Who is measured: ours, the floor under it, and the peers. All end in a dict of tensors.

Each is told apart in the same steps, so that the same things are timed for all.
"""

from __future__ import annotations

import base64
import ctypes
import logging
import mmap
import os
import socket
import time
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from benchmarks import echo, sender
from benchmarks.checkpoint import Tensors, total_bytes
from benchmarks.rows import Unavailable

if TYPE_CHECKING:
    from gpu_worker.mapping import Buffer

OURS = "ours"
FLOOR = "floor"
ALIGNED_FLOOR = "floor at a 2 MiB boundary"
LOAD_FILE = "safetensors load_file"
TORCH_LOAD = "torch.load(mmap=True)"
SHARING = {
    "torch.multiprocessing file_system": "file_system",
    "torch.multiprocessing file_descriptor": "file_descriptor",
}
RAY = "ray get + from_numpy"
PEERS = (LOAD_FILE, TORCH_LOAD, *SHARING, RAY)

SETTLE_LIMIT_S = 60.0
_MAP_NORESERVE = 0x4000
_REQUEST = b"\0" * 96
"""About as long as an ACQUIRE."""


@dataclass(frozen=True)
class Places:
    """Where the same weights are to be had from. Plain values: it travels to fresh processes."""

    socket: str
    key: str
    safetensors: str
    pickled: str = ""
    echo: str = ""
    senders: dict[str, str] = field(default_factory=dict)
    ray_address: str = ""
    ray_reference: str = ""


class Contender(Protocol):
    """One way to get the tensors."""

    def prepare(self) -> None:
        """Import, and start what any program would have started already. Never timed."""

    def connect(self) -> None:
        """Do what comes once per process. Timed in a fresh process."""

    def attach(self) -> Tensors:
        """Return the tensors. Timed."""

    def settle(self) -> None:
        """Wait until tensors that were dropped are unmapped. Never timed."""

    def close(self) -> None:
        """Leave."""


def contender(name: str, places: Places) -> Contender:
    """Return the contender of that name."""
    if name in SHARING:
        return TorchSharing(places.senders[name])
    if name == RAY:
        return RayStore(places.ray_address, places.ray_reference)
    if name == OURS:
        return Ours(places.socket, places.key, places.safetensors)
    if name == FLOOR:
        return Floor(places.echo)
    if name == ALIGNED_FLOOR:
        return AlignedFloor(places.echo)
    return LoadFile(places.safetensors) if name == LOAD_FILE else TorchLoad(places.pickled)


class Ours:
    """`state_dict` of a worker, on weights that are READY."""

    def __init__(self, path: str, key: str, source: str) -> None:
        self._path, self._key, self._source = path, key, source
        self.deferred_import_s = 0.0
        """Seconds of the imports that `gpu_worker` leaves to its first attach."""

    def prepare(self) -> None:
        import torch  # noqa: F401

        import gpu_worker

        started_s = time.perf_counter()
        import gpu_worker.module
        import gpu_worker.placement
        import gpu_worker.publish
        import gpu_worker.read_only
        import gpu_worker.tensors  # noqa: F401

        self.deferred_import_s = time.perf_counter() - started_s

    def connect(self) -> None:
        import gpu_worker

        self._worker = gpu_worker.attach(socket=self._path, name="benchmark")

    def attach(self) -> Tensors:
        return self._worker.state_dict(self._key, source=self._source)

    def settle(self) -> None:
        self._worker.flush(SETTLE_LIMIT_S)

    def close(self) -> None:
        self._worker.shutdown()


class Floor:
    """What any design of this kind has to do, with nothing around it.

    One frame each way and an fd, a map, the manifest, and per tensor a storage and (unless it is
    flat) a view.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def prepare(self) -> None:
        from gpu_worker import dtypes  # noqa: F401
        from shm_store import segment  # noqa: F401

    def connect(self) -> None:
        self._socket = echo.connect(self._path)

    def attach(self) -> Tensors:
        import torch

        from gpu_worker.dtypes import TORCH_DTYPES
        from shm_store.segment import read_manifest

        self._socket.send(_REQUEST)
        _, (fd,), _, _ = socket.recv_fds(self._socket, echo.FRAME_BYTES, 1)
        mapped = self._map(fd)
        os.close(fd)
        manifest, start = read_manifest(memoryview(mapped))
        groups = manifest.groups
        frombuffer = torch.frombuffer
        tensors = {}
        for entry in manifest.tensors:
            dtype = TORCH_DTYPES[entry.dtype]
            group = groups[entry.group]
            tensor = frombuffer(
                mapped,
                dtype=dtype,
                count=group.size_bytes // dtype.itemsize,
                offset=start + group.offset_bytes,
            )
            if len(entry.shape) > 1:
                tensor = tensor.as_strided(entry.shape, entry.strides)
            tensors[entry.name] = tensor
        return tensors

    def _map(self, fd: int) -> Buffer | mmap.mmap:
        return mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_PRIVATE | _MAP_NORESERVE)

    def settle(self) -> None:
        pass  # the map is gone with its last tensor

    def close(self) -> None:
        self._socket.close()


class AlignedFloor(Floor):
    """The same over a map at a 2 MiB boundary, which alone can be of huge pages."""

    def _map(self, fd: int) -> Buffer | mmap.mmap:
        from gpu_worker.mapping import map_segment

        self._buffer = map_segment(fd, os.fstat(fd).st_size)
        return self._buffer

    def settle(self) -> None:
        from gpu_worker.mapping import unmap_range

        unmap_range(ctypes.addressof(self._buffer), len(self._buffer))


class LoadFile:
    """safetensors, which maps the file itself."""

    def __init__(self, path: str) -> None:
        self._path = path

    def prepare(self) -> None:
        import safetensors.torch  # noqa: F401

    def connect(self) -> None:
        pass

    def attach(self) -> Tensors:
        from safetensors.torch import load_file

        return load_file(self._path)

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass


class TorchLoad(LoadFile):
    """`torch.load`, which maps the file too when told so."""

    def prepare(self) -> None:
        import torch  # noqa: F401

    def attach(self) -> Tensors:
        import torch

        return torch.load(self._path, mmap=True, weights_only=True)


class TorchSharing:
    """Tensors in shared memory, sent by another process with torch.multiprocessing."""

    def __init__(self, address: str) -> None:
        self._address = address

    def prepare(self) -> None:
        import torch.multiprocessing  # noqa: F401

    def connect(self) -> None:
        self._connection = sender.connect(self._address)

    def attach(self) -> Tensors:
        self._connection.send(sender.ALL)
        return self._connection.recv()

    def settle(self) -> None:
        self._connection.send("done")
        self._connection.recv()

    def close(self) -> None:
        self._connection.close()


class RayStore:
    """An object in Ray's store. Joining the cluster, which takes about a second, is not timed."""

    def __init__(self, address: str, reference: str) -> None:
        self._address, self._reference = address, reference

    def prepare(self) -> None:
        import ray
        import torch  # noqa: F401

        # Ray's arrays are read-only, and torch says so once.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
        if not ray.is_initialized():
            ray.init(address=self._address, logging_level=logging.ERROR, log_to_driver=False)
        self._ref = ray.cloudpickle.loads(base64.b64decode(self._reference))

    def connect(self) -> None:
        pass

    def attach(self) -> Tensors:
        import ray
        import torch

        from_numpy = torch.from_numpy
        return {name: from_numpy(array) for name, array in ray.get(self._ref).items()}

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass


class RayCluster:
    """A Ray of one's own, with the tensors put into its store once."""

    def __init__(self, tensors: Tensors, folder: str) -> None:
        """Start it.

        Args:
            folder: for its logs and sockets; a short path, for the sockets' sake.

        Raises:
            Unavailable: it is not installed.
        """
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        try:
            import ray
        except ImportError as error:
            raise Unavailable("ray is not installed (extra `bench`)") from error
        size_bytes = total_bytes(tensors)
        ray.init(
            num_cpus=1,
            include_dashboard=False,
            object_store_memory=size_bytes + size_bytes // 4 + (128 << 20),
            logging_level=logging.ERROR,
            log_to_driver=False,
            _temp_dir=folder,
        )
        self.address: str = ray.get_runtime_context().gcs_address
        self._reference = ray.put({name: tensor.numpy() for name, tensor in tensors.items()})
        self.reference = base64.b64encode(ray.cloudpickle.dumps(self._reference)).decode()
        """The object's, in a form that fresh processes take."""

    def close(self) -> None:
        """End it and all its processes."""
        import ray

        ray.shutdown()
