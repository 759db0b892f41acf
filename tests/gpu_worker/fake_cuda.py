"""CUDA's driver as `cuda-bindings` gives it, with memory of the host. It lets nothing pass.

A `World` has the devices and their memory; a `FakeDriver` is one process in it, which may number
them as it likes. What a real driver leaves undefined, such as giving back what one does not have,
is an AssertionError here. Memory is there as long as somebody has a handle, a map, or an fd of it:
an fd is the end of a pipe, whose other end knows when the last of them is closed.
"""

from __future__ import annotations

import ctypes
import enum
import os
import select
import threading
from types import SimpleNamespace
from typing import Any

GRANULE = 1 << 16
"""Of the fake; a real one says 2 MiB."""
MIB = 1 << 20


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_DEINITIALIZED = 4
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_ECC_UNCORRECTABLE = 214
    CUDA_ERROR_OPERATING_SYSTEM = 304
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709
    CUDA_ERROR_LAUNCH_FAILED = 719
    CUDA_ERROR_NOT_PERMITTED = 800
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_UNKNOWN = 999


Code = CUresult
OK = CUresult.CUDA_SUCCESS
INVALID = CUresult.CUDA_ERROR_INVALID_VALUE

PROT_NONE, PROT_READ, PROT_WRITE = 0, 1, 2
MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS = 1, 2, 16, 32


class Memory:
    """Memory of a device: its content, and who has it."""

    def __init__(self, device: FakeDevice, size_bytes: int) -> None:
        self.device = device
        self.size_bytes = size_bytes
        self.handles = 0
        self.maps = 0
        self.content = os.memfd_create("fake-vram")
        os.ftruncate(self.content, size_bytes)
        self.write_end = -1
        self.inode = 0

    def export(self) -> int:
        """Return a new fd of it."""
        assert self.write_end < 0, "more than one fd of a memory is not needed"
        fd, self.write_end = os.pipe()
        self.inode = os.fstat(fd).st_ino
        os.set_inheritable(fd, True)  # nothing is said of it
        return fd

    @property
    def has_fd(self) -> bool:
        if self.write_end < 0:
            return False
        poll = select.poll()
        poll.register(self.write_end, 0)
        return not any(event & select.POLLERR for _, event in poll.poll(0))

    @property
    def in_use(self) -> bool:
        return self.handles > 0 or self.maps > 0 or self.has_fd


class FakeDevice:
    def __init__(self, uuid: str, total_bytes: int = 64 * MIB) -> None:
        self.uuid = uuid
        self.total_bytes = total_bytes
        self.attributes = {102: 1, 103: 1}
        self.memories: list[Memory] = []

    @property
    def free_bytes(self) -> int:
        for memory in list(self.memories):
            if not memory.in_use:
                self.memories.remove(memory)
                os.close(memory.content)
                if memory.write_end >= 0:
                    os.close(memory.write_end)
        return self.total_bytes - sum(memory.size_bytes for memory in self.memories)


class World:
    def __init__(self, *devices: FakeDevice) -> None:
        self.devices = devices

    def by_fd(self, fd: int) -> Memory | None:
        inode = os.fstat(fd).st_ino
        for device in self.devices:
            for memory in device.memories:
                if memory.inode == inode and memory.in_use:
                    return memory
        return None


class Range:
    """Reserved addresses, and the one map in them."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.memory: Memory | None = None
        self.mapped_bytes = 0
        self.access = PROT_NONE


class FakeDriver:
    """`cuda.bindings.driver` in one process.

    Attributes:
        fails: by the name of a call, with what it fails, and from which call of it on.
        calls: the names of those that were made, which may be a list of the test's.
        larger_allowed: it maps more of memory than there is.
        dead: the device is gone.
    """

    CUresult = CUresult
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102,
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED=103,
    )
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAccess_flags = SimpleNamespace(
        CU_MEM_ACCESS_FLAGS_PROT_READ=1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3
    )
    CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL=9)

    @staticmethod
    def CUmemAllocationProp() -> SimpleNamespace:  # noqa: N802
        location = SimpleNamespace(type=0, id=0)
        return SimpleNamespace(type=0, location=location, requestedHandleTypes=0)

    @staticmethod
    def CUmemAccessDesc() -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(location=SimpleNamespace(type=0, id=0), flags=0)

    def __init__(self, world: World, visible: tuple[int, ...] | None = None) -> None:
        self.world = world
        self.visible = visible or tuple(range(len(world.devices)))
        self.fails: dict[str, tuple[Code, int]] = {}
        self.calls: list[str] = []
        self.handles: dict[int, Memory] = {}
        self.ranges: dict[int, Range] = {}
        self.dead = False
        self.larger_allowed = False
        self._next = 1000
        self._started = False
        self._retained: set[int] = set()
        self._stacks = threading.local()

    # --- what tests ask -------------------------------------------------------------------------

    def device(self, index: int) -> FakeDevice:
        return self.world.devices[self.visible[index]]

    @property
    def has_nothing(self) -> bool:
        return not self.handles and not self.ranges and not self.stack

    @property
    def stack(self) -> list[int]:
        if not hasattr(self._stacks, "contexts"):
            self._stacks.contexts = []
        return self._stacks.contexts

    def end(self) -> None:
        """End this process. Its fds are the test's."""
        for place in self.ranges.values():
            if place.memory is not None:
                place.memory.maps -= 1
            _munmap(place.address, place.size_bytes)
        for memory in self.handles.values():
            memory.handles -= 1
        self.ranges, self.handles = {}, {}

    def fail(self, name: str, code: Code, call: int = 1) -> None:
        self.fails[name] = (code, call)

    # --- the driver -----------------------------------------------------------------------------

    def _refused(self, name: str) -> Code:
        """Note a call, and return what it fails with, if it was told to."""
        self.calls.append(name)
        if self.dead:
            return CUresult.CUDA_ERROR_CONTEXT_IS_DESTROYED
        code, left = self.fails.get(name, (OK, 0))
        if left > 1:
            self.fails[name] = (code, left - 1)
            return OK
        return code

    def _in_context(self) -> int:
        assert self.stack, "no context is current in this thread"
        return self.stack[-1]

    def cuInit(self, flags: int):  # noqa: N802
        assert flags == 0
        if code := self._refused("cuInit"):
            return (code,)
        self._started = True
        return (OK,)

    def cuDeviceGet(self, ordinal: int):  # noqa: N802
        assert self._started
        if code := self._refused("cuDeviceGet"):
            return (code, None)
        if ordinal >= len(self.visible):
            return (CUresult.CUDA_ERROR_INVALID_DEVICE, None)
        return (OK, 40 + ordinal)

    def cuDeviceGetAttribute(self, attribute: int, device: int):  # noqa: N802
        if code := self._refused("cuDeviceGetAttribute"):
            return (code, None)
        return (OK, self.device(device - 40).attributes[attribute])

    def cuDevicePrimaryCtxRetain(self, device: int):  # noqa: N802
        if code := self._refused("cuDevicePrimaryCtxRetain"):
            return (code, None)
        self._retained.add(device - 40)
        return (OK, 900 + device - 40)

    def cuCtxPushCurrent(self, context: int):  # noqa: N802
        assert context - 900 in self._retained
        if code := self._refused("cuCtxPushCurrent"):
            return (code,)
        self.stack.append(context - 900)
        return (OK,)

    def cuCtxPopCurrent(self):  # noqa: N802
        assert self.stack, "popped more than was pushed"
        return (OK, 900 + self.stack.pop())

    def cuMemGetInfo(self):  # noqa: N802
        device = self.device(self._in_context())
        return (OK, device.free_bytes, device.total_bytes)

    def cuMemGetAllocationGranularity(self, prop: Any, option: int):  # noqa: N802
        self._check(prop)
        assert option == 0
        if code := self._refused("cuMemGetAllocationGranularity"):
            return (code, None)
        return (OK, GRANULE)

    def _check(self, prop: Any) -> FakeDevice:
        assert (prop.type, prop.location.type, prop.requestedHandleTypes) == (1, 1, 1)
        assert prop.location.id == self._in_context(), "of another device than the context's"
        return self.device(prop.location.id)

    def cuMemCreate(self, size: int, prop: Any, flags: int):  # noqa: N802
        device = self._check(prop)
        assert flags == 0
        if code := self._refused("cuMemCreate"):
            return (code, None)
        if size <= 0 or size % GRANULE:
            return (INVALID, None)
        if size > device.free_bytes:
            return (CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
        memory = Memory(device, size)
        device.memories.append(memory)
        return (OK, self._handle(memory))

    def _handle(self, memory: Memory) -> int:
        self._next += 1
        memory.handles += 1
        self.handles[self._next] = memory
        return self._next

    def cuMemRelease(self, handle: int):  # noqa: N802
        self._in_context()
        assert handle in self.handles, "undefined: it has no such handle, or has none any more"
        if code := self._refused("cuMemRelease"):
            return (code,)
        self.handles.pop(handle).handles -= 1
        return (OK,)

    def cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int):  # noqa: N802
        self._in_context()
        assert (kind, flags) == (1, 0) and handle in self.handles
        if code := self._refused("cuMemExportToShareableHandle"):
            return (code, None)
        return (OK, self.handles[handle].export())

    def cuMemImportFromShareableHandle(self, fd: int, kind: int):  # noqa: N802
        self._in_context()
        assert kind == 1
        if code := self._refused("cuMemImportFromShareableHandle"):
            return (code, None)
        memory = self.world.by_fd(fd)
        if memory is None:
            return (INVALID, None)
        if memory.device not in [self.world.devices[number] for number in self.visible]:
            return (CUresult.CUDA_ERROR_INVALID_DEVICE, None)
        return (OK, self._handle(memory))

    def cuMemAddressReserve(self, size: int, alignment: int, addr: int, flags: int):  # noqa: N802
        self._in_context()
        assert (alignment, addr, flags) == (0, 0, 0) and size > 0 and size % GRANULE == 0
        if code := self._refused("cuMemAddressReserve"):
            return (code, None)
        address = _mmap(0, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1)
        self.ranges[address] = Range(address, size)
        return (OK, address)

    def cuMemAddressFree(self, ptr: int, size: int):  # noqa: N802
        self._in_context()
        place = self.ranges.get(ptr)
        assert place is not None, "undefined: it has not reserved that, or not any more"
        assert place.size_bytes == size and place.memory is None, "another size, or still mapped"
        if code := self._refused("cuMemAddressFree"):
            return (code,)
        del self.ranges[ptr]
        _munmap(ptr, size)
        return (OK,)

    def cuMemMap(self, ptr: int, size: int, offset: int, handle: int, flags: int):  # noqa: N802
        self._in_context()
        place = self.ranges.get(ptr)
        assert place is not None and size <= place.size_bytes, "not reserved"
        assert (offset, flags) == (0, 0) and size % GRANULE == 0
        assert handle in self.handles and place.memory is None, "no handle, or mapped already"
        if code := self._refused("cuMemMap"):
            return (code,)
        memory = self.handles[handle]
        if size > memory.size_bytes and not self.larger_allowed:
            return (INVALID,)
        place.memory, place.mapped_bytes = memory, size
        memory.maps += 1
        return (OK,)

    def cuMemUnmap(self, ptr: int, size: int):  # noqa: N802
        self._in_context()
        place = self.ranges.get(ptr)
        assert place is not None and place.memory is not None, "undefined: nothing is mapped there"
        assert place.mapped_bytes == size, "a part of what is mapped there"
        if code := self._refused("cuMemUnmap"):
            return (code,)
        _mmap(ptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1)
        place.memory.maps -= 1
        place.memory, place.mapped_bytes, place.access = None, 0, PROT_NONE
        return (OK,)

    def cuMemSetAccess(self, ptr: int, size: int, desc: list[Any], count: int):  # noqa: N802
        self._in_context()
        place = self.ranges.get(ptr)
        assert place is not None and place.memory is not None, "nothing is mapped there"
        assert place.mapped_bytes == size and count == len(desc) == 1
        assert desc[0].location.type == 1 and desc[0].location.id == self._in_context()
        if code := self._refused("cuMemSetAccess"):
            return (code,)
        place.access = desc[0].flags
        there_bytes = min(size, place.memory.size_bytes)
        _mmap(ptr, there_bytes, place.access, MAP_SHARED | MAP_FIXED, place.memory.content)
        return (OK,)

    def cuPointerGetAttribute(self, attribute: int, ptr: int):  # noqa: N802
        assert attribute == 9
        if code := self._refused("cuPointerGetAttribute"):
            return (code, None)
        place = self.ranges[ptr]
        assert place.memory is not None
        return (OK, self.visible.index(self.world.devices.index(place.memory.device)))


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def _mmap(address: int, size_bytes: int, access: int, flags: int, fd: int) -> int:
    found = _libc().mmap(address, size_bytes, access, flags, fd, 0)
    assert found not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
    return int(found)


def _munmap(address: int, size_bytes: int) -> None:
    assert _libc().munmap(address, size_bytes) == 0
