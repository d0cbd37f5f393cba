"""Write one shard: a tar, and a table with the outcome of each of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_prep.formats.ledger import BAD, Outcomes
from data_prep.formats.tar_writer import TarShard
from data_prep.images.check import CheckedImage
from data_prep.sources.protocol import printable
from data_prep.steps.list_inputs import check_input
from data_prep.steps.plan_shards import OUTCOMES, REJECTED, ROWS, read_plan
from data_prep.steps.work import WorkFolder
from vitscale.data.index import NO_LABEL


def shard_units(work: WorkFolder) -> list[str]:
    return read_plan(work).units


def num_images(work: WorkFolder) -> list[int]:
    return [num for _, _, num in read_plan(work).shards]


def write_shard(work: WorkFolder, unit: str) -> None:
    """Read, check and store every image of one shard. Its outcomes commit it."""
    plan = read_plan(work)
    number = plan.units.index(unit)
    split = plan.shards[number][0]
    with pa.memory_map(str(work.path / ROWS)) as file:
        rows = pa.ipc.open_file(file).get_batch(number).to_pylist()
    outcomes, temporary = [], work.temporary("tar")
    with TarShard(temporary) as tar:
        for row in rows:
            image = check_input(work, row)
            key, offset = f"{split}-{row['key']}", 0
            if image.reason is None:
                label = None if row["label"] == NO_LABEL else row["label"]
                offset = tar.add(key, extension=image.extension, image=image.content, label=label)
            outcomes.append(outcome(row, split, image, key=key, offset=offset))
        digest = tar.finish()
    work.commit(temporary, str(Path(unit).with_suffix(".tar")))
    commit_outcomes(work, unit, outcomes, bytes=tar.num_bytes, blake3=digest)


def outcome(
    item: Mapping[str, Any], split: str, image: CheckedImage, *, key: str, offset: int
) -> dict[str, Any]:
    """Make a row of OUTCOMES. item: `path` and `class`."""
    row = {"path": printable(item["path"]), "split": split, "class": item["class"]}
    row |= {"reason": image.reason, "input_hash": image.input_hash or None}
    if image.reason is None:
        row |= {"changes": image.changes, "key": key, "offset": offset, "length": image.num_bytes}
        row |= {"format": image.extension, "width": image.width, "height": image.height}
        row["blake3"] = image.content_hash
    return row


def commit_outcomes(
    work: WorkFolder, unit: str, outcomes: Sequence[Mapping[str, Any]], **facts: Any
) -> None:
    """Write the table of one tar with facts about it, and its number of samples and bad images."""
    table = pa.Table.from_pylist(list(outcomes), schema=OUTCOMES)
    reasons = [row["reason"] for row in outcomes]
    facts |= {"samples": reasons.count(None), "num_bad": sum(reason in BAD for reason in reasons)}
    text = {name: str(value) for name, value in facts.items()}
    work.commit_table(unit, table.replace_schema_metadata(text))


@cache
def facts_of(work: WorkFolder, unit: str) -> dict[str, str]:
    """Return what `commit_outcomes` stored."""
    stored = work.table(unit).schema.metadata
    return {name.decode(): value.decode() for name, value in stored.items()}


def check_bad(work: WorkFolder, done: Sequence[str]) -> None:
    """Raise UserError if too many images are bad among those of these units.

    Never stricter than the check at the end: it compares them with all images.
    """
    plan, limit = read_plan(work), work.run.images.max_bad_fraction
    num_bad = plan.num_bad + sum(int(facts_of(work, unit)["num_bad"]) for unit in done)
    if num_bad <= limit * plan.num_images:
        return
    so_far = Outcomes()
    for unit in (REJECTED, *done):
        so_far.add(work.table(unit))
    so_far.check(max_bad_fraction=limit, num_images=plan.num_images)
