"""What `import gpu_worker` offers, and what `help` shows of it."""

from __future__ import annotations

import re
from typing import get_args

import gpu_worker
from gpu_worker import ModelHandle, Worker
from shm_store import errors


def test_every_error_that_a_docstring_names_can_be_imported_from_here():
    """And every kind of those: who catches SourceError may want to tell its kinds apart."""
    calls = [Worker, ModelHandle, gpu_worker.attach, gpu_worker.constructing]
    calls += vars(Worker).values()
    calls += vars(ModelHandle).values()
    text = " ".join(getattr(call, "__doc__", None) or "" for call in calls)
    known = {kind.__name__ for kind in errors.BY_CODE.values()}
    named = known & set(re.findall(r"\w+", text))
    assert {"NoCoordinator", "VersionMismatch", "SourceError", "InvalidateIncomplete"} <= named
    named |= {kind.__name__ for kind in errors.SourceError.__subclasses__()}
    assert named <= set(gpu_worker.__all__)
    assert all(hasattr(gpu_worker, name) for name in gpu_worker.__all__)


def test_every_cause_of_an_eviction_is_explained_where_its_callback_is_given():
    """And by no other word: who compares with one that never comes waits for ever."""
    text = (gpu_worker.attach.__doc__ or "").partition("on_evict:")[2].partition("on_hit:")[0]
    assert re.findall(r'^ *"(\w+)":', text, re.MULTILINE) == list(get_args(gpu_worker.EvictCause))


def test_what_handles_need_of_a_worker_is_not_offered():
    public = {name for name in vars(Worker) if not name.startswith("_")}
    assert public == {
        "state_dict",
        "load",
        "use",
        "prefetch",
        "invalidate",
        "evict",
        "flush",
        "shutdown",
        "offload",
        "offload_all",
        "resident",
        "session",
        "reserve",
        "make_room",
    }
    assert {name for name in vars(ModelHandle) if not name.startswith("_")} == {"close"}
