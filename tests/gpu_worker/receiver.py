"""A process that takes what is sent to it, and says what it has then."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import re
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

WAIT_S = 30.0


class Receiver:
    """Such a process, started in one of the ways of `multiprocessing`."""

    def __init__(self, method: str) -> None:
        context: Any = torch.multiprocessing.get_context(method)
        self.inbox, self.outbox = context.Queue(), context.Queue()
        self.process = context.Process(target=_serve, args=(self.inbox, self.outbox), daemon=True)
        self.process.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self, what: str, thing: Any = None) -> Any:
        self.inbox.put((what, thing))
        return self.outbox.get(timeout=WAIT_S)

    def take(self, thing: Any) -> dict[str, dict]:
        """Send it tensors by name, or a module, which it keeps; return the facts of each."""
        return self.ask("take", thing)

    def close(self) -> None:
        self.inbox.put(("end", None))
        self.process.join(WAIT_S)
        assert self.process.exitcode == 0
        for queue in (self.inbox, self.outbox):
            queue.close()
            queue.join_thread()


def facts(thing: Any) -> dict[str, dict]:
    """What is to be known of each tensor."""
    if isinstance(thing, torch.nn.Module):
        thing = dict(thing.named_parameters())
    return {name: _facts(tensor) for name, tensor in thing.items()}


def _facts(tensor: torch.Tensor) -> dict:
    storage = tensor.untyped_storage()
    region = region_of(storage.data_ptr())
    return {
        "type": type(tensor).__name__,
        "values": tensor.detach().tolist(),
        "address": tensor.data_ptr(),
        "storage_bytes": storage.nbytes(),
        "requires_grad": tensor.requires_grad,
        **region,
    }


def region_of(address: int) -> dict:
    """The kernel's word: the file that an address is of, and how much of its map was copied."""
    found = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+\s*(.*)", line)
        if head is not None:
            inside = int(head[1], 16) <= address < int(head[2], 16)
            found = {"file": head[3].removesuffix(" (deleted)")} if inside else None
        elif found is not None and line.startswith("Anonymous:"):
            return {**found, "copied_kib": int(line.split()[1])}
    raise AssertionError(f"nothing is mapped at {address:#x}")


def _serve(inbox, outbox) -> None:
    # The pool of threads that torch had in the parent is not there in a forked child.
    torch.set_num_threads(1)
    said = _Said()
    logging.getLogger("gpu_worker").addHandler(said)
    kept = None
    while True:
        what, thing = inbox.get()
        answer: Any = None
        match what:
            case "take":
                kept = thing
                answer = facts(kept)
            case "unpickle":
                kept = {"it": pickle.loads(thing)}
                answer = facts(kept)
            case "edit":
                for tensor in kept.values():
                    tensor.add_(1)
                answer = facts(kept)
            case "send back":
                answer = kept
            case "drop":
                kept = None
            case "said":
                answer = said.lines
            case "fds":
                answer = len(os.listdir("/proc/self/fd"))
            case "end":
                return
        del thing
        gc.collect()
        outbox.put(answer)
        del answer


class _Said(logging.Handler):
    """What was logged as a warning, or worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
