"""Write a corpus with a label space of ImageNet-21k's size: Chinese characters drawn from fonts.

    apt-get install fonts-arphic-ukai fonts-arphic-uming fonts-wqy-zenhei fonts-wqy-microhei \
        fonts-babelstone-han fonts-droid-fallback unicode-data
    python benchmarks/corpora/glyph_corpus.py runs/glyphs --images-per-class 10

Owns: the layout on disk and where faults are planted. The same options give the same bytes.
Leaves out: drawing (`glyph_drawing`), creating faults (`planted_faults`).

OUTPUT/tars/U4E00.tar ...   --layout tars: one tar per class, as ImageNet-21k is distributed
OUTPUT/corpus.tar           --layout tar_of_tars: these in one tar
OUTPUT/images/U4E00/...     --layout folders
OUTPUT/classes.txt          class names in order, for labels.space
OUTPUT/parents.csv          class, radical; for labels.parents
OUTPUT/faults.csv           with --faults: path, fault, expected outcome, original of a copy
"""

from __future__ import annotations

import argparse
import csv
import io
import multiprocessing
import os
import random
import shutil
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout

try:
    from benchmarks.corpora.glyph_drawing import (
        DRAWINGS,
        FORMATS,
        NUM_CLASSES,
        Look,
        class_name,
        encode,
        load_fonts,
        radicals,
        require_packages,
        shape_groups,
    )
    from benchmarks.corpora.planted_faults import COPY, FAULTS
    from vitscale.config.errors import UserError, run_script
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e '.[demo,dev]'", file=sys.stderr)
    raise SystemExit(2) from None

LAYOUTS = ("tars", "tar_of_tars", "folders")


@dataclass(frozen=True, slots=True)
class Corpus:
    """What every writing process needs."""

    drawing: str
    look: Look
    classes: tuple[int, ...]
    images_per_class: int
    copies_of_fault: int

    def faults_of(self, number: int) -> Iterator[tuple[str, str, str]]:
        """(fault, file name, name of the file it is made from) for one class."""
        planted = [fault for fault in FAULTS for _ in range(self.copies_of_fault)]
        for i, fault in enumerate(planted):
            if self.classes[i * len(self.classes) // len(planted)] == number:
                suffix = FAULTS[fault].suffix or self.look.format
                name = f"{FAULTS[fault].prefix}{class_name(number)}_{fault}_{i:03d}.{suffix}"
                yield fault, name, self.name_of(number, i % self.images_per_class)

    def name_of(self, number: int, position: int) -> str:
        return f"{class_name(number)}_{position:04d}.{self.look.format}"

    def files_of(self, number: int) -> Iterator[tuple[str, bytes]]:
        """Every file of one class, faults last."""
        draw = DRAWINGS[self.drawing]
        position_of = {}
        for position in range(self.images_per_class):
            name = self.name_of(number, position)
            position_of[name] = position
            yield name, encode(draw(number, position, self.look), self.look.format)
        for fault, name, original in self.faults_of(number):
            image = draw(number, position_of[original], self.look)
            make = FAULTS[fault].make
            rng = random.Random(f"{self.look.seed}/{name}")
            yield name, encode(image, self.look.format) if make is None else make(image, rng)


def main() -> None:
    options = parse_arguments()
    if options.drawing == "glyphs":
        require_packages()
        load_fonts()
    if not 1 <= options.classes <= NUM_CLASSES:
        raise UserError(f"{options.classes}", where="--classes", allowed=f"1 to {NUM_CLASSES}")
    output: Path = options.output
    if os.path.lexists(output):
        raise UserError("exists already", where=str(output), next_step="choose another folder")
    corpus = Corpus(
        drawing=options.drawing,
        look=Look(side=options.side, format=options.format, seed=options.seed),
        classes=tuple(i * NUM_CLASSES // options.classes for i in range(options.classes)),
        images_per_class=options.images_per_class,
        copies_of_fault=options.faults,
    )
    temporary = output.with_name(f".{output.name}.preparing")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    WRITERS[options.layout](temporary, corpus, workers=options.workers)
    write_tables(temporary, corpus, folders=options.layout == "folders")
    temporary.rename(output)
    num_faults = corpus.copies_of_fault * len(FAULTS)
    num_images = len(corpus.classes) * corpus.images_per_class
    print(f"{output}: {len(corpus.classes):,} classes, {num_images:,} images, {num_faults} faults")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path, help="folder to create")
    parser.add_argument("--drawing", choices=DRAWINGS, default="glyphs")
    parser.add_argument("--layout", choices=LAYOUTS, default="tars")
    parser.add_argument(
        "--classes",
        type=int,
        default=NUM_CLASSES,
        help="number of classes, spread over all characters",
    )
    parser.add_argument("--images-per-class", type=positive, default=10)
    parser.add_argument("--side", type=positive, default=64, help="height and width in pixels")
    parser.add_argument("--format", choices=FORMATS, default="png")
    parser.add_argument("--faults", type=int, default=0, help="number of files per fault")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=positive, default=len(os.sched_getaffinity(0)))
    return parser.parse_args()


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def class_tar(number: int, corpus: Corpus) -> bytes:
    """The tar of one class. Owner, mode and time are constants."""
    file = io.BytesIO()
    for name, data in corpus.files_of(number):
        append_member(file, name, data)
    file.write(bytes(2 * tarfile.BLOCKSIZE))
    return file.getvalue()


def append_member(file: io.BufferedIOBase, name: str, data: bytes) -> None:
    header = tarfile.TarInfo(name)
    header.size, header.mode = len(data), 0o644
    file.write(header.tobuf(tarfile.USTAR_FORMAT))
    file.write(data + bytes(-len(data) % tarfile.BLOCKSIZE))


def write_tar(number: int, corpus: Corpus, folder: Path) -> None:
    (folder / f"{class_name(number)}.tar").write_bytes(class_tar(number, corpus))


def write_folder(number: int, corpus: Corpus, folder: Path) -> None:
    own = folder / class_name(number)
    own.mkdir()
    for name, data in corpus.files_of(number):
        (own / name).write_bytes(data)


def write_tars(output: Path, corpus: Corpus, *, workers: int) -> None:
    (output / "tars").mkdir()
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        write = partial(write_tar, corpus=corpus, folder=output / "tars")
        pool.map(write, corpus.classes, chunksize=32)


def write_folders(output: Path, corpus: Corpus, *, workers: int) -> None:
    (output / "images").mkdir()
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        write = partial(write_folder, corpus=corpus, folder=output / "images")
        pool.map(write, corpus.classes, chunksize=32)


def write_tar_of_tars(output: Path, corpus: Corpus, *, workers: int) -> None:
    with (
        multiprocessing.get_context("fork").Pool(workers) as pool,
        open(output / "corpus.tar", "xb") as file,
    ):
        tars = pool.imap(partial(class_tar, corpus=corpus), corpus.classes, chunksize=32)
        for number, data in zip(corpus.classes, tars, strict=True):
            append_member(file, f"{class_name(number)}.tar", data)
        file.write(bytes(2 * tarfile.BLOCKSIZE))


WRITERS = {"tars": write_tars, "tar_of_tars": write_tar_of_tars, "folders": write_folders}


def write_tables(output: Path, corpus: Corpus, *, folders: bool) -> None:
    names = [class_name(number) for number in corpus.classes]
    (output / "classes.txt").write_text("".join(f"{name}\n" for name in names))
    parents = radicals() if corpus.drawing == "glyphs" else shape_groups()
    with open(output / "parents.csv", "x", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerows((class_name(number), parents[number]) for number in corpus.classes)
    if not corpus.copies_of_fault:
        return
    with open(output / "faults.csv", "x", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("path", "fault", "expected", "of"))
        for number in corpus.classes:
            within = class_name(number) + ("" if folders else ".tar")
            for fault, name, original in corpus.faults_of(number):
                expected = FAULTS[fault].expected
                of = f"{within}/{original}" if expected == COPY else ""
                rows.writerow((f"{within}/{name}", fault, expected, of))


if __name__ == "__main__":
    run_script(main)
