"""Write small tars, and WebDataset tars in the layouts of other projects."""

import io
import json
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import webdataset

from tests.support.corpora.shard_folders import image_bytes

Members = dict[str, bytes] | Iterable[tuple[str, bytes]]


def tar_bytes(members: Members, *, format: int = tarfile.GNU_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for name, data in members.items() if isinstance(members, dict) else members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def write_tars(root: Path, tars: dict[str, Members]) -> None:
    for path, members in tars.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(tar_bytes(members))


NUM_CLASSES = 3
SIDE = (24, 20)


def photo(i: int) -> bytes:
    return image_bytes("jpg", seed=i, side=SIDE)


def write_tar(path: Path, samples: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path)) as tar:
        for sample in samples:
            tar.write(sample)


def img2dataset_layout(
    folder: Path, *, tars: int, samples: int
) -> dict[str, tuple[bytes, str]]:
    """00000.tar with 000000000.{jpg,txt,json} beside 00000.parquet and 00000_stats.json.

    One sample in five failed to download: it is in the table and not in the tar. Returns what is in
    the tars: key -> (image, class).
    """
    stored = {}
    for number in range(tars):
        rows = []
        in_tar = []
        for i in range(samples):
            key = f"{number * 10_000 + i:09d}"
            class_name = f"n0000000{i % NUM_CLASSES}"
            failed = i % 5 == 4
            caption = f"a <b>{class_name}</b>"
            status = "failed" if failed else "success"
            rows.append(
                {"key": key, "caption": caption, "status": status, "synset": class_name}
            )
            if not failed:
                image = photo(number * samples + i)
                stored[key] = (image, class_name)
                text = json.dumps(rows[-1], indent=4).encode()
                in_tar.append(
                    {"__key__": key, "jpg": image, "txt": caption, "json": text}
                )
        write_tar(folder / f"{number:05d}.tar", in_tar)
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{number:05d}.parquet")
        (folder / f"{number:05d}_stats.json").write_text(json.dumps({"count": samples}))
    return stored


def imagenet_22k_layout(
    folder: Path, *, splits: dict[str, int], samples: int
) -> Iterator[tuple[str, str, bytes, int, int]]:
    """imagenet22k-SPLIT-0000.tar with .jpg, .cls (of 21,841) and .json (12k label, -1: none).

    Yields split, key, image, label, 12k label.
    """
    for split, tars in splits.items():
        for number in range(tars):
            rows = []
            for i in range(samples):
                label = 7 * i + number
                other = i if i % 2 else -1
                key = f"n{number:08d}_{i}"
                image = photo(i + 100 * number)
                facts = {"label": label, "label_12k": other, "filename": f"{key}.JPEG"}
                rows.append({"__key__": key, "jpg": image, "cls": label, "json": facts})
                yield split, key, image, label, other
            write_tar(folder / f"imagenet22k-{split}-{number:04d}.tar", rows)
    info = {"splits": {}}
    (folder / "_info.json").write_text(json.dumps(info))


def hugging_face_layout(
    folder: Path, *, tars: int, samples: int
) -> dict[str, tuple[bytes, str]]:
    """data/train/0000.tar with members in a folder of the tar and labels by name."""
    stored = {}
    for number in range(tars):
        rows = []
        for i in range(samples):
            key = f"images/{number}_{i}"
            name = ("ant", "bee", "cat fish")[i % NUM_CLASSES]
            image = photo(i + 50 * number)
            stored[key] = (image, name)
            rows.append({"__key__": key, "jpg": image, "cls": name.encode()})
        write_tar(folder / "data/train" / f"{number:04d}.tar", rows)
    return stored
