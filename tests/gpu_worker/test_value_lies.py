"""Segments whose values lie: a typed error or a value, and no code of anybody's."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import msgspec
import pytest
import torch

from gpu_worker.tensors import tensors
from shm_store.errors import ClassUnknown, SegmentRefused
from shm_store.manifest import GroupEntry, Kind, TensorEntry
from tests.gpu_worker import wrapped
from tests.gpu_worker.sealed import mapped, seal_manifest
from tests.gpu_worker.wrapped import Scaled

OTHER = 12
INTS, SCALES = 1, 2
"""Entries 1 and 2 of a segment that lies: 24 bytes as int8, 4 floats."""


def lie(tree, kind=Kind.WRAPPED, **changed: Any):
    """Return a segment whose first entry is said to be a value, and is `tree`."""
    data = msgspec.msgpack.encode([tree, []])
    facts: dict[str, Any] = {
        "dtype": "U8",
        "shape": (len(data),),
        "strides": (1,),
        "beyond": 3,
    } | changed
    listed = [
        TensorEntry("w", facts["dtype"], facts["shape"], facts["strides"], 0, 0, kind),
        TensorEntry("\x001", "I8", (4, 6), (6, 1), 1, 0, Kind.INNER),
        TensorEntry("\x002", "F32", (4, 1), (1, 1), 2, 0, Kind.INNER),
    ]
    groups = [GroupEntry(0, len(data)), GroupEntry(4096, 24), GroupEntry(4096 + 64, 16)]
    return seal_manifest(listed, groups, 8192, beyond=facts["beyond"], front=data)


def other(name, made_of):
    return [OTHER, name, made_of]


def fields(**pairs):
    return [4, *(one for pair in pairs.items() for one in pair)]


def tensor_ref(number, is_parameter=False):
    return other("tensor", [0, number, is_parameter])


def size(*sizes):
    return other("size", [0, *sizes])


def name_of(kind):
    return f"tests.gpu_worker.wrapped:{kind}"


def wrapper(**changed):
    """Return the tree of a `Scaled`, a true one if nothing is changed."""
    facts = {
        "class": name_of("Scaled"),
        "inner": fields(integers=tensor_ref(INTS), scale=tensor_ref(SCALES)),
        "context": None,
        "size": size(4, 6),
        "strides": [1, 6, 1],
        "parameter": False,
    }
    return other("wrapper", fields(**(facts | changed)))


def test_the_tree_that_the_lies_are_made_of_is_true():
    with mapped(lie(wrapper())) as buffer:
        held = tensors(buffer)["w"]
        assert type(held) is Scaled and held.shape == (4, 6)


LIES = {
    "a_function": wrapper(**{"class": "os:system"}),
    "a_plain_class": wrapper(**{"class": "collections:OrderedDict"}),
    "a_process": wrapper(**{"class": "subprocess:Popen"}),
    "a_tensor_that_is_plain": wrapper(**{"class": "torch:Tensor"}),
    "a_parameter": wrapper(**{"class": "torch.nn.parameter:Parameter"}),
    "a_class_that_says_not_how": wrapper(**{"class": name_of("OneWay")}),
    "a_class_that_is_no_tensor": wrapper(**{"class": name_of("Pretends")}),
    "a_class_that_is_never_taken_apart": wrapper(**{"class": name_of("OnlyMade")}),
    "a_class_that_is_a_number": wrapper(**{"class": 3}),
    "a_maker_of_another": wrapper(
        **{"class": name_of("Other"), "inner": fields(held=tensor_ref(INTS))}
    ),
    "inner_that_lacks": wrapper(inner=fields(integers=tensor_ref(INTS))),
    "inner_that_is_none": wrapper(inner=fields(integers=None, scale=tensor_ref(SCALES))),
    "inner_that_is_a_list": wrapper(inner=[0, tensor_ref(INTS)]),
    "inner_with_a_number_as_name": wrapper(inner=[4, 3, tensor_ref(INTS)]),
    "another_size": wrapper(size=size(400, 600)),
    "a_size_of_text": wrapper(size=other("size", [0, "4"])),
    "a_size_below_zero": wrapper(size=size(-4, 6)),
    "no_size": wrapper(size=None),
    "strides_of_text": wrapper(strides=[1, "6", 1]),
    "no_fields": other("wrapper", None),
    "a_part_that_is_not_there": tensor_ref(7),
    "a_part_below_zero": tensor_ref(-1),
    "a_part_that_is_itself": tensor_ref(0),
    "a_part_by_truth": tensor_ref(True),
    "a_part_by_name": tensor_ref("w"),
    "an_unknown_form": other("pickle", b"cos\nsystem\n"),
    "an_enum_that_is_none": other("enum", [1, "collections:OrderedDict", "x"]),
    "an_enum_without_that": other("enum", [1, name_of("Mode"), "mro"]),
    "a_dataclass_that_is_none": other(
        "dataclass", fields(**{"class": "subprocess:Popen", "fields": fields()})
    ),
    "a_dataclass_with_other_fields": other(
        "dataclass",
        fields(**{"class": name_of("Layout"), "fields": fields(tile=1, mode=2, options=3, more=4)}),
    ),
    "a_dataclass_with_fewer_fields": other(
        "dataclass", fields(**{"class": name_of("Layout"), "fields": fields(tile=1, mode=2)})
    ),
    "a_dataclass_that_ends": other(
        "dataclass", fields(**{"class": name_of("Ends"), "fields": fields(path="/lie")})
    ),
    "a_dtype_that_is_none": other("torch", "torch.ones"),
    "a_device_that_is_none": other("device", "nowhere"),
    "sparse_without_parts": other("sparse", fields(parameter=False)),
    "an_odd_dtype_of_another_size": other(
        "odd", fields(dtype=other("torch", "torch.bits16"), integers=tensor_ref(1), parameter=False)
    ),
    "an_odd_dtype_that_is_quantised": other(
        "odd", fields(dtype=other("torch", "torch.qint8"), integers=tensor_ref(1), parameter=False)
    ),
    "quantised_without_parts": other("quantised", fields(parameter=False)),
}


@pytest.mark.parametrize("kind", [Kind.WRAPPED, Kind.EXTRA], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", LIES)
def test_a_value_that_lies_is_refused(name, kind):
    with (
        mapped(lie(LIES[name], kind)) as buffer,
        pytest.raises((SegmentRefused, ClassUnknown)) as caught,
    ):
        tensors(buffer)
    assert not wrapped.made, "what is no tensor that is made of others was called"
    assert "/lie" not in wrapped.ended, "the end of what a segment describes runs its code"
    unknown = name == "a_function"
    assert type(caught.value) is (ClassUnknown if unknown else SegmentRefused)


def test_a_value_that_is_no_tensor_where_one_was_said_to_be_is_refused():
    with mapped(lie([0, 1])) as buffer, pytest.raises(SegmentRefused, match="is none"):
        tensors(buffer)


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "I8"},
        {"dtype": "U8", "shape": (2, 2), "strides": (2, 1)},
        {"shape": (), "strides": ()},
        {"shape": (3,), "strides": (0,)},
        {"shape": (3,)},
        {"shape": (0,)},
        {"beyond": 2},
        {"beyond": 4},
    ],
    ids=str,
)
def test_an_entry_that_cannot_be_a_value_is_refused(changed):
    with mapped(lie(wrapper(), **changed)) as buffer, pytest.raises(SegmentRefused):
        tensors(buffer)


def test_a_manifest_that_hides_its_values_gives_bytes_and_nothing_worse():
    with mapped(lie(wrapper(), beyond=0)) as buffer:
        assert {tensor.dtype for tensor in tensors(buffer).values()} == {
            torch.uint8,
            torch.int8,
            torch.float32,
        }


def test_a_value_that_names_a_part_which_the_state_dict_has_is_refused():
    """Only what is INNER is a part: a plain entry is somebody's own tensor."""
    data = msgspec.msgpack.encode([tensor_ref(1), []])
    listed = [
        TensorEntry("w", "U8", (len(data),), (1,), 0, 0, Kind.EXTRA),
        TensorEntry("a", "F32", (4,), (1,), 1, 0, Kind.TENSOR),
    ]
    fd = seal_manifest(listed, [GroupEntry(0, len(data)), GroupEntry(4096, 16)], 8192, 1, data)
    with mapped(fd) as buffer, pytest.raises(SegmentRefused, match="none of its parts"):
        tensors(buffer)


def compound(form, numbers, **made_of):
    """Return a tensor that torch itself makes of others.

    Its parts are 1: two integers, as they are given; 2: a float; 3: these integers as one index of
    two dimensions; 4: 2 x 3 bytes, signed; 5: two floats.
    """
    data = msgspec.msgpack.encode([other(form, fields(**made_of, parameter=False)), []])
    front = data.ljust(4096, b"\0") + b"".join(one.to_bytes(8, "little") for one in numbers)
    listed = [
        TensorEntry("w", "U8", (len(data),), (1,), 0, 0, Kind.WRAPPED),
        TensorEntry("\x001", "I64", (2,), (1,), 1, 0, Kind.INNER),
        TensorEntry("\x002", "F32", (1,), (1,), 2, 0, Kind.INNER),
        TensorEntry("\x003", "I64", (2, 1), (1, 1), 1, 0, Kind.INNER),
        TensorEntry("\x004", "I8", (2, 3), (3, 1), 3, 0, Kind.INNER),
        TensorEntry("\x005", "F32", (2,), (1,), 4, 0, Kind.INNER),
    ]
    sizes = [16, 4, 6, 8]
    groups = [GroupEntry(4096 + 64 * at, held) for at, held in enumerate(sizes)]
    return seal_manifest(listed, [GroupEntry(0, len(data)), *groups], 8192, 6, front)


def coo(*indices):
    parts = [1, tensor_ref(3), tensor_ref(2)]
    layout = other("torch", "torch.sparse_coo")
    facts = {"layout": layout, "size": size(3, 3), "parts": parts, "coalesced": True}
    return compound("sparse", indices, **facts)


def csr(begin, end, layout="torch.sparse_csr"):
    """One row, in which one value is in the column that is called `begin`."""
    parts = [1, tensor_ref(1), tensor_ref(3), tensor_ref(2)]
    facts = {"layout": other("torch", layout), "size": size(1, 3), "parts": parts}
    return compound("sparse", (begin, end), **facts)


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
def test_indices_that_reach_out_of_a_sparse_tensor_are_refused():
    """torch's kernels would read where they say."""
    with mapped(coo(2, 1)) as buffer:
        assert tensors(buffer)["w"].indices().tolist() == [[2], [1]]
    for fd in (coo(2, 1 << 40), csr(0, 1 << 40), csr(0, 1, "torch.strided")):
        with mapped(fd) as buffer, pytest.raises(SegmentRefused, match="sparse"):
            tensors(buffer)


def quantised(dtype="torch.qint8", integers=4, **facts):
    facts = {"scale": 0.5, "zero": 1} | facts
    held = tensor_ref(integers)
    return compound("quantised", (0, 1), dtype=other("torch", dtype), integers=held, **facts)


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_quantised_tensors_that_lie_are_refused():
    """A dtype of another size would reach out of the bytes, and so would too few scales."""
    channels = {"scale": tensor_ref(5), "zero": tensor_ref(1)}
    for fd in (quantised(), quantised(**channels, axis=0)):
        with mapped(fd) as buffer:
            assert tensors(buffer)["w"].shape == (2, 3)
    lies = [
        quantised("torch.qint32"),
        quantised("torch.quint4x2"),
        quantised("torch.int8"),
        quantised(integers=2),
        quantised(scale="1"),
        quantised(zero=None),
        quantised(**channels),
        quantised(**channels, axis=1),
        quantised(**channels, axis=2),
        quantised(**channels, axis=-2),
        quantised(**(channels | {"scale": tensor_ref(2)}), axis=0),
        quantised(**(channels | {"zero": tensor_ref(2)}), axis=0),
    ]
    for fd in lies:
        with mapped(fd) as buffer, pytest.raises(SegmentRefused, match="quantised"):
            tensors(buffer)


NAMES = st.sampled_from(
    [
        *(name_of(one) for one in ("Scaled", "Around", "Layout", "Mode", "OneWay", "Ends", "x")),
        "os:system",
        "torch:Tensor",
        "torch:Size",
        "builtins:dict",
        "",
    ]
)
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 6), st.text(max_size=3), st.binary(max_size=3), NAMES
)
FORMS = st.sampled_from(
    ("wrapper", "tensor", "size", "dtype", "torch", "device", "enum", "dataclass", "sparse")
)
KEYS = st.sampled_from(
    ("class", "inner", "context", "size", "strides", "parameter", "fields", "integers", "scale")
)


def trees(inner):
    return st.one_of(
        st.builds(lambda tag, items: [tag, *items], st.integers(0, 3), st.lists(inner, max_size=3)),
        st.dictionaries(KEYS, inner, max_size=6).map(lambda pairs: fields(**pairs)),
        st.builds(other, FORMS, inner),
        st.builds(tensor_ref, st.integers(-1, 3), st.booleans()),
        st.builds(lambda sizes: size(*sizes), st.lists(st.integers(-1, 6), max_size=3)),
        st.dictionaries(
            st.sampled_from(["class", "inner", "context", "size", "strides", "parameter"]),
            inner,
            max_size=2,
        ).map(lambda changed: wrapper(**changed)),
        st.builds(
            lambda form, made: other(form, fields(**made, parameter=False)),
            st.sampled_from(["sparse", "quantised", "odd"]),
            st.dictionaries(
                st.sampled_from(
                    ["layout", "parts", "coalesced", "scale", "zero", "axis", "dtype", "integers"]
                ),
                inner,
            ),
        ),
        st.builds(
            lambda kind, made: other("dataclass", fields(**{"class": kind, "fields": made})),
            NAMES,
            inner,
        ),
    )


@hypothesis.settings(max_examples=400, deadline=None)
@hypothesis.given(
    st.recursive(PLAIN, trees, max_leaves=10), st.sampled_from([Kind.EXTRA, Kind.WRAPPED])
)
def test_whatever_a_value_says_it_is_a_value_or_refused(tree, kind):
    with mapped(lie(tree, kind)) as buffer:
        try:
            state = tensors(buffer)
        except (SegmentRefused, ClassUnknown):
            return
        assert list(state) == ["w"]
        assert kind is Kind.EXTRA or isinstance(state["w"], torch.Tensor)


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(st.data())
def test_a_value_with_some_bytes_changed_is_a_value_or_refused(data):
    whole = bytearray(msgspec.msgpack.encode([wrapper(), []]))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    listed = [
        TensorEntry("w", "U8", (len(whole),), (1,), 0, 0, Kind.WRAPPED),
        TensorEntry("\x001", "I8", (4, 6), (6, 1), 1, 0, Kind.INNER),
        TensorEntry("\x002", "F32", (4, 1), (1, 1), 2, 0, Kind.INNER),
    ]
    groups = [GroupEntry(0, len(whole)), GroupEntry(4096, 24), GroupEntry(4096 + 64, 16)]
    with mapped(seal_manifest(listed, groups, 8192, 3, bytes(whole))) as buffer:
        try:
            tensors(buffer)
        except (SegmentRefused, ClassUnknown):
            pass
