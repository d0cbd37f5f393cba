"""Write one shard, or index one external tar: a table with the outcome of each of its inputs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_prep.images.check import CheckedImage
from data_prep.sources.protocol import (
    Container,
    printable,
    source_read_error,
    source_root,
    with_damage,
)
from data_prep.sources.tars import WebDataset
from data_prep.steps.labels import load_labels
from data_prep.steps.list_inputs import (
    check_input,
    commit_containers,
    count_containers,
    read_containers,
    set_class,
)
from data_prep.steps.plan_shards import OUTCOMES, ROWS, read_plan
from data_prep.steps.work import WorkFolder
from vitscale.config.errors import UserError
from vitscale.data.index import NO_LABEL
from vitscale.data.remote import Location, Url, location_of, names_below, read_chunks
from vitscale.data.split_names import splits_of_files
from vitscale.data.tar_writer import TarShard
from vitscale.data.webdataset import matching
from vitscale.distributed.atomic_files import blake3_of_file

# Reason for sound images that must be converted to be usable, which would mean rewriting the tar.
PACKED = "packed"


def split_of(unit: str) -> str:
    return Path(unit).stem.rpartition("-")[0]


def write_shard(work: WorkFolder, unit: str) -> None:
    """Read, check and store every image of one shard. Its outcomes commit it."""
    number, _ = read_plan(work).shards[unit]
    split = split_of(unit)
    with pa.memory_map(str(work.path / ROWS)) as file:
        rows = pa.ipc.open_file(file).get_batch(number).to_pylist()

    outcomes = []
    temporary = work.temporary("tar")
    with TarShard(temporary) as tar:
        for row in rows:
            image = check_input(work, row)
            key = f"{split}-{row['key']}"
            offset = 0
            if image.reason is None:
                # Corpora without labels have no `.cls` members.
                label = None if row["label"] == NO_LABEL else row["label"]
                offset = tar.add(
                    key, extension=image.extension, image=image.content, label=label
                )
            length = len(image.content)
            outcomes.append(
                outcome(row, split, image, key=key, offset=offset, length=length)
            )
        digest = tar.finish()

    # The tar comes before its outcomes, which say that it is whole.
    work.commit(temporary, str(Path(unit).with_suffix(".tar")))
    commit_outcomes(work, unit, outcomes, bytes=tar.num_bytes, blake3=digest)


def outcome(
    item: Mapping[str, Any],
    split: str,
    image: CheckedImage,
    *,
    key: str,
    offset: int,
    length: int,
) -> dict[str, Any]:
    """Make a row of OUTCOMES. item: `path` and `class`. offset, length: in the tar."""
    row = {
        "path": printable(item["path"]),
        "split": split,
        "class": item["class"],
        "reason": image.reason,
        "input_hash": image.input_hash or None,
    }

    if image.reason is None:
        row |= {
            "changes": image.changes,
            "key": key,
            "offset": offset,
            "length": length,
            "format": image.extension,
            "width": image.width,
            "height": image.height,
            "blake3": image.content_hash,
        }
    return row


def commit_outcomes(
    work: WorkFolder, unit: str, outcomes: Sequence[Mapping[str, Any]], **facts: Any
) -> None:
    """Write the table of one tar, with facts about it."""
    table = pa.Table.from_pylist(list(outcomes), schema=OUTCOMES)
    text = {name: str(value) for name, value in facts.items()}
    work.commit_table(unit, table.replace_schema_metadata(text))


def facts_of(table: pa.Table) -> dict[str, str]:
    """Return what `commit_outcomes` stored with a table."""
    stored = table.schema.metadata
    return {name.decode(): value.decode() for name, value in stored.items()}


def list_tars(work: WorkFolder, unit: str) -> None:
    """Write (path, split) of each tar, in a folder or at a URL."""
    source = work.run.source
    root = root_of(work)
    if isinstance(root, Path):
        containers = WebDataset(source, work.run.labels).containers()
        commit_containers(work, unit, containers)
        return

    # A web server does not list its files, so a pattern must name them.
    listed = []
    if root.scheme not in ("http", "https"):
        listed = [name for name in names_below(root) if name.endswith(".tar")]
    tars = []
    for split, pattern in (source.splits or {"train": "*.tar"}).items():
        where = f"source.splits.{split}"
        names = matching(pattern, listed, where=where)
        if not names:
            raise UserError(
                f"no tars {pattern!r}",
                where=where,
                next_step="correct the pattern; a web server cannot list its files: name them",
            )
        by_name = {} if source.splits else splits_of_files(names)
        tars += [Container(name, by_name.get(name, split)) for name in sorted(names)]
    commit_containers(work, unit, tars)


def root_of(work: WorkFolder) -> Location:
    """The folder or URL that paths of tars are relative to."""
    location = location_of(work.run.source.path, where="source.path")
    if isinstance(location, Url):
        return location
    return source_root(work.run.source)


def tar_units(work: WorkFolder) -> list[str]:
    return [f"tars/{number:06d}.arrow" for number in range(count_containers(work))]


def index_tar(work: WorkFolder, unit: str) -> None:
    """Check every image of one tar. One at a URL is read once, into a temporary file."""
    (container,) = read_containers(work, int(Path(unit).stem), 1)
    root = root_of(work)
    if isinstance(root, Path):
        return _index_local(work, unit, container, root)

    copy = work.temporary("tar")
    local = copy / container.path
    try:
        local.parent.mkdir(parents=True)
        with open(local, "wb") as file:
            file.writelines(read_chunks(root / container.path))
        _index_local(work, unit, container, copy)
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _index_local(work: WorkFolder, unit: str, container: Container, root: Path) -> None:
    """Check every image of a local tar."""
    run = work.run
    try:
        status = os.stat(root / container.path)
        digest = blake3_of_file(root / container.path)
    except OSError as error:
        raise source_read_error(error, container.path) from None

    settings = run.source.model_copy(update={"path": str(root), "splits": {}})
    source = WebDataset(settings, run.labels)
    labels = load_labels(run.labels)
    rows = []
    for item in with_damage(container, source.inputs(container)):
        image = CheckedImage(item.reason, b"")
        # A label is missing, but the image itself may be sound.
        if item.reason in (None, "no_label"):
            image = check_input(work, asdict(item), source=root, convert=False)
            if image.reason is None and image.content_hash != image.input_hash:
                image.reason = PACKED
            image.content = b""  # all samples of the tar are kept
        set_class(item, labels)

        image.reason = item.reason or image.reason
        row = outcome(
            {"path": item.path, "class": item.class_name},
            item.split,
            image,
            key=printable(item.name),
            offset=item.offset,
            length=item.num_bytes,
        )
        rows.append(row)
    commit_outcomes(
        work,
        unit,
        rows,
        bytes=status.st_size,
        modified_ns=status.st_mtime_ns,
        blake3=digest,
    )
