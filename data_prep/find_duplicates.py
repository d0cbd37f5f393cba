"""Find copies among the images of a shard folder, and copies of the images of others.

    python data_prep/find_duplicates.py SHARDS [--against SHARDS_OR_FOLDER ...] [--similar]

Nothing is removed: it writes `duplicates.parquet`, a row for each sample, `keep.txt`, the keys to
train on, and `pairs.png`, the least similar pairs. Use and limits: docs/duplicates.md.

Owns: the command line, and the files written. `duplicates` reads images and searches.
"""

from __future__ import annotations

import argparse
import shutil
import sys

try:
    from collections.abc import Iterator, Sequence
    from functools import partial
    from pathlib import Path
    from shlex import quote

    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    from data_prep.duplicates.equal import note_equal
    from data_prep.duplicates.reading import (
        check_keys,
        compare,
        describe,
        image_of,
        list_images,
        list_samples,
        mapped,
        store,
        stored,
        stored_hashes,
    )
    from data_prep.duplicates.similar import NUM_FREQUENCIES, nearest_similar
    from data_prep.formats.index_files import local_folder
    from vitscale.config.errors import run_script
    from vitscale.distributed.atomic_files import atomic_file
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
RESULTS = pa.schema(
    {
        "key": "string",
        "path": "string",
        "keep": pa.bool_(),
        "copy_of": "string",
        "class": "string",
        "class_of_copied": "string",
        "similarity": pa.float32(),
    }
)
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
    others = [local_folder(path, where="--against") for path in arguments.against]
    output = Path(arguments.output or f"{folder.resolve()}-duplicates")
    lists = output / ".lists"
    with writing(output, where="--output"):
        # A command that was killed has left its lists.
        shutil.rmtree(lists, ignore_errors=True)
        lists.mkdir()
        try:
            search(lists, folder, others, output, arguments)
        finally:
            shutil.rmtree(lists)
    print(f"written: {', '.join(str(path) for path in sorted(output.iterdir()))}")
    keys, table = (quote(str(output / name)) for name in (KEYS_NAME, TABLE_NAME))
    print(
        f"next: train with data.only_keys={keys}, or make the shards again without the copies: "
        f"source.leave_out={table}"
    )


def search(
    lists: Path,
    folder: Path,
    others: Sequence[Path],
    output: Path,
    arguments: argparse.Namespace,
) -> None:
    """Write the results, and print what was found. lists: a folder for more than memory holds."""
    # Others come first: of two copies the first is kept.
    files = [lists / str(number) for number in range(len(others) + 1)]
    num_others = sum(map(store, map(list_images, others), files))
    num = store(list_samples(folder), files[-1])
    check_keys(folder, files[-1:], num=num)

    # Equal as stored, or before they were converted.
    first = np.arange(num_others + num)
    for column in ("blake3", "original"):
        note_equal(partial(stored_hashes, files, column), first)
    is_exact = first != np.arange(len(first))
    # NaN becomes null in the table: without a copy there is no similarity.
    alike = np.where(is_exact, np.float32(1), np.float32("nan"))
    images = mapped(files)
    if arguments.similar:
        find_similar(images, first, alike, num_workers=arguments.num_workers)

    # The least similar pairs are the ones that may be wrong.
    is_copy = (first != np.arange(len(first)))[num_others:]
    similar = num_others + np.flatnonzero(is_copy & ~is_exact[num_others:])
    shown = similar[np.argsort(alike[similar], kind="stable")[:NUM_PAIRS]].tolist()
    pairs = []
    for position in shown:
        both = (images.slice(i, 1).to_pylist()[0] for i in (first[position], position))
        pairs.append((f"{alike[position]:.4f}", [image_of(row) for row in both]))

    # Other sets may name their classes in another way.
    num_mixed = 0
    example: dict[str, str] = {}
    with (
        atomic_file(output / TABLE_NAME) as file,
        atomic_file(output / KEYS_NAME) as keys,
        pq.ParquetWriter(file, RESULTS) as writer,
    ):
        for table, firsts in results(files, first, alike, start=num_others):
            writer.write_table(table)
            kept = table["key"].filter(table["keep"]).to_pylist()
            keys.write("".join(f"{key}\n" for key in kept).encode())
            ours = table.filter(pa.array(firsts >= num_others))
            mixed = ours.filter(pc.not_equal(ours["class"], ours["class_of_copied"]))
            if len(mixed):
                example = example or mixed.slice(0, 1).to_pylist()[0]
                num_mixed += len(mixed)
    # A picture of an earlier command would not be about these pairs.
    (output / PICTURE_NAME).unlink(missing_ok=True)
    if pairs:
        draw_rows(output / PICTURE_NAME, pairs)

    # The images of --against come first, so that lower positions are theirs.
    num_of_others = int((is_copy & (first[num_others:] < num_others)).sum())
    of_others = f"; {num_of_others:,} of an image of --against" if others else ""
    num_copies = is_copy.sum()
    print(
        f"{folder}: {num:,} images, {num_copies:,} of them copies: "
        f"{num_copies - len(similar):,} with equal bytes, {len(similar):,} similar{of_others}"
    )
    if example:
        print(
            f"note: {num_mixed:,} copies have another class than the image that they copy: "
            f"{example['path']!r} is {example['class']!r}, "
            f"{example['copy_of']!r} {example['class_of_copied']!r}"
        )


def results(
    files: Sequence[Path], first: np.ndarray, alike: np.ndarray, *, start: int
) -> Iterator[tuple[pa.Table, np.ndarray]]:
    """Yield (rows of RESULTS, which image each is a copy of) for the images of the last file.

    start: the position of the first of them.
    """
    # What the images are called that have copies.
    originals = np.unique(first[first != np.arange(len(first))])
    parts = []
    end = 0
    for rows in stored(files, "name", "class"):
        ends = np.searchsorted(originals, [end, end + len(rows)])
        parts.append(rows.take(originals[slice(*ends)] - end))
        end += len(rows)
    copied = pa.concat_tables(parts).combine_chunks()

    for rows in stored(files[-1:], "name", "path", "class"):
        stop = start + len(rows)
        firsts = first[start:stop]
        is_first = firsts == np.arange(start, stop)
        # Null for images that are no copies; `take` passes it on.
        places = pa.array(np.searchsorted(originals, firsts), mask=is_first)
        columns = {
            "key": rows["name"],
            "path": rows["path"],
            "keep": is_first,
            "copy_of": copied["name"].take(places),
            "class": rows["class"],
            "class_of_copied": copied["class"].take(places),
            "similarity": pa.array(alike[start:stop], from_pandas=True),
        }
        yield pa.table(columns, schema=RESULTS), firsts
        start = stop


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
