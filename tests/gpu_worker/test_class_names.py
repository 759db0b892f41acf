"""Classes by the name in a segment: nothing is imported or run for one."""

import importlib
import sys
import types

import pytest

from gpu_worker.class_names import class_name, find_class
from gpu_worker.tensors import plain_tensors, tensors
from shm_store.errors import ClassUnknown
from shm_store.plain_values import ValueRefused
from tests.gpu_worker.sealed import mapped, seal
from tests.gpu_worker.wrapped import Scaled, scaled


def test_a_class_is_known_by_its_module_and_name():
    assert class_name(Scaled) == "tests.gpu_worker.wrapped:Scaled"
    assert find_class("tests.gpu_worker.wrapped:Scaled") is Scaled


def test_a_module_that_nobody_has_imported_is_not_imported_for_a_segment():
    name = "tests.gpu_worker.never_imported"
    for text in (f"{name}:Any", "antigravity:Any", "os:system", "os:path.join", "", ":", "a:b:c"):
        with pytest.raises(ClassUnknown) as caught:
            find_class(text)
        assert caught.value.remedy.startswith("import ")
    assert "antigravity" not in sys.modules and name not in sys.modules


def test_a_module_of_torch_is_imported_for_a_segment():
    name = "torch.utils.benchmark.utils.fuzzer"
    kept = sys.modules.pop(name, None)
    try:
        assert find_class(f"{name}:Fuzzer").__name__ == "Fuzzer"
    finally:
        if kept is not None:
            sys.modules[name] = kept


def test_a_module_of_torch_that_is_none_is_unknown():
    with pytest.raises(ClassUnknown):
        find_class("torch.no_such:A")


@pytest.mark.parametrize(
    "module", ["torch.utils.model_dump.__main__", "torch..a", "torch.a b", "torchfoo", ".torch"]
)
def test_a_program_or_what_is_no_module_is_not_imported(monkeypatch, module):
    """Though it is in a package that may be."""
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"{name} is imported"))
    with pytest.raises(ClassUnknown):
        find_class(f"{module}:A")


def test_looking_for_a_class_runs_no_code_of_a_module(monkeypatch):
    """A lazy module imports what it is asked for."""
    lazy = types.ModuleType("lazy_one")
    lazy.__getattr__ = lambda name: pytest.fail(f"it was asked for {name}")  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy_one", lazy)
    with pytest.raises(ClassUnknown):
        find_class("lazy_one:Thing")


def test_a_class_that_the_reader_lacks_is_named(monkeypatch):
    with mapped(seal({"w": scaled()})) as buffer:
        monkeypatch.delitem(sys.modules, "tests.gpu_worker.wrapped")
        with pytest.raises(ClassUnknown, match="wrapped") as caught:
            tensors(buffer)
        assert caught.value.remedy.startswith("import tests.gpu_worker.wrapped first")
        assert len(plain_tensors(buffer)) == 3


def test_a_class_that_was_made_in_a_function_has_no_name():
    class Local(Scaled):
        pass

    with pytest.raises(ValueRefused, match="cannot be found"):
        class_name(Local)
