"""The contenders of sharding_speed: ways to bring the files of a folder into few large ones.

Owns: the timed part of each, written as well as its authors would.
Leaves out: when each one runs (`sharding_speed`), and checks of its output (`output_checks`).
"""

from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import webdataset
from PIL import Image

from benchmarks.corpora.photo_folder import PhotoFolder
from benchmarks.faults.process_runs import CommandFailed, run_command
from benchmarks.sharding.commands import SHARD_MIB, make_shards_command

NUM_CORES = len(os.sched_getaffinity(0))
BUFFER_BYTES = 1 << 20
FORK = multiprocessing.get_context("fork")


def copy_into_one_file(source: PhotoFolder, output: Path) -> float:
    """Read every file in the order of its name and append it to one file; one process."""
    output.mkdir()
    start = time.perf_counter()
    with open(output / "all", "xb", buffering=0) as target:
        _append(source.root, source.paths, target.fileno(), position=0)
        os.fsync(target.fileno())
    return time.perf_counter() - start


def copy_with_all_cores(source: PhotoFolder, output: Path) -> float:
    """The same file, each process writing its part of it."""
    sizes = [(source.root / path).stat().st_size for path in source.paths]
    cuts, positions, position = [0], [0], 0
    for i, size in enumerate(sizes):
        if position >= len(cuts) * source.num_bytes / NUM_CORES:
            cuts.append(i)
            positions.append(position)
        position += size
    parts = [source.paths[a:b] for a, b in zip(cuts, [*cuts[1:], len(sizes)], strict=True)]
    output.mkdir()
    start = time.perf_counter()
    os.close(os.open(output / "all", os.O_CREAT | os.O_WRONLY, 0o644))
    processes = [
        FORK.Process(target=_write_part, args=(source.root, part, output / "all", position))
        for part, position in zip(parts, positions, strict=True)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    seconds = time.perf_counter() - start
    if any(process.exitcode for process in processes):
        raise CommandFailed("a copying process failed")
    return seconds


def _write_part(root: Path, paths: Sequence[str], target: Path, position: int) -> None:
    file = os.open(target, os.O_WRONLY)
    _append(root, paths, file, position=position)
    os.fsync(file)
    os.close(file)


def _append(root: Path, paths: Sequence[str], target: int, *, position: int) -> None:
    buffer = memoryview(bytearray(BUFFER_BYTES))
    prefix = str(root) + os.sep
    for path in paths:
        file = os.open(prefix + path, os.O_RDONLY)
        while num := os.readv(file, [buffer]):
            written = 0
            while written < num:
                written += os.pwrite(target, buffer[written:num], position + written)
            position += num
        os.close(file)


def cp(source: PhotoFolder, output: Path) -> float:
    return run_command(["cp", "-r", str(source.root), str(output)])


def flush(output: Path) -> float:
    """Flush the output to the disk, for contenders that do not do it themselves."""
    return run_command(["sync", "-f", str(output)])


def shard_writer(source: PhotoFolder, output: Path) -> float:
    """webdataset's writer in the loop of its documentation; one process, nothing flushed."""
    output.mkdir()
    start = time.perf_counter()
    files = []
    for folder, _, names in os.walk(source.root):
        files += [os.path.join(folder, name) for name in names]
    random.Random(0).shuffle(files)
    labels = {name: i for i, name in enumerate(sorted({f.split(os.sep)[-2] for f in files}))}
    pattern = str(output / "train-%06d.tar")
    with webdataset.ShardWriter(
        pattern, maxcount=1_000_000, maxsize=SHARD_MIB << 20, verbose=0
    ) as sink:
        for path in files:
            with open(path, "rb") as file:
                image = file.read()
            key = os.path.splitext(os.path.basename(path))[0]
            label = labels[path.split(os.sep)[-2]]
            sink.write({"__key__": key, "jpg": image, "cls": label})
    return time.perf_counter() - start


def start_seconds(source: Path, output: Path) -> float:
    """Seconds before the command reads the source: interpreter, imports, settings."""
    return run_command([*make_shards_command(source, output), "--print-config"])


def decode_from_memory(source: PhotoFolder, *, num_processes: int = NUM_CORES) -> float:
    """Pillow decodes every picture to pixels; the bytes are in memory before the clock starts."""
    ready = FORK.Barrier(num_processes + 1)
    processes = [
        FORK.Process(target=_decode, args=(source.root, source.paths[i::num_processes], ready))
        for i in range(num_processes)
    ]
    for process in processes:
        process.start()
    ready.wait()
    start = time.perf_counter()
    for process in processes:
        process.join()
    seconds = time.perf_counter() - start
    if any(process.exitcode for process in processes):
        raise CommandFailed("a decoding process failed")
    return seconds


def _decode(root: Path, paths: Sequence[str], ready: object) -> None:
    contents = [(root / path).read_bytes() for path in paths]
    ready.wait()  # type: ignore[attr-defined]  # the type of a context's Barrier has no name
    for data in contents:
        Image.open(BytesIO(data), formats=("JPEG",)).load()


def versions() -> dict[str, str]:
    """Versions of what is compared."""
    done = subprocess.run(["cp", "--version"], capture_output=True, text=True, check=True)
    return {
        "python": sys.version.split()[0],
        "webdataset": webdataset.__version__,
        "pillow": Image.__version__,
        "cp": done.stdout.splitlines()[0].rpartition(" ")[2],
    }
