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
from pathlib import Path

import numpy as np
import pyarrow as pa

from data_prep.duplicates.descriptors import DESCRIPTOR, image_descriptor
from data_prep.duplicates.likely_copies import (
    LikelyCopies,
    LikelyPair,
    check_similar_fraction,
    joined_verdicts,
    num_parts,
    part_of_candidates,
    verdict_table,
)
from data_prep.duplicates.second_look import MAX_CANDIDATES, nearly_equal, verdicts
from data_prep.pipeline.image_reading import look, thread_results, validate_input
from data_prep.pipeline.listing import bucket_path, num_inputs, scan_units
from data_prep.pipeline.rejections import (
    Rejections,
    check_so_far,
    num_meant_as_images,
    rejected_so_far,
)
from data_prep.pipeline.row_tables import read_table, smallest, write_table
from data_prep.pipeline.workspace import InputLocation, Preparation, row_locations
from data_prep.shards.ledger import describe_rejected
from data_prep.sources.outages import printable
from vitscale.config.errors import UserError

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
    needs_descriptor = p.run.selection.compares_pictures
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
    details, copies = _overlaps(p, rows, reasons, hashes, descriptors)
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
    p.put_result(unit, {"num_rows": len(rows), "likely_copies": copies.as_json()})
    check_so_far(p, unit, rejected)


def _overlaps(
    p: Preparation,
    rows: pa.Table,
    reasons: list[str | None],
    hashes: list[bytes | None],
    descriptors: list[bytes | None],
) -> tuple[list[str | None], LikelyCopies]:
    """Reject copies of evaluation images; returns the name of that image per row, and counts."""
    details: list[str | None] = [None] * len(reasons)
    copies = LikelyCopies()
    if not p.run.selection.evaluation_sets:
        return details, copies
    from data_prep.duplicates.evaluation_sets import EvaluationIndex

    index = EvaluationIndex.load(evaluation_index_path(p))
    described = [i for i, descriptor in enumerate(descriptors) if descriptor is not None]
    found = np.frombuffer(b"".join(descriptors[i] or b"" for i in described), DESCRIPTOR)
    matched = np.flatnonzero(index.match(found) >= 0).tolist()
    locations = row_locations(rows.take(np.array(described, np.int64)[matched]))
    for number, location in zip(matched, locations, strict=True):
        i, picture = described[number], look(p, location)
        likely = index.candidates(found[number], num=MAX_CANDIDATES)
        copy_of = next((o for o in likely if nearly_equal(picture, index.look(o))), None)
        name = index.names[likely[0] if copy_of is None else copy_of]
        pair = LikelyPair(printable(os.fsdecode(location.path)), "", name, "")
        copies.add(pair, kind="in_evaluation_set" if copy_of is not None else "unlike")
        if copy_of is not None:
            reasons[i], details[i] = "in_evaluation_set", name
            hashes[i] = descriptors[i] = None
    return details, copies


def duplicates_path(p: Preparation) -> Path:
    return p.path("duplicates", "rows.arrow")


def find_duplicate_images(p: Preparation, unit: str) -> None:
    from data_prep.duplicates.search import find_duplicates

    scratch = p.work.temporary("duplicates")
    scratch.mkdir()
    similar = p.run.selection.duplicates == "drop_similar"
    find_duplicates(
        [survey_path(p, number) for number in range(p.result("buckets"))],
        similar=similar,
        scratch=scratch,
        output=candidates_path(p) if similar else duplicates_path(p),
        max_kept=MAX_CANDIDATES,
    )
    p.put_result(unit, num_parts(read_table(candidates_path(p))) if similar else 0)


def candidates_path(p: Preparation) -> Path:
    return p.path("duplicates", "candidates.arrow")


def verdict_path(p: Preparation, number: int) -> Path:
    return p.path("duplicates", f"verdicts-{number:06d}.arrow")


def verdict_units(p: Preparation) -> list[str]:
    return [f"verdicts-{number:06d}" for number in range(p.result("duplicates"))]


def compare_likely_copies(p: Preparation, unit: str) -> None:
    """Compare the pictures of one part of the likely copies with their likely originals."""
    number = int(unit.rpartition("-")[2])
    rows, candidates = part_of_candidates(read_table(candidates_path(p)), number)
    ranks = {rank for pair in candidates.items() for rank in (pair[0], *pair[1])}
    inputs = _inputs_of_ranks(p, ranks)
    found = list(verdicts(candidates, lambda rank: look(p, inputs[rank][0])))
    copies = LikelyCopies()
    for verdict in found:
        named = [
            text
            for location, class_name in (inputs[verdict.rank], inputs[verdict.kept_rank])
            for text in (printable(os.fsdecode(location.path)), class_name)
        ]
        copies.add(LikelyPair(*named), kind="similar" if verdict.is_copy else "unlike")
    table = verdict_table(rows, found)
    write_table(table, verdict_path(p, number), temporary=p.work.temporary("verdicts"))
    p.put_result(unit, copies.as_json())


def _inputs_of_ranks(p: Preparation, ranks: set[int]) -> dict[int, tuple[InputLocation, str]]:
    """Rank -> where the input is, and its class."""
    by_bucket: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        by_bucket.setdefault((rank & (TRAIN_RANK - 1)) >> 32, []).append(rank)
    found: dict[int, tuple[InputLocation, str]] = {}
    for number, members in by_bucket.items():
        table = read_table(bucket_path(p, number))
        table = table.take(np.array([rank & 0xFFFFFFFF for rank in members], np.int64))
        classes = table.column("class").to_pylist()
        found |= dict(zip(members, zip(row_locations(table), classes, strict=True), strict=True))
    return found


def check_likely_copies(p: Preparation, unit: str) -> None:
    """Join the verdicts. Raises UserError if too many images were found to be copies."""
    copies = LikelyCopies()
    for number in range(p.result("buckets")):
        copies.merge(p.result(f"survey-{number:06d}")["likely_copies"])
    if p.run.selection.duplicates == "drop_similar":
        for verdict_unit in verdict_units(p):
            copies.merge(p.result(verdict_unit))
        paths = [verdict_path(p, number) for number in range(p.result("duplicates"))]
        joined = joined_verdicts(map(read_table, paths))
        write_table(joined, duplicates_path(p), temporary=p.work.temporary("duplicates"))
    p.put_result("likely_copies", copies.as_json())
    limit = p.run.selection.max_similar_fraction
    check_similar_fraction(copies, num_images=num_meant_as_images(p), max_fraction=limit)
    p.put_result(unit, None)


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
