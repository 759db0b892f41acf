"""A web server of the test's own, in threads of this process: it does what a test tells it."""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Web:
    """What is served, and how badly. Every answer is in `log`."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    """By path; those that are missing are 404."""
    etag: str = '"1"'
    ranges: bool = True
    sizes: bool = True
    status: int = 0
    """What is answered instead, if it is any."""
    statuses: dict[int, int] = field(default_factory=dict)
    """The same, by the number of the request, from 1."""
    etags: dict[int, str] = field(default_factory=dict)
    location: str = ""
    """Where a status of 302 leads to."""
    drop: Callable[[int, int], int | None] = lambda start, end: None
    """After how many bytes the answer for such a range breaks off."""
    stalls: bool = False
    """It then keeps the connection instead, and says no more."""
    on_answer: Callable[[], None] = lambda: None
    log: list[tuple[str, int, int, int]] = field(default_factory=list)
    """Path, start and end of what was asked for, and how many bytes were sent."""
    headers: list[dict[str, str]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    over: threading.Event = field(default_factory=threading.Event)

    def sent_bytes(self) -> int:
        return sum(sent for *_, sent in self.log)


@contextlib.contextmanager
def serving(**files: bytes) -> Iterator[Web]:
    """Serve `files` on a port of the loopback for the length of a block."""
    web = Web(files={f"/{name.replace('__', '.')}": data for name, data in files.items()})

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_GET(self):
            path = self.path.partition("?")[0]
            number = next(web.numbers)
            web.headers.append(dict(self.headers.items()))
            data = web.files.get(path)
            status = web.statuses.get(number, web.status)
            if data is None or status not in (0, 416):
                self.fail(status or 404)
                return
            etag = web.etags.get(number, web.etag)
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if self.headers.get("If-Match", etag) != etag:
                self.fail(412)
                return
            if status or (wanted and web.ranges and int(wanted[1]) >= len(data)):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(data)}")
                self.send_header("Content-Length", "7")
                self.send_header("ETag", etag)
                self.end_headers()
                self.wfile.write(b"no data")
                return
            start, end = 0, len(data)
            if wanted and web.ranges:
                start, end = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
            else:
                self.send_response(200)
            if etag:
                self.send_header("ETag", etag)
            if web.sizes or web.ranges:
                self.send_header("Content-Length", str(end - start))
            else:
                self.send_header("Connection", "close")
            self.end_headers()
            self.send(path, data, start, end)

        def fail(self, status):
            self.send_response(status)
            if web.location:
                self.send_header("Location", web.location)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def send(self, path, data, start, end):
            cut = web.drop(start, end)
            stop = end if cut is None else min(start + cut, end)
            web.log.append((path, start, end, stop - start))
            with contextlib.suppress(OSError):  # who asked is gone
                self.wfile.write(data[start:stop])
                self.wfile.flush()
            web.on_answer()
            if stop < end:
                if web.stalls:
                    web.over.wait()
                self.close_connection = True
                with contextlib.suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    web.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield web
    finally:
        web.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
