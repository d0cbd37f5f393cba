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
from urllib.parse import parse_qs, unquote, urlsplit

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
    if "list-type" not in query and (not google or "alt" in query):
        return None
    base = folder / path.split("/")[0]
    if "/" in path:
        names = [path.partition("/")[2]]
    else:
        names = [
            str(file.relative_to(base))
            for file in sorted(base.rglob("*"))
            if file.is_file()
        ]
        names = [name for name in names if name.startswith(query.get("prefix", ""))]
    files = {
        name: (base / name).stat().st_size for name in names if (base / name).is_file()
    }
    if google:
        items = [
            {"name": n, "bucket": base.name, "size": str(s)} for n, s in files.items()
        ]
        if "/" in path:
            return json.dumps(items[0]).encode() if items else None
        return json.dumps({"kind": "storage#objects", "items": items}).encode()
    entries = [
        f"<Contents><Key>{name}</Key><Size>{size}</Size>"
        "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        for name, size in files.items()
    ]
    text = f"<IsTruncated>false</IsTruncated><KeyCount>{len(files)}</KeyCount>{''.join(entries)}"
    return f"<?xml version='1.0'?><ListBucketResult>{text}</ListBucketResult>".encode()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, *arguments) -> None:
        """A client that closes its connection is no error."""


class Answering(BaseHTTPRequestHandler):
    """Quiet, and answers HEAD as GET."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def answer(self, status: int, data: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | dict(headers)).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


class _Handler(Answering):
    state: RangeServer

    def do_GET(self) -> None:
        asked_for = urlsplit(self.path)
        path = unquote(asked_for.path).lstrip("/")

        # Google's paths: storage/v1/b/BUCKET/o/NAME, and download/... for the content.
        google = re.fullmatch(r"(download/)?storage/v1/b/([^/]+)/o/?(.*)", path)
        if google:
            path = f"{google[2]}/{google[3]}".rstrip("/")
        self.path = f"/{path}"
        self.state.requests[path] += 1
        self.state.encodings.add(self.headers.get("Accept-Encoding"))
        fault = self.state.fault(path, self.state.requests[path])
        file = self.state.folder / path
        query = {name: values[0] for name, values in parse_qs(asked_for.query).items()}
        about = _about(self.state.folder, path, query, google=google is not None)
        if fault in STATUS or (about is None and not file.is_file()):
            return self._end(STATUS[fault or "missing"], b"")
        if fault == "drop":
            self.close_connection = True
            return None
        if fault == "slow":
            time.sleep(SLOW_S)
        data = file.read_bytes() if about is None else about
        status = 200
        headers = {"Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked and fault != "no_ranges":
            start = int(asked[1])
            last = min(int(asked[2]), len(data) - 1)
            if start >= len(data):
                return self._end(416, b"")
            headers["Content-Range"] = f"bytes {start}-{last}/{len(data)}"
            status = 206
            data = data[start : last + 1]
        if fault == "wrong":
            place = secrets.randbelow(len(data))
            data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        headers["Content-Length"] = str(len(data))
        if fault == "short":
            data = data[: len(data) // 2]
            self.close_connection = True
        self._end(status, data, headers)

    def _end(self, status: int, data: bytes, headers: Mapping[str, str] = {}) -> None:
        if self.command == "GET":
            self.state.sent[unquote(self.path).lstrip("/")] += len(data)
        self.answer(status, data, headers)
