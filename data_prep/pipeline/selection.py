"""Select classes: which are kept, under which label, and how many images each holds out.

Owns: the rejection of small classes, the label map, and the choice of held-out images.
Leaves out: the split and label of every row (`planning`).

Counts are those of the listing, before any image is opened.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from data_prep.pipeline.listing import bucket_path, num_inputs, scan_units
from data_prep.pipeline.rejections import rejected_by_listing, rejected_so_far
from data_prep.pipeline.row_tables import read_table, smallest
from data_prep.pipeline.workspace import Preparation
from data_prep.shards.ledger import describe_rejected
from vitscale.config.errors import UserError

TRAIN = "train"
CLASSES_SHOWN = 10


def select_classes(p: Preparation, unit: str) -> None:
    """Determine the classes, those that are too small, and how many images each holds out."""
    found, unknown = class_counts(p)
    p.labels.check(unknown, found=found)
    if not found:
        _raise_no_images(p)
    if p.run.source.leave_out and not rejected_by_listing(p).reasons["left_out"]:
        raise UserError(
            f"{p.run.source.leave_out!r} names no image of the source",
            where="source.leave_out",
            next_step="take the file that find_duplicates.py wrote for shards of this source",
        )
    small = sorted(c for c, num in found.items() if num < p.run.source.min_images_per_class)
    kept = {c: num for c, num in found.items() if c not in set(small)}
    if p.labels.space is None:
        _check_empty_classes(p, found)
    if not kept:
        raise UserError(
            "no class is left",
            where="source.min_images_per_class",
            next_step="check the source, or lower source.min_images_per_class",
        )
    classes = p.labels.label_map(kept, keep_numbers=p.source.has_label_values)
    taken = _held_out_counts(p, kept)
    p.put_result(
        unit,
        {
            "classes": classes,
            "present": sorted(kept),
            "small": small,
            "thresholds": thresholds(p, taken) if any(taken.values()) else {},
        },
    )


def _raise_no_images(p: Preparation) -> None:
    rejected = rejected_so_far(p)
    if not rejected.reasons:
        _check_empty_classes(p, Counter())
        raise UserError("holds no inputs", where="source.path", next_step="check the source")
    shown = describe_rejected(rejected.reasons, rejected.examples)
    raise UserError(
        f"no images were found: all {num_inputs(p):,} inputs are rejected\n{shown}",
        where="source.path",
        next_step="fix these names, paths, labels or files, or choose another source",
    )


def class_counts(p: Preparation) -> tuple[Counter[str], Counter[str]]:
    """Listed images by class, and images of unknown classes by their name in the source."""
    found, unknown = Counter[str](), Counter[str]()
    for unit in scan_units(p):
        result = p.result(unit)
        found.update(result["classes"])
        unknown.update(result["unknown"])
    if p.run.labels.unknown == "reject":
        unknown.clear()
    return found, unknown


def _check_empty_classes(p: Preparation, found: Counter[str]) -> None:
    """Raise UserError for a class folder without images: it would shift the labels."""
    if p.run.labels.values == "none":
        return
    named = {c.class_name for c in p.containers if c.class_name is not None}
    if p.run.labels.map is None and (empty := sorted(named - set(found))):
        shown = ", ".join(map(repr, empty[:CLASSES_SHOWN]))
        raise UserError(
            f"{len(empty)} of {len(named)} classes hold no images: {shown}",
            where="source.path",
            next_step="remove these classes, or add their images",
        )


def _held_out_counts(p: Preparation, counts: dict[str, int]) -> dict[str, int]:
    """Images of each class for the held-out split: rounded half up, never all."""
    source = p.run.source
    if source.val_per_class:
        return {name: min(source.val_per_class, num - 1) for name, num in counts.items()}
    if any(container.split != TRAIN for container in p.containers):
        return {}  # a folder with splits of its own
    return {
        name: min(int(source.holdout_fraction * num + 0.5), num - 1) for name, num in counts.items()
    }


def thresholds(p: Preparation, taken: dict[str, int]) -> dict[str, int]:
    """Per class the largest hash held out: the `taken` images with the smallest hashes are.

    A radix selection, one byte of the hash per pass, over two compact columns in a scratch file:
    it needs 256 counters per class, whatever the number of images.
    """
    folder = p.work.temporary("thresholds")
    folder.mkdir()
    number_of = {name: number for number, name in enumerate(taken)}
    parts = []
    for number in range(p.result("buckets")):
        rows = read_table(bucket_path(p, number))
        reasons, names, splits = (
            rows.column(name).to_pylist() for name in ("reason", "class", "split")
        )
        chosen = [
            i
            for i, reason in enumerate(reasons)
            if reason is None and splits[i] == TRAIN and names[i] in taken
        ]
        part = np.empty(len(chosen), [("class", "<u4"), ("hash", "<u8")])
        part["class"] = [number_of[names[i]] for i in chosen]
        part["hash"] = rows.column("holdout").to_numpy()[chosen]
        parts.append(folder / f"{number}.npy")
        np.save(parts[-1], part)
    found = smallest(parts, np.array(list(taken.values()), np.int64))
    return {name: int(found[number_of[name]]) for name, num in taken.items() if num}
