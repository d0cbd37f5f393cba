"""Measure memory and time of planning shards, and of their ledger, for a corpus that is made up.

    python benchmarks/preparation_size.py --inputs 20000000 --work /big/disk --json results.json

Lists are written of inputs that no disk has: classes of 1,000 photographs, of which every 50th
input is no image, and 2 % are held out. A tenth of them is planned, then all, each in a process of
its own; the kernel tells its peak. Then the plan is read back: each split has as many rows as the
classes say, and their hashes rise from shard to shard, so no row is lost, doubled or misplaced.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout

from benchmarks.measuring import Failed, parser_of, run_benchmark
from data_prep.formats.ledger import write_ledger
from data_prep.sources.protocol import Container
from data_prep.steps.list_inputs import (
    CONTAINERS,
    ROW_SCHEMA,
    commit_containers,
    list_units,
    read_containers,
)
from data_prep.steps.plan_shards import (
    OUTCOMES,
    PLAN,
    REJECTED,
    ROWS,
    plan_shards,
    read_plan,
)
from data_prep.steps.tars import split_of
from data_prep.steps.work import WorkFolder, open_work_folder
from vitscale.config.errors import run_script
from vitscale.runs.data_prep import DataPrepRun

PER_CLASS = 1000
# One input of so many is not named like an image.
NO_IMAGE = 50
HELD_OUT = 0.02
MEAN_BYTES = 110_000
# Phases run in processes of their own, so that each has its own peak.
FRESH = multiprocessing.get_context("spawn")


def hashes_of(numbers: np.ndarray) -> np.ndarray:
    """SplitMix64: no two numbers have the same hash, so rising hashes are distinct inputs."""
    mixed = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashes: np.ndarray = mixed ^ (mixed >> np.uint64(31))
    return hashes


def work_folder(folder: Path) -> WorkFolder:
    source = {"path": str(folder / "images"), "holdout_fraction": HELD_OUT}
    run = {"source": source, "output": str(folder / "shards")}
    return WorkFolder(DataPrepRun.model_validate(run))


def write_lists(folder: Path, num_inputs: int) -> None:
    """Write what listing would have: containers, and the rows of each unit as a sorted run."""
    work = work_folder(folder)
    open_work_folder(work)
    work.open()
    names = [f"n{number:08d}" for number in range(num_inputs // PER_CLASS)]
    boxes = [Container(name, "train", name) for name in names]
    commit_containers(work, CONTAINERS, boxes)

    units = list_units(work)
    size = -(-len(boxes) // len(units))
    for number, unit in enumerate(units):
        classes = [box.class_name for box in read_containers(work, number * size, size)]
        first = number * size * PER_CLASS
        rows = made_up(np.arange(first, first + len(classes) * PER_CLASS), classes)
        work.commit_table(unit, rows.sort_by("order_high"))


def made_up(numbers: np.ndarray, classes: list[Any]) -> pa.Table:
    """Rows of some inputs, PER_CLASS of each class."""
    num = len(numbers)
    class_of = pa.array(np.repeat(np.array(classes, object), PER_CLASS))
    names = pc.binary_join_element_wise(
        class_of, pc.cast(pa.array(numbers), pa.string()), "_"
    )
    paths = pc.binary_join_element_wise(class_of, names, "/")
    reason = pc.if_else(pa.array(numbers % NO_IMAGE == 0), "other_name", None)
    columns = {
        "order_high": hashes_of(numbers),
        "order_low": np.zeros(num, np.uint64),
        "holdout": hashes_of(~numbers),
        "path": paths.cast(pa.large_binary()),
        "split": pa.repeat("train", num),
        "class": class_of,
        "key": pc.binary_join_element_wise(class_of, names, "-"),
        "num_bytes": np.full(num, MEAN_BYTES),
        "reason": reason,
        "file": pa.repeat(b"", num),
        "offset": np.zeros(num, np.int64),
        "modified_ns": numbers,
        "spooled": pa.repeat(False, num),
        "inode": numbers + 1,
    }
    return pa.table(columns).cast(ROW_SCHEMA)


def plan(folder: Path) -> None:
    # The images would not fit on any disk, and are never written.
    shutil.disk_usage = lambda path: SimpleNamespace(free=1 << 60)  # type: ignore[assignment]
    work = work_folder(folder)
    work.open()
    plan_shards(work, PLAN)


def ledger(folder: Path) -> None:
    work = work_folder(folder)
    write_ledger(folder, outcomes(work))


def outcomes(work: WorkFolder) -> Iterator[pa.Table]:
    """Yield the outcome of each input as if every image was sound."""
    # Read, not mapped: what is mapped would count as memory of the ledger.
    with pa.OSFile(str(work.path / ROWS)) as file:
        reader = pa.ipc.open_file(file)
        for unit, (batch, _) in read_plan(work).shards.items():
            rows = pa.table(reader.get_batch(batch))
            num = len(rows)
            made = {
                name: pa.nulls(num, OUTCOMES.field(name).type)
                for name in OUTCOMES.names
            }
            made |= {
                "path": rows["path"].cast(pa.string()),
                "split": pa.repeat(split_of(unit), num),
                "class": rows["class"].cast(pa.string()),
                "key": rows["key"].cast(pa.string()),
                "blake3": pa.repeat(bytes(32), num).cast(pa.binary(32)),
            }
            yield pa.table(made, schema=OUTCOMES)
    yield from (pa.table(batch) for batch in work.table(REJECTED).to_batches())


def check(folder: Path, num_inputs: int) -> None:
    """Raises Failed unless the plan has every input where it belongs."""
    work = work_folder(folder)
    last = {"train": np.uint64(0), "test": np.uint64(0)}
    nums = {name: 0 for name in last}
    with pa.memory_map(str(work.path / ROWS)) as file:
        reader = pa.ipc.open_file(file)
        for unit, (batch, _) in read_plan(work).shards.items():
            split = split_of(unit)
            # The modification time of an input is its number.
            numbers = reader.get_batch(batch)["modified_ns"].to_numpy()
            hashes = np.append(last[split], hashes_of(numbers))
            if (hashes[1:] <= hashes[:-1]).any():
                raise Failed(f"{unit} is not in stored order")
            last[split] = hashes[-1]
            nums[split] += len(numbers)

    per_class = PER_CLASS - PER_CLASS // NO_IMAGE
    held_out = int(HELD_OUT * per_class + 0.5)
    num_classes = num_inputs // PER_CLASS
    expected = {
        "train": num_classes * (per_class - held_out),
        "test": num_classes * held_out,
    }
    num_rejected = len(work.table(REJECTED))
    if nums != expected or num_rejected != num_inputs // NO_IMAGE:
        raise Failed(f"{nums} and {num_rejected} rejected instead of {expected}")


def measured(phase: Callable[..., None], *arguments: Any) -> dict[str, float]:
    """Seconds, processor seconds and the peak in GiB of a process. Raises Failed."""
    receiver, sender = FRESH.Pipe(duplex=False)
    process = FRESH.Process(target=_measure, args=(sender, phase, *arguments))
    process.start()
    sender.close()
    try:
        found: dict[str, float] = receiver.recv()
    except EOFError:
        raise Failed(f"{phase.__name__} failed") from None
    process.join()
    return found


def _measure(sender: Any, phase: Callable[..., None], *arguments: Any) -> None:
    # As in the workers of the command.
    pa.set_memory_pool(pa.system_memory_pool())
    start = time.perf_counter()
    before = time.process_time()
    phase(*arguments)
    found = {
        "seconds": time.perf_counter() - start,
        "cpu": time.process_time() - before,
    }
    status = Path("/proc/self/status").read_text()
    (peak,) = (line.split()[1] for line in status.splitlines() if "VmHWM" in line)
    sender.send(found | {"peak_gib": int(peak) / 2**20})


def main() -> None:
    parser = parser_of(__doc__, rounds=1)
    parser.add_argument("--inputs", type=int, default=20_000_000)
    if parser.parse_args().toy:
        parser.set_defaults(inputs=20_000)
    options = parser.parse_args()
    run_benchmark(options, lambda work: measure(work, options), "pyarrow", "numpy")


def measure(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {}
    for num_inputs in (options.inputs // 10, options.inputs):
        folder = work / str(num_inputs)
        measured(write_lists, folder, num_inputs)
        for phase in (plan, ledger):
            row = {"inputs": num_inputs, **measured(phase, folder)}
            found.setdefault(phase.__name__, []).append(row)
            print(
                f"{phase.__name__:6} {num_inputs:13,} inputs {row['seconds']:8.1f} s "
                f"{row['cpu']:8.1f} processor s {row['peak_gib']:6.2f} GiB at most",
                flush=True,
            )
        check(folder, num_inputs)
        shutil.rmtree(folder)

    for name, (tenth, whole) in found.items():
        times, cpu = (whole[key] / tenth[key] for key in ("seconds", "cpu"))
        print(
            f"{name}: 10 N / N takes {times:.2f} times as long, {cpu:.2f} processor s"
        )
    return found


if __name__ == "__main__":
    run_script(main)
