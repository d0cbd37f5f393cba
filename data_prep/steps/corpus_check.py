"""Check the corpus as a whole, before the first shard is written, and once more when all are.

Owns: what no single image shows: classes that training never sees, that look alike, or that are
numbers in part; files named twice; equal bytes in two splits.
Leaves out: names of splits (`sources`), classes outside a label space (`labels`).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_prep.duplicates.equal import among, num_shared, repeated
from data_prep.formats.ledger import Outcomes
from data_prep.sources.protocol import printable
from data_prep.steps.labels import load_labels
from data_prep.steps.list_inputs import BATCH_ROWS, left_out, read_containers
from data_prep.steps.listed_rows import STORED_ORDER, read_runs
from data_prep.steps.work import WorkFolder
from vitscale.config.errors import UserError
from vitscale.data.class_names import closest, look_of, names_by
from vitscale.runs.data_prep import LabelSettings

TRAIN = "train"
CLASSES_SHOWN = 10
REPEATED_COLUMNS = "inode order_high order_low path split class".split()
WHOLE = re.compile(r"0|[1-9][0-9]*")
NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
# Numbers can be written with blanks, commas and brackets of lists, marks of Windows, and NUL.
AROUND_NUMBERS = re.compile(r"[\s,;()\[\]\0\ufeff]+")


class Census(NamedTuple):
    """How many images there are of each class."""

    counts: dict[str, Counter[str]]
    """Split -> class -> number of usable images."""
    unknown: Counter[str]
    """Class outside the label space or map -> number of images."""
    examples: dict[str, str]
    """Class -> path of a usable image."""

    @property
    def images(self) -> Counter[str]:
        """Class -> number of usable images."""
        return sum(self.counts.values(), Counter())


def take_census(tables: Iterable[pa.Table]) -> Census:
    """Count inputs. tables: `split`, `class`, `reason` and `path`."""
    census = Census({}, Counter(), {})
    for table in tables:
        # Arrow counts, and only sums become Python objects.
        groups = table.group_by(["split", "class", "reason"], use_threads=False)
        for row in groups.aggregate([([], "count_all"), ("path", "first")]).to_pylist():
            name = row["class"] or ""
            if row["reason"] is None:
                census.counts.setdefault(row["split"], Counter())[name] += row[
                    "count_all"
                ]
                census.examples.setdefault(name, printable(row["path_first"]))
            elif row["reason"] == "unknown_class":
                census.unknown[name] += row["count_all"]
    return census


# ---- files ---------------------------------------------------------------------------------------


def repeated_files(work: WorkFolder, *, num_rows: int) -> Iterator[np.ndarray]:
    """Yield the places of usable rows to reject: their file is another row's, by any path.

    Of equal classes the first row is kept, and one outside `train` before those of it, so that
    nothing that is evaluated is trained on. Of different classes none is right. num_rows: of all.
    """

    def numbers() -> Iterator[np.ndarray]:
        for run in read_runs(work):
            inodes = _inodes(run)
            yield inodes[inodes != 0]

    for inodes in repeated(numbers, num=num_rows):
        # Few. Hard links have equal numbers, too, but paths of their own.
        found = []
        start = 0
        for run in read_runs(work):
            places = among(_inodes(run), inodes)
            rows = pa.table(run.select(REPEATED_COLUMNS).take(pa.array(places)))
            found.append(rows.append_column("place", pa.array(places + start)))
            start += len(run)
        rows = pa.concat_tables(found).sort_by([("inode", "ascending"), *STORED_ORDER])
        each = (row for part in rows.to_batches(BATCH_ROWS) for row in part.to_pylist())
        for _, group in groupby(each, key=itemgetter("inode")):
            yield np.array(_superfluous(group, source=work.source), np.int64)


def _inodes(run: pa.RecordBatch) -> np.ndarray:
    """Numbers of files; 0 for rows that are no usable file of their own."""
    none = pa.scalar(0, pa.uint64())
    return pc.if_else(pc.is_null(run["reason"]), run["inode"], none).to_numpy()


def _superfluous(rows: Iterable[Mapping[str, Any]], *, source: Path) -> list[int]:
    """The places of rows to reject, of rows whose files have one number; in stored order."""
    groups: dict[bytes, list[Mapping[str, Any]]] = {}
    for row in rows:
        # The folders of the path count, too: any of them may be a link.
        real = os.path.realpath(os.path.join(os.fsencode(source), row["path"]))
        groups.setdefault(real, []).append(row)

    rejected = []
    for group in groups.values():
        # False comes first, so a row outside `train` is kept if there is one.
        kept = min(group, key=lambda row: row["split"] == TRAIN)
        is_one_class = len({row["class"] for row in group}) == 1
        rejected += [
            row["place"] for row in group if row is not kept or not is_one_class
        ]
    return rejected


# ---- classes -------------------------------------------------------------------------------------


def check_listed(
    work: WorkFolder, census: Census, *, rejected: pa.Table, num_left: int
) -> Outcomes:
    """Raise UserError for unknown classes, classes without images, and no images at all.

    rejected: inputs that are rejected already, whose sums are returned; mapped from a file.
    num_left: classes that `min_images_per_class` leaves.
    """
    run = work.run
    images = census.images
    copies = left_out(run.source.leave_out)
    lost = set(copies)
    listed = Outcomes()
    for batch in rejected.to_batches():
        some = pa.table(batch)
        listed.add(some)
        if lost:
            is_left_out = pc.equal(some["reason"], "left_out")
            lost.difference_update(some["path"].filter(is_left_out).to_pylist())
    # Unknown classes come first: they are the cause of most that follows.
    load_labels(run.labels).check(census.unknown, found=images)
    if not images:
        raise UserError(
            f"no images were found: all {listed.num_rows:,} inputs are rejected\n"
            f"{listed.describe()}".rstrip(),
            where="source.path",
            next_step="fix these names, paths, labels or files, or choose another source",
        )

    # Classes without images would shift the labels of others.
    named = {box.class_name for box in read_containers(work)} - {None}
    empty = sorted(map(str, named - images.keys()))
    is_ignored = run.labels.values == "none" or run.labels.map or run.labels.space
    if empty and not is_ignored:
        shown = ", ".join(map(repr, empty[:CLASSES_SHOWN]))
        raise UserError(
            f"{len(empty)} of {len(named)} classes hold no images: {shown}\n"
            f"{listed.describe()}".rstrip(),
            where="source.path",
            next_step="remove these classes, or add their images",
        )

    # A list that was made for another source would leave copies in.
    if lost:
        raise UserError(
            f"{len(lost):,} of the {len(copies):,} copies in {run.source.leave_out!r} are no "
            f"images of the source, by their paths, such as {min(lost)!r}",
            where="source.leave_out",
            next_step="take what `vitscale prepare duplicates` wrote for shards of this source",
        )
    if not num_left:
        raise UserError(
            "no class is left",
            where="source.min_images_per_class",
            next_step="check the source, or lower source.min_images_per_class",
        )
    return listed


def check_classes(census: Census, *, labels: LabelSettings, are_values: bool) -> None:
    """Raise UserError for classes that cannot be what the corpus means.

    A label space says what the classes are, so that nothing is left to check. are_values: the
    source has labels, not names of folders.
    """
    if labels.values == "none" or labels.space is not None:
        return
    if labels.map is None:
        _check_numbers(census, are_values=are_values)
    _check_looks(census)
    _check_training(census)


def _check_numbers(census: Census, *, are_values: bool) -> None:
    """Refuse numbers of which some are written in another way; they would all be sorted as text."""
    images = census.images
    numbers = {name for name in images if _is_number(name)}
    are_padded = len(set(map(len, numbers))) == 1 and all(map(str.isdecimal, numbers))
    num_images = sum(images[name] for name in numbers)
    if are_padded or 2 * num_images <= sum(images.values()):
        return

    # Folders may well be 0 to 9 and `none`: they are always sorted as text.
    considered = images if are_values else numbers
    odd = sorted(name for name in considered if not WHOLE.fullmatch(name))
    if odd:
        # The rarest label is most likely to be the odd one.
        name = min(odd, key=lambda name: images[name])
        raise UserError(
            f"{num_images:,} of {sum(images.values()):,} images have numbers as labels, but "
            f"{len(odd):,} labels are no plain whole numbers, such as {ascii(name)} of "
            f"{census.examples[name]!r} ({images[name]:,} images)",
            where="source.path",
            allowed="whole numbers without leading zeros for all images, or names",
            next_step="correct these labels; or take all as names: list them in their order in a "
            "file, and set labels.space to it",
        )


def _is_number(name: str) -> bool:
    # A cell may have several numbers, such as a list.
    words = [word for word in AROUND_NUMBERS.split(name) if word]
    return bool(words) and all(map(NUMBER.fullmatch, words))


def _check_looks(census: Census) -> None:
    """Refuse names that nobody can tell apart, or that hide characters."""
    images = census.images
    looks = names_by(look_of, images)
    for name in sorted(images):
        other = looks[look_of(name)]
        problem = ""
        if other != name:
            problem = f"look like {ascii(other)} ({census.examples[other]!r})"
        elif {"\0", "\ufeff"}.intersection(name):
            problem = "have characters that cannot be seen"
        if problem:
            raise UserError(
                f"the {images[name]:,} images of class {ascii(name)} ({census.examples[name]!r}) "
                f"{problem}",
                where="source.path",
                next_step="give one class one name; labels.map can replace names",
            )


def _check_training(census: Census) -> None:
    """Refuse classes without an image in `train`, if there is such a split."""
    train = census.counts.get(TRAIN)
    lost = {
        name: num for name, num in census.images.items() if train and name not in train
    }
    if not train or not lost:
        return

    name, num = min(lost.items(), key=lambda item: (-item[1], item[0]))
    close = closest(name, sorted(train))
    hint = f"; train has {ascii(close)}" if close else ""
    raise UserError(
        f"{len(lost):,} classes have no image in train ({sum(lost.values()):,} images): "
        f"{ascii(name)} has {num:,}, such as {census.examples[name]!r}{hint}",
        where="source.path",
        next_step="correct their names or leave these images out; if the folder holds images of "
        "many classes, set source.splits and source.val_labels; if a model is to have classes that "
        "it is not trained on, list all classes in a file and set labels.space to it",
    )


# ---- what is said --------------------------------------------------------------------------------


def notes_on(classes: Sequence[str], hashes: Mapping[str, np.ndarray]) -> list[str]:
    """Return a sentence for each thing about the corpus that people may not expect.

    hashes: split -> the first 64 bits of each sample's BLAKE3.
    """
    notes = []

    numbers = [name for name in classes if WHOLE.fullmatch(name)]
    for first, second in zip(numbers, numbers[1:], strict=False):
        if int(first) > int(second):
            notes.append(
                f"classes are sorted as text: {first!r} has label {classes.index(first)}, and "
                f"{second!r} {classes.index(second)}; to sort numbers, set labels.space to a list"
            )
            break

    if len(classes) == 1:
        notes.append(f"all images have the class {classes[0]!r}")
    # `train` comes last, so that a note names the split that is evaluated first.
    for one, other in combinations(
        sorted(hashes, key=lambda name: (name == TRAIN, name)), 2
    ):
        if num := num_shared(hashes[one], hashes[other]):
            notes.append(f"{num:,} images of {one} have the bytes of images of {other}")
    return notes
