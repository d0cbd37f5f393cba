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
FORK = multiprocessing.get_context("fork")


def copy(source: PhotoFolder, output: Path) -> float:
    """Read every file in the order of its name and append it to one file; one process."""
    output.mkdir()
    buffer, prefix = memoryview(bytearray(BUFFER_BYTES)), str(source.root) + os.sep
    start = time.perf_counter()
    with open(output / "all", "xb", buffering=0) as target:
        for path in source.paths:
            file = os.open(prefix + path, os.O_RDONLY)
            while num := os.readv(file, [buffer]):
                written = 0
                while written < num:
                    written += target.write(buffer[written:num]) or 0
            os.close(file)
        os.fsync(target.fileno())
    return time.perf_counter() - start


def shard_writer(source: PhotoFolder, output: Path) -> float:
    """webdataset's writer in the loop of its documentation; one process, nothing flushed."""
    output.mkdir()
    start = time.perf_counter()
    files = []
    for folder, _, names in os.walk(source.root):
        files += [os.path.join(folder, name) for name in names]
    random.Random(0).shuffle(files)
    labels = {
        name: i for i, name in enumerate(sorted({f.split(os.sep)[-2] for f in files}))
    }
    pattern, most = str(output / "train-%06d.tar"), SHARD_MIB << 20
    with webdataset.ShardWriter(
        pattern, maxcount=1_000_000, maxsize=most, verbose=0
    ) as sink:
        for path in files:
            with open(path, "rb") as file:
                image = file.read()
            key = os.path.splitext(os.path.basename(path))[0]
            label = labels[path.split(os.sep)[-2]]
            sink.write({"__key__": key, "jpg": image, "cls": label})
    return time.perf_counter() - start


def pillow(source: PhotoFolder, output: Path) -> float:
    """Decode every picture to pixels; the bytes are in memory before the clock starts."""
    output.mkdir()
    ready = FORK.Barrier(NUM_CORES + 1)
    processes = [
        FORK.Process(
            target=_decode, args=(source.root, source.paths[i::NUM_CORES], ready)
        )
        for i in range(NUM_CORES)
    ]
    for process in processes:
        process.start()
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
    ready.wait()
    for data in contents:
        Image.open(BytesIO(data), formats=("JPEG",)).load()


def header(source: PhotoFolder, output: Path) -> float:
    return run_command(make_shards_command(source.root, output, "images.check=header"))


def decode(source: PhotoFolder, output: Path) -> float:
    return _checked(source, output, "decode")


def strict(source: PhotoFolder, output: Path) -> float:
    return _checked(source, output, "strict")


def _checked(source: PhotoFolder, output: Path, check: str) -> float:
    how = f"images.check={check}"
    return run_command(
        make_shards_command(source.root, output, how, shard_mib=DECODE_SHARD_MIB)
    )


def check_copy(source: PhotoFolder, output: Path) -> None:
    if blake3().update_mmap(output / "all").digest() != source.whole:
        raise Failed(f"{output / 'all'} is not the concatenation of the files")


def check_nothing(source: PhotoFolder, output: Path) -> None:
    """Pillow writes nothing; an image that it cannot decode ends its process."""


def check_plain_tars(source: PhotoFolder, output: Path) -> None:
    """Tars without an index: the images by their keys."""
    if images_of(output) != {
        Path(path).stem: digest for path, digest in source.digests.items()
    }:
        raise Failed(f"{output} does not contain the images of {source.root}")


def check_shards(source: PhotoFolder, output: Path) -> None:
    """Every image of the source is stored once, where the index says, under its class, shuffled.

    A repaired image has other bytes: it was read from those of the source, and decodes.
    """
    columns = ("path", "key", "status", "blake3")
    table = pq.read_table(output / "ledger.parquet", columns=list(columns))
    ledger = {
        row["key"]: row for row in table.to_pylist() if row["status"] != "rejected"
    }
    classes = json.loads((output / "manifest.json").read_text())["classes"]
    stored, order = set(images_of(output).values()), []
    for row in pq.read_table(output / "index.parquet").to_pylist():
        path, status, read = (
            ledger[row["key"]][name] for name in ("path", "status", "blake3")
        )
        order.append(path)
        with open(output / row["shard"], "rb") as file:
            file.seek(row["offset"])
            data = file.read(row["length"])
        digest = blake3(data).digest()
        if status == "repaired":
            Image.open(BytesIO(data), formats=("JPEG", "PNG", "WEBP")).load()
        original = read if status == "repaired" else digest
        if original != source.digests[path] or digest != row["blake3"]:
            raise Failed(f"{output}: {row['key']} does not contain {path}")
        if classes[row["label"]] != path.split("/")[0] or digest not in stored:
            raise Failed(f"{output}: {path} has a wrong label, or is in no tar")
    if sorted(order) != source.paths:
        raise Failed(f"{output}: {len(order)} of {len(source.paths)} images are stored")
    neighbours = sum(a < b for a, b in zip(order, order[1:], strict=False))
    if len(order) > 100 and not 0.3 < neighbours / len(order) < 0.7:
        raise Failed(f"{output} is not shuffled")


def images_of(folder: Path) -> dict[str, bytes]:
    """Key -> hash of every image in the tars of a folder."""
    found = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                content = tar.extractfile(member)
                if content is not None and not member.name.endswith((".cls", ".json")):
                    found[Path(member.name).stem] = blake3(content.read()).digest()
    return found


# Name -> (timed part, check, what it is). The first three read all photographs, the others a part.
CANDIDATES: dict[str, tuple[Callable[..., float], Callable[..., None], str]] = {
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
OF_PART = ("pillow", "decode", "strict")
COMPARED = (
    *(("header", "copy"), ("header", "shardwriter")),
    *(("decode", "pillow"), ("strict", "pillow")),
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
    if parser.parse_args().toy:
        parser.set_defaults(rounds=1, total_mib=4, decode_images=16)
    options = parser.parse_args()
    run_benchmark(options, lambda work: measure(work, options), "webdataset", "pillow")


def measure(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    photos = given_photos(options.images) if options.images else noise_photos()
    total = int(options.total_mib * 2**20)
    source = write_photo_folder(work / "photos", photos, total_bytes=total)
    part = part_of(source, work / "part", num=options.decode_images)
    seconds: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    cpu: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    for turn in range(options.rounds):
        for name, (run, check, _) in CANDIDATES.items():
            folder, output = part if name in OF_PART else source, work / f"{name}.out"
            before = sum(os.times()[:4])
            seconds[name].append(run(folder, output))
            cpu[name].append(sum(os.times()[:4]) - before)
            print(f"  round {turn + 1}: {name} {seconds[name][-1]:.2f} s", flush=True)
            check(folder, output)
            shutil.rmtree(output)
            os.sync()  # unwritten pages must not slow the next candidate
    for folder in (source, part):
        print(
            f"\n{len(folder.paths):,} files, {folder.num_bytes / 1e6:,.0f} MB; MB/s, processor s"
        )
        for name in CANDIDATES:
            if (name in OF_PART) == (folder is part):
                rates = spread(
                    [folder.num_bytes / 1e6 / each for each in seconds[name]]
                )
                print(
                    f"{name:12} {rates:20} {median(cpu[name]):7.1f}  {CANDIDATES[name][2]}"
                )
    for name, other in COMPARED:
        print(f"{name} / {other}: {ratio(seconds[other], seconds[name])}")
    return {
        "bytes": source.num_bytes,
        "part": part.num_bytes,
        "seconds": seconds,
        "cpu": cpu,
    }


if __name__ == "__main__":
    run_script(main)
