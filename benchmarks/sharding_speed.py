"""Compare data_prep/make_shards.py with plain copying, webdataset's ShardWriter and Pillow.

    python benchmarks/sharding_speed.py --images PHOTOS --work /big/disk --json results.json

Every candidate writes into a fresh folder, and every output is read back and compared by hash
outside the timed part, without `data_prep/verify_shards.py`: a benchmark does not trust what it
measures. Source files are in the page cache.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.parquet as pq
import webdataset
from blake3 import blake3
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout

from benchmarks.corpora.photo_folder import (
    PhotoFolder,
    given_photos,
    noise_photos,
    part_of,
    write_photo_folder,
)
from benchmarks.measuring import (
    NUM_CORES,
    SHARD_MIB,
    Failed,
    make_shards_command,
    parser_of,
    ratio,
    run_benchmark,
    run_command,
    spread,
)
from vitscale.config.errors import run_script

BUFFER_BYTES = 1 << 20
# Small shards, so each core has as many as with a large corpus.
DECODE_SHARD_MIB = 16
# Pillow's processes start at once, without importing this module again.
FORK = multiprocessing.get_context("fork")


def copy(source: PhotoFolder, output: Path) -> float:
    """Read every file in the order of its name and append it to one file; one process."""
    output.mkdir()
    # System calls on one buffer, and joined strings: Path objects would cost more than the copy.
    buffer = memoryview(bytearray(BUFFER_BYTES))
    prefix = str(source.root) + os.sep
    paths = source.paths

    start = time.perf_counter()
    with open(output / "all", "xb", buffering=0) as target:
        for path in paths:
            file = os.open(prefix + path, os.O_RDONLY)
            while num := os.readv(file, [buffer]):
                # A raw write may take only a part, for example on a disk that is nearly full.
                written = 0
                while written < num:
                    written += target.write(buffer[written:num]) or 0
            os.close(file)
        # Inside the clock: make_shards flushes its tars, too.
        os.fsync(target.fileno())
    return time.perf_counter() - start


def shard_writer(source: PhotoFolder, output: Path) -> float:
    """webdataset's writer in the loop of its documentation; one process, nothing flushed."""
    output.mkdir()
    # Listing and shuffling count: make_shards, whose whole command is timed, does both.
    start = time.perf_counter()
    files = []
    for folder, _, names in os.walk(source.root):
        files += [os.path.join(folder, name) for name in names]
    random.Random(0).shuffle(files)
    folders = {os.path.dirname(path) for path in files}
    classes = sorted(os.path.basename(folder) for folder in folders)
    labels = {name: label for label, name in enumerate(classes)}

    writer = webdataset.ShardWriter(
        str(output / "train-%06d.tar"),
        # The size alone ends a tar, as with make_shards.
        maxcount=1_000_000,
        maxsize=SHARD_MIB << 20,
        verbose=0,
    )
    with writer as sink:
        for path in files:
            with open(path, "rb") as file:
                image = file.read()
            folder, name = os.path.split(path)
            sample = {
                "__key__": os.path.splitext(name)[0],
                "jpg": image,
                "cls": labels[os.path.basename(folder)],
            }
            sink.write(sample)
    return time.perf_counter() - start


def pillow(source: PhotoFolder, output: Path) -> float:
    """Decode every picture to pixels; the bytes are in memory before the clock starts."""
    output.mkdir()
    # One more than the processes: this one starts the clock when all have read their files.
    ready = FORK.Barrier(NUM_CORES + 1)
    processes = []
    for i in range(NUM_CORES):
        paths = source.paths[i::NUM_CORES]
        process = FORK.Process(target=_decode, args=(source.root, paths, ready))
        process.start()
        processes.append(process)

    ready.wait()
    start = time.perf_counter()
    for process in processes:
        process.join()
    seconds = time.perf_counter() - start
    if any(process.exitcode for process in processes):
        raise Failed("a decoding process failed")
    return seconds


def _decode(root: Path, paths: Sequence[str], ready: Any) -> None:
    contents = [(root / path).read_bytes() for path in paths]
    # No process decodes while another one reads, and all begin together.
    ready.wait()
    for data in contents:
        Image.open(BytesIO(data), formats=("JPEG",)).load()


def header(source: PhotoFolder, output: Path) -> float:
    return _make_shards(source, output, check="header", shard_mib=SHARD_MIB)


def decode(source: PhotoFolder, output: Path) -> float:
    return _make_shards(source, output, check="decode", shard_mib=DECODE_SHARD_MIB)


def strict(source: PhotoFolder, output: Path) -> float:
    return _make_shards(source, output, check="strict", shard_mib=DECODE_SHARD_MIB)


def _make_shards(
    source: PhotoFolder, output: Path, *, check: str, shard_mib: int
) -> float:
    command = make_shards_command(
        source.root, output, f"images.check={check}", shard_mib=shard_mib
    )
    return run_command(command)


def check_copy(source: PhotoFolder, output: Path) -> None:
    # Mapped, since the file may be larger than the memory.
    digest = blake3().update_mmap(output / "all").digest()
    if digest != source.whole:
        raise Failed(f"{output / 'all'} is not the concatenation of the files")


def check_nothing(source: PhotoFolder, output: Path) -> None:
    """Pillow writes nothing; an image that it cannot decode ends its process."""


def check_plain_tars(source: PhotoFolder, output: Path) -> None:
    """Tars without an index: the images by their keys."""
    expected = {Path(path).stem: digest for path, digest in source.digests.items()}
    if images_of(output) != expected:
        raise Failed(f"{output} does not contain the images of {source.root}")


def check_shards(source: PhotoFolder, output: Path) -> None:
    """Every image of the source is stored once, where the index says, under its class, shuffled.

    A repaired image has other bytes: it was read from those of the source, and decodes.
    """
    columns = ["path", "key", "status", "blake3"]
    table = pq.read_table(output / "ledger.parquet", columns=columns)
    ledger = {}
    for row in table.to_pylist():
        if row["status"] != "rejected":
            ledger[row["key"]] = row
    manifest = json.loads((output / "manifest.json").read_text())
    classes = manifest["classes"]

    # The tars twice: by tarfile, as stock readers see them, and at the offsets of the index.
    stored = set(images_of(output).values())
    order = []
    for row in pq.read_table(output / "index.parquet").to_pylist():
        entry = ledger[row["key"]]
        path = entry["path"]
        order.append(path)
        with open(output / row["shard"], "rb") as file:
            file.seek(row["offset"])
            data = file.read(row["length"])
        digest = blake3(data).digest()

        original = digest
        if entry["status"] == "repaired":
            # The ledger has the hash of what was read; what was stored must at least decode.
            original = entry["blake3"]
            Image.open(BytesIO(data), formats=("JPEG", "PNG", "WEBP")).load()
        if original != source.digests[path] or digest != row["blake3"]:
            raise Failed(f"{output}: {row['key']} does not contain {path}")
        folder, _, _ = path.partition("/")
        if classes[row["label"]] != folder or digest not in stored:
            raise Failed(f"{output}: {path} has a wrong label, or is in no tar")

    if sorted(order) != source.paths:
        raise Failed(f"{output}: {len(order)} of {len(source.paths)} images are stored")

    # In a random order half of the neighbours rise; in the order of names, all do.
    rising = sum(a < b for a, b in zip(order, order[1:], strict=False))
    if len(order) > 100 and not 0.3 < rising / len(order) < 0.7:
        raise Failed(f"{output} is not shuffled")


def images_of(folder: Path) -> dict[str, bytes]:
    """Key -> hash of every image in the tars of a folder."""
    digests = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                name = Path(member.name)
                # Labels and metadata are members of their own, beside each image.
                if name.suffix in (".cls", ".json"):
                    continue
                content = tar.extractfile(member)
                if content is not None:
                    digests[name.stem] = blake3(content.read()).digest()
    return digests


Run = Callable[[PhotoFolder, Path], float]
Check = Callable[[PhotoFolder, Path], None]
# Name -> (timed part, check, what it is). The first three read all photographs, the others a part.
CANDIDATES: dict[str, tuple[Run, Check, str]] = {
    "copy": (copy, check_copy, "files into one file, fsync, 1 process"),
    "shardwriter": (
        shard_writer,
        check_plain_tars,
        "webdataset.ShardWriter, not flushed",
    ),
    "header": (
        header,
        check_shards,
        "make_shards.py images.check=header, whole command",
    ),
    "pillow": (
        pillow,
        check_nothing,
        f"Pillow decodes from memory, {NUM_CORES} processes",
    ),
    "decode": (
        decode,
        check_shards,
        "make_shards.py images.check=decode, whole command",
    ),
    "strict": (
        strict,
        check_shards,
        "make_shards.py images.check=strict, whole command",
    ),
}
# Decoding takes several times as long as copying, so it gets fewer photographs.
OF_PART = ("pillow", "decode", "strict")
# Each beside the least that its work can cost: moving the bytes, or decoding them.
COMPARED = (
    ("header", "copy"),
    ("header", "shardwriter"),
    ("decode", "pillow"),
    ("strict", "pillow"),
)


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument(
        "--images", type=Path, help="folder or tar of JPEGs; default: noise"
    )
    parser.add_argument(
        "--total-mib", type=float, default=1200, help="images are repeated"
    )
    parser.add_argument(
        "--decode-images", type=int, default=3000, help="number to decode"
    )
    # Only defaults change, so what is given with --toy still counts.
    if parser.parse_args().toy:
        parser.set_defaults(rounds=1, total_mib=4, decode_images=16)
    options = parser.parse_args()
    run_benchmark(options, lambda work: measure(work, options), "webdataset", "pillow")


def measure(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    photos = given_photos(options.images) if options.images else noise_photos()
    total = int(options.total_mib * 2**20)
    source = write_photo_folder(work / "photos", photos, total_bytes=total)
    part = part_of(source, work / "part", num=options.decode_images)
    inputs = {name: part if name in OF_PART else source for name in CANDIDATES}

    seconds: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    cpu: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    for turn in range(options.rounds):
        for name, (run, check, _) in CANDIDATES.items():
            output = work / f"{name}.out"
            before = processor_seconds()
            duration = run(inputs[name], output)
            cpu[name].append(processor_seconds() - before)
            seconds[name].append(duration)
            print(f"  round {turn + 1}: {name} {duration:.2f} s", flush=True)

            check(inputs[name], output)
            shutil.rmtree(output)
            os.sync()  # unwritten pages must not slow the next candidate

    # One table for each set of photographs: rates of different sets do not compare.
    for folder in (source, part):
        megabytes = folder.num_bytes / 1e6
        print(f"\n{len(folder.paths):,} files, {megabytes:,.0f} MB; MB/s, processor s")
        for name, (_, _, title) in CANDIDATES.items():
            if inputs[name] is folder:
                rates = spread([megabytes / value for value in seconds[name]])
                print(f"{name:12} {rates:20} {median(cpu[name]):7.1f}  {title}")
    for name, other in COMPARED:
        print(f"{name} / {other}: {ratio(seconds[other], seconds[name])}")
    return {
        "bytes": source.num_bytes,
        "part": part.num_bytes,
        "seconds": seconds,
        "cpu": cpu,
    }


def processor_seconds() -> float:
    """Those of this process so far, and of its children that have ended."""
    return sum(os.times()[:4])


if __name__ == "__main__":
    run_script(main)
