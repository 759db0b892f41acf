"""The opened files of sources that somebody has asked for: sole owner of their fds.

Requests for the same bytes, read the same way, share one set of fds: that of the first. Eight
workers that ask for 160 shards would else take most of what this process may have.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from shm_store.keys import Fingerprint, RequestId, SessionId
from shm_store.reading import Reading

_Request = tuple[SessionId, RequestId]


class OpenedSource:
    """What a loader is given: the fds, none of a URL; the names of several files; how to read."""

    __slots__ = ("fds", "files", "reading", "users")

    def __init__(self, fds: Sequence[int], files: tuple[str, ...], reading: Reading) -> None:
        self.fds = tuple(fds)
        self.files = files
        self.reading = reading
        self.users = 1

    def share(self) -> OpenedSource:
        """Return this for one more, who closes it, too."""
        self.users += 1
        return self

    def close(self) -> None:
        """Be of no use to one of its users; close the fds for the last."""
        self.users -= 1
        if not self.users:
            for fd in self.fds:
                os.close(fd)


class SourceTable:
    """Which source an open request has brought."""

    def __init__(self) -> None:
        self._of: dict[_Request, tuple[Fingerprint, OpenedSource]] = {}

    def __contains__(self, request: _Request) -> bool:
        return request in self._of

    def __getitem__(self, request: _Request) -> OpenedSource:
        return self._of[request][1]

    def add(self, request: _Request, fingerprint: Fingerprint, source: OpenedSource) -> None:
        """Keep what came with a request, or what has come with another one for the same."""
        for known, opened in self._of.values():
            if known == fingerprint and source.fds:
                source.close()
                source = opened.share()
                break
        self._of[request] = fingerprint, source

    def close(self, session: SessionId, rid: RequestId) -> None:
        """Let go of what a request has brought, if it has brought anything."""
        found = self._of.pop((session, rid), None)
        if found is not None:
            found[1].close()

    def close_all(self, session: SessionId) -> None:
        """Let go of what all requests of a session have brought."""
        for _, rid in [request for request in self._of if request[0] == session]:
            self.close(session, rid)
