"""The calls of CUDA's driver that torch has none for, by NVIDIA's package `cuda-bindings`.

Rules:

- It is loaded when it is first asked for. That it cannot be is a reason to be told, and no crash.
- Of every call it is known whether it was made, and what came of it, whatever comes in between.
- What the driver answers becomes one of our errors, with the call and the code in it. The same code
  means other things in other calls, so these say what is the fault of what they were given.

    Note on contexts
    fact: the driver takes its context from the calling thread; torch's guards set the runtime's
    device, which makes a context current only with a call that needs one, and not even then in a
    thread whose device is that one already
    consequence: a thread of ours, such as the keeper, may have none, or another device's
    choice: the device's primary context, which is torch's, is retained once, pushed before our
    calls and popped after them, so that the thread goes on with what it had
    cost: it is never released; neither does torch

    Note on interrupts
    fact: an interrupt comes between two instructions, also between the return of a call and the
    keeping of what it has returned
    consequence: memory could be lost, or be given back twice, which may hit another's by then
    choice: `map` makes the call and `list.extend` keeps what it returns; both are C, and nothing
    comes between them
    cost: it has to be explained
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from shm_store.errors import DeviceOutOfMemory, DeviceUnavailable, SegmentRefused, WeightCacheError
from shm_store.report import size_text

INSTALL = "pip install 'shm-weight-cache[cuda]'"

_FAULTS_OF_MEMORY = (
    "CUDA_ERROR_INVALID_VALUE",
    "CUDA_ERROR_INVALID_DEVICE",
    "CUDA_ERROR_INVALID_HANDLE",
    "CUDA_ERROR_OPERATING_SYSTEM",
    "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
    "CUDA_ERROR_NOT_PERMITTED",
    "CUDA_ERROR_NOT_SUPPORTED",
)
"""What the driver says to memory that it does not know, or not here, or not as so much."""


class Call:
    """One call of the driver that is to succeed once; see the note on interrupts.

    Attributes:
        answers: what came of it, each time that it was made: a code, and what it has returned.
    """

    __slots__ = ("answers",)

    def __init__(self) -> None:
        self.answers: list[tuple[Any, ...]] = []

    @property
    def done(self) -> bool:
        """Whether it was made, and has succeeded."""
        return bool(self.answers) and not self.code

    @property
    def code(self) -> Any:
        """What the driver has said the last time it was made; 0 is success."""
        return self.answers[-1][0]

    @property
    def value(self) -> Any:
        """What it has returned."""
        return self.answers[-1][1]

    def make(self, function: Callable[..., tuple[Any, ...]], *arguments: Any) -> None:
        """Make it, unless it has succeeded already."""
        columns = [(argument,) for argument in arguments]
        if not self.done:
            self.answers.extend(map(function, *columns))


class Driver:
    """The driver for one device, which this process calls by `index`. Thread-safe.

    Attributes:
        names: the package's module, for its types and constants.
    """

    def __init__(self, names: Any, index: int, device_name: str) -> None:
        """Use the driver for a device that torch has begun to use.

        Args:
            index: its number, as this process counts the devices that it sees. So does torch.

        Raises:
            DeviceUnavailable: there is no such library, or device.
        """
        self.names = names
        self.index = index
        self._name = device_name
        self._context = Call()
        self._lock = threading.RLock()
        """Guards the retaining of the context."""
        self.run("cuInit", 0)
        self._device = self.run("cuDeviceGet", index)

    def attribute(self, name: str) -> int:
        """Return what an attribute of the device says; 0 if the package does not know it."""
        which = getattr(self.names.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        return 0 if which is None else int(self.run("cuDeviceGetAttribute", which, self._device))

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Have the device's context be the calling thread's in the block."""
        with self._lock:
            if not self._context.done:
                self.call(self._context, "cuDevicePrimaryCtxRetain", self._device)
        pushed, pop = Call(), self.names.cuCtxPopCurrent
        try:
            self.call(pushed, "cuCtxPushCurrent", self._context.value)
            yield
        finally:
            # Before the pop nothing is called, in which an interrupt could come. An error of that
            # is no news: what is wrong with the device was said already.
            if pushed.answers and not pushed.answers[-1][0]:
                pop()

    def run(self, name: str, *arguments: Any, blames: bool = False) -> Any:
        """Make a call that takes nothing which would have to be given back; return its value."""
        call = Call()
        self.call(call, name, *arguments, blames=blames)
        return call.value if len(call.answers[-1]) > 1 else None

    def call(
        self, call: Call, name: str, *arguments: Any, blames: bool = False, size_bytes: int = 0
    ) -> None:
        """Make a call, unless it has succeeded already.

        Args:
            call: keeps what comes of it.
            blames: what it was given can be at fault, memory that others have made.
            size_bytes: what it takes of the device.

        Raises:
            DeviceOutOfMemory: there is not that much.
            SegmentRefused: what it was given is no such memory; only if it `blames`.
            DeviceUnavailable: anything else.
        """
        try:
            call.make(getattr(self.names, name), *arguments)
        except (AttributeError, RuntimeError) as error:
            # The package's own: it finds no library, or none that has such a call.
            raise DeviceUnavailable(f"{self._name}: {name}: {first_line(error)}") from error
        if not call.done:
            raise self._refusal(name, call.code, blames, size_bytes)

    def _refusal(self, name: str, code: Any, blames: bool, size_bytes: int) -> WeightCacheError:
        said = f"{name}: {getattr(code, 'name', code)}"
        if code == self.names.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            free_bytes = self._free_bytes()
            return DeviceOutOfMemory(
                f"{self._name} has no memory of {size_text(size_bytes)} to share: "
                f"{size_text(free_bytes)} are free ({said})",
                needed_bytes=size_bytes,
                free_bytes=free_bytes,
            )
        if blames and getattr(code, "name", "") in _FAULTS_OF_MEMORY:
            return SegmentRefused(f"what was given as memory of {self._name} is none ({said})")
        return DeviceUnavailable(f"{self._name}: {said}")

    def _free_bytes(self) -> int:
        answer = self.names.cuMemGetInfo()
        return 0 if answer[0] else int(answer[1])


def bindings() -> Any:
    """Return the module of the driver's calls.

    Raises:
        DeviceUnavailable: the package is not installed.
    """
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DeviceUnavailable(
            f"the package cuda-bindings is missing: {first_line(error)}", remedy=INSTALL
        ) from error


def first_line(error: Exception) -> str:
    """Return what an error says, without advice on how to debug it."""
    return (str(error).splitlines() or [type(error).__name__])[0]
