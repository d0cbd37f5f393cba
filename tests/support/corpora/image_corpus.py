"""Make a small folder of images and run data_prep/make_shards.py on it."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

REPOSITORY = Path(__file__).parents[3]
CONFIG = "configs/data/image_folder.yaml"


def encoded(format: str, *, seed: int, side: int = 16) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format=format)
    return file.getvalue()


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
    done = subprocess.run(
        command(source, output, *options), cwd=REPOSITORY, capture_output=True, text=True
    )
    text = done.stdout + done.stderr
    assert done.returncode == rc, text
    assert "Traceback" not in text
    return text


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def ledger(folder: Path) -> dict[str, dict[str, object]]:
    return {row["path"]: row for row in pq.read_table(folder / "ledger.parquet").to_pylist()}
