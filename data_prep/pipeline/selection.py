"""Select images: which are kept, in which split, under which label.

Owns: the survey (validating every image before any is written), the rejection of duplicates, of
copies of evaluation images and of small classes, held-out images, and every row's assignment.
Leaves out: validating one image (`images.check`), similarity (`duplicates`).

Without `selection` and `source.val_per_class` there is no survey: rows are assigned as listed, and
images are validated when they are written.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_prep.duplicates.descriptors import DESCRIPTOR, image_descriptor
from data_prep.images.check import MIB
from data_prep.pipeline.image_reading import thread_results, validate_input
from data_prep.pipeline.listing import bucket_path, num_inputs, scan_units
from data_prep.pipeline.rejections import Rejections, check_so_far, rejected_so_far
from data_prep.pipeline.row_tables import read_table, write_table
from data_prep.pipeline.workspace import InputLocation, Preparation, row_locations
from data_prep.shards.ledger import describe_rejected
from data_prep.sources.outages import printable
from data_prep.sources.protocol import NO_CLASS
from vitscale.config.errors import UserError
from vitscale.data.index import NO_LABEL

TRAIN = "train"
# Of two equal images the one with the lower rank is kept: splits other than `train` come first.
TRAIN_RANK = 1 << 63
CLASSES_SHOWN = 10


def row_ranks(rows: pa.Table, *, number: int) -> np.ndarray:
    """uint64, unique in the corpus; of two equal images the one with the lower rank is kept."""
    in_train = np.array([split == TRAIN for split in rows.column("split").to_pylist()], bool)
    ranks = np.arange(len(rows), dtype=np.uint64) + np.uint64(number << 32)
    return np.where(in_train, ranks + np.uint64(TRAIN_RANK), ranks)


def row_of_rank(p: Preparation, rank: int) -> bytes:
    """The path of the row with this rank."""
    rank &= TRAIN_RANK - 1
    path: bytes = read_table(bucket_path(p, rank >> 32)).column("path")[rank & 0xFFFFFFFF].as_py()
    return path


def evaluation_index_path(p: Preparation) -> Path:
    return p.path("evaluation", "index.npz")


def index_evaluation_sets(p: Preparation, unit: str) -> None:
    from data_prep.duplicates.evaluation_sets import EvaluationIndex, build_evaluation_index

    sets = p.run.selection.evaluation_sets
    build_evaluation_index(sets, output=evaluation_index_path(p))
    lost = EvaluationIndex.load(evaluation_index_path(p)).unreadable
    if lost:
        print(
            f"warning: {len(lost):,} evaluation images cannot be decoded, so copies of them "
            f"are not found, such as {lost[0]!r}",
            flush=True,
        )
    p.put_result(unit, len(sets))


def survey_path(p: Preparation, number: int) -> Path:
    return p.path("survey", f"{number:06d}.arrow")


def survey(p: Preparation, unit: str) -> None:
    """Validate and describe every image of one bucket."""
    number = int(unit.rpartition("-")[2])
    rows = read_table(bucket_path(p, number))
    needs_descriptor = (
        p.run.selection.duplicates == "drop_similar" or p.run.selection.evaluation_sets
    )
    reasons: list[str | None] = rows.column("reason").to_pylist()
    hashes: list[bytes | None] = [None] * len(rows)
    descriptors: list[bytes | None] = [None] * len(rows)

    def examine(location: InputLocation) -> tuple[str | None, bytes | None, bytes | None]:
        result = validate_input(p, location, settings=p.run.images)
        if result.reason is not None:
            return result.reason, None, None
        content = bytes(result.content)
        descriptor = image_descriptor(content).tobytes() if needs_descriptor else None
        return None, result.content_hash, descriptor

    listed = [i for i, reason in enumerate(reasons) if reason is None]
    locations = list(row_locations(rows.take(np.array(listed, np.int64))))
    results = thread_results(examine, locations, num_threads=p.num_threads)
    for i, found in zip(listed, results, strict=True):
        reasons[i], hashes[i], descriptors[i] = found
        p.advance(1)
    details = _overlaps(p, reasons, hashes, descriptors)
    rejected = Rejections()
    for i, location in zip(listed, locations, strict=True):
        if (reason := reasons[i]) is not None:
            rejected.add(reason, printable(os.fsdecode(location.path)))
    table = pa.table(
        {
            "rank": pa.array(row_ranks(rows, number=number)),
            "reason": pa.array(reasons, pa.string()),
            "detail": pa.array(details, pa.string()),
            "content_hash": pa.array(hashes, pa.binary(32)),
            "descriptor": pa.array(descriptors, pa.binary(DESCRIPTOR.itemsize)),
        }
    )
    write_table(table, survey_path(p, number), temporary=p.work.temporary("survey"))
    p.put_result(unit, {"num_rows": len(rows)})
    check_so_far(p, unit, rejected)


def _overlaps(
    p: Preparation,
    reasons: list[str | None],
    hashes: list[bytes | None],
    descriptors: list[bytes | None],
) -> list[str | None]:
    """Reject images similar to an evaluation image; returns the name of that image per row."""
    details: list[str | None] = [None] * len(reasons)
    if not p.run.selection.evaluation_sets:
        return details
    from data_prep.duplicates.evaluation_sets import EvaluationIndex

    index = EvaluationIndex.load(evaluation_index_path(p))
    described = [i for i, descriptor in enumerate(descriptors) if descriptor is not None]
    raw = b"".join(descriptors[i] or b"" for i in described)
    for i, match in zip(described, index.match(np.frombuffer(raw, DESCRIPTOR)), strict=True):
        if match >= 0:
            reasons[i], details[i] = "in_evaluation_set", index.names[match]
            hashes[i] = descriptors[i] = None
    return details


def duplicates_path(p: Preparation) -> Path:
    return p.path("duplicates", "rows.arrow")


def find_duplicate_images(p: Preparation, unit: str) -> None:
    from data_prep.duplicates.search import find_duplicates

    scratch = p.work.temporary("duplicates")
    scratch.mkdir()
    num = find_duplicates(
        [survey_path(p, number) for number in range(p.result("buckets"))],
        similar=p.run.selection.duplicates == "drop_similar",
        scratch=scratch,
        output=duplicates_path(p),
    )
    p.put_result(unit, num)


def surveyed(p: Preparation, number: int) -> tuple[pa.Table, list[str | None], list[str | None]]:
    """A bucket's rows with reason and detail, before classes are selected."""
    rows = read_table(bucket_path(p, number))
    if not p.run.needs_survey:
        return rows, rows.column("reason").to_pylist(), [None] * len(rows)
    found = read_table(survey_path(p, number))
    reasons, details = found.column("reason").to_pylist(), found.column("detail").to_pylist()
    if p.run.selection.duplicates != "keep":
        duplicates = read_table(duplicates_path(p))
        ranks = duplicates.column("rank").to_numpy()
        for base in (number << 32, (number << 32) + TRAIN_RANK):
            first, last = np.searchsorted(ranks, np.array([base, base + (1 << 32)], np.uint64))
            part = duplicates.slice(first, last - first).to_pylist()
            for row in part:
                i = row["rank"] & 0xFFFFFFFF
                reasons[i] = f"{row['kind']}_duplicate"
                details[i] = row_of_rank(p, row["kept_rank"]).decode("utf-8", "backslashreplace")
    return rows, reasons, details


def select_classes(p: Preparation, unit: str) -> None:
    """Determine the classes, those that are too small, and how many images each holds out."""
    found, unknown = class_counts(p)
    p.labels.check(unknown, found=found)
    if p.run.needs_survey:
        found = _surveyed_counts(p)
    if not found:
        _raise_no_images(p)
    small = sorted(c for c, num in found.items() if num < p.run.selection.min_images_per_class)
    kept = {c: num for c, num in found.items() if c not in set(small)}
    if p.labels.space is None:
        _check_empty_classes(p, found)
    if not kept:
        raise UserError(
            "no class is left",
            where="selection.min_images_per_class",
            next_step="check the source, or lower selection.min_images_per_class",
        )
    # Numbers given by the source are labels already: 2 comes before 10.
    numbers = p.run.source.kind in ("webdataset", "parquet", "path_table", "idx")
    classes = p.labels.label_map(kept, keep_numbers=numbers)
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


def _surveyed_counts(p: Preparation) -> Counter[str]:
    counts = Counter[str]()
    for number in range(p.result("buckets")):
        rows, reasons, _ = surveyed(p, number)
        names = rows.column("class").to_pylist()
        counts.update(n for n, reason in zip(names, reasons, strict=True) if reason is None)
    return counts


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
        rows, reasons, _ = surveyed(p, number)
        names, splits = rows.column("class").to_pylist(), rows.column("split").to_pylist()
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


def smallest(parts: Sequence[Path], wanted: np.ndarray) -> np.ndarray:
    """uint64 per class: the `wanted`-th smallest hash among its rows in the .npy files."""
    prefix = np.zeros(len(wanted), np.uint64)
    remaining = wanted.copy()
    for shift in range(56, -8, -8):
        counts = np.zeros((len(wanted), 256), np.int64)
        for path in parts:
            part = np.load(path, mmap_mode="r")
            classes, hashes = part["class"], part["hash"]
            if shift < 56:
                above = np.uint64(shift + 8)
                equal = (hashes >> above) == (prefix[classes] >> above)
                classes, hashes = classes[equal], hashes[equal]
            byte = ((hashes >> np.uint64(shift)) & np.uint64(255)).astype(np.int64)
            counts += np.bincount(classes * 256 + byte, minlength=counts.size).reshape(counts.shape)
        reached = np.cumsum(counts, axis=1)
        byte = (reached < remaining[:, None]).sum(axis=1).clip(max=255)
        before = np.where(byte > 0, reached[np.arange(len(byte)), byte - 1], 0)
        remaining = remaining - before
        prefix |= byte.astype(np.uint64) << np.uint64(shift)
    return prefix


def assignments_path(p: Preparation, number: int) -> Path:
    return p.path("assignments", f"{number:06d}.arrow")


def assign_splits(p: Preparation, unit: str) -> None:
    """Assign reason, split and label to every row of one bucket, and sum them for the plan."""
    number = int(unit.rpartition("-")[2])
    rows, reasons, details = surveyed(p, number)
    selection: dict[str, Any] = p.result("selection")
    label_of = {name: label for label, name in reversed(list(enumerate(selection["classes"])))}
    label_of = label_of or {NO_CLASS: NO_LABEL}
    small, limits = set(selection["small"]), selection["thresholds"]
    classes, splits = rows.column("class").to_pylist(), rows.column("split").to_pylist()
    hashes = rows.column("holdout").to_pylist()
    labels: list[int | None] = [None] * len(rows)
    for i, name in enumerate(classes):
        if reasons[i] is None and name in small:
            reasons[i] = "small_class"
        if reasons[i] is None:
            labels[i] = label_of[name]
            if splits[i] == TRAIN and name in limits and hashes[i] <= limits[name]:
                splits[i] = p.run.source.holdout_split
    table = pa.table(
        {
            "reason": pa.array(reasons, pa.string()),
            "detail": pa.array(details, pa.string()),
            "split": pa.array(splits, pa.string()),
            "label": pa.array(labels, pa.int32()),
        }
    )
    write_table(table, assignments_path(p, number), temporary=p.work.temporary("assignments"))
    # Files that will be rejected unread need no space, however large they are.
    max_bytes = p.run.images.max_file_mib * MIB
    sizes = [size if size <= max_bytes else 0 for size in rows.column("num_bytes").to_pylist()]
    p.put_result(unit, _sums(splits, reasons, sizes))


def _sums(splits: list[str], reasons: list[str | None], sizes: list[int]) -> dict[str, list[int]]:
    """Split -> [images to write, their bytes]."""
    sums: dict[str, list[int]] = {}
    for split, reason, num_bytes in zip(splits, reasons, sizes, strict=True):
        if reason is None:
            entry = sums.setdefault(split, [0, 0])
            entry[0] += 1
            entry[1] += num_bytes
    return sums
