"""What a session states that it has, on a new connection.

The statement is complete: what it leaves out has ended. So nothing that was sent over the earlier
connection matters any more, read or unread. The coordinator's half is `coordinator.statement`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpu_worker.connection import Connection
from gpu_worker.leases import Leases
from gpu_worker.request import Request
from shm_store.wire import Commit, Held, HeldFill, Resume


def post_statement(
    connection: Connection, hello: Resume, leases: Leases, fills: Sequence[Request]
) -> None:
    """Say who comes back, then all that it has. The connection's lock is held.

    Args:
        fills: those that have their segments.

    Raises:
        FdsExhausted: not all of it could be sent, and the connection is of no use.
    """
    filling: list[tuple[Held, tuple[int, ...]]] = []
    committed: list[Commit] = []
    for request in fills:
        assert request.gen is not None and request.key is not None
        fill = HeldFill(request.gen, request.rid, request.key, request.fingerprint)
        filling.append((fill, tuple(request.fds)))
        if request.committed:
            committed.append(Commit(request.gen))
    filled = {request.gen for request in fills}
    with leases.held() as leased:
        # Another thread of ours may have had its GRANT already, and have it mapped. The one that
        # comes for the fill is a lease on the same map.
        held = [*filling, *(one for one in leased if getattr(one[0], "gen", None) not in filled)]
        connection.post(msgspec.structs.replace(hello, held=len(held)))
        for message, fds in held:
            connection.post(message, fds)
    for commit in committed:
        connection.post(commit)
