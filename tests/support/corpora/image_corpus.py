"""Make a small folder of images and run data_prep/make_shards.py on it, or its steps here."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from data_prep.make_shards import STEPS
from data_prep.steps.work import WorkFolder, open_work_folder, run_steps
from tests.support.corpora import image_samples
from vitscale.runs.data_prep import DataPrepRun

REPOSITORY = Path(__file__).parents[3]
CONFIG = "configs/data/image_folder.yaml"


def encoded(format: str, *, seed: int, side: int = 16) -> bytes:
    pixels = np.random.default_rng(seed).integers(
        0, 255, (side, side, 3), dtype=np.uint8
    )
    return image_samples.encoded(pixels, format)


def corpus(root: Path, *, num: int = 12, order_seed: int = 0, side: int = 16) -> Path:
    """Two classes of `num` images each, created in a seeded order."""
    formats = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}
    names = [
        (f"{name}/{i:03d}.{suffix}", formats[suffix], 100 * label + i)
        for label, name in enumerate(("cat", "dog"))
        for i in range(num)
        for suffix in [list(formats)[i % 3]]
    ]
    random.Random(order_seed).shuffle(names)
    for name, format, seed in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(format, seed=seed, side=side))
        os.utime(path, (order_seed + 1, order_seed + 1))
    return root


def command(source: Path, output: Path, *options: str) -> list[str]:
    paths = [f"source.path={source}", f"output={output}"]
    return [
        sys.executable,
        "data_prep/make_shards.py",
        "--config",
        CONFIG,
        *paths,
        *options,
    ]


def make_shards(source: Path, output: Path, *options: str, rc: int = 0) -> str:
    return run_script("make_shards", *command(source, output, *options)[2:], rc=rc)


def run_script(name: str, *arguments, rc: int = 0) -> str:
    """Run a script of data_prep; returns what it printed."""
    words = [sys.executable, f"data_prep/{name}.py", *map(str, arguments)]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
    text = done.stdout + done.stderr
    assert done.returncode == rc and "Traceback" not in text, text
    return text


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def ledger(folder: Path) -> dict[str, dict[str, object]]:
    return {
        row["path"]: row for row in pq.read_table(folder / "ledger.parquet").to_pylist()
    }


def run_of(path: Path, output: Path, **sections) -> DataPrepRun:
    """`sections`: more settings, such as shards={"min_shards": 2}."""
    sections["source"] = {"path": str(path), **sections.get("source", {})}
    return DataPrepRun.model_validate({"output": str(output), **sections})


def prepare_here(run: DataPrepRun, *, until: str | None = None) -> WorkFolder:
    """Work through the steps before the one named `until`, or all; no process is started."""
    titles = [step.title for step in STEPS]
    wanted = STEPS if until is None else STEPS[: titles.index(until)]
    work = WorkFolder(run)
    open_work_folder(work)
    run_steps(work, wanted, num_workers=1)
    return work
