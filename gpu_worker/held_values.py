"""What a segment holds that is not a plain tensor: extra state, and tensors made of tensors.

Each is an entry whose bytes are an encoded value (`shm_store.plain_values`). The tensors in it are
entries of their own, INNER ones behind all others, and the value has their numbers: so they are
zero-copy, and aliased, as any other tensor.

Rules
- A value is made anew for each state dict: nobody sees what another does to his. The bytes of the
  tensors in it are this process's one map, as always.
- A segment may lie. It may name classes (see `class_names`) of three kinds only: tensors that are
  made of tensors, enums, and dataclasses. No other function of theirs is called than
  `__tensor_unflatten__`; dataclasses are filled without their `__init__`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gpu_worker import compound
from gpu_worker.class_names import class_name, find_class
from gpu_worker.wrappers import flatten, is_wrapper, unflatten
from shm_store.errors import SegmentRefused, TensorRefused, WeightCacheError
from shm_store.manifest import WRAPPED, Kind, Manifest, TensorEntry
from shm_store.plain_values import ValueRefused, decode_value, encode_value

_NAMED: dict[str, object] = {
    str(value): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format)
}
"""What torch has one of each, by how it prints. An older torch lacks some."""


class _Form(NamedTuple):
    """How a tensor of a kind that torch itself makes of others is taken apart, and made."""

    knows: Callable[[torch.Tensor], bool]
    made_of: Callable[[torch.Tensor], dict[str, Any]]
    make: Callable[[dict[Any, Any]], torch.Tensor]


_FORMS = {
    "sparse": _Form(compound.is_sparse, compound.sparse_made_of, compound.sparse),
    "quantised": _Form(compound.is_quantised, compound.quantised_made_of, compound.quantised),
    "odd": _Form(compound.is_odd, compound.odd_made_of, compound.odd),
}


def is_made_of_others(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is held by what it is made of, and not by its bytes."""
    if tensor.is_nested:
        return False
    return is_wrapper(tensor) or any(form.knows(tensor) for form in _FORMS.values())


# --- into a segment -----------------------------------------------------------------------------


class Parts:
    """Encodes the values of one state dict, and collects the tensors in them.

    Attributes:
        tensors: those, and how each is called. Its number is its place here, counted on from what
            the state dict names itself.
    """

    def __init__(
        self, names: list[str], check: Callable[[torch.Tensor], tuple[str, str] | None]
    ) -> None:
        """Begin behind the entries of these names.

        Args:
            check: says why a tensor cannot be held, and what to do; None if it can.
        """
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self._first = len(names)
        self._names = set(names)
        self._check = check
        self._numbers: dict[tuple[object, ...], int] = {}

    def encode(self, name: str, value: object) -> bytes:
        """Return the bytes of the value that the state dict calls `name`.

        Raises:
            TensorRefused: it cannot be held; says what in it, and why.
        """
        whole = value if isinstance(value, torch.Tensor) else None

        def take_apart(one: object, key: bool) -> tuple[str, object] | None:
            if isinstance(one, torch.Tensor):
                if key:
                    raise ValueRefused("it is a tensor in a set or as a key, which equals no other")
                # The entry itself is no parameter when it comes out, as no other entry is.
                return self._tensor(name, one, is_parameter=one is not whole and _is_parameter(one))
            return _take_apart(one)

        try:
            return encode_value(value, take_apart)
        except ValueRefused as refused:
            why = f"{refused.why}, at {refused.path} of it" if refused.path else refused.why
            remedy = refused.remedy or "leave it out of the state dict"
            raise TensorRefused(name, why, remedy=remedy) from refused

    def _tensor(self, name: str, tensor: torch.Tensor, is_parameter: bool) -> tuple[str, object]:
        if not is_made_of_others(tensor):
            return "tensor", [self._number(name, tensor), is_parameter]
        if not is_wrapper(tensor):
            form = next(name for name, form in _FORMS.items() if form.knows(tensor))
            return form, _FORMS[form].made_of(tensor) | {"parameter": is_parameter}
        kind = class_name(type(tensor))
        if not callable(getattr(type(tensor), "__tensor_unflatten__", None)):
            raise ValueRefused(
                f"its class {kind} has no __tensor_unflatten__",
                remedy="make a plain tensor of it, or load these weights yourself",
            )
        inner, context = _flattened(tensor, kind)
        return "wrapper", {
            "class": kind,
            "inner": inner,
            "context": context,
            "size": tensor.size(),
            "strides": tensor.stride(),
            "parameter": is_parameter,
        }

    def _number(self, name: str, tensor: torch.Tensor) -> int:
        """Return the number of a plain tensor; equal ones of the same bytes have one."""
        refusal = self._check(tensor)
        if refusal is not None:
            raise ValueRefused(refusal[0], remedy=refusal[1])
        same = _identity(tensor)
        number = self._numbers.get(same)
        if number is None:
            number = self._numbers[same] = self._first + len(self.tensors)
            # Behind a character that no checkpoint has in a name; and if one has, it is longer.
            own = f"{name}\0{number}"
            while own in self._names:
                own += "\0"
            self._names.add(own)
            self.tensors.append((own, tensor))
        return number


def _flattened(tensor: torch.Tensor, kind: str) -> tuple[dict[str, torch.Tensor], object]:
    try:
        names, context = flatten(tensor)
        inner = {name: getattr(tensor, name) for name in names}
    except Exception as error:  # whatever its class raises of what it cannot do
        raise ValueRefused(f"{kind} does not say what it is made of: {error}") from error
    for name, part in inner.items():
        if not isinstance(part, torch.Tensor):
            raise ValueRefused(f"{kind} is made of {name}, which is a {type(part).__name__}")
    try:
        made = unflatten(type(tensor), inner, context, tensor.size(), tensor.stride())
    except Exception as error:  # who gets these weights would hear it, again and again
        raise ValueRefused(f"{kind} cannot be made anew of its parts: {error}") from error
    if type(made) is not type(tensor) or made.size() != tensor.size():
        raise ValueRefused(f"{kind} comes out as something else when it is made of its parts")
    return inner, context


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what only the same tensor has. `tensor` has to be kept meanwhile."""
    if not tensor.numel():
        return (id(tensor),)
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def _take_apart(value: object) -> tuple[str, object] | None:
    """Return what a value that is neither Python's own nor a tensor is made of."""
    kind = type(value)
    if kind is torch.Size:
        assert isinstance(value, torch.Size)
        return "size", list(value)
    if kind is torch.device:
        return "device", str(value)
    if kind in (torch.dtype, torch.layout, torch.memory_format):
        return ("torch", str(value)) if _NAMED.get(str(value)) is value else None
    if isinstance(value, enum.Enum):
        if type(value).__members__.get(value.name) is not value:
            return None  # several flags at once
        return "enum", (class_name(kind), value.name)
    if _is_plain_dataclass(kind):
        names = _field_names(kind)
        others = set(getattr(value, "__dict__", ())) - set(names)
        if others or not all(hasattr(value, name) for name in names):
            raise ValueRefused(f"it is a {kind.__name__} whose attributes are not its fields")
        fields = {name: getattr(value, name) for name in names}
        return "dataclass", {"class": class_name(kind), "fields": fields}
    return None


def _field_names(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _is_plain_dataclass(kind: type) -> bool:
    """Say whether its instances are their fields, and ending one runs no code of its own."""
    makes: object = kind.__new__
    plain = makes is object.__new__ and not hasattr(kind, "__del__")
    return dataclasses.is_dataclass(kind) and plain and not issubclass(kind, torch.nn.Module)


# --- out of it ----------------------------------------------------------------------------------


def with_values(
    manifest: Manifest, state: dict[str, torch.Tensor], read: Callable[[TensorEntry], memoryview]
) -> dict[str, Any]:
    """Return the state dict with its values, and without what they are made of.

    Args:
        state: a tensor for every entry of `manifest`, in its order.
        read: returns the bytes of an entry that is an encoded value.

    Raises:
        SegmentRefused: the manifest lies about one of them.
        ClassUnknown: a value is of a class that this process has not imported.
    """
    inner = [state[entry.name] if entry.kind is Kind.INNER else None for entry in manifest.tensors]
    make = _Maker(inner).make
    whole: dict[str, Any] = {}
    made: dict[int, torch.Tensor] = {}
    for entry in manifest.tensors:
        held = state[entry.name]
        if entry.kind is Kind.EXTRA:
            whole[entry.name] = decode_value(_data(entry, read), make)
        elif entry.kind in WRAPPED:
            # What was one tensor under two names has one value, and so is one again.
            if id(held) not in made:
                made[id(held)] = _wrapped(entry, decode_value(_data(entry, read), make))
            whole[entry.name] = made[id(held)]
        elif entry.kind is not Kind.INNER:
            whole[entry.name] = held
    return whole


def _data(entry: TensorEntry, read: Callable[[TensorEntry], memoryview]) -> memoryview:
    if entry.dtype != "U8" or len(entry.shape) != 1 or entry.strides != (1,):
        raise SegmentRefused(f"{entry.name!r} is said to be a value, and is not bytes")
    return read(entry)


def _wrapped(entry: TensorEntry, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise SegmentRefused(f"{entry.name!r} is said to be a tensor, and is none")
    return value


class _Maker:
    """Makes what only torch knows, of the tensors in the same segment."""

    def __init__(self, inner: list[torch.Tensor | None]) -> None:
        self._inner = inner

    def make(self, name: str, made_of: object) -> object:
        """Return the value that `_take_apart`, or `Parts`, has taken apart so."""
        try:
            return self._make(name, made_of)
        except WeightCacheError:
            raise
        except Exception as error:  # whatever a class or torch says of what a segment makes up
            raise SegmentRefused(f"the segment describes no {name}: {error}") from error

    def _make(self, name: str, made_of: object) -> object:
        match name, made_of:
            case "size", list(sizes) if all(type(size) is int for size in sizes):
                return torch.Size(sizes)
            case "device", str(text):
                return torch.device(text)
            case "torch", str(text):
                return _NAMED[text]
            case "enum", (str(kind), str(member)):
                return _checked(kind, _is_enum, "an enum").__members__[member]
            case "dataclass", {"class": str(kind), "fields": dict(fields)}:
                return _dataclass(_checked(kind, _is_plain_dataclass, "a plain dataclass"), fields)
            case "tensor", [number, bool(is_parameter)] if type(number) is int:
                return _as_held(self._tensor(number), is_parameter)
            case "sparse" | "quantised" | "odd", {"parameter": bool(is_parameter), **rest}:
                return _as_held(_FORMS[name].make(rest), is_parameter)
            case "wrapper", {"class": str(kind), "parameter": bool(is_parameter), **rest}:
                found = _checked(kind, _is_wrapper_class, "a tensor that is made of others")
                return _as_held(_wrapper(found, rest), is_parameter)
        raise SegmentRefused(f"the segment describes no {name[:40]!r} that is known here")

    def _tensor(self, number: int) -> torch.Tensor:
        tensor = self._inner[number] if 0 <= number < len(self._inner) else None
        if tensor is None:
            raise SegmentRefused(f"a value is made of tensor {number}, which is none of its parts")
        return tensor


def _wrapper(kind: type, made_of: dict[Any, Any]) -> torch.Tensor:
    match made_of:
        case {
            "inner": dict(inner),
            "context": context,
            "size": torch.Size() as size,
            "strides": tuple(strides),
        } if all(type(step) is int for step in strides):
            pass
        case _:
            raise SegmentRefused(f"the segment does not say what a {kind.__name__} is made of")
    for name, part in inner.items():
        if not isinstance(name, str) or not isinstance(part, torch.Tensor):
            raise SegmentRefused(f"a {kind.__name__} is made of something that is no tensor")
    made = unflatten(kind, inner, context, size, strides)
    if type(made) is not kind or made.size() != size:
        raise SegmentRefused(f"a {kind.__name__} of {list(size)} came out as something else")
    return made


def _as_held(tensor: torch.Tensor, is_parameter: bool) -> torch.Tensor:
    tensor.requires_grad_(False)
    return torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor


def _checked(name: str, is_one: Callable[[type], bool], what: str) -> Any:
    kind = find_class(name)
    if not is_one(kind):
        raise SegmentRefused(f"the segment names {name[:200]!r}, which is not {what}")
    return kind


def _is_enum(kind: type) -> bool:
    return issubclass(kind, enum.Enum)


def _is_wrapper_class(kind: type) -> bool:
    both = ("__tensor_flatten__", "__tensor_unflatten__")
    return issubclass(kind, torch.Tensor) and all(
        callable(getattr(kind, one, None)) for one in both
    )


def _dataclass(kind: Any, fields: dict[Any, Any]) -> object:
    if list(fields) != _field_names(kind):
        raise SegmentRefused(f"a {kind.__name__} has other fields here than in the segment")
    made = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made
