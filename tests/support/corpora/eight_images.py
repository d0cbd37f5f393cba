"""Write the eight images of tests/golden/images as each kind of source, in two splits.

JPEGs: grey, CMYK, progressive, rotated by EXIF, truncated; PNGs: RGB, palette; one text file.
The split test holds every other image.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.corpora.external_tars import tar_bytes, write_tars
from tests.support.golden import FOLDER

IMAGES = FOLDER / "images"


def images(split: str) -> list[Path]:
    """Paths as CLASS/NAME below IMAGES."""
    paths = sorted(path.relative_to(IMAGES) for path in IMAGES.glob("*/*"))
    return paths if split == "train" else paths[::2]


def image_folder(root: Path) -> None:
    for split in ("train", "test"):
        for path in images(split):
            (root / split / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(IMAGES / path, root / split / path)


def class_tars(root: Path) -> None:
    """A folder of tars for train, one tar of them for test."""
    for split in ("train", "test"):
        tars = {
            f"{name}.tar": {
                path.name: (IMAGES / path).read_bytes()
                for path in images(split)
                if path.parent.name == name
            }
            for name in ("cat", "dog")
        }
        if split == "train":
            write_tars(root / split, tars)
        else:
            write_tars(root, {"test.tar": {name: tar_bytes(tar) for name, tar in tars.items()}})


def webdataset_tars(root: Path) -> None:
    for split, number in (("train", 0), ("train", 1), ("test", 0)):
        members = {}
        for path in images(split)[number :: 2 if split == "train" else 1]:
            members[f"{path.stem}{path.suffix}"] = (IMAGES / path).read_bytes()
            members[f"{path.stem}.cls"] = path.parent.name.encode()
        write_tars(root, {f"{split}-{number}.tar": members})


def parquet(root: Path) -> None:
    root.mkdir()
    for split in ("train", "test"):
        rows = [
            {
                "image": {"bytes": (IMAGES / path).read_bytes(), "path": path.name},
                "label": path.parent.name,
            }
            for path in images(split)
        ]
        pq.write_table(pa.Table.from_pylist(rows), root / f"{split}.parquet", row_group_size=3)


def path_table(root: Path) -> None:
    shutil.copytree(IMAGES, root)
    for split in ("train", "test"):
        lines = [f"{path},{path.parent}" for path in images(split)]
        (root / f"{split}.csv").write_text("\n".join(["image,label", *lines]) + "\n")


# kind -> (writer, source.splits)
KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "image_folder": (image_folder, "{train: train, test: test}"),
    "class_tars": (class_tars, "{train: train, test: test.tar}"),
    "webdataset": (webdataset_tars, '{train: "train-{0..1}.tar", test: "test-*.tar"}'),
    "parquet": (parquet, "{train: train.parquet, test: test.parquet}"),
    "path_table": (path_table, "{train: train.csv, test: test.csv}"),
}
