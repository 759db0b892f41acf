"""Whether a device has the memory back that a process had there which ended.

The coordinator loads no driver: a simulated device's memory the kernel knows, and of GPUs another
program tells. Where nobody can tell, the end of the process has to do.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import stat
import subprocess

from shm_store.errors import SegmentRefused
from shm_store.keys import GenerationId
from shm_store.memfds import PREFIX, has_block, memfd_name
from shm_store.segment import freeze, is_sealed

log = logging.getLogger("coordinator")

SIMULATED = "vram:sim-"
FIRST_LOOK_S = 0.005
LONGEST_LOOK_S = 1.0
PATIENCE_S = 30.0
"""How long a GPU may take. Its driver frees what a process had within seconds of its end."""

QUERY = ("nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader")
QUERY_TIMEOUT_S = 10.0

FILES = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFSOCK, stat.S_IFBLK)
"""What no driver gives out as memory: files, memfds, folders, sockets, disks."""

MEMORY_DEVICES = 1
"""Major number of /dev/null and the like (Linux, devices.txt)."""


def freeze_memory(fd: int, pool: str, gen: GenerationId) -> None:
    """Have nobody change memory of a simulated device any more. Blocks, as `segment.freeze`.

    Of a GPU's only its driver can say who may: readers map it read-only.
    """
    if pool.startswith(SIMULATED) and memfd_name(fd) is not None:
        freeze(fd, f"generation {gen} on {pool}")


def require_memory(fd: int, pool: str, gen: GenerationId, size_bytes: int) -> None:
    """Hold an fd that is to be memory of a device against what is charged for it.

    What the fd of a GPU's driver is, only those know who import it.

    Raises:
        SegmentRefused: it is of no device, or another one, of another generation or size; or
            somebody could still write to it.
    """
    if not pool.startswith(SIMULATED):
        found = os.fstat(fd)
        if stat.S_IFMT(found.st_mode) in FILES or os.major(found.st_rdev) == MEMORY_DEVICES:
            raise SegmentRefused(f"what came is no memory of {pool}")
        return
    name = f"{PREFIX}sim:{pool.removeprefix(SIMULATED)}:{gen}"
    if memfd_name(fd) != name:
        raise SegmentRefused(f"it is {memfd_name(fd) or 'no memfd'}, and not {name}")
    if not is_sealed(fd):
        raise SegmentRefused(f"memory of {gen} on {pool} can still be written to")
    taken_bytes = os.fstat(fd).st_blocks * 512
    if not taken_bytes == os.fstat(fd).st_size == size_bytes:
        raise SegmentRefused(f"it takes {taken_bytes} bytes of {pool}, charged were {size_bytes}")


async def given_back(device: str, gen: GenerationId, pid: int) -> None:
    """Return once a device has the memory back that process `pid` had there for `gen`.

    That takes as long as somebody else has it, such as a child that was forked and not attached.
    Of a GPU no longer than PATIENCE_S.
    """
    loop = asyncio.get_running_loop()
    end_s, pause_s = loop.time() + PATIENCE_S, FIRST_LOOK_S
    simulated = device.startswith(SIMULATED)
    while simulated or loop.time() < end_s:
        look = (has_block, gen) if simulated else (_on_gpu, device, pid)
        if not await loop.run_in_executor(None, *look):
            return
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_LOOK_S)


def _on_gpu(device: str, pid: int) -> bool:
    """Say whether the driver still knows of a process on a GPU."""
    program = shutil.which(QUERY[0])
    if program is None:
        return False
    try:
        said = subprocess.run(
            (program, *QUERY[1:]),
            check=False,
            capture_output=True,
            text=True,
            timeout=QUERY_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("%s does not say what is on %s: %s", program, device, error)
        return False
    uuid = device.partition(":")[2].removeprefix("GPU-")
    return any(
        line.partition(",")[0].strip() == str(pid) and uuid in line
        for line in said.stdout.splitlines()
    )
