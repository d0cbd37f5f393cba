"""Open a training set of 10^9 samples in 10^6 tars, and read positions of it.

    python benchmarks/billion.py [--toy] [--samples N] [--tars N] [--work FOLDER] [--json FILE]

The index is synthetic: its records are random numbers, and its tars are sparse files, of which few
exist. It has no keys: index.parquet is empty, as no training reads it. Takes 21 bytes of disk a
sample. Memory is that of fresh processes, less what each had after its imports.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout

try:
    import numpy as np
    from blake3 import blake3

    from benchmarks.measuring import Failed, parser_of, run_benchmark, run_command
    from data_prep.formats.index_files import write_tars
    from vitscale.config.errors import run_script
    from vitscale.data import positions
    from vitscale.data.index import (
        FORMAT_VERSION,
        INDEX_NAME,
        MANIFEST_NAME,
        Manifest,
        SplitEntry,
        StoredFile,
        label_map_sha256,
        read_split,
    )
    from vitscale.data.order import SampleOrder
    from vitscale.data.positions import POSITION, layout_hash
    from vitscale.data.remote import prefix_of_hash
    from vitscale.data.settings import DataSettings
    from vitscale.data.training_set import TrainingSet, open_training_set
    from vitscale.distributed.atomic_files import write_json
    from vitscale.distributed.random_numbers import splitmix
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e '.[demo,dev]'", file=sys.stderr)
    raise SystemExit(2) from None

CLASSES = tuple(f"n{number:08d}" for number in range(21_841))
IMAGE_BLOCKS = 200  # of 512 bytes: 100 KB an image
# Tars that exist; the names of others are among these, too, so that each can be looked at.
MADE_TARS = 4096
# ImageNet-21k, in tars of a GiB.
IMAGENET = (14_200_000, 1420)
NUM_PROCESSES = 6
NUM_DRAWS = 500
# 128 nodes of 8 ranks, and the images of each in a batch of 65,536.
NUM_NODES, RANKS, MICRO_BATCH = 128, 8, 64


def main() -> None:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--samples", type=int, default=10**9)
    parser.add_argument("--tars", type=int, default=10**6)
    parser.add_argument("--open", type=Path, help="measure one process, and print it")
    options = parser.parse_args()
    if options.open:
        measure_process(options.open)
        return
    if options.toy:
        options.samples, options.tars = 10_000, 100
    run_benchmark(options, partial(measure, options=options), "numpy", "pyarrow")


def measure(work: Path, *, options: Namespace) -> dict[str, Any]:
    """Print the table. Raises Failed."""
    results: dict[str, Any] = {}

    def show(name: str, value: Any) -> None:
        results[name] = value
        print(f"{name:62} {value}", flush=True)

    start = time.perf_counter()
    folder = work / "large"
    make_index(folder, num_samples=options.samples, num_tars=options.tars)
    show("samples, tars", f"{options.samples:,}, {options.tars:,}")
    show("making the index, s", round(time.perf_counter() - start))
    files = (*folder.glob("*.bin"), *folder.glob("*.arrow"), folder / MANIFEST_NAME)
    size = sum(path.stat().st_size for path in files)
    show("bytes a sample beside keys", round(size / options.samples, 2))

    for name, value in processes(folder, options.rounds).items():
        show(name, value)
    for name, value in reads_of_nodes(folder).items():
        show(name, value)
    show("dry run, s", round(min(dry_run(folder) for _ in range(options.rounds)), 2))

    start = time.perf_counter()
    num = sum(len(piece) for piece in read_split(folder, split="train").pieces())
    if num != options.samples:
        raise Failed(f"{num:,} samples were read")
    show("all records read and hashed, s", round(time.perf_counter() - start, 1))

    small = work / "small"
    num_samples, num_tars = (1000, 10) if options.toy else IMAGENET
    make_index(small, num_samples=num_samples, num_tars=num_tars)
    show("samples, tars", f"{num_samples:,}, {num_tars:,}")
    for name, value in processes(small, options.rounds).items():
        show(f"of these: {name}", value)
    return results


def make_index(folder: Path, *, num_samples: int, num_tars: int) -> None:
    """Write a split `train` of equal tars; labels and hashes are random."""
    folder.mkdir()
    per_tar = num_samples // num_tars
    num_bytes = per_tar * IMAGE_BLOCKS * 512
    names = [f"train-{number % MADE_TARS:06d}.tar" for number in range(num_tars)]
    for name in set(names):
        with open(folder / name, "wb") as tar:
            tar.truncate(num_bytes)

    checks = np.empty(num_tars, np.uint64)
    records = np.empty(per_tar, POSITION)
    records["block"] = np.arange(per_tar) * IMAGE_BLOCKS
    records["length"] = (IMAGE_BLOCKS - 2) * 512
    hashed = blake3()
    with open(folder / positions.positions_name("train"), "wb") as file:
        for tar in range(num_tars):
            records["hash"] = splitmix(tar, per_tar)
            records["label"] = records["hash"] % len(CLASSES)
            data = records.tobytes()
            checks[tar] = prefix_of_hash(data)
            hashed.update(data)
            file.write(data)

    ends = np.arange(1, num_tars + 1) * per_tar
    columns = {
        "name": names,
        "end": ends,
        "bytes": np.full(num_tars, num_bytes),
        "positions": checks,
        "blake3": [bytes(32)] * num_tars,
    }
    (folder / INDEX_NAME).write_bytes(b"")
    entry = SplitEntry(
        num_samples=num_samples,
        num_bytes=num_bytes * num_tars,
        num_tars=num_tars,
        fingerprint="0" * 64,
        layout=layout_hash(ends, checks),
        tars=write_tars(folder / positions.tars_name("train"), columns),
        positions=StoredFile(
            bytes=num_samples * POSITION.itemsize, blake3=hashed.hexdigest()
        ),
    )
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        tool_version="benchmark",
        fingerprint="0" * 64,
        source_fingerprint="0" * 64,
        label_map_sha256=label_map_sha256(CLASSES),
        classes=CLASSES,
        index_bytes=0,
        index_blake3=blake3().hexdigest(),
        splits={"train": entry},
        inputs={},
        config={},
    )
    write_json(folder / MANIFEST_NAME, asdict(manifest))


def opened(folder: Path) -> TrainingSet:
    settings = DataSettings(path=str(folder), global_batch=1, val_split=None)
    return open_training_set(settings, seed=0)


def processes(folder: Path, rounds: int) -> dict[str, Any]:
    """What several processes measure at the same time; the least of all rounds."""
    command = [sys.executable, __file__, "--open", str(folder)]
    rows: list[list[float]] = []
    for _ in range(rounds):
        started = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(NUM_PROCESSES)
        ]
        for one in started:
            assert one.stdout
            rows.append([*map(float, one.stdout.readline().split())])
        # Until here none has ended, so that all share what is mapped.
        for one in started:
            one.communicate()
            if one.returncode:
                raise Failed("a process ended with an error")
    names = (
        "open, s",
        "first sample at 90 % of an epoch, s",
        "a random position -> its place, ms of a core",
        "a position in a block that is known -> its place, us of a core",
        f"private memory of each of {NUM_PROCESSES} processes, MB",
        "mapped and shared, MB",
    )
    return {
        name: float(f"{min(column):.3g}")
        for name, column in zip(names, zip(*rows, strict=True), strict=True)
    }


def measure_process(folder: Path) -> None:
    """Print what `processes` reads, and wait until it has read it."""
    before = memory()
    start = time.perf_counter()
    training_set = opened(folder)
    (index,) = training_set.parts
    open_s = time.perf_counter() - start

    order = training_set.order
    assert order is not None
    num = index.num_samples
    start = time.perf_counter()
    draw = order.at(num * 9 // 10)
    index.locate(draw.sample)
    resume_s = time.perf_counter() - start

    # Each in another block of the epoch, whose samples are permuted anew.
    # The time of cores, without that of a disk.
    times = []
    for position in np.random.default_rng(os.getpid()).integers(0, num, NUM_DRAWS):
        start = time.process_time()
        index.locate(order.at(int(position)).sample)
        times.append(time.process_time() - start)

    start = time.process_time()
    for offset in range(NUM_DRAWS):
        index.locate(order.at(offset).sample)
    known_s = (time.process_time() - start) / NUM_DRAWS
    private, shared = (now - then for now, then in zip(memory(), before, strict=True))
    print(
        open_s,
        resume_s,
        1e3 * median(times),
        1e6 * known_s,
        private,
        shared,
        flush=True,
    )
    sys.stdin.read()


def memory() -> tuple[float, float]:
    """MB of this process that no other has, and that others may share."""
    sizes: dict[str, int] = {}
    with open("/proc/self/smaps_rollup") as lines:
        for line in lines:
            name, *rest = line.split()
            if rest and rest[-1] == "kB":
                sizes[name] = int(rest[0])
    # A mapped page of a file is not copied, even while one process alone has touched it.
    return sizes["Anonymous:"] / 1e3, (sizes["Rss:"] - sizes["Anonymous:"]) / 1e3


def reads_of_nodes(folder: Path) -> dict[str, Any]:
    """Count the bytes that nodes read up to their first batch, of which each has the records that
    its own ranks need."""
    index = read_split(folder, split="train")
    order = SampleOrder(split=index, seed=0)
    table = index.tars
    # Names are checked, and the hashes of tars are read by need.
    at_start = sum(map(len, manifest_and_table(folder, table)))
    sizes = []
    for node in range(NUM_NODES):
        tars = set()
        for place in range(RANKS * MICRO_BATCH):
            _, sample = order.at(node * RANKS * MICRO_BATCH + place)
            tars.add(index.shard_of(sample))
        lengths = index.shard_lengths[[*tars]]
        sizes.append(at_start + POSITION.itemsize * int(lengths.sum()))
    name = f"MB that each of {NUM_NODES} nodes of {RANKS} ranks reads before its first batch"
    return {name: float(f"{max(sizes) / 1e6:.3g}")}


def manifest_and_table(folder: Path, table: positions.Tars) -> Iterator[bytes]:
    yield (folder / MANIFEST_NAME).read_bytes()
    yield from (column.tobytes() for column in (table.ends, table.checks))
    yield table.num_bytes.tobytes()
    for buffer in table.names.buffers()[1:]:
        yield buffer.to_pybytes()


def dry_run(folder: Path) -> float:
    words = (f"data.path={folder}", "data.val_split=null", "evaluate=[]")
    script = "launch/slurm.py"
    return run_command(
        [
            sys.executable,
            script,
            "--config",
            "configs/vit_b16.yaml",
            "--dry-run",
            *words,
        ]
    )


if __name__ == "__main__":
    run_script(main)
