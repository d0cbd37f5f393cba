"""What a source consists of, whatever its kind: containers, and the inputs in them.

Owns: the types that pass between a source (`sources`), the judgement (`image_check`) and the
pipeline, and reading one input's bytes.
Leaves out: how a kind of source is listed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vitscale.runs.data_prep import LabelSettings

MAX_CLASS_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class Container:
    """A class folder, a tar, a table: what is listed in one go. Few enough to hold in memory."""

    path: str
    """Relative to source.path, as the operating system gives it."""
    split: str
    class_name: str | None = None
    """Class of every image in it; None: each input says its own."""
    file: str = ""
    """File that holds it, relative to source.path, when that is not `path` (tar in a tar)."""
    offset: int = 0
    """First byte inside `file`."""
    num_bytes: int = -1
    """-1: to the end of the file."""


# Not frozen: that alone would cost 3 of the 11 us that listing a file takes.
@dataclass(slots=True)
class Input:
    """One input of the source. `reason` is set when its name or type alone rejects it."""

    path: str
    """Unique name in the source and in the ledger: a path relative to source.path; inside a tar
    TAR/MEMBER, inside a table TABLE/ROW."""
    split: str
    class_name: str | None
    name: str
    """What tells it from others of its class: path inside the class without suffix."""
    num_bytes: int
    reason: str | None = None
    file: str = ""
    """File that holds the bytes, relative to source.path; empty: the file at `path`."""
    offset: int = 0
    modified_ns: int = 0
    """Modification time of the file when it was listed."""
    spooled: bool = False
    """`file` lies in the spool and not in the source."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A folder or file whose change would change the list of inputs."""

    path: str
    """Relative to source.path."""
    num_bytes: int
    modified_ns: int


class SpoolError(Exception):
    """The spool cannot be written or read: an error of our disk, never of the source.

    Therefore no OSError, which a source takes for a fault of its file.
    """

    def __init__(self, error: OSError) -> None:
        self.error = error
        super().__init__(str(error))


class Spool(Protocol):
    """Takes bytes that can be read once only, such as cells of a compressed table."""

    def add(self, data: bytes) -> tuple[str, int]:
        """(file, offset) for `Input.file` and `Input.offset`. Raises SpoolError."""


class Source(Protocol):
    """One kind of source. Listing is deterministic up to the order of inputs in a container."""

    @property
    def root(self) -> Path:
        """What every path and file is relative to: source.path, or the folder of that file."""

    def containers(self) -> list[Container]:
        """Everything to list, ordered. Raises UserError(s) for a source that cannot be used."""

    def inputs(self, container: Container, *, spool: Spool) -> Iterator[Input | Watched]:
        """Every input of one container, kept or not, and what must not change until the end."""


def watched(root: Path, path: str) -> Watched:
    """`path` as it is now. A folder's size says nothing and differs between file systems."""
    status = os.stat(root / path)
    num_bytes = 0 if os.path.isdir(root / path) else status.st_size
    return Watched(path, num_bytes, status.st_mtime_ns)


def read_exactly(descriptor: int, *, offset: int, num_bytes: int) -> bytes:
    """Bytes at a place of an open file. Raises EOFError when the file ends before."""
    data = os.pread(descriptor, num_bytes, offset)
    while len(data) < num_bytes:
        more = os.pread(descriptor, num_bytes - len(data), offset + len(data))
        if not more:
            raise EOFError(f"{len(data)} of {num_bytes} bytes at {offset}")
        data += more
    return data


def fill(descriptor: int, memory: memoryview, *, offset: int) -> None:
    """Read from an open file until `memory` is full. Raises EOFError when the file ends before."""
    num = os.preadv(descriptor, [memory], offset)
    while num < len(memory):
        more = os.preadv(descriptor, [memory[num:]], offset + num)
        if not more:
            raise EOFError(f"{num} of {len(memory)} bytes at {offset}")
        num += more


def class_from_cell(
    label: object, names: tuple[str, ...] | None, settings: LabelSettings
) -> str | None:
    """The class that a cell says; None for null, nothing, negative and nameless numbers."""
    if isinstance(label, int) and not isinstance(label, bool):
        if names is None:
            return str(label) if label >= 0 else None
        return names[label] if 0 <= label < len(names) else None
    if not isinstance(label, str) or len(label) > MAX_CLASS_LENGTH:
        return None
    label = label.strip()
    return None if not label or means_no_label(label, settings) else label


def means_no_label(name: str, settings: LabelSettings) -> bool:
    """Whether a label that a source gives is a negative number, which stands for none.

    Not so with a space or map: there it is one more class without a place, as `unknown` says.
    """
    judged = settings.space is not None or settings.map is not None
    return not judged and re.fullmatch(r"-[0-9]+", name) is not None
