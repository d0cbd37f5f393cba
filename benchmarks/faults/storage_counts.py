"""Count what a world of ranks reads and writes at a start and at a checkpoint.

    python benchmarks/faults/storage_counts.py

Counts bytes, opened files and memory of every rank for ViT-H/14 with AdamW, 8 ranks per node, with
the functions that the ranks call: the catalogue of slices, the shares of the verification, the
ranks that write. "before" is every rank reading everything, and rank 0 verifying it. A second
part starts 8 real processes that map one index. No GPU, no network, no torch.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from vitscale.checkpoint.catalogue import Catalogue, FileTable
from vitscale.checkpoint.joined_files import writing_ranks
from vitscale.distributed.node_share import once_per_node

PER_NODE, WORLDS, OPEN_FILES = 8, (8, 64, 512, 1024), 128
KINDS = ("model", "exp_avg", "exp_avg_sq")
DEPTH, WIDTH, MLP, PATCH, TOKENS, CLASSES = 32, 1280, 5120, 14, 257, 21_843
# ImageNet-21k: images, tars of 1 GiB, bytes per image of the columns that training keeps, and of
# those in a process that has read them from Parquet.
IMAGES, TARS, COLUMN_BYTES, READ_BYTES = 14_197_122, 1_300, 24, 44
Part = tuple[str, int, int]


def shapes() -> dict[str, tuple[int, ...]]:
    """The parameters of ViT-H/14, in the order of the model."""
    found: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, WIDTH),
        "pos_embed": (1, TOKENS, WIDTH),
        "patch_embed.weight": (WIDTH, 3, PATCH, PATCH),
        "patch_embed.bias": (WIDTH,),
    }
    for block in range(DEPTH):
        for name, rows, columns in (
            ("attn.qkv", 3 * WIDTH, WIDTH),
            ("attn.proj", WIDTH, WIDTH),
            ("mlp.fc1", MLP, WIDTH),
            ("mlp.fc2", WIDTH, MLP),
        ):
            found[f"blocks.{block}.{name}.weight"] = (rows, columns)
            found[f"blocks.{block}.{name}.bias"] = (rows,)
        for name in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"):
            found[f"blocks.{block}.{name}"] = (WIDTH,)
    return found | {
        "norm.weight": (WIDTH,),
        "norm.bias": (WIDTH,),
        "head.weight": (CLASSES, WIDTH),
        "head.bias": (CLASSES,),
    }


def own_slices(stage: int, world_size: int) -> list[list[Part]]:
    """(parameter, first element, elements) of each rank, as DeepSpeed divides them.

    ZeRO 1 and 2 cut each group of parameters, flattened, in equal parts; ZeRO 3 each parameter.
    """
    slices: list[list[Part]] = [[] for _ in range(world_size)]
    groups = [
        [(name, math.prod(shape)) for name, shape in shapes().items() if (len(shape) > 1) == large]
        for large in (True, False)
    ]
    for group in groups:
        if stage == 3:
            cuts = [(name, 0, size, -(-size // world_size)) for name, size in group]
        else:
            part, at, cuts = -(-sum(size for _, size in group) // world_size), 0, []
            for name, size in group:
                cuts.append((name, at, size, part))
                at += size
        for name, at, size, part in cuts:
            for rank in range(at // part, -(-(at + size) // part)):
                first, last = max(at, rank * part), min(at + size, (rank + 1) * part)
                slices[rank].append((name, first - at, last - first))
    return slices


def tables(slices: list[list[Part]]) -> tuple[list[FileTable], list[int]]:
    """The files of a checkpoint as the ranks write them, and their sizes."""
    world_size, of = len(slices), shapes()
    num_bytes = [4 * len(KINDS) * sum(count for *_, count in own) for own in slices]
    nodes = [str(rank // PER_NODE) for rank in range(world_size)]
    writers = writing_ranks(nodes, num_bytes) or list(range(world_size))
    found, sizes = [], []
    for writer in sorted(set(writers)):
        parts = [p for rank in range(world_size) if writers[rank] == writer for p in slices[rank]]
        names, spans, end = [], [], 0
        for kind in KINDS:
            for name, start, count in parts:
                names.append(f"{kind}.{name}")
                spans.append((start, count, end, 4 * count))
                end += 4 * count
        found.append(
            FileTable(
                file=f"rank-{writer:05d}.safetensors",
                names=names,
                shapes=[of[name.split(".", 1)[1]] for name in names],
                dtypes=["F32"] * len(names),
                spans_N4=np.array(spans, np.int64),
            )
        )
        sizes.append(end)
    return found, sizes


def reads(catalogue: Catalogue, own: list[Part]) -> tuple[int, int, int]:
    """(bytes, opened files, bytes held at once) of one rank that restores its slices."""
    num_bytes, opened, largest = 0, 0, 0
    files: OrderedDict[str, None] = OrderedDict()
    for name, start, count in own:
        for kind in KINDS:
            pieces = catalogue.pieces(f"{kind}.{name}", start=start, num_elements=count)
            part = sum(piece.num_bytes for piece in pieces)
            num_bytes, largest = num_bytes + part, max(largest, part)
            for piece in pieces:
                if piece.file not in files:
                    opened += 1
                    if len(files) == OPEN_FILES:
                        files.popitem(last=False)
                files[piece.file] = None
                files.move_to_end(piece.file)
    return num_bytes, opened, largest


def restore_row(stage: int, saved: int, world_size: int) -> str:
    files, sizes = tables(own_slices(stage, saved))
    catalogue, whole = Catalogue(files), sum(sizes)
    slices = own_slices(stage, world_size)
    counts = [reads(catalogue, own) for own in slices]
    hashed = [sum(sizes[rank::world_size]) for rank in range(world_size)]
    total = sum(hashed) + sum(num_bytes for num_bytes, *_ in counts)
    most = max(own + each[0] for own, each in zip(hashed, counts, strict=True))
    opened = 2 * len(files) + sum(each[1] for each in counts)
    held = PER_NODE * (max(each[2] for each in counts) + catalogue.num_bytes)
    return row(
        f"ZeRO {stage}, {saved} to {world_size}",
        f"{gb((world_size + 1) * whole)} / {gb(total)}",
        f"{gb(2 * whole)} / {gb(most)}",
        f"{(world_size + 1) * saved:,} / {opened:,}",
        f"{gb(PER_NODE * whole)} / {gb(held)}",
    )


def checkpoint_row(stage: int, world_size: int) -> str:
    slices = own_slices(stage, world_size)
    files, sizes = tables(slices)
    return row(
        f"ZeRO {stage}, {world_size}",
        f"{world_size + 1:,} / {len(files) + 1:,}",
        f"{gb(sum(sizes) / world_size)} / {gb(max(sizes))}",
        f"{gb(sum(sizes))} / {gb(max(sizes))}",
    )


def index_row(world_size: int) -> str:
    return row(
        str(world_size),
        f"{world_size:,} / {-(-world_size // PER_NODE):,}",
        f"{world_size * (TARS + 1):,} / {TARS + 1:,}",
        f"{gb(PER_NODE * IMAGES * READ_BYTES)} / {gb(IMAGES * (COLUMN_BYTES + READ_BYTES))}",
    )


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def gb(num_bytes: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes / 1e3:.3g} kB"


def table(heading: str, rows: Iterator[str]) -> None:
    print(f"\n{heading}\n|{'---|' * (heading.count('|') - 1)}")
    for each in rows:
        print(each, flush=True)


def proportional_mib(process: int) -> float:
    """Memory of a process in which a shared page counts once for all its users together."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def one_rank(rank: int, pipe: Connection, images: int, shares: bool) -> None:
    def gather(value: Any) -> list[Any]:
        pipe.send(value)
        found: list[Any] = pipe.recv()
        return found

    def read() -> dict[str, np.ndarray]:
        columns = {"shard": np.int32, "offset": np.int64, "length": np.int64, "label": np.int32}
        return {name: np.arange(images, dtype=dtype) for name, dtype in columns.items()}

    before = proportional_mib(os.getpid())
    index = once_per_node(read, rank=rank, gather=gather)[0] if shares else read()
    assert all(int(column.sum()) for column in index.values())  # every page is used
    gather(None)
    pipe.send(proportional_mib(os.getpid()) - before)
    pipe.recv()


def measured_mib(images: int, *, shares: bool) -> float:
    """MiB that an index takes in PER_NODE processes together."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(PER_NODE):
        ours, theirs = context.Pipe()
        pipes.append(ours)
        processes.append(
            context.Process(target=one_rank, args=(rank, theirs, images, shares), daemon=True)
        )
        processes[-1].start()
    for _ in range(4 if shares else 1):  # three exchanges to share, one before measuring
        values = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(values)
    total = sum(pipe.recv() for pipe in pipes)
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()
    return float(total)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS, help="numbers of ranks")
    parser.add_argument("--images", type=int, default=1_000_000, help="rows of the mapped index")
    options = parser.parse_args()
    count: Callable[[int, int, int], str] = restore_row
    parameters = sum(math.prod(shape) for shape in shapes().values())
    print(f"{parameters / 1e6:.0f} M parameters; before / after")
    largest = max(options.worlds)
    moves = [(stage, size, size) for stage in (1, 3) for size in options.worlds]
    moves += [(1, largest, largest // 2), (1, largest // 2, largest), (3, largest, largest // 2)]
    table(
        "| restore | read in all | read by a rank, at most | files opened | memory of a node |",
        (count(*move) for move in moves),
    )
    table(
        "| checkpoint | files | bytes of a file | read back by one rank |",
        (checkpoint_row(stage, size) for stage in (1, 3) for size in options.worlds),
    )
    table(
        "| index, ranks | Parquet read | stats of tars | memory of a node |",
        map(index_row, options.worlds),
    )
    alone, shared = (measured_mib(options.images, shares=each) for each in (False, True))
    print(
        f"\n{PER_NODE} processes, {options.images:,} images: {alone:.0f} MiB in all when each "
        f"reads the index, {shared:.0f} MiB when they map one "
        f"({options.images * COLUMN_BYTES / 2**20:.0f} MiB), in {tempfile.gettempdir()} or /dev/shm"
    )


if __name__ == "__main__":
    main()
