"""Make a small folder of images and run data_prep/make_shards.py on it, or its steps here."""

import contextlib
import os
import random
import sys
from pathlib import Path

import pyarrow.parquet as pq

from data_prep.make_shards import STEPS
from data_prep.steps.work import WorkFolder, open_work_folder, run_steps
from tests.support.corpora import image_samples
from tests.support.corpora.indexing import run
from tests.support.corpora.sources import written
from tests.support.waiting import ROOT
from vitscale.data.index import Manifest, read_manifest
from vitscale.runs.data_prep import DataPrepRun

CONFIG = "configs/data/image_folder.yaml"
# Suffix and Pillow's name, in turn: each has a decoder of its own.
FORMATS = (
    ("jpg", "JPEG"),
    ("png", "PNG"),
    ("webp", "WEBP"),
)


def encoded(format: str, *, seed: int, side: int = 16) -> bytes:
    pixels = image_samples.noise(side, side, seed=seed)
    return image_samples.encoded(pixels, format)


def corpus(root: Path, *, num: int = 12, order_seed: int = 0, side: int = 16) -> Path:
    """Two classes of `num` images each, created in a seeded order."""
    images = []
    for label, name in enumerate(("cat", "dog")):
        for i in range(num):
            suffix, format = FORMATS[i % 3]
            path = root / name / f"{i:03d}.{suffix}"
            images.append((path, format, 100 * label + i))

    # Some file systems list a folder in the order of creation, on which nothing may depend.
    random.Random(order_seed).shuffle(images)
    # Nor may it depend on the time of a file: a copy of the corpus has another one.
    time = order_seed + 1
    for path, format, seed in images:
        written(path, encoded(format, seed=seed, side=side))
        os.utime(path, (time, time))
    return root


def command(source: Path, output: Path, *options: str) -> list[str]:
    return [
        sys.executable,
        "data_prep/make_shards.py",
        "--config",
        CONFIG,
        f"source.path={source}",
        f"output={output}",
        *options,
    ]


def make_shards(source: Path, output: Path, *options: str, rc: int = 0) -> str:
    _, _, *arguments = command(source, output, *options)
    return run_script("make_shards", *arguments, rc=rc)


def run_script(name: str, *arguments, rc: int = 0) -> str:
    """Run a script of data_prep in this process; returns what it printed."""
    with contextlib.chdir(ROOT):
        done = run(ROOT / f"data_prep/{name}.py", *arguments)
    text = done.stdout + done.stderr
    # A refusal is a sentence: an exit code alone would accept a crash.
    assert done.returncode == rc and "Traceback" not in text, text
    return text


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def ledger(folder: Path) -> dict[str, dict[str, object]]:
    table = pq.read_table(folder / "ledger.parquet")
    return {row["path"]: row for row in table.to_pylist()}


def run_of(path: Path | str, output: Path | str, **sections) -> DataPrepRun:
    """`sections`: more settings, such as shards={"min_shards": 2}."""
    source = {"path": str(path), **sections.get("source", {})}
    values = {"output": str(output), **sections, "source": source}
    return DataPrepRun.model_validate(values)


def prepare_here(run: DataPrepRun, *, until: str | None = None) -> WorkFolder:
    """Work through the steps before the one named `until`, or all; no process is started."""
    steps = STEPS
    if until is not None:
        titles = [step.title for step in STEPS]
        steps = STEPS[: titles.index(until)]
    work = WorkFolder(run)
    open_work_folder(work)
    # With one worker the steps run in this process, where a test can patch them.
    run_steps(work, steps, num_workers=1)
    return work


def prepared(path: Path, output: Path, **sections) -> Manifest:
    """Prepare a corpus here, from the first step to the last; returns what the shards say."""
    prepare_here(run_of(path, output, **sections))
    return read_manifest(output)
