"""Memory of a GPU that processes share: made in one, known by an fd, mapped in as many as like.

Rules:

- Whoever fills it maps it for writing; all others, and he himself afterwards, only for reading.
- What was begun is given back in the reverse order, each step once, however far it has come; what
  the driver does not take back now is there to be given back again.
- The memory is the device's as long as anybody has an fd of it, a handle, or a map. A handle is
  given back with its map, the fd belongs to whoever has it.
- No size but a whole number of *granules* is there, so that is what is charged.

    Note on the size
    fact: the driver tells nobody how large memory is that came as an fd; it refuses to map more of
    it than there is, and maps less without a word
    consequence: memory that is larger than what is charged for it would be used, and the books lie
    choice: whoever opens it tries to map one granule more, which has to be refused
    cost: a call; and a driver that does not refuse it is not used to share

    Note on the device
    fact: torch asks the driver which device a pointer is of, and copies if that is not the one it
    was told
    consequence: memory of another device would become a second copy, silently
    choice: ask the same question first, in this process's own numbers: indexes differ between
    containers, uuids, after which pools are called, do not
    cost: none
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from gpu_worker.cuda_driver import Call, Driver, bindings
from shm_store.errors import (
    DeviceOutOfMemory,
    DeviceUnavailable,
    ResourceError,
    SegmentRefused,
)
from shm_store.layout import round_up


class SharedMemory:
    """Memory of one device as this process has it: a handle, a map, and an fd where it made it.

    Whatever `make` or `open` raises, `give_back` is to be called.
    """

    def __init__(self, sharing: Sharing, size_bytes: int) -> None:
        """Have none yet.

        Args:
            size_bytes: a whole number of granules.
        """
        self.size_bytes = size_bytes
        self._sharing = sharing
        self._pid = os.getpid()
        self._handle, self._released = Call(), Call()
        self._exported, self._closed = Call(), False
        self._place, self._freed = Call(), Call()
        self._map, self._unmapped = Call(), Call()
        self._larger, self._smaller = Call(), Call()
        """A map that must not be, and its end."""

    @property
    def fd(self) -> int:
        """What others know it by, or -1. It is closed by `give_back`."""
        return int(self._exported.value) if self._exported.done and not self._closed else -1

    @property
    def address(self) -> int:
        """Where it is mapped."""
        return int(self._place.value)

    def make(self) -> None:
        """Have new memory, writable, and an fd of it.

        Raises:
            DeviceOutOfMemory: there is not as much.
            DeviceUnavailable: the device does not do it.
        """
        driver, of = self._sharing.driver, self._sharing
        with driver.current():
            driver.call(
                self._handle,
                "cuMemCreate",
                self.size_bytes,
                of.properties,
                0,
                size_bytes=self.size_bytes,
            )
            driver.call(
                self._exported, "cuMemExportToShareableHandle", self._handle.value, of.kind, 0
            )
            os.set_inheritable(self.fd, False)
            self._reserve()
            driver.call(self._map, "cuMemMap", *self._mapping(self.size_bytes))
            self._allow("READWRITE", blames=False)

    def open(self, fd: int) -> None:
        """Have memory that somebody has made, to be read only.

        Raises:
            SegmentRefused: it is no memory of this device, or of another size.
            DeviceUnavailable: the device does not do it.
        """
        driver = self._sharing.driver
        with driver.current():
            driver.call(
                self._handle,
                "cuMemImportFromShareableHandle",
                fd,
                self._sharing.kind,
                blames=True,
            )
            self._reserve()
            self._refuse_larger()
            driver.call(self._map, "cuMemMap", *self._mapping(self.size_bytes), blames=True)
            self._allow("READ", blames=True)
            self._refuse_other()

    def give_back(self) -> None:
        """Have none of it any more. May be called again.

        Nothing may use it any more: the driver does not wait. In a forked child only the fd is its.

        Raises:
            DeviceUnavailable: the driver has not taken it back. It can be given back again.
        """
        if self.fd >= 0:
            fd, self._closed = self.fd, True
            os.close(fd)
        if os.getpid() != self._pid:
            return
        todo = [
            (self._larger, self._smaller, "cuMemUnmap", self._reserved_bytes),
            (self._map, self._unmapped, "cuMemUnmap", self.size_bytes),
            (self._place, self._freed, "cuMemAddressFree", self._reserved_bytes),
        ]
        left = [step for step in todo if step[0].done and not step[1].done]
        held = self._handle.done and not self._released.done
        if left or held:
            driver = self._sharing.driver
            with driver.current():
                for _, end, name, size_bytes in left:
                    driver.call(end, name, self._place.value, size_bytes)
                if held:
                    driver.call(self._released, "cuMemRelease", self._handle.value)

    @property
    def _reserved_bytes(self) -> int:
        return self.size_bytes + self._sharing.granule_bytes

    def _reserve(self) -> None:
        """Have addresses for it, and for one granule more; see the note on the size."""
        self._sharing.driver.call(self._place, "cuMemAddressReserve", self._reserved_bytes, 0, 0, 0)

    def _mapping(self, size_bytes: int) -> tuple[Any, ...]:
        return self._place.value, size_bytes, 0, self._handle.value, 0

    def _refuse_larger(self) -> None:
        try:
            self._sharing.driver.call(
                self._larger, "cuMemMap", *self._mapping(self._reserved_bytes), blames=True
            )
        except SegmentRefused:
            return
        raise SegmentRefused(
            f"memory of {self._sharing.name} is larger than the {self.size_bytes} bytes that are "
            "charged for it"
        )

    def _allow(self, what: str, *, blames: bool) -> None:
        names = self._sharing.driver.names
        access = names.CUmemAccessDesc()
        access.location = self._sharing.properties.location
        access.flags = getattr(names.CUmemAccess_flags, f"CU_MEM_ACCESS_FLAGS_PROT_{what}")
        self._sharing.driver.run(
            "cuMemSetAccess", self._place.value, self.size_bytes, [access], 1, blames=blames
        )

    def _refuse_other(self) -> None:
        driver = self._sharing.driver
        which = driver.names.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        index = int(driver.run("cuPointerGetAttribute", which, self._place.value))
        if index != driver.index:
            raise SegmentRefused(f"it is memory of cuda:{index}, and not of {self._sharing.name}")


@dataclass(frozen=True, slots=True)
class Sharing:
    """How memory of one device is shared in this process.

    Attributes:
        name: the device's, for people.
        properties: of memory of it that can be exported.
        kind: of what it is exported as: an fd.
        granule_bytes: there is no memory of a size that this does not divide.
    """

    driver: Driver
    name: str
    properties: Any
    kind: Any
    granule_bytes: int

    def taken_bytes(self, size_bytes: int) -> int:
        """Return what memory for so many bytes takes of the device."""
        return max(round_up(size_bytes, self.granule_bytes), self.granule_bytes)


def sharing(index: int, name: str) -> Sharing:
    """Return how the memory of a device is shared; it was tried then, with one granule.

    Args:
        index: the device's, which torch has begun to use.
        name: the same, for people.

    Raises:
        DeviceUnavailable: it cannot be, for this reason: package, driver, device, or container.
    """
    driver = Driver(bindings(), index, name)
    for attribute, lacking in (
        ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "manages no virtual memory"),
        ("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", "gives out no memory as an fd"),
    ):
        if not driver.attribute(attribute):
            raise DeviceUnavailable(f"this device, or its driver, {lacking}", remedy="")
    names = driver.names
    properties = names.CUmemAllocationProp()
    properties.type = names.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = names.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = index
    kind = names.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    properties.requestedHandleTypes = kind
    least = names.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    with driver.current():
        granule_bytes = int(driver.run("cuMemGetAllocationGranularity", properties, least))
    made = Sharing(driver, name, properties, kind, granule_bytes)
    _try(made)
    return made


def _try(made: Sharing) -> None:
    """Share one granule with oneself: that it should be possible is only the driver's word."""
    one, same = (SharedMemory(made, made.granule_bytes) for _ in range(2))
    try:
        one.make()
        same.open(one.fd)
    except (ResourceError, SegmentRefused) as error:
        if isinstance(error, DeviceOutOfMemory):
            raise DeviceUnavailable(f"not one granule is free: {error.message}") from error
        raise DeviceUnavailable(
            f"memory cannot be shared here, which a container may forbid: {error.message}",
            remedy="",
        ) from error
    finally:
        try:
            same.give_back()
        finally:
            one.give_back()
