"""Processes that hold weights until they are let go: workers of ours, and processes of the peers.

They are forked off a server that has imported torch and us (but attached nowhere), as a web server
with preloading forks its workers: so a hundred of them cost seconds, not minutes.
"""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import safetensors.torch
import torch

import gpu_worker
import gpu_worker.tensors
from benchmarks import kernel
from benchmarks.checkpoint import Tensors, read_every_page

START_LIMIT_S = 120.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["benchmarks.holders"])


@dataclass(frozen=True, slots=True)
class Order:
    """What to hold.

    Attributes:
        socket: of the coordinator; empty for a peer that loads the file itself.
        keys: held each, from the same source.
        source: the `.safetensors` file. For the floor, a file whose bytes are mapped and no more.
        convert: hold the weights as bf16, converted from what the file has.
        read: read every page.
        bare: without a coordinator: map the source once for each key, and load nothing.
    """

    socket: str
    keys: Sequence[str]
    source: str
    convert: bool = False
    read: bool = True
    bare: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """What the process saw of itself, before and after it got the weights."""

    tensors: int
    fds_before: int
    fds_after: int
    private_before_bytes: int
    committed_before_bytes: int
    committed_after_bytes: int


class Holder:
    """One such process, from its start until `let_go` or `kill`."""

    def __init__(self, order: Order) -> None:
        """Start it; `wait` tells when it holds."""
        self._connection, theirs = _context.Pipe()
        self._process = _context.Process(target=_hold, args=(order, theirs), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def wait(self) -> Held:
        """Return what it saw, once it holds everything.

        Raises:
            RuntimeError: it does not.
        """
        if not self._connection.poll(START_LIMIT_S):
            raise RuntimeError(f"process {self.pid} holds nothing after {START_LIMIT_S:g} s")
        try:
            held = self._connection.recv()
        except EOFError as error:
            raise RuntimeError(f"process {self.pid} ended before it held anything") from error
        assert isinstance(held, Held)
        return held

    def kill(self) -> None:
        """Send SIGKILL, without waiting."""
        self._process.kill()

    def let_go(self) -> None:
        """Have it end, and wait for that. May be called again, and after `kill`."""
        self._connection.close()
        self._process.join(START_LIMIT_S)


def hold_all(orders: Sequence[Order]) -> list[tuple[Holder, Held]]:
    """Start a process for each order, and return them when all hold.

    One after the other: what each sees of the whole host is then its own doing.
    """
    holders: list[Holder] = []
    held = []
    try:
        for order in orders:
            holders.append(Holder(order))
            held.append(holders[-1].wait())
    except BaseException:
        for holder in holders:
            holder.let_go()
        raise
    return list(zip(holders, held, strict=True))


def _hold(order: Order, connection: Connection) -> None:
    torch.set_num_threads(1)
    worker = None
    if order.socket:
        worker = gpu_worker.attach(socket=order.socket, name="benchmark")
    gc.collect()
    before = kernel.fd_count(os.getpid()), kernel.private_bytes(os.getpid())
    committed_before_bytes = kernel.committed_bytes()
    held = [_get(worker, key, order) for key in order.keys]
    committed_after_bytes = kernel.committed_bytes()
    if order.read:
        for tensors in held:
            read_every_page(tensors)
    connection.send(
        Held(
            tensors=sum(map(len, held)),
            fds_before=before[0],
            fds_after=kernel.fd_count(os.getpid()),
            private_before_bytes=before[1],
            committed_before_bytes=committed_before_bytes,
            committed_after_bytes=committed_after_bytes,
        )
    )
    try:
        connection.recv()
    except EOFError:
        pass  # let go


def _mapped(path: str) -> Tensors:
    with open(path, "rb") as file:
        whole = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
    return {"": torch.frombuffer(whole, dtype=torch.uint8)}


def _get(worker: gpu_worker.Worker | None, key: str, order: Order) -> Tensors:
    def load() -> Tensors:
        return _converted(safetensors.torch.load_file(order.source), order.convert)

    if order.bare:
        return _mapped(order.source)
    if worker is None:
        return load()
    if order.convert:
        return worker.state_dict(key, build=load)
    return worker.state_dict(key, source=order.source)


def _converted(tensors: Tensors, convert: bool) -> Tensors:
    if not convert:
        return tensors
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
