"""The five kinds of source: their inputs, the reasons of rejected ones, and refused sources."""

from __future__ import annotations

import csv
import errno
import gzip
import io
import json
import os
import random
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.formats.ledger import REASONS
from data_prep.sources.protocol import Container, Input, Source, with_damage
from data_prep.sources.tars import split_member_name
from tests.support.corpora.external_tars import Members, tar_bytes, write_tars
from tests.support.corpora.sources import listed, opened, touch
from vitscale.config.errors import StorageError, UserError

UNLABELLED: dict[str, Any] = {"values": "none"}


def inputs(kind: str, path: Path, *args: Any, **options: Any) -> list[Input]:
    rows = listed(opened(kind, path, *args, **options))
    assert {row.reason for row in rows} <= {None, *REASONS}
    return rows


def fates(kind: str, path: Path, *args: Any, **options: Any) -> dict[str, str | None]:
    rows = inputs(kind, path, *args, **options)
    assert len({row.path for row in rows}) == len(rows)
    return {row.path: row.reason for row in rows}


def content(source: Source, row: Input) -> bytes:
    return (source.root / (row.file or row.path)).read_bytes()[row.offset :][
        : row.num_bytes
    ]


def table(columns: Mapping[str, Any], **options: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, **options)
    return file.getvalue()


IMAGE = tar_bytes({"1.jpg": b""})
PACKED = gzip.compress(IMAGE)
ROW = table({"image": pa.array([b"x"]), "label": ["a"], "other": [1]})
# By the names of files, else by their suffixes.
CONTENTS = {
    "jpg": b"",
    "txt": b"",
    "csv": b"",
    "tar": IMAGE,
    "parquet": ROW,
    "gz": PACKED,
    "gzip.tar": PACKED,
    "bzip.tar": b"BZh" + IMAGE,
    "xz.tar": b"\xfd7zXZ" + IMAGE,
    "zstd.tar": b"\x28\xb5\x2f\xfd" + IMAGE,
    "lz4.tar": b"\x04\x22\x4d\x18" + IMAGE,
    "text.tar": b"text" * 300,
    "outer.tar": tar_bytes({"train/c.tar": IMAGE, "test/d.tar": IMAGE}),
    "quote.tsv": b'image\tx\tlabel\n1\ty\ta\n2\t"y\tb\n3\ty" z\tc\n',
    "quote.csv": b'image,label,x\n1,a,y\n2,"b,y\n3,c,y\n4,d",y\n',
}
# Kind, files, source.path below them, settings, message.
REFUSED = yaml.safe_load(r"""
- [image_folder, a/c/1.jpg, "", {splits: {test: b}}, "test.*no such folder"]
- [image_folder, a/c/1.jpg, a, {splits: {test: ../a}}, "test.*is outside"]
- [image_folder, a/c/1.jpg, "", {splits: {x: a, y: a/c}}, share files]
- [image_folder, 1.jpg, "", {}, "no class folders, and 1 image.*source.val_labels"]
- - image_folder
  - a/train/1.jpg a/test/2.jpg b/1.jpg
  - ""
  - {}
  - "'a' has sub-folders.*source.splits={train: .}"
- - image_folder
  - a/x/Training/c/1.jpg a/x/Valid/c/2.jpg b/1.jpg
  - ""
  - {}
  - "'a/x' has sub-folders that are named like splits"
- [class_tars, d.tar.gz a.tar, "", {}, "d.tar.gz' is compressed"]
- [class_tars, gzip.tar, "", {}, "gzip.tar' is compressed"]
- [class_tars, gzip.tar, gzip.tar, {}, "gzip.tar' is compressed"]
- [webdataset, bzip.tar, "", {}, "bzip.tar' is compressed"]
- [webdataset, xz.tar, "", {}, "xz.tar' is compressed"]
- [webdataset, zstd.tar, "", {}, "zstd.tar' is compressed"]
- [webdataset, lz4.tar, "", {}, "lz4.tar' is compressed"]
- [class_tars, text.tar, text.tar, {}, cannot be read as a tar file]
- [class_tars, a.tar, a.tar, {}, contains no tar files]
- [class_tars, outer.tar, outer.tar, {}, tars in several folders]
- [class_tars, a/b.txt, "", {}, ": no tar files"]
- [class_tars, a/c.tar, "", {}, "in sub-folders, such as 'a/c.tar'"]
- [webdataset, 1.tar a/b/2.tar, "", {}, "such as 'a/b/2.tar'"]
- [webdataset, x/1.tar x/a/2.tar, "", {splits: {val: x}}, splits.val]
- [parquet, a.parquet a/b.parquet, "", {}, "such as 'a/b.parquet'"]
- [webdataset, a.tar, "", {label: "json:"}, "source.label.*json:FIELD"]
- [webdataset, a.tar, "", {label: txt}, "source.label.*json:FIELD"]
- [parquet, a.parquet, "", {image_column: gone}, "image_column.*no column 'gone'"]
- [parquet, a.parquet, "", {label: gone}, "source.label.*no column 'gone'"]
- [parquet, a.parquet, "", {image_column: other}, contains no bytes]
- [parquet, a.parquet, "", {label: image}, source.label.*has type binary]
- [path_table, quote.tsv, quote.tsv, {}, "quote.tsv.*line 3: a quote"]
- [path_table, quote.csv, quote.csv, {}, "quote.csv.*line 3: a quote"]
- [path_table, t.csv, t.csv, {}, "cannot be read: Empty CSV file"]
- [path_table, t.csv, "", {}, is not a table]
- [path_table, a.txt, a.txt, {}, ": no tables"]
- [path_table, t.csv, gone, {}, "source.path: .*no such"]
""")


@pytest.mark.parametrize("kind, files, path, options, message", REFUSED)
def test_unusable_sources_are_refused_in_one_message(
    kind: str, files: str, path: str, options: Any, message: str, tmp_path: Path
) -> None:
    for name in files.split():
        touch(tmp_path, name)
        suffix = name.rpartition(".")[2]
        (tmp_path / name).write_bytes(CONTENTS.get(name, CONTENTS.get(suffix, b"")))
    with pytest.raises(UserError, match=f"(?s){message}"):
        inputs(kind, tmp_path / path, **options)


def test_splits_may_share_a_folder_by_patterns(tmp_path: Path) -> None:
    names = [f"d/x-train-{i:04}.tar" for i in range(3)] + ["d/x-val-0000.tar"]
    write_tars(tmp_path, {name: {} for name in names})

    def files(**splits: str) -> list[tuple[str, str]]:
        boxes = opened("webdataset", tmp_path, splits=splits).containers()
        return [(box.split, box.path) for box in boxes]

    assert files(train="d/x-train-{0000..0002}.tar", test="d/x-val-*.tar") == [
        *(("train", name) for name in names[:3]),
        ("test", "d/x-val-0000.tar"),
    ]
    for splits, message in [
        ({"train": "d/x-train-{0000..0003}.tar"}, "has no 'x-train-0003.tar'"),
        ({"train": "d/x-train-*.tar", "test": "d/x-*.tar"}, "two splits share files"),
        (
            {"train": "d/x-train-*.tar", "test": "d/y-*.tar"},
            "splits.test.*y-.*: no .tar files",
        ),
        ({"train": "d/{a}{.tar"}, "source.splits.train.*not a pattern"),
        ({"train": "e/x-*.tar"}, "source.splits.train.*no such"),
        ({"train": "d", "test": "d/x-val-0000.tar"}, "two splits share files"),
    ]:
        with pytest.raises(UserError, match=message):
            files(**splits)


def test_class_folders_are_sorted_by_bytes(tmp_path: Path) -> None:
    touch(
        tmp_path,
        *(f"{c}/1.jpg" for c in ("dog", "cat", "Eel", "é", "cat-2")),
        "cat/sub/2.jpg",
    )
    source = opened("image_folder", tmp_path)
    boxes = source.containers()
    assert [box.class_name for box in boxes] == [
        None,
        "Eel",
        "cat",
        "cat-2",
        "dog",
        "é",
    ]
    names = {(row.class_name, row.name) for row in source.inputs(boxes[2])}
    assert names == {("cat", "1"), ("cat", "sub/2")}
    with pytest.raises(UserError, match="'gone': changed while"):
        list(source.inputs(Container("gone", "train", "gone")))


def test_links_to_files_and_linked_classes_are_followed(tmp_path: Path) -> None:
    root = tmp_path / "source"
    touch(root, "cat/1.jpg", "cat/sub/2.jpg")
    touch(tmp_path, "beside/3.jpg")
    for link, target in {
        "cat/same.jpg": "1.jpg",
        "cat/gone.jpg": "nothing.jpg",
        "cat/up": "..",
        "cat/sub/self": ".",
        "cat/out.jpg": "../../beside/3.jpg",
        "cat/ring": "ring",
        "kitten": "cat/sub",
        "dog/cats": "../cat",
        "loose": "loose",
    }.items():
        (root / link).parent.mkdir(exist_ok=True)
        (root / link).symlink_to(target)
    assert fates("image_folder", root) == {
        "cat/1.jpg": None,
        "cat/sub/2.jpg": None,
        "cat/same.jpg": None,
        "cat/gone.jpg": "link_broken",
        "cat/up": "linked_folder",
        "cat/sub/self": "linked_folder",
        "cat/out.jpg": None,
        "cat/ring": "link_broken",
        "kitten/2.jpg": None,
        "kitten/self": "linked_folder",
        "dog/cats": "linked_folder",
        "loose": "link_broken",
    }


def test_without_classes_every_image_below_is_listed(tmp_path: Path) -> None:
    touch(tmp_path, "1.jpg", "a/1.jpg", "a/b/2.png", "a/notes.txt", ".h/3.jpg")
    touch(tmp_path, "a/@eaDir/1.jpg/x.jpg", "$RECYCLE.BIN/4.jpg")
    rows = inputs("image_folder", tmp_path, UNLABELLED)
    assert {row.path: (row.class_name, row.name, row.reason) for row in rows} == {
        "1.jpg": ("", "1", None),
        "a/1.jpg": ("", "a/1", None),
        "a/b/2.png": ("", "a/b/2", None),
        "a/notes.txt": ("", "a/notes", "other_name"),
        ".h/3.jpg": ("", ".h/3", "hidden"),
        "a/@eaDir/1.jpg/x.jpg": ("", "a/@eaDir/1.jpg/x", "hidden"),
        "$RECYCLE.BIN/4.jpg": ("", "$RECYCLE.BIN/4", "hidden"),
    }


KAGGLE = "ImageId,PredictionString\nv_2,dog 85 1 499 272\nv_1,cat 1 1 4 4 dog 1 2 3 4\n"


@pytest.mark.parametrize(
    "text", [KAGGLE, "v_1.JPEG cat\nval/v_2.JPEG dog\n", "cat\ndog\n"]
)
def test_a_list_names_the_classes_of_loose_images(text: str, tmp_path: Path) -> None:
    touch(tmp_path, "in/train/cat/1.jpg", "in/train/dog/1.jpg", "in/train/loose.jpg")
    touch(
        tmp_path,
        "in/val/v_2.JPEG",
        "in/val/v_1.JPEG",
        "in/val/.v_0.JPEG",
        "in/val/note.txt",
    )
    (tmp_path / "list").write_text(text)
    source = opened("image_folder", tmp_path / "in", val_labels=str(tmp_path / "list"))
    assert {row.path: (row.class_name, row.reason) for row in listed(source)} == {
        "train/cat/1.jpg": ("cat", None),
        "train/dog/1.jpg": ("dog", None),
        "train/loose.jpg": (None, "no_class"),
        "val/v_1.JPEG": ("cat", None),
        "val/v_2.JPEG": ("dog", None),
        "val/.v_0.JPEG": (None, "hidden"),
        "val/note.txt": (None, "other_name"),
    }


def test_the_name_of_a_tar_is_the_class_of_its_members(tmp_path: Path) -> None:
    write_tars(
        tmp_path,
        {
            "n02.tar": {"n02_1.JPEG": b"two one"},
            "n01.tar": {"./n01/n01_1.JPEG": b"one one", "n01/n01_2.x.jpg": b""},
        },
    )
    source = opened("class_tars", tmp_path)
    rows = listed(source)
    assert [
        (row.path, row.class_name, row.name, content(source, row)) for row in rows
    ] == [
        ("n01.tar/./n01/n01_1.JPEG", "n01", "n01/n01_1", b"one one"),
        ("n01.tar/n01/n01_2.x.jpg", "n01", "n01/n01_2.x", b""),
        ("n02.tar/n02_1.JPEG", "n02", "n02_1", b"two one"),
    ]
    assert all(row.reason is None and row.split == "train" for row in rows)
    assert rows[2].modified_ns == (tmp_path / "n02.tar").stat().st_mtime_ns
    box = Container("gone.tar", "train")
    with pytest.raises(UserError, match="'gone.tar': changed while"):
        list(with_damage(box, source.inputs(box)))
    names = [row.name for row in inputs("class_tars", tmp_path, UNLABELLED)]
    assert names == ["n01/n01/n01_1", "n01/n01/n01_2.x", "n02/n02_1"]


def test_a_tar_of_tars_is_read_in_place(tmp_path: Path) -> None:
    inner = tar_bytes({"1.jpg": b"first", "2.jpg": b"second"})
    members = {
        "whole/n01.tar": inner,
        "whole/README": b"?",
        "whole/n02.tar": tar_bytes({"1.jpg": b"other"}),
        ".hidden.tar": inner,
    }
    write_tars(tmp_path, {"all.tar": members})
    source = opened("class_tars", tmp_path / "all.tar")
    rows = {row.path: row for row in listed(source)}
    assert {path: row.reason for path, row in rows.items()} == {
        "all.tar/whole/n01.tar/1.jpg": None,
        "all.tar/whole/n01.tar/2.jpg": None,
        "all.tar/whole/n02.tar/1.jpg": None,
    }
    second = rows["all.tar/whole/n01.tar/2.jpg"]
    assert (second.class_name, second.file, content(source, second)) == (
        "n01",
        "all.tar",
        b"second",
    )
    assert content(source, rows["all.tar/whole/n02.tar/1.jpg"]) == b"other"
    os.truncate(tmp_path / "all.tar", second.offset)
    with pytest.raises(
        UserError, match="'all.tar' cannot be read as a tar file to its end"
    ):
        source.containers()
    write_tars(tmp_path, {"all.tar": [*members.items(), ("./whole/n02.tar", inner)]})
    with pytest.raises(UserError, match="'whole/n02.tar' twice"):
        source.containers()


def special_tar() -> bytes:
    """Members of every type, and names that lead elsewhere."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, kind in {
            "fol": tarfile.DIRTYPE,
            "sym.jpg": tarfile.SYMTYPE,
            "hard.jpg": tarfile.LNKTYPE,
            "dev.jpg": tarfile.CHRTYPE,
            "pipe.jpg": tarfile.FIFOTYPE,
        }.items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        for name in (
            "/abs.jpg",
            "../../up.jpg",
            "notes.txt",
            ".h/1.jpg",
            "@eaDir/2.jpg",
            "ok.webp",
        ):
            tar.addfile(tarfile.TarInfo(name))
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["class_tars", "webdataset"])
def test_types_and_names_of_members_determine_the_reason(
    kind: str, tmp_path: Path
) -> None:
    (tmp_path / "cat.tar").write_bytes(special_tar())
    found = fates(kind, tmp_path, UNLABELLED)
    assert {
        path.removeprefix("cat.tar/").split(" ")[0]: why for path, why in found.items()
    } == {
        "sym.jpg": "not_a_file",
        "hard.jpg": "not_a_file",
        "dev.jpg": "not_a_file",
        "pipe.jpg": "not_a_file",
        "/abs.jpg": None,
        "../../up.jpg": None,
        "notes.txt": "other_name" if kind == "class_tars" else "no_image",
        ".h/1.jpg": None,
        "@eaDir/2.jpg": "hidden",
        "ok.webp": None,
    }


@pytest.mark.parametrize("kind", ["class_tars", "webdataset"])
def test_cut_tars_have_a_row_and_keep_what_is_whole(kind: str, tmp_path: Path) -> None:
    whole = tar_bytes({"1.jpg": b"a", "1.cls": b"1", "2.jpg": b"b", "2.cls": b"2"})
    for cut in [*range(0, 4096 + 1024, 37), 1024, 2048, 3072, 4096]:
        (tmp_path / "a.tar").write_bytes(whole[:cut])
        rows = inputs(kind, tmp_path)
        kept = [row.path[-5:] for row in rows if row.reason is None]
        first, second = (513, 2561) if kind == "class_tars" else (1537, 3585)
        assert kept == ["1.jpg", "2.jpg"][: (cut >= first) + (cut >= second)], cut
        assert [row.reason for row in rows if row.path == "a.tar"] == ["truncated_tar"]


def test_any_member_names_give_one_row_each_of_unique_path(tmp_path: Path) -> None:
    names = [
        "..",
        "./dup",
        "dup",
        "dup",
        "a.b",
        "\n",
        "ü",
        "\udcff",
        "x" * 300,
        "a//b",
        "",
        " ",
    ]
    members = [(f"{name}.jpg", b"%d" % i) for i, name in enumerate(names)]
    write_tars(tmp_path, {"cat.tar": members})
    source = opened("class_tars", tmp_path)
    rows = listed(source)
    assert [content(source, row) for row in rows] == [data for _, data in members]
    assert len({row.path for row in rows}) == len(rows) and all(
        os.fsencode(r.path) for r in rows
    )
    kept = [row.name for row in rows if row.reason is None]
    assert len(set(kept)) == len(kept)
    assert [row.reason for row in rows[1:4]] == [
        None,
        "duplicate_name",
        "duplicate_name",
    ]


def samples(root: Path, members: Members, **options: Any) -> dict[str, str | None]:
    """Path inside the tar -> class or, in brackets, reason."""
    write_tars(root, {"a.tar": members})
    rows = inputs("webdataset", root / "a.tar", **options)
    assert len({row.path for row in rows}) == len(rows)
    return {
        row.path.removeprefix("a.tar/"): f"<{row.reason}>"
        if row.reason
        else row.class_name
        for row in rows
    }


def test_a_sample_is_one_input_with_its_label(tmp_path: Path) -> None:
    members = {
        "d/1.jpg": b"one",
        "d/1.cls": b" 7\n",
        "d/1.json": b"{}",
        "2.cls": b"cat",
    }
    write_tars(tmp_path, {"t/1.tar": members | {"2.PNG": b"two", "2.txt": b"caption"}})
    source = opened("webdataset", tmp_path, splits={"train": "t"})
    rows = listed(source)
    assert [(row.path, row.name, row.class_name, row.reason) for row in rows] == [
        ("t/1.tar/d/1.jpg", "d/1", "7", None),
        ("t/1.tar/2.PNG", "2", "cat", None),
    ]
    assert [content(source, row) for row in rows] == [b"one", b"two"]
    assert {row.file for row in rows} == {"t/1.tar"} and rows[0].modified_ns > 0


def test_negative_numbers_mean_no_label_without_a_space(tmp_path: Path) -> None:
    members = {"1.jpg": b"one", "1.cls": b"-1\n", "2.jpg": b"two", "2.cls": b"2"}
    assert samples(tmp_path, members) == {"1.jpg": "<no_label>", "2.jpg": "2"}
    labels = {"space": "imagenet_12k", "values": "index"}
    rows = inputs("webdataset", tmp_path, labels)
    assert [(row.class_name, row.reason) for row in rows] == [("-1", None), ("2", None)]


@pytest.mark.parametrize(
    "label, raw, class_name",
    [
        ("json:x", b'{"x": 5}', "5"),
        ("json:x", b'{"x": -1}', None),
        ("json:x", b'{"x": true}', None),
        ("json:x", b'{"x": "n01440764"}', "n01440764"),
        ("json:x", b'{"x": 1.5}', None),
        ("json:x", b'{"x": "\\ud800"}', None),
        ("json:x", b'{"x": "%s"}' % (b"x" * 5000), None),
        ("json:x", b"[5]", None),
        *(
            (label, raw, None)
            for label in ("cls", "json:x")
            for raw in (b"[" * 100_000, b"\xff")
        ),
        ("json:x", b'{"x": 1}' + b" " * (2 << 20), None),
    ],
)
def test_labels_of_samples_are_text_or_integers(
    label: str, raw: bytes, class_name: str | None, tmp_path: Path
) -> None:
    members = {"1.jpg": b"", f"1.{label.partition(':')[0]}": raw}
    assert samples(tmp_path, members, label=label) == {
        "1.jpg": class_name or "<no_label>"
    }


def test_incomplete_and_repeated_samples_have_rows(tmp_path: Path) -> None:
    names = "1.cls 1.txt 2.jpg 2.txt 3.seg.png 3.cls 4.1.jpg 4.1.cls 4.2.jpg".split()
    assert samples(tmp_path, dict.fromkeys(names, b"1")) == {
        "1.cls": "<no_image>",
        "2.jpg": "<no_label>",
        "3.seg.png": "<no_image>",
        "4.1.jpg": "<no_image>",
        "4.2.jpg (byte 8704)": "<duplicate_key>",
    }
    rows = inputs("webdataset", tmp_path, UNLABELLED)
    reasons = ["no_image", None, "no_image", "no_image", "duplicate_key"]
    assert [row.reason for row in rows] == reasons
    members = [
        ("1.jpg", b""),
        ("1.cls", b"1"),
        ("2.jpg", b"2"),
        ("1.jpg", b""),
        ("1.cls", b"2"),
    ]
    members += [
        ("3.cls", b"3"),
        ("2.cls", b"1"),
        ("4.jpg", b""),
        ("4.jpg", b""),
        ("4.cls", b"4"),
    ]
    members += [("4.png", b""), ("README", b""), ("README", b"")]
    members += [("5.jpg", b""), ("5.cls", b"5"), ("5.cls", b"6")]
    assert samples(tmp_path, members) == {
        "1.jpg": "1",
        "2.jpg": "<no_label>",
        "1.jpg (byte 3072)": "<duplicate_key>",
        "3.cls": "<no_image>",
        "2.cls (byte 5632)": "<duplicate_key>",
        "4.jpg": "4",
        "4.jpg (byte 7168)": "<duplicate_key>",
        "4.png (byte 8704)": "<duplicate_key>",
        "README (byte 9216)": "<other_name>",
        "README (byte 9728)": "<other_name>",
        "5.jpg": "5",
        "5.cls (byte 11776)": "<duplicate_key>",
    }


KEY_PARTS = st.sampled_from(["a", "b", ".", "..", "ü", "x.y", "", "__", "\udcff", " "])


@settings(max_examples=200, deadline=None)
@given(name=st.lists(KEY_PARTS, min_size=1, max_size=4).map("/".join), suffix=KEY_PARTS)
def test_keys_equal_those_of_webdataset(name: str, suffix: str) -> None:
    from webdataset.tariterators import base_plus_ext

    text = f"{name}.{suffix}"
    prefix, ending = base_plus_ext(text)
    expected = None if prefix is None else (prefix, ending.lower())
    if text.startswith("__") and text.endswith("__") and "/" not in text:
        expected = None
    if text.rpartition("/")[2].startswith("."):
        expected = None  # hidden here; the package may differ
    assert split_member_name(text) == expected


def write_parquet(path: Path, images: list[Any], labels: Any, **options: Any) -> None:
    """One row per image; `names`: of the classes, as the `datasets` package stores them."""
    names = options.pop("names", None)
    data = pa.table({"image": pa.array(images), "label": pa.array(labels)})
    if names is not None:
        feature = {"names": names, "_type": "ClassLabel"}
        info = json.dumps({"info": {"features": {"label": feature}}})
        data = data.replace_schema_metadata({"huggingface": info})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(data, path, **options)


def test_rows_of_parquet_files_are_inputs_with_bytes(tmp_path: Path) -> None:
    images = [
        {"bytes": b"one", "path": "n01_1.JPEG"},
        {"bytes": b"three", "path": None},
    ]
    images += [{"bytes": b"", "path": "sub/./x.y.png"}]
    write_parquet(
        tmp_path / "data/train-0.parquet", images, [1, 0, 1], names=["cat", "dog"]
    )
    write_parquet(
        tmp_path / "data/test-0.parquet", images[:1], [0], names=["cat", "dog"]
    )
    splits = {"train": "data/train-*.parquet", "test": "data/test-*.parquet"}
    rows = inputs("parquet", tmp_path, splits=splits)
    assert [
        (row.path, row.split, row.name, row.class_name, row.data) for row in rows
    ] == [
        ("data/train-0.parquet/0", "train", "n01_1", "dog", b"one"),
        ("data/train-0.parquet/1", "train", "train-0-1", "cat", b"three"),
        ("data/train-0.parquet/2", "train", "sub/x.y", "dog", b""),
        ("data/test-0.parquet/0", "test", "n01_1", "cat", b"one"),
    ]
    assert [row.num_bytes for row in rows] == [3, 5, 0, 3]


@pytest.mark.parametrize(
    "labels, names, values, classes",
    [
        (pa.array(["a", " b ", "", None]), None, "name", ["a", "b", None, None]),
        (pa.array([7, -1, None, 0], pa.int16()), None, "name", ["7", None, None, "0"]),
        (
            pa.array(["a", "b", None]).dictionary_encode(),
            None,
            "name",
            ["a", "b", None],
        ),
        (pa.array(["a", "x" * 5000], pa.large_string()), None, "name", ["a", None]),
        ([1, 2, -1, 0], ["cat", "dog"], "name", ["dog", None, None, "cat"]),
        ([1, 2, -1, 0], ["cat", "dog"], "index", ["1", "2", None, "0"]),
    ],
)
def test_labels_of_parquet_rows_are_numbers_or_text(
    labels: Any, names: Any, values: str, classes: list[str | None], tmp_path: Path
) -> None:
    images = [{"bytes": b"x", "path": None}] * len(classes)
    write_parquet(tmp_path / "a.parquet", images, labels, names=names)
    rows = inputs("parquet", tmp_path / "a.parquet", {"values": values})
    assert [row.class_name for row in rows] == classes
    assert [row.reason for row in rows] == [
        None if name else "no_label" for name in classes
    ]


def test_cells_without_bytes_and_damaged_files_have_rows(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    write_parquet(file, [None, {"path": "/etc/passwd"}, {"bytes": b"x"}], [0, 0, 0])
    assert [row.reason for row in inputs("parquet", file)] == [
        "no_image",
        "no_image",
        None,
    ]
    rng = random.Random(0)
    images = [{"bytes": rng.randbytes(5000)} for _ in range(8)]
    write_parquet(
        file,
        images,
        [0] * 8,
        row_group_size=2,
        compression="zstd",
        use_dictionary=False,
    )
    whole = file.read_bytes()
    for cut in (0, 3, 1000, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        assert fates("parquet", tmp_path) == {"a.parquet": "damaged_table"}
    chunk = pq.ParquetFile(pa.BufferReader(whole)).metadata.row_group(1).column(0)
    start = chunk.data_page_offset
    file.write_bytes(whole[:start] + b"\xff" * 60 + whole[start + 60 :])
    rows = inputs("parquet", tmp_path)
    assert [(r.path, r.reason) for r in rows if r.reason] == [
        ("a.parquet", "damaged_table")
    ]
    bad_text = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff\xfe"]).buffers())
    write_parquet(file, images[:1], bad_text)
    assert fates("parquet", tmp_path) == {"a.parquet": "damaged_table"}
    file.write_bytes(b"PAR1 cut")
    assert fates("path_table", file) == {"a.parquet": "damaged_table"}


def write_table(path: Path, columns: dict[str, list[Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path, row_group_size=2)
    else:
        with path.open("w", newline="") as file:
            writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writerows([list(columns), *zip(*columns.values(), strict=True)])
    return path


@pytest.mark.parametrize("suffix", ["tsv", "parquet", "CSV"])
def test_rows_of_a_table_are_inputs_with_their_files(
    suffix: str, tmp_path: Path
) -> None:
    touch(tmp_path, "a/1.jpg", "b,c.png", "3")
    (tmp_path / "a/1.jpg").write_bytes(b"1234")
    columns = {
        "x": [1, 2, 3],
        "label": ["cat", "7", "dog"],
        "image": ["./a//1.jpg", "b,c.png", "3"],
        "split": ["train", "val", "val"],
    }
    file = write_table(tmp_path / f"t.{suffix}", columns)
    rows = inputs("path_table", file)
    assert [
        (row.path, row.split, row.class_name, row.name, row.reason) for row in rows
    ] == [
        ("a/1.jpg", "train", "cat", "a/1", None),
        ("b,c.png", "val", "7", "b,c", None),
        ("3", "val", "dog", "3", None),
    ]
    assert [row.num_bytes for row in rows] == [4, 0, 0]
    assert rows[0].modified_ns == (tmp_path / "a/1.jpg").stat().st_mtime_ns
    for wrong in ("", "a/b", "start", 25 * "a"):
        write_table(file, {**columns, "split": ["train", wrong, "val"]})
        with pytest.raises(UserError, match="cannot name a split"):
            inputs("path_table", file)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_what_a_path_leads_to_determines_the_reason(
    suffix: str, tmp_path: Path
) -> None:
    touch(tmp_path, "out.jpg", "out/1.jpg", "in/1.jpg", "in/deep/2.jpg")
    for link, target in {"up": "..", "x.jpg": "../out.jpg", "z.jpg": "z.jpg"}.items():
        (tmp_path / "in" / link).symlink_to(target)
    os.mkfifo(tmp_path / "in/pipe.jpg")
    expected = {
        "1.jpg": None,
        "deep/2.jpg": None,
        "../out.jpg": None,
        "..": "not_a_file",
        str(tmp_path / "in/1.jpg"): None,
        "up/out.jpg": None,
        "x.jpg": None,
        "gone.jpg": "unreadable",
        "1.jpg/2.jpg": "unreadable",
        "z.jpg": "unreadable",
        "n" * 300: "unreadable",
        "nul\0.jpg": "unreadable",
        "": "unreadable",
        ".": "not_a_file",
        "deep": "not_a_file",
        "pipe.jpg": "not_a_file",
    }
    columns = {"image": list(expected), "label": ["a"] * len(expected)}
    file = write_table(tmp_path / f"in/t.{suffix}", columns)
    assert [row.reason for row in inputs("path_table", file)] == list(expected.values())
    lost = mock.Mock(
        wraps=os, stat=mock.Mock(side_effect=OSError(errno.EREMOTEIO, "lost"))
    )
    with (
        mock.patch("data_prep.sources.tables.os", lost),
        pytest.raises(StorageError, match="lost"),
    ):
        inputs("path_table", file)


@pytest.mark.parametrize(
    "columns", [{}, {"label": [1.5, 2.5]}], ids=["missing", "unusable"]
)
def test_ignored_classes_need_no_label_column(columns: Any, tmp_path: Path) -> None:
    touch(tmp_path, "1.jpg", "2.jpg")
    for suffix in ("csv", "parquet"):
        file = write_table(
            tmp_path / f"t.{suffix}", {"image": ["1.jpg", "2.jpg"], **columns}
        )
        assert fates("path_table", file, UNLABELLED) == {"1.jpg": None, "2.jpg": None}
    columns = {"image": pa.array([b"1", b"2"]), "split": ["train", "Dev"], **columns}
    (tmp_path / "p.parquet").write_bytes(table(columns))
    rows = inputs("parquet", tmp_path / "p.parquet", UNLABELLED)
    assert [(row.reason, row.data) for row in rows] == [(None, b"1"), (None, b"2")]
    file = write_table(tmp_path / "b.parquet", {"image": ["1.jpg"], "label": [True]})
    assert fates("path_table", file) == {"1.jpg": "no_label"}
    assert [row.split for row in rows] == ["train", "val"]
    (row, _) = inputs("parquet", tmp_path, UNLABELLED, splits={"x": "p.parquet"})
    assert row.split == "x"
