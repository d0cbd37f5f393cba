"""Names of splits, lists of classes, and text files as programs of all systems write them."""

import csv
import io
import os
from functools import partial
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.sources.protocol import Input
from data_prep.steps.labels import load_space, read_map
from data_prep.steps.list_inputs import CONTAINERS, read_containers
from data_prep.steps.tars import list_tars
from data_prep.steps.work import WorkFolder
from tests.support.corpora.external_tars import write_tars
from tests.support.corpora.image_corpus import run_of
from tests.support.corpora.sources import listed, opened, touch
from tests.support.tables import every, lines, refused, rows
from vitscale.config.text_files import read_cells, read_text
from vitscale.runs.data_prep import SourceSettings


def inputs(path, *, kind="image_folder", values="name", **options):
    """values: of the settings of labels."""
    return listed(opened(kind, path, {"values": values}, **options))


# ---- folders that are splits ---------------------------------------------------------------------


def classes_of(rows: list[Input]):
    return {row.class_name for row in rows}


# Names of folders, and their splits.
@lines("""
folders|splits
Training Testing|test train
train dev|train val
TRAIN Valid|train val
train eval|test train
train validation evaluation|test train val
train holdout|test train
train|train
""")
def test_folders_named_by_keywords_are_splits(folders, splits, tmp_path):
    for name in folders.split():
        touch(tmp_path, f"{name}/cat/1.jpg", f"{name}/dog/1.jpg")
    # What a tool leaves there has no part in it.
    touch(tmp_path, ".cache/x/3.jpg")
    assert classes_of(inputs(tmp_path)) == {"cat", "dog"}

    # Splits are found in folders without labels, too.
    for values in ("name", "none"):
        of_rows = {row.split for row in inputs(tmp_path, values=values)}
        assert sorted(of_rows) == splits.split()


# Keywords with something else beside or in them: each name may as well be a class.
@lines("""
names
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
""")
def test_folders_that_may_be_splits_are_refused_with_both_readings(names, tmp_path):
    folders = names.split()

    # These have images and no class folders, so as splits they would be empty.
    flat = {"preview", "annotations", *"abcde"} & {*folders}
    for name in folders:
        if name in flat:
            touch(tmp_path, f"{name}/1.jpg")
        else:
            touch(tmp_path, f"{name}/cat/1.jpg", f"{name}/dog/2.jpg")

    with refused("named like splits") as caught:
        inputs(tmp_path)
    advice = caught.value.next_step
    assert "if they are splits" in advice
    assert "'source.splits={train: .}'" in advice
    assert folders[0] in caught.value.what

    # The advice works, in both readings.
    assert classes_of(inputs(tmp_path, splits={"train": "."})) == {*folders}
    splits = {f"s_{name}": name for name in {*folders} - flat}

    assert classes_of(inputs(tmp_path, splits=splits)) == {"cat", "dog"}


# A keyword alone among classes, and names that only contain the letters of one.
@lines("""
folders
train bus aeroplane bicycle tiger
valid invalid
steam_train bullet_train
developed undeveloped
train test_tube cat dog hen owl
strain valley device contest a b c d e
""")
def test_classes_may_be_called_like_splits(folders, tmp_path):
    names = folders.split()
    touch(tmp_path, *(f"{name}/1.jpg" for name in names))
    assert classes_of(inputs(tmp_path)) == {*names}


# Files as the Hugging Face hub numbers them, and a keyword in the middle.
SPLIT_OF = {
    "train-00000-of-00002": "train",
    "train-00001-of-00002": "train",
    "validation-00000-of-00001": "val",
    "x_test_0": "test",
}


@rows("[[kind, folder], [parquet, .], [webdataset, tars]]")
def test_files_named_by_keywords_are_splits(kind, folder, tmp_path):
    table = pa.table({"image": [b"x"], "label": ["a"]})
    for name in SPLIT_OF:
        pq.write_table(table, tmp_path / f"{name}.parquet")
        write_tars(tmp_path / "tars", {f"{name}.tar": {"0.jpg": b"x", "0.cls": b"a"}})
    rows = inputs(tmp_path / folder, kind=kind)
    splits = {}
    for row in rows:
        file = Path(row.path).parts[0]
        splits[file.partition(".")[0]] = row.split
    assert splits == SPLIT_OF


# Names of tars, and their splits; none: refused.
@lines("""
names|splits
trainval-000 test-000|
train_val-0 test-0|
trainset-0 testset-0|
imgs_trainA imgs_testA|
trn-0 tst-0|
train-0 test-0 extra-0 extra-1 extra-2|
train-0 more|
val-0 part-0|
val-0 test-0|
Training PublicTest PrivateTest|
train-0 minival-0|
x-val-0 x-val-1|train train
trainval-0 trainval-1|train train
00000 00001|train train
valley-0 contest-0 developer-0|train train train
valley-train-0 valley-TEST-0 valley-train-1|train test train
train2017-0 val2017-0 dev-0|train val val
""")
@every(place="folder, bucket")
def test_files_are_splits_one_split_or_refused(names, splits, place, tmp_path):
    tars = touch(tmp_path, *(f"{name}.tar" for name in names.split()))
    work = WorkFolder(run_of(tars, tmp_path / "out"))
    work.scratch.mkdir(parents=True)

    def splits_of_files(**settings):
        path = tars if place == "folder" else "s3://bucket/tars"
        source = SourceSettings(kind="webdataset", path=str(path), **settings)
        work.run = work.run.model_copy(update={"source": source})

        # Only the listing of the bucket is made up.
        names_below = mock.Mock(return_value=os.listdir(tars))
        with mock.patch("data_prep.steps.tars.names_below", names_below):
            list_tars(work, CONTAINERS)
        listed = {box.path: box.split for box in read_containers(work)}
        return " ".join(listed[f"{name}.tar"] for name in names.split())

    if splits:
        assert splits_of_files() == splits
        return
    with refused("named like splits.*\n.*if they are splits") as caught:
        splits_of_files()

    # The advice works: all files are of one split.
    assert """source.splits={train: "*"}""" in caught.value.text()
    assert set(splits_of_files(splits={"train": "*"}).split()) == {"train"}


def test_spellings_of_splits_in_a_table_are_one_split(tmp_path):
    # Every spelling of the three splits; other names stay splits of their own.
    spelled = (
        "Train TRAIN training train Valid validation Testing extra dev EVAL holdout"
    )
    splits = "train train train train val val test extra val test test"
    table = ["image,label,split"]
    for number, name in enumerate(spelled.split()):
        touch(tmp_path, f"{number}.jpg")
        table.append(f"{number}.jpg,a,{name}")
    (tmp_path / "t.csv").write_text("\n".join(table))
    rows = inputs(tmp_path / "t.csv", kind="path_table")
    assert [row.split for row in rows] == splits.split()


# ---- lists of the classes of loose images --------------------------------------------------------

CLASSES = ["great gray owl", "hen", 'x "y", z']


def written(rows, **how):
    """Write rows with the standard library's csv, quoted where they need it."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n", **how).writerows(rows)
    return file.getvalue()


# Names with blanks, a comma and brackets, which separate columns in some lists.
LOOSE = ["v_0.jpg", "v_1.jpg", "img 2.jpg", "img,3.jpg", "v(4).jpg"]
CLASS_OF = {name: CLASSES[number % 3] for number, name in enumerate(LOOSE)}
PAIRS = [[name, label] for name, label in CLASS_OF.items()]
TITLED = [[name, "owl", label] for name, label in PAIRS]
FORMS = {
    "comma": written(PAIRS),
    "semicolon": written(PAIRS, delimiter=";"),
    "tab": written(PAIRS, delimiter="\t"),
    "blanks": written(PAIRS, delimiter="\t").replace("\t", " \t"),
    "bar": written(PAIRS, delimiter="|"),
    "colon": written(PAIRS, delimiter=":"),
    "all quoted": written(PAIRS, quoting=csv.QUOTE_ALL),
    "header": "file,class\n" + written(PAIRS),
    "more columns": written([[*pair, "0.9"] for pair in PAIRS]),
    "a title": "image,x,label\n" + written(TITLED),
    "in folders": written([[f"some/val/{name}", label] for name, label in PAIRS]),
    "stems": written([[name.removesuffix(".jpg"), label] for name, label in PAIRS]),
    # Lists of larger sets, of other systems, and with repetitions.
    "twice": written(PAIRS) * 2,
    "lines of Windows": "\ufeff" + written(PAIRS).replace("\n", "\r\n"),
    "images that are not there": written(PAIRS) + "gone.jpg,hen\n",
}


def listed_classes(tmp_path, text):
    """The class of each image of val, by a list of this text."""
    listing = tmp_path / "list"
    listing.write_bytes(text.encode())
    rows = inputs(tmp_path / "in", val_labels=str(listing))
    return {Path(row.path).name: row.class_name for row in rows if row.split == "val"}


@every(form=FORMS)
def test_a_list_gives_each_image_its_class(form, tmp_path):
    # The class of each image of train; `val` has the loose ones.
    touch(tmp_path / "in", *(f"train/{number}/1.jpg" for number in range(3)))
    touch(tmp_path / "in/val", *LOOSE)
    assert listed_classes(tmp_path, FORMS[form]) == CLASS_OF


def test_a_full_name_goes_before_a_stem(tmp_path):
    touch(tmp_path / "in", "train/hen/1.jpg", "val/a.jpg", "val/a.jpg.png")

    # "a.jpg" is also the stem of the other image.
    classes = listed_classes(tmp_path, "a.jpg.png,owl\na.jpg,hen\n")
    assert classes == {"a.jpg": "hen", "a.jpg.png": "owl"}


# In any place, with a title or without; the title itself does not count.
@rows(r"""
- [text, num]
- ["v_0.jpg,cat\ngone.jpg,hen\nv_9.jpg,hen", 2]
- ["file,class\nv_0.jpg,cat\nv_9,hen", 1]
- ["v_7.jpg,hen\nv_9.jpg,hen\nv_0.jpg,cat", 2]
- ["file,class\nv_0.jpg,cat", 0]
- ["v_0.jpg,cat", 0]
""")
def test_lines_that_name_no_image_are_counted(text, num, tmp_path, capsys):
    touch(tmp_path / "in", "train/cat/1.jpg", "val/v_0.jpg")
    listed_classes(tmp_path, text)
    printed = capsys.readouterr().out
    if num == 0:
        assert printed == ""
        return
    assert f"{num} lines of source.val_labels name no image of" in printed

    assert "'v_9" in printed
    # One line about all of them.
    assert printed.count("\n") == 1


# Two classes for an image; cells that do not fit; and a class that no column is certain to hold.
@rows(r"""
- [text, message]
- ["a.jpg,cat\nb.jpg,dog\na.jpg,dog\n", "list:3: 'a.jpg' has another class than in line 1"]
- ["a.jpg,cat\nb.jpg,great, white\n", "list:2: 3 values instead of 2"]
- ["a.jpg,cat\nb.jpg\n", "list:2: 1 values instead of 2"]
- ["a.jpg,0,1\nb.jpg,1,0\n", "list:1: which of these is the class\\?"]
- ["image,species,fold\na.jpg,cat,x\nb.jpg,dog,y\n", Line 1 has no title equal to source.label]
- ["cat\n", with 1 lines names no image of the 2]
- ["class\ncat\ndog\n", with 3 lines names no image]
""")
def test_a_list_that_fits_no_form_is_refused(text, message, tmp_path):
    names = "train/cat/1.jpg train/dog/1.jpg val/a.jpg val/b.jpg"
    touch(tmp_path / "in", *names.split())
    with refused(message):
        listed_classes(tmp_path, text)


@every(text=["a.jpg,cat\nb.jpg,dog\n", "cat\ndog\n"])
# Both splits have an a.jpg and a b.jpg, and the line does not say which it means.
def test_a_line_is_for_one_image(text, tmp_path):
    names = [f"{split}/{name}.jpg" for split in ("test", "val") for name in "ab"]
    touch(tmp_path / "in", "train/cat/1.jpg", "train/dog/1.jpg", *names)
    with refused("list:1: fits an image of another split"):
        listed_classes(tmp_path, text)

    # The folders tell them apart.
    expected = dict(zip(names, "cat dog dog cat".split(), strict=True))
    listing = tmp_path / "list"
    listing.write_text(written([["x/" + name, expected[name]] for name in names]))
    rows = inputs(tmp_path / "in", val_labels=str(listing))
    classes = {row.path: row.class_name for row in rows if row.split != "train"}
    assert classes == expected


# By text and by number the order must be the same; capitals are sorted differently by programs.
@rows("""
- [names, is_certain]
- [v_0.jpg v_1.jpg v_2.jpg, true]
- [ILSVRC2012_val_00000009.JPEG ILSVRC2012_val_00000010.JPEG, true]
- [1.jpg 2.jpg 3.jpg 4.jpg 5.jpg 6.jpg 7.jpg 8.jpg 9.jpg 10.jpg 11.jpg 12.jpg, false]
- [a.jpg B.jpg, false]
- [v9.jpg v10.jpg, false]
""")
def test_classes_alone_need_names_with_one_order(names, is_certain, tmp_path):
    files = names.split()
    touch(tmp_path / "in", "train/a b/1.jpg", *(f"val/{name}" for name in files))

    # Commas inside the names of classes do not make columns.
    labels = [f"class, {number}" for number in range(len(files))]
    text = "\n".join([*labels, ""])
    if is_certain:
        expected = dict(zip(sorted(files), labels, strict=True))
        assert listed_classes(tmp_path, text) == expected
        return
    with refused("the images have no certain order"):
        listed_classes(tmp_path, text)


# ---- bytes of text files -------------------------------------------------------------------------


@every(mark=["", "\ufeff"], ends=["\n", "\r\n", "\r"])
def test_marks_and_ends_of_lines_are_no_part_of_names(ends, mark, tmp_path):
    def file(name, *lines):
        text = mark + ends.join([*lines, ""])
        path = tmp_path / name
        path.write_bytes(text.encode())
        return str(path)

    # \x85 ends a line for Python, and nowhere else.
    names = ("great owl", "hen\x85", "ant")
    assert load_space(file("space.txt", *names)) == names
    mapped = read_map(file("map.csv", "cat,animal", '"a, b",c'))
    assert mapped == {"cat": "animal", "a, b": "c"}
    assert read_text(file("keys.txt", "a", "b"), where="x") == "a\nb\n"

    # Lines are numbered as in the file, empty ones included.
    cells = read_cells(file("x", "a;b", "", "c;d"), ";", where="x")
    assert cells == [(1, ["a", "b"]), (3, ["c", "d"])]

    touch(tmp_path, "0.jpg", "1.jpg")
    table = file("t.csv", "image,label", "0.jpg,cat", "1.jpg,dog")
    rows = inputs(Path(table), kind="path_table")
    assert [row.class_name for row in rows] == ["cat", "dog"]


# Latin-1, a byte of no encoding, UTF-16 with and without its mark, NUL, half a surrogate pair.
@rows(r"""
- [text, encoding, message]
- ["caf\xe9\nb\n", latin1, 'is not UTF-8 \(byte 3\), in line 1']
- ["a\nb\xff\n", latin1, 'is not UTF-8 \(byte 3\), in line 2']
- ["a\nb\n", utf-16, "is UTF-16, not UTF-8"]
- ["a\nb\n", utf-16-be, 'has a NUL byte \(byte 0\)']
- ["a\nb\0\n", latin1, 'has a NUL byte \(byte 3\), in line 2']
- ["a\n\xed\xa0\x80\n", latin1, is not UTF-8.*in line 2]
""")
def test_other_bytes_are_refused_with_their_line(text, encoding, message, tmp_path):
    file = tmp_path / "file.csv"
    file.write_bytes(text.encode(encoding))
    only_keys = partial(read_text, where="data.only_keys")
    for read in (load_space, read_map, only_keys):
        with refused(message) as caught:
            read(str(file))
        assert "file.csv" in caught.value.what
        assert "save it as UTF-8" in caught.value.next_step


# In a cell, in the name of a split, in a title; then other delimiters and missing columns.
@rows(r"""
- [encoding, text, message]
- - latin1
  - "image,label\n0.jpg,a\n0.jpg,caf\xe9\n"
  - "t.csv/1: column .label. is not UTF-8: .caf\\\\\\\\xe9."
- [latin1, "image,label,split\n0.jpg,a,\xe9val\n", "t.csv/0: column 'split' is not UTF-8"]
- [latin1, "image,label,pr\xe9nom\n0.jpg,a,x\n", "t.csv' cannot be read: .*utf-8"]
- [utf-16, "image,label\n0.jpg,a\n", "t.csv' cannot be read: it is UTF-16"]
- [utf-16-le, "image,label\n0.jpg,a\n", "t.csv' cannot be read: it is UTF-16"]
- [utf-8, "image;label\n0.jpg;a;b\n", "Expected 2 columns, got 3"]
- [utf-8, "image|label\n0.jpg|a\n", has no column 'image']
- [utf-8, "image,other\n0.jpg,a\n", has no column 'label']
""")
def test_tables_in_other_encodings_are_refused(encoding, text, message, tmp_path):
    (tmp_path / "t.csv").write_bytes(text.encode(encoding))
    touch(tmp_path, "0.jpg")
    with refused(message):
        inputs(tmp_path / "t.csv", kind="path_table")


def test_what_needs_no_text_may_be_any_bytes(tmp_path):
    name = b"caf\xe9.jpg"
    touch(tmp_path, "0.jpg", "1.jpg", os.fsdecode(name))
    table = tmp_path / "t.csv"

    # In the name of a file, and in a column that is not read.
    table.write_bytes(b"image,label,note\n" + name + b',a,"\xe9\n"\n0.jpg,b,\xff\n')
    rows = inputs(table, kind="path_table")
    assert [row.reason for row in rows] == [None] * 2

    # Excel separates by semicolons where a comma is the decimal point.
    table.write_text("image;label;share\n0.jpg;great, white;0,5\n1.jpg;b;1\n")
    rows = inputs(table, kind="path_table")
    assert [row.class_name for row in rows] == ["great, white", "b"]


def test_names_of_classes_that_cannot_be_stored_are_no_names(tmp_path):
    """A lone surrogate in the metadata of a Parquet file."""
    facts = '{"info": {"features": {"label": {"_type": "ClassLabel", "names": ["a\\ud800", "b"]}}}}'
    table = pa.table({"image": [b"x"], "label": [0]})
    table = table.replace_schema_metadata({"huggingface": facts})
    pq.write_table(table, tmp_path / "a.parquet")

    # The number of the class is left.
    (row,) = inputs(tmp_path, kind="parquet")
    assert row.class_name == "0"
