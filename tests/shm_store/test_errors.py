"""Errors: whose fault, how the command line ends, and how they travel."""

from __future__ import annotations

import copy
import pickle

import pytest

from shm_store import errors
from shm_store.errors import (
    BY_CODE,
    BudgetExceeded,
    CallerError,
    CoordinatorLost,
    DeviceOutOfMemory,
    DeviceUnavailable,
    DeviceUnknown,
    DrainIncomplete,
    Incomplete,
    InUse,
    InvalidateIncomplete,
    KeyRefused,
    LoadTimeout,
    PeerError,
    PlatformUnsupported,
    ResourceError,
    SourceChanged,
    SourceError,
    SourceMalformed,
    SourceNotOpened,
    SourceUnsupported,
    TensorRefused,
    WeightCacheError,
    WeightsMissing,
    holders_text,
)
from shm_store.keys import RequestId
from shm_store.report import GenerationReport, LeaseReport
from shm_store.wire import Cause, Fail, decode, encode, to_session_decoder

HOLDERS = (
    GenerationReport(
        key="sdxl/unet:bf16",
        generation="0000000000000001-00000007",
        state="READY",
        size_bytes=2 << 30,
        pool="ram",
        pinned=True,
        leases=(LeaseReport(session=3, pid=4711, age_s=1.5),),
        waiting=2,
    ),
)
SHARED_FACTS = ("source", "needed_bytes", "free_bytes", "holders")


def kinds() -> list[type[WeightCacheError]]:
    """Return every class that the module defines, whatever its `code`."""
    return [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, WeightCacheError)
    ]


def example(kind: type[WeightCacheError]) -> WeightCacheError:
    """Return an error of this class with every fact that it can carry."""
    if kind is TensorRefused:
        return TensorRefused("decoder.weight", "a sparse layout", remedy="call to_dense()")
    if kind is WeightsMissing:
        return WeightsMissing("minilm", ("a.weight", "b.bias"), ("c.weight",))
    if kind is InUse or issubclass(kind, Incomplete):
        return kind("held", holders=HOLDERS, remedy="wait")
    if kind is BudgetExceeded:
        return BudgetExceeded("no room", needed_bytes=10 << 30, free_bytes=1, holders=HOLDERS)
    if kind is DeviceOutOfMemory:
        return DeviceOutOfMemory("no block", needed_bytes=10 << 30, free_bytes=7)
    if issubclass(kind, SourceError):
        return kind("cannot be read", source="/models/ä.safetensors", remedy="look at it")
    return kind("what happened", remedy="what to do")


every_kind = pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)


def test_every_class_has_a_code_of_its_own() -> None:
    """Two classes of one code would arrive as one."""
    codes = [kind.code for kind in kinds()]
    assert sorted(codes) == sorted(set(codes))
    assert {kind.code: kind for kind in kinds()} == BY_CODE
    assert len(BY_CODE) > 25


@every_kind
def test_an_error_survives_pickle_and_copy_with_its_facts(kind: type[WeightCacheError]) -> None:
    """A user's own processes pass errors on, and see class, text and attributes unchanged."""
    error = example(kind)
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is kind
        assert str(twin) == str(error)
        assert twin.args == (error.message,)
        assert vars(twin) == vars(error)


@every_kind
def test_an_error_crosses_the_wire_as_its_own_class(kind: type[WeightCacheError]) -> None:
    """It comes back raised as what it was, with message, remedy, and the facts of a cause."""
    error = example(kind)
    sent = encode(Fail(RequestId(7), Cause.of(error)))
    received = decode(to_session_decoder, sent)
    assert isinstance(received, Fail)
    back = received.cause.error()
    assert type(back) is kind
    assert (back.message, back.remedy) == (error.message, error.remedy)
    assert str(back) == str(error)
    for name in SHARED_FACTS:
        if hasattr(error, name):
            assert getattr(back, name) == getattr(error, name)
    assert Cause.of(back) == Cause.of(error)


def test_facts_without_a_field_on_the_wire_stay_in_the_message() -> None:
    """Which tensor, and which names, can be read even by who only sees the text."""
    refused = Cause.of(TensorRefused("decoder.weight", "a sparse layout")).error()
    assert "decoder.weight" in str(refused)
    assert "a sparse layout" in str(refused)
    missing = Cause.of(WeightsMissing("minilm", ("a.weight", "b.bias"))).error()
    assert "a.weight, b.bias" in str(missing)


def test_missing_weights_come_with_some_of_those_that_are_there_instead() -> None:
    """By them one sees which module was saved, or that every name has a prefix."""
    there = tuple(f"model.{number}" for number in range(7))
    error = WeightsMissing("k", tuple(f"n{number}" for number in range(23)), there)
    assert error.message.endswith(
        "lack 23 tensor(s) of the skeleton: "
        + ", ".join([*(f"n{number}" for number in range(20)), "and 3 more"])
    )
    assert "model.0, model.1, model.2, model.3, model.4, and 2 more" in error.remedy
    assert error.unused == there
    assert "e.g." not in WeightsMissing("k", ("n",)).remedy


def test_a_code_of_a_newer_peer_becomes_the_root_class() -> None:
    """Its message and remedy are still told."""
    error = Cause("from_the_future", "something new", remedy="upgrade").error()
    assert type(error) is WeightCacheError
    assert str(error) == "something new (upgrade)"


def branches() -> dict[type[WeightCacheError], int]:
    """Return the exit codes that the table in the module's own text promises."""
    rows = [line.split("|") for line in (errors.__doc__ or "").splitlines() if "`" in line[:4]]
    return {getattr(errors, row[1].strip(" `")): int(row[3]) for row in rows}


def test_the_table_of_branches_is_complete() -> None:
    """One row for each class directly below the root, each with its own exit code."""
    assert set(branches()) == {
        CallerError,
        SourceError,
        ResourceError,
        PeerError,
        CoordinatorLost,
        PlatformUnsupported,
    }
    assert set(branches()) == {kind for kind in kinds() if kind.__bases__ == (WeightCacheError,)}
    assert sorted(branches().values()) == [2, 3, 4, 5, 6, 7]


@every_kind
def test_the_exit_code_is_that_of_the_branch(kind: type[WeightCacheError]) -> None:
    """Scripts tell by it whose fault it was."""
    if kind is WeightCacheError:
        assert kind.exit_code == 1
        return
    (branch,) = (branch for branch in branches() if issubclass(kind, branch))
    assert kind.exit_code == branches()[branch]


@every_kind
def test_the_text_is_the_message_and_then_the_remedy(kind: type[WeightCacheError]) -> None:
    """The class's own remedy, another one, or none."""
    error = example(kind)
    assert error.remedy
    assert str(error) == f"{error.message} ({error.remedy})"
    error.remedy = ""
    assert str(error) == error.message


def test_a_remedy_given_replaces_that_of_the_class() -> None:
    """And without one the class's own is told; an empty one means none."""
    assert KeyRefused("no").remedy == KeyRefused.default_remedy != ""
    assert KeyRefused("no", remedy="shorten it").remedy == "shorten it"
    assert str(LoadTimeout("late", remedy="")) == "late"


@pytest.mark.parametrize("count", [1, 20, 21, 500])
def test_missing_weights_are_listed_up_to_twenty(count: int) -> None:
    """All of them are in `names`; the text stays readable and says how many it leaves out."""
    names = tuple(f"layer{i}.weight" for i in range(count))
    error = WeightsMissing("minilm", names)
    assert error.names == names
    assert f"{count} tensor(s)" in error.message
    assert sum(name in error.message.replace(",", " ").split() for name in names) == min(count, 20)
    assert ("more" in error.message) == (count > 20)


def test_the_faults_of_a_source_name_it() -> None:
    """`source` says which file, also when it is caught as the branch."""
    for kind in (SourceNotOpened, SourceMalformed, SourceUnsupported, SourceChanged):
        with pytest.raises(SourceError) as caught:
            raise kind("broken", source="/models/x.safetensors")
        assert caught.value.source == "/models/x.safetensors"
        assert caught.value.remedy


def test_the_faults_of_a_device_say_whose_they_are_and_what_to_do() -> None:
    """A wrong name is the caller's; a device that fails, or is full, is a resource."""
    assert issubclass(DeviceUnknown, CallerError)
    assert issubclass(DeviceUnavailable, ResourceError)
    assert issubclass(DeviceOutOfMemory, ResourceError)
    for kind in (DeviceUnknown, DeviceUnavailable, DeviceOutOfMemory):
        assert kind("what happened").remedy


def test_a_device_that_is_full_says_what_was_needed_and_what_is_free() -> None:
    """Here and across the wire, so that whoever catches it can make room."""
    error = DeviceOutOfMemory("no block", needed_bytes=10 << 30, free_bytes=7)
    for told in (error, Cause.of(error).error()):
        assert vars(told)["needed_bytes"] == 10 << 30
        assert vars(told)["free_bytes"] == 7
    assert (DeviceOutOfMemory("no").needed_bytes, DeviceOutOfMemory("no").free_bytes) == (0, 0)


@pytest.mark.parametrize("kind", [BudgetExceeded, InUse, DrainIncomplete, InvalidateIncomplete])
def test_what_is_in_the_way_is_an_attribute(
    kind: type[BudgetExceeded | InUse | Incomplete],
) -> None:
    """Whoever catches it can say who holds what, here and across the wire."""
    error = kind("held", holders=HOLDERS)
    assert error.holders == HOLDERS
    assert vars(Cause.of(error).error())["holders"] == HOLDERS
    assert kind("held").holders == ()


def test_holders_are_told_largest_first_and_the_readers_own_by_that_name() -> None:
    """Who is refused knows then whether it is itself in its way."""
    leases = (LeaseReport(1, 11, 0.0), LeaseReport(2, 12, 0.0))
    small = GenerationReport("small", "1-1", "ready", 1024, "ram", True, leases)
    large = GenerationReport("large", "1-2", "ready", 2048, "ram", False, leases[1:], private=True)
    filling = GenerationReport("fill", "1-3", "filling", 512, "ram", False, (), filled_by=12)
    retained = GenerationReport("kept", "1-4", "ready", 1, "ram", False, ())
    assert holders_text((small, retained, large, filling), here=12) == (
        "'large' (2.0 KiB, private, this process), "
        "'small' (1.0 KiB, pinned, pid 11, this process), "
        "'fill' (512 B, built by this process), and 1 more"
    )
    assert holders_text((filling,)) == "'fill' (512 B, built by pid 12)"
    assert holders_text(()) == ""
