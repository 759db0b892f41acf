"""Whether a module on its device is the module: its tensors, and what it computes, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.device_check.checks import Found, Missed, Skipped
from benchmarks.device_check.models import Kinds, Make, Scaled, layers, numbers, quantised
from benchmarks.device_check.place import MIB, Place, bits, named

WIDTH = 1024
LAYERS = 8
"""Of 4 MiB each: more than the least that a GPU's allocator gives, several times."""


def comes_and_goes(place: Place) -> Found:
    """Lock, offload and lock again: the same tensors, the same results as without us."""
    x, want = _plain(Kinds, place, numbers(2, 6))
    handle = place.load(Kinds)
    built = dict(named(Kinds()))
    for turn in ("first", "again"):
        with handle as module:
            _expect_there(module, place)
            _expect_equal(f"the results, locked {turn},", module(x), want)
            _expect_same(module, built, f"locked {turn}")
        if not place.worker.offload(handle.key):
            raise Missed("it does not leave the device")
        if any(tensor.device.type != "cpu" for _, tensor in named(module)):
            raise Missed("offloaded, and something of it is still on the device")
        _expect_same(module, built, "offloaded")
    dtypes = len({tensor.dtype for tensor in built.values()})
    return Found(f"{len(built)} tensors of {dtypes} dtypes, and what is computed with them")


def stays_tied(place: Place) -> Found:
    """What is one parameter on the host is one on the device, and takes its room once."""
    handle = place.load(Kinds)
    with handle as module:
        assert isinstance(module, Kinds)
        if module.tied is not module.plain:
            raise Missed("a parameter with two names has become two")
        whole, part = module.turned.untyped_storage(), module.columns.untyped_storage()
        if whole.data_ptr() != part.data_ptr():
            raise Missed("views of one memory have a memory each")
        with torch.no_grad():
            module.turned[1, 0] = 17.0  # the first of what `columns` shows
        if module.columns[0, 0].item() != 17.0:
            raise Missed("an edit of a tensor is not seen in a view of it")
    return Found("one parameter under two names; two views of one memory")


def keeps_subclasses(place: Place) -> Found:
    """A tensor subclass comes as what it is, with all that it is made of."""
    make: Make = lambda: quantised(64)  # noqa: E731
    x, want = _plain(make, place, numbers(2, 64))
    handle = place.load(make, private=True)
    for _ in range(2):
        with handle as module:
            assert isinstance(module, torch.nn.Linear)
            weight: torch.Tensor = module.weight
            if not isinstance(weight, Scaled):
                raise Missed(f"a Scaled has become a {type(weight).__name__}")
            inner = (weight.numbers.device, weight.scale.device, weight.device)
            if set(inner) != {place.device.torch_device}:
                raise Missed(f"it is on {', '.join(map(str, inner))}")
            _expect_equal("the results", module(x), want)
        place.worker.offload(handle.key)
    return Found("a wrapper of two tensors")


def runs_in_part(place: Place) -> Found:
    """Where there is room for a part of it, it computes the same."""
    make: Make = lambda: layers(LAYERS, WIDTH)  # noqa: E731
    x, want = _plain(make, place, numbers(2, WIDTH))
    handle = place.load(make)
    room = 5 * LAYERS * MIB // 2
    place.limit(room)
    with handle as module:
        (there,) = place.worker.resident()
        if there.size_bytes > room:
            raise Missed(f"{there.size_bytes} bytes where there is room for {room}")
        for _ in range(2):
            _expect_equal("the results", module(x), want)
        if any(parameter.is_meta for parameter in module.parameters()):
            raise Missed("a parameter is on the meta device")
    whole = LAYERS * 4 * MIB
    share = there.size_bytes / whole
    return Found(f"with {share:.0%} of it on the device", {"share": share})


def goes_on_compiled(place: Place) -> Found:
    """A compiled module is not compiled again when it comes back, and computes the same."""
    compiled: list[int] = []
    kind, inner = ("eager", _as_it_is) if place.simulated else ("inductor", _inductor())

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compiled.append(1)
        return inner(graph, inputs)

    handle = place.load(lambda: layers(2, 256))
    x = numbers(2, 256).to(place.device.torch_device)
    try:
        with handle as module, torch.no_grad():
            fast = torch.compile(module, backend=backend)
            want = _first_result(fast, x)
        for _ in range(2):
            place.worker.offload(handle.key)
            with handle, torch.no_grad():
                if not torch.equal(fast(x), want):
                    raise Missed("the results differ from those before it was offloaded")
    finally:
        torch._dynamo.reset()  # it keeps the module otherwise
    if len(compiled) != 1:
        raise Missed(f"it was compiled {len(compiled)} times")
    return Found(f"by {kind}, offloaded and locked twice, compiled once")


def _first_result(fast: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return the result, which takes compilers that a machine may not have."""
    try:
        return fast(x)
    except Exception as error:
        first, *_ = str(error).splitlines() or [""]
        raise Skipped(f"torch.compile does not work here: {first[:100]}") from error


def _as_it_is(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    return graph.forward


def _inductor() -> Callable[[torch.fx.GraphModule, list[torch.Tensor]], Any]:
    from torch._inductor.compile_fx import compile_fx

    return compile_fx


# --- what is compared -----------------------------------------------------------------------------


def _plain(make: Make, place: Place, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input on the device, and what a module of torch's own there makes of it.

    Its tensors share memory, and lie in it, as on the host: kernels may mind where bytes begin.
    """
    twins = _Twins(place.device.torch_device)
    with torch.no_grad():
        module = make().eval()
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if isinstance(tensor, Scaled):
                moved = Scaled(twins.of(tensor.numbers), twins.of(tensor.scale))
                setattr(module, name, torch.nn.Parameter(moved, requires_grad=False))
            else:
                tensor.data = twins.of(tensor)
        x = x.to(place.device.torch_device)
        return x, module(x)


class _Twins:
    """Tensors on a device that are what those on the host are."""

    def __init__(self, where: torch.device) -> None:
        self._where = where
        self._memories: dict[int, torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if not memory.nbytes():
            return tensor.detach().to(self._where)
        place = memory.data_ptr()
        if place not in self._memories:
            whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(memory)
            self._memories[place] = whole.to(self._where, copy=True)
        empty = torch.empty(0, dtype=tensor.dtype, device=self._where)
        there = self._memories[place].untyped_storage()
        return empty.set_(there, tensor.storage_offset(), tensor.size(), tensor.stride())


def _expect_there(module: torch.nn.Module, place: Place) -> None:
    for name, tensor in named(module):
        if tensor.device != place.device.torch_device:
            raise Missed(f"{name} is on {tensor.device}")


def _expect_same(module: torch.nn.Module, built: dict[str, torch.Tensor], when: str) -> None:
    """Raise Missed unless every tensor is as it was built, in every respect but place."""
    for name, tensor in named(module):
        want = built[name]
        form = (tensor.dtype, tensor.shape, tensor.stride())
        if form != (want.dtype, want.shape, want.stride()):
            raise Missed(f"{when}, {name} has another dtype, shape or stride: {form}")
        if not torch.equal(bits(tensor), bits(want)):
            raise Missed(f"{when}, {name} has other bits")


def _expect_equal(what: str, found: torch.Tensor, want: torch.Tensor) -> None:
    if found.device != want.device or not torch.equal(found, want):
        raise Missed(f"{what} differ from those of a module of torch's own there")


CHECKS = (
    ("results and tensors after lock, offload, lock", comes_and_goes),
    ("tied weights and views stay so", stays_tied),
    ("tensor subclass", keeps_subclasses),
    ("larger than the room: in part", runs_in_part),
    ("compiled module", goes_on_compiled),
)
