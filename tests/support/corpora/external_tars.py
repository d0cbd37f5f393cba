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
from tests.support.corpora.sources import written

Members = dict[str, bytes] | Iterable[tuple[str, bytes]]


def tar_bytes(members: Members, *, format: int = tarfile.GNU_FORMAT) -> bytes:
    # Pairs may name a member twice, which a dict cannot.
    if isinstance(members, dict):
        members = members.items()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def write_tars(root: Path, tars: dict[str, Members]):
    for name, members in tars.items():
        written(root / name, tar_bytes(members))


NUM_CLASSES = 3
# Not square, so that width and height cannot be mixed up unseen.
SIDE = (24, 20)


def photo(i: int) -> bytes:
    return image_bytes("jpg", seed=i, side=SIDE)


def write_tar(path: Path, samples: Sequence[dict[str, Any]]):
    path.parent.mkdir(parents=True, exist_ok=True)
    # webdataset's own writer: these tars must look as others make them, not as ours.
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
            # img2dataset numbers the samples of shard n from n * 10,000.
            key = f"{number * 10_000 + i:09d}"
            class_name = f"n0000000{i % NUM_CLASSES}"
            row = {
                "key": key,
                # With markup: captions come from the web.
                "caption": f"a <b>{class_name}</b>",
                "status": "success",
                "synset": class_name,
            }
            rows.append(row)
            if i % 5 == 4:
                row["status"] = "failed"
                continue

            image = photo(number * samples + i)
            stored[key] = (image, class_name)
            sample = {
                "__key__": key,
                "jpg": image,
                "txt": row["caption"],
                "json": json.dumps(row, indent=4).encode(),
            }
            in_tar.append(sample)

        name = f"{number:05d}"
        write_tar(folder / f"{name}.tar", in_tar)
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
        stats = json.dumps({"count": samples})
        (folder / f"{name}_stats.json").write_text(stats)
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
                # Unlike the number of the sample, and unlike the other label.
                label = 7 * i + number
                label_12k = -1
                # Half of the classes are not among the 12k.
                if i % 2:
                    label_12k = i
                key = f"n{number:08d}_{i}"
                image = photo(i + 100 * number)
                facts = {
                    "label": label,
                    "label_12k": label_12k,
                    "filename": f"{key}.JPEG",
                }
                rows.append({"__key__": key, "jpg": image, "cls": label, "json": facts})
                yield split, key, image, label, label_12k
            write_tar(folder / f"imagenet22k-{split}-{number:04d}.tar", rows)
    # timm's readers know a folder of tars by this file.
    (folder / "_info.json").write_text('{"splits": {}}')


def hugging_face_layout(
    folder: Path, *, tars: int, samples: int
) -> dict[str, tuple[bytes, str]]:
    """data/train/0000.tar with members in a folder of the tar and labels by name."""
    stored = {}
    for number in range(tars):
        rows = []
        for i in range(samples):
            key = f"images/{number}_{i}"
            # One with a space, at which a reader of words would cut it off.
            name = ("ant", "bee", "cat fish")[i % NUM_CLASSES]
            image = photo(i + 50 * number)
            stored[key] = (image, name)
            rows.append({"__key__": key, "jpg": image, "cls": name.encode()})
        write_tar(folder / "data/train" / f"{number:04d}.tar", rows)
    return stored
