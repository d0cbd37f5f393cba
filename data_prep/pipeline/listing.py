"""List the inputs of the source as rows, and bring them into the seeded order.

Owns: units that list containers, their summaries, the spool, and the buckets.
Leaves out: kinds of sources (`sources`), columns and sorting (`row_tables`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from data_prep.pipeline.rejections import Rejections
from data_prep.pipeline.row_tables import (
    RUN_ROWS,
    bucket,
    num_buckets,
    rows_table,
    write_table,
)
from data_prep.pipeline.workspace import Preparation
from data_prep.sources.outages import printable, source_read_error
from data_prep.sources.protocol import Container, Input, SpoolError
from vitscale.distributed.atomic_files import fsync_folder

# Containers per unit: class folders and tars of hundreds of images each. Fewer where there would
# not be a unit for each of eight processes.
MAX_CONTAINERS_PER_UNIT = 64
MIN_UNITS = 8


def list_containers(p: Preparation, unit: str) -> None:
    p.put_result(unit, [astuple(container) for container in p.source.containers()])


def containers_per_unit(num_containers: int) -> int:
    return min(MAX_CONTAINERS_PER_UNIT, max(1, num_containers // MIN_UNITS))


def scan_units(p: Preparation) -> list[str]:
    num = len(p.containers)
    return [f"list-{i:06d}" for i in range(-(-num // containers_per_unit(num)))]


def num_containers(p: Preparation, unit: str) -> int:
    """Containers of one unit."""
    return len(_containers_of(p, unit))


def num_listed(p: Preparation, unit: str) -> int:
    """Inputs that a unit found."""
    num: int = p.result(unit)["num_inputs"]
    return num


def _containers_of(p: Preparation, unit: str) -> list[Container]:
    number, size = int(unit.rpartition("-")[2]), containers_per_unit(len(p.containers))
    return p.containers[number * size : (number + 1) * size]


class FileSpool:
    """Bytes that can be read from the source only once, appended to one file per unit."""

    def __init__(self, path: Path, *, name: str) -> None:
        self._path, self._name, self._position = path, name, 0
        self._file: Any = None

    def add(self, data: bytes) -> tuple[str, int]:
        offset = self._position
        try:
            if self._file is None:
                self._file = open(self._path, "wb")
            self._file.write(data)
        except OSError as error:
            raise SpoolError(error) from None
        self._position += len(data)
        return self._name, offset

    def commit(self, final: Path) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._path, final)
            fsync_folder(final.parent)


def scan(p: Preparation, unit: str) -> None:
    """List the containers of one unit into sorted runs, with a summary."""
    containers = _containers_of(p, unit)
    spool = FileSpool(p.work.temporary("spool"), name=f"{unit}.bin")
    summary = Summary(containers)
    num_runs = 0
    holds_out = bool(p.run.source.holdout_fraction or p.run.source.val_per_class)
    for inputs in _batches(summary.take(_inputs(p, containers, spool), p), RUN_ROWS):
        write_table(
            rows_table(inputs, seed=p.run.seed, holds_out=holds_out),
            p.path("runs", f"{unit}-{num_runs:06d}.arrow"),
            temporary=p.work.temporary("run"),
        )
        num_runs += 1
    spool.commit(p.path("spool", f"{unit}.bin"))
    p.put_result(unit, summary.as_json(num_runs=num_runs))


def _inputs(p: Preparation, containers: Sequence[Container], spool: FileSpool) -> Iterator[Input]:
    for container in containers:
        try:
            yield from p.source.inputs(container, spool=spool)
        except OSError as error:
            raise source_read_error(error, container.path) from None


def _batches(inputs: Iterator[Input], size: int) -> Iterator[list[Input]]:
    batch: list[Input] = []
    for item in inputs:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


class Summary:
    """Summary of one unit: its counts by class."""

    def __init__(self, containers: Sequence[Container]) -> None:
        self.num_inputs = 0
        self.classes: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        self.rejected = Rejections()
        self.containers = {c.path: 0 for c in containers if c.class_name is not None}

    def take(self, items: Iterator[Input], p: Preparation) -> Iterator[Input]:
        """Count every input and yield it with its final class name."""
        for item in items:
            self.num_inputs += 1
            final = item
            if item.reason is None:
                left_out = bool(p.left_out) and printable(item.path) in p.left_out
                final = replace(item, reason="left_out") if left_out else self._labelled(item, p)
            if final.reason is not None:
                self.rejected.add(final.reason, printable(final.path))
            yield final

    def _labelled(self, item: Input, p: Preparation) -> Input:
        class_name = p.labels.class_of(item.class_name)
        if class_name is None:
            self.unknown[item.class_name or ""] += 1
            return replace(item, reason="unknown_class")
        self.classes[class_name] += 1
        return item if class_name == item.class_name else replace(item, class_name=class_name)

    def as_json(self, *, num_runs: int) -> dict[str, Any]:
        return {
            "num_inputs": self.num_inputs,
            "num_runs": num_runs,
            "classes": dict(self.classes),
            "unknown": dict(self.unknown),
            **self.rejected.as_json(),
        }


def num_inputs(p: Preparation) -> int:
    num: int = p.result("inputs")["num_inputs"]
    return num


def count_buckets(p: Preparation, unit: str) -> None:
    """The number of buckets and, for all later units, sums over all inputs."""
    num, rejected = 0, Rejections()
    for scan_unit in scan_units(p):
        result = p.result(scan_unit)
        num += result["num_inputs"]
        rejected.merge(result)
    p.put_result("inputs", {"num_inputs": num, **rejected.as_json()})
    p.put_result(unit, num_buckets(num))


def bucket_path(p: Preparation, number: int) -> Path:
    return p.path("buckets", f"{number:06d}.arrow")


def make_bucket(p: Preparation, unit: str) -> None:
    number = int(unit.rpartition("-")[2])
    runs = [
        p.path("runs", f"{scan_unit}-{i:06d}.arrow")
        for scan_unit in scan_units(p)
        for i in range(p.result(scan_unit)["num_runs"])
    ]
    rows = bucket(runs, number=number, of=p.result("buckets"))
    write_table(rows, bucket_path(p, number), temporary=p.work.temporary("bucket"))
    p.put_result(unit, {"num_rows": len(rows)})
