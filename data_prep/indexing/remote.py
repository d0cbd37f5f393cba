"""Read tars at a URL for indexing, by range requests, without copying them.

Owns: which tars there are, and reading one of them once, in order.
Leaves out: requests and retries (`vitscale.data.storage`), what a tar holds (`tars`).
"""

from __future__ import annotations

from collections import OrderedDict

from blake3 import blake3

from data_prep.sources.protocol import Container
from vitscale.config.errors import UserError
from vitscale.data.storage import names_below, read_range, size_of
from vitscale.data.urls import Url
from vitscale.data.webdataset import matching
from vitscale.runs.data_prep import SourceSettings

CHUNK_BYTES = 8 << 20
# An image may begin in one chunk and end in the next, after its label was read.
CHUNKS_KEPT = 4


class RemoteTar:
    """A tar at a URL; reads near each other, in increasing order, cost one pass over it.

    Raises RemoteStorageError; opening raises UserError if there is no such file.
    """

    def __init__(self, url: Url) -> None:
        self.url = url
        num_bytes = size_of(url)
        if num_bytes is None:
            raise UserError(
                "no such file", where=str(url), next_step="correct source.path or source.splits"
            )
        self.num_bytes = num_bytes
        self._hash, self._num_hashed = blake3(), 0
        self._chunks: OrderedDict[int, bytes] = OrderedDict()

    def __enter__(self) -> RemoteTar:
        return self

    def __exit__(self, *_: object) -> None:
        self._chunks.clear()

    def pread(self, num_bytes: int, offset: int) -> bytes:
        """Up to `num_bytes`; fewer only at the end of the tar."""
        stop = min(offset + num_bytes, self.num_bytes)
        parts = []
        while offset < stop:
            number, start = divmod(offset, CHUNK_BYTES)
            part = self._chunk(number)[start : start + stop - offset]
            parts.append(part)
            offset += len(part)
        return b"".join(parts)

    def blake3(self) -> str:
        """Hash of the whole tar, hexadecimal."""
        while self._num_hashed * CHUNK_BYTES < self.num_bytes:
            self._next_chunk()
        return str(self._hash.hexdigest())

    def _chunk(self, number: int) -> bytes:
        while self._num_hashed <= number:
            self._next_chunk()
        if number not in self._chunks:
            self._keep(number, self._fetched(number))
        return self._chunks[number]

    def _next_chunk(self) -> None:
        data = self._fetched(self._num_hashed)
        self._hash.update(data)
        self._keep(self._num_hashed, data)
        self._num_hashed += 1

    def _fetched(self, number: int) -> bytes:
        start = number * CHUNK_BYTES
        num_bytes = min(CHUNK_BYTES, self.num_bytes - start)
        return read_range(self.url, offset=start, num_bytes=num_bytes)

    def _keep(self, number: int, data: bytes) -> None:
        self._chunks[number] = data
        while len(self._chunks) > CHUNKS_KEPT:
            self._chunks.popitem(last=False)


def remote_containers(source: SourceSettings, url: Url) -> list[Container]:
    """The tars of each split, named relative to the URL. Raises UserError."""
    listed = None
    if url.scheme not in ("http", "https"):
        listed = [name for name in names_below(url) if name.endswith(".tar")]
    return [
        Container(name, split)
        for split, pattern in (source.splits or {"train": "*.tar"}).items()
        for name in matching(pattern, listed, where=f"source.splits.{split}")
    ]
