"""Read answers of HTTP servers up to a bound, whatever a server sends.

Owns: the bound of each answer, and refusing encoded ones and those without ranges.
Leaves out: requests (`backends`), retries (`store`).
"""

from __future__ import annotations

import io
import re
from typing import Any

import aiohttp

from vitscale.data.remote.errors import EncodedError, NoRangesError

READ_BYTES = 1 << 18
NO_ENCODING = ("", "identity", "aws-chunked")
# Answers that are no ranges: a page of a listing, what a store knows of a file, an error.
MAX_ANSWER_BYTES, MAX_ERROR_BYTES = 1 << 24, 1 << 16


class BoundedResponse(aiohttp.ClientResponse):
    """An answer that is read up to one byte more than asked for; for aiohttp's `response_class`."""

    async def read(self) -> bytes:
        """Raises EncodedError, NoRangesError, and OSError for a listing that is too long."""
        if self._body is None:
            self._body = await bounded_body(self)
        return self._body


async def bounded_body(answer: aiohttp.ClientResponse) -> bytes:
    """The body of an answer: of a range at most one byte more than asked for, of an error its
    beginning. Closes the connection of an answer that goes on."""
    try:
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", answer.request_info.headers.get("Range", ""))
        if answer.status >= 400:
            return await _beginning(answer, MAX_ERROR_BYTES)
        if span is None:
            data = await _beginning(answer, MAX_ANSWER_BYTES + 1)
            if len(data) > MAX_ANSWER_BYTES:
                del data  # or the error keeps it, and backends keep the errors of every attempt
                raise OSError(f"answers with more than {MAX_ANSWER_BYTES:,} bytes")
            return data
        first, last = int(span[1]), int(span[2])
        encoding = answer.headers.get("Content-Encoding", "").strip().lower()
        if encoding not in NO_ENCODING:
            raise EncodedError(
                f"answers with Content-Encoding {encoding[:40]!r}, although identity was asked for"
            )
        if first and answer.status != 206:
            raise NoRangesError(
                f"answers a request for a range with status {answer.status}: no range requests"
            )
        return await _beginning(answer, last - first + 2)
    finally:
        if not answer.content.at_eof():
            answer.close()  # else the connection would be drained for reuse


async def _beginning(answer: aiohttp.ClientResponse, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        part = await answer.content.read(min(READ_BYTES, num_bytes - len(data)))
        if not part:
            break
        data += part
    return bytes(data)


class _ReadAnswer(io.BytesIO):
    """A body that has been read, in place of the answer: `read`, `content` and `close`."""

    @property
    def content(self) -> _AsyncBody:
        return _AsyncBody(self)


class _AsyncBody:
    def __init__(self, body: io.BytesIO) -> None:
        self.body = body

    async def read(self, num_bytes: int = -1) -> bytes:
        return self.body.read(num_bytes)

    def at_eof(self) -> bool:
        return self.body.tell() == len(self.body.getbuffer())


def bounded_s3_session() -> type[Any]:
    """The class of s3fs's HTTP sessions, with every body read by `bounded_body`."""
    from aiobotocore.httpsession import AIOHTTPSession

    class BoundedSession(AIOHTTPSession):
        async def send(self, request: Any) -> Any:
            request.stream_output = True  # else the whole body is read before this returns
            answer = await super().send(request)
            data = await bounded_body(answer.raw)
            if request.method == "GET":
                answer._content, answer.raw = data, _ReadAnswer(data)
                answer.headers["content-length"] = str(len(data))
            return answer

    return BoundedSession
