"""Find copies among the images of a shard folder, and copies of the images of others.

    python data_prep/find_duplicates.py SHARDS [--against SHARDS_OR_FOLDER ...] [--similar]

Nothing is removed: it writes `duplicates.parquet`, a row for each sample, `keep.txt`, the keys to
train on, and `pairs.png`, the least similar pairs. Use and limits: docs/duplicates.md.

Owns: the command line, and the files written. `duplicates` reads images and searches.
"""

from __future__ import annotations

import argparse
import sys

try:
    from pathlib import Path
    from shlex import quote

    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    from data_prep.duplicates.reading import (
        check_keys,
        compare,
        describe,
        image_of,
        list_images,
        list_samples,
    )
    from data_prep.duplicates.similar import (
        NUM_FREQUENCIES,
        first_equal,
        nearest_similar,
    )
    from data_prep.formats.index_files import local_folder
    from vitscale.config.errors import run_script
    from vitscale.distributed.atomic_files import atomic_file, write_text
    from vitscale.distributed.processes import num_cores
    from vitscale.distributed.worker_processes import Workers
    from vitscale.images.sheet import draw_rows, writing
    from vitscale.tracking.journal import item_progress
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None

TABLE_NAME = "duplicates.parquet"
KEYS_NAME = "keep.txt"
PICTURE_NAME = "pairs.png"
NUM_PAIRS = 60
DESCRIBED_ROWS = 1 << 8


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="vitscale prepare duplicates",
        description="Find copies among the images of a shard folder.",
    )
    parser.add_argument("shards", metavar="SHARDS", help="folder with an index.parquet")
    parser.add_argument(
        "--against",
        nargs="+",
        default=[],
        metavar="FOLDER",
        help="shards or image folders, such as an evaluation set; copies of their images go",
    )
    parser.add_argument(
        "--similar",
        action="store_true",
        help="find copies by what they show, not only by bytes",
    )

    parser.add_argument("--output", metavar="FOLDER", help="default: SHARDS-duplicates")
    parser.add_argument(
        "--num-workers",
        type=int,
        default=num_cores(),
        help="processes (default: %(default)s)",
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    folder = local_folder(arguments.shards, where="SHARDS")
    samples = list_samples(folder)
    check_keys(folder, samples)
    # Others come first: of two copies the first is kept.
    others = [local_folder(path, where="--against") for path in arguments.against]
    images = pa.concat_tables([*map(list_images, others), samples])
    num_others = len(images) - len(samples)

    # Equal as stored, or before they were converted.
    first = positions = np.arange(len(images))
    for column in ("blake3", "original"):
        hashes = b"".join(images[column].to_pylist())
        equal = first_equal(np.frombuffer(hashes, "<u8").reshape(-1, 4))
        first = np.minimum(first, equal)
    is_exact = first != positions
    # NaN becomes null in the table: without a copy there is no similarity.
    alike = np.where(is_exact, 1.0, np.nan)
    if arguments.similar:
        find_similar(images, first, alike, num_workers=arguments.num_workers)

    # One row for each sample of the folder; the others are only what it is compared with.
    is_copy = first != positions
    own = slice(num_others, None)
    # Null for images that are no copies; `take` passes it on.
    copied = pa.array(first[own], mask=~is_copy[own])
    table = pa.table(
        {
            "key": samples["name"],
            "path": samples["path"],
            "keep": ~is_copy[own],
            "copy_of": images["name"].take(copied),
            "class": samples["class"],
            "class_of_copied": images["class"].take(copied),
            "similarity": pa.array(alike[own], pa.float32(), from_pandas=True),
        }
    )

    # The least similar pairs are the ones that may be wrong.
    kept = table.filter(table["keep"])["key"].to_pylist()
    similar = np.flatnonzero(is_copy & ~is_exact & (positions >= num_others))
    shown = similar[np.argsort(alike[similar], kind="stable")[:NUM_PAIRS]].tolist()
    pairs = []
    for position in shown:
        both = images.take([first[position], position]).to_pylist()
        pairs.append((f"{alike[position]:.4f}", [image_of(row) for row in both]))

    output = Path(arguments.output or f"{folder.resolve()}-duplicates")
    with writing(output, where="--output"):
        with atomic_file(output / TABLE_NAME) as file:
            pq.write_table(table, file)
        write_text(output / KEYS_NAME, "".join(f"{key}\n" for key in kept))
        # A picture of an earlier command would not be about these pairs.
        (output / PICTURE_NAME).unlink(missing_ok=True)
        if pairs:
            draw_rows(output / PICTURE_NAME, pairs)

    num_copies = len(table) - len(kept)
    # The images of --against come first, so that lower positions are theirs.
    num_of_others = int((is_copy & (first < num_others))[own].sum())
    of_others = f"; {num_of_others:,} of an image of --against" if others else ""
    print(
        f"{folder}: {len(samples):,} images, {num_copies:,} of them copies: "
        f"{num_copies - len(similar):,} with equal bytes, {len(similar):,} similar{of_others}"
    )
    # Other sets may name their classes in another way.
    ours = table.filter(pa.array(first[own] >= num_others))
    mixed = ours.filter(pc.not_equal(ours["class"], ours["class_of_copied"]))
    if len(mixed):
        row = mixed.slice(0, 1).to_pylist()[0]
        print(
            f"note: {len(mixed):,} copies have another class than the image that they copy: "
            f"{row['path']!r} is {row['class']!r}, {row['copy_of']!r} {row['class_of_copied']!r}"
        )
    print(f"written: {', '.join(str(path) for path in sorted(output.iterdir()))}")
    keys, table = (quote(str(output / name)) for name in (KEYS_NAME, TABLE_NAME))
    print(
        f"next: train with data.only_keys={keys}, or make the shards again without the copies: "
        f"source.leave_out={table}"
    )


def find_similar(
    images: pa.Table, first: np.ndarray, alike: np.ndarray, *, num_workers: int
) -> None:
    """Note in `first` which image each one copies, and in `alike` how much; other bytes alone."""
    descriptors = describe_all(images, num_workers=num_workers)
    positions = np.arange(len(images))
    # Images with equal bytes are settled, so they are not compared again.
    likely = np.where(first == positions, nearest_similar(descriptors), positions)
    rows = np.flatnonzero(likely != positions)
    # Read one pair at a time: all rows as Python objects would take gigabytes.
    pairs = (
        [images.slice(i, 1).to_pylist()[0] for i in (likely[row], row)] for row in rows
    )
    with Workers(compare, num=num_workers, imports=[compare.__module__]) as workers:
        for number, _, likeness in workers.results(pairs):
            if likeness:
                row = rows[number]
                first[row] = likely[row]
                alike[row] = likeness


def describe_all(images: pa.Table, *, num_workers: int) -> np.ndarray:
    """Return the descriptors of all images; warn if some cannot be decoded."""
    starts = range(0, len(images), DESCRIBED_ROWS)
    num_lost = 0
    descriptors = np.zeros((len(images), NUM_FREQUENCIES), np.int16)
    # Rows: a pickled slice of a table would have the whole of it.
    batches = (images.slice(start, DESCRIBED_ROWS).to_pylist() for start in starts)
    with (
        item_progress("describe images", total=len(images)) as advance,
        Workers(describe, num=num_workers, imports=[describe.__module__]) as workers,
    ):
        for number, batch, (found, lost) in workers.results(batches):
            # Batches may arrive in any order.
            descriptors[starts[number] :][: len(batch)] = found
            num_lost += lost
            advance(len(batch))

    if num_lost:
        print(
            f"warning: {num_lost:,} images cannot be decoded and are compared by bytes only"
        )
    return descriptors


if __name__ == "__main__":
    run_script(main)
