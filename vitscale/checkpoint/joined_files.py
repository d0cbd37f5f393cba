"""Join the tensors of several ranks of a node in one file.

Owns: which rank writes for which, and the bytes of a joined file.
Leaves out: files and their commit (`commit`), the tensors of one rank (`tensors`). Needs no torch.

At 512 ranks the share of a rank is a few MiB. A parallel file system spends longer on creating such
a file than on its content, and all ranks create theirs in one folder at the same moment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

# Up to this many ranks each writes its own file.
MAX_RANK_FILES = 64
# A node adds files once each has this size: one process alone does not use a fast file system.
JOINED_BYTES = 1 << 28
WIDTHS = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "U8": 1, "BOOL": 1}


class Blob(NamedTuple):
    """The content of a tensor file: header with its length, and data."""

    header: bytes
    data: memoryview


def header_bytes(header: Mapping[str, object]) -> bytes:
    """The start of a tensor file."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def writing_ranks(nodes: Sequence[str], num_bytes: Sequence[int]) -> list[int] | None:
    """For each rank the rank that writes its tensors; None: each its own.

    nodes: names of the ranks' nodes; num_bytes: what each rank has to write.
    """
    if len(nodes) <= MAX_RANK_FILES:
        return None
    writers: list[int] = []
    current: dict[str, int] = {}
    filled: dict[int, int] = {}
    for rank, (node, size) in enumerate(zip(nodes, num_bytes, strict=True)):
        writer = current.get(node)
        if writer is None or filled[writer] + size > JOINED_BYTES:
            writer = current[node] = rank
            filled[writer] = 0
        writers.append(writer)
        filled[writer] += size
    return writers


def joined(blobs: Sequence[Blob]) -> Iterator[bytes | memoryview]:
    """The pieces of one file with the tensors of all blobs.

    Widest first, as in each blob, so that every tensor stays aligned.
    """
    headers = [json.loads(blob.header[8:]) for blob in blobs]
    header: dict[str, object] = {}
    segments: list[memoryview] = []
    end = 0
    for width in sorted(set(WIDTHS.values()), reverse=True):
        for entries, blob in zip(headers, blobs, strict=True):
            chosen = {name: at for name, at in entries.items() if WIDTHS[at["dtype"]] == width}
            if not chosen:
                continue
            # The tensors of one width are side by side.
            first = min(at["data_offsets"][0] for at in chosen.values())
            last = max(at["data_offsets"][1] for at in chosen.values())
            for name, at in chosen.items():
                assert name not in header, f"{name} is of two ranks"
                offsets = [offset - first + end for offset in at["data_offsets"]]
                header[name] = {**at, "data_offsets": offsets}
            segments.append(blob.data[first:last])
            end += last - first
    yield header_bytes(header)
    yield from segments
