"""The tensors of one module as a device has them: what shares memory here shares it there.

Rules
- Only `.data` is re-pointed: parameters stay the objects that they are, for those who keep them.
- The bytes on the host stay where they are, and are pointed to again. Nothing is copied back but
  what was edited meanwhile.
- What the user replaced meanwhile is his, and is left as it is; on the host, if that is elsewhere.

    Note on edits on the device
    fact: torch counts changes of a tensor in place, but not those that go through its `.data`
    consequence: those are not seen, and lost when the module leaves its device
    choice: the counter; docs/devices.md says how to patch weights so that it survives
    cost: none

    Note on tensor subclasses
    fact: a wrapper knows the device of what it wraps from when it was made
    consequence: to re-point the inner tensors alone would leave it with a wrong one
    choice: another wrapper of the same kind is made over the tensors on the device, and the two are
    swapped, as `Module.to` does it; swapped again, the first is back
    cost: a parameter that something refers to weakly cannot be swapped, and is refused by name
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from gpu_worker.block import Block, Piece
from gpu_worker.device import Device
from gpu_worker.leases import Segment
from gpu_worker.mapping import Buffer
from gpu_worker.read_only import Guard, written_by_use
from gpu_worker.residency import Plan, layout, partial, passes
from gpu_worker.streaming import Streaming
from gpu_worker.tensors import plain_tensors
from gpu_worker.wrappers import flatten, is_wrapper, plain_parts, unflatten
from shm_store.errors import ArgumentRefused, BudgetExceeded, WeightsMissing, listed
from shm_store.keys import Key
from shm_store.report import size_text


@dataclass(slots=True)
class _Storage:
    """Memory on the host that one or more tensors lie in, and where it goes on the device."""

    memory: torch.UntypedStorage
    offset_bytes: int = 0
    there: torch.Tensor | None = None

    def piece(self, begin: int, size_bytes: int, segment: Segment | None) -> Piece:
        """Return a part of it, to be copied."""
        if segment is not None:
            at = self.memory.data_ptr() - segment.address + begin
            if at >= 0 and at + size_bytes <= segment.size_bytes:
                return Piece(None, segment.fd, at, size_bytes)
        whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(self.memory)
        return Piece(whole[begin : begin + size_bytes], None, 0, size_bytes)


@dataclass(slots=True)
class _Moved:
    """A tensor, what it was on the host, and what it is on the device."""

    name: str
    tensor: torch.Tensor
    home: torch.Tensor
    there: torch.Tensor | None = None
    version: int = 0
    swapped: bool = False
    inner: list[torch.Tensor] = field(default_factory=list)
    in_weights: str | None = None
    """Its name in the weights, if it has given up its place on the host: they are to be had again.
    """

    def memories(self) -> list[torch.UntypedStorage]:
        """Return the memory on the host that it lies in, where there is some."""
        plain = [one.untyped_storage() for one in plain_parts(self.home)]
        return [memory for memory in plain if memory.nbytes()]


class Group:
    """Tensors that go to a device together, and the memory they lie in.

    Attributes:
        size_bytes: what they take there, from `offset_bytes` of a block on.
    """

    def __init__(
        self,
        device: Device,
        moved: list[_Moved],
        offset_bytes: int = 0,
        segment: Segment | None = None,
    ) -> None:
        """Describe them.

        Args:
            segment: what they lie in on the host. They lie in a block in the same way.
        """
        self._device = device
        self._moved = moved
        self._offset_bytes = offset_bytes
        self._segment = segment
        self._storages: dict[int, _Storage] = {}
        self._order: list[_Storage] = []
        self.size_bytes = self._taken_bytes = self._lay_out()

    def _lay_out(self) -> int:
        """Give all memory its place, and return the bytes that takes."""
        self._storages = {
            memory.data_ptr(): _Storage(memory) for one in self._moved for memory in one.memories()
        }
        self._order = list(self._storages.values())
        if self._segment is not None:
            for storage in self._order:
                storage.offset_bytes = storage.memory.data_ptr() - self._segment.address
            return self._segment.size_bytes
        offsets, size_bytes = layout(storage.memory.nbytes() for storage in self._order)
        for storage, offset in zip(self._order, offsets, strict=True):
            storage.offset_bytes = self._offset_bytes + offset
        return size_bytes

    def renew(self) -> None:
        """Take what the user has replaced on the host since, in place of what was there.

        Raises:
            ArgumentRefused: that is larger, and has no room here. It is on the host.
        """
        replaced = [
            one
            for one in self._moved
            if not is_wrapper(one.tensor) and not _same(one.tensor, one.home)
        ]
        for one in replaced:
            one.home = one.tensor.detach()
        if replaced:
            self._taken_bytes = self._lay_out()
        if self._taken_bytes > self.size_bytes:
            raise ArgumentRefused(
                f"{listed([one.name for one in self._moved])}: larger now than what was there, "
                "and only a part of the module fits on the device",
                remedy="offload it, and lock it again: it is divided anew then",
            )

    def steps(self, block: Block, segment: Segment | None = None) -> Iterator[None]:
        sizes = [storage.memory.nbytes() for storage in self._order]
        for batch in passes(sizes):
            for index, begin, size_bytes in batch:
                storage = self._order[index]
                piece = storage.piece(begin, size_bytes, segment)
                block.fill(storage.offset_bytes + begin, piece)
            yield

    def point_there(self, block: Block) -> None:
        """Have every tensor lie in `block`, which has all the bytes."""
        with torch.inference_mode(False), torch.no_grad():
            for storage in self._order:
                storage.there = block.view(storage.offset_bytes, storage.memory.nbytes())
            for moved in self._moved:
                moved.there = self._there(moved.home)
            for moved in self._moved:
                assert moved.there is not None
                if is_wrapper(moved.tensor):
                    _swap(moved, moved.there)
                    moved.swapped = True
                else:
                    moved.tensor.data = moved.there
                moved.inner = plain_parts(moved.tensor)
                moved.version = _version(moved)
        for storage in self._order:
            storage.there = None

    def point_home(self) -> None:
        """Have every tensor lie on the host again. May be called at any time, more than once."""
        lent = {
            plain.untyped_storage().data_ptr()
            for moved in self._moved
            if moved.there is not None
            for plain in plain_parts(moved.there)
        }
        with torch.inference_mode(False), torch.no_grad():
            for moved in self._moved:
                there, moved.there = moved.there, None
                if there is not None:
                    self._point_home(moved, there, lent)

    def there(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what has memory on the device, by name."""
        yield from ((moved.name, plain) for moved in self._moved for plain in moved.inner)

    def abandon(self) -> list[torch.Tensor]:
        kept = []
        with torch.inference_mode(False), torch.no_grad():
            for moved in self._moved:
                there, moved.there = moved.there, None
                if there is not None and moved.swapped:
                    _swap(moved, there)
                    moved.there = None
                    kept.append(there)
                elif there is not None:
                    kept += [there, moved.tensor.data]
                    moved.tensor.data = moved.home
        return kept

    @property
    def given_up(self) -> bool:
        return any(moved.in_weights is not None for moved in self._moved)

    def give_up(self, state: dict[str, torch.Tensor]) -> None:
        names = {_place(tensor): name for name, tensor in state.items() if tensor.numel()}
        for moved in self._moved:
            name = None if moved.swapped else names.get(_place(moved.home))
            if name is not None:
                moved.in_weights = name
                moved.home = torch.empty(0, dtype=moved.home.dtype, device="cpu")
        self._storages.clear()
        self._order.clear()

    def take_back(self, state: dict[str, torch.Tensor]) -> None:
        names = [moved.in_weights for moved in self._moved if moved.in_weights is not None]
        lacking = tuple(name for name in names if name not in state)
        if lacking:
            raise WeightsMissing(Key(""), lacking, ())
        with torch.inference_mode(False), torch.no_grad():
            for moved in self._moved:
                if moved.in_weights is not None:
                    moved.tensor.data = state[moved.in_weights]
                    moved.in_weights = None

    def _point_home(self, moved: _Moved, there: torch.Tensor, lent: set[int]) -> None:
        """Have one tensor lie on the host again.

        Args:
            lent: where the memory on the device begins that this group has pointed to.
        """
        tensor = moved.tensor
        if moved.swapped:
            moved.swapped = False
            if _version(moved) != moved.version:
                _copy_back(there_now=tensor, home=there)
            _swap(moved, there)
            moved.there = None  # what was swapped out is what is on the device
        elif not _same(tensor, there):  # the user's own, by now
            if tensor.device.type != "cpu" or tensor.untyped_storage().data_ptr() in lent:
                tensor.data = tensor.data.to("cpu", copy=True)
        else:
            if _version(moved) != moved.version and moved.in_weights is None:
                _copy_back(there_now=tensor, home=moved.home)
            tensor.data = moved.home
        moved.inner = []

    def _there(self, home: torch.Tensor) -> torch.Tensor:
        """Return the twin of a tensor on the device, with its strides."""
        if is_wrapper(home):
            names, context = flatten(home)
            inner = {name: self._there(getattr(home, name)) for name in names}
            return unflatten(type(home), inner, context, home.size(), home.stride())
        memory, device = home.untyped_storage(), self._device.torch_device
        if not memory.nbytes():
            return torch.empty_strided(home.size(), home.stride(), dtype=home.dtype, device=device)
        whole = self._storages[memory.data_ptr()].there
        assert whole is not None
        empty = torch.empty(0, dtype=home.dtype, device=device)
        return empty.set_(
            whole.untyped_storage(), home.storage_offset(), home.size(), home.stride()
        )


class Placement:
    """Takes one module to a device and back. Made while it is on the host; used by one thread.

    Attributes:
        size_bytes: what it takes on the device, in one block of its own.
        partial: some of it is brought there for each use, see `streaming`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device: Device,
        room_bytes: int | None = None,
        shared: Segment | None = None,
        guard: Guard | None = None,
    ) -> None:
        """Look at all parameters and buffers of `module`, non-persistent ones included.

        Args:
            room_bytes: what it may take; None lets it have what it needs.
            shared: what lies in this is to lie in a block that others have, too.
            guard: watches over that as long as it is there.

        Raises:
            ArgumentRefused: some are on the meta device, or have no plain memory.
            BudgetExceeded: there is not room for one part of it at a time.
        """
        moved = {
            id(tensor): _Moved(name, tensor, tensor.detach())
            for name, tensor in _unique(module)
            if tensor.device.type in ("cpu", "meta")
        }
        unfit = [one.name for one in moved.values() if not _can_move(one.home)]
        if unfit:
            raise ArgumentRefused(
                f"{len(unfit)} tensor(s) of the module have no memory that could be moved: "
                f"{listed(unfit)}",
                remedy="materialise what is on the meta device; make sparse tensors dense, and "
                "dequantise what has a legacy quantised dtype; or load it with device='cpu'",
            )
        own: list[_Moved] = []
        others: list[_Moved] = []
        written = set() if shared is None else set(map(_memory, written_by_use(module)))
        for one in moved.values():
            apart = shared is None or not _lies_in(one, shared) or _memory(one.tensor) in written
            (own if apart else others).append(one)
        self._guard = guard
        self._shared = Group(device, others, segment=shared) if others else None
        self._stay = Group(device, own)
        self.moved_bytes = self.size_bytes = self._stay.size_bytes
        self._streaming: Streaming | None = None
        self._kept: Block | None = None
        """What is shared, also if no tensor of the module lies in it."""
        if room_bytes is not None and room_bytes < self.size_bytes:
            parts = _parts(module, moved)
            sizes = [(part.name, part.added_bytes, part.own_bytes) for part in parts]
            plan = partial(sizes, room_bytes)
            if plan is None:
                raise _too_small(parts, room_bytes, device.name)
            self._divide(device, parts, plan)

    @property
    def partial(self) -> bool:
        return self._streaming is not None

    def _divide(self, device: Device, parts: list[_Part], plan: Plan) -> None:
        """Have only those parts stay on the device that the plan says, the others come and go."""
        staying: dict[int, _Moved] = {}
        for part in parts:
            if part.name in plan.stay:
                staying |= {id(one): one for one in part.moved}
        self._stay = Group(device, list(staying.values()))
        self.moved_bytes = self._stay.size_bytes
        streams = []
        for part in parts:
            coming = [one for one in part.moved if id(one) not in staying]
            if coming:
                offset = self._stay.size_bytes + plan.offsets_bytes[part.name]
                streams.append((part.module, Group(device, coming, offset)))
        self.size_bytes = self._stay.size_bytes + plan.beside_bytes
        self._streaming = Streaming(streams)

    def steps(self, block: Block, segment: Segment | None = None) -> Iterator[None]:
        """Copy everything that stays into `block`, a bounded part at each step.

        Args:
            segment: what lies in its map is read from it, so that no page of the map need be there.
        """
        return self._stay.steps(block, segment)

    def point_there(self, block: Block | None, shared: Block | None = None) -> None:
        """Have every tensor that stays lie in `block`, or in the one that is shared."""
        if self._shared is not None:
            assert shared is not None
            self._shared.point_there(shared)
            if self._guard is not None:
                self._guard.begin(self._shared.there())
        self._kept = shared
        if block is not None:
            self._stay.point_there(block)
            if self._streaming is not None:
                self._streaming.begin(block)

    @property
    def given_up(self) -> bool:
        """Whether something of it has no place on the host."""
        return any(group.given_up for group in self._groups())

    def _groups(self) -> list[Group]:
        return [self._stay] if self._shared is None else [self._shared, self._stay]

    def give_up(self, weights: Buffer) -> None:
        """Keep nothing on the host of what lies in `weights`. It is on the device, whole.

        What lies elsewhere stays: it is this process's own. So does what is made of other tensors.
        """
        for group in self._groups():
            group.give_up(plain_tensors(weights))

    def take_back(self, weights: Buffer) -> None:
        """Have everything lie on the host again, what was given up in `weights`.

        Raises:
            WeightsMissing: these lack some of it.
        """
        for group in self._groups():
            group.take_back(plain_tensors(weights))

    def abandon(self) -> list[object]:
        """Have every tensor lie on the host again, whatever was edited; return what is there.

        In a forked child, where nothing can be done with these, dropping them included.
        """
        if self._streaming is not None:
            self._streaming.end()
        if self._guard is not None:
            self._guard.end()
        kept, self._kept = self._kept, None
        return [kept, *(tensor for group in self._groups() for tensor in group.abandon())]

    def point_home(self) -> None:
        """Have every tensor lie on the host again. May be called at any time, more than once.

        What was given up has no elements then.
        """
        if self._guard is not None:
            self._guard.end()
        if self._streaming is not None:
            self._streaming.end()
        for group in self._groups():
            group.point_home()
        self._kept = None


def _memory(tensor: torch.Tensor) -> int:
    """Return where the memory begins that a tensor is made of; 0 if it has none."""
    return next((one.untyped_storage().data_ptr() for one in plain_parts(tensor)), 0)


def _lies_in(moved: _Moved, segment: Segment) -> bool:
    """Say whether all memory of a tensor is in a segment, and there is some."""
    end = segment.address + segment.size_bytes
    memories = moved.memories()
    inside = [segment.address <= one.data_ptr() <= end - one.nbytes() for one in memories]
    return bool(inside) and all(inside)


@dataclass(frozen=True, slots=True)
class _Part:
    """A module without its children: its tensors, what they take, and what of that is not counted
    with an earlier one.
    """

    name: str
    module: torch.nn.Module
    moved: list[_Moved]
    own_bytes: int
    added_bytes: int


def _parts(module: torch.nn.Module, moved: dict[int, _Moved]) -> list[_Part]:
    """Return all modules in `module`, each once, in its order."""
    parts, counted = [], set()
    for name, part in module.named_modules():
        tensors = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        own = [moved[id(tensor)] for tensor in tensors if id(tensor) in moved]
        memories = {memory.data_ptr(): memory.nbytes() for one in own for memory in one.memories()}
        added = [size for address, size in memories.items() if address not in counted]
        counted |= set(memories)
        sizes = layout(memories.values())[1], layout(added)[1]
        parts.append(_Part(name, part, own, *sizes))
    return parts


def _too_small(parts: list[_Part], room_bytes: int, device: str) -> BudgetExceeded:
    largest = max(parts, key=lambda part: part.own_bytes)
    return BudgetExceeded(
        f"module {largest.name!r} alone takes {size_text(largest.own_bytes)}, and there is room on "
        f"{device} for {size_text(room_bytes)}",
        needed_bytes=largest.own_bytes,
        free_bytes=room_bytes,
        possible_bytes=room_bytes,
        remedy="raise the limit of the device's pool (`weight-cache status` names it), or reserve "
        "less; or evict it, and load it with device='cpu'",
    )


def _unique(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and buffer once, under its first name."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what two tensors have in common only if they are the same bytes in the same form."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _can_move(tensor: torch.Tensor) -> bool:
    """Say whether a tensor, or all that a wrapper is made of, is plain memory."""
    if is_wrapper(tensor):
        return all(_can_move(getattr(tensor, name)) for name in flatten(tensor)[0])
    strided = tensor.layout is torch.strided and not tensor.is_quantized
    return strided and not tensor.is_meta


def _same(tensor: torch.Tensor, there: torch.Tensor) -> bool:
    """Say whether two tensors are the same view of the same memory."""
    return (
        tensor.data_ptr() == there.data_ptr()
        and tensor.dtype == there.dtype
        and tensor.shape == there.shape
        and tensor.stride() == there.stride()
    )


def _version(moved: _Moved) -> int:
    """Return how often a tensor was changed in place, what it wraps included."""
    own = [] if any(one is moved.tensor for one in moved.inner) else [moved.tensor]
    return sum(one._version for one in (*own, *moved.inner))


def _copy_back(there_now: torch.Tensor, home: torch.Tensor) -> None:
    """Bring an edit to the host, where it is this process's own."""
    for changed, kept in zip(plain_parts(there_now), plain_parts(home), strict=True):
        if changed.shape == kept.shape:
            kept.copy_(changed)


def _swap(moved: _Moved, other: torch.Tensor) -> None:
    """Have the object be `other`, and the other way round."""
    tensor = moved.tensor
    if isinstance(tensor, torch.nn.Parameter) and not isinstance(other, torch.nn.Parameter):
        other = torch.nn.Parameter(other, tensor.requires_grad)
    try:
        torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ArgumentRefused(
            f"{moved.name} cannot be moved: {error}",
            remedy="keep no weak reference to it, and run no backward pass through it",
        ) from error
    moved.there = other
