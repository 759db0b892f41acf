"""The memory of a device that holds one model: how it is used, and how it ends.

Every kind of device (`sim_device`, `cuda_device`) makes its blocks out of this. Rules:

- Alias groups are views with a storage each, as on the host. Every view keeps the block's *hold*,
  and so does the block itself.
- A block ends in one order, as a host map does: the last of those dies, a weak reference to the
  hold *enqueues* (see "Note on finalizers" in `mapping`), the keeper thread has its `Memory` freed,
  and only then is the memory anybody else's.
- `Memory` is what is left when nobody can use the block any more, so it keeps nothing alive. The
  device keeps it until it is free, for a weak reference is told of nothing once it is gone itself.
"""

from __future__ import annotations

import abc
import ctypes
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shm_store.errors import ArgumentRefused, InUse, SegmentRefused

Gone = Callable[["weakref.ref[Any]"], object]
"""Told of an end with the dead reference. Called in any thread, inside any lock: it only enqueues.
"""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of the host that are to be on a device: of `fd`, or, where there is none, `tensor`.

    Attributes:
        tensor: contiguous, of one dimension, uint8, on the host: these bytes.
        fd: a file that `pread` reads, such as a segment. Then nothing of it has to be mapped.
        fd_offset_bytes: where these bytes begin in it.
        size_bytes: how many there are.
    """

    tensor: torch.Tensor | None
    fd: int | None
    fd_offset_bytes: int
    size_bytes: int

    def read(self, into: memoryview, offset_bytes: int) -> None:
        """Copy `len(into)` bytes from `offset_bytes` of the piece on. Without the GIL.

        Raises:
            SegmentRefused: the file ends before that.
        """
        if self.fd is None:
            ctypes.memmove(_address(into), self._address() + offset_bytes, len(into))
            return
        at = self.fd_offset_bytes + offset_bytes
        while into:
            read_bytes = os.preadv(self.fd, [into], at)
            if not read_bytes:
                raise ended(at)
            into, at = into[read_bytes:], at + read_bytes

    def bytes(self) -> memoryview:
        """Return the bytes of `tensor`, without a copy. The piece has to be kept meanwhile."""
        whole = (ctypes.c_ubyte * self.size_bytes).from_address(self._address())
        return memoryview(whole).cast("B")

    def _address(self) -> int:
        tensor = self.tensor
        assert tensor is not None, "a piece has a file or a tensor"
        assert tensor.device.type == "cpu" and tensor.is_contiguous(), "and its tensor is bytes"
        assert tensor.nbytes == self.size_bytes, "as many as it says"
        return tensor.data_ptr()


def ended(offset_bytes: int) -> SegmentRefused:
    """Return the error for a source that has no byte at `offset_bytes`."""
    return SegmentRefused(f"the weights end at byte {offset_bytes} of their segment, before time")


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view)) if view else 0


class Memory:
    """What a block's memory is to those who free it. Keeps no byte of it in use.

    Whoever is to free it keeps it, and gives `watch` something that enqueues it.
    """

    __slots__ = ("_give_back", "_hold", "_there", "size_bytes", "watched")

    def __init__(
        self, size_bytes: int, hold: object, give_back: Callable[[], object], there: set[Memory]
    ) -> None:
        """Describe memory that is in use while `hold` lives; be in `there` until it is free.

        Args:
            hold: what the block and its views keep. Can be weakly referenced.
            give_back: really frees the memory. May be called again if it raises, and by a forked
                child if its parent was at it. Must not keep `hold`.
            there: the device's, of all its memory.
        """
        self.size_bytes = size_bytes
        self.watched = False
        """Somebody will free it. What is dropped otherwise the device frees itself, later.

        Never both: a second unmapping could hit what another thread has mapped there since.
        """
        self._hold = weakref.ref(hold)
        self._give_back = give_back
        self._there = there
        there.add(self)

    @property
    def in_use(self) -> bool:
        """Whether the block, or a tensor over it, is there."""
        return self._hold() is not None

    @property
    def abandoned(self) -> bool:
        """Whether nothing uses it, and nobody was to be told of that."""
        return not self.watched and not self.in_use

    def watch(self, gone: Gone) -> bool:
        """Have `gone` called, once, when nothing uses the block any more; and no earlier `gone`.

        A forked child calls it for what it has inherited: its queues are others.

        Returns:
            False if nothing uses it already: `gone` is not called then.
        """
        hold = self._hold()
        if hold is None:
            return False
        self._hold, self.watched = weakref.ref(hold, gone), True
        return True

    def claim(self) -> Gone | None:
        """Leave it to the caller to free this, and tell nobody; return who was to be told."""
        hold, watch, self.watched = self._hold(), self._hold, True
        if hold is None:
            return None
        self._hold = weakref.ref(hold)
        return watch.__callback__

    def free(self) -> None:
        """Give the memory back to the device. It is really free when this returns; again, nothing.

        Takes 10 to 150 ms for gigabytes: for the keeper, after `gone`.

        Raises:
            DeviceUnavailable: the device did not take it. It is still there, to be freed again.
        """
        assert not self.in_use, "memory that is freed under a live tensor is another's"
        if self in self._there:
            self._give_back()
            self._there.discard(self)


class Block(abc.ABC):
    """Memory of a device for one model: `size_bytes` of it, as the device charges them.

    It is in use as long as this object or a tensor over it is there; then `memory` is to be freed:

        memory = block.memory
        memory.watch(functools.partial(queue.put, memory))  # before `block` is dropped
    """

    def __init__(self, memory: Memory, hold: object) -> None:
        """Be a block of `memory`, which is in use as long as `hold` lives."""
        self.memory = memory
        self.size_bytes = memory.size_bytes
        self._held: object | None = hold

    def view(self, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        """Return a range of the block as uint8, in one dimension and in a storage of its own.

        The tensor keeps the block in use. It is never an inference tensor.

        Raises:
            ArgumentRefused: the range reaches out of the block.
        """
        self._check(offset_bytes, size_bytes)
        with torch.inference_mode(False):
            if not size_bytes:  # torch makes no storage over no bytes, and there are none to share
                return torch.empty_strided((0,), (1,), dtype=torch.uint8, device=self._device())
            return self._view(offset_bytes, size_bytes)

    def fill(self, offset_bytes: int, source: Piece) -> None:
        """Copy the bytes of `source` to `offset_bytes`. One thread at a time fills a block.

        When this returns `source` may be changed or closed, also when it raises.

        Raises:
            ArgumentRefused: they reach out of the block; nothing was copied.
            SegmentRefused: the source has fewer bytes than it says.
            DeviceUnavailable: the device has failed. In both cases any of the bytes may be there.
        """
        self._check(offset_bytes, source.size_bytes)
        if source.size_bytes:
            self._fill(offset_bytes, source)

    @abc.abstractmethod
    def finish(self) -> None:
        """Wait until all that was filled is on the device.

        Raises:
            DeviceUnavailable: a copy that was still under way has failed.
        """

    def watch(self, gone: Gone) -> None:
        """Have `gone` called when this object and every tensor over it are gone; see `Memory`."""
        self.memory.watch(gone)

    def free(self) -> None:
        """End the block by hand, as after a failure: whoever watches it is not told then.

        This object is of no use afterwards, whatever still refers to it.

        Raises:
            InUse: a tensor over it is left. It is watched as before, and will be told of.
            DeviceUnavailable: as `Memory.free`. Whoever watches it is not told any more.
        """
        gone = self.memory.claim()
        self._held = None
        if not self.memory.in_use or (gone is not None and not self.memory.watch(gone)):
            self.memory.free()
            return
        if gone is None:
            self.memory.watched = False
        raise InUse(
            "a tensor over this block of a device is still used",
            remedy="drop its views first; a traceback keeps those of its frames",
        )

    def _hold(self) -> object:
        if self._held is None:
            raise ArgumentRefused("this block of a device was freed", remedy="allocate another")
        return self._held

    def _check(self, offset_bytes: int, size_bytes: int) -> None:
        self._hold()
        if offset_bytes < 0 or size_bytes < 0 or offset_bytes + size_bytes > self.size_bytes:
            raise ArgumentRefused(
                f"{size_bytes} bytes at {offset_bytes} reach out of a block of {self.size_bytes}"
            )

    @abc.abstractmethod
    def _device(self) -> torch.device: ...

    @abc.abstractmethod
    def _view(self, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        """Return the view; the range is within the block, and not empty."""

    @abc.abstractmethod
    def _fill(self, offset_bytes: int, source: Piece) -> None:
        """Copy the bytes; there are some, and room for them."""
