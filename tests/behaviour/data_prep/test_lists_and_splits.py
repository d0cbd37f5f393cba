"""Names of splits, lists of classes, and text files as programs of all systems write them."""

from __future__ import annotations

import csv
import io
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.steps.labels import load_space, read_map
from data_prep.steps.list_inputs import CONTAINERS, read_containers
from data_prep.steps.tars import list_tars
from data_prep.steps.work import WorkFolder
from tests.support.corpora.external_tars import write_tars
from tests.support.corpora.image_corpus import run_of
from tests.support.corpora.sources import listed, opened, touch
from tests.support.tables import every, refused, rows
from vitscale.config.text_files import read_cells, read_text
from vitscale.runs.data_prep import SourceSettings


def inputs(
    path: Path, *, kind: str = "image_folder", values: str = "name", **options: Any
) -> Any:
    """values: of the settings of labels."""
    return listed(opened(kind, path, {"values": values}, **options))


# ---- folders that are splits ---------------------------------------------------------------------

# Names of folders -> their splits.
RECOGNISED = {
    "Training Testing": "test train",
    "train dev": "train val",
    "TRAIN Valid": "train val",
    "train eval": "test train",
    "train validation evaluation": "test train val",
    "train holdout": "test train",
    "train": "train",
}
REFUSED = """\
train val test2
train_images val_images
seg_train seg_test seg_pred
trainset testset
Training PublicTest PrivateTest
train val preview
train val a b c d e
train annotations
train dev val
train val Val
Train valid dog
val test
test
train2017 val2017 annotations
bounding_box_train bounding_box_test query gt_bbox
training_data
imagesTr imagesTs labelsTr
imagesTr labelsTr
image_ts label_ts
""".splitlines()


@every(folders=RECOGNISED)
def test_folders_named_by_keywords_are_splits(folders, tmp_path):
    for name in folders.split():
        touch(tmp_path, f"{name}/cat/1.jpg", f"{name}/dog/1.jpg")
    touch(tmp_path, ".cache/x/3.jpg")
    rows = inputs(tmp_path)
    assert sorted({row.split for row in rows}) == RECOGNISED[folders].split()
    assert {row.class_name for row in rows} == {"cat", "dog"}
    unlabelled = inputs(tmp_path, values="none")
    assert sorted({row.split for row in unlabelled}) == RECOGNISED[folders].split()


@every(names=REFUSED)
def test_folders_that_may_be_splits_are_refused_with_both_readings(names, tmp_path):
    folders = names.split()
    for name in folders:
        is_flat = name in ("preview", "annotations", *"abcde")
        touch(
            tmp_path,
            *(
                [f"{name}/1.jpg"]
                if is_flat
                else [f"{name}/cat/1.jpg", f"{name}/dog/2.jpg"]
            ),
        )
    with refused("named like splits") as caught:
        inputs(tmp_path)
    advice = caught.value.next_step or ""
    assert "if they are splits" in advice and "'source.splits={train: .}'" in advice
    assert folders[0] in caught.value.what
    # The advice works, in both readings.
    assert {row.class_name for row in inputs(tmp_path, splits={"train": "."})} == set(
        folders
    )
    splits = {
        f"s{number}": name
        for number, name in enumerate(folders)
        if (tmp_path / name / "cat").is_dir()
    }
    assert {row.class_name for row in inputs(tmp_path, splits=splits)} == {"cat", "dog"}


@every(
    folders=[
        ("train", "bus", "aeroplane", "bicycle", "tiger"),
        ("valid", "invalid"),
        ("steam_train", "bullet_train"),
        ("developed", "undeveloped"),
        ("train", "test_tube", "cat", "dog", "hen", "owl"),
        ("strain", "valley", "device", "contest", "a", "b", "c", "d", "e"),
    ]
)
def test_classes_may_be_called_like_splits(folders, tmp_path):
    touch(tmp_path, *(f"{name}/1.jpg" for name in folders))
    assert {row.class_name for row in inputs(tmp_path)} == set(folders)


def test_files_named_by_keywords_are_splits(tmp_path):
    names = [
        "train-00000-of-00002",
        "train-00001-of-00002",
        "validation-00000-of-00001",
        "x_test_0",
    ]
    table = pa.table({"image": [b"x"], "label": ["a"]})
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pq.write_table(table, tmp_path / f"{name}.parquet")
        write_tars(tmp_path / "tars", {f"{name}.tar": {"0.jpg": b"x", "0.cls": b"a"}})
    for kind, root in (("parquet", tmp_path), ("webdataset", tmp_path / "tars")):
        found = {
            Path(row.path).parts[0].partition(".")[0]: row.split
            for row in inputs(root, kind=kind)
        }
        assert found == dict(zip(names, ["train", "train", "val", "test"], strict=True))


# Names of tars -> their splits; none: refused.
FILES = {
    "trainval-000 test-000": "",
    "train_val-0 test-0": "",
    "trainset-0 testset-0": "",
    "imgs_trainA imgs_testA": "",
    "trn-0 tst-0": "",
    "train-0 test-0 extra-0 extra-1 extra-2": "",
    "train-0 more": "",
    "val-0 part-0": "",
    "val-0 test-0": "",
    "Training PublicTest PrivateTest": "",
    "train-0 minival-0": "",
    "x-val-0 x-val-1": "train train",
    "trainval-0 trainval-1": "train train",
    "00000 00001": "train train",
    "valley-0 contest-0 developer-0": "train train train",
    "valley-train-0 valley-TEST-0 valley-train-1": "train test train",
    "train2017-0 val2017-0 dev-0": "train val val",
}


@every(names=FILES, place="folder, bucket")
def test_files_are_splits_one_split_or_refused(names, place, tmp_path):
    tars = touch(tmp_path, *(f"{name}.tar" for name in names.split()))
    work = WorkFolder(run_of(tars, tmp_path / "out"))
    work.path.mkdir()

    def found(**settings: Any) -> str:
        path = tars if place == "folder" else "s3://bucket/tars"
        source = SourceSettings(kind="webdataset", path=str(path), **settings)
        work.run = work.run.model_copy(update={"source": source})
        # Only the listing of the bucket is made up.
        with mock.patch(
            "data_prep.steps.tars.names_below", lambda root: os.listdir(tars)
        ):
            list_tars(work, CONTAINERS)
        splits = {box.path: box.split for box in read_containers(work)}
        return " ".join(splits[f"{name}.tar"] for name in names.split())

    if FILES[names]:
        assert found() == FILES[names]
        return
    with refused("named like splits.*\n.*if they are splits") as caught:
        found()
    assert """source.splits={train: "*"}""" in caught.value.text()
    assert set(found(splits={"train": "*"}).split()) == {"train"}


def test_spellings_of_splits_in_a_table_are_one_split(tmp_path):
    spelled = [
        "Train",
        "TRAIN",
        "training",
        "train",
        "Valid",
        "validation",
        "Testing",
        "extra",
        "dev",
        "EVAL",
        "holdout",
    ]
    touch(tmp_path, *(f"{n}.jpg" for n in range(len(spelled))))
    rows = [
        ["image", "label", "split"],
        *([f"{n}.jpg", "a", name] for n, name in enumerate(spelled)),
    ]
    with open(tmp_path / "t.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    found = [row.split for row in inputs(tmp_path / "t.csv", kind="path_table")]
    assert found == ["train"] * 4 + ["val"] * 2 + [
        "test",
        "extra",
        "val",
        "test",
        "test",
    ]


# ---- lists of the classes of loose images --------------------------------------------------------

CLASSES = ["great gray owl", "hen", 'x "y", z']


def written(rows: list[list[str]], **how: Any) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n", **how).writerows(rows)
    return file.getvalue()


def rows_of(names: list[str]) -> list[list[str]]:
    return [[name, CLASSES[number % 3]] for number, name in enumerate(names)]


LOOSE = ["v_0.jpg", "v_1.jpg", "img 2.jpg", "img,3.jpg", "v(4).jpg"]
FORMS = {
    "comma": written(rows_of(LOOSE)),
    "semicolon": written(rows_of(LOOSE), delimiter=";"),
    "tab": written(rows_of(LOOSE), delimiter="\t"),
    "blanks": written(rows_of(LOOSE), delimiter="\t").replace("\t", " \t"),
    "bar": written(rows_of(LOOSE), delimiter="|"),
    "colon": written(rows_of(LOOSE), delimiter=":"),
    "all quoted": written(rows_of(LOOSE), quoting=csv.QUOTE_ALL),
    "header": written([["file", "class"], *rows_of(LOOSE)]),
    "more columns": written([[*row, "0.9"] for row in rows_of(LOOSE)]),
    "a title": written(
        [
            ["image", "x", "label"],
            *([name, "owl", label] for name, label in rows_of(LOOSE)),
        ]
    ),
    "in folders": written(
        [[f"some/val/{name}", label] for name, label in rows_of(LOOSE)]
    ),
    "stems": written(
        [[name.removesuffix(".jpg"), label] for name, label in rows_of(LOOSE)]
    ),
    "twice": written([*rows_of(LOOSE), *rows_of(LOOSE)]),
    "lines of Windows": "\ufeff" + written(rows_of(LOOSE)).replace("\n", "\r\n"),
    "images that are not there": written([*rows_of(LOOSE), ["gone.jpg", "hen"]]),
}


@every(form=FORMS)
def test_a_list_gives_each_image_its_class(form, tmp_path):
    touch(tmp_path / "in", *(f"train/{number}/1.jpg" for number in range(3)))
    touch(tmp_path / "in/val", *LOOSE)
    (tmp_path / "list").write_bytes(FORMS[form].encode())
    rows = inputs(tmp_path / "in", val_labels=str(tmp_path / "list"))
    found = {Path(row.path).name: row.class_name for row in rows if row.split == "val"}
    assert found == dict(rows_of(LOOSE))


def test_a_full_name_goes_before_a_stem(tmp_path):
    touch(tmp_path / "in", "train/hen/1.jpg", "val/a.jpg", "val/a.jpg.png")
    (tmp_path / "list").write_text("a.jpg.png,owl\na.jpg,hen\n")
    rows = inputs(tmp_path / "in", val_labels=str(tmp_path / "list"))
    found = {Path(row.path).name: row.class_name for row in rows}
    assert found == {"1.jpg": "hen", "a.jpg": "hen", "a.jpg.png": "owl"}


@rows("""
- [lines, note]
- [['v_0.jpg,cat', 'gone.jpg,hen', 'v_9.jpg,hen'], 2 lines of source.val_labels name no]
- [['file,class', 'v_0.jpg,cat', 'v_9,hen'], 1 lines of source.val_labels name no image of]
- [['v_7.jpg,hen', 'v_9.jpg,hen', 'v_0.jpg,cat'], 2 lines of source.val_labels name no]
- [['file,class', 'v_0.jpg,cat'], '']
- [['v_0.jpg,cat'], '']
""")
def test_lines_that_name_no_image_are_counted(lines, note, tmp_path, capsys):
    touch(tmp_path / "in", "train/cat/1.jpg", "val/v_0.jpg")
    (tmp_path / "list").write_text("\n".join(lines))
    inputs(tmp_path / "in", val_labels=str(tmp_path / "list"))
    printed = capsys.readouterr().out
    assert note in printed and printed.count("\n") == bool(note)
    assert not note or "'v_9" in printed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a.jpg,cat\nb.jpg,dog\na.jpg,dog\n",
            "list:3: 'a.jpg' has another class than in line 1",
        ),
        ("a.jpg,cat\nb.jpg,great, white\n", "list:2: 3 values instead of 2"),
        ("a.jpg,cat\nb.jpg\n", "list:2: 1 values instead of 2"),
        ("a.jpg,0,1\nb.jpg,1,0\n", "list:1: which of these is the class?"),
        (
            "image,species,fold\na.jpg,cat,x\nb.jpg,dog,y\n",
            "Line 1 has no title equal to source.label",
        ),
        ("cat\n", "with 1 lines names no image of the 2"),
        ("class\ncat\ndog\n", "with 3 lines names no image"),
    ],
)
def test_a_list_that_fits_no_form_is_refused(text, message, tmp_path):
    touch(
        tmp_path / "in", "train/cat/1.jpg", "train/dog/1.jpg", "val/a.jpg", "val/b.jpg"
    )
    (tmp_path / "list").write_text(text)
    with refused(re.escape(message)):
        inputs(tmp_path / "in", val_labels=str(tmp_path / "list"))


@every(text=["a.jpg,cat\nb.jpg,dog\n", "cat\ndog\n"])
def test_a_line_is_for_one_image(text, tmp_path):
    names = [f"{split}/{name}.jpg" for split in ("test", "val") for name in "ab"]
    touch(tmp_path / "in", "train/cat/1.jpg", "train/dog/1.jpg", *names)
    (tmp_path / "list").write_text(text)
    with refused("list:1: fits an image of another split"):
        inputs(tmp_path / "in", val_labels=str(tmp_path / "list"))
    # The folders tell them apart.
    expected = dict(zip(names, ["cat", "dog", "dog", "cat"], strict=True))
    (tmp_path / "list").write_text(
        written([["x/" + name, expected[name]] for name in names])
    )
    rows = inputs(tmp_path / "in", val_labels=str(tmp_path / "list"))
    assert {
        row.path: row.class_name for row in rows if row.split != "train"
    } == expected


@pytest.mark.parametrize(
    ("names", "is_certain"),
    [
        (["v_0.jpg", "v_1.jpg", "v_2.jpg"], True),
        (["ILSVRC2012_val_00000009.JPEG", "ILSVRC2012_val_00000010.JPEG"], True),
        ([f"{number}.jpg" for number in range(1, 13)], False),
        (["a.jpg", "B.jpg"], False),
        (["v9.jpg", "v10.jpg"], False),
    ],
)
def test_classes_alone_need_names_with_one_order(names, is_certain, tmp_path):
    touch(tmp_path / "in", "train/a b/1.jpg", *(f"val/{name}" for name in names))
    labels = [f"class, {number}" for number in range(len(names))]
    (tmp_path / "list").write_text("\n".join(labels) + "\n")
    if not is_certain:
        with refused("the images have no certain order"):
            inputs(tmp_path / "in", val_labels=str(tmp_path / "list"))
        return
    rows = inputs(tmp_path / "in", val_labels=str(tmp_path / "list"))
    found = {Path(row.path).name: row.class_name for row in rows if row.split == "val"}
    assert found == dict(zip(sorted(names), labels, strict=True))


# ---- bytes of text files -------------------------------------------------------------------------


@every(mark=["", "\ufeff"], ends=["\n", "\r\n", "\r"])
def test_marks_and_ends_of_lines_are_no_part_of_names(ends, mark, tmp_path):
    def file(name: str, *lines: str) -> str:
        (tmp_path / name).write_bytes((mark + ends.join([*lines, ""])).encode())
        return str(tmp_path / name)

    assert load_space(file("space.txt", "great owl", "hen\x85", "ant")) == (
        "great owl",
        "hen\x85",
        "ant",
    )
    assert read_map(file("map.csv", "cat,animal", '"a, b",c')) == {
        "cat": "animal",
        "a, b": "c",
    }
    assert read_text(file("keys.txt", "a", "b"), where="x") == "a\nb\n"
    assert read_cells(file("x", "a;b", "", "c;d"), ";", where="x") == [
        (1, ["a", "b"]),
        (3, ["c", "d"]),
    ]
    touch(tmp_path, "0.jpg", "1.jpg")
    table = file("t.csv", "image,label", "0.jpg,cat", "1.jpg,dog")
    rows = inputs(Path(table), kind="path_table")
    assert [row.class_name for row in rows] == ["cat", "dog"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("caf\xe9\nb\n".encode("latin1"), r"is not UTF-8 \(byte 3\), in line 1"),
        (b"a\nb\xff\n", r"is not UTF-8 \(byte 3\), in line 2"),
        ("a\nb\n".encode("utf-16"), "is UTF-16, not UTF-8"),
        ("a\nb\n".encode("utf-16-be"), r"has a NUL byte \(byte 0\)"),
        (b"a\nb\0\n", r"has a NUL byte \(byte 3\), in line 2"),
        (b"a\n\xed\xa0\x80\n", "is not UTF-8.*in line 2"),
    ],
)
def test_other_bytes_are_refused_with_their_line(data, message, tmp_path):
    (tmp_path / "file.csv").write_bytes(data)
    for read in (
        load_space,
        read_map,
        lambda file: read_text(file, where="data.only_keys"),
    ):
        with refused(message) as caught:
            read(str(tmp_path / "file.csv"))
        assert "file.csv" in caught.value.what and "save it as UTF-8" in (
            caught.value.next_step or ""
        )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            b"image,label\n0.jpg,a\n0.jpg,caf\xe9\n",
            r"t.csv/1: column 'label' is not UTF-8: 'caf\\\\xe9'",
        ),
        (
            b"image,label,split\n0.jpg,a,\xe9val\n",
            "t.csv/0: column 'split' is not UTF-8",
        ),
        (b"image,label,pr\xe9nom\n0.jpg,a,x\n", "t.csv' cannot be read: .*utf-8"),
        (
            "image,label\n0.jpg,a\n".encode("utf-16"),
            "t.csv' cannot be read: it is UTF-16",
        ),
        (
            "image,label\n0.jpg,a\n".encode("utf-16-le"),
            "t.csv' cannot be read: it is UTF-16",
        ),
        (b"image;label\n0.jpg;a;b\n", "Expected 2 columns, got 3"),
        (b"image|label\n0.jpg|a\n", "has no column 'image'"),
        (b"image,other\n0.jpg,a\n", "has no column 'label'"),
    ],
)
def test_tables_in_other_encodings_are_refused(data, message, tmp_path):
    (tmp_path / "t.csv").write_bytes(data)
    touch(tmp_path, "0.jpg")
    with refused(message):
        inputs(tmp_path / "t.csv", kind="path_table")


def test_what_needs_no_text_may_be_any_bytes(tmp_path):
    name = b"caf\xe9.jpg"
    touch(tmp_path, "0.jpg", "1.jpg", name.decode("utf-8", "surrogateescape"))
    (tmp_path / "t.csv").write_bytes(
        b"image,label,note\n" + name + b',a,"\xe9\n"\n0.jpg,b,\xff\n'
    )
    assert [row.reason for row in inputs(tmp_path / "t.csv", kind="path_table")] == [
        None,
        None,
    ]
    # Excel separates by semicolons where a comma is the decimal point.
    (tmp_path / "s.csv").write_text(
        "image;label;share\n0.jpg;great, white;0,5\n1.jpg;b;1\n"
    )
    found = [row.class_name for row in inputs(tmp_path / "s.csv", kind="path_table")]
    assert found == ["great, white", "b"]


def test_names_of_classes_that_cannot_be_stored_are_no_names(tmp_path):
    """A lone surrogate in the metadata of a Parquet file."""
    facts = '{"info": {"features": {"label": {"_type": "ClassLabel", "names": ["a\\ud800", "b"]}}}}'
    table = pa.table({"image": [b"x"], "label": [0]})
    pq.write_table(
        table.replace_schema_metadata({"huggingface": facts}), tmp_path / "a.parquet"
    )
    (row,) = inputs(tmp_path, kind="parquet")
    assert row.class_name == "0"
