"""Find copies among the images of a shard folder, and copies of the images of others.

    python data_prep/find_duplicates.py SHARDS [--against SHARDS_OR_FOLDER ...] [--similar]

Nothing is removed: it writes `duplicates.parquet`, a row for each sample, `keep.txt`, the keys to
train on, and `pairs.png`, the least similar pairs. Use and limits: docs/duplicates.md.

Owns: the command line, and the files written.
Leaves out: reading images and the search (`duplicates`).
"""

from __future__ import annotations

import argparse
import sys

try:
    from pathlib import Path

    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image, ImageDraw

    from data_prep.duplicates.descriptors import DESCRIPTOR, similarity
    from data_prep.duplicates.reading import (
        ImageList,
        batches,
        describe,
        list_images,
        list_samples,
        source_paths,
        thumbnail,
    )
    from data_prep.duplicates.search import first_equal, first_similar
    from vitscale.config.errors import run_script
    from vitscale.distributed.atomic_files import atomic_file, make_folders
    from vitscale.distributed.processes import num_cores, ordered_results
    from vitscale.tracking.console import item_progress
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None

TABLE_NAME, KEYS_NAME, PICTURE_NAME = "duplicates.parquet", "keep.txt", "pairs.png"
NUM_PAIRS, PAIRS_PER_ROW, SIDE, GAP = 60, 4, 128, 16
BATCH_ROWS = 1 << 14


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Find copies among the images of a shard folder.")
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
        help="find copies by what they show, too; else by equal bytes only",
    )
    parser.add_argument("--output", metavar="FOLDER", help="default: SHARDS-duplicates")
    parser.add_argument("--num-workers", type=int, help=f"processes (default: {num_cores()})")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    folder = Path(arguments.shards)
    samples = list_samples(folder)
    # Others come first: of two copies the first is kept.
    lists = [*(list_images(Path(path)) for path in arguments.against), samples]
    own = slice(sum(map(len, lists)) - len(samples), None)
    first = first_equal(np.concatenate([images.hashes for images in lists]))
    positions = np.arange(len(first))
    exact = first != positions
    alike = np.where(exact, 1.0, np.nan)
    if arguments.similar:
        descriptors = describe_all(lists, num_workers=arguments.num_workers)
        first = np.where(exact, first, first_similar(descriptors))
        similar = np.flatnonzero(~exact & (first != positions))
        for start in range(0, len(similar), BATCH_ROWS):
            rows = similar[start : start + BATCH_ROWS]
            alike[rows] = similarity(descriptors[rows], descriptors[first[rows]])
    is_copy = first != positions
    output = Path(arguments.output or f"{folder.resolve()}-duplicates")
    make_folders(output)
    names = pa.chunked_array([c for images in lists for c in images.names.chunks], pa.string())
    table = pa.table(
        {
            "key": samples.names,
            "path": source_paths(folder, samples.names),
            "keep": ~is_copy[own],
            "copy_of": names.take(pa.array(first[own], mask=~is_copy[own])),
            "similarity": pa.array(alike[own], pa.float32(), from_pandas=True),
        }
    )
    write_lists(output, table)
    pairs = np.flatnonzero(is_copy & ~exact & (positions >= own.start))
    pairs = pairs[np.argsort(alike[pairs], kind="stable")[:NUM_PAIRS]]
    (output / PICTURE_NAME).unlink(missing_ok=True)
    if len(pairs):
        draw_pairs(output / PICTURE_NAME, lists, first=first, pairs=pairs, alike=alike)
    num_copies, num_exact = int(is_copy[own].sum()), int(exact[own].sum())
    num_others = int((is_copy & (first < own.start))[own].sum())
    print(
        f"{folder}: {len(samples):,} images, {num_copies:,} of them copies: {num_exact:,} with "
        f"equal bytes, {num_copies - num_exact:,} similar; {num_others:,} of an image of --against"
    )
    print(f"written: {', '.join(str(path) for path in sorted(output.iterdir()))}")
    print(
        f"next: train with data.only_keys={output / KEYS_NAME}, or make the shards again "
        f"without the copies: source.leave_out={output / TABLE_NAME}"
    )


def write_lists(output: Path, table: pa.Table) -> None:
    """Write the table, and the keys that it keeps as text."""
    with atomic_file(output / TABLE_NAME) as file:
        pq.write_table(table, file)
    kept = table.filter(table.column("keep")).select(["key"])
    with atomic_file(output / KEYS_NAME) as file:
        for batch in kept.to_batches(max_chunksize=BATCH_ROWS):
            file.write("".join(f"{key}\n" for key in batch.column("key").to_pylist()).encode())


def describe_all(lists: list[ImageList], *, num_workers: int | None) -> np.ndarray:
    """Return the descriptors of all images; warn if some cannot be decoded."""
    parts, num_lost = [np.zeros(0, DESCRIPTOR)], 0
    places = (batch for images in lists for batch in batches(images))
    with item_progress("describe images", total=sum(map(len, lists))) as advance:
        for batch, (descriptors, lost) in ordered_results(
            describe, places, num_workers=num_workers
        ):
            parts.append(descriptors)
            num_lost += lost
            advance(len(batch))
    if num_lost:
        print(f"warning: {num_lost:,} images cannot be decoded and are compared by bytes only")
    return np.concatenate(parts)


def draw_pairs(
    path: Path, lists: list[ImageList], *, first: np.ndarray, pairs: np.ndarray, alike: np.ndarray
) -> None:
    """Draw copies beside the images that they are like, with their similarity."""
    width, height = 2 * SIDE + GAP, SIDE + GAP
    num_rows = -(-len(pairs) // PAIRS_PER_ROW)
    sheet = Image.new("RGB", (PAIRS_PER_ROW * width, num_rows * height), "white")
    draw = ImageDraw.Draw(sheet)
    starts = np.cumsum([0, *map(len, lists)])
    for number, copy in enumerate(pairs.tolist()):
        x, y = number % PAIRS_PER_ROW * width, number // PAIRS_PER_ROW * height
        draw.text((x, y), f"{alike[copy]:.4f}", "black")
        for side, position in enumerate((int(first[copy]), copy)):
            of = int(np.searchsorted(starts, position, side="right")) - 1
            (place,) = lists[of].places(position - starts[of], position - starts[of] + 1)
            sheet.paste(thumbnail(place, SIDE), (x + side * SIDE, y + GAP - 2))
    with atomic_file(path) as file:
        sheet.save(file, "PNG")


if __name__ == "__main__":
    run_script(main)
