"""Serve a folder over HTTP with range requests and injected faults.

Its sub-folders are buckets, too, with as much of S3 and of Google Cloud Storage as reading takes.
"""

import json
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

# Status of a fault of one request; others are drop, short, slow, wrong and no_ranges.
STATUS = {"error": 503, "forbidden": 403, "missing": 404}
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
def served(folder: Path) -> Iterator[RangeServer]:
    server = RangeServer(folder)

    class Handler(_Handler):
        state = server

    with listening(Handler) as server.url:
        yield server


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Answer requests in threads; yields the URL."""
    http = _Http(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def _about(
    folder: Path, path: str, query: dict[str, str], *, google: bool
) -> bytes | None:
    """A listing of a bucket, or what Google knows of a file; None if the content is wanted."""
    # S3 lists with `list-type`; Google gives content with `alt`, and facts without.
    if "list-type" not in query and (not google or "alt" in query):
        return None
    bucket, _, name = path.partition("/")
    base = folder / bucket
    sizes = {}
    for file in sorted(base.rglob("*")):
        if file.is_file():
            sizes[str(file.relative_to(base))] = file.stat().st_size

    if name:
        sizes = {name: sizes[name]} if name in sizes else {}
    else:
        prefix = query.get("prefix", "")
        sizes = {key: size for key, size in sizes.items() if key.startswith(prefix)}
    if google:
        items = [
            {"name": key, "bucket": bucket, "size": str(size)}
            for key, size in sizes.items()
        ]
        if not name:
            return json.dumps({"kind": "storage#objects", "items": items}).encode()
        # The caller answers 404.
        if not items:
            return None
        return json.dumps(items[0]).encode()

    text = f"<IsTruncated>false</IsTruncated><KeyCount>{len(sizes)}</KeyCount>"
    for key, size in sizes.items():
        # boto3 parses the time of each object, and fails without one.
        text += (
            f"<Contents><Key>{key}</Key><Size>{size}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        )
    return f"<?xml version='1.0'?><ListBucketResult>{text}</ListBucketResult>".encode()


class _Http(ThreadingHTTPServer):
    # A client may keep its connection open for longer than the test lasts.
    daemon_threads = True
    block_on_close = False
    # Tests ask from many workers at once; Python's own queue holds 5.
    request_queue_size = 128

    def handle_error(self, *arguments):
        """A client that closes its connection is no error."""


class Answering(BaseHTTPRequestHandler):
    """Quiet, and answers HEAD as GET."""

    # Connections stay open, as with real stores: a client that reuses a broken one shows it.
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self.do_GET()

    def answer(self, status: int, data: bytes, headers: Mapping[str, str]):
        self.send_response(status)
        # A fault may announce another length than it sends.
        headers = {"Content-Length": str(len(data)), **headers}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


class _Handler(Answering):
    state: RangeServer

    def do_GET(self):
        url = urlsplit(self.path)
        path = unquote(url.path).lstrip("/")

        # Google's paths: storage/v1/b/BUCKET/o/NAME, and download/... for the content.
        google = re.fullmatch(r"(download/)?storage/v1/b/([^/]+)/o/?(.*)", path)
        if google:
            path = f"{google[2]}/{google[3]}".rstrip("/")
        self.path = f"/{path}"
        self.state.requests[path] += 1
        self.state.encodings.add(self.headers.get("Accept-Encoding"))
        fault = self.state.fault(path, self.state.requests[path])
        file = self.state.folder / path
        query = dict(parse_qsl(url.query))
        data = _about(self.state.folder, path, query, google=google is not None)
        if fault in STATUS or (data is None and not file.is_file()):
            return self._end(STATUS[fault or "missing"], b"")
        # No answer at all, as of a server that restarts.
        if fault == "drop":
            self.close_connection = True
            return None
        if fault == "slow":
            time.sleep(SLOW_S)
        if data is None:
            data = file.read_bytes()

        status = 200
        headers = {"Accept-Ranges": "bytes"}
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if span and fault != "no_ranges":
            start = int(span[1])
            last = min(int(span[2]), len(data) - 1)
            if start >= len(data):
                return self._end(416, b"")
            headers["Content-Range"] = f"bytes {start}-{last}/{len(data)}"
            status = 206
            data = data[start : last + 1]
        # One bit anywhere: only a hash of the content can notice it.
        if fault == "wrong":
            damaged = bytearray(data)
            damaged[secrets.randbelow(len(data))] ^= 1
            data = bytes(damaged)
        headers["Content-Length"] = str(len(data))
        # Less than announced, as when a connection breaks.
        if fault == "short":
            data = data[: len(data) // 2]
            self.close_connection = True
        self._end(status, data, headers)

    def _end(self, status: int, data: bytes, headers: Mapping[str, str] = {}):
        if self.command == "GET":
            self.state.sent[unquote(self.path).lstrip("/")] += len(data)
        self.answer(status, data, headers)
