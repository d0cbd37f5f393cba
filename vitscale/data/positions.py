"""Where the samples of a split are: a table of its tars, and a record of each sample.

Owns: the form of both files (docs/data_format.md), and reads of ranges of local and remote files.
Leaves out: the manifest and what is chosen of a split (`data.index`).

Nothing is held for each sample. The table of tars is mapped, so that the processes of a node share
it. Records are read by need, those of a tar at once, and are checked by their hash in that table.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import blake3
import numpy as np

from vitscale.config.errors import not_read
from vitscale.data.remote import RemoteFile, prefix_of_hash
from vitscale.distributed.atomic_files import retried_read

if TYPE_CHECKING:
    import pyarrow as pa

POSITION = np.dtype(
    [
        ("hash", "<u8"),  # first 8 bytes of the image's BLAKE3
        ("block", "<u4"),  # the image begins at BLOCK_BYTES times this
        ("length", "<u4"),  # bytes of the image
        ("label", "<i4"),
    ]
)
# What a tar consists of.
BLOCK_BYTES = 512
MAX_OPEN_SHARDS = 64
# Bytes are damaged: a checksum or structure that the file system finds broken. Other errors come
# from the storage or the machine: those of PASSING are retried, and for none another sample is
# taken.
DATA_LOSS_ERRNOS = (errno.EBADMSG, errno.EUCLEAN, errno.ENODATA)


def positions_name(split: str) -> str:
    return f"positions-{split}.bin"


def tars_name(split: str) -> str:
    return f"tars-{split}.arrow"


def tars_schema() -> pa.Schema:
    """The table of the tars of a split, in order."""
    import pyarrow as pa

    columns = {
        "name": pa.string(),
        # Samples up to the end of this tar.
        "end": pa.int64(),
        "bytes": pa.int64(),
        # First 8 bytes of the BLAKE3 of its records, little-endian.
        "positions": pa.uint64(),
        "blake3": pa.binary(32),
    }
    return pa.schema(
        [pa.field(name, kind, nullable=False) for name, kind in columns.items()]
    )


class Place(NamedTuple):
    """Where one sample is."""

    tar: Path | RemoteFile
    offset: int
    """First byte of the image inside its tar."""
    length: int
    """Bytes of the image."""
    label: int
    hash_prefix: int
    """First 8 bytes of the image's BLAKE3, little-endian."""
    entry_points: Path | None
    """File of the entry points of the images of the tar, which may be missing."""


@dataclass(frozen=True, eq=False)
class Tars:
    """The columns of a table of tars, mapped."""

    names: pa.StringArray
    ends: np.ndarray
    num_bytes: np.ndarray
    checks: np.ndarray
    hashes: pa.FixedSizeBinaryArray


def open_tars(path: Path, layout: str) -> Tars:
    """Map a table of tars. layout: `layout_hash` of it. Raises OSError, ArrowException."""
    import pyarrow as pa

    table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    # It may come from elsewhere: its lengths must not lead out of its memory.
    table.validate(full=True)
    batches = table.to_batches()
    if not table.schema.equals(tars_schema()) or len(batches) != 1:
        raise pa.ArrowInvalid("is no table of tars of this version")

    batch = batches[0]
    names, *numbers, hashes = batch.columns
    ends, num_bytes, checks = map(np.from_dlpack, numbers)
    # These two decide the order, and prove the records.
    if layout_hash(ends, checks) != layout or np.any(np.diff(ends, prepend=0) < 0):
        raise pa.ArrowInvalid("its content does not have the hash in the manifest")
    return Tars(names, ends, num_bytes, checks, hashes)


def layout_hash(ends: np.ndarray, checks: np.ndarray) -> str:
    """BLAKE3 of two columns of a table of tars, one after the other."""
    digest = blake3.blake3(ends.tobytes())
    digest.update(checks.tobytes())
    return digest.hexdigest()


# ---- bytes of files ------------------------------------------------------------------------------


def read_checked(
    file: Path | RemoteFile,
    *,
    offset: int,
    num_bytes: int,
    hash_prefix: int,
    verify: bool = True,
) -> bytes:
    """Bytes of one range, compared with their hash, which is always done for remote files.

    Raises what `read_shard` and `RemoteFile.read` do, and OSError for other bytes.
    """
    if isinstance(file, RemoteFile):
        return file.read(offset=offset, num_bytes=num_bytes, hash_prefix=hash_prefix)
    data = read_shard(file, offset=offset, num_bytes=num_bytes)
    if verify and prefix_of_hash(data) != hash_prefix:
        raise OSError("its bytes do not have the hash in the index")
    return data


def read_shard(path: Path, *, offset: int, num_bytes: int) -> bytes:
    """Bytes of one range. Raises what `read_range` does, and OSError if the file ends before."""
    # A file that became shorter since the sizes were checked gives fewer bytes without an error.
    data = read_range(path, offset=offset, num_bytes=num_bytes)
    if len(data) < num_bytes:
        raise OSError(f"ends after {offset + len(data)} bytes")
    return data


def read_range(path: Path, *, offset: int, num_bytes: int) -> bytes:
    """Bytes of one range; fewer at the end of the file. Repeated while storage fails.

    Raises OSError if they are lost, StorageError if storage fails for longer, and UserError if the
    file cannot be read for another reason.
    """
    try:
        return retried_read(lambda: _read_once(path, offset, num_bytes), name=path)
    except OSError as error:
        if error.errno in DATA_LOSS_ERRNOS:
            raise
        raise not_read(
            error,
            path,
            next_step="check the storage and the limits of this machine (ulimit -n, memory), then "
            "run the same command again; if this file alone fails, copy it again",
        ) from None


def _read_once(path: Path, offset: int, num_bytes: int) -> bytes:
    try:
        # Kept by this name, so that no other thread closes it during the read.
        file = _opened(path)
        data = os.pread(file.fileno(), num_bytes, offset)
        # A read that fails half-way returns its first half; the next one tells the error.
        while len(data) < num_bytes:
            more = os.pread(file.fileno(), num_bytes - len(data), offset + len(data))
            if not more:
                break  # the file ends
            data += more
    except OSError:
        # A stale handle stays stale: the next attempt opens the file again.
        _opened.cache_clear()
        raise
    return data


def forget_opened() -> None:
    """Open files anew at their next read, under whatever their names mean then."""
    _opened.cache_clear()


@lru_cache(maxsize=MAX_OPEN_SHARDS)
def _opened(path: Path) -> FileIO:
    """A file is closed when the cache forgets it."""
    return open(path, "rb", buffering=0)
