"""Brings the parts of a module to its device that do not stay there, each for its own use.

The `forward` of those modules, and of no other, is wrapped while the whole is on the device: before
it the tensors are copied into room that they take turns in, and behind it they point at the host
again, whatever it raised. So nothing is ever on the meta device, and parameters stay the objects
that they are.

    Note on accelerate's hooks
    fact: its `AlignDevicesHook` puts a parameter on the meta device between two uses, replaces it
    at each, and leaves it where it was when `forward` raises
    consequence: who looks at the module between two uses, or after a fault, finds no weights
    choice: a wrapper of our own, with a `finally`. Hooks that accelerate has installed on the same
    module go on inside of it, and find the tensors on the device
    cost: none

Rules
- One thread at a time is in the room: others wait until it has left the outermost part it is in.
- A part that runs inside of another has its own place beside that, by the plan.
- Tensors that are used outside of the `forward` of the module that has them are on the host.
- Who has the room may wait for the load lock, and nobody the other way round.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpu_worker.load_lock import load_lock

if TYPE_CHECKING:
    import torch

    from gpu_worker.block import Block
    from gpu_worker.placement import Group


class Streaming:
    """The parts of one module that take turns on its device."""

    def __init__(self, parts: list[tuple[torch.nn.Module, Group]]) -> None:
        """Describe them.

        Args:
            parts: modules, each with those tensors of its own that come and go.
        """
        # Weakly: what has this is found by the module, as long as that is there.
        self._parts = [(weakref.ref(module), group) for module, group in parts]
        self._room = threading.RLock()
        self._inside: set[int] = set()
        """Which parts run, by their place in `_parts`. One may run inside itself."""

    def begin(self, block: Block) -> None:
        """Have each part come to its place in `block` when it is used."""
        for place, (known, _) in enumerate(self._parts):
            module = known()
            if module is not None:
                # Its own only if it has one: a method has the module, which would have itself.
                own = module.__dict__.get("forward")
                module.__dict__["forward"] = functools.partial(self._run, place, block, own)

    def end(self) -> None:
        """Have every part on the host, for good. May be called again."""
        for known, group in self._parts:
            module = known()
            if module is not None:
                self._unwrap(module)
            group.point_home()

    def _unwrap(self, module: torch.nn.Module) -> None:
        """Give a module its own `forward` back, unless somebody has put another there since."""
        run = module.__dict__.get("forward")
        if isinstance(run, functools.partial) and run.func == self._run:
            own = run.args[2]
            if own is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = own

    def _run(
        self, place: int, block: Block, own: Callable[..., Any] | None, *args: Any, **named: Any
    ) -> Any:
        """Run a part, on the device."""
        forward = self._forward(place) if own is None else own
        with self._room:
            if place in self._inside:
                return forward(*args, **named)
            group = self._parts[place][1]
            try:
                self._inside.add(place)
                self._bring(group, block)
                return forward(*args, **named)
            finally:
                group.point_home()
                self._inside.discard(place)

    def _forward(self, place: int) -> Callable[..., Any]:
        """Return the `forward` that a module has from its class."""
        module = self._parts[place][0]()
        assert module is not None  # it is being called
        forward: Callable[..., Any] = type(module).forward.__get__(module)
        return forward

    def _bring(self, group: Group, block: Block) -> None:
        group.renew()
        for _ in group.steps(block):
            pass
        block.finish()
        with load_lock.read():
            group.point_there(block)
