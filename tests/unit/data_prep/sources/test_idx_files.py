from __future__ import annotations

import errno
import gzip
import io
import os
import struct
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from data_prep.images.check import validate_image
from data_prep.sources import idx_files
from data_prep.sources.idx_files import IdxFiles, to_png
from data_prep.sources.outages import Interrupted
from tests.support.corpora.image_corpus import contents
from tests.support.corpora.listing import MemorySpool, list_source, list_watched
from tests.support.corpora.preparing import prepare_here, run_of
from tests.support.peak_memory import peak_mib
from vitscale.config.errors import UserError, UserErrors
from vitscale.data.index import read_split
from vitscale.runs.data_prep import ImageSettings, LabelSettings, SourceSettings

PARTS = ("images-idx3", "labels-idx1")
IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def source(
    root: Path, *, values: Literal["name", "index", "none"] = "name", **splits: str
) -> IdxFiles:
    settings = SourceSettings(kind="idx", path=str(root), splits=splits)
    return IdxFiles(settings, LabelSettings(values=values))


def idx(values: np.ndarray, *, kind: int = 8, sizes: tuple[int, ...] | None = None) -> bytes:
    sizes = values.shape if sizes is None else sizes
    header = struct.pack(f">HBB{len(sizes)}I", 0, kind, len(sizes), *sizes)
    return header + values.tobytes()


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def labels_of(num: int) -> np.ndarray:
    return (np.arange(num) % 3).astype(np.uint8)


def write(folder: Path, *, num: int = 6, name: str = "train", packed: bool = False) -> np.ndarray:
    """Both files of a set of grey images."""
    images = pixels(num, 5, 4, seed=num)
    folder.mkdir(parents=True, exist_ok=True)
    for part, values in zip(PARTS, (images, labels_of(num)), strict=True):
        data = idx(values)
        path = folder / f"{name}-{part}-ubyte{'.gz' if packed else ''}"
        path.write_bytes(gzip.compress(data, mtime=0) if packed else data)
    return images


def decoded(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)))


@pytest.mark.parametrize("packed", [False, True])
def test_every_image_is_an_input_with_its_pixels(packed: bool, tmp_path: Path) -> None:
    train = write(tmp_path, num=4, packed=packed)
    test = write(tmp_path, num=3, name="t10k", packed=packed)
    listed, spool = source(tmp_path, train="train", test="t10k"), MemorySpool()
    rows = list_source(listed, spool)
    end = ".gz" if packed else ""
    assert [(row.path, row.split, row.name, row.class_name, row.reason) for row in rows] == [
        *((f"{IMAGES}{end}/{i}", "train", f"train-{i}", str(i % 3), None) for i in range(4)),
        *(
            (f"t10k-images-idx3-ubyte{end}/{i}", "test", f"t10k-{i}", str(i), None)
            for i in range(3)
        ),
    ]
    stored = [decoded(bytes(spool.data[row.offset :][: row.num_bytes])) for row in rows]
    assert np.array_equal(stored, [*train, *test]) and all(row.spooled for row in rows)
    names = {f"{name}-{part}-ubyte{end}" for name in ("train", "t10k") for part in PARTS}
    assert list_watched(listed) == {".", *names}


@settings(max_examples=40, deadline=None)
@given(
    height=st.integers(1, 300),
    width=st.integers(1, 300),
    channels=st.sampled_from([1, 3]),
    seed=st.integers(0, 9),
)
def test_a_png_has_the_pixels_and_passes_the_checks(
    height: int, width: int, channels: int, seed: int
) -> None:
    image = pixels(height, width, channels, seed=seed)
    png = to_png(image.tobytes(), width, channels)
    assert np.array_equal(decoded(png).reshape(image.shape), image)
    result = validate_image(png, settings=ImageSettings(check="strict"))
    assert (result.reason, result.changes, result.content) == (None, None, png)


def test_the_bytes_of_a_png_are_fixed() -> None:
    png = to_png(b"\x00\xff\x80\x07\x08\x09", 2, 3)
    assert png.hex() == (
        "89504e470d0a1a0a0000000d49484452000000020000000108020000007b40e8dd"
        "00000012494441547801010700f8ff0000ff8007080907300198b738ec370000000049454e44ae426082"
    )


def test_colour_images_are_rgb(tmp_path: Path) -> None:
    images = pixels(2, 3, 5, 3)
    (tmp_path / "a-images.idx4-ubyte").write_bytes(idx(images))
    (tmp_path / "a-labels.idx1-ubyte").write_bytes(idx(labels_of(2)))
    spool = MemorySpool()
    rows = list_source(source(tmp_path / "a-images.idx4-ubyte"), spool)
    stored = [decoded(bytes(spool.data[row.offset :][: row.num_bytes])) for row in rows]
    assert np.array_equal(stored, images)


def test_without_splits_all_files_are_one_split(tmp_path: Path) -> None:
    write(tmp_path, num=2)
    write(tmp_path, num=3, name="t10k", packed=True)
    (tmp_path / "notes.txt").write_text("")
    write(tmp_path / "old", num=1)
    rows = list_source(source(tmp_path))
    assert [row.split for row in rows if row.reason is None] == ["train"] * 5
    assert {row.path: row.reason for row in rows if row.reason} == {
        "notes.txt": "other_name",
        f"old/{IMAGES}": "no_class",
        f"old/{LABELS}": "no_class",
    }


def test_splits_may_be_folders_and_files(tmp_path: Path) -> None:
    write(tmp_path / "a", num=2)
    write(tmp_path / "b", num=3)
    rows = list_source(source(tmp_path, train="a", test=f"b/{IMAGES}"))
    assert [row.split for row in rows] == ["train"] * 2 + ["test"] * 3


def test_ignored_classes_need_no_labels(tmp_path: Path) -> None:
    write(tmp_path, num=2)
    (tmp_path / LABELS).unlink()
    rows = list_source(source(tmp_path, values="none"))
    assert [(row.class_name, row.reason) for row in rows] == [(None, None)] * 2


def test_labels_of_the_same_packing_come_first(tmp_path: Path) -> None:
    write(tmp_path, num=2, packed=True)
    (tmp_path / LABELS).write_bytes(b"other")
    assert [row.reason for row in list_source(source(tmp_path))] == [None, None]
    (tmp_path / f"{LABELS}.gz").unlink()
    (tmp_path / LABELS).write_bytes(idx(np.array([7, 5], np.uint8)))
    assert [row.class_name for row in list_source(source(tmp_path))] == ["7", "5"]


def no_labels(folder: Path) -> None:
    (folder / LABELS).unlink()


def labels_outside(folder: Path) -> None:
    (folder / LABELS).rename(folder.parent / "labels")
    (folder / LABELS).symlink_to(folder.parent / "labels")


def fewer_labels(folder: Path) -> None:
    (folder / LABELS).write_bytes(idx(labels_of(5)))


def both_packings(folder: Path) -> None:
    (folder / f"{IMAGES}.gz").write_bytes(gzip.compress((folder / IMAGES).read_bytes()))


def no_images(folder: Path) -> None:
    (folder / IMAGES).unlink()


@pytest.mark.parametrize(
    "damage, message",
    [
        (no_labels, f"'{IMAGES}' has no labels beside it(.|\n)*{LABELS}, also packed as .gz"),
        (labels_outside, "has no labels beside it"),
        (fewer_labels, f"'{IMAGES}' has 6 images, '{LABELS}' has 5 labels(.|\n)*one release"),
        (both_packings, f"'{IMAGES}' is there twice(.|\n)*remove one"),
        (no_images, "contains no idx files of images"),
    ],
)
def test_unusable_folders_are_refused(damage: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path / "s")
    damage(tmp_path / "s")
    with pytest.raises((UserError, UserErrors), match=f"(?s)source.path.*{message}"):
        source(tmp_path / "s").containers()


def test_a_split_without_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises((UserError, UserErrors), match="source.splits.test.*matching 't10k-images"):
        source(tmp_path, train="train", test="t10k").containers()


def test_images_above_the_limit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    monkeypatch.setattr(idx_files, "MAX_IMAGE_BYTES", 19)
    with pytest.raises(UserErrors, match="each image takes(.|\n)*image_folder"):
        source(tmp_path).containers()


GREY = pixels(6, 5, 4)


@pytest.mark.parametrize(
    "name, data",
    [
        (IMAGES, b""),
        (IMAGES, idx(GREY)[:3]),
        (IMAGES, idx(GREY)[:9]),
        (IMAGES, idx(GREY)[:-1]),
        (IMAGES, idx(GREY) + b"\0"),
        (IMAGES, idx(GREY, kind=13)),
        (IMAGES, b"\1" + idx(GREY)[1:]),
        (IMAGES, idx(GREY, sizes=(120,))),
        (IMAGES, idx(GREY[:, :0])),
        (IMAGES, idx(GREY, sizes=(6, 5, 2, 2))),
        (IMAGES, idx(GREY, sizes=(6, 2**32 - 1, 2**32 - 1))),
        (f"{IMAGES}.gz", idx(GREY)),
        (f"{IMAGES}.gz", gzip.compress(idx(GREY), mtime=0)[:-9]),
        (f"{IMAGES}.gz", gzip.compress(idx(GREY), mtime=0)[:12]),
        (f"{IMAGES}.gz", gzip.compress(idx(GREY)[:-1], mtime=0)),
        (f"{IMAGES}.gz", gzip.compress(idx(GREY) + bytes(1), mtime=0)),
        (f"{IMAGES}.gz", gzip.compress(idx(GREY, sizes=(6, 2**15, 2**15)), mtime=0)),
        (LABELS, idx(labels_of(6))[:-1]),
        (LABELS, idx(labels_of(6).reshape(1, 2, 3))),
    ],
)
def test_a_damaged_file_is_one_row(name: str, data: bytes, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / name.removesuffix(".gz")).unlink()
    (tmp_path / name).write_bytes(data)
    (row,) = list_source(source(tmp_path))
    assert (row.path, row.reason, row.num_bytes) == (name, "damaged_table", len(data))


def test_a_changed_byte_in_gzip_is_one_row(tmp_path: Path) -> None:
    write(tmp_path, num=300, packed=True)
    file = tmp_path / f"{IMAGES}.gz"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    (row,) = list_source(source(tmp_path))
    assert (row.path, row.reason) == (file.name, "damaged_table")


@settings(max_examples=60, deadline=None)
@given(
    position=st.integers(0, 200),
    value=st.integers(0, 255),
    cut=st.integers(0, 200),
    packed=st.booleans(),
)
def test_any_damage_gives_rows_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int, cut: int, packed: bool
) -> None:
    root = tmp_path_factory.mktemp("idx")
    write(root, packed=packed)
    for file in root.iterdir():
        data = bytearray(file.read_bytes())
        data[position % len(data)] = value
        file.write_bytes(data[: len(data) - cut])
        try:
            rows = list_source(source(root))
        except UserError:
            continue
        assert len({row.path for row in rows}) == len(rows)


def test_bombs_take_bounded_memory(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / IMAGES).unlink()
    zeros = gzip.compress(bytes(96 << 20), 1)
    bomb = gzip.compress(idx(GREY)) + zeros
    (tmp_path / f"{IMAGES}.gz").write_bytes(bomb)
    sound = gzip.compress(idx(GREY[:0], sizes=(96, 1024, 1024))) + zeros
    (tmp_path / "long-images-idx3-ubyte.gz").write_bytes(sound)
    (tmp_path / "long-labels-idx1-ubyte").write_bytes(idx(labels_of(96)))
    imports = """
from data_prep.sources.idx_files import IdxFiles
from vitscale.runs.data_prep import SourceSettings

class Spool:
    def add(self, data):
        return "spool", 0
"""
    work = f"""
listed = IdxFiles(SourceSettings(kind="idx", path={str(tmp_path)!r}))
rows = [row for box in listed.containers() for row in listed.inputs(box, spool=Spool())]
reasons = [row.reason for row in rows if hasattr(row, "reason")]
assert sorted(map(str, reasons)) == ["None"] * 96 + ["damaged_table"], reasons
"""
    assert peak_mib(imports=imports, work=work) < 40


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE, errno.ENOMEM])
def test_outages_reject_no_file(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    listed = source(tmp_path)
    boxes = listed.containers()

    def fail(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", fail)
    (_, box) = boxes
    if code in (errno.ESTALE, errno.ENOMEM):
        with pytest.raises(Interrupted, match="the source cannot be read"):
            [*listed.inputs(box, spool=MemorySpool())]
        return
    rows = [row for row in listed.inputs(box, spool=MemorySpool()) if hasattr(row, "reason")]
    assert [(row.path, row.reason) for row in rows] == [
        (IMAGES, "unreadable"),
        (LABELS, "unreadable"),
    ]


def test_a_resumed_run_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = tmp_path / "names.txt"
    names.write_text("shirt\nshoe/boot\nbag\n")
    images = write(tmp_path / "source", num=30, packed=True)
    write(tmp_path / "source", num=9, name="t10k", packed=True)
    options: dict[str, Any] = {
        "source": {"kind": "idx", "splits": {"train": "train", "test": "t10k"}},
        "labels": {"space": str(names), "values": "index"},
    }

    def fail(*arguments: object) -> bytes:
        raise OSError(errno.EREMOTEIO, "Remote I/O error")

    whole = run_of(tmp_path / "source", tmp_path / "whole", **options)
    prepare_here(whole)
    cut = run_of(tmp_path / "source", tmp_path / "cut", **options)
    with monkeypatch.context() as patch:
        patch.setattr(idx_files, "to_png", fail)
        with pytest.raises(Interrupted):
            prepare_here(cut)
    prepare_here(cut, until="write shards")
    prepare_here(cut)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    index = read_split(tmp_path / "cut", split="train")
    assert list(index.classes) == ["shirt", "shoe/boot", "bag"] and len(index.label) == 30
    tars = [path.read_bytes() for path in index.shard_paths]
    places = zip(index.shard_of, index.offset, index.length, strict=True)
    stored = {decoded(tars[s][o : o + n]).tobytes() for s, o, n in places}
    assert stored == {image.tobytes() for image in images}
