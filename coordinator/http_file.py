"""Files on web servers, by fsspec's HTTP session, each range passed on as it arrives.

fsspec's own `cat_file` has a whole answer in memory, which of a server that ignores ranges is the
whole file, and tells neither what the server said of the file nor how far an answer came.

    Note on redirects
    fact: a server may send whoever asks to any URL
    consequence: a chain could lead to another protocol, or from https to http
    choice: aiohttp follows to http and https only, and what left https is refused
    cost: such servers have to be named by where they lead to
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from coordinator.remote_faults import EndedEarly, StatusRefused
from coordinator.remote_file import HEAD_BYTES, About, Sink
from shm_store.errors import SourceChanged, SourceUnsupported

CONNECT_S = 10.0
SILENCE_S = 20.0
"""A server that sends nothing for so long is asked again."""

BUFFER_BYTES = 1024 * 1024
REDIRECTS_LIMIT = 10

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_NO_RANGE = re.compile(r"bytes \*/(\d+)")


def web(url: str) -> Any:
    """Return the file system whose session all files of a checkpoint share.

    Raises:
        ImportError: the extra `http` is not installed.
    """
    import aiohttp
    from fsspec.config import conf
    from fsspec.implementations.http import HTTPFileSystem

    configured = dict(conf.get("http", {}).get("client_kwargs", {}))
    headers = {**configured.pop("headers", {}), "Accept-Encoding": "identity"}
    return HTTPFileSystem(
        client_kwargs={
            "trust_env": True,  # proxies, and ~/.netrc
            **configured,
            "headers": headers,
            "auto_decompress": False,
            "read_bufsize": BUFFER_BYTES,
            # A signed URL says what it says.
            "requote_redirect_url": False,
            "timeout": aiohttp.ClientTimeout(
                total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S
            ),
        },
        encoded="%" in url,
        skip_instance_cache=True,
    )


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the head of an answer says. `start`: where in the file its bytes begin."""

    about: About
    etag: str
    start: int


class HttpTransport:
    """Reads one file of a web server."""

    step_bytes = 32 * 1024 * 1024
    streams = True

    def __init__(self, fs: Any, url: str, name: str) -> None:
        self._fs = fs
        self._url = url
        self._name = name
        self._known: _Answer | None = None

    def open(self) -> tuple[About, bytes]:
        """Ask for the first bytes; so a server whose signed URLs forbid HEAD answers, too."""
        head = bytearray()
        self._known = self._ask(0, HEAD_BYTES, lambda _, chunk: head.extend(chunk))
        about = self._known.about
        if len(head) < min(HEAD_BYTES, about.size_bytes):
            raise EndedEarly(f"ended at byte {len(head)}")
        return about, bytes(head)

    def look(self) -> About:
        known, self._known = self._known, None
        try:
            return self._ask(0, 1, lambda *_: None).about
        finally:
            self._known = known

    def fetch(self, start: int, end: int, sink: Sink) -> None:
        self._ask(start, end, sink)

    def _ask(self, start: int, end: int, sink: Sink) -> _Answer:
        from fsspec.asyn import sync

        answer: _Answer = sync(self._fs.loop, self._pass_on, start, end, sink)
        return answer

    async def _pass_on(self, start: int, end: int, sink: Sink) -> _Answer:
        session = await self._fs.set_session()
        headers = {"Range": f"bytes={start}-{end - 1}"}
        if self._known and self._known.etag and not self._known.etag.startswith("W/"):
            headers["If-Match"] = self._known.etag
        async with session.get(
            self._fs.encode_url(self._url), headers=headers, max_redirects=REDIRECTS_LIMIT
        ) as response:
            answer = self._judged(response)
            if self._known is not None and answer.about != self._known.about:
                raise SourceChanged(
                    f"{self._name}: it changed while it was read", source=self._name
                )
            if response.status == 416:
                return answer  # its body is no part of the file
            offset = answer.start
            if answer.start > start:
                raise EndedEarly("it began too late")
            async for chunk in response.content.iter_any():
                skipped = max(start - offset, 0)
                wanted = chunk[skipped : end - offset]
                if wanted:
                    sink(offset + skipped, wanted)
                offset += len(chunk)
                if offset >= end:
                    break
        return answer

    def _judged(self, response: Any) -> _Answer:
        """Return what the head of an answer says.

        Raises:
            StatusRefused: it is none that carries bytes.
            SourceUnsupported: the server's way to send files is not read.
        """
        schemes = [step.url.scheme for step in (*response.history, response)]
        if "https" in schemes and "http" in schemes[schemes.index("https") :]:
            raise self._unsupported("the server leads from https to http", "name that URL")
        headers = response.headers
        if headers.get("Content-Encoding", "identity") not in ("identity", ""):
            raise self._unsupported("the server sends it compressed")
        etag = headers.get("ETag", "")
        identity = etag or headers.get("Last-Modified", "")
        size, start = self._extent(response.status, headers)
        return _Answer(About(size, identity, response.status != 200), etag, start)

    def _extent(self, status: int, headers: Any) -> tuple[int, int]:
        """Return the size of the file, and where the answer's bytes begin."""
        content_range = headers.get("Content-Range", "")
        if status == 206:
            found = _CONTENT_RANGE.fullmatch(content_range)
            if found is None:
                raise self._unsupported("the server does not say how large it is")
            return int(found[3]), int(found[1])
        if status == 200:
            if not headers.get("Content-Length", "").isdecimal():
                raise self._unsupported("the server does not say how large it is")
            return int(headers["Content-Length"]), 0
        empty = _NO_RANGE.fullmatch(content_range)
        if status == 416 and empty is not None:
            return int(empty[1]), 0  # of another size than before, or an empty file
        raise StatusRefused(status)

    def _unsupported(self, why: str, remedy: str = "download it, and name the file") -> Exception:
        return SourceUnsupported(f"{self._name}: {why}", source=self._name, remedy=remedy)
