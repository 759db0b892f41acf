"""What a module's tensors are on a device and afterwards: the same, in every respect but place."""

# An attribute of a module is anything to mypy.
# mypy: disable-error-code="operator,assignment,attr-defined,override,method-assign"

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

from gpu_worker.device import device_named
from gpu_worker.placement import Placement
from gpu_worker.sim_device import SimDevice
from shm_store.errors import ArgumentRefused, BudgetExceeded
from tests.gpu_worker.on_device import new_device


@pytest.fixture
def device() -> SimDevice:
    made = device_named(new_device())
    assert isinstance(made, SimDevice)
    return made


class There:
    """A module that is on a device for the length of a `with`."""

    def __init__(self, module: torch.nn.Module, device: SimDevice, room_bytes=None) -> None:
        self.placement = Placement(module, device, room_bytes)
        self.device = device

    def __enter__(self) -> Placement:
        block = self.device.allocate(self.placement.size_bytes, "test")
        for _ in self.placement.steps(block):
            pass
        block.finish()
        self.placement.point_there(block)
        return self.placement

    def __exit__(self, *error: object) -> None:
        self.placement.point_home()


class Everything(torch.nn.Module):
    """One of each kind of tensor that a module can have."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.arange(24.0).reshape(4, 6)
        self.plain = torch.nn.Parameter(base.clone())
        self.tied = self.plain
        self.turned = torch.nn.Parameter(base.t())
        self.columns = torch.nn.Parameter(base[:, 1:3])
        self.small = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
        self.scalar = torch.nn.Parameter(torch.tensor(7.0))
        self.none = torch.nn.Parameter(torch.empty(0, 5))
        self.image = torch.nn.Parameter(
            torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last)
        )
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("steps", torch.tensor(5), persistent=False)
        self.register_buffer("waves", torch.tensor([1 + 2j]))
        self.register_buffer("wide", torch.ones(1).expand(7))


def seen(module: torch.nn.Module) -> dict[str, object]:
    """Everything about the tensors of a module but where they are."""
    named = [*module.named_parameters(remove_duplicate=False)]
    named += module.named_buffers(remove_duplicate=False)
    return {
        name: (tensor.tolist(), tensor.dtype, tensor.shape, tensor.stride(), id(tensor))
        for name, tensor in named
    }


def places(module: torch.nn.Module) -> list[int]:
    return [tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers())]


def test_everything_comes_and_goes_as_it_is(device):
    module = Everything()
    before, home = seen(module), places(module)
    with There(module, device):
        assert seen(module) == before
        assert module.tied is module.plain
        moved = [tensor for tensor in module.parameters() if tensor.numel()]
        assert all(tensor.data_ptr() not in home for tensor in moved)
        shared = module.turned.untyped_storage().data_ptr()
        assert module.columns.untyped_storage().data_ptr() == shared, "they share memory there, too"
        assert module.wide.untyped_storage().nbytes() == 4, "no more than it has"
    assert seen(module) == before and places(module) == home


def test_a_device_takes_each_byte_once(device):
    module = torch.nn.ModuleList([torch.nn.Linear(64, 64, bias=False) for _ in range(2)])
    module[1].weight = module[0].weight
    module.register_buffer("view", module[0].weight.detach()[3:9])
    assert Placement(module, device).size_bytes == 64 * 64 * 4


def test_what_was_edited_there_is_kept(device):
    module = Everything()
    with There(module, device), torch.no_grad():
        module.plain.mul_(2.0)
        module.steps.add_(1)
    assert module.plain[0, 1] == 2.0 and module.steps == 6
    assert module.columns[0, 0] == 1.0


def test_what_the_user_replaced_there_is_his(device):
    module = Everything()
    with There(module, device):
        module.plain.data = torch.full((4, 6), 9.0)
        module.small = torch.nn.Parameter(torch.zeros(3))
        module.new = torch.nn.Parameter(torch.ones(2))
    assert (module.plain == 9.0).all() and (module.small == 0).all() and (module.new == 1).all()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda data: data.t(), id="turned"),
        pytest.param(lambda data: data[:3], id="fewer rows"),
        pytest.param(lambda data: data.reshape(3, 8), id="reshaped"),
        pytest.param(lambda data: data.view(torch.int32), id="another type"),
    ],
)
def test_another_view_of_its_memory_is_his_too(device, change):
    """It goes to the host as it is, and the memory there is free."""
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.arange(24.0).reshape(4, 6), requires_grad=False)
    expected = change(module.weight.data.clone())
    with There(module, device):
        module.weight.data = change(module.weight.data)
    assert torch.equal(module.weight.data, expected)
    device.release_cached()
    assert device.allocated_bytes() == 0


def test_tensors_that_changed_places_there_leave_it(device):
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    first, second = (layer.weight.detach().clone() for layer in module)
    with There(module, device):
        module[0].weight.data, module[1].weight.data = module[1].weight.data, module[0].weight.data
    assert torch.equal(module[0].weight, second) and torch.equal(module[1].weight, first)
    device.release_cached()
    assert device.allocated_bytes() == 0


def test_what_is_replaced_while_a_part_is_there_is_used_and_stays(device):
    module = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    other = copy.deepcopy(module).half()
    at = torch.ones(1, 64).half()
    with There(module, device, room_bytes=3 * 64 * 64 * 4):
        module.half()
        assert torch.equal(module(at), other(at))
    assert torch.equal(module(at), other(at))


def test_what_is_larger_than_its_part_is_refused_and_stays(device):
    module = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    other = copy.deepcopy(module).double()
    at = torch.ones(1, 64).double()
    with There(module, device, room_bytes=3 * 64 * 64 * 4):
        module.double()
        for _ in range(2):
            with pytest.raises(ArgumentRefused, match="offload"):
                module(at)
    assert torch.equal(module(at), other(at))


def test_a_module_that_is_there_in_part_has_no_cycle_through_us(device):
    module = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(3)))
    gc.collect()
    gc.disable()
    try:
        There(module, device, room_bytes=2 * 64 * 64 * 4).__enter__()
        module(torch.ones(1, 64))
        known = weakref.ref(module)
        del module
        assert known() is None
        device.release_cached()
        assert device.allocated_bytes() == 0
    finally:
        gc.enable()


def test_a_module_that_was_cast_there_stays_cast(device):
    module = torch.nn.Linear(8, 8)
    with There(module, device):
        module.half()
    assert module.weight.dtype is torch.float16
    with There(module, device):
        assert module.weight.dtype is torch.float16
    assert module.weight.dtype is torch.float16


def test_a_copy_that_is_made_there_is_a_module_of_its_own(device):
    module = Everything()
    with There(module, device):
        other = copy.deepcopy(module)
        with torch.no_grad():
            other.plain.zero_()
    assert module.plain[0, 1] == 1.0 and other.plain[0, 1] == 0.0


def test_under_inference_mode_it_moves_as_well(device):
    module = torch.nn.Linear(8, 8)
    with torch.inference_mode(), There(module, device):
        module(torch.ones(1, 8))
    with torch.no_grad():
        module.weight.add_(1.0)
    module(torch.ones(1, 8)).sum().backward()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(3, device="meta"),
        torch.sparse_coo_tensor(
            torch.tensor([[0]]), torch.tensor([1.0]), (2,), check_invariants=True
        ),
    ],
    ids=["meta", "sparse"],
)
def test_what_has_no_memory_is_refused_by_name(device, tensor):
    module = torch.nn.Module()
    module.register_buffer("odd", tensor)
    with pytest.raises(ArgumentRefused, match="odd"):
        Placement(module, device)


class Doubled(torch.Tensor):
    """A tensor subclass that is made of another tensor: twice that."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Doubled:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(func(args[0].inner))
        plain = [one.inner * 2 if isinstance(one, cls) else one for one in args]
        return func(*plain, **(kwargs or {}))


def test_a_tensor_subclass_comes_as_what_it_is_and_goes_back(device):
    module = torch.nn.Linear(4, 4, bias=False)
    module.weight = torch.nn.Parameter(Doubled(torch.ones(4, 4)), requires_grad=False)
    weight, home = module.weight, module.weight.inner.data_ptr()
    with There(module, device) as placement:
        assert placement.size_bytes == 512
        assert type(module.weight) is type(weight) and module.weight is weight
        assert module.weight.inner.data_ptr() != home
        assert (module(torch.ones(1, 4)) == 8.0).all()
        module.weight.inner.add_(1.0)
    assert module.weight is weight and weight.inner.data_ptr() == home
    assert (module(torch.ones(1, 4)) == 16.0).all(), "edited there"


def test_hooks_and_references_that_others_have_go_on(device):
    module = torch.nn.Linear(4, 4)
    weight, calls = weakref.ref(module.weight), []
    module.register_forward_hook(lambda *_: calls.append(1))
    with There(module, device):
        module(torch.ones(1, 4))
        assert weight() is module.weight
    assert calls == [1]


def test_accelerate_hooks_that_are_there_already_go_on(device):
    from accelerate.hooks import ModelHook, add_hook_to_module

    calls = []

    class Counts(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            calls.append(type(module).__name__)
            return args, kwargs

    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    for part in module:
        add_hook_to_module(part, Counts())
    want = module(torch.ones(1, 64))
    hooked = module[1].forward
    with There(module, device, room_bytes=64 * 64 * 4 + 4096) as placement:
        assert placement.partial
        assert torch.equal(module(torch.ones(1, 64)), want)
    assert calls == ["Linear"] * 4 and module[1].forward is hooked


def test_a_compiled_module_goes_on_without_compiling_again(device):
    module = torch.nn.Linear(8, 8)
    compiled = 0

    def backend(graph, inputs):
        nonlocal compiled
        compiled += 1
        return graph.forward

    fast = torch.compile(module, backend=backend)
    x = torch.ones(1, 8)
    want = fast(x)
    for _ in range(3):
        with There(module, device):
            assert torch.equal(fast(x), want)
        assert torch.equal(fast(x), want)
    assert compiled == 1


class Deep(torch.nn.Module):
    """Layers with tensors beside them, one of them tied to the head."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.offset = torch.nn.Parameter(torch.randn(width))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth))
        self.head = torch.nn.Linear(width, width, bias=False)
        self.head.weight = self.layers[-1].weight
        self.register_buffer("shift", torch.randn(width), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.offset + self.shift
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def staying(module: Deep) -> list[str]:
    """The layers that run without being brought."""
    return [name for name, part in module.layers.named_children() if "forward" not in vars(part)]


LAYER_BYTES = 32 * 32 * 4 + 512


class TestTooLarge:
    @pytest.mark.parametrize("layers", range(2, 4))
    def test_as_much_as_fits_stays_and_the_rest_takes_turns(self, device, layers):
        module, x = Deep(), torch.randn(2, 32)
        want = module(x)
        room = 1024 + layers * LAYER_BYTES
        with There(module, device, room) as placement:
            assert placement.partial and placement.size_bytes <= room
            for _ in range(2):
                assert torch.equal(module(x), want)
                assert not any(tensor.is_meta for tensor in module.parameters())
            staying = [
                n for n, part in module.layers.named_children() if "forward" not in vars(part)
            ]
            assert staying == [str(n) for n in range(layers - 1)]
        assert torch.equal(module(x), want)
        assert not any("forward" in vars(part) for part in module.modules())

    def test_names_are_exact(self, device):
        """`layers.1` is no beginning of `layers.10`."""
        module = Deep(depth=12)
        with There(module, device, 1024 + 3 * LAYER_BYTES):
            assert staying(module) == ["0", "1"]

    def test_what_raises_in_its_forward_leaves_everything_home(self, device):
        module = Deep()
        home = places(module)
        with There(module, device, 1024 + 2 * LAYER_BYTES):
            part = module.layers[3]
            at_work: list[int] = []
            part.register_forward_pre_hook(lambda *_: _stop(at_work))
            with pytest.raises(KeyboardInterrupt):
                module(torch.randn(2, 32))
            assert part.weight.data_ptr() in home and at_work == [1]
            part._forward_pre_hooks.clear()
            module(torch.randn(2, 32))
        assert places(module) == home

    def test_a_part_that_is_around_others_has_its_place_beside_them(self, device):
        class Around(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = torch.nn.Parameter(torch.randn(64, 64))
                self.inner = torch.nn.Linear(64, 64)

            def forward(self, x):
                return self.inner(x @ self.scale) @ self.scale

        module, x = (
            torch.nn.Sequential(torch.nn.Linear(64, 64), Around(), Around()),
            torch.randn(2, 64),
        )
        want = module(x)
        with There(module, device, 2 * (64 * 64 * 4 + 512) + 512) as placement:
            assert placement.partial and torch.equal(module(x), want)

    def test_it_is_refused_by_the_name_of_the_part_that_does_not_fit(self, device):
        module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(64, 64))
        with pytest.raises(BudgetExceeded, match="module '1' alone"):
            Placement(module, device, 4096)


def _stop(noted: list[int]) -> None:
    noted.append(1)
    raise KeyboardInterrupt
