"""List the inputs of the source: containers, then the rows of each, one Arrow file per unit.

Owns: the columns of a row, its seeded order, its key. Also reads and checks an input that was
listed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_prep.images.check import MAX_FILE_BYTES, CheckedImage, check_image
from data_prep.sources.protocol import (
    NO_CLASS,
    ChangedSource,
    Container,
    Input,
    open_source,
    printable,
    raise_if_outage,
    with_damage,
)
from data_prep.steps.labels import Labels, load_labels
from data_prep.steps.work import WorkFolder
from vitscale.config.errors import UserError
from vitscale.runs.data_prep import MAX_SPLIT_LENGTH

CONTAINERS = "containers.arrow"
# Containers per unit: class folders and tars of hundreds of images each. Fewer where there would
# not be a unit for each of eight processes, more where units would be too many files.
CONTAINERS_PER_UNIT = 64
MIN_UNITS = 8
MAX_UNITS = 4096
# Rows of a run, which is sorted alone; as Python objects they take 60 MiB.
BATCH_ROWS = 1 << 17
# A tar header has 100 bytes for a name: split (up to 24), a dash, class and name, suffix (5).
MAX_KEY_LENGTH = 100 - MAX_SPLIT_LENGTH - 1 - len(".webp")
KEY_HASH_LENGTH = 16
_HASHED = re.compile(rf"-[0-9a-f]{{{KEY_HASH_LENGTH}}}$")
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")

# Long text is large: the offsets of other columns overflow at 2 GiB.
ROW_SCHEMA = pa.schema(
    dict(
        line.split()
        for line in """\
    order_high uint64
    order_low uint64
    holdout uint64
    path large_binary
    split string
    class large_string
    key large_string
    num_bytes int64
    reason string
    file large_binary
    offset int64
    modified_ns int64
    spooled bool
    inode uint64""".splitlines()
    )
)


def list_containers(work: WorkFolder, unit: str) -> None:
    containers = open_source(work.run.source, work.run.labels).containers()
    _check_names(containers)
    commit_containers(work, unit, containers)


def _check_names(containers: Sequence[Container]) -> None:
    """Raise UserError if two names become the same class, since bytes become text as \\xNN."""
    # Only names that were escaped can become like another.
    escaped = dict[str, str]()
    for box in containers:
        name = os.path.basename(box.path)
        if box.class_name and printable(name) != name:
            escaped[box.class_name] = name
    for box in containers:
        name = os.path.basename(box.path)
        other = escaped.get(box.class_name or "", name)
        if name != other:
            raise UserError(
                f"{os.fsencode(box.path)!r} and {os.fsencode(other)!r} would be one class, "
                f"{box.class_name!r}",
                where="source.path",
                next_step="rename one of the two",
            )


def commit_containers(
    work: WorkFolder, unit: str, containers: Iterable[Container]
) -> None:
    # As JSON, since names of files need not be text that Arrow takes.
    work.commit_table(unit, pa.table({"container": map(json.dumps, containers)}))


def read_containers(
    work: WorkFolder, start: int = 0, num: int | None = None
) -> list[Container]:
    """Return all containers, or `num` of them from the one numbered `start`."""
    texts = work.table(CONTAINERS)["container"].slice(start, num).to_pylist()
    return [Container(*json.loads(text)) for text in texts]


def count_containers(work: WorkFolder) -> int:
    return len(work.table(CONTAINERS))


def _unit_size(num: int) -> int:
    """The number of containers per unit, of `num` in all."""
    return max(min(CONTAINERS_PER_UNIT, num // MIN_UNITS), num // MAX_UNITS, 1)


def list_units(work: WorkFolder) -> list[str]:
    num = count_containers(work)
    num_units = math.ceil(num / _unit_size(num))
    return [f"list/{number:06d}.arrow" for number in range(num_units)]


def list_inputs(work: WorkFolder, unit: str) -> None:
    """List the containers of one unit; bytes that can be read only once go to its spool file."""
    number = int(Path(unit).stem)
    size = _unit_size(count_containers(work))
    inputs = _inputs(work, read_containers(work, number * size, size))

    temporary = work.temporary("list")
    spool = work.temporary("spool")
    with (
        open(spool, "wb") as spooled,
        open(temporary, "wb") as file,
        pa.ipc.new_file(file, ROW_SCHEMA) as writer,
    ):
        inputs = _spooled(inputs, spooled, name=f"{number:06d}.bin")
        while batch := list(islice(inputs, BATCH_ROWS)):
            rows = rows_table(batch, seed=work.run.seed)
            # A range of the stored order is then a slice of the batch.
            writer.write_table(rows.sort_by("order_high"))
        num_spooled = spooled.tell()
    # The spool comes first, since the list refers to it.
    if num_spooled:
        work.commit(spool, f"spool/{number:06d}.bin")
    work.commit(temporary, unit)


def _spooled(inputs: Iterable[Input], spool: BinaryIO, *, name: str) -> Iterator[Input]:
    """Move bytes that can be read only once from each input to the spool of this name."""
    for item in inputs:
        if item.data is not None and item.reason is None:
            item.file = name
            item.offset = spool.tell()
            item.spooled = True
            spool.write(item.data)
        item.data = None
        yield item


def _inputs(work: WorkFolder, containers: Sequence[Container]) -> Iterator[Input]:
    """Yield every input with its final class name, or the reason that its class rejects it."""
    source = open_source(work.run.source, work.run.labels)
    labels = load_labels(work.run.labels)
    dropped = left_out(work.run.source.leave_out)
    for container in containers:
        for item in with_damage(container, source.inputs(container)):
            # Left out only if usable: another reason says more.
            if item.reason is None and dropped and printable(item.path) in dropped:
                item.reason = "left_out"
            set_class(item, labels)
            yield item


def set_class(item: Input, labels: Labels) -> None:
    """Map the class of a usable input; one without a class in the map or space is rejected."""
    if item.reason is None:
        class_name = labels.class_of(item.class_name)
        if class_name is None:
            item.reason = "unknown_class"
        else:
            item.class_name = class_name


def seeded_hash(text: str, *, seed: int, purpose: str) -> bytes:
    """Return 32 pseudo-random bytes, the same on every machine and in every version."""
    return hashlib.sha256(os.fsencode(f"{purpose}\0{seed}\0{text}")).digest()


def make_key(class_name: str | None, name: str, *, path: str) -> str:
    """CLASS-NAME in A-Z a-z 0-9 _ -; names that this would change get a hash of their path.

    Without classes: NAME.
    """
    raw = name if class_name == NO_CLASS else f"{class_name or ''}-{name}"
    key = _UNSAFE.sub("_", raw)
    if key != raw or len(key) > MAX_KEY_LENGTH or _HASHED.search(key):
        return hashed_key(key, path)
    return key


def hashed_key(key: str, path: str | bytes) -> str:
    # The hash is part of the length that a header allows.
    suffix = hashlib.sha256(os.fsencode(path)).hexdigest()[:KEY_HASH_LENGTH]
    return f"{key[: MAX_KEY_LENGTH - KEY_HASH_LENGTH - 1]}-{suffix}"


def rows_table(inputs: Sequence[Input], *, seed: int) -> pa.Table:
    """Make rows of inputs with their final class names."""
    order = b"".join(
        # Lower case: names that differ only in case are neighbours, where keys are made unique.
        seeded_hash(
            f"{i.split}-{i.class_name}-{i.name}".lower(), seed=seed, purpose="order"
        )[:16]
        for i in inputs
    )
    # 16 bytes of a hash become two numbers, by which Arrow can sort.
    halves = np.frombuffer(order, ">u8").reshape(-1, 2).astype(np.uint64)
    hashes = (seeded_hash(i.path, seed=seed, purpose="holdout")[:8] for i in inputs)

    columns: dict[str, object] = {
        "order_high": halves[:, 0],
        "order_low": halves[:, 1],
        "holdout": np.frombuffer(b"".join(hashes), ">u8").astype(np.uint64),
        "path": [os.fsencode(i.path) for i in inputs],
        "class": [i.class_name for i in inputs],
        "key": [make_key(i.class_name, i.name, path=i.path) for i in inputs],
        "file": [os.fsencode(i.file) for i in inputs],
    }
    # All others are as the source gives them.
    for name in ROW_SCHEMA.names:
        if name not in columns:
            columns[name] = [getattr(i, name) for i in inputs]
    return pa.table(columns, schema=ROW_SCHEMA)


def check_input(
    work: WorkFolder,
    row: Mapping[str, Any],
    *,
    source: Path | None = None,
    convert: bool = True,
) -> CheckedImage:
    """Read and check one input. Its hash is empty if its bytes were not read.

    row: `path`, `file`, `offset`, `num_bytes`, `modified_ns` and `spooled`. source: folder, instead
    of that of the run. Raises StorageError, and ChangedSource if it changed since it was listed.
    """
    if row["num_bytes"] > MAX_FILE_BYTES:
        return CheckedImage("too_large", b"")
    name = os.fsencode(row["file"] or row["path"])
    folder = work.path / "spool" if row["spooled"] else source or work.source
    try:
        # Joined as bytes: pathlib would take as long as the reading.
        with open(os.path.join(os.fsencode(folder), name), "rb") as file:
            status = os.fstat(file.fileno())
            file.seek(row["offset"])
            data = file.read(row["num_bytes"])
    except OSError as error:
        if row["spooled"]:
            raise
        if isinstance(error, FileNotFoundError):
            raise ChangedSource(os.fsdecode(name)) from None
        raise_if_outage(error, os.fsdecode(row["path"]))
        return CheckedImage("unreadable", b"")

    # An image that is a file of its own may have grown, too.
    is_changed = len(data) != row["num_bytes"]
    if row["spooled"]:
        if is_changed:
            # A spool that was cut is no fault of the source.
            raise OSError(errno.EIO, "the spool is too short")
    elif (
        is_changed
        or status.st_mtime_ns != row["modified_ns"]
        or (not row["file"] and status.st_size != row["num_bytes"])
    ):
        raise ChangedSource(os.fsdecode(name))
    return check_image(data, settings=work.run.images, convert=convert)


@lru_cache(maxsize=1)
def left_out(file: str | None) -> dict[str, str]:
    """Path of each image that `source.leave_out` does not keep -> the image that it copies."""
    if file is None:
        return {}
    try:
        table = pq.read_table(file, columns=["path", "keep", "copy_of"])
        dropped = table.filter(pc.invert(table["keep"]))
        copies, originals = (dropped[name].to_pylist() for name in ("path", "copy_of"))
        return dict(zip(copies, originals, strict=True))
    except (OSError, pa.ArrowException) as error:
        raise UserError(
            f"{file!r} cannot be read ({error})",
            where="source.leave_out",
            allowed="duplicates.parquet of vitscale prepare duplicates",
        ) from None
