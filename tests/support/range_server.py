"""Serve a folder over HTTP with range requests and injected faults."""

from __future__ import annotations

import gzip
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

# Possible faults of one request.
FAULTS = ("error", "drop", "short", "slow", "wrong", "missing", "no_ranges", "forbidden")
# Answers of a server that wants to fill the client's memory.
HOSTILE = ("endless", "endless_gzip", "gzip", "more")
ENDLESS_BYTES = 1 << 30  # the end of a test that fails
MORE_BYTES = 1 << 27
SLOW_S = 0.1


@dataclass
class RangeServer:
    """Requests received, and `fault(path, number of the request to it)`."""

    folder: Path
    fault: Callable[[str, int], str | None] = lambda path, number: None
    url: str = ""
    requests: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes by path."""
    encodings: set[str | None] = field(default_factory=set)
    """Values of Accept-Encoding."""


@contextmanager
def served(
    folder: Path, *, fault: Callable[[str, int], str | None] | None = None
) -> Iterator[RangeServer]:
    server = RangeServer(folder)
    if fault is not None:
        server.fault = fault

    class Handler(_Handler):
        state = server

    http = _Http(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_address[1]}"
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


@cache
def _bomb() -> bytes:
    return gzip.compress(bytes(MORE_BYTES), compresslevel=1)


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, *arguments: object) -> None:
        """A client that closes its connection is no error."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: RangeServer

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(self.path).lstrip("/")
        self.state.requests[path] += 1
        self.state.encodings.add(self.headers.get("Accept-Encoding"))
        fault = self.state.fault(path, self.state.requests[path])
        assert fault is None or fault in FAULTS + HOSTILE
        file = self.state.folder / path
        if fault == "missing" or not file.is_file():
            return self._end(404, b"")
        if fault == "error":
            return self._end(503, b"")
        if fault == "forbidden":
            return self._end(403, b"")
        if fault == "drop":
            self.close_connection = True
            return
        if fault == "slow":
            time.sleep(SLOW_S)
        data = file.read_bytes()
        status, headers = 200, {"Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked and fault != "no_ranges":
            start, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
            if start >= len(data):
                return self._end(416, b"")
            headers["Content-Range"] = f"bytes {start}-{last}/{len(data)}"
            status, data = 206, data[start : last + 1]
        if fault in HOSTILE and with_body:
            return self._fill_memory(fault, status, data, headers)
        if fault == "wrong":
            place = secrets.randbelow(len(data))
            data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        self._end(status, data, headers, with_body=with_body, short=fault == "short")

    def _fill_memory(self, fault: str, status: int, data: bytes, headers: dict[str, str]) -> None:
        """Answer with more than was asked for, or with an encoding that expands."""
        if "gzip" in fault:
            headers["Content-Encoding"], data = "gzip", _bomb()
        if fault == "gzip":
            return self._end(status, data, headers)
        total = ENDLESS_BYTES
        if fault == "more":
            headers["Content-Length"], total = str(len(data) + MORE_BYTES), MORE_BYTES
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()  # without a length the body ends with the connection
        self.close_connection = True
        self.wfile.write(data)
        path, block = unquote(self.path).lstrip("/"), bytes(1 << 16)
        for _ in range(total // len(block)):
            self.wfile.write(block)
            self.state.sent[path] += len(block)

    def _end(
        self,
        status: int,
        data: bytes,
        headers: dict[str, str] | None = None,
        *,
        with_body: bool = True,
        short: bool = False,
    ) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.state.sent[unquote(self.path).lstrip("/")] += len(data)
            self.wfile.write(data[: len(data) // 2] if short else data)
        if short:
            self.close_connection = True
