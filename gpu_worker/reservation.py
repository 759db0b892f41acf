"""Memory on a device that the user takes himself, and that is counted as his."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Self

from gpu_worker.client import Client
from gpu_worker.request import Charge
from shm_store.errors import ArgumentRefused
from shm_store.keys import Key

if TYPE_CHECKING:
    from gpu_worker.device import Device


class Reservation:
    """Room on a device that is kept free of models. Ends with `close`, its block, or the object.

    Attributes:
        size_bytes: how much, as the device rounds it.
    """

    def __init__(
        self, client: Client, device: Device, key: Key, size_bytes: int, timeout_s: float | None
    ) -> None:
        """Wait until there is as much room, idle models being taken from the device for it.

        Raises:
            ArgumentRefused: the device has no memory of its own.
            BudgetExceeded: there was not enough in time.
            CoordinatorLost: nobody answers.
        """
        if device.pool is None:
            raise ArgumentRefused(
                f"device {device.name!r} has no memory of its own to reserve",
                remedy="attach with the device that you take memory of",
            )
        self.size_bytes = device.charged_bytes(size_bytes)
        charge = self._charge = Charge(fixed=True)
        self._leases = client.leases
        # Before it is asked for: whatever comes, it is given back.
        self._end = weakref.finalize(self, client.leases.discharge, charge)
        self._end.atexit = False
        try:
            client.charge(charge, key, device.pool, self.size_bytes, timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the room back. May be called again."""
        self._leases.give_back(self._charge)
        self._end.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
