"""The open requests of a session, by the ids that they have on its present connection.

The client's lock guards all of it. A request stays until its final answer, or until there is no
connection over which one could come.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from gpu_worker.request import Request
from shm_store.keys import RequestId


class RequestTable:
    """Ids come from one counter for life, so an answer of an earlier connection finds nobody."""

    def __init__(self) -> None:
        self._rids = itertools.count(1)
        self._requests: dict[RequestId, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.rid) is request

    def get(self, rid: RequestId) -> Request | None:
        return self._requests.get(rid)

    def next_rid(self) -> RequestId:
        """Return the next id, for what is no request of a caller's."""
        return RequestId(next(self._rids))

    def add(self, request: Request) -> None:
        """Give a request the next id, and keep it."""
        request.rid = self.next_rid()
        self._requests[request.rid] = request

    def remove(self, rid: RequestId) -> Request | None:
        """Forget a request, and return it. Of a prefetch nobody else would close the source."""
        request = self._requests.pop(rid, None)
        if request is not None and request.kind == "prefetch":
            request.close()
        return request

    def drop_unwanted(self) -> None:
        """Forget what was given up: there is no connection over which its answer could come."""
        for request in self:
            if not request.wanted:
                self.remove(request.rid)

    def ask_anew(self) -> tuple[list[Request], list[Request]]:
        """Give every request a new id, as a new connection needs.

        Returns:
            The fills, which go on with their segments; and the others, which begin again. So do
            those that fill memory of a device: nobody could say whose it is.
        """
        requests, self._requests = list(self), {}
        fills = [request for request in requests if request.space and request.kind != "share"]
        others = [request for request in requests if request not in fills]
        for request in others:
            request.gen, request.reserved, request.space = None, False, False
        for request in fills + others:
            self.add(request)
        return fills, others

    def after_fork(self) -> None:
        """In a forked child: forget the parent's requests, and what has come for them."""
        requests, self._requests = list(self), {}
        for request in requests:
            request.close()
            while not request.inbox.empty():
                request.inbox.get_nowait()

    def impatient(self, now_s: float, outage_since_s: float) -> tuple[list[Request], float]:
        """Return those who have waited too long in an outage, each once, and when the next will.

        Who builds or fills does not wait.
        """
        late, next_s = [], float("inf")
        for request in self._requests.values():
            since_s = request.waits_since_s
            if since_s is None:
                continue
            due_s = max(since_s, outage_since_s) + request.patience_s
            if due_s <= now_s:
                request.waits_since_s = None
                late.append(request)
            else:
                next_s = min(next_s, due_s)
        return late, next_s
